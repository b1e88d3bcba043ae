"""The GEMM kernel itself, from items down to a register tile and the pieces of its epilogue. See ``gemm.py``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

from tvm import tirx

from ..epilogue.ops import Group
from ..epilogue.program import EpilogueProgram, Kind, Output, Param, Rows
from ..epilogue.tir import STORAGE, Columns, Evaluator, Place, as_stored, depth, level
from ..schedule.gemm import GemmSchedule
from .body import Body, Buffer, Expr, external, f32, index, lanes, load, ramp, shuffle, widen
from .gemm_layout import Layout, scaled
from .statistics import Panels, Statistic, statistics
from .weights import PLAIN, PackedWeight, WeightFormat

_LINE = 64
"""Bytes of a cache line."""
_SHARED = {Rows.POSITION: tirx.floormod, Rows.BATCH: tirx.floordiv}
"""An operand's row, from the tile's row and the rows of a batch entry, where it is not the tile's row."""


@dataclass(frozen=True)
class GemmShape:
    """What a GEMM kernel is generic over: everything but its number of rows."""

    program: EpilogueProgram
    n: int
    k: int
    schedule: GemmSchedule
    format: WeightFormat = PLAIN

    @cached_property
    def panels(self) -> int:
        """Weight panels, the narrower last one included."""
        return -(-self.n // self.schedule.width)

    @cached_property
    def statistics(self) -> tuple[Statistic, ...]:
        """The reduce steps."""
        return statistics(self.program)

    @cached_property
    def partials(self) -> int:
        """float32 that a row and panel leave for ``Kernel.merge``."""
        return sum(s.rule.partials for s in self.statistics)

    @cached_property
    def hoisted(self) -> tuple[str, ...]:
        """Row values that are computed once a block of rows: those that a step of another kind reads."""
        kinds = self.program.kinds()
        rowwise = [
            s for s in self.program.steps if kinds[s.names[0]] is Kind.ROW and s.operator.group is not Group.REDUCE
        ]
        read = {a for s in self.program.steps if s not in rowwise for a in s.args}
        return tuple(s.result for s in rowwise if s.result in read)

    @property
    def scratch(self) -> int:
        """float32 of a thread's scratch: hoisted row values, and a panel that is converted."""
        return self.converted_at + (self.k * self.schedule.width if self.format.converts else 0)

    @property
    def converted_at(self) -> int:
        """Where in the scratch a converted panel begins."""
        return self.schedule.block_rows * len(self.hoisted)

    def orders(self) -> list[list[int]]:
        """The columns of each panel, in the order in which they lie."""
        starts = range(0, self.n, self.schedule.width)
        widths = [min(self.schedule.width, self.n - start) for start in starts]
        return [[s + c for c in self.columns(w).permutation()] for s, w in zip(starts, widths, strict=True)]

    def columns(self, width: int) -> Columns:
        """How the columns of a panel of ``width`` lie."""
        return Columns(width, depth(self.program), self.schedule.lanes)


class Kernel:
    """The writing of one kernel. Both kernels of a GEMM have the same parameters."""

    def __init__(self, shape: GemmShape) -> None:
        self.shape = shape
        self.schedule = shape.schedule
        self.body = Body()
        program, dtypes = shape.program, shape.program.dtypes()
        self.a, self.weight = external("a"), PackedWeight.declare(shape.format)
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
        start = self.body.let(self.panel_start(panel), "panel_start")
        with self.body.loop(0, self.shape.k, "k") as step:
            for at in range(0, columns.width, self.schedule.lanes):
                count = min(self.schedule.lanes, columns.width - at)
                value = self.weight.load(
                    start + step * columns.width + at, step, panel * self.schedule.width + at, count
                )
                self.body.store(self.scratch, step * columns.width + (self.shape.converted_at + at), value)

    def panel_start(self, panel: Expr) -> Expr:
        """The first element of a panel."""
        return panel * (self.schedule.width * self.shape.k)

    @property
    def _lines(self) -> int:
        """Cache lines of a panel's rows in one K block."""
        return self.schedule.width * self.schedule.unroll * self.shape.format.itemsize // _LINE

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


class Tile:
    """One register tile: its K loop and its epilogue.

    ``rows``: the row of A at each row of the tile; ``first``: the block's first row. ``valid``, at the edge: which rows are
    there to be stored; the others repeat the last one. ``converted``: the panel is in scratch.
    """

    def __init__(
        self,
        kernel: Kernel,
        panel: Expr,
        columns: Columns,
        first: Expr,
        rows: list[Expr],
        valid: list[Expr] | None = None,
        converted: bool = False,
    ) -> None:
        self.kernel = kernel
        self.shape = kernel.shape
        self.body = kernel.body
        self.panel = panel
        self.columns = columns
        self.first = first
        self.rows = rows
        self.valid = valid
        self.converted = converted
        self.acc: dict[Place, Buffer] = {}
        self.batches: list[tuple[Expr, Expr]] = []
        """Of each row, the batch entry and the position in it."""

    def write(self, tile: Expr, share: Expr) -> None:
        """The tile, the ``tile``-th of its item, of whose prefetches a K block of a tile does ``share``."""
        self._multiply(tile, share)
        self._epilogue()

    def _multiply(self, tile: Expr, share: Expr) -> None:
        body, k, unroll = self.body, self.shape.k, self.kernel.schedule.unroll
        size = self.columns.width >> self.columns.depth
        pieces = [
            (Place(0, c, p), c * size + at, n) for c in range(self.columns.classes()) for p, (at, n) in self._parts()
        ]
        for i in range(len(self.rows)):
            for place, _, n in pieces:
                acc = self.acc[Place(i, place.cls, place.part)] = body.alloc(n, name="acc")
                body.store(acc, 0, widen(f32(0), n))
        panel_start = body.let(self.kernel.panel_start(self.panel), "panel_start")
        starts = [body.let(row * k, "start") for row in (self.rows if self.valid else self.rows[:1])]
        if self.valid is None:
            starts = [starts[0] + i * k for i in range(len(self.rows))]

        def steps(start: Expr | int, stop: Expr | int) -> None:
            with body.loop(start, stop, "k") as step:
                at = body.let((0 if self.converted else panel_start) + step * self.columns.width, "at")
                weights = [body.let(self._weights(at, step, offset, n), "w") for _, offset, n in pieces]
                for i, row_start in enumerate(starts):
                    a = body.let(load(self.kernel.a, row_start + step), "a")
                    for (place, _, n), w in zip(pieces, weights, strict=True):
                        acc = self.acc[Place(i, place.cls, place.part)]
                        body.store(acc, 0, load(acc, 0, n) + widen(a, n) * w)

        blocks, rest = divmod(k, unroll)
        if blocks:
            with body.loop(0, blocks, "k_block") as block:
                if self.kernel.schedule.prefetch:
                    self._prefetch(panel_start, tile * blocks + block, share)
                steps(block * unroll, block * unroll + unroll)
        if rest:
            steps(blocks * unroll, k)

    def _weights(self, at: Expr, step: Expr, offset: int, count: int) -> Expr:
        """``count`` weights of row ``step`` of the panel, which begins at element ``at``, from column ``offset`` of the panel on."""
        kernel = self.kernel
        if self.converted:
            return load(kernel.scratch, at + (self.shape.converted_at + offset), count)
        return kernel.weight.load(at + offset, step, self.panel * kernel.schedule.width + offset, count)

    def _prefetch(self, panel_start: Expr, step: Expr, share: Expr) -> None:
        """The ``step``-th share of the next panel's cache lines."""
        size, line_size = self.kernel.schedule.width * self.shape.k, _LINE // self.shape.format.itemsize
        ahead = self.body.let(step * share, "ahead")
        with self.body.when(ahead < index(size // line_size)), self.body.loop(0, share, "line") as line:
            self.body.prefetch(self.kernel.weight.panels, panel_start + size + (ahead + line) * line_size)

    def _epilogue(self) -> None:
        if self.shape.program.batched:
            self.batches = list(self._batches())
        values = Evaluator(self.shape.program, self.body, self._leaf, self.columns)
        tiles = [o for o in self.shape.program.outputs if o.kind is Kind.TILE]
        layouts = [(o, self._layout(o)) for o in tiles if not o.columns]
        for layout in (layout for _, layout in layouts):
            layout.prepare()
        for i in range(len(self.rows)):
            for output, layout in layouts:
                self._store(output, layout, values, i)
            self._reduce(values, i)
        for output in tiles:
            if output.columns:
                layout = self._layout(output)
                with self.body.when(layout.reached()):
                    layout.prepare()
                    inner = values.fork()
                    for i in range(len(self.rows)):
                        self._store(output, layout, inner, i)

    def _store(self, output: Output, layout: Layout, values: Evaluator, i: int) -> None:
        dtype = self.shape.program.dtypes()[output.value]
        classes = range(self.columns.classes(level(self.shape.program, output.value)))
        vectors = []
        for p, _ in self._parts():
            pieces = [values.value(output.value, Place(i, c, p)) for c in classes]
            vectors.append(self.body.let(as_stored(self.columns.natural(pieces), dtype), "stored"))
        buffer = self.kernel.outputs[output.name]
        with self.body.when(True if self.valid is None else self.valid[i]):
            for vector, segments in zip(vectors, layout.segments, strict=True):
                for segment in segments:
                    with self.body.when(segment.inside):
                        self.body.store(buffer, layout.rows[i] + segment.at, shuffle([vector], segment.order))

    def _reduce(self, values: Evaluator, i: int) -> None:
        program = self.shape.program
        for statistic in self.shape.statistics:
            wide = level(program, statistic.operand)
            places = [Place(i, c, p) for c in range(self.columns.classes(wide)) for p, _ in self._parts()]
            pieces = [values.value(statistic.operand, place) for place in places]
            pieces = [piece.astype(f"float32x{lanes(piece)}" if lanes(piece) > 1 else "float32") for piece in pieces]
            columns = [self.columns.progression(place.cls, place.part, wide) for place in places]
            results = statistic.rule.panel(self.body, pieces, columns)
            with self.body.when(True if self.valid is None else self.valid[i]):
                for slot, result in enumerate(results, statistic.slot):
                    at = self.kernel.partial_at(slot, self.panel, self.rows[i])
                    self.body.store(self.kernel.partials, at, result)

    def _leaf(self, name: str, place: Place) -> Expr | None:
        kernel, program = self.kernel, self.shape.program
        if name == program.params[0].name:
            acc = self.acc[place]
            return load(acc, 0, self.columns.parts[place.part][1])
        row = self.rows[place.row]
        if name in self.shape.hoisted:
            slot = self.shape.hoisted.index(name)
            return load(kernel.scratch, row - self.first + slot * kernel.schedule.block_rows)
        if name not in kernel.operands:
            return None
        param = program.param(name)
        if param.kind is Kind.SCALAR:
            return load(kernel.operands[name], 0)
        if param.rows is not Rows.ALL:
            row = self.batches[place.row][0 if param.rows is Rows.BATCH else 1]
        if param.kind is Kind.ROW:
            return load(kernel.operands[name], row)
        wide = level(program, name)
        start = index(0) if param.kind is Kind.COL else row * program.operand_width(param, self.shape.n)
        return self.columns.piece(self._natural(param, start, wide, place.part), place.cls, wide)

    def _natural(self, param: Param, start: Expr, wide: int, part: int) -> Expr:
        """The consecutive columns of an operand's row that a part of all classes covers; the row starts at ``start``."""
        buffer = self.kernel.operands[param.name]
        at, count = self._span(wide, part)
        if param.period is None:
            return load(buffer, start + at, count)
        # A run of columns that begins at a multiple of its length does not cross the end of a period.
        offset = self.columns.parts[part][0] * self.columns.classes(wide)
        run = math.gcd(count, param.period, scaled(self.kernel.schedule.width, wide), offset)
        runs = [load(buffer, start + tirx.floormod(at + i, index(param.period)), run) for i in range(0, count, run)]
        return shuffle([self.body.let(r, param.name) for r in runs], range(count))

    def _span(self, wide: int, part: int) -> tuple[Expr, int]:
        """The natural columns that a part of all classes covers, of a value at level ``wide``: the first, and how many."""
        offset, n = self.columns.parts[part]
        classes = self.columns.classes(wide)
        return self.panel * scaled(self.kernel.schedule.width, wide) + offset * classes, n * classes

    def _layout(self, output: Output) -> Layout:
        wide = level(self.shape.program, output.value)
        return Layout(
            self.body,
            output,
            self.panel,
            scaled(self.kernel.schedule.width, wide),
            self.shape.program.width(output.value, self.shape.n),
            [self._span(wide, part) for part, _ in self._parts()],
            [offset * self.columns.classes(wide) for _, (offset, _) in self._parts()],
            self.rows,
            self.batches,
            self.kernel.rows_per_batch,
        )

    def _batches(self) -> Iterator[tuple[Expr, Expr]]:
        """Batch entry and position of each row: one division a tile, as its rows follow each other (but at the edge)."""
        body, count = self.body, self.kernel.rows_per_batch
        batch = position = index(0)
        for i, row in enumerate(self.rows):
            if i == 0 or self.valid is not None:
                batch = body.let(tirx.floordiv(row, count), "batch")
                position = body.let(row - batch * count, "position")
            else:
                over = body.let((position + 1).equal(count), "over")
                batch = body.let(tirx.Select(over, batch + 1, batch), "batch")
                position = body.let(tirx.Select(over, index(0), position + 1), "position")
            yield batch, position

    def _parts(self) -> Iterator[tuple[int, tuple[int, int]]]:
        return enumerate(self.columns.parts)
