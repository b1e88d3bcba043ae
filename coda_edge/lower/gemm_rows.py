"""Where the rows of a GEMM's left operand lie: in a matrix, or in windows over a channels-last tensor. See ``gemm_tile.py``.

A row is K numbers in ``count`` runs of ``run`` consecutive ones. Of a matrix it is one run. Of a window it is one for each tap, but for the
taps of the last axis, which follow each other where they are not dilated. Ahead of its tiles, a block of rows copies the lines that
its windows see to the thread's scratch, once and with zeros around them. A line serves all windows and panels that see it, and in the
scratch a tap lies at the same distance from the start of every window.

A *line* runs along the last spatial axis. Lines follow each other along the axis before it; of further axes each combination of taps
has lines of its own. The images of a batch are stacked, each with its padding, so that a block may have lines of several images. A
block is some whole lines, or a part of one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import numpy as np
import sympy
from tvm import tirx

from ..symbolic import Dim, product, simplify
from ..window import Window
from .body import Body, Buffer, Expr, Index, index, load, turned, widen


class Rows(Protocol):
    """What a tile asks of its left operand, within the item whose block ``block`` gave."""

    params: Sequence[Expr]
    """Sizes that the kernel has as parameters."""
    buffer: Buffer
    run: int
    count: int
    stride: int
    """Elements from one step of K to the next."""
    blocks: Expr
    """How many blocks there are; known for matrices only."""
    copies: bool
    """Whether ``prepare`` has something to do."""

    def block(self, number: Expr) -> tuple[Expr, Expr]:
        """A block's first row, and the one behind its last."""

    def prepare(self) -> None:
        """Does what the block needs ahead of its tiles."""

    def starts(self, rows: Sequence[Expr], consecutive: bool) -> list[Expr]:
        """The element at which each row's first run begins. ``consecutive``: the rows follow each other."""

    def runs(self) -> AbstractContextManager[tuple[Index, Index]]:
        """Loops over the runs of a row: the number of each, and its distance from the first."""


class MatrixRows:
    """The rows of ``a [rows, k]``, spread evenly over blocks of whole tiles of ``tile`` rows, at most ``size``."""

    params: Sequence[Expr] = ()
    count = stride = 1
    copies = False

    def __init__(self, body: Body, a: Buffer, rows: Expr, k: int, size: int, tile: int) -> None:
        self.body, self.buffer, self.rows, self.run, self.size, self.tile = body, a, rows, k, size, tile
        self.blocks = body.let(tirx.floordiv(rows + (size - 1), index(size)), "blocks")
        even = tirx.floordiv(rows + (self.blocks - 1), tirx.max(self.blocks, index(1)))
        self._each = body.let(tirx.floordiv(even + (tile - 1), index(tile)) * tile, "each")
        self.first = self.last = index(0)

    def block(self, number: Expr) -> tuple[Expr, Expr]:
        """As ``Rows`` says."""
        self.first = self.body.let(number * self._each, "first")
        self.last = self.body.let(tirx.min(self.rows, self.first + self._each), "last")
        return self.first, self.last

    def prepare(self) -> None:
        """Nothing."""

    def starts(self, rows: Sequence[Expr], consecutive: bool) -> list[Expr]:
        """As ``Rows`` says."""
        starts = [self.body.let(row * self.run, "start") for row in (rows[:1] if consecutive else rows)]
        return [starts[0] + i * self.run for i in range(len(rows))] if consecutive else starts

    @contextmanager
    def runs(self) -> Iterator[tuple[Index, Index]]:
        """The only one."""
        yield 0, 0


class PackedRows:
    """The rows of a matrix, copied to ``scratch`` from element ``at`` on as ``[tile, k, row of the tile]``."""

    params: Sequence[Expr] = ()
    count = 1
    copies = True

    def __init__(self, matrix: MatrixRows, scratch: Buffer, at: int) -> None:
        self.buffer, self.run, self.stride, self.blocks = scratch, matrix.run, matrix.tile, matrix.blocks
        self._matrix, self._at = matrix, at

    def block(self, number: Expr) -> tuple[Expr, Expr]:
        """As ``Rows`` says; what follows is about this block."""
        return self._matrix.block(number)

    def prepare(self) -> None:
        """Copies the block, four rows and steps at a time; the last row is repeated until its tile is full."""
        matrix, body, tile, k = self._matrix, self._matrix.body, self.stride, self.run
        squares, steps = tile // _SQUARE * _SQUARE, k // _SQUARE
        tiles = body.let(tirx.floordiv(matrix.last - matrix.first + (tile - 1), index(tile)), "tiles")
        with body.loop(0, tiles, "tile") as number:
            row = body.let(matrix.first + number * tile, "row")
            rows = [body.let(tirx.min(row + i, matrix.last - 1) * k, "start") for i in range(tile)]
            to = body.let(number * (tile * k) + self._at, "to")
            with body.loop(0, steps, "step") as step:
                for i in range(0, squares, _SQUARE):
                    square = [
                        body.let(load(matrix.buffer, rows[i + j] + step * _SQUARE, _SQUARE)) for j in range(_SQUARE)
                    ]
                    for j, column in enumerate(turned(body, square)):
                        body.store(self.buffer, to + (step * _SQUARE + j) * tile + i, column)
                for i in range(squares, tile):
                    for j in range(_SQUARE):
                        at = step * _SQUARE + j
                        body.store(self.buffer, to + at * tile + i, load(matrix.buffer, rows[i] + at))
            with body.loop(steps * _SQUARE, k, "step") as step:
                for i in range(tile):
                    body.store(self.buffer, to + step * tile + i, load(matrix.buffer, rows[i] + step))

    def starts(self, rows: Sequence[Expr], consecutive: bool) -> list[Expr]:
        """As ``Rows`` says."""
        body, tile = self._matrix.body, self.stride
        starts = []
        for row in rows[:1] if consecutive else rows:
            within = body.let(row - self._matrix.first, "within")
            place = body.let(tirx.floordiv(within, index(tile)), "tile")
            starts.append(body.let(place * (tile * self.run - tile) + within + self._at, "start"))
        return [starts[0] + i for i in range(len(rows))] if consecutive else starts

    @contextmanager
    def runs(self) -> Iterator[tuple[Index, Index]]:
        """The only one."""
        yield 0, 0


_SQUARE = 4
"""Rows and steps that are turned at a time."""
_UNIT = 4
"""Bytes of an element of scratch."""


@dataclass(frozen=True)
class WindowShape:
    """What a kernel is made for; ``window`` has two spatial axes at least."""

    window: Window
    channels: int

    @staticmethod
    def of(window: Window, channels: int) -> WindowShape:
        """If ``window`` has one axis, it becomes that of lines one above the other, of which there is one."""
        parts = (window.kernel, window.strides, window.dilations, window.before, window.after)
        if len(window.kernel) == 1:
            window = Window(*((start, *part) for start, part in zip((1, 1, 1, 0, 0), parts, strict=True)))
        return WindowShape(window, channels)

    @property
    def overlap(self) -> int:
        """Lines that the padded images of a batch have more than ``strides`` a line of their result."""
        return max(0, self.window.reach[-2] - self.window.strides[-2])

    @property
    def planes(self) -> int:
        """Combinations of taps of the axes before lines."""
        return math.prod(self.window.kernel[:-2])


@dataclass(frozen=True)
class WindowSizes:
    """The sizes of one call: those of ``spatial`` axes of the tensor and of its windows, and how rows fall into blocks.

    A block is ``lines`` lines of the result, or one of ``parts`` parts of a line; it has ``part`` rows at most. In scratch it has
    ``tall`` lines of ``wide`` places.
    """

    spatial: tuple[tuple[Dim, Dim], ...]
    lines: Dim
    parts: Dim
    part: Dim
    tall: Dim
    wide: Dim
    blocks: Dim

    @staticmethod
    def of(shape: WindowShape, batch: Dim, sizes: Sequence[Dim], block: int, tile: int) -> WindowSizes:
        """For a tensor ``[batch, *sizes, channels]`` and blocks of about ``block`` rows, tiles having ``tile``."""
        sizes = (1,) * (len(shape.window.kernel) - len(sizes)) + tuple(sizes)
        out = shape.window.out(sizes)
        columns, (stride, column_stride) = out[-1], shape.window.strides[-2:]
        reach, column_reach = shape.window.reach[-2:]
        lines, parts = _most(1, _quotient(block, _most(1, columns))), _quotient(columns + (block - 1), block)
        part = _quotient(lines * columns + parts * tile - 1, _most(1, parts * tile)) * tile
        crossed = _quotient(lines + out[-2] - 2, _most(1, out[-2]))
        tall = (lines - 1) * stride + reach + crossed * shape.overlap
        wide = (_least(part, columns) - 1) * column_stride + column_reach
        blocks = _quotient(product([batch, *out[:-1]]) + lines - 1, lines) * parts
        pairs = tuple(zip(sizes, out, strict=True))
        return WindowSizes(pairs, *(simplify(d) for d in (lines, parts, part, tall, wide, blocks)))

    @property
    def ints(self) -> tuple[Dim, ...]:
        """In the order of ``WindowRows.params``."""
        return (*itertools.chain(*self.spatial), self.lines, self.parts, self.part, self.tall, self.wide)

    def scratch(self, shape: WindowShape) -> Dim:
        """Elements of the lines of a block."""
        return simplify(self.tall * self.wide * (shape.planes * shape.channels))


def _most(a: Dim, b: Dim) -> Dim:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else sympy.Max(a, b)


def _least(a: Dim, b: Dim) -> Dim:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else sympy.Min(a, b)


def _quotient(a: Dim, b: Dim) -> Dim:
    """``a / b`` rounded down."""
    return a // b if isinstance(a, int) and isinstance(b, int) else sympy.floor(a / b)


class WindowRows:
    """The windows of ``a [batch, *spatial, channels]``, whose lines ``prepare`` copies to ``scratch`` from float32 ``at`` on.

    ``vector``: float32 of a vector; ``zero``: what A holds in place of 0, which stands around its lines.
    """

    stride = 1
    copies = True
    blocks = index(0)

    def __init__(
        self, body: Body, shape: WindowShape, a: Buffer, scratch: Buffer, at: int, rows: Expr, vector: int, zero: int
    ) -> None:
        size = np.dtype(str(a.dtype)).itemsize
        self.buffer = scratch if size == _UNIT else body.view(scratch, str(a.dtype))
        at, vector = at * (_UNIT // size), vector * (_UNIT // size)
        self._zero = tirx.const(zero, str(a.dtype))
        window = shape.window
        self._joined = window.dilations[-1] == 1
        self.run = shape.channels * (window.kernel[-1] if self._joined else 1)
        self.count = window.taps * shape.channels // self.run
        self._body, self._shape, self._a, self._at, self._rows, self._vector = body, shape, a, at, rows, vector
        self._spatial = [
            (tirx.Var(f"size{i}", "int64"), tirx.Var(f"windows{i}", "int64")) for i in range(len(window.kernel))
        ]
        blocks = [tirx.Var(name, "int64") for name in ("lines", "parts", "part", "tall", "wide")]
        self._lines, self._parts, self._part, self._tall, self._wide = blocks
        self.params: Sequence[Expr] = [*itertools.chain(*self._spatial), *blocks]
        self._first_line = self._first_column = self._end_line = index(0)

    def block(self, number: Expr) -> tuple[Expr, Expr]:
        """As ``Rows`` says; what follows is about this block."""
        body, columns = self._body, self._spatial[-1][1]
        group = body.let(tirx.floordiv(number, self._parts), "group")
        rows = body.let(self._lines * columns, "block_rows")
        first = body.let(group * rows + (number - group * self._parts) * self._part, "first")
        last = body.let(tirx.min(tirx.min(first + self._part, (group + 1) * rows), self._rows), "last")
        line, column = self._line(first)
        self._first_line = body.let(self._stacked(line), "first_line")
        end = body.let(tirx.floordiv(last - 1, columns), "last_line")
        self._end_line = body.let(self._stacked(end) + self._shape.window.reach[-2], "end_line")
        self._first_column = body.let(column * self._shape.window.strides[-1], "first_column")
        return first, last

    def _line(self, row: Expr) -> tuple[Expr, Expr]:
        """The line of the result that a row is in, and its place there."""
        columns = self._spatial[-1][1]
        line = self._body.let(tirx.floordiv(row, columns), "line")
        return line, self._body.let(row - line * columns, "column")

    def _stacked(self, line: Expr) -> Expr:
        """Where the windows of a line of the result begin among the padded lines of all images."""
        overlap, stride = self._shape.overlap, self._shape.window.strides[-2]
        if not overlap:
            return line * stride
        return line * stride + self._body.let(tirx.floordiv(line, self._spatial[-2][1]), "image") * overlap

    def prepare(self) -> None:
        """Copies the block's lines, and writes zeros where the windows reach beyond the tensor."""
        body, window, channels = self._body, self._shape.window, self._shape.channels
        before, size = window.before[-1], self._spatial[-1][0]
        left = body.let(_within(index(before) - self._first_column, index(0), self._wide), "left")
        right = body.let(_within(size + before - self._first_column, left, self._wide), "right")
        source = body.let((self._first_column + left - before) * channels, "source")
        for number, taps in enumerate(itertools.product(*map(range, window.kernel[:-2]))):
            with body.loop(self._first_line, self._end_line, "stacked") as stacked:
                line = number * self._tall + stacked - self._first_line
                start = body.let(line * (self._wide * channels) + self._at, "to")
                inside, at = self._source_line(stacked, taps)
                with body.when(inside):
                    self._fill(start, left * channels)
                    self._copy(start + left * channels, at * (size * channels) + source, (right - left) * channels)
                    self._fill(start + right * channels, (self._wide - right) * channels)
                with body.when(tirx.Not(inside)):
                    self._fill(start, self._wide * channels)

    def _source_line(self, stacked: Expr, taps: Sequence[int]) -> tuple[Expr, Expr]:
        """Whether a padded line is one of the tensor, and which, under ``taps`` of the axes before."""
        body, window = self._body, self._shape.window
        height, out = self._spatial[-2]
        padded = out * window.strides[-2] + self._shape.overlap
        image = body.let(tirx.floordiv(stacked, padded), "image")
        line = body.let(stacked - image * padded - window.before[-2], "line")
        inside = [line >= 0, line < height]
        places: list[tuple[Expr, Expr]] = []
        for axis in reversed(range(len(taps))):
            size, out = self._spatial[axis]
            rest = body.let(tirx.floordiv(image, out), "rest")
            shift = taps[axis] * window.dilations[axis] - window.before[axis]
            place = body.let((image - rest * out) * window.strides[axis] + shift, "place")
            inside += [place >= 0, place < size]
            places.insert(0, (place, size))
            image = rest
        at = image
        for place, size in (*places, (line, height)):
            at = at * size + place
        return body.let(reduce(tirx.And, inside), "inside"), body.let(at, "from")

    def _fill(self, start: Expr, count: Expr) -> None:
        start = self._body.let(start, "to")
        for offset, lanes in self._spans(count):
            self._body.store(self.buffer, start + offset, widen(self._zero, lanes))

    def _copy(self, start: Expr, source: Expr, count: Expr) -> None:
        start, source = self._body.let(start, "to"), self._body.let(source, "from")
        for offset, lanes in self._spans(count):
            self._body.store(self.buffer, start + offset, load(self._a, source + offset, lanes))

    def _spans(self, count: Expr) -> Iterator[tuple[Expr, int]]:
        """Loops over ``count`` elements, a vector at a time and then one at a time."""
        body, vector = self._body, self._vector
        steps = body.let(tirx.floordiv(count, index(vector)), "steps")
        with body.loop(0, steps, "step") as step:
            yield step * vector, vector
        with body.loop(steps * vector, count, "at") as at:
            yield at, 1

    def starts(self, rows: Sequence[Expr], consecutive: bool) -> list[Expr]:
        """As ``Rows`` says: one division a tile where its rows follow each other."""
        body, channels = self._body, self._shape.channels
        step = self._shape.window.strides[-1]
        starts: list[Expr] = []
        line = column = index(0)
        for i, row in enumerate(rows):
            if i == 0 or not consecutive:
                line, column = self._line(row)
            else:
                over = body.let((column + 1).equal(self._spatial[-1][1]), "over")
                line = body.let(tirx.Select(over, line + 1, line), "line")
                column = body.let(tirx.Select(over, index(0), column + 1), "column")
            place = (self._stacked(line) - self._first_line) * self._wide + (column * step - self._first_column)
            starts.append(body.let(place * channels + self._at, "start"))
        return starts

    @contextmanager
    def runs(self) -> Iterator[tuple[Index, Index]]:
        """Taps in row-major order."""
        body, window, channels = self._body, self._shape.window, self._shape.channels
        columns = 1 if self._joined else window.kernel[-1]
        lines = window.kernel[-2] * columns
        with body.loop(0, self.count, "run") as run:
            plane = body.let(tirx.floordiv(run, index(lines)), "plane") if self._shape.planes > 1 else index(0)
            line = body.let(tirx.floordiv(run - plane * lines, index(columns)), "tap_line")
            column = run - plane * lines - line * columns
            place = (plane * self._tall + line * window.dilations[-2]) * self._wide + column * window.dilations[-1]
            yield run, body.let(place * channels, "distance")


def _within(value: Expr, low: Expr, high: Expr) -> Expr:
    return tirx.max(low, tirx.min(value, high))
