"""Sums over the heads of a GEMM's rows, and what of the epilogue waits for them.

A head is known when the last of its panels is. So an item is as many panels as make whole heads; their accumulators wait in scratch, sums are
taken from there, each in a pass of its own (one may depend on another: a variance on a mean), and then comes the epilogue.
Sums of a panel are taken in *runs*, as long as no run crosses the end of a head or of a panel, and added up for each head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tvm import tirx

from ..epilogue.ops import Group
from ..epilogue.program import EpilogueProgram, Kind, Step
from ..epilogue.tir import Columns, Evaluator, Place
from .body import Expr, Index, f32, index, lanes, load, shuffle, widen
from .gemm_shape import GemmShape
from .gemm_tile import Tile, TileRows
from .statistics import combine_lanes

if TYPE_CHECKING:
    from .gemm_items import Kernel

Waiting = Callable[[Expr, Expr, int], Expr]
"""Where sums of products wait in scratch: of a row (its number in the item), a panel (its number in the item), from a column of it on."""
Rows = Callable[[Callable[[TileRows], None]], None]
"""Writes something for all tiles of an item's rows."""
_WRITTEN_OUT = 8


def first_of_heads(panels: int, width: int, head: int) -> int:
    """The least number of panels, at least ``panels``, that are whole heads."""
    step = math.lcm(width, head) // width
    return -(-panels // step) * step


@dataclass(frozen=True)
class HeadShape:
    """What the sums of a kernel are: where they and what is computed of them lie in scratch, from ``at`` on."""

    shape: GemmShape
    at: int

    @property
    def program(self) -> EpilogueProgram:
        """The epilogue."""
        return self.shape.program

    @cached_property
    def run(self) -> int:
        """Columns of a run."""
        return math.gcd(self.shape.schedule.width, self.program.head)

    @property
    def runs(self) -> int:
        """Runs of an item's row."""
        return self.shape.schedule.panels * self.shape.schedule.width // self.run

    @property
    def heads(self) -> int:
        """Heads of an item."""
        return self.shape.schedule.panels * self.shape.schedule.width // self.program.head

    @cached_property
    def sums(self) -> tuple[Step, ...]:
        """The steps that sum, in order."""
        return tuple(s for s in self.program.steps if s.operator.group is Group.HEADS)

    @cached_property
    def read(self) -> dict[str, int]:
        """The values by heads that wider ones are made of, each with the last sum that it depends on."""
        kinds = self.program.kinds()
        after: dict[str, int] = {}
        read: dict[str, int] = {}
        for step in self.program.steps:
            args = [a for a in step.args if isinstance(a, str) and kinds[a] is Kind.HEAD]
            if step in self.sums:
                after[step.result] = self.sums.index(step)
            elif kinds[step.names[0]] is Kind.HEAD:
                after[step.result] = max(after[a] for a in args)
            else:
                read |= {a: after[a] for a in args}
        return read

    @cached_property
    def columns(self) -> tuple[int, int]:
        """The range of columns whose sums are read."""
        n, whole = self.shape.n, (0, self.shape.n)
        reads = set(self.read)
        for step in self.program.steps:
            if reads & set(step.args):
                reads |= set(step.names)
        ranges = []
        for output in self.program.outputs:
            if output.value in reads:
                width = self.program.width(output.value, n) if output.kind is Kind.TILE else n
                start, end = output.columns or (0, width)
                ranges.append((start * n // width, end * n // width) if output.kind is Kind.TILE else whole)
        return min(a for a, _ in ranges), max(b for _, b in ranges)

    @property
    def size(self) -> int:
        """float32 of scratch."""
        return self.shape.schedule.block_rows * (self.runs + self.heads * (len(self.sums) + len(self.read)))

    def run_at(self, row: Expr, run: Expr) -> Expr:
        """Where the sum of a run lies."""
        return row * self.runs + run + self.at

    def sum_at(self, number: int, row: Expr, head: Expr) -> Expr:
        """Where the sum of a head lies."""
        block = self.shape.schedule.block_rows
        return row * self.heads + head + (self.at + block * (self.runs + number * self.heads))

    def value_at(self, name: str, row: Expr, head: Expr) -> Expr:
        """Where a value of a head lies that is read."""
        return self.sum_at(len(self.sums) + list(self.read).index(name), row, head)

    def parts(self, columns: Columns, part: int) -> Iterator[tuple[int, int, int]]:
        """The runs of a panel that a part of every class meets: the run's number, its first lane there, and how many."""
        each = self.run >> columns.depth
        offset, count = columns.parts[part]
        at = 0
        while at < count:
            number = (offset + at) // each
            length = min(count - at, (number + 1) * each - offset - at)
            yield number, at, length
            at += length


def write_heads(kernel: Kernel, begin: Expr, end: Expr, first: Expr, last: Expr, waiting: Waiting, rows: Rows) -> None:
    """What follows the products of the panels ``begin ≤ p < end``, whole heads, of the rows ``first ≤ r < last``."""
    body, heads, schedule = kernel.body, kernel.heads, kernel.schedule
    assert heads is not None
    whole, rest = divmod(kernel.shape.n, schedule.width)

    def tiles(kind: Callable[[Expr, Columns, TileRows], Tile]) -> None:
        with body.loop(begin, tirx.min(end, index(whole)) if rest else end, "panel") as panel:
            columns = kernel.shape.columns(schedule.width)
            rows(lambda of: kind(panel, columns, of).write())
        if rest:
            with body.when(end > index(whole)):
                rows(lambda of: kind(index(whole), kernel.shape.columns(rest), of).write())

    low, high = heads.columns
    reached = tirx.And(begin * schedule.width < index(high), end * schedule.width > index(low))
    with body.when(reached if (low, high) != (0, kernel.shape.n) else True):
        count = tirx.min(end * schedule.width, index(kernel.shape.n)) - begin * schedule.width
        count = body.let(tirx.floordiv(count, index(heads.program.head)), "heads")
        for number, step in enumerate(heads.sums):
            tiles(lambda panel, columns, of, step=step: _Sums(kernel, panel, columns, of, waiting, step))  # type: ignore[misc]
            with body.loop(0, last - first, "row") as row, body.loop(0, count, "head") as head:
                _head(kernel, number, first, row, head)
    tiles(lambda panel, columns, of: _Finish(kernel, panel, columns, of, waiting))


def _head(kernel: Kernel, number: int, first: Expr, row: Expr, head: Expr) -> None:
    """The ``number``-th sum of a head, and what is known with it."""
    body, heads = kernel.body, kernel.heads
    assert heads is not None
    each = heads.program.head // heads.run
    start = body.let(heads.run_at(row, head * each), "runs")
    if each <= _WRITTEN_OUT:
        terms = [load(kernel.scratch, start + i) for i in range(each)]
        while len(terms) > 1:
            terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)] + terms[len(terms) & ~1 :]
        total = body.let(terms[0], "total")
    else:
        sum_ = body.alloc(1, name="sum")
        body.store(sum_, 0, f32(0))
        with body.loop(0, each, "run") as run:
            body.store(sum_, 0, load(sum_, 0) + load(kernel.scratch, start + run))
        total = body.let(load(sum_, 0), "total")
    body.store(kernel.scratch, heads.sum_at(number, row, head), total)
    sums = {s.result: i for i, s in enumerate(heads.sums)}

    def leaf(name: str, _: Place) -> Expr | None:
        if name in sums:
            return load(kernel.scratch, heads.sum_at(sums[name], row, head))
        return kernel.row_operand(name, first + row, 1)

    values = Evaluator(heads.program, body, leaf)
    for name in (n for n, after in heads.read.items() if after == number):
        body.store(kernel.scratch, heads.value_at(name, row, head), values.value(name, Place()))


class _Waiting(Tile):
    """A tile whose sums of products wait in scratch."""

    def __init__(self, kernel: Kernel, panel: Expr, columns: Columns, rows: TileRows, waiting: Waiting) -> None:
        super().__init__(kernel, panel, columns, rows)
        self._at = waiting

    def write(self) -> None:
        """What follows the products."""
        self._begin()
        self._epilogue()

    def _begin(self) -> None:
        for i in range(len(self.rows)):
            for place, offset, n in self._pieces():
                acc = self.acc[Place(i, place.cls, place.part)] = self.body.alloc(n, name="acc")
                at = self._at(self._row(i), self._slot, offset)
                self.body.store(acc, 0, load(self.kernel.scratch, at, n))

    def _row(self, i: int) -> Expr:
        return self.rows[i] - self.place.first

    @property
    def _slot(self) -> Expr:
        """The panel's number in the item."""
        return tirx.floormod(self.panel, index(self.kernel.schedule.panels))

    def _leaf(self, name: str, place: Place) -> Expr | None:
        heads = self.kernel.heads
        if heads is None or name not in heads.read:
            return super()._leaf(name, place)
        pieces: list[Expr] = []
        for run, _, count in heads.parts(self.columns, place.part):
            column = self._slot * self.kernel.schedule.width + run * heads.run
            head = tirx.floordiv(column, index(heads.program.head))
            value = load(self.kernel.scratch, heads.value_at(name, self._row(place.row), head))
            pieces.append(widen(self.body.let(value, "of_head"), count))
        return pieces[0] if len(pieces) == 1 else shuffle(pieces, range(self._lanes(place)))


class _Finish(_Waiting):
    """The epilogue."""


class _Sums(_Waiting):
    """The sums of a panel's runs."""

    def __init__(
        self, kernel: Kernel, panel: Expr, columns: Columns, rows: TileRows, waiting: Waiting, step: Step
    ) -> None:
        super().__init__(kernel, panel, columns, rows, waiting)
        self._operand = str(step.args[0])

    def _epilogue(self) -> None:
        heads, body = self.kernel.heads, self.body
        assert heads is not None
        if self.shape.program.batched:
            self.batches = list(self._batches())
        values = Evaluator(self.shape.program, body, self._leaf, self.columns)
        first = body.let(self._slot * (self.kernel.schedule.width // heads.run), "first_run")
        for i in range(len(self.rows)):
            runs: dict[int, list[Expr]] = {}
            for part in range(len(self.columns.parts)):
                for cls in range(self.columns.classes()):
                    piece = _wide(values.value(self._operand, Place(i, cls, part)))
                    for run, at, count in heads.parts(self.columns, part):
                        taken = piece if count == lanes(piece) else shuffle([piece], range(at, at + count))
                        runs.setdefault(run, []).append(taken)
            sums = {run: combine_lanes(body, pieces, lambda a, b: a + b) for run, pieces in runs.items()}
            with body.when(self.place.stored(i)):
                for run, total in sums.items():
                    body.store(self.kernel.scratch, heads.run_at(self._row(i), first + run), total)


def _wide(piece: Expr) -> Expr:
    return piece.astype(f"float32x{lanes(piece)}" if lanes(piece) > 1 else "float32")


def waiting_in(width: int, rows: int, start: int) -> Waiting:
    """Sums of products that wait as ``[panel, row, column]`` from ``start`` on."""

    def at(row: Expr, panel: Expr, offset: Index) -> Expr:
        return panel * (rows * width) + (row * width + (offset + start))

    return at


__all__: Sequence[str] = ("HeadShape", "first_of_heads", "waiting_in", "write_heads")
