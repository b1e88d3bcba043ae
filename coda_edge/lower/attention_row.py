"""Attention of few queries, as when text is generated: vectors run over keys and columns, one query after the other.

The tiles of ``attention_tile`` have a query in each lane; here a product is a sum over lanes, masks are read as they lie, and
values are added row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from ..epilogue.program import EpilogueProgram, Kind
from ..epilogue.tir import Evaluator, Place, cast
from .attention_shape import LOWEST, AttentionShape
from .body import Body, Buffer, Expr, f32, index, load, ramp, shuffle, widen
from .intrinsics import exp_of_negative, select

#: Vectors of columns that are summed at a time.
_COLUMN_VECTORS = 8


@dataclass(frozen=True)
class RowOperands:
    """What rows are computed from: ``at(array, offset)`` is a place in scratch, ``bases`` and ``strides`` are of operands."""

    q: Buffer
    scratch: Buffer
    at: Callable[[str, Expr | int], Expr]
    operands: dict[str, Buffer]
    bases: dict[str, Expr]
    strides: dict[str, list[Expr]]
    bands: list[tuple[Expr | None, ...]]
    keys: Expr


@dataclass(frozen=True)
class RowKeys:
    """A block of ``count`` keys from number ``first`` on: their first elements in ``k`` and ``v``."""

    k: Buffer
    v: Buffer
    first: Expr
    count: Expr
    k_start: Expr
    v_start: Expr


class RowBlocks:
    """Writes what one query gets of a block of keys. ``program`` is over ``[queries, keys]``."""

    def __init__(self, shape: AttentionShape, program: EpilogueProgram, body: Body, given: RowOperands) -> None:
        self.shape = shape
        self.program = program
        self.body = body
        self.given = given
        self.lanes = shape.schedule.lanes
        self.varies = dict(zip(given.operands, shape.varies, strict=True))

    def block(self, row: Expr, query: Expr, q_start: Expr, keys: RowKeys) -> None:
        """Adds what ``keys`` give to ``row`` of the item, which is number ``query`` of its head and lies at ``q_start``."""
        body, scratch, at = self.body, self.given.scratch, self.given.at
        whole = body.let(tirx.floordiv(keys.count, index(self.lanes)), "whole")
        self._products(q_start, keys)
        most = self._scores(query, keys, whole)
        old = body.let(load(scratch, at("max", row)), "old")
        new = body.let(tirx.Select(most > old, most, old), "new")
        shift = body.let(select(new < f32(LOWEST), 0.0, new), "shift")
        correction = body.let(exp_of_negative(old - shift), "correction")
        total = self._probabilities(shift, keys.count, whole)
        body.store(scratch, at("max", row), new)
        body.store(scratch, at("new_max", row), new)
        body.store(scratch, at("sum", row), load(scratch, at("sum", row)) * correction + total)
        self._values(row, correction, keys)

    def _products(self, q_start: Expr, keys: RowKeys) -> None:
        """q·k of ``lanes`` keys at a time, beyond the last one that of the last one again."""
        body, lanes, depth = self.body, self.lanes, self.shape.depth
        with body.loop(0, tirx.floordiv(keys.count + (lanes - 1), index(lanes)), "tile") as tile:
            starts = [
                body.let(keys.k_start + tirx.min(tile * lanes + i, keys.count - 1) * depth, "start")
                for i in range(lanes)
            ]
            acc = [body.alloc(lanes, name="acc") for _ in starts]
            for a in acc:
                body.store(a, 0, widen(f32(0), lanes))
            with body.loop(0, depth // lanes, "d") as d:
                q = body.let(load(self.given.q, q_start + d * lanes, lanes), "q")
                for a, start in zip(acc, starts, strict=True):
                    body.store(a, 0, load(a, 0, lanes) + load(keys.k, start + d * lanes, lanes) * q)
            sums = [load(a, 0, lanes) for a in acc]
            while len(sums) > 1:
                sums = [self._pairs(a, b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
            body.store(self.given.scratch, self.given.at("p", tile * lanes), sums[0])

    def _pairs(self, a: Expr, b: Expr) -> Expr:
        """The sums of neighbouring elements of two vectors, as one."""
        even, odd = (shuffle([a, b], list(range(start, 2 * self.lanes, 2))) for start in (0, 1))
        return self.body.let(even + odd, "pairs")

    def _scores(self, query: Expr, keys: RowKeys, whole: Expr) -> Expr:
        """Products to scores; returns the largest."""
        body, scratch = self.body, self.given.scratch
        largest = body.alloc(self.lanes, name="largest")
        body.store(largest, 0, widen(f32(-math.inf), self.lanes))

        def step(offset: Expr, lanes: int) -> None:
            place = body.let(self.given.at("p", offset), "place")
            values = Evaluator(
                self.program, body, lambda name, _: self._leaf(name, query, keys.first + offset, place, lanes)
            )
            score = cast(values.value(self.program.outputs[0].value, Place()), "f32")
            score = body.let(widen(score, lanes), "score")
            body.store(scratch, place, score)
            most = load(largest, 0, lanes)
            body.store(largest, 0, tirx.Select(score > most, score, most))

        self._over(keys.count, whole, step)
        return self._reduced(largest, lambda a, b: tirx.Select(a > b, a, b))

    def _leaf(self, name: str, query: Expr, key: Expr, place: Expr, lanes: int) -> Expr | None:
        if name == self.program.params[0].name:
            return load(self.given.scratch, place, lanes)
        for param, (first, last) in zip(self.shape.band_params, self.given.bands, strict=True):
            if param.name == name:
                return self._in_band(first, last, query, key, lanes)
        if name not in self.given.operands:
            return None
        buffer, at = self.given.operands[name], self.given.bases[name]
        kind = self.program.param(name).kind
        if kind in (Kind.ROW, Kind.TILE):
            at = at + query * self.given.strides[name][2]
        return load(buffer, at + key, lanes) if self.varies[name] else load(buffer, at)

    def _in_band(self, first: Expr | None, last: Expr | None, query: Expr, key: Expr, lanes: int) -> Expr:
        """Whether each of ``lanes`` keys from ``key`` on is in the band of ``query``."""
        number = ramp(key.astype("int32"), lanes, tirx.const(1, "int32"))
        tests = []
        for bound, compare in ((first, tirx.GE), (last, tirx.LE)):
            if bound is not None:
                limit = tirx.max(index(-1), tirx.min(query + bound, self.given.keys)).astype("int32")
                tests.append(compare(number, widen(self.body.let(limit, "limit"), lanes)))
        return tests[0] if len(tests) == 1 else tirx.And(*tests)

    def _probabilities(self, shift: Expr, count: Expr, whole: Expr) -> Expr:
        """Scores to unnormalised probabilities; returns their sum."""
        body, scratch = self.body, self.given.scratch
        total = body.alloc(self.lanes, name="total")
        body.store(total, 0, widen(f32(0), self.lanes))

        def step(offset: Expr, lanes: int) -> None:
            place = body.let(self.given.at("p", offset), "place")
            p = body.let(exp_of_negative(load(scratch, place, lanes) - widen(shift, lanes)), "p")
            body.store(scratch, place, p)
            body.store(total, 0, load(total, 0, lanes) + p)

        self._over(count, whole, step)
        return self._reduced(total, lambda a, b: a + b)

    def _over(self, count: Expr, whole: Expr, step: Callable[[Expr, int], None]) -> None:
        """``step`` for whole vectors and then for single keys."""
        with self.body.loop(0, whole, "vector") as vector:
            step(vector * self.lanes, self.lanes)
        with self.body.loop(whole * self.lanes, count, "key") as key:
            step(key, 1)

    def _reduced(self, vector: Buffer, pick: Callable[[Expr, Expr], Expr]) -> Expr:
        result = load(vector, 0)
        for i in range(1, self.lanes):
            result = self.body.let(pick(result, load(vector, i)), "reduced")
        return result

    def _values(self, row: Expr, correction: Expr, keys: RowKeys) -> None:
        """``out = out · correction + p v``."""
        body, columns, lanes = self.body, self.shape.columns, self.lanes
        scratch, at = self.given.scratch, self.given.at
        for panel in range(0, columns, _COLUMN_VECTORS * lanes):
            stop = min(columns, panel + _COLUMN_VECTORS * lanes)
            pieces = [(c, min(lanes, stop - c)) for c in range(panel, stop, lanes)]
            acc = {c: body.alloc(n, name="acc") for c, n in pieces}
            for c, n in pieces:
                before = load(scratch, at("out", row * columns + c), n)
                body.store(acc[c], 0, before * widen(correction, n))
            with body.loop(0, keys.count, "key") as key:
                p = body.let(load(scratch, at("p", key)), "p")
                start = body.let(keys.v_start + key * columns, "start")
                for c, n in pieces:
                    body.store(acc[c], 0, load(acc[c], 0, n) + load(keys.v, start + c, n) * widen(p, n))
            for c, n in pieces:
                body.store(scratch, at("out", row * columns + c), load(acc[c], 0, n))
