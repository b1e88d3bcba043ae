"""A GEMM kernel from items down to a panel's tiles, and the merging of panels' statistics. See ``gemm.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tvm import tirx

from ..epilogue.program import Kind, Rows
from ..epilogue.tir import STORAGE, Columns, Evaluator, Place, level
from .body import Body, Expr, external, index, load, ramp, widen
from .dot import DOTS
from .gemm_heads import HeadShape, waiting_in, write_heads
from .gemm_layout import scaled
from .gemm_rows import MatrixRows, PackedRows, WindowRows
from .gemm_rows import Rows as LeftRows
from .gemm_shape import GemmShape
from .gemm_tile import Part, Source, Tile, TileRows
from .gemv import few_rows, few_rows_scratch, write_few_rows
from .statistics import Panels
from .weights import PackedWeight

_SHARED = {Rows.POSITION: tirx.floormod, Rows.BATCH: tirx.floordiv}
"""An operand's row, from the tile's row and the rows of a batch entry, where it is not the tile's row."""


class Kernel:
    """The writing of one kernel. Both kernels of a GEMM have the same parameters."""

    def __init__(self, shape: GemmShape) -> None:
        self.shape = shape
        self.schedule = shape.schedule
        self.body = Body()
        program, dtypes = shape.program, shape.program.dtypes()
        self.a = external("a", DOTS[shape.dot].dtype if shape.dot else "float32")
        self.weight = PackedWeight.declare(shape.format, shape.k)
        self.operands = {p.name: external(p.name, STORAGE[p.dtype]) for p in program.params[1:]}
        self.outputs = {o.name: external(f"{o.name}_out", STORAGE[dtypes[o.value]]) for o in program.outputs}
        self.partials, self.scratch = external("partials"), external("scratch")
        self.rows, self.rows_per_batch = tirx.Var("rows", "int64"), tirx.Var("rows_per_batch", "int64")
        self.begin, self.end = tirx.Var("begin", "int64"), tirx.Var("end", "int64")
        buffers = [self.a, *self.weight.params, *self.operands.values(), *self.outputs.values()]
        buffers += [self.partials, self.scratch] if shape.statistics else [self.scratch]
        batched = [self.rows_per_batch] if program.batched else []
        self.heads = HeadShape(shape, max(shape.scratch, few_rows_scratch(shape))) if shape.waits else None
        self.left = self._left()
        self.params = [*buffers, self.rows, *batched, *self.left.params, self.begin, self.end]

    def _left(self) -> LeftRows:
        shape, schedule = self.shape, self.schedule
        if shape.window is not None:
            return WindowRows(
                self.body, shape.window, self.a, self.scratch, shape.scratch, self.rows, schedule.lanes, shape.zero
            )
        rows = MatrixRows(self.body, self.a, self.rows, shape.k, schedule.block_rows, schedule.rows)
        return PackedRows(rows, self.scratch, shape.packed_at) if shape.packs else rows

    def items(self, symbol: str) -> tirx.PrimFunc:
        """The kernel that does items, as many rows or few of them call for."""
        few = few_rows(self.shape)
        if few:
            with self.body.when(self.rows <= index(few)):
                write_few_rows(self)
        with self.body.when(self.rows > index(few) if few else True):
            self._many_rows()
        return self.body.function(symbol, self.params)

    def _many_rows(self) -> None:
        """Items: which panels, which rows, what the rows need ahead, then the tiles."""
        shape, body = self.shape, self.body
        with body.loop(self.begin, self.end, "item") as item:
            if shape.rows_first:
                group = body.let(tirx.floordiv(item, self.left.blocks), "group")
                block = body.let(item - group * self.left.blocks, "block")
            else:
                block = body.let(tirx.floordiv(item, index(shape.groups)), "block")
                group = body.let(item - block * shape.groups, "group")
            first, last = self.left.block(block)
            if shape.hoisted or self.left.copies:
                new_block = tirx.Or(item.equal(self.begin), group.equal(index(0)))
                with body.when(True if shape.rows_first else new_block):
                    self._rows_ahead(first, last)
            begin = body.let(group * self.schedule.panels, "begin")
            end = body.let(tirx.min(begin + self.schedule.panels, index(shape.panels)), "end")
            if shape.rows_outer:
                self._tiles(first, last, lambda rows, _: self._over_panels(begin, end, partial(self._whole_tile, rows)))
            elif shape.format.converts:
                with body.when(last - first > index(self.schedule.rows)):
                    source = Source.SCRATCH if shape.format.ahead else Source.CONVERTED
                    self._parts(begin, end, first, last, source)
                with body.when(last - first <= index(self.schedule.rows)):
                    rows = self._one_tile(first, last)
                    self._over_panels(begin, end, partial(self._whole_tile, rows))
            else:
                self._parts(begin, end, first, last)
            if shape.waits:
                waiting = waiting_in(self.schedule.width, self.schedule.block_rows, shape.waiting_at)
                tiles = partial(self._rows_of, first, last)
                write_heads(self, begin, end, first, last, waiting, tiles)

    def _rows_of(self, first: Expr, last: Expr, write: Callable[[TileRows], None]) -> None:
        self._tiles(first, last, lambda rows, _: write(rows))

    def merge(self, symbol: str) -> tirx.PrimFunc:
        """The kernel that makes whole rows' statistics of the panels'."""
        vector = self.schedule.lanes
        steps = self.body.let(tirx.floordiv(self.rows, index(vector)), "steps")
        with self.body.loop(0, steps, "step") as step:
            self._merge_rows(step * vector, vector)
        with self.body.loop(steps * vector, self.rows, "at") as at:
            self._merge_rows(at, 1)
        return self.body.function(symbol, self.params)

    def partial_at(self, slot: int, panel: Expr, row: Expr) -> Expr:
        """Where a row's partial result lies: ``[slot, panel, row]``."""
        return (panel + slot * self.shape.panels) * self.rows + row

    def row_operand(self, name: str, at: Expr, count: int) -> Expr | None:
        """``count`` rows of a row operand for the tile's rows from ``at``, or a scalar operand; None for what is neither."""
        kind = self.shape.program.kinds()[name]
        if name not in self.operands or kind not in (Kind.ROW, Kind.SCALAR):
            return None
        if kind is Kind.SCALAR:
            return load(self.operands[name], 0)
        shared = _SHARED.get(self.shape.program.param(name).rows)
        if shared is None:
            return load(self.operands[name], at, count)
        return tirx.BufferLoad(self.operands[name], [shared(ramp(at, count), widen(self.rows_per_batch, count))])

    def _rows_ahead(self, first: Expr, last: Expr) -> None:
        """What the block's rows of A need, and its hoisted row values."""
        self.left.prepare()
        self.hoist(first, last)

    def hoist(self, first: Expr, last: Expr) -> None:
        """The hoisted row values of a block, into scratch ``[value, row of the block]``."""
        if not self.shape.hoisted:
            return
        vector = self.schedule.lanes
        steps = self.body.let(tirx.floordiv(last - first, index(vector)), "steps")

        def write(offset: Expr, count: int) -> None:
            values = Evaluator(
                self.shape.program, self.body, lambda name, _: self.row_operand(name, first + offset, count)
            )
            for slot, name in enumerate(self.shape.hoisted):
                value = widen(values.value(name, Place()), count)
                self.body.store(self.scratch, offset + slot * self.schedule.block_rows, value)

        with self.body.loop(0, steps, "step") as step:
            write(step * vector, vector)
        with self.body.loop(steps * vector, last - first, "offset") as offset:
            write(offset, 1)

    def _over_panels(self, begin: Expr, end: Expr, write: Callable[[Expr, Columns], None]) -> None:
        """The panels of an item, of which the last one of all may be narrower."""
        body, shape = self.body, self.shape
        whole, rest = divmod(shape.n, self.schedule.width)
        with body.loop(begin, tirx.min(end, index(whole)) if rest else end, "panel") as panel:
            write(panel, shape.columns(self.schedule.width))
        if rest:
            with body.when(end > index(whole)):
                write(index(whole), shape.columns(rest))

    def _parts(self, begin: Expr, end: Expr, first: Expr, last: Expr, source: Source = Source.STORED) -> None:
        """For each part of K all panels of an item; with several parts, accumulators wait in scratch for the next one.

        ``source``: of the first tile of a panel.
        """
        parts, size = self.shape.parts, self.shape.part_size

        def write(part: Part) -> None:
            def tiles(panel: Expr, columns: Columns) -> None:
                if source is Source.SCRATCH:
                    self._convert(panel, columns, part)
                self._tiles(first, last, lambda rows, of: Tile(self, panel, columns, rows, of, part).write(), source)

            self._over_panels(begin, end, tiles)

        if parts > 1:
            with self.body.loop(0, parts - 1, "part") as number:
                write(Part(number, number * size, size, last=False))
            write(Part(parts - 1, (parts - 1) * size, self.shape.k - (parts - 1) * size))
        else:
            write(Part(0, 0, self.left.run))

    def _one_tile(self, first: Expr, last: Expr) -> TileRows:
        """An item's rows as one tile, of which rows may be missing."""
        rows = range(1, self.schedule.rows)
        clamped = [first, *(self.body.let(tirx.min(first + i, last - 1), "row") for i in rows)]
        return TileRows(index(0), index(1), first, clamped, [None, *(first + i < last for i in rows)])

    def _whole_tile(self, rows: TileRows, panel: Expr, columns: Columns) -> None:
        Tile(self, panel, columns, rows, part=Part(0, 0, self.left.run)).write()

    def _convert(self, panel: Expr, columns: Columns, part: Part) -> None:
        """A part of the panel in float32, to scratch."""
        weights = self.weight.panel(self.body, panel, self.schedule.width, columns.width)
        fields = self.shape.format.rows_per_element
        elements, rest = divmod(part.size if self.shape.parts > 1 else self.shape.k, fields)

        def row(step: Expr) -> None:
            for at in range(0, columns.width, self.schedule.lanes):
                value = weights.load(part.start + step, at, min(self.schedule.lanes, columns.width - at))
                self.body.store(self.scratch, step * columns.width + (self.shape.converted_at + at), value)

        with self.body.loop(0, elements, "element") as element:
            for field in range(fields):
                row(element * fields + field)
        for field in range(rest):
            row(index(elements * fields + field))

    def _tiles(
        self, first: Expr, last: Expr, write: Callable[[TileRows, Source], None], source: Source = Source.STORED
    ) -> None:
        """Whole tiles of an item's rows, and one of fewer rows for what is left over. ``source``: of the first one.

        That one is a whole tile if it converts.
        """
        body, height = self.body, self.schedule.rows
        whole = body.let(tirx.floordiv(last - first, index(height)), "whole")
        count = body.let(tirx.max(tirx.floordiv(last - first + (height - 1), index(height)), index(1)), "tiles")
        converts = source is Source.CONVERTED
        if converts:
            write(TileRows(index(0), count, first, [first + i for i in range(height)]), source)
            source = Source.SCRATCH
        with body.loop(int(converts), whole, "tile") as tile:
            row = body.let(first + tile * height, "row")
            write(TileRows(tile, count, first, [row + i for i in range(height)]), source)
        row = body.let(first + whole * height, "row")
        left = body.let(last - row, "left")
        least = 0
        for tail in self.schedule.tails:
            with body.when(tirx.And(left > index(least), left <= index(tail))):
                known = [row + i for i in range(least + 1)]
                clamped = [body.let(tirx.min(row + i, last - 1), "row") for i in range(least + 1, tail)]
                valid = [None] * len(known) + [row + i < last for i in range(least + 1, tail)]
                write(TileRows(whole, count, first, [*known, *clamped], valid), source)
            least = tail

    def _merge_rows(self, at: Expr, count: int) -> None:
        program = self.shape.program
        for statistic in self.shape.statistics:
            reads = [
                partial(self._read_partial, slot=statistic.slot + i, at=at, count=count)
                for i in range(statistic.rule.partials)
            ]
            panels = Panels(
                self.shape.panels,
                scaled(self.schedule.width, level(program, statistic.operand)),
                program.width(statistic.operand, self.shape.n),
            )
            merged = dict(zip(statistic.results, statistic.rule.merge(self.body, reads, panels, count), strict=True))
            for output in program.outputs:
                if output.value in merged:
                    self.body.store(self.outputs[output.name], at, merged[output.value])

    def _read_partial(self, panel: Expr, slot: int, at: Expr, count: int) -> Expr:
        return load(self.partials, self.partial_at(slot, panel, at), count)
