"""A GEMM of few rows: as when text is generated, reading the weights is all there is to it.

A core reads memory fastest along several streams, since prefetchers follow each within its page only. So K is cut into ``STREAMS`` parts that
are gone over side by side: they add to the same results, or to sets of their own where registers are left. What the rows of W or groups of
them share is not applied to weights: a gain is multiplied to the rows of A ahead of the items, a factor and a zero point go once to the sum of
a group, an offset once to the sum of all. Of words that hold several rows, each field is converted where it lies, 2ˢ times too large, and
meets an element of A that is 2⁻ˢ times its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tvm import tirx

from ..epilogue.tir import Columns, Place
from .body import Body, Buffer, Expr, Index, f32, index, lanes, load, shuffle, widen
from .gemm_shape import GemmShape
from .gemm_tile import Tile, TileRows
from .weights import WeightFormat

if TYPE_CHECKING:
    from .gemm_items import Kernel

FEW = 4
"""Up to how many rows there are forms for."""
STREAMS = 8
_FORMS = (1, 2, 4)
"""Numbers of rows that have a form of their own; others take the next one, with the last row repeated."""
_WORD = 32
"""Bits of what several rows share."""


def few_rows(shape: GemmShape) -> int:
    """Up to how many rows the kernel does by ``FewRows``, in one block; 0 where the rows are windows."""
    return min(FEW, shape.schedule.block_rows) if shape.window is None else 0


def few_rows_scratch(shape: GemmShape) -> int:
    """float32 of scratch when rows are few: hoisted row values and the prepared rows of A."""
    return shape.converted_at + (few_rows(shape) * _PreparedRows(shape).stride if _prepares(shape) else 0)


def prepare_few_rows(kernel: Kernel) -> None:
    """Writes to scratch what the items of a call share."""
    if _prepares(kernel.shape):
        with kernel.body.loop(0, kernel.rows, "row") as row:
            _PreparedRows(kernel.shape).write(kernel, row)


def few_rows_panel(kernel: Kernel, panel: Expr, columns: Columns) -> None:
    """A panel for all rows, of which there are at most ``few_rows``."""
    body, least = kernel.body, 0
    for count in (form for form in _FORMS if form <= few_rows(kernel.shape)):
        with body.when(tirx.And(kernel.rows > index(least), kernel.rows <= index(count))):
            rows = [index(0), *(body.let(tirx.min(index(i), kernel.rows - 1), "row") for i in range(1, count))]
            valid = [None if i <= least else index(i) < kernel.rows for i in range(count)]
            FewRows(kernel, panel, columns, TileRows(index(0), index(1), index(0), rows, valid)).write()
        least = count


def _prepares(shape: GemmShape) -> bool:
    """Whether rows of A are read from scratch."""
    format = shape.format
    parts = format.scaled or format.shifted or bool(format.zeros) or bool(format.bias) or format.rows_per_element > 1
    return parts and not _crossing(format, shape.k)


def _crossing(format: WeightFormat, k: int) -> bool:
    """Whether a word has rows of two groups, so that weights are made one by one."""
    return format.groups(k) > 1 and format.group % format.rows_per_element > 0


def _field_scale(format: WeightFormat, row: int) -> float:
    """By what an element of A is multiplied, since the field of its row lies higher in the word; the highest one is moved."""
    shift = row % format.rows_per_element * format.bits
    return 1.0 if shift + format.bits >= _WORD else 2.0**-shift


class _PreparedRows:
    """The rows of A in scratch, each ``[K elements, sums of the groups, sum without gains]``."""

    def __init__(self, shape: GemmShape) -> None:
        self.shape = shape
        self.k = shape.k
        self.format = shape.format
        self.groups = max(1, self.format.groups(self.k))
        self.group = self.format.group if self.groups > 1 else self.k
        self.stride = self.k + self.groups + 1

    def at(self, row: Expr, offset: Index) -> Expr:
        """Where an element of a row lies."""
        return row * self.stride + (offset + self.shape.converted_at)

    def write(self, kernel: Kernel, row: Expr) -> None:
        """Row ``row``."""
        body, lanes_ = kernel.body, max(self.shape.schedule.lanes, self.format.rows_per_element)
        start = body.let(row * self.k, "start")
        total, plain = body.alloc(lanes_, name="sum"), body.alloc(lanes_, name="plain_sum")
        body.store(plain, 0, widen(f32(0), lanes_))

        def step(at: Expr, count: int) -> None:
            value = body.let(load(kernel.a, start + at, count), "value")
            body.store(plain, 0, load(plain, 0, count) + value)
            if self.format.scaled:
                value = body.let(value * load(kernel.weight.scale, at, count), "value")
            body.store(total, 0, load(total, 0, count) + value)
            scales = [f32(_field_scale(self.format, i)) for i in range(count)]
            if self.format.rows_per_element > 1:
                value = value * (shuffle(scales, range(count)) if count > 1 else scales[0])
            body.store(kernel.scratch, self.at(row, at), value)

        def whole(begin: Index, size: int, group: Index) -> None:
            body.store(total, 0, widen(f32(0), lanes_))
            vectors, rest = divmod(size, lanes_)
            with body.loop(0, vectors, "vector") as vector:
                step(body.let(begin + vector * lanes_, "at"), lanes_)
            self._single(kernel, row, start, begin + vectors * lanes_, rest, (plain, total))
            body.store(kernel.scratch, self.at(row, group + self.k), _sum(body, total, lanes_))

        full, rest = divmod(self.k, self.group)
        with body.loop(0, full, "group") as group:
            whole(body.let(group * self.group, "first"), self.group, group)
        if rest:
            whole(index(full * self.group), rest, index(full))
        body.store(kernel.scratch, self.at(row, self.k + self.groups), _sum(body, plain, lanes_))

    def _single(
        self, kernel: Kernel, row: Expr, start: Expr, begin: Index, count: int, sums: tuple[Buffer, Buffer]
    ) -> None:
        """``count`` elements one by one, the first of which begins a word."""
        body, (plain, total) = kernel.body, sums
        for i in range(count):
            at = body.let(begin + i, "at")
            value = body.let(load(kernel.a, start + at), "value")
            body.store(plain, 0, load(plain, 0) + value)
            if self.format.scaled:
                value = body.let(value * load(kernel.weight.scale, at), "value")
            body.store(total, 0, load(total, 0) + value)
            body.store(kernel.scratch, self.at(row, at), value * f32(_field_scale(self.format, i)))


def _sum(body: Body, vector: Buffer, count: int) -> Expr:
    """The sum of a vector's elements, pairwise."""
    value = load(vector, 0, count)
    while lanes(value) > 1:
        half = lanes(value) // 2
        low, high = (shuffle([value], list(range(at, at + half))) for at in (0, half))
        value = body.let(low + high, "half")
    return value


_Sums = dict[Place, Buffer]
"""Sums of products, by their place in the tile."""


class FewRows(Tile):
    """All rows of one panel."""

    def _multiply(self) -> None:
        kernel, shape, body = self.kernel, self.shape, self.body
        self._panel = kernel.weight.panel(body, self.panel, kernel.schedule.width, self.columns.width)
        self._a, at = kernel.a, lambda row, offset: row * shape.k + offset
        if _prepares(shape):
            self._a, at = kernel.scratch, _PreparedRows(shape).at
        self._starts = [body.let(at(row, 0), "start") for row in self.rows]
        if _crossing(shape.format, shape.k):
            with body.loop(0, shape.k, "k") as step:
                self._add(self.acc, step, lambda offset, n: self._panel.load(step, offset, n))
            return
        if shape.format.groups(shape.k) > 1:
            self._by_groups()
        else:
            self._in_one_group()
        self._shift()

    def _zeros(self) -> _Sums:
        sums = {
            Place(i, place.cls, place.part): self.body.alloc(n, name="acc")
            for i in range(len(self.rows))
            for place, _, n in self._pieces()
        }
        self._clear(sums)
        return sums

    def _clear(self, sums: _Sums) -> None:
        for _, place, _, n in self._places():
            self.body.store(sums[place], 0, widen(f32(0), n))

    def _places(self) -> Iterator[tuple[int, Place, int, int]]:
        """Row, place, first column and number of columns of each vector of results."""
        for i in range(len(self.rows)):
            for place, offset, n in self._pieces():
                yield i, Place(i, place.cls, place.part), offset, n

    @property
    def _sets(self) -> int:
        """How many sets of sums registers hold."""
        return max(1, self.kernel.schedule.rows * self.kernel.schedule.vectors // len(self.acc))

    def _in_one_group(self) -> None:
        body, format = self.body, self.shape.format
        elements, rest = divmod(self.shape.k, format.rows_per_element)
        sets = [self.acc, *(self._zeros() for _ in range(min(self._sets, STREAMS) - 1))]
        each = elements // STREAMS
        with body.loop(0, each, "element") as element:
            for stream in range(STREAMS):
                self._element(sets[stream % len(sets)], body.let(element + stream * each, "at"))
        with body.loop(each * STREAMS, elements, "element") as element:
            self._element(self.acc, element)
        if rest:
            self._element(self.acc, index(elements), rest)
        for _, place, _, n in self._places():
            for other in sets[1:]:
                body.store(self.acc[place], 0, load(self.acc[place], 0, n) + load(other[place], 0, n))
        if format.group or format.bias:
            for i, place, offset, n in self._places():
                body.store(self.acc[place], 0, self._shared(self.acc[place], i, index(0), offset, n))

    def _by_groups(self) -> None:
        body, format = self.body, self.shape.format
        groups, rest = divmod(self.shape.k, format.group)
        streams = min(STREAMS, 1 << (self._sets.bit_length() - 1))
        sets = [self._zeros() for _ in range(streams)]
        each, elements = groups // streams, format.group // format.rows_per_element
        with body.loop(0, each, "group") as group:
            self._groups(sets, [body.let(group + s * each, "group") for s in range(streams)], elements)
        with body.loop(each * streams, groups, "group") as group:
            self._groups(sets[:1], [group], elements)
        if rest:
            self._groups(sets[:1], [index(groups)], *divmod(rest, format.rows_per_element))

    def _groups(self, sets: Sequence[_Sums], groups: Sequence[Expr], elements: int, rest: int = 0) -> None:
        """Adds what a group for each of ``sets`` gives: ``elements`` elements, and of another one ``rest`` rows."""
        body, format = self.body, self.shape.format
        for sums in sets:
            self._clear(sums)
        starts = [body.let(group * (format.group // format.rows_per_element), "first") for group in groups]
        with body.loop(0, elements, "element") as element:
            for sums, start in zip(sets, starts, strict=True):
                self._element(sums, body.let(start + element, "at"))
        if rest:
            self._element(sets[0], starts[0] + elements, rest)
        for sums, group in zip(sets, groups, strict=True):
            for i, place, offset, n in self._places():
                value = self._shared(sums[place], i, group, offset, n)
                body.store(self.acc[place], 0, load(self.acc[place], 0, n) + value)

    def _shared(self, sums: Buffer, row: int, group: Expr, offset: int, count: int) -> Expr:
        """What the products of a group come to with its zero point and factor."""
        value = load(sums, 0, count)
        zero, quantum = self._panel.zero(group, offset, count), self._panel.quantum(group, offset, count)
        if zero is not None:
            total = load(self._a, self._starts[row] + (group + self.shape.k))
            value = value - widen(zero, count) * widen(total, count)
        return value if quantum is None else value * quantum

    def _shift(self) -> None:
        """Takes off what each weight of a column is shifted by."""
        for i, place, offset, n in self._places() if self.shape.format.shifted else ():
            total = load(self._a, self._starts[i] + (self.shape.k + _PreparedRows(self.shape).groups))
            value = load(self.acc[place], 0, n) - widen(total, n) * self._panel.shift(offset, n)
            self.body.store(self.acc[place], 0, value)

    def _element(self, sums: _Sums, element: Expr, count: int | None = None) -> None:
        """Adds the products of an element's rows of W, or of the first ``count`` of them."""
        body, format = self.body, self.shape.format
        fields = format.rows_per_element
        if fields == 1:
            self._add(sums, element, lambda offset, n: self._panel.whole(element, offset, n))
            return
        words = {offset: body.let(self._panel.words(element, offset, n), "words") for _, offset, n in self._pieces()}
        for field in range(count or fields):
            self._add(sums, element * fields + field, partial(self._field, words, field))

    def _field(self, words: Mapping[int, Expr], field: int, offset: int, count: int) -> Expr:
        """A field of words where it lies, as float32."""
        bits = self.shape.format.bits
        shift = field * bits
        if shift + bits == _WORD:
            value = words[offset] >> widen(tirx.const(shift, "uint32"), count)
        else:
            value = words[offset] & widen(tirx.const((1 << bits) - 1 << shift, "uint32"), count)
        # As int32, for which every processor has a conversion.
        lanes_ = "" if count == 1 else f"x{count}"
        return value.astype(f"int32{lanes_}").astype(f"float32{lanes_}")

    def _add(self, sums: _Sums, row: Expr, weights: Callable[[int, int], Expr]) -> None:
        """Adds the products of one row of W, of which ``weights(offset, count)`` are columns."""
        body = self.body
        values = {offset: body.let(weights(offset, n), "w") for _, offset, n in self._pieces()}
        elements = [body.let(load(self._a, start + row), "a") for start in self._starts]
        for i, place, offset, n in self._places():
            product = widen(elements[i], n) * values[offset]
            body.store(sums[place], 0, load(sums[place], 0, n) + product)
