"""A GEMM kernel from items down to a panel's tiles, and the merging of panels' statistics. See ``gemm.py``."""

from __future__ import annotations

from functools import partial

from tvm import tirx

from ..epilogue.program import Kind, Rows
from ..epilogue.tir import STORAGE, Columns, Evaluator, Place, level
from .body import Body, Expr, external, index, load, ramp, widen
from .gemm_layout import scaled
from .gemm_shape import GemmShape
from .gemm_tile import LINE, Tile
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
        self.a, self.weight = external("a"), PackedWeight.declare(shape.format, shape.k)
        self.operands = {p.name: external(p.name, STORAGE[p.dtype]) for p in program.params[1:]}
        self.outputs = {o.name: external(f"{o.name}_out", STORAGE[dtypes[o.value]]) for o in program.outputs}
        self.partials, self.scratch = external("partials"), external("scratch")
        self.rows, self.rows_per_batch = tirx.Var("rows", "int64"), tirx.Var("rows_per_batch", "int64")
        self.begin, self.end = tirx.Var("begin", "int64"), tirx.Var("end", "int64")
        buffers = [self.a, *self.weight.params, *self.operands.values(), *self.outputs.values()]
        buffers += [self.partials, self.scratch] if shape.statistics else [self.scratch]
        batched = [self.rows_per_batch] if program.batched else []
        self.params = [*buffers, self.rows, *batched, self.begin, self.end]

    def items(self, symbol: str) -> tirx.PrimFunc:
        """The kernel that does items: which panel, which rows, what the rows need ahead, then the panel's tiles."""
        shape, body = self.shape, self.body
        whole, rest = divmod(shape.n, self.schedule.width)
        with body.loop(self.begin, self.end, "item") as item:
            block = body.let(tirx.floordiv(item, index(shape.panels)), "block")
            panel = body.let(item - block * shape.panels, "panel")
            first = body.let(block * self.schedule.block_rows, "first")
            last = body.let(tirx.min(self.rows, first + self.schedule.block_rows), "last")
            if shape.hoisted:
                with body.when(tirx.Or(item.equal(self.begin), panel.equal(index(0)))):
                    self._rows_ahead(first, last)
            if whole:
                with body.when(panel < index(whole) if rest else True):
                    self._panel(panel, shape.columns(self.schedule.width), first, last)
            if rest:
                with body.when(panel.equal(index(whole)) if whole else True):
                    self._panel(panel, shape.columns(rest), first, last)
        return body.function(symbol, self.params)

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
        """The block's hoisted row values, into scratch ``[value, row of the block]``."""
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

    def _panel(self, panel: Expr, columns: Columns, first: Expr, last: Expr) -> None:
        if not self.shape.format.converts:
            self._tiles(panel, columns, first, last)
            return
        rows = self.schedule.rows
        with self.body.when(last - first > index(rows)):
            self._convert(panel, columns)
            self._tiles(panel, columns, first, last, converted=True)
        with self.body.when(last - first <= index(rows)):
            lines = index(self._lines)
            self._edge(panel, columns, first, first).write(index(0), self.body.let(lines, "share"))

    def _convert(self, panel: Expr, columns: Columns) -> None:
        """The panel in float32, to scratch."""
        weights = self.weight.panel(self.body, panel, self.schedule.width, columns.width)
        with self.body.loop(0, self.shape.k, "k") as step:
            for at in range(0, columns.width, self.schedule.lanes):
                count = min(self.schedule.lanes, columns.width - at)
                value = weights.load(step, at, count)
                self.body.store(self.scratch, step * columns.width + (self.shape.converted_at + at), value)

    @property
    def _lines(self) -> int:
        """Cache lines of a panel's rows in one K block, at least one."""
        format = self.shape.format
        rows = LINE * format.rows_per_element
        return max(1, self.schedule.width * self.schedule.unroll * format.itemsize // rows)

    def _edge(self, panel: Expr, columns: Columns, first: Expr, row: Expr, converted: bool = False) -> Tile:
        """The tile from ``row`` on of which some rows may be beyond the last one."""
        rows = self.schedule.rows
        clamped = [self.body.let(tirx.min(row + i, self.rows - 1), "row") for i in range(rows)]
        return Tile(self, panel, columns, first, clamped, [row + i < self.rows for i in range(rows)], converted)

    def _tiles(self, panel: Expr, columns: Columns, first: Expr, last: Expr, converted: bool = False) -> None:
        body, rows = self.body, self.schedule.rows
        whole = body.let(tirx.floordiv(last - first, index(rows)), "whole")
        tiles = tirx.max(tirx.floordiv(last - first + (rows - 1), index(rows)), index(1))
        share = body.let(tirx.floordiv(tiles + (self._lines - 1), tiles), "share")
        with body.loop(0, whole, "tile") as tile:
            row = body.let(first + tile * rows, "row")
            Tile(self, panel, columns, first, [row + i for i in range(rows)], None, converted).write(tile, share)
        with body.when(first + whole * rows < last):
            row = body.let(first + whole * rows, "row")
            self._edge(panel, columns, first, row, converted).write(whole, share)

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
