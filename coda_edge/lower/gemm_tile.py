"""A register tile of a GEMM: its K loop and the pieces of its epilogue. See ``gemm.py``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np
from tvm import tirx

from ..epilogue.program import Kind, Output, Param, Rows
from ..epilogue.tir import STORAGE, Columns, Evaluator, Place, as_stored, level
from .body import Buffer, Expr, Index, index, lanes, load, shuffle, widen
from .dot import DOTS
from .gemm_integer import multiply_words
from .gemm_layout import Layout, scaled
from .weights import WeightPanel

if TYPE_CHECKING:
    from .gemm_items import Kernel

LINE = 64
"""Bytes of a cache line."""
_SHARES = (1, 2, 4, 6, 12)
"""How many cache lines of the next panel are asked for at a time; for one tile, all that lie in as many steps."""


@dataclass(frozen=True)
class TileRows:
    """The rows of a tile: the ``number``-th of ``count`` tiles of an item whose first row is ``first``.

    ``valid``, of each row of a tile that may reach beyond the item: whether the row is there to be stored, None if it is for sure;
    those that are not there repeat the last one. Rows that are there for sure come first and follow each other.
    """

    number: Expr
    count: Expr
    first: Expr
    rows: list[Expr]
    valid: list[Expr | None] = field(default_factory=list)

    @property
    def sure(self) -> int:
        """How many rows are there for sure."""
        return sum(valid is None for valid in self.valid) if self.valid else len(self.rows)

    def stored(self, row: int) -> Expr | bool:
        """Whether a row is there to be stored."""
        valid = self.valid[row] if self.valid else None
        return True if valid is None else valid


@dataclass(frozen=True)
class Part:
    """``size`` steps of each of a row's runs, from ``start`` on: the ``number``-th part. ``last``: the epilogue follows."""

    number: Index
    start: Index
    size: int
    last: bool = True


class Source(Enum):
    """Where a tile has its weights from: the panel as it is stored, that while float32 is left in scratch, or scratch."""

    STORED = auto()
    CONVERTED = auto()
    SCRATCH = auto()


def pieces(columns: Columns) -> list[tuple[Place, int, int]]:
    """The vectors of a row of a panel: place, offset in the panel, lanes."""
    size = columns.width >> columns.depth
    return [
        (Place(0, c, p), c * size + at, n) for c in range(columns.classes()) for p, (at, n) in enumerate(columns.parts)
    ]


class Tile:
    """One register tile: its K loop and its epilogue."""

    def __init__(
        self,
        kernel: Kernel,
        panel: Expr,
        columns: Columns,
        rows: TileRows,
        source: Source = Source.STORED,
        part: Part | None = None,
    ) -> None:
        self.kernel = kernel
        self.shape = kernel.shape
        self.body = kernel.body
        self.panel = panel
        self.columns = columns
        self.place = rows
        self.rows = rows.rows
        self.source = source
        self.part = part or Part(0, 0, kernel.left.run)
        self.acc: dict[Place, Buffer] = {}
        self.batches: list[tuple[Expr, Expr]] = []
        """Of each row, the batch entry and the position in it."""

    def write(self) -> None:
        """The tile: its products, then its epilogue, or its accumulators to scratch."""
        ends = self.part.last and not self.shape.waits
        self._begin()
        if ends:
            self._touch()
        self._multiply()
        if ends:
            self._epilogue()
            return
        for place, at in self._waiting():
            self.body.store(self.kernel.scratch, at, load(self.acc[place], 0, self._lanes(place)))

    def _begin(self) -> None:
        """Accumulators of zeros, or of what earlier parts of K left."""
        body, number = self.body, self.part.number
        for i in range(len(self.rows)):
            for place, _, n in self._pieces():
                self.acc[Place(i, place.cls, place.part)] = body.alloc(self._wide(n), self.shape.accumulator, "acc")
        begins = number == 0 if isinstance(number, int) else number.equal(index(0))
        with body.when(begins):
            for place, acc in self.acc.items():
                zero = tirx.const(0, self.shape.accumulator)
                body.store(acc, 0, widen(zero, self._wide(self._lanes(place))))
        if begins is not True:
            with body.when(tirx.Not(begins) if isinstance(number, tirx.Var) else True):
                for place, at in self._waiting():
                    body.store(self.acc[place], 0, load(self.kernel.scratch, at, self._lanes(place)))

    def _waiting(self) -> Iterator[tuple[Place, Expr]]:
        """Where accumulators wait in scratch: ``[panel of the item, row of the item, column]``."""
        schedule = self.kernel.schedule
        width, panel = schedule.width, tirx.floormod(self.panel, index(schedule.panels))
        row = panel * schedule.block_rows + self.rows[0] - self.place.first
        start = self.body.let(row * width + self.shape.waiting_at, "waiting")
        for i in range(len(self.rows)):
            for place, offset, _ in self._pieces():
                yield Place(i, place.cls, place.part), start + (i * width + offset)

    def _pieces(self) -> list[tuple[Place, int, int]]:
        return pieces(self.columns)

    def _lanes(self, place: Place) -> int:
        return self.columns.parts[place.part][1]

    def _wide(self, count: int) -> int:
        """Lanes of the accumulator of ``count`` columns."""
        return DOTS[self.shape.dot].lanes if self.shape.dot else count

    def _multiply(self) -> None:
        if self.shape.dot:
            multiply_words(self, self._pieces(), self._prefetch)
            return
        body, left, schedule, part = self.body, self.kernel.left, self.kernel.schedule, self.part
        panel = self.kernel.weight.panel(body, self.panel, schedule.width, self.columns.width)
        sure = self.place.sure
        starts = [*(left.starts(self.rows[:sure], True) if sure else ()), *left.starts(self.rows[sure:], False)]
        blocks, rest = divmod(part.size, schedule.stride)
        # Which field of a word has a row's weights is then known as the kernel is written.
        fields = 1 if self.source is Source.SCRATCH else self.shape.format.rows_per_element
        unroll = max(schedule.unroll, fields)
        with left.runs() as (run, distance):
            origin: Index = part.start
            if left.count > 1:
                origin = body.let(run * left.run, "origin")
                starts = [body.let(start + distance, "run_start") for start in starts]

            def step(at: Expr) -> None:
                row = origin + at
                place = row if left.count > 1 else at
                weights = [self._weights(panel, row, place, offset, n) for _, offset, n in self._pieces()]
                a_step = (at if left.count > 1 else origin + at) * left.stride
                for i, start in enumerate(starts):
                    a = body.let(load(left.buffer, start + a_step), "a")
                    for (place, _, n), w in zip(self._pieces(), weights, strict=True):
                        acc = self.acc[Place(i, place.cls, place.part)]
                        body.store(acc, 0, load(acc, 0, n) + widen(a, n) * w)

            def steps(start: Index, count: int) -> None:
                whole, single = divmod(count, unroll)
                with body.loop(0, whole, "k") as group:
                    for i in range(unroll):
                        step(start + group * unroll + i)
                for i in range(single):
                    step(index(start + whole * unroll + i))

            if blocks and schedule.prefetch and part.size:
                full = self.shape.part_size if self.shape.parts > 1 else left.run
                before = part.number * self.place.count * (full // schedule.stride)
                tile = self.place.number * left.count + run
                with body.loop(0, blocks, "k_block") as block:
                    self._prefetch(panel.start, before + tile * blocks + block)
                    steps(block * schedule.stride, schedule.stride)
                steps(blocks * schedule.stride, rest)
            else:
                steps(0, part.size)

    def _weights(self, panel: WeightPanel, step: Expr, place: Expr, offset: int, count: int) -> Expr:
        """``count`` weights of row ``step`` of the panel from its column ``offset`` on; in scratch it is row ``place``."""
        at = place * self.columns.width + (self.shape.converted_at + offset)
        if self.source is Source.SCRATCH:
            return self.body.let(load(self.kernel.scratch, at, count), "w")
        weights = self.body.let(panel.load(step, offset, count), "w")
        if self.source is Source.CONVERTED:
            self.body.store(self.kernel.scratch, at, weights)
        return weights

    def _prefetch(self, panel_start: Expr, step: Expr, steps: int = 0) -> None:
        """The ``step``-th share of the next panel's cache lines: so many that all tiles together ask for all.

        ``steps``: K steps from one share to the next, the schedule's by default.
        """
        format, schedule, count = self.shape.format, self.kernel.schedule, self.place.count
        size, line_size = format.panel_size(schedule.width, self.shape.k), LINE // format.itemsize
        bytes_ = schedule.width * (steps or schedule.stride) * format.itemsize
        lines = max(1, bytes_ // (LINE * format.rows_per_element))
        share = self.body.let(tirx.floordiv(count + (lines - 1), count), "share")
        ahead = self.body.let(step * share, "ahead")
        with self.body.when(ahead < index(size // line_size)), ExitStack() as more:
            first = self.body.let(panel_start + size + ahead * line_size, "first")
            asked = 0
            # Written out: a loop here costs accumulators their registers.
            for reach in sorted({min(n, lines) for n in (*_SHARES, lines)}):
                if asked:
                    more.enter_context(self.body.when(share > index(asked)))
                for line in range(asked, reach):
                    at = first + line * line_size
                    self.body.prefetch(self.kernel.weight.panels, at, 3 if schedule.far else 2)
                asked = reach

    def _touch(self) -> None:
        """Asks for the cache lines of the whole tensors that the epilogue will read."""
        program, schedule = self.shape.program, self.kernel.schedule
        for param in program.params[1:]:
            if param.kind is not Kind.TILE or param.rows is not Rows.ALL or param.period is not None:
                continue
            wide, line = level(program, param.name), LINE // np.dtype(STORAGE[param.dtype]).itemsize
            first = self.body.let(self.panel * scaled(schedule.width, wide), "first")
            for row in self.rows:
                start = row * program.operand_width(param, self.shape.n) + first
                for at in range(0, scaled(self.columns.width, wide), line):
                    self.body.prefetch(self.kernel.operands[param.name], start + at)

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
        with self.body.when(self.place.stored(i)):
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
            with self.body.when(self.place.stored(i)):
                for slot, result in enumerate(results, statistic.slot):
                    at = self.kernel.partial_at(slot, self.panel, self.rows[i])
                    self.body.store(self.kernel.partials, at, result)

    def _leaf(self, name: str, place: Place) -> Expr | None:
        kernel, program = self.kernel, self.shape.program
        if name == program.params[0].name:
            count = self._lanes(place)
            return shuffle([load(self.acc[place], 0, self._wide(count))], range(count))
        row = self.rows[place.row]
        if name in self.shape.hoisted:
            slot = self.shape.hoisted.index(name)
            return load(kernel.scratch, row - self.place.first + slot * kernel.schedule.block_rows)
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
            if i == 0 or i >= self.place.sure:
                batch = body.let(tirx.floordiv(row, count), "batch")
                position = body.let(row - batch * count, "position")
            else:
                over = body.let((position + 1).equal(count), "over")
                batch = body.let(tirx.Select(over, batch + 1, batch), "batch")
                position = body.let(tirx.Select(over, index(0), position + 1), "position")
            yield batch, position

    def _parts(self) -> Iterator[tuple[int, tuple[int, int]]]:
        return enumerate(self.columns.parts)
