"""The attention kernel itself, from items down to the score and value tiles. See ``attention.py``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from tvm import tirx

from ..epilogue.program import EpilogueProgram, Kind
from ..epilogue.tir import STORAGE, Evaluator, Place, cast
from ..schedule.attention import AttentionSchedule
from .body import Body, Buffer, Expr, external, f32, index, load, ramp, widen
from .intrinsics import exp_of_negative, select

_LOWEST = -3.4028234663852886e38


@dataclass(frozen=True)
class AttentionShape:
    """What an attention kernel is generic over: everything but the numbers of heads, queries and keys.

    ``program`` is over the transposed tile (keys × queries); ``varies``: whether each operand varies over the keys. ``group``: how many
    heads share their keys and values.
    """

    program: EpilogueProgram
    depth: int
    columns: int
    guard: bool
    schedule: AttentionSchedule
    varies: tuple[bool, ...]
    group: int = 1

    @cached_property
    def per_query(self) -> tuple[str, ...]:
        """Operands with one value a query: read once an item."""
        return tuple(p.name for p in self.program.params[1:] if p.kind is Kind.COL)

    @cached_property
    def layout(self) -> dict[str, int]:
        """Where each array lies in the thread's scratch, in float32; ``end`` is its size."""
        s = self.schedule
        sizes = {
            "q": self.depth * s.queries,
            "p": (s.keys + s.key_rows - 1) * s.queries,
            "max": s.queries,
            "new_max": s.queries,
            "sum": s.queries,
            "correction": s.queries,
            "operands": len(self.per_query) * s.queries,
            "out": s.queries * self.columns,
        }
        starts, at = {}, 0
        for name, size in sizes.items():
            starts[name] = at
            at += size
        return {**starts, "end": at}

    @property
    def scratch(self) -> int:
        """float32 of scratch."""
        return self.layout["end"]


class AttentionKernel:
    """The writing of one kernel. Scratch arrays are ``[…, queries of the item]``, out is ``[queries, columns]``."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self.schedule = shape.schedule
        self.body = Body()
        self.q, self.k, self.v, self.out = (external(n) for n in ("q", "k", "v", "out"))
        params = shape.program.params[1:]
        self.operands = {p.name: external(p.name, STORAGE[p.dtype]) for p in params}
        self.varies = dict(zip(self.operands, shape.varies, strict=True))
        self.scratch = external("scratch")
        self.heads, self.queries, self.keys, self.begin, self.end = (
            tirx.Var(n, "int64") for n in ("heads", "queries", "keys", "begin", "end")
        )
        self.strides = {
            name: [tirx.Var(f"{name}_{axis}", "int64") for axis in ("batch", "head", "query")] for name in self.operands
        }
        self.bases: dict[str, Expr] = {}

    def items(self, symbol: str) -> tirx.PrimFunc:
        """The kernel."""
        body, s = self.body, self.schedule
        with body.loop(self.begin, self.end, "item") as item:
            blocks = body.let(tirx.floordiv(self.queries + (s.queries - 1), index(s.queries)), "blocks")
            self.pair = body.let(tirx.floordiv(item, blocks), "pair")
            self.batch = body.let(tirx.floordiv(self.pair, self.heads), "batch")
            self.head = body.let(self.pair - self.batch * self.heads, "head")
            self.shared = body.let(tirx.floordiv(self.pair, index(self.shape.group)), "shared")
            self.first = body.let((item - self.pair * blocks) * s.queries, "first")
            self.count = body.let(tirx.min(self.queries - self.first, index(s.queries)), "count")
            self.vectors = body.let(tirx.floordiv(self.count + (s.lanes - 1), index(s.lanes)), "vectors")
            for name, (batch, head, _) in self.strides.items():
                self.bases[name] = body.let(self.batch * batch + self.head * head, f"{name}_base")
            self._start()
            with body.loop(0, tirx.floordiv(self.keys + (s.keys - 1), index(s.keys)), "block") as block:
                first = body.let(block * s.keys, "first_key")
                count = body.let(tirx.min(self.keys - first, index(s.keys)), "key_count")
                self._scores(first, count)
                self._probabilities(count)
                self._values(first, count)
            self._finish()
        strides = [v for row in self.strides.values() for v in row]
        buffers = [self.q, self.k, self.v, *self.operands.values(), self.out, self.scratch]
        sizes = [self.heads, self.queries, self.keys, *strides, self.begin, self.end]
        return body.function(symbol, [*buffers, *sizes])

    def _at(self, array: str, offset: Expr | int) -> Expr:
        return index(self.shape.layout[array]) + offset

    def _query_rows(self, vector: Expr) -> Expr:
        """The numbers of a vector's queries, those beyond the last one replaced by it."""
        at = ramp(self.first + vector * self.schedule.lanes, self.schedule.lanes)
        return tirx.min(at, widen(self.queries - 1, self.schedule.lanes))

    def _start(self) -> None:
        """Packs the queries, ``[depth, queries]``, reads what varies by query, and clears the running results."""
        body, s, depth = self.body, self.schedule, self.shape.depth
        with body.loop(0, self.vectors, "vector") as vector:
            rows = body.let(
                (self._query_rows(vector) + widen(self.pair * self.queries, s.lanes)) * index(depth), "rows"
            )
            with body.loop(0, depth, "d") as d:
                gathered = tirx.BufferLoad(self.q, [rows + widen(d, s.lanes)])
                body.store(self.scratch, self._at("q", d * s.queries + vector * s.lanes), gathered)
            for slot, name in enumerate(self.shape.per_query):
                stride = self.strides[name][2]
                at = self._query_rows(vector) * widen(stride, s.lanes) + widen(self.bases[name], s.lanes)
                value = cast(tirx.BufferLoad(self.operands[name], [at]), "f32")
                body.store(self.scratch, self._at("operands", slot * s.queries + vector * s.lanes), value)
            for array, value in (("max", -math.inf), ("new_max", -math.inf), ("sum", 0.0)):
                body.store(self.scratch, self._at(array, vector * s.lanes), widen(f32(value), s.lanes))
        with body.loop(0, self.count, "row") as row, body.loop(0, self.shape.columns, "column") as column:
            body.store(self.scratch, self._at("out", row * self.shape.columns + column), f32(0))

    def _scores(self, first: Expr, count: Expr) -> None:
        """The block's scores, ``p [keys, queries]``, and the queries' running maxima, ``new_max``."""
        body, s = self.body, self.schedule
        done = index(0)
        for vectors in (s.query_vectors >> i for i in range(s.query_vectors.bit_length())):
            panels = body.let(tirx.floordiv(self.vectors - done, index(vectors)), "panels")
            with body.loop(0, panels, "panel") as panel:
                self._score_panel(first, count, done + panel * vectors, vectors)
            done = body.let(done + panels * vectors, "done")

    def _score_panel(self, first: Expr, count: Expr, vector: Expr, vectors: int) -> None:
        body, rows = self.body, self.schedule.key_rows
        tiles = body.let(tirx.floordiv(count, index(rows)), "tiles")
        with body.loop(0, tiles, "tile") as tile:
            self._score_tile(first, tile * rows, vector, vectors)
        rest = body.let(count - tiles * rows, "rest")
        with body.when(rest > index(0)):
            self._score_tile(first, tiles * rows, vector, vectors, rest)

    def _score_tile(self, first: Expr, offset: Expr, vector: Expr, vectors: int, rest: Expr | None = None) -> None:
        """The scores of the keys from ``first + offset`` on; of the last ``rest`` keys, with the last one repeated."""
        body, s, depth = self.body, self.schedule, self.shape.depth
        rows = s.key_rows
        acc = {Place(i, 0, j): body.alloc(s.lanes, name="acc") for i in range(rows) for j in range(vectors)}
        for a in acc.values():
            body.store(a, 0, widen(f32(0), s.lanes))
        key = body.let(first + offset, "key")
        keys = [key + i if rest is None else body.let(tirx.min(key + i, self.keys - 1), "key") for i in range(rows)]
        head = body.let(self.shared * self.keys, "head_start")
        start = body.let((head + key) * depth, "start")
        starts = [
            start + i * depth if rest is None else body.let((head + k) * depth, "start") for i, k in enumerate(keys)
        ]
        column = body.let(vector * s.lanes, "column")
        with body.loop(0, depth, "d") as d:
            queries = [
                body.let(load(self.scratch, self._at("q", d * s.queries + column + j * s.lanes), s.lanes), "q")
                for j in range(vectors)
            ]
            for i in range(rows):
                k = body.let(load(self.k, starts[i] + d), "k")
                for j, q in enumerate(queries):
                    a = acc[Place(i, 0, j)]
                    body.store(a, 0, load(a, 0, s.lanes) + widen(k, s.lanes) * q)
        values = Evaluator(self.shape.program, body, lambda name, place: self._leaf(name, place, acc, keys, vector))
        output = self.shape.program.outputs[0].value
        for j in range(vectors):
            at = body.let(self._at("new_max", column + j * s.lanes), "at")
            largest = load(self.scratch, at, s.lanes)
            for i in range(rows):
                score = body.let(cast(values.value(output, Place(i, 0, j)), "f32"), "score")
                body.store(self.scratch, self._at("p", (offset + i) * s.queries + column + j * s.lanes), score)
                if rest is not None and i:
                    score = select(widen(rest > index(i), s.lanes), score, -math.inf)
                largest = body.let(tirx.Select(score > largest, score, largest), "largest")
            body.store(self.scratch, at, largest)

    def _leaf(self, name: str, place: Place, acc: dict[Place, Buffer], keys: list[Expr], vector: Expr) -> Expr | None:
        program, count = self.shape.program, self.schedule.lanes
        if name == program.params[0].name:
            return load(acc[place], 0, count)
        if name not in self.operands:
            return None
        if name in self.shape.per_query:
            slot = self.shape.per_query.index(name)
            column = (vector + place.part) * count
            value = load(self.scratch, self._at("operands", slot * self.schedule.queries + column), count)
            return cast(value, program.param(name).dtype)
        at = self.bases[name] + (keys[place.row] if self.varies[name] else 0)
        if program.param(name).kind is not Kind.TILE:
            return load(self.operands[name], at)
        rows = self._query_rows(vector + place.part) * widen(self.strides[name][2], count)
        return tirx.BufferLoad(self.operands[name], [rows + widen(at, count)])

    def _probabilities(self, count: Expr) -> None:
        """Scores to unnormalised probabilities, the running sum, and by what the earlier blocks' results shrink."""
        body, s = self.body, self.schedule
        with body.loop(0, self.vectors, "vector") as vector:
            column = body.let(vector * s.lanes, "column")
            old = body.let(load(self.scratch, self._at("max", column), s.lanes), "old")
            new = body.let(load(self.scratch, self._at("new_max", column), s.lanes), "new")
            # A row of -inf so far: exp(-inf - 0) is 0, where -inf - -inf would be NaN.
            shift = body.let(select(new < f32(_LOWEST), 0.0, new), "shift")
            correction = body.let(exp_of_negative(old - shift), "correction")
            body.store(self.scratch, self._at("max", column), new)
            body.store(self.scratch, self._at("correction", column), correction)
            total = body.alloc(s.lanes, name="total")
            body.store(total, 0, load(self.scratch, self._at("sum", column), s.lanes) * correction)
            with body.loop(0, count, "key") as key:
                at = body.let(self._at("p", key * s.queries + column), "at")
                p = body.let(exp_of_negative(load(self.scratch, at, s.lanes) - shift), "p")
                body.store(self.scratch, at, p)
                body.store(total, 0, load(total, 0, s.lanes) + p)
            body.store(self.scratch, self._at("sum", column), load(total, 0, s.lanes))

    def _values(self, first: Expr, count: Expr) -> None:
        """``out = out · correction + pᵀ v`` for the block's keys."""
        body, s, columns = self.body, self.schedule, self.shape.columns
        width = s.value_vectors * s.lanes
        tiles = tirx.floordiv(self.count + (s.value_rows - 1), index(s.value_rows))
        start = body.let((self.shared * self.keys + first) * columns, "v_start")
        with body.loop(0, tiles, "tile") as tile:
            row = body.let(tile * s.value_rows, "row")
            with body.loop(0, columns // width, "panel") as panel:
                self._value_tile(row, start, count, panel * width, width)
            if columns % width:
                self._value_tile(row, start, count, index(columns // width * width), columns % width)

    def _value_tile(self, row: Expr, start: Expr, count: Expr, column: Expr, width: int) -> None:
        body, s, columns = self.body, self.schedule, self.shape.columns
        pieces = [(at, min(s.lanes, width - at)) for at in range(0, width, s.lanes)]
        acc: dict[tuple[int, int], Buffer] = {}
        for i in range(s.value_rows):
            correction = body.let(load(self.scratch, self._at("correction", row + i)), "correction")
            for at, n in pieces:
                a = acc[i, at] = body.alloc(n, name="acc")
                before = load(self.scratch, self._at("out", (row + i) * columns + column + at), n)
                body.store(a, 0, before * widen(correction, n))
        with body.loop(0, count, "key") as key:
            values = [body.let(load(self.v, start + key * columns + column + at, n), "v") for at, n in pieces]
            for i in range(s.value_rows):
                p = body.let(load(self.scratch, self._at("p", key * s.queries + row + i)), "p")
                for (at, n), v in zip(pieces, values, strict=True):
                    body.store(acc[i, at], 0, load(acc[i, at], 0, n) + widen(p, n) * v)
        for i in range(s.value_rows):
            for at, n in pieces:
                target = self._at("out", (row + i) * columns + column + at)
                body.store(self.scratch, target, load(acc[i, at], 0, n))

    def _finish(self) -> None:
        """Divides by the sums and stores the rows."""
        body, s, columns = self.body, self.schedule, self.shape.columns
        with body.loop(0, self.count, "row") as row:
            total = body.let(load(self.scratch, self._at("sum", row)), "total")
            inverse = body.let(f32(1) / total, "inverse")
            # With no keys at all the product over them is 0.
            keep = total > f32(0) if self.shape.guard else self.keys > index(0)
            target = (self.batch * self.queries + self.first + row) * self.heads + self.head
            target = body.let(target * columns, "target")
            for at in range(0, columns, s.lanes):
                n = min(s.lanes, columns - at)
                value = load(self.scratch, self._at("out", row * columns + at), n) * widen(inverse, n)
                body.store(self.out, target + at, tirx.Select(widen(keep, n), value, widen(f32(0), n)))
