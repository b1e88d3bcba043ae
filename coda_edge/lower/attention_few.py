"""Attention of few queries, from items down to rows. See ``attention.py`` and ``attention_row.py``.

An item is the heads that share keys and values, so that these are read once, and a part of the keys, so that there are items for all threads
even of one head. Where there is more than one part, each leaves its results unnormalised, with their maximum and sum, for ``merge``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from tvm import tirx

from .attention_row import RowBlocks, RowKeys, RowOperands
from .attention_shape import LOWEST, transposed
from .body import Expr, f32, index, load, widen
from .intrinsics import exp_of_negative, select

if TYPE_CHECKING:
    from .attention_tile import AttentionKernel, Keys

PART = 256
"""Keys of a part, about."""
#: Vectors of columns that are merged at a time.
_COLUMN_VECTORS = 8


class FewQueries:
    """Writes the items of a call with at most ``shape.few`` queries, and what merges their parts."""

    def __init__(self, kernel: AttentionKernel) -> None:
        self.kernel = kernel
        self.shape = kernel.shape
        self.body = kernel.body
        self.given = RowOperands(
            kernel.q, kernel.scratch, kernel.at, kernel.operands, {}, kernel.strides, kernel.band_bounds, kernel.keys
        )

    def items(self) -> None:
        """All items."""
        kernel, body, group = self.kernel, self.body, self.shape.group
        with body.loop(kernel.begin, kernel.end, "item") as item:
            owner = body.let(tirx.floordiv(item, kernel.parts), "owner")
            self.part = body.let(item - owner * kernel.parts, "part")
            size = body.let(tirx.floordiv(kernel.keys + (kernel.parts - 1), kernel.parts), "part_size")
            self.start = body.let(self.part * size, "part_start")
            self.stop = body.let(tirx.max(self.start, tirx.min(self.start + size, kernel.keys)), "part_stop")
            kernel.place(body.let(owner * group, "pair"), index(0), kernel.queries)
            with self._rows() as (row, query, head, bases):
                self._clear(row, query, bases)
            kernel.attend(self._block, kernel.queries * group, self.start, self.stop)
            with self._rows() as (row, query, head, _):
                with body.when(kernel.parts.equal(index(1))):
                    total = body.let(load(kernel.scratch, kernel.at("sum", row)), "total")
                    target = body.let(self._target(kernel.batch, query, head), "target")
                    for at, n in self._pieces(0, self.shape.columns):
                        value = load(kernel.scratch, kernel.at("out", row * self.shape.columns + at), n)
                        body.store(kernel.out, target + at, kernel.normalised(value, total))
                with body.when(kernel.parts > index(1)):
                    self._leave(row, query, head)
            if kernel.present:
                kernel.append(self.start, self.stop)

    def merge(self) -> None:
        """The kernel that makes results of parts."""
        kernel, body = self.kernel, self.body
        few = tirx.And(kernel.queries <= index(self.shape.few), kernel.parts > index(1))
        heads = tirx.floordiv(kernel.end, kernel.parts) * self.shape.group
        with body.when(few), body.loop(0, heads, "pair") as pair, body.loop(0, kernel.queries, "query") as query:
            batch = body.let(tirx.floordiv(pair, kernel.heads), "batch")
            target = body.let(self._target(batch, query, pair - batch * kernel.heads), "target")
            most = body.alloc(1, name="most")
            body.store(most, 0, f32(-math.inf))
            with body.loop(0, kernel.parts, "part") as part:
                found = body.let(load(kernel.partials, self._left(pair, query, part) + self.shape.columns), "found")
                body.store(most, 0, tirx.Select(found > load(most, 0), found, load(most, 0)))
            shift = body.let(select(load(most, 0) < f32(LOWEST), 0.0, load(most, 0)), "shift")
            wide = _COLUMN_VECTORS * self.shape.schedule.lanes
            for first in range(0, self.shape.columns, wide):
                self._merge_columns(pair, query, shift, target, first, min(first + wide, self.shape.columns))

    def _merge_columns(self, pair: Expr, query: Expr, shift: Expr, target: Expr, first: int, stop: int) -> None:
        kernel, body, columns = self.kernel, self.body, self.shape.columns
        pieces = self._pieces(first, stop)
        total, sums = body.alloc(1, name="total"), {at: body.alloc(n, name="acc") for at, n in pieces}
        body.store(total, 0, f32(0))
        for at, n in pieces:
            body.store(sums[at], 0, widen(f32(0), n))
        with body.loop(0, kernel.parts, "part") as part:
            left = body.let(self._left(pair, query, part), "left")
            weight = body.let(exp_of_negative(load(kernel.partials, left + columns) - shift), "weight")
            body.store(total, 0, load(total, 0) + load(kernel.partials, left + (columns + 1)) * weight)
            for at, n in pieces:
                value = load(kernel.partials, left + at, n) * widen(weight, n)
                body.store(sums[at], 0, load(sums[at], 0, n) + value)
        whole = body.let(load(total, 0), "whole")
        for at, n in pieces:
            body.store(kernel.out, target + at, kernel.normalised(load(sums[at], 0, n), whole))

    def _pieces(self, first: int, stop: int) -> list[tuple[int, int]]:
        lanes = self.shape.schedule.lanes
        return [(at, min(lanes, stop - at)) for at in range(first, stop, lanes)]

    def _target(self, batch: Expr, query: Expr, head: Expr) -> Expr:
        """Where a result begins."""
        return ((batch * self.kernel.queries + query) * self.kernel.heads + head) * self.shape.columns

    def _left(self, pair: Expr, query: Expr, part: Expr) -> Expr:
        """Where a part leaves ``columns`` results, their maximum and their sum."""
        return ((pair * self.kernel.queries + query) * self.kernel.parts + part) * (self.shape.columns + 2)

    @contextmanager
    def _rows(self) -> Iterator[tuple[Expr, Expr, Expr, dict[str, Expr]]]:
        """Loops over the item's rows: number, query, head, and where the head's operands begin."""
        kernel, body = self.kernel, self.body
        with body.loop(0, self.shape.group, "member") as member:
            head = body.let(kernel.head + member, "head")
            bases = {name: body.let(base, f"{name}_base") for name, base in kernel.bases_of(head).items()}
            with body.loop(0, kernel.queries, "query") as query:
                yield body.let(member * kernel.queries + query, "row"), query, head, bases

    def _clear(self, row: Expr, query: Expr, bases: dict[str, Expr]) -> None:
        """No keys so far; a score without a value counts with the first part."""
        kernel, body = self.kernel, self.body
        most, total = f32(-math.inf), f32(0)
        if self.shape.sink:
            sink = body.let(load(kernel.read["sink"], bases["sink"] + query * kernel.strides["sink"][2]), "sink")
            first = self.part.equal(index(0))
            most = tirx.Select(first, sink, most)
            total = tirx.Select(tirx.And(first, sink >= f32(LOWEST)), f32(1), f32(0))
        body.store(kernel.scratch, kernel.at("max", row), most)
        body.store(kernel.scratch, kernel.at("sum", row), total)
        for at, n in self._pieces(0, self.shape.columns):
            body.store(kernel.scratch, kernel.at("out", row * self.shape.columns + at), widen(f32(0), n))

    def _block(self, keys: Keys, first: Expr, count: Expr) -> None:
        """What a block of keys gives to every row."""
        kernel, body, shape = self.kernel, self.body, self.shape
        k, v = (
            body.let((row + first - keys.first) * width, "start")
            for row, width in ((keys.k_row, shape.depth), (keys.v_row, shape.columns))
        )
        with self._rows() as (row, query, head, bases):
            given = replace(self.given, bases=bases)
            pair = head if "q" in shape.shared else kernel.batch * kernel.heads + head
            q_start = body.let((pair * kernel.queries + query) * shape.depth, "q_start")
            blocks = RowBlocks(shape, transposed(shape.program), body, given)
            blocks.block(row, query, q_start, RowKeys(keys.k, keys.v, first, count, k, v))

    def _leave(self, row: Expr, query: Expr, head: Expr) -> None:
        kernel, body, columns = self.kernel, self.body, self.shape.columns
        left = body.let(self._left(kernel.batch * kernel.heads + head, query, self.part), "left")
        for at, n in self._pieces(0, columns):
            body.store(kernel.partials, left + at, load(kernel.scratch, kernel.at("out", row * columns + at), n))
        for i, array in enumerate(("max", "sum")):
            body.store(kernel.partials, left + (columns + i), load(kernel.scratch, kernel.at(array, row)))
