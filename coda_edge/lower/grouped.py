"""Convolutions in groups, depthwise ones too: ``program(windows of x · W)`` where a column sees the channels of its group alone.

x ``[batch, *spatial, C]`` is channels-last; W ``[taps·C/g, N]`` is packed into panels as a GEMM's is, so epilogues are a GEMM's too. Lanes
are columns. What a vector of columns is multiplied with under a tap is, of a group that is as wide as the vector, one channel in all
lanes; of narrower ones a vector of channels, in the order that the groups say: of a depthwise convolution, as they lie.

An item is a part of a line of the result, with some panels. Where windows reach beyond the tensor along the line, places are done one by one with the taps
that they have; between these, tiles of places share what they read. Along the other axes, lines have the taps that they have. So
nothing is padded, copied or masked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import sympy
from tvm import tirx

from ..epilogue.program import EpilogueProgram
from ..epilogue.tir import Columns, Place, depth
from ..errors import ShapeError
from ..ir import Array
from ..schedule.gemm import GemmSchedule
from ..symbolic import Dim, product, simplify
from ..targets.target import Target
from ..weights import Weight
from ..window import Window
from .body import Expr, Index, index, lanes, load, shuffle, widen
from .gemm import Operand, Windows, check_call
from .gemm_items import Kernel
from .gemm_shape import GemmShape
from .gemm_tile import Tile, TileRows
from .kernel import KernelCall, KernelSource, Workspace

#: Places of an item along its line, about.
_PART = 48
# Taps and channels that are written out one after the other.
_UNROLLED = 8
# Work of an item, about, in multiply-adds: what it takes to find its place should not count.
_GRAIN = 60_000


@dataclass(frozen=True)
class Groups:
    """The window and what each of ``count`` groups has: ``channels`` of the tensor and ``columns`` of the result."""

    window: Window
    count: int
    channels: int
    columns: int


def lower_grouped(
    target: Target,
    name: str,
    program: EpilogueProgram,
    x: Operand,
    weight: Array,
    operands: Sequence[Operand],
    outputs: Sequence[str],
    windows: Windows,
    group: int,
    source: tuple[str, ...] = (),
) -> KernelCall:
    """The kernel call for ``program`` over the windows of x and ``weight`` float32 ``[taps·C/group, N]``, taps first.

    Operands and outputs are those of ``lower_gemm``, whose rows are the windows. Raises ShapeError if they do not fit.
    """
    k, n = weight.shape
    check_call(name, program, n, operands, outputs)
    if n % group or k % windows.window.taps:
        raise ShapeError(f"grouped convolution '{name}': {n} columns of {k} weights do not fall into {group} groups")
    groups = Groups(windows.window, group, k // windows.window.taps, n // group)
    out = windows.window.out(windows.sizes)
    *lines, places = out
    parts = _quotient(places + (_PART - 1), _PART)
    schedule = choose_grouped(target, groups, n, 1 << depth(program))
    work = min(places, _PART) * k * schedule.width if isinstance(places, int) else _PART * k * schedule.width
    schedule = replace(schedule, panels=max(1, _GRAIN // max(1, work)))
    part = _quotient(places + parts * schedule.rows - 1, _at_least_one(parts * schedule.rows)) * schedule.rows
    shape = GemmShape(program, n, k, schedule)
    symbol = f"grouped_{n}x{k}_{_key(target, shape, groups)}"
    merge = f"{symbol}_finish"
    rows = product([windows.batch, *out])
    count = shape.partials
    workspaces = (Workspace(f"{name}.partials", simplify(4 * count * shape.panels * rows)),) if count else ()
    sizes = [size for pair in zip(windows.sizes, out, strict=True) for size in pair]
    batches = (product(out),) if program.batched else ()
    make = partial(GroupedKernel, shape, groups)
    return KernelCall(
        name=name,
        kernel=KernelSource(symbol, lambda: make().items(symbol)),
        buffers=(
            x,
            *shape.format.packed(f"{name}.weight", Weight(weight), shape.orders()),
            *operands,
            *outputs,
            *workspaces,
        ),
        ints=(rows, *batches, *sizes, simplify(parts), simplify(part)),
        items=simplify(product([windows.batch, *lines]) * parts * shape.groups),
        scratch=4 * shape.scratch,
        finish=KernelSource(merge, lambda: make().merge(merge)) if count else None,
        outputs=tuple(outputs),
        flops=simplify(rows * (2 * n * k + program.flops(n))),
        source=source,
    )


def choose_grouped(target: Target, groups: Groups, n: int, classes: int = 1) -> GemmSchedule:
    """Vectors that hold whole groups, or lie in one, and as many accumulators as the registers hold with what they meet.

    ``classes``: into how many classes the epilogue splits columns.
    """
    count = target.lanes(4)
    while count > 1 and not _fits(groups, count, count * classes):
        count //= 2
    line = max(2, 64 // (4 * count))
    vectors = max(classes, min(line, -(-n // count)) // classes * classes)
    shared = groups.columns < count * classes
    held = 2 * vectors if shared else vectors
    room = target.registers - 2 - vectors
    rows = max(1, min(_UNROLLED, room // held if shared else (room - 1) // held))
    whole = -(-(_PART + rows) // rows) * rows
    return GemmSchedule(rows, vectors, count, block=whole, prefetch=False)


def _fits(groups: Groups, count: int, columns: int) -> bool:
    """Whether vectors of ``count`` lanes that have ``columns`` columns between them lie in one group, or have whole ones that lie close.

    Many channels of a narrow group take a shuffle each: then a vector in one group is faster, if a group has half of an AVX-512 one.
    """
    if groups.columns % columns == 0:
        return True
    close = columns % groups.columns == 0 and columns // groups.columns * groups.channels <= 4 * count
    return close and (groups.channels <= 4 or groups.columns < 8)


class _Sizes:
    """The sizes that the kernel has as parameters: of each axis of the tensor and of the result, and how lines fall into parts."""

    def __init__(self, axes: int) -> None:
        self.spatial = [(tirx.Var(f"size{i}", "int64"), tirx.Var(f"windows{i}", "int64")) for i in range(axes)]
        self.parts, self.part = tirx.Var("parts", "int64"), tirx.Var("part", "int64")

    @property
    def params(self) -> list[Expr]:
        """In the order of the call's ints."""
        return [*(size for pair in self.spatial for size in pair), self.parts, self.part]


@dataclass(frozen=True)
class _Line:
    """A line of the result: the line of the tensor under its first tap, along each axis but the last, and the taps within the tensor."""

    image: Expr
    origins: tuple[Expr, ...]
    taps: tuple[tuple[Expr, Expr], ...]


class GroupedKernel(Kernel):
    """The writing of the kernels of a grouped convolution."""

    def __init__(self, shape: GemmShape, groups: Groups) -> None:
        super().__init__(shape)
        self.groups = groups
        self.sizes = _Sizes(len(groups.window.kernel))
        self.params[-2:-2] = self.sizes.params

    def items(self, symbol: str) -> tirx.PrimFunc:
        """The kernel that does items: a part of a line with some panels, tiles in the middle and single places around them."""
        body, sizes, window, height = self.body, self.sizes, self.groups.window, self.schedule.rows
        stride, before, reach = window.strides[-1], window.before[-1], window.reach[-1]
        size, places = sizes.spatial[-1]
        with body.loop(self.begin, self.end, "item") as item:
            part = body.let(tirx.floordiv(item, index(self.shape.groups)), "part")
            first = body.let((item - part * self.shape.groups) * self.schedule.panels, "first_panel")
            number = body.let(tirx.floordiv(part, sizes.parts), "line")
            begin = body.let((part - number * sizes.parts) * sizes.part, "begin")
            end = body.let(tirx.min(begin + sizes.part, places), "end")
            line = self._line(number)
            row = body.let(number * places, "row")
            if self.shape.hoisted:
                self._rows_ahead(row + begin, row + end)
            inner = body.let(tirx.min(tirx.max(begin, index(-(-before // stride))), end), "inner")
            fitting = tirx.floordiv(size + (before - reach), index(stride)) + 1
            outer = body.let(tirx.max(inner, tirx.min(fitting, end)), "outer")
            tiles = body.let(tirx.floordiv(outer - inner, index(height)), "tiles")
            behind = body.let(inner + tiles * height, "behind")
            ahead = body.let(inner - begin, "ahead")
            singles = body.let(ahead + end - behind, "singles")

            def panel(panel: Expr, columns: Columns) -> None:
                def write(place: Expr, rows: int, edge: bool) -> None:
                    first = body.let(row + place, "first")
                    here = TileRows(index(0), index(1), row + begin, [first + i for i in range(rows)])
                    GroupedTile(self, panel, columns, here, line, place, edge).write()

                with body.loop(0, tiles, "tile") as tile:
                    write(body.let(inner + tile * height, "place"), height, False)
                with body.loop(0, singles, "single") as single:
                    place = tirx.Select(single < ahead, begin + single, behind + (single - ahead))
                    write(body.let(place, "place"), 1, True)

            behind_panels = body.let(tirx.min(first + self.schedule.panels, index(self.shape.panels)), "end_panel")
            self._over_panels(first, behind_panels, panel)
        return body.function(symbol, self.params)

    def _line(self, number: Expr) -> _Line:
        body, window = self.body, self.groups.window
        origins: list[Expr] = []
        taps: list[tuple[Expr, Expr]] = []
        for axis in reversed(range(len(window.kernel) - 1)):
            size, places = self.sizes.spatial[axis]
            rest = body.let(tirx.floordiv(number, places), "rest")
            origin = body.let((number - rest * places) * window.strides[axis] - window.before[axis], "origin")
            origins.insert(0, origin)
            taps.insert(0, self.taps(axis, origin, size))
            number = rest
        return _Line(number, tuple(origins), tuple(taps))

    def taps(self, axis: int, origin: Expr, size: Expr) -> tuple[Expr, Expr]:
        """The first tap within the tensor, and the one behind the last, of a window that begins at ``origin``."""
        apart, count = index(self.groups.window.dilations[axis]), self.groups.window.kernel[axis]
        first = tirx.max(index(0), tirx.floordiv(apart - 1 - origin, apart))
        last = tirx.min(index(count), tirx.floordiv(size - origin + (apart - 1), apart))
        return self.body.let(first, "tap"), self.body.let(last, "end_tap")


class GroupedTile(Tile):
    """A tile of places of a line, ``place`` the first. ``edge``: some taps of the last axis may be beyond the tensor."""

    kernel: GroupedKernel

    def __init__(
        self, kernel: GroupedKernel, panel: Expr, columns: Columns, rows: TileRows, line: _Line, place: Expr, edge: bool
    ) -> None:
        super().__init__(kernel, panel, columns, rows)
        self.line, self.at, self.edge = line, place, edge
        self.weights = kernel.weight.panel(self.body, panel, self.shape.schedule.width, columns.width)

    def _multiply(self) -> None:
        body, groups, window = self.body, self.kernel.groups, self.kernel.groups.window
        spatial, taps = self.kernel.sizes.spatial, window.kernel[-1]
        size = spatial[-1][0]
        origin = body.let(self.at * window.strides[-1] - window.before[-1], "origin")
        first, end = self.kernel.taps(len(window.kernel) - 1, origin, size) if self.edge else (0, taps)
        bases = {place: self._base(place) for place, _, _ in self._pieces()}
        at, number = self.line.image, index(0)
        with ExitStack() as loops:
            for axis, (start, stop) in enumerate(self.line.taps):
                tap = loops.enter_context(body.loop(start, stop, "tap"))
                at = at * spatial[axis][0] + self.line.origins[axis] + tap * window.dilations[axis]
                number = number * window.kernel[axis] + tap
            start = body.let((at * size + origin) * (groups.count * groups.channels), "start")
            addresses = {place: body.let(start + base, "address") for place, base in bases.items()}
            row = body.let(number * (taps * groups.channels), "weights")
            read = _Reader(self, addresses)
            if self.edge or taps * groups.channels > _UNROLLED * _UNROLLED or taps > 2 * _UNROLLED:
                with body.loop(first, end, "tap") as tap:
                    self._tap(read.moved(tap), row + tap * groups.channels)
                return
            for tap in range(taps):
                self._tap(read.moved(tap), row + tap * groups.channels)

    def _tap(self, read: _Reader, row: Expr) -> None:
        """The products under one tap, whose weights begin at row ``row``."""
        channels = self.kernel.groups.channels
        if channels > _UNROLLED and not read.shuffles:
            with self.body.loop(0, channels, "channel") as channel:
                self._add(read, row + channel, channel)
            return
        for channel in range(channels):
            self._add(read, row + channel, channel)

    def _add(self, read: _Reader, row: Expr, channel: Index) -> None:
        body = self.body
        weights = {place: body.let(self.weights.load(row, at, n), "w") for place, at, n in self._pieces()}
        for i in range(len(self.rows)):
            for place, w in weights.items():
                acc, n = self.acc[Place(i, place.cls, place.part)], self._lanes(place)
                body.store(acc, 0, load(acc, 0, n) + widen(read(i, place, channel), n) * w)

    def channels(self, place: Place) -> list[int]:
        """Where the channels of each column's group begin, from ``_base`` on."""
        groups = self.kernel.groups
        first, step = self.columns.progression(place.cls, place.part)
        if not self._narrow:
            return [0] * self._lanes(place)
        return [(first + step * i) // groups.columns * groups.channels for i in range(self._lanes(place))]

    @property
    def _narrow(self) -> bool:
        """Whether the columns of a vector are those of whole groups: panels begin with a group then."""
        schedule = self.shape.schedule
        return (schedule.lanes * self.columns.classes()) % self.kernel.groups.columns == 0

    def _base(self, place: Place) -> Expr:
        groups, width = self.kernel.groups, self.shape.schedule.width
        column = self.panel * width
        if not self._narrow:
            column = column + self.columns.progression(place.cls, place.part)[0]
        return self.body.let(tirx.floordiv(column, index(groups.columns)) * groups.channels, "channel")


@dataclass(frozen=True)
class _Reader:
    """Reads what a vector of columns meets at a place, under the tap ``tap``: each vector of channels once."""

    tile: GroupedTile
    addresses: Mapping[Place, Expr]
    tap: Index = 0
    found: dict[tuple[int, Place], Expr] = field(default_factory=dict)

    def moved(self, tap: Index) -> _Reader:
        """The reader of another tap: of taps that are numbers, all share what they read."""
        return replace(self, tap=tap) if isinstance(tap, int) else replace(self, tap=tap, found={})

    @property
    def shuffles(self) -> bool:
        """Whether vectors of channels are read."""
        return any(len(set(self.tile.channels(place))) > 1 for place in self.addresses)

    def __call__(self, row: int, place: Place, channel: Index) -> Expr:
        """The numbers that place ``row`` of the tile has for ``channel`` of each column's group."""
        tile, groups = self.tile, self.tile.kernel.groups
        window, step = groups.window, groups.count * groups.channels
        lie = tile.channels(place)
        away = row * window.strides[-1] + self.tap * window.dilations[-1]
        if len(set(lie)) == 1:
            return tile.body.let(load(tile.kernel.a, self.addresses[place] + away * step + (lie[0] + channel)), "a")
        key = (away if isinstance(away, int) else row, place)
        if key not in self.found:
            span = lie[-1] - lie[0] + groups.channels
            at = self.addresses[place] + away * step + lie[0]
            self.found[key] = tile.body.let(load(tile.kernel.a, at, span), "a")
        vector = self.found[key]
        # TVM has a Shuffle make no more lanes than it takes.
        return shuffle([vector] * -(-len(lie) // lanes(vector)), [start - lie[0] + channel for start in lie])


def _key(target: Target, shape: GemmShape, groups: Groups) -> str:
    """What makes this kernel differ from every other one, in eight hex digits."""
    text = repr((target.name, sorted(target.tvm.items()), str(shape.program), shape.n, shape.k, shape.schedule, groups))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _quotient(a: Dim, b: Dim) -> Dim:
    """``a / b`` rounded down."""
    return a // b if isinstance(a, int) and isinstance(b, int) else sympy.floor(a / b)


def _at_least_one(a: Dim) -> Dim:
    return max(1, a) if isinstance(a, int) else sympy.Max(1, a)
