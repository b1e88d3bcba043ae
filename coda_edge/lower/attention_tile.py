"""The attention kernel itself, from items down to the score and value tiles. See ``attention.py``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import TypeAlias

from tvm import tirx

from ..epilogue.program import EpilogueProgram, Kind
from ..epilogue.tir import STORAGE, Evaluator, Place, as_value, cast
from .attention_few import FewQueries
from .attention_shape import LOWEST, AttentionShape
from .body import Body, Buffer, Expr, external, f32, index, lanes, load, ramp, turned, widen
from .intrinsics import exp_of_negative, select

_SIDES = ("first", "last")


@dataclass(frozen=True)
class Keys:
    """Keys and values that lie together: number ``first`` to ``stop`` of all keys. ``row`` is the first one of this head's."""

    k: Buffer
    v: Buffer
    first: Expr
    stop: Expr
    k_row: Expr
    v_row: Expr


Visit: TypeAlias = Callable[[Keys, Expr, Expr], None]
"""What is done with a block of keys: where they lie, the first one, how many."""


@dataclass(frozen=True)
class _Tile:
    """A tile of scores: products, numbers of its keys, of which the block's first is ``first``, its place in the block.

    ``vectors`` of queries from number ``vector`` on. Of the last tile, ``rest`` keys are meant.
    """

    acc: dict[Place, Buffer]
    keys: list[Expr]
    first: Expr
    offset: Expr
    vector: Expr
    vectors: int
    rest: Expr | None


class AttentionKernel:
    """The writing of one kernel. Scratch arrays are ``[…, queries of the item]``, out is ``[queries, columns]``."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self.schedule = shape.schedule
        self.body = Body()
        self.q, self.k, self.v, self.out = (external(n) for n in ("q", "k", "v", "out"))
        self.past = [external(n) for n in ("past_k", "past_v")] if shape.past else []
        self.present = [external(n) for n in ("present_k", "present_v")] if shape.present else []
        self.operands = {p.name: external(p.name, STORAGE[p.dtype]) for p in shape.params}
        self.varies = dict(zip(self.operands, shape.varies, strict=True))
        self.read = {**self.operands, **({"sink": external("sink")} if shape.sink else {})}
        self.partials, self.scratch = external("partials"), external("scratch")
        self.heads, self.queries, self.keys, self.parts, self.begin, self.end = (
            tirx.Var(n, "int64") for n in ("heads", "queries", "keys", "parts", "begin", "end")
        )
        self.past_keys = tirx.Var("past_keys", "int64") if shape.past else index(0)
        axes = {name: ("batch", "head", "query", *(["turns"] if turns else [])) for name, turns in self._turns()}
        self.strides = {name: [tirx.Var(f"{name}_{axis}", "int64") for axis in axes[name]] for name in self.read}
        self.band_bounds = [
            tuple(tirx.Var(f"{side}{i}", "int64") if there else None for side, there in zip(_SIDES, band, strict=True))
            for i, band in enumerate(shape.bands)
        ]
        self.bases: dict[str, Expr] = {}

    def _turns(self) -> list[tuple[str, bool]]:
        repeated = self.shape.repeated or (False,) * len(self.read)
        return list(zip(self.read, repeated, strict=True))

    def items(self, symbol: str) -> tirx.PrimFunc:
        """The kernel."""
        few = self.shape.few
        if few:
            with self.body.when(self.queries <= index(few)):
                FewQueries(self).items()
        with self.body.when(self.queries > index(few) if few else True):
            self._many_queries()
        return self.body.function(symbol, self._params())

    def merge(self, symbol: str) -> tirx.PrimFunc:
        """The kernel that makes results of what parts of the keys gave to few queries."""
        FewQueries(self).merge()
        return self.body.function(symbol, self._params())

    def _params(self) -> list[Expr]:
        strides = [v for row in self.strides.values() for v in row]
        bounds = [v for band in self.band_bounds for v in band if v is not None]
        buffers = [self.q, self.k, self.v, *self.past, *self.read.values(), self.out, *self.present]
        past, few = [self.past_keys] if self.past else [], bool(self.shape.few)
        buffers += [self.partials, self.scratch] if few else [self.scratch]
        sizes = [self.heads, self.queries, self.keys, *past, *strides, *bounds, *([self.parts] if few else [])]
        return [*buffers, *sizes, self.begin, self.end]

    def _many_queries(self) -> None:
        """Items of a block of queries. Where later ones see more keys, early and late ones take turns, so that chunks cost alike."""
        body, s = self.body, self.schedule
        with body.loop(self.begin, self.end, "item") as item:
            blocks = tirx.floordiv(self.queries + (s.queries - 1), index(s.queries))
            blocks = body.let(tirx.max(blocks, index(1)) if self.present else blocks, "blocks")
            pair = body.let(tirx.floordiv(item, blocks), "pair")
            block = body.let(item - pair * blocks, "block")
            if self.shape.hiding:
                half = body.let(tirx.floordiv(block, index(2)), "half")
                block = body.let(tirx.Select((half * 2).equal(block), half, blocks - 1 - half), "block")
            first = body.let(block * s.queries, "first")
            self.place(pair, first, body.let(tirx.min(self.queries - first, index(s.queries)), "count"))
            self.vectors = body.let(tirx.floordiv(self.count + (s.lanes - 1), index(s.lanes)), "vectors")
            self.bases = {name: body.let(base, f"{name}_base") for name, base in self.bases_of(self.head).items()}
            self._start()
            if self.shape.probability is not None:
                self._attend_twice(self.shape.probability)
            else:
                self.attend(partial(self._give, self._probabilities_and_values), self.count, index(0), self.keys)
            self._finish()
            if self.present:
                owner = tirx.And(
                    first.equal(index(0)), tirx.floormod(self.head, index(self.shape.group)).equal(index(0))
                )
                with body.when(owner):
                    self.append(index(0), self.keys)

    def place(self, pair: Expr, first: Expr, count: Expr) -> None:
        """Says where an item is: batch entry and head, and ``count`` queries from ``first`` on."""
        self.pair, self.first, self.count = pair, first, count
        self.batch = self.body.let(tirx.floordiv(pair, self.heads), "batch")
        self.head = self.body.let(pair - self.batch * self.heads, "head")

    def bases_of(self, head: Expr) -> dict[str, Expr]:
        """Where the operands of a head of this batch entry begin."""
        bases = {}
        for name, (batch, step, _, *turns) in self.strides.items():
            entry = tirx.floormod(self.batch, turns[0]) if turns else self.batch
            bases[name] = entry * batch + head * step
        return bases

    def _head_of(self, tensor: str) -> Expr:
        """The number of this head in q, k or v."""
        pair = self.head if tensor in self.shape.shared else self.pair
        return pair if tensor == "q" else tirx.floordiv(pair, index(self.shape.group))

    def _segments(self) -> list[Keys]:
        """The keys in order, by where they lie."""
        rows = {t: self.body.let(self._head_of(t), f"{t}_head") for t in ("k", "v")}
        new = self.keys - self.past_keys if self.past else self.keys
        k, v = (self.body.let(rows[t] * new, f"{t}_row") for t in ("k", "v"))
        segment = Keys(self.k, self.v, self.past_keys, self.keys, k, v)
        if not self.past:
            return [segment]
        old_k, old_v = (self.body.let(rows[t] * self.past_keys, f"past_{t}_row") for t in ("k", "v"))
        return [Keys(self.past[0], self.past[1], index(0), self.past_keys, old_k, old_v), segment]

    def attend(self, visit: Visit, rows: Expr, start: Expr, stop: Expr) -> None:
        """``visit`` with blocks of keys ``start ≤ j < stop``, but for those that bands hide from every query of the item, unless one
        of the item's ``rows`` sees no other."""
        body = self.body
        last, firsts, lasts = self._begin()
        hiding = self.shape.hiding
        if not hiding:
            self._pass_over(visit, start, stop)
            return
        low = _most(tirx.max, index(0), [self.first + first for i, first in firsts if i in hiding])
        low = body.let(tirx.max(start, tirx.min(low, stop)), "low")
        high = _most(tirx.min, self.keys, [last + end + 1 for i, end in lasts if i in hiding])
        high = body.let(tirx.max(low, tirx.min(high, stop)), "high")
        if math.isinf(self.shape.threshold):
            self._pass_over(visit, low, high)
            return
        wanted = body.alloc(1, "int64", "wanted")
        body.store(wanted, 0, index(1))
        with body.loop(0, 3, "part") as part:
            with body.when(part.equal(index(1))):
                body.store(wanted, 0, index(0))
                with body.loop(0, rows, "row") as row:
                    seen = load(self.scratch, self.at("max", row)) > f32(self.shape.threshold)
                    with body.when(tirx.Not(seen)):
                        body.store(wanted, 0, index(1))
            first = tirx.Select(part < 1, low, tirx.Select(part < 2, start, high))
            end = tirx.Select(part < 1, high, tirx.Select(part < 2, low, stop))
            first = body.let(first, "start")
            self._pass_over(visit, first, body.let(tirx.Select(load(wanted, 0) > index(0), end, first), "stop"))

    def _begin(self) -> tuple[Expr, list[tuple[int, Expr]], list[tuple[int, Expr]]]:
        """Where keys lie, and those that all queries of the item see; the last query, and the bands' first and last bounds by number."""
        body = self.body
        self.segments = self._segments()
        last = body.let(self.first + self.count - 1, "last_query")
        firsts = [(i, first) for i, (first, _) in enumerate(self.band_bounds) if first is not None]
        lasts = [(i, end) for i, (_, end) in enumerate(self.band_bounds) if end is not None]
        if self.band_bounds:
            self.inner = (
                body.let(_most(tirx.max, index(0), [last + first for _, first in firsts]), "inner_first"),
                body.let(_most(tirx.min, self.keys, [self.first + end + 1 for _, end in lasts]), "inner_stop"),
            )
        return last, firsts, lasts

    def _attend_twice(self, program: EpilogueProgram) -> None:
        """Over all keys for their maxima and sums, then again for the values by ``program`` of their probabilities."""
        body, s = self.body, self.schedule
        self._begin()

        def sums(keys: Keys, first: Expr, count: Expr) -> None:
            self._probabilities(count)

        def values(keys: Keys, first: Expr, count: Expr) -> None:
            self._known_probabilities(program, count)
            self._values(keys, first, count)

        self._pass_over(partial(self._give, sums), index(0), self.keys)
        with body.loop(0, self.vectors, "vector") as vector:
            body.store(self.scratch, self.at("correction", vector * s.lanes), widen(f32(1), s.lanes))
        self._pass_over(partial(self._give, values), index(0), self.keys)

    def _give(self, then: Visit, keys: Keys, first: Expr, count: Expr) -> None:
        """The scores of a block, and what is done with them."""
        for slot, name in enumerate(self.shape.packed):
            self._pack_tile(slot, name, first, count)
        self._scores(keys, first, count)
        then(keys, first, count)

    def _probabilities_and_values(self, keys: Keys, first: Expr, count: Expr) -> None:
        self._probabilities(count)
        self._values(keys, first, count)

    def _pass_over(self, visit: Visit, start: Expr, stop: Expr) -> None:
        """``visit`` with blocks of the keys ``start ≤ j < stop``: where they lie, the first one, how many."""
        body, size = self.body, self.schedule.keys
        for keys in self.segments:
            low, high = start, stop
            if len(self.segments) > 1:
                low = body.let(tirx.max(start, keys.first), "from")
                high = body.let(tirx.min(stop, keys.stop), "to")
            blocks = body.let(tirx.floordiv(high - low + (size - 1), index(size)), "blocks")
            with body.loop(0, tirx.max(blocks, index(0)), "block") as block:
                first = body.let(low + block * size, "first_key")
                visit(keys, first, body.let(tirx.min(high - first, index(size)), "key_count"))

    def at(self, array: str, offset: Expr | int) -> Expr:
        return index(self.shape.layout[array]) + offset

    def _query_rows(self, vector: Expr) -> Expr:
        """The numbers of a vector's queries, those beyond the last one replaced by it."""
        at = ramp(self.first + vector * self.schedule.lanes, self.schedule.lanes)
        return tirx.min(at, widen(self.queries - 1, self.schedule.lanes))

    def _start(self) -> None:
        """Packs the queries, ``[depth, queries]``, reads what varies by query, and clears the running results."""
        body, s = self.body, self.schedule
        self._pack_queries()
        with body.loop(0, self.vectors, "vector") as vector:
            for slot, name in enumerate(self.shape.per_query):
                value = cast(self._per_query(name, vector), "f32")
                body.store(self.scratch, self.at("operands", slot * s.queries + vector * s.lanes), value)
            most, total = widen(f32(-math.inf), s.lanes), widen(f32(0), s.lanes)
            if self.shape.sink:
                most = body.let(self._per_query("sink", vector), "sink")
                total = select(most < f32(LOWEST), 0.0, widen(f32(1), s.lanes))
            for array, value in (("max", most), ("new_max", most), ("sum", total)):
                body.store(self.scratch, self.at(array, vector * s.lanes), value)
        with body.loop(0, self.count, "row") as row, body.loop(0, self.shape.columns, "column") as column:
            body.store(self.scratch, self.at("out", row * self.shape.columns + column), f32(0))

    def _pack_queries(self) -> None:
        """Turns a square of queries and columns at a time."""
        body, s, depth = self.body, self.schedule, self.shape.depth
        head = body.let(self._head_of("q") * self.queries, "q_row")
        with body.loop(0, self.vectors, "vector") as vector:
            column = body.let(vector * s.lanes, "column")
            starts = [
                body.let((head + tirx.min(self.first + column + i, self.queries - 1)) * depth, "start")
                for i in range(s.lanes)
            ]
            with body.loop(0, depth // s.lanes, "square") as square:
                rows = [body.let(load(self.q, start + square * s.lanes, s.lanes), "row") for start in starts]
                for i, queries in enumerate(turned(body, rows)):
                    body.store(self.scratch, self.at("q", (square * s.lanes + i) * s.queries + column), queries)
            if depth % s.lanes:
                rows = body.let((self._query_rows(vector) + widen(head, s.lanes)) * index(depth), "rows")
                with body.loop(depth // s.lanes * s.lanes, depth, "d") as d:
                    gathered = tirx.BufferLoad(self.q, [rows + widen(d, s.lanes)])
                    body.store(self.scratch, self.at("q", d * s.queries + column), gathered)

    def _per_query(self, name: str, vector: Expr) -> Expr:
        """An operand that varies over queries at most, at a vector's queries."""
        return self._gathered(name, vector, self.bases[name])

    def _scores(self, keys: Keys, first: Expr, count: Expr) -> None:
        """The block's scores, ``p [keys, queries]``, and the queries' running maxima, ``new_max``."""
        body, s = self.body, self.schedule
        done = index(0)
        for vectors in (s.query_vectors >> i for i in range(s.query_vectors.bit_length())):
            panels = body.let(tirx.floordiv(self.vectors - done, index(vectors)), "panels")
            with body.loop(0, panels, "panel") as panel:
                self._score_panel(keys, first, count, done + panel * vectors, vectors)
            done = body.let(done + panels * vectors, "done")

    def _score_panel(self, keys: Keys, first: Expr, count: Expr, vector: Expr, vectors: int) -> None:
        body, rows = self.body, self.schedule.key_rows
        tiles = body.let(tirx.floordiv(count, index(rows)), "tiles")
        with body.loop(0, tiles, "tile") as tile:
            self._score_tile(keys, first, tile * rows, vector, vectors)
        rest = body.let(count - tiles * rows, "rest")
        with body.when(rest > index(0)):
            self._score_tile(keys, first, tiles * rows, vector, vectors, rest)

    def _score_tile(
        self, keys: Keys, first: Expr, offset: Expr, vector: Expr, vectors: int, rest: Expr | None = None
    ) -> None:
        """The scores of the keys from ``first + offset`` on; of the last ``rest`` keys, with the last one repeated."""
        body, s, depth = self.body, self.schedule, self.shape.depth
        rows = s.key_rows
        acc = {Place(i, 0, j): body.alloc(s.lanes, name="acc") for i in range(rows) for j in range(vectors)}
        for a in acc.values():
            body.store(a, 0, widen(f32(0), s.lanes))
        key = body.let(first + offset, "key")
        places = [key + i if rest is None else body.let(tirx.min(key + i, keys.stop - 1), "key") for i in range(rows)]
        origin = body.let(keys.k_row - keys.first, "origin")
        start = body.let((origin + key) * depth, "start")
        starts = [
            start + i * depth if rest is None else body.let((origin + k) * depth, "start") for i, k in enumerate(places)
        ]
        column = body.let(vector * s.lanes, "column")
        with body.loop(0, depth, "d") as d:
            queries = [
                body.let(load(self.scratch, self.at("q", d * s.queries + column + j * s.lanes), s.lanes), "q")
                for j in range(vectors)
            ]
            for i in range(rows):
                k = body.let(load(keys.k, starts[i] + d), "k")
                for j, q in enumerate(queries):
                    a = acc[Place(i, 0, j)]
                    body.store(a, 0, load(a, 0, s.lanes) + widen(k, s.lanes) * q)
        tile = _Tile(acc, places, first, offset, vector, vectors, rest)
        within = self.shape.within
        if within is None:
            self._store_scores(self.shape.program, tile)
            return
        inner = body.let(tirx.And(key >= self.inner[0], key + rows <= self.inner[1]).astype("int64"), "inner")
        with body.when(inner > index(0)):
            self._store_scores(within, tile)
        with body.when(inner < index(1)):
            self._store_scores(self.shape.program, tile)

    def _store_scores(self, program: EpilogueProgram, tile: _Tile) -> None:
        """What ``program`` makes of a tile of products, and the queries' running maxima."""
        body, s = self.body, self.schedule
        values = Evaluator(program, body, lambda name, place: self._leaf(program, name, place, tile))
        output, column = program.outputs[0].value, tile.vector * s.lanes
        for j in range(tile.vectors):
            at = body.let(self.at("new_max", column + j * s.lanes), "at")
            largest = load(self.scratch, at, s.lanes)
            for i in range(len(tile.keys)):
                score = body.let(cast(values.value(output, Place(i, 0, j)), "f32"), "score")
                body.store(self.scratch, self.at("p", (tile.offset + i) * s.queries + column + j * s.lanes), score)
                if tile.rest is not None and i:
                    score = select(widen(tile.rest > index(i), s.lanes), score, -math.inf)
                largest = body.let(tirx.Select(score > largest, score, largest), "largest")
            body.store(self.scratch, at, largest)

    def _leaf(self, program: EpilogueProgram, name: str, place: Place, tile: _Tile) -> Expr | None:
        count, queries = self.schedule.lanes, self.schedule.queries
        if name == program.params[0].name:
            return load(tile.acc[place], 0, count)
        for param, (first, last) in zip(self.shape.band_params, self.band_bounds, strict=True):
            if param.name == name:
                return self._in_band(first, last, tile.keys[place.row], tile.vector + place.part)
        if name not in self.operands:
            return None
        column = (tile.vector + place.part) * count
        if name in self.shape.per_query:
            value = load(self.scratch, self.at("operands", self.shape.per_query.index(name) * queries + column), count)
            return cast(value, program.param(name).dtype)
        if name in self.shape.packed:
            row = self.shape.packed.index(name) * self.schedule.keys + tile.keys[place.row] - tile.first
            return cast(load(self.scratch, self.at("tiles", row * queries + column), count), program.param(name).dtype)
        at = self.bases[name] + (tile.keys[place.row] if self.varies[name] else 0)
        if program.param(name).kind is not Kind.TILE:
            return load(self.operands[name], at)
        return self._gathered(name, tile.vector + place.part, at)

    def _gathered(self, name: str, vector: Expr, at: Expr) -> Expr:
        """An operand at a vector's queries, from ``at`` on for the first query of all."""
        lanes = self.schedule.lanes
        rows = self._query_rows(vector) * widen(self.strides[name][2], lanes)
        return tirx.BufferLoad(self.read[name], [rows + widen(at, lanes)])

    def _pack_tile(self, slot: int, name: str, first: Expr, count: Expr) -> None:
        """An operand at the block's keys and the item's queries, ``[keys, queries]``."""
        body, s = self.body, self.schedule
        dtype = self.shape.program.param(name).dtype
        base = body.let(self.bases[name] + first, "base")
        target = slot * s.keys * s.queries
        with body.loop(0, self.vectors, "vector") as vector:
            column = body.let(vector * s.lanes, "column")
            starts = [
                body.let(base + tirx.min(self.first + column + i, self.queries - 1) * self.strides[name][2], "start")
                for i in range(s.lanes)
            ]
            squares = body.let(tirx.floordiv(count, index(s.lanes)), "squares")
            with body.loop(0, squares, "square") as square:
                rows = [load(self.operands[name], start + square * s.lanes, s.lanes) for start in starts]
                rows = [body.let(cast(as_value(row, dtype), "f32"), "row") for row in rows]
                for i, values in enumerate(turned(body, rows)):
                    at = target + (square * s.lanes + i) * s.queries + column
                    body.store(self.scratch, self.at("tiles", at), values)
            with body.loop(squares * s.lanes, count, "key") as key:
                values = cast(as_value(self._gathered(name, vector, base + key), dtype), "f32")
                body.store(self.scratch, self.at("tiles", target + key * s.queries + column), values)

    def _in_band(self, first: Expr | None, last: Expr | None, key: Expr, vector: Expr) -> Expr:
        """Whether ``key`` is within the band of each query of a vector."""
        lanes = self.schedule.lanes
        query = ramp((self.first + vector * lanes).astype("int32"), lanes, tirx.const(1, "int32"))
        tests = []
        if last is not None:
            tests.append(
                query >= widen(self.body.let(_clip(key - last, -1, self.queries).astype("int32"), "least"), lanes)
            )
        if first is not None:
            tests.append(
                query <= widen(self.body.let(_clip(key - first, -1, self.queries).astype("int32"), "most"), lanes)
            )
        return tests[0] if len(tests) == 1 else tirx.And(*tests)

    def _probabilities(self, count: Expr) -> None:
        """Scores to unnormalised probabilities, the running sum, and by what the earlier blocks' results shrink."""
        body, s = self.body, self.schedule
        with body.loop(0, self.vectors, "vector") as vector:
            column = body.let(vector * s.lanes, "column")
            old = body.let(load(self.scratch, self.at("max", column), s.lanes), "old")
            new = body.let(load(self.scratch, self.at("new_max", column), s.lanes), "new")
            # A row of -inf so far: exp(-inf - 0) is 0, where -inf - -inf would be NaN.
            shift = body.let(select(new < f32(LOWEST), 0.0, new), "shift")
            correction = body.let(exp_of_negative(old - shift), "correction")
            body.store(self.scratch, self.at("max", column), new)
            body.store(self.scratch, self.at("correction", column), correction)
            total = body.alloc(s.lanes, name="total")
            body.store(total, 0, load(self.scratch, self.at("sum", column), s.lanes) * correction)
            with body.loop(0, count, "key") as key:
                at = body.let(self.at("p", key * s.queries + column), "at")
                p = body.let(exp_of_negative(load(self.scratch, at, s.lanes) - shift), "p")
                body.store(self.scratch, at, p)
                body.store(total, 0, load(total, 0, s.lanes) + p)
            body.store(self.scratch, self.at("sum", column), load(total, 0, s.lanes))

    def _known_probabilities(self, program: EpilogueProgram, count: Expr) -> None:
        """Scores to ``program`` of probabilities, where the maxima and sums over all keys are known."""
        body, s = self.body, self.schedule
        with body.loop(0, self.vectors, "vector") as vector:
            column = body.let(vector * s.lanes, "column")
            most = body.let(load(self.scratch, self.at("max", column), s.lanes), "most")
            shift = body.let(select(most < f32(LOWEST), 0.0, most), "shift")
            total = body.let(load(self.scratch, self.at("sum", column), s.lanes), "total")
            inverse = body.let(widen(f32(1), s.lanes) / total, "inverse")
            with body.loop(0, count, "key") as key:
                at = body.let(self.at("p", key * s.queries + column), "at")
                p = exp_of_negative(load(self.scratch, at, s.lanes) - shift) * inverse
                p = body.let(select(total > f32(0), p, 0.0) if self.shape.guard else p, "p")
                values = Evaluator(program, body, _only(program, p))
                rounded = cast(values.value(program.outputs[0].value, Place(0, 0, 0)), "f32")
                body.store(self.scratch, at, rounded)

    def _values(self, keys: Keys, first: Expr, count: Expr) -> None:
        """``out = out · correction + pᵀ v`` for the block's keys."""
        body, s, columns = self.body, self.schedule, self.shape.columns
        width = s.value_vectors * s.lanes
        tiles = tirx.floordiv(self.count + (s.value_rows - 1), index(s.value_rows))
        start = body.let((keys.v_row + first - keys.first) * columns, "v_start")
        with body.loop(0, tiles, "tile") as tile:
            row = body.let(tile * s.value_rows, "row")
            with body.loop(0, columns // width, "panel") as panel:
                self._value_tile(keys, row, start, count, panel * width, width)
            if columns % width:
                self._value_tile(keys, row, start, count, index(columns // width * width), columns % width)

    def _value_tile(self, keys: Keys, row: Expr, start: Expr, count: Expr, column: Expr, width: int) -> None:
        body, s, columns = self.body, self.schedule, self.shape.columns
        pieces = [(at, min(s.lanes, width - at)) for at in range(0, width, s.lanes)]
        acc: dict[tuple[int, int], Buffer] = {}
        for i in range(s.value_rows):
            correction = body.let(load(self.scratch, self.at("correction", row + i)), "correction")
            for at, n in pieces:
                a = acc[i, at] = body.alloc(n, name="acc")
                before = load(self.scratch, self.at("out", (row + i) * columns + column + at), n)
                body.store(a, 0, before * widen(correction, n))
        with body.loop(0, count, "key") as key:
            values = [body.let(load(keys.v, start + key * columns + column + at, n), "v") for at, n in pieces]
            for i in range(s.value_rows):
                p = body.let(load(self.scratch, self.at("p", key * s.queries + row + i)), "p")
                for (at, n), v in zip(pieces, values, strict=True):
                    body.store(acc[i, at], 0, load(acc[i, at], 0, n) + widen(p, n) * v)
        for i in range(s.value_rows):
            for at, n in pieces:
                target = self.at("out", (row + i) * columns + column + at)
                body.store(self.scratch, target, load(acc[i, at], 0, n))

    def _finish(self) -> None:
        """Divides by the sums and stores the rows."""
        body, s, columns = self.body, self.schedule, self.shape.columns
        with body.loop(0, self.count, "row") as row:
            total = body.let(load(self.scratch, self.at("sum", row)), "total")
            target = (self.batch * self.queries + self.first + row) * self.heads + self.head
            target = body.let(target * columns, "target")
            for at in range(0, columns, s.lanes):
                value = load(self.scratch, self.at("out", row * columns + at), min(s.lanes, columns - at))
                body.store(self.out, target + at, self.normalised(value, total))

    def normalised(self, value: Expr, total: Expr) -> Expr:
        """Results of a query whose probabilities have the sum ``total``."""
        count = lanes(value)
        inverse = self.body.let(f32(1) / total if self.shape.probability is None else f32(1), "inverse")
        # With no keys at all the product over them is 0.
        keep = total > f32(0) if self.shape.guard else self.keys > index(0)
        return tirx.Select(widen(keep, count), value * widen(inverse, count), widen(f32(0), count))

    def append(self, start: Expr, stop: Expr) -> None:
        """Joins past and new rows of the keys ``start ≤ j < stop``."""
        body = self.body
        widths = (self.shape.depth, self.shape.columns)
        whole = body.let(tirx.floordiv(self.pair, index(self.shape.group)) * self.keys, "whole")
        for keys in self.segments:
            low = body.let(tirx.max(start, keys.first), "from")
            count = body.let(tirx.max(tirx.min(stop, keys.stop) - low, index(0)), "count")
            for target, width, part in zip(self.present, widths, ("k", "v"), strict=True):
                source, row = (keys.k, keys.k_row) if part == "k" else (keys.v, keys.v_row)
                self._copy(source, (row + low - keys.first) * width, target, (whole + low) * width, count * width)

    def _copy(self, source: Buffer, start: Expr, target: Buffer, at: Expr, count: Expr) -> None:
        body, lanes = self.body, self.schedule.lanes
        start, at, count = body.let(start, "from"), body.let(at, "to"), body.let(count, "count")
        vectors = body.let(tirx.floordiv(count, index(lanes)), "vectors")
        with body.loop(0, vectors, "vector") as vector:
            body.store(target, at + vector * lanes, load(source, start + vector * lanes, lanes))
        with body.loop(vectors * lanes, count, "element") as element:
            body.store(target, at + element, load(source, start + element))


def _only(program: EpilogueProgram, value: Expr) -> Callable[[str, Place], Expr | None]:
    """Gives ``value`` for the program's only parameter."""
    return lambda name, place: value if name == program.params[0].name else None


def _most(pick: Callable[[Expr, Expr], Expr], start: Expr, values: Sequence[Expr]) -> Expr:
    return reduce(pick, values, start)


def _clip(value: Expr, low: int, high: Expr) -> Expr:
    return tirx.max(index(low), tirx.min(value, high))
