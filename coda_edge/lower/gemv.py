"""A GEMM of few rows: as when text is generated, reading the weights is all there is to it.

A core reads memory fastest along several streams, since prefetchers follow each within its page only. So several panels are gone over side by
side, and the parts into which K is cut: these add to the same results, or to sets of their own where registers are left. Each is asked for more
than a page ahead, so that prefetchers are there when a page begins: 15 % on an Ice Lake server. Words of several rows are so short that such
streams end before prefetchers know them: they are read as they lie, one panel after the other, and asked for two pages ahead, 2 to 3 times as fast
on Zen 5. There fields take turns with sets of sums. What the rows of W or groups of them share is not applied to weights: a gain is multiplied to the rows of A
ahead of the items, a factor and a zero point go once to the sum of a group, an offset once to the sum of all. Of words that hold several rows,
each field is converted where it lies, 2ˢ times too large, and meets an element of A that is 2⁻ˢ times its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tvm import tirx

from ..epilogue.tir import Columns, Place
from .body import Body, Buffer, Expr, Index, f32, index, lanes, load, shuffle, widen
from .gemm_heads import waiting_in, write_heads
from .gemm_shape import GemmShape
from .gemm_tile import LINE, Tile, TileRows, pieces
from .weights import WeightFormat, WeightPanel

if TYPE_CHECKING:
    from .gemm_items import Kernel

FEW = 4
"""Up to how many rows there are forms for."""
STREAMS = 8
PANELS = 4
"""Streams along which weights are read, and how many panels they belong to at most."""
AHEAD = 64 << 10
"""Bytes of all streams together that are asked for ahead: of each more than a page."""
_TURNS = 6
"""Independent sums, in vectors, that fields of words take turns with at least."""
_FORMS = {False: (1, 4), True: (1, 2, 4)}
"""By whether weights are converted, numbers of rows that have a form of their own; others take the next one, with the last row repeated.

Where arithmetic has to wait for memory, rows that are not needed cost nothing.
"""
_WORD = 32
"""Bits of what several rows share."""


def few_rows(shape: GemmShape) -> int:
    """Up to how many rows the kernel does by ``write_few_rows``, in one block; 0 where the rows are windows, or sums are of whole numbers."""
    return min(FEW, shape.schedule.block_rows) if shape.window is None and not shape.dot else 0


def few_rows_scratch(shape: GemmShape) -> int:
    """float32 of scratch when rows are few: hoisted row values, the prepared rows of A, and sums that wait for the epilogue."""
    waiting = shape.schedule.panels if shape.waits else PANELS
    return _waiting_at(shape) + waiting * few_rows(shape) * shape.schedule.width


def _waiting_at(shape: GemmShape) -> int:
    return shape.converted_at + (few_rows(shape) * _PreparedRows(shape).stride if _prepares(shape) else 0)


def write_few_rows(kernel: Kernel) -> None:
    """All items of a call with at most ``few_rows`` rows."""
    body, shape, schedule = kernel.body, kernel.shape, kernel.schedule
    kernel.hoist(index(0), kernel.rows)
    if _prepares(shape):
        with body.loop(0, kernel.rows, "row") as row:
            _PreparedRows(shape).write(kernel, row)
    whole, rest = divmod(shape.n, schedule.width)
    begin = body.let(kernel.begin * schedule.panels, "first_panel")
    end = body.let(kernel.end * schedule.panels, "last_panel")
    least = 0
    forms = _FORMS[shape.format.converts]
    for count in sorted({min(form, few_rows(shape)) for form in forms}):
        with body.when(tirx.And(kernel.rows > index(least), kernel.rows <= index(count))):
            rows = [index(0), *(body.let(tirx.min(index(i), kernel.rows - 1), "row") for i in range(1, count))]
            valid = [None if i <= least else index(i) < kernel.rows for i in range(count)]
            tile_rows = TileRows(index(0), index(1), index(0), rows, valid)
            if shape.waits:
                with body.loop(kernel.begin, kernel.end, "item") as item:
                    _whole_heads(kernel, tile_rows, body.let(item * schedule.panels, "first_panel"))
                least = count
                continue
            if whole:
                stop = body.let(tirx.min(end, index(whole)), "stop")
                _panels(kernel, shape.columns(schedule.width), tile_rows, begin, stop)
            if rest:
                with body.when(end > index(whole)):
                    _single(kernel, shape.columns(rest), tile_rows, index(whole), index(0))
                    _Finish(kernel, index(whole), shape.columns(rest), tile_rows, index(0)).write()
        least = count


def _whole_heads(kernel: Kernel, rows: TileRows, begin: Expr) -> None:
    """The panels of an item, from ``begin`` on, and then their epilogue."""
    body, shape, schedule = kernel.body, kernel.shape, kernel.schedule
    whole, rest = divmod(shape.n, schedule.width)
    many = _at_a_time(kernel, rows)
    end = body.let(tirx.min(begin + schedule.panels, index(shape.panels)), "end")
    count = body.let(tirx.min(end, index(whole)) - begin, "count")
    columns = shape.columns(schedule.width)
    steps = body.let(tirx.floordiv(count, index(many)), "steps")
    with body.loop(0, steps, "step") as step:
        slot = body.let(step * many, "slot")
        _Products(kernel, columns, rows, [begin + slot + i for i in range(many)]).write(slot)
    if many > 1:
        with body.loop(steps * many, count, "slot") as slot:
            _single(kernel, columns, rows, begin + slot, slot)
    if rest:
        with body.when(end > index(whole)):
            _single(kernel, shape.columns(rest), rows, index(whole), index(whole) - begin)
    waiting = waiting_in(schedule.width, len(rows.rows), _waiting_at(shape))
    write_heads(kernel, begin, end, index(0), kernel.rows, waiting, lambda write: write(rows))


def _at_a_time(kernel: Kernel, rows: TileRows) -> int:
    """How many panels are gone over side by side: as many as registers have room for."""
    if kernel.shape.format.rows_per_element > 1:
        return 1
    held = kernel.schedule.rows // len(rows.rows)
    return max(1, min(PANELS, 1 << max(held, 1).bit_length() - 1))


def _panels(kernel: Kernel, columns: Columns, rows: TileRows, begin: Expr, stop: Expr) -> None:
    """Whole panels: as many at a time as registers have room for, and what is left one by one."""
    body, many = kernel.body, _at_a_time(kernel, rows)
    with body.loop(0, tirx.floordiv(stop - begin + (many - 1), index(many)), "step") as step:
        first = body.let(begin + step * many, "first")
        count = body.let(tirx.min(stop - first, index(many)), "count")
        with body.when(count.equal(index(many))):
            _Products(kernel, columns, rows, [first + i for i in range(many)]).write(index(0))
        if many > 1:
            with body.when(count < index(many)), body.loop(0, count, "slot") as slot:
                _single(kernel, columns, rows, first + slot, slot)
        with body.loop(0, count, "slot") as slot:
            _Finish(kernel, body.let(first + slot, "panel"), columns, rows, slot).write()


def _single(kernel: Kernel, columns: Columns, rows: TileRows, panel: Expr, slot: Expr) -> None:
    _Products(kernel, columns, rows, [panel]).write(slot)


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


_Sums = Sequence[dict[Place, Buffer]]
"""Sums of products, of each panel by their place in the tile."""


class _Finish(Tile):
    """The epilogue of a panel whose sums wait in scratch, as the ``slot``-th."""

    def __init__(self, kernel: Kernel, panel: Expr, columns: Columns, rows: TileRows, slot: Expr) -> None:
        super().__init__(kernel, panel, columns, rows)
        self._slot = slot

    def _begin(self) -> None:
        for i in range(len(self.rows)):
            for place, offset, n in self._pieces():
                acc = self.acc[Place(i, place.cls, place.part)] = self.body.alloc(n, name="acc")
                at = _waiting(self.kernel, len(self.rows), self._slot, i, offset)
                self.body.store(acc, 0, load(self.kernel.scratch, at, n))

    def _multiply(self) -> None:
        pass


def _waiting(kernel: Kernel, rows: int, slot: Expr, row: int, offset: int) -> Expr:
    """Where the sums of a row wait, from a column of the panel on."""
    width = kernel.schedule.width
    return slot * (rows * width) + (_waiting_at(kernel.shape) + row * width + offset)


class _Products:
    """The sums of products of all rows with some panels."""

    def __init__(self, kernel: Kernel, columns: Columns, rows: TileRows, panels: Sequence[Expr]) -> None:
        self.kernel = kernel
        self.shape = kernel.shape
        self.body = kernel.body
        self.pieces = pieces(columns)
        numbers = [kernel.body.let(p, "panel") for p in panels]
        self.panels = [kernel.weight.panel(kernel.body, p, kernel.schedule.width, columns.width) for p in numbers]
        self.a, at = kernel.a, self._in_place
        if _prepares(self.shape):
            self.a, at = kernel.scratch, _PreparedRows(self.shape).at
        self.starts = [kernel.body.let(at(row, 0), "start") for row in rows.rows]
        self.total = self._zeros()

    def _in_place(self, row: Expr, offset: Index) -> Expr:
        return row * self.shape.k + offset

    def write(self, slot: Expr) -> None:
        """The sums, to wait from the ``slot``-th place on."""
        body, format, k = self.body, self.shape.format, self.shape.k
        if _crossing(format, k):
            with body.loop(0, k, "k") as step:
                self._add(self.total, step, lambda panel, offset, n: panel.load(step, offset, n))
        elif format.groups(k) > 1:
            self._by_groups()
        else:
            self._in_one_group()
        shifted = format.shifted and not _crossing(format, k)
        for p, i, place, offset, n in self._places():
            value = load(self.total[p][place], 0, n)
            if shifted:
                total = load(self.a, self.starts[i] + (k + _PreparedRows(self.shape).groups))
                value = value - widen(total, n) * self.panels[p].shift(offset, n)
            body.store(self.kernel.scratch, _waiting(self.kernel, len(self.starts), slot + p, i, offset), value)

    def _places(self) -> Iterator[tuple[int, int, Place, int, int]]:
        """Panel, row, place, first column and number of columns of each vector of results."""
        for p in range(len(self.panels)):
            for i in range(len(self.starts)):
                for place, offset, n in self.pieces:
                    yield p, i, Place(i, place.cls, place.part), offset, n

    def _zeros(self) -> _Sums:
        sums: list[dict[Place, Buffer]] = [{} for _ in self.panels]
        for p, _, place, _, n in self._places():
            sums[p][place] = self.body.alloc(n, name="acc")
        self._clear(sums)
        return sums

    def _clear(self, sums: _Sums) -> None:
        for p, _, place, _, n in self._places():
            self.body.store(sums[p][place], 0, widen(f32(0), n))

    @property
    def _streams(self) -> int:
        """Parts of K that are gone over side by side."""
        return 1 if self._words else STREAMS // len(self.panels)

    @property
    def _words(self) -> bool:
        """Whether elements are words of several rows."""
        return self.shape.format.rows_per_element > 1

    @property
    def _turns(self) -> int:
        """How many sets of sums the fields of words take turns with."""
        if not self._words:
            return 1
        vectors = len(self.panels) * len(self.starts) * len(self.pieces)
        return max(1, min(self._sets - 1, -(-_TURNS // vectors)))

    @property
    def _sets(self) -> int:
        """How many sets of sums registers hold."""
        schedule = self.kernel.schedule
        return max(1, schedule.rows * schedule.vectors // (len(self.panels) * len(self.starts) * len(self.pieces)))

    def _in_one_group(self) -> None:
        body, format = self.body, self.shape.format
        elements, rest = divmod(self.shape.k, format.rows_per_element)
        number = self._turns if self._words else min(self._sets, self._streams)
        sets = [self.total, *(self._zeros() for _ in range(number - 1))]
        each = elements // self._streams
        with body.loop(0, each, "element") as element:
            self._ask_ahead(element, each)
            for stream in range(self._streams):
                turns = sets if self._words else [sets[stream % len(sets)]]
                self._element(turns, body.let(element + stream * each, "at"))
        with body.loop(each * self._streams, elements, "element") as element:
            self._element([self.total], element)
        if rest:
            self._element([self.total], index(elements), rest)
        self._join(sets)
        for p, i, place, offset, n in self._places():
            total = self.total[p][place]
            if format.group or format.bias:
                body.store(total, 0, self._shared(self.total, p, i, place, index(0), offset, n))

    def _by_groups(self) -> None:
        body, format = self.body, self.shape.format
        groups, rest = divmod(self.shape.k, format.group)
        streams = min(self._streams, 1 << (self._sets.bit_length() - 1))
        sets = [[self._zeros() for _ in range(self._turns)] for _ in range(streams)]
        each, elements = groups // streams, format.group // format.rows_per_element
        with body.loop(0, each, "group") as group:
            if self._words:
                self._ask_ahead(group * elements, each * elements, elements)
            self._groups(sets, [body.let(group + s * each, "group") for s in range(streams)], elements)
        with body.loop(each * streams, groups, "group") as group:
            self._groups(sets[:1], [group], elements)
        if rest:
            self._groups(sets[:1], [index(groups)], *divmod(rest, format.rows_per_element))

    def _ask_ahead(self, element: Expr, each: int, count: int = 1) -> None:
        """Asks for the ``count`` elements some way behind ``element`` in each part of ``each`` elements, at the parts' end for the next panels'."""
        body, format, width = self.body, self.shape.format, self.panels[0].width
        distance = min(AHEAD // (STREAMS * width * format.itemsize), each)
        beyond = format.panel_size(self.kernel.schedule.width, self.shape.k) * len(self.panels) - each * width
        ahead = element + distance
        ahead = body.let(ahead * width + tirx.Select(ahead < index(each), index(0), index(beyond)), "ahead")
        for panel in self.panels:
            for stream in range(self._streams):
                for at in range(0, count * width, LINE // format.itemsize):
                    body.prefetch(self.kernel.weight.panels, panel.start + ahead + (stream * each * width + at), 1)

    def _groups(self, sets: Sequence[Sequence[_Sums]], groups: Sequence[Expr], elements: int, rest: int = 0) -> None:
        """Adds what a group for each of ``sets`` gives: ``elements`` elements, and of another one ``rest`` rows."""
        body, format = self.body, self.shape.format
        for turns in sets:
            for sums in turns:
                self._clear(sums)
        starts = [body.let(group * (format.group // format.rows_per_element), "first") for group in groups]
        with body.loop(0, elements, "element") as element:
            for turns, start in zip(sets, starts, strict=True):
                self._element(turns, body.let(start + element, "at"))
        if rest:
            self._element(sets[0], starts[0] + elements, rest)
        for turns, group in zip(sets, groups, strict=True):
            self._join(turns)
            for p, i, place, offset, n in self._places():
                value = self._shared(turns[0], p, i, place, group, offset, n)
                body.store(self.total[p][place], 0, load(self.total[p][place], 0, n) + value)

    def _join(self, sets: Sequence[_Sums]) -> None:
        """Adds all sets to the first one."""
        first, *others = sets
        for other in others:
            for p, _, place, _, n in self._places():
                value = load(first[p][place], 0, n) + load(other[p][place], 0, n)
                self.body.store(first[p][place], 0, value)

    def _shared(self, sums: _Sums, panel: int, row: int, place: Place, group: Expr, offset: int, count: int) -> Expr:
        """What the products of a group come to with its zero point and factor."""
        value, weights = load(sums[panel][place], 0, count), self.panels[panel]
        zero, quantum = weights.zero(group, offset, count), weights.quantum(group, offset, count)
        if zero is not None:
            total = load(self.a, self.starts[row] + (group + self.shape.k))
            value = value - widen(zero, count) * widen(total, count)
        return value if quantum is None else value * quantum

    def _element(self, sets: Sequence[_Sums], element: Expr, count: int | None = None) -> None:
        """Adds the products of an element's rows of W, or of the first ``count`` of them, to ``sets`` in turn."""
        body, fields = self.body, self.shape.format.rows_per_element
        if fields == 1:
            self._add(sets[0], element, lambda panel, offset, n: panel.whole(element, offset, n))
            return
        words = {
            (panel, offset): body.let(panel.words(element, offset, n), "words")
            for panel in self.panels
            for _, offset, n in self.pieces
        }
        for field in range(count or fields):
            self._add(sets[field % len(sets)], element * fields + field, partial(self._field, words, field))

    def _field(
        self, words: Mapping[tuple[WeightPanel, int], Expr], field: int, panel: WeightPanel, offset: int, count: int
    ) -> Expr:
        """A field of words where it lies, as float32."""
        bits = self.shape.format.bits
        shift, word = field * bits, words[panel, offset]
        if shift + bits == _WORD:
            value = word >> widen(tirx.const(shift, "uint32"), count)
        else:
            value = word & widen(tirx.const((1 << bits) - 1 << shift, "uint32"), count)
        # As int32, for which every processor has a conversion.
        lanes_ = "" if count == 1 else f"x{count}"
        return value.astype(f"int32{lanes_}").astype(f"float32{lanes_}")

    def _add(self, sums: _Sums, row: Expr, weights: Callable[[WeightPanel, int, int], Expr]) -> None:
        """Adds the products of one row of W, of which ``weights(panel, offset, count)`` are columns."""
        body = self.body
        elements = [body.let(load(self.a, start + row), "a") for start in self.starts]
        for p, panel in enumerate(self.panels):
            values = {offset: body.let(weights(panel, offset, n), "w") for _, offset, n in self.pieces}
            for i, element in enumerate(elements):
                for place, offset, n in self.pieces:
                    acc = sums[p][Place(i, place.cls, place.part)]
                    body.store(acc, 0, load(acc, 0, n) + widen(element, n) * values[offset])
