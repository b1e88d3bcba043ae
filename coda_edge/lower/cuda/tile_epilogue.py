"""The epilogue of the tensor-core GEMM, on the accumulators that a thread has in registers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import tvm
from tvm import tirx

from ...epilogue.program import Kind, Output, Param, Rows
from ...epilogue.tir import STORAGE, Columns, Evaluator, Place, as_stored, level
from ..body import Buffer, Expr, f32, load
from ..statistics import NOWHERE, Statistic, finite, where_largest
from .device import NATIVE, DeviceBody, int32, int64, quotient, remainder
from .main_loop import Warp

if TYPE_CHECKING:
    from .gemm_tile import GemmKernel


class TileEpilogue:
    """What a thread does with its accumulators: the program, piece by piece, each piece one column of one row.

    A thread has ``run`` consecutive columns in every group of ``4 · run``, in each of its rows.
    """

    def __init__(self, kernel: GemmKernel, panel: Expr, block: Expr, thread: Expr, acc: Buffer) -> None:
        self.kernel = kernel
        self.shape = kernel.shape
        self.body = body = kernel.body
        self.acc = acc
        schedule = kernel.schedule
        self.run = schedule.run
        self.owned = schedule.owned
        rows, columns = schedule.fragments
        warp = Warp.of(body, schedule, thread)
        first = warp.k * (rows * columns // schedule.warps[2])
        self.lane = warp.lane
        self.row = body.let(
            int64(block) * schedule.rows
            + int64(warp.m * (rows * 16) + quotient(first, columns) * 16 + quotient(warp.lane, 4)),
            "row",
        )
        self.strip = body.let(
            quotient(
                panel * schedule.columns + warp.n * (columns * 8) + remainder(first, columns) * 8, self.shape.strip
            ),
            "strip",
        )
        self.unit = body.let(self.strip * (self.shape.strip // self.run) + remainder(warp.lane, 4), "unit")
        self.rows = [body.let(self.row + (i // 2 * 16 + i % 2 * 8), "row") for i in range(2 * self.owned[0])]
        self.clamped = [body.let(tirx.min(row, kernel.rows - 1), "clamped") for row in self.rows]
        self.batches: list[tuple[Expr, Expr]] = []
        if self.shape.program.batched:
            self.batches = [self._batch(row) for row in self.clamped]
        self.chunks: dict[tuple[str, int, int], Buffer] = {}

    def _batch(self, row: Expr) -> tuple[Expr, Expr]:
        """Of a row, the batch entry and the position in it."""
        count = self.body.let(self.kernel.rows_per_batch.astype("int32"), "count")
        batch = self.body.let(tirx.truncdiv(row.astype("int32"), count), "batch")
        return batch, self.body.let(row.astype("int32") - batch * count, "position")

    def _row_of(self, param: Param, row: int) -> Expr:
        """The row of an operand that belongs to a row of the tile."""
        if param.rows is Rows.ALL:
            return self.clamped[row]
        return int64(self.batches[row][0 if param.rows is Rows.BATCH else 1])

    def write(self) -> None:
        """All rows' outputs and statistics."""
        native = {op: partial(self.body.call, name, "float32") for op, name in NATIVE.items()}
        values = Evaluator(self.shape.program, self.body, self._leaf, self.shape.columns, native)
        tiles = [o for o in self.shape.program.outputs if o.kind is Kind.TILE]
        for i, row in enumerate(self.rows):
            staged = [(o, self._stage(o, values, i)) for o in tiles]
            with self.body.when(row < self.kernel.rows):
                for output, buffers in staged:
                    self._store(output, buffers, row, i)
            for statistic in self.shape.statistics:
                self._reduce(statistic, values, i)

    def _pieces(self, value: str, values: Evaluator, row: int) -> list[Expr]:
        """A row's values in the order of columns."""
        places = _places(self.shape.columns, level(self.shape.program, value))
        return [values.value(value, Place(row, *place)) for place in places]

    def _stage(self, output: Output, values: Evaluator, row: int) -> list[Buffer]:
        """An output's runs of a row, ready to be stored."""
        dtype = self.shape.program.dtypes()[output.value]
        pieces = self._pieces(output.value, values, row)
        count = scaled(self.run, level(self.shape.program, output.value))
        order = list(range(count))
        if output.halves:
            unit = self._unit(output)
            order = [at + i for at in range(0, count, unit) for i in (*range(0, unit, 2), *range(1, unit, 2))]
        buffers = []
        for start in range(0, len(pieces), count):
            buffer = self.body.alloc(count, STORAGE[dtype], "staged")
            for i, at in enumerate(order):
                self.body.store(buffer, i, as_stored(pieces[start + at], dtype))
            buffers.append(buffer)
        return buffers

    def _unit(self, output: Output) -> int:
        """Consecutive columns of a run that lie within one head and one of its ranges, or in none."""
        program = self.shape.program
        begin, end = output.columns or (0, program.width(output.value, self.shape.n))
        bounds = [bound for part in output.halves for bound in part]
        run = scaled(self.run, level(program, output.value))
        return math.gcd(run, begin, end - begin, output.heads or 0, *bounds)

    def _store(self, output: Output, buffers: list[Buffer], row: Expr, i: int) -> None:
        body, program = self.body, self.shape.program
        wide = level(program, output.value)
        total = program.width(output.value, self.shape.n)
        begin, end = output.columns or (0, total)
        target = self.kernel.outputs[output.name]
        run = scaled(self.run, wide)
        vector = self._unit(output) if output.halves else _vector(run, target, begin, end - begin, output.heads or 0)
        bounded = output.columns is not None or self.shape.n % self.kernel.schedule.columns != 0
        for group, buffer in enumerate(buffers):
            for offset in range(0, run, vector):
                column = self._column(wide, group) + (offset - begin)
                inside = tirx.And(column >= 0, column < end - begin) if bounded else True
                with body.when(inside):
                    if output.halves:
                        self._store_halves(output, target, buffer, offset, column, end - begin, i)
                        continue
                    place = self._place(output, row, column, end - begin, i)
                    body.store(target, place, load(buffer, offset, vector))

    def _place(self, output: Output, row: Expr, column: Expr, width: int, i: int) -> Expr:
        """Where an element of an output lies."""
        if not output.heads:
            return row * width + int64(column)
        return self._head(output, column, width, i) + int64(remainder(column, output.heads))

    def _head(self, output: Output, column: Expr, width: int, i: int) -> Expr:
        """Where a row of the head of a column begins."""
        assert output.heads
        batch, position = self.batches[i]
        head = int64(batch) * (width // output.heads) + int64(quotient(column, output.heads))
        return (head * self.kernel.rows_per_batch + int64(position)) * output.heads

    def _store_halves(
        self, output: Output, target: Buffer, buffer: Buffer, offset: int, column: Expr, width: int, i: int
    ) -> None:
        """Stores columns from ``column`` on, of which the staged even ones come before the odd ones."""
        assert output.heads
        body, unit = self.body, self._unit(output)
        start = body.let(self._head(output, column, width, i), "start")
        at = body.let(remainder(column, output.heads), "at")
        even, odd = int32(-1), int32(-1)
        for a, b in output.halves:
            inside = tirx.And(at >= a, at < b)
            even = tirx.Select(inside, a + quotient(at - a, 2), even)
            odd = tirx.Select(inside, (a + b) // 2 + quotient(at - a, 2), odd)
        even, odd = body.let(even, "even"), body.let(odd, "odd")
        half = unit // 2
        bounds = [bound for part in output.halves for bound in part]
        vector = _vector(
            half, target, output.heads, *(b // 2 for b in bounds), *((a + b) // 2 for a, b in output.halves)
        )
        with body.when(even >= 0):
            for k in range(0, half, vector):
                body.store(target, start + int64(even + k), load(buffer, offset + k, vector))
                body.store(target, start + int64(odd + k), load(buffer, offset + half + k, vector))
        with body.when(even < 0):
            for k in range(half):
                body.store(target, start + int64(at + 2 * k), load(buffer, offset + k))
                body.store(target, start + int64(at + 2 * k + 1), load(buffer, offset + half + k))

    def _column(self, wide: int, group: int) -> Expr:
        """The first column of a group's run, of a value at level ``wide``."""
        return (self.unit + group * 4) * scaled(self.run, wide)

    def _leaf(self, name: str, place: Place) -> Expr | None:
        program = self.shape.program
        if name == program.params[0].name:
            j = _natural(self.shape.columns, 0, place)
            group, x = divmod(j, self.run)
            fragment = place.row // 2 * self.owned[1] + group * (self.run // 2) + x // 2
            return load(self.acc, fragment * 4 + place.row % 2 * 2 + x % 2)
        if name not in self.kernel.operands:
            return None
        param, operand = program.param(name), self.kernel.operands[name]
        kind = param.kind
        if kind is Kind.SCALAR:
            return load(operand, 0)
        if kind is Kind.ROW:
            return load(operand, self._row_of(param, place.row))
        wide = level(program, name)
        group, x = divmod(_natural(self.shape.columns, wide, place), scaled(self.run, wide))
        return load(self._chunk(name, wide, place.row if kind is Kind.TILE else 0, group), x)

    def _chunk(self, name: str, wide: int, row: int, group: int) -> Buffer:
        """A run of a tile or column operand, read in vectors; columns beyond the last repeat it."""
        key = (name, row, group)
        if key not in self.chunks:
            program, body, operand = self.shape.program, self.body, self.kernel.operands[name]
            param = program.param(name)
            width, run = program.width(name, self.shape.n), scaled(self.run, wide)
            stored = program.operand_width(param, self.shape.n)
            vector = _vector(run, operand, width, stored)
            start = self._row_of(param, row) * stored if param.kind is Kind.TILE else int64(0)
            buffer = body.alloc(run, STORAGE[param.dtype], name)
            for offset in range(0, run, vector):
                column = self._column(wide, group) + offset
                if self.shape.n % self.kernel.schedule.columns:
                    column = tirx.min(column, int32(width - vector))
                if param.period is not None:
                    column = remainder(column, stored)
                body.store(buffer, offset, load(operand, start + int64(column), vector))
            self.chunks[key] = buffer
        return self.chunks[key]

    def _reduce(self, statistic: Statistic, values: Evaluator, i: int) -> None:
        body, shape, row = self.body, self.shape, self.rows[i]
        wide = level(shape.program, statistic.operand)
        run = scaled(self.run, wide)
        pieces = [piece.astype("float32") for piece in self._pieces(statistic.operand, values, i)]
        total, whole = scaled(shape.n, wide), scaled(shape.strip, wide)
        inside: list[Expr | bool] = [True] * len(pieces)
        count: Expr = f32(whole)
        if total % whole:
            inside = [self._column(wide, j // run) + j % run < total for j in range(len(pieces))]
            left = tirx.max(int32(1), tirx.min(int32(whole), total - self.strip * whole))
            count = body.let(left.astype("float32"), "count")
        first = self.strip * whole
        places = [self._column(wide, j // run) + j % run - first for j in range(len(pieces))]
        reduced = Strip(body, pieces, places, inside, count)
        name = next(step.op for step in shape.program.steps if step.names == statistic.results)
        results = STRIP_RULES[name](reduced)
        # A strip wholly beyond the last column has no place among the partial results.
        stored = tirx.And(row < self.kernel.rows, remainder(self.lane, 4).equal(int32(0)))
        if shape.n % self.kernel.schedule.columns:
            stored = tirx.And(stored, self.strip < shape.strips)
        with body.when(stored):
            for slot, result in enumerate(results, statistic.slot):
                body.store(self.kernel.partials, self.kernel.partial_at(slot, self.strip, row), result)


class Strip:
    """A row's columns of a strip, of which four threads each have some.

    ``places``: which column of the strip each is; ``inside`` says which are there at all.
    """

    def __init__(
        self, body: DeviceBody, pieces: list[Expr], places: list[Expr], inside: list[Expr | bool], count: Expr
    ) -> None:
        self.body = body
        self.pieces = pieces
        self.places = places
        self.inside = inside
        self.count = count

    def fold(self, combine: Callable[[Expr, Expr], Expr], neutral: float, term: Callable[[Expr], Expr]) -> Expr:
        """The terms of all columns combined, known to all four threads."""
        return self._folded(combine, neutral, [term(piece) for piece in self.pieces])

    def _folded(self, combine: Callable[[Expr, Expr], Expr], neutral: float, terms: list[Expr]) -> Expr:
        terms = [
            term if inside is True else tirx.Select(inside, term, f32(neutral))
            for term, inside in zip(terms, self.inside, strict=True)
        ]
        total = terms[0]
        for piece in terms[1:]:
            total = self.body.let(combine(total, piece), "fold")
        for mask in (1, 2):
            other = self.body.let(self.body.call("coda_exchange", "float32", total, mask), "other")
            total = self.body.let(combine(total, other), "fold")
        return total

    def sum(self, term: Callable[[Expr], Expr] = lambda x: x) -> Expr:
        """The sum of the terms."""
        return self.fold(lambda a, b: a + b, 0.0, term)

    def largest(self) -> Expr:
        """The largest; NaN if there is one."""
        return self.fold(self._larger, -math.inf, lambda x: x)

    def smallest(self) -> Expr:
        """The smallest; NaN if there is one."""
        return self.fold(self._smaller, math.inf, lambda x: x)

    # Functions of the device: TVM's analysis writes operands out at each use, and a chain of expressions that use theirs twice has no end.
    def _larger(self, a: Expr, b: Expr) -> Expr:
        return self.body.call("coda_larger", "float32", a, b)

    def _smaller(self, a: Expr, b: Expr) -> Expr:
        return self.body.call("coda_smaller", "float32", a, b)

    def moments(self) -> list[Expr]:
        """Mean and centred sum of squares."""
        mean = self.body.let(self.sum() / self.count, "mean")
        return [mean, self.sum(lambda x: (x - mean) * (x - mean))]

    def place(self) -> list[Expr]:
        """The largest, and the first column that has it."""
        largest = self.largest()
        places = [
            where_largest(piece, largest, place.astype("float32"))
            for piece, place in zip(self.pieces, self.places, strict=True)
        ]
        return [largest, self._folded(self._smaller, NOWHERE, places)]

    def expsum(self) -> list[Expr]:
        """The largest, and the sum of the exponentials of what each is above it."""
        largest = self.largest()
        shift = self.body.let(finite(largest), "shift")
        return [largest, self.sum(lambda x: self.body.call(NATIVE["exp"], "float32", x - shift))]


STRIP_RULES: dict[str, Callable[[Strip], list[Expr]]] = {
    "sum": lambda strip: [strip.sum()],
    "mean": lambda strip: [strip.sum()],
    "sumsq": lambda strip: [strip.sum(lambda x: x * x)],
    "rowmax": lambda strip: [strip.largest()],
    "rowmin": lambda strip: [strip.smallest()],
    "argmax": Strip.place,
    "expsum": Strip.expsum,
    "moments": Strip.moments,
}
"""Partial results of every reduce operator, as ``statistics.RULES`` merges them."""


def _places(columns: Columns, wide: int) -> list[tuple[int, int]]:
    """Class and part of each of a thread's columns, of a value at level ``wide``."""
    order = [
        (_natural(columns, wide, Place(0, c, p)), (c, p)) for c in range(columns.classes(wide)) for p in _parts(columns)
    ]
    return [place for _, place in sorted(order)]


def _natural(columns: Columns, wide: int, place: Place) -> int:
    """Which of a thread's columns a piece is, of a value at level ``wide``."""
    wider = Columns(scaled(columns.width, wide), columns.depth + wide, columns.vector)
    return wider.permutation()[place.cls * len(columns.parts) + place.part]


def _parts(columns: Columns) -> range:
    return range(len(columns.parts))


def _vector(run: int, buffer: Buffer, *multiples: int) -> int:
    """Elements that can be moved at once: 16 bytes at most, aligned wherever a run starts if ``multiples`` are multiples of them."""
    size = tvm.DataType(str(buffer.dtype)).itemsize
    return math.gcd(run, 16 // size, *multiples)


def scaled(width: int, wide: int) -> int:
    return width << wide if wide >= 0 else width >> -wide
