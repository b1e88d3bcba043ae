"""How a GEMM's weights lie in panels, and how a kernel makes float32 of what is stored.

W is packed into panels of ``width`` columns, each ``[K, width]``, the column classes apart in each; the last panel is as narrow as what
is left. A format that is not float32 is converted as it is read: a block of rows that is one tile converts in registers; of any other one the
first tile leaves float32 in scratch for the others, or the panel is converted ahead of all.

Whole numbers of 4 bits lie eight rows to a uint32, the first in the lowest bits, so that a vector of words has one row's columns in each of
its eight fields and no lane ever moves. Factors and zero points of blocks of rows lie panel by panel too, each ``[groups, width]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

import numpy as np
from tvm import tirx

from ..ir import Array
from ..weights import Blocks, Weight, narrowest, whole_dtype
from .body import Body, Buffer, Expr, Index, external, f32, index, lanes, load, widen
from .emit import HALF, STORAGE
from .kernel import Packed


@dataclass(frozen=True)
class _Narrow:
    """Whole numbers that share words: how wide they are, what is added to them so that none is negative, and how wide words are."""

    bits: int
    bias: int
    word: int = 32


BYTES = {4: "int8x4", 8: "int8x8"}
"""The dtypes of int8 that lie so many rows to a word, for products of whole numbers."""
_NARROW = {"int4": _Narrow(4, 8), "uint4": _Narrow(4, 0), BYTES[4]: _Narrow(8, 0), BYTES[8]: _Narrow(8, 0, 64)}


@dataclass(frozen=True)
class WeightFormat:
    """What of a ``Weight`` there is: the dtype of its numbers, a scale of each row of W, an offset of each column.

    ``group`` rows share factors and zero points, whose dtypes are ``quanta`` and ``zeros`` ("": there are none); 0: there are neither.
    """

    dtype: str = "float32"
    scaled: bool = False
    shifted: bool = False
    group: int = 0
    quanta: str = ""
    zeros: str = ""

    @staticmethod
    def of(weight: Weight) -> WeightFormat:
        """The format that ``weight`` is stored in."""
        return _Stored.of(weight).format

    @property
    def converts(self) -> bool:
        """Whether the panels are not what the multiplication reads."""
        return self != PLAIN and self.dtype not in BYTES.values()

    @property
    def ahead(self) -> bool:
        """Whether panels are converted ahead of tiles: a tile's registers have no room for words and multiplies besides."""
        return self.rows_per_element > 1

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return _NARROW[self.dtype].bits if self.dtype in _NARROW else 8 * self.itemsize

    @property
    def bias(self) -> int:
        """What is added to a number in a word."""
        return _NARROW[self.dtype].bias if self.dtype in _NARROW else 0

    @property
    def rows_per_element(self) -> int:
        """Rows of W in an element of a panel."""
        return _NARROW[self.dtype].word // self.bits if self.dtype in _NARROW else 1

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a panel."""
        return np.dtype(self.storage).itemsize

    @property
    def storage(self) -> str:
        """The dtype of a panel's elements as a kernel declares it."""
        return f"uint{_NARROW[self.dtype].word}" if self.dtype in _NARROW else STORAGE.get(self.dtype, self.dtype)

    def panel_size(self, width: int, k: int) -> int:
        """The elements of a panel of ``width`` columns."""
        return -(-k // self.rows_per_element) * width

    def groups(self, k: int) -> int:
        """How many groups of rows W has; 0 without factors and zero points."""
        return -(-k // self.group) if self.group else 0

    def bytes(self, n: int, k: int) -> int:
        """All that is stored of a ``[K, N]`` matrix."""
        factors = sum(np.dtype(STORAGE.get(d, d)).itemsize for d in (self.quanta, self.zeros) if d)
        sides = 4 * (k * self.scaled + n * self.shifted)
        return self.itemsize * self.panel_size(n, k) + factors * self.groups(k) * n + sides

    def packed(self, name: str, weight: Weight, orders: Sequence[Sequence[int]]) -> list[Packed]:
        """What the kernel reads, in the order of ``PackedWeight.params``: panels, one for each of ``orders``, which are its columns."""
        stored = replace(_Stored.of(weight), format=self)
        found = [Packed(name, np.concatenate([stored.panel(order) for order in orders]), orders)]
        for part, numbers in (("quanta", stored.quanta), ("zeros", stored.zeros)):
            if numbers is not None:
                panels = [np.ascontiguousarray(numbers[:, order]).reshape(-1) for order in orders]
                found.append(Packed(f"{name}.{part}", np.concatenate(panels), orders))
        if stored.scale is not None:
            found.append(Packed(f"{name}.scale", stored.scale))
        if weight.offset is not None:
            found.append(Packed(f"{name}.offset", np.concatenate([weight.offset[order] for order in orders]), orders))
        return found


PLAIN = WeightFormat()
"""Float32, read as it is."""


@dataclass(frozen=True, eq=False)
class _Stored:
    """A weight as kernels take it: one factor and zero point for each group of rows and column, ``[groups, N]``."""

    format: WeightFormat
    numbers: Array
    scale: Array | None
    quanta: Array | None
    zeros: Array | None

    @staticmethod
    def of(weight: Weight) -> _Stored:
        k, n = weight.stored.shape
        weight = weight.with_row_scale()
        blocks = [b for b in (weight.quantum, weight.zero) if b is not None]
        group = gcd(*(b.sizes[0] if b.sizes[0] < k else 0 for b in blocks)) or (k if blocks else 0)
        quanta = None if weight.quantum is None else narrowest(_grouped(weight.quantum, group, k, n))
        numbers, zeros = weight.stored, None
        if weight.zero is not None:
            zeros = _grouped(weight.zero, group, k, n)
            whole = bool(np.all(zeros == np.rint(zeros)))
            bias = _NARROW[numbers.dtype.name].bias if numbers.dtype.name in _NARROW else 0
            if bias and not whole:  # which the bias would round
                numbers, bias = numbers.astype(np.int8), 0
            byte = whole_dtype(zeros + bias, (np.dtype(np.uint8), np.dtype(np.int8))) if whole else None
            zeros = zeros + np.float32(bias) if byte is None else (zeros + bias).astype(byte)
        form = WeightFormat(
            numbers.dtype.name,
            weight.scale is not None,
            weight.offset is not None,
            group,
            "" if quanta is None else quanta.dtype.name,
            "" if zeros is None else zeros.dtype.name,
        )
        return _Stored(form, numbers, weight.scale, quanta, zeros)

    def panel(self, order: Sequence[int]) -> Array:
        """The elements of the panel that has the columns ``order``."""
        numbers = self.numbers[:, order]
        if self.format.dtype not in _NARROW:
            return np.ascontiguousarray(numbers).reshape(-1)
        rows, bits, word = self.format.rows_per_element, self.format.bits, np.dtype(self.format.storage).type
        fields = np.zeros((-(-len(numbers) // rows) * rows, len(order)), word)
        fields[: len(numbers)] = (numbers.astype(np.int32) + self.format.bias).astype(word)
        shifts = np.arange(0, rows * bits, bits, dtype=word)[:, None]
        fields &= word((1 << bits) - 1)
        words: Array = np.bitwise_or.reduce(fields.reshape(-1, rows, len(order)) << shifts, axis=1)
        return words.reshape(-1)


def _grouped(blocks: Blocks, group: int, k: int, n: int) -> Array:
    """The numbers of blocks for each ``group`` of rows and each column."""
    return np.ascontiguousarray(blocks.spread((k, n))[::group])


@dataclass(frozen=True)
class PackedWeight:
    """The buffers of a packed weight of ``k`` rows in a kernel."""

    format: WeightFormat
    k: int
    panels: Buffer
    quanta: Buffer
    zeros: Buffer
    scale: Buffer
    offset: Buffer

    @staticmethod
    def declare(format: WeightFormat, k: int) -> PackedWeight:
        """New parameters."""
        quanta, zeros = (external(f"w_{n}", STORAGE.get(d, d) or "float32") for n, d in _factors(format))
        return PackedWeight(
            format, k, external("w", format.storage), quanta, zeros, external("w_scale"), external("w_offset")
        )

    @property
    def params(self) -> Iterator[Buffer]:
        """Those that the kernel has, in the order of ``WeightFormat.packed``."""
        yield self.panels
        if self.format.quanta:
            yield self.quanta
        if self.format.zeros:
            yield self.zeros
        if self.format.scaled:
            yield self.scale
        if self.format.shifted:
            yield self.offset

    def panel(self, body: Body, panel: Expr, full_width: int, width: int) -> WeightPanel:
        """The panel number ``panel``, of ``width`` columns, behind panels of ``full_width``; its addresses are written to ``body``."""
        format = self.format
        start = body.let(panel * format.panel_size(full_width, self.k), "panel_start")
        factors: Expr = index(0)
        if format.group:
            factors = body.let(panel * (format.groups(self.k) * full_width), "factors")
        column = body.let(panel * full_width, "first_column") if format.shifted else index(0)
        return WeightPanel(self, start, factors, column, width)


def _factors(format: WeightFormat) -> list[tuple[str, str]]:
    return [("quanta", format.quanta), ("zeros", format.zeros)]


@dataclass(frozen=True)
class WeightPanel:
    """A panel as a kernel reads it. ``step`` is a row of W, ``offset`` a column of the panel as packed, ``count`` how many columns.

    A weight is ``gain(step)·((whole(step) - zero(group))·quantum(group)) - shift``, rounded to float32 after each operation, where there is
    such a part; ``group`` is ``step // format.group``. A kernel may apply what a group shares once to the sum of its products.
    """

    weight: PackedWeight
    start: Expr
    """The first element of the panel."""
    factors: Expr
    """The first factor and zero point."""
    column: Expr
    """The first column of the panel, as packed, among all."""
    width: int

    def load(self, step: Index, offset: int, count: int) -> Expr:
        """``count`` weights in float32."""
        value = self.whole(step, offset, count)
        format = self.weight.format
        group: Index = 0
        if format.group and format.groups(self.weight.k) > 1:
            group = tirx.floordiv(index(step), index(format.group))
        zero, quantum = self.zero(group, offset, count), self.quantum(group, offset, count)
        gain, shift = self.gain(step), self.shift(offset, count)
        value = value if zero is None else value - widen(zero, count)
        value = value if quantum is None else value * quantum
        value = value if gain is None else value * widen(gain, count)
        return value if shift is None else value - shift

    def whole(self, step: Index, offset: int, count: int) -> Expr:
        """The stored numbers as float32; those of 4 bits with their bias."""
        format = self.weight.format
        if format.dtype in _NARROW:
            rows = format.rows_per_element
            word = self.words(tirx.floordiv(index(step), index(rows)), offset, count)
            field = tirx.floormod(index(step), index(rows)).astype("uint32") * tirx.const(format.bits, "uint32")
            mask = widen(tirx.const((1 << format.bits) - 1, "uint32"), count)
            # As int32, for which every processor has a conversion.
            return _real(((word >> widen(field, count)) & mask).astype(_typed("int32", count)))
        value = load(self.weight.panels, self.start + step * self.width + offset, count)
        if format.dtype in HALF:
            return HALF[format.dtype].widen(value)
        return value if format.dtype == "float32" else _real(value)

    def words(self, block: Index, offset: int, count: int) -> Expr:
        """The words of rows ``block·rows_per_element`` and following, as unsigned integers."""
        return load(self.weight.panels, self.start + block * self.width + offset, count)

    def zero(self, group: Index, offset: int, count: int) -> Expr | None:
        """What is subtracted from the whole numbers of a group: a vector, or a number; None: nothing."""
        format = self.weight.format
        if format.zeros:
            value = load(self.weight.zeros, self.factors + group * self.width + offset, count)
            return value if format.zeros == "float32" else _real(value)
        return f32(format.bias) if format.bias else None

    def quantum(self, group: Index, offset: int, count: int) -> Expr | None:
        """What multiplies the whole numbers of a group."""
        format = self.weight.format
        if not format.quanta:
            return None
        value = load(self.weight.quanta, self.factors + group * self.width + offset, count)
        return HALF[format.quanta].widen(value) if format.quanta in HALF else value

    def gain(self, step: Index) -> Expr | None:
        """What multiplies a row of W."""
        return load(self.weight.scale, step) if self.weight.format.scaled else None

    def shift(self, offset: int, count: int) -> Expr | None:
        """What is subtracted from every row of W."""
        if not self.weight.format.shifted:
            return None
        return load(self.weight.offset, self.column + offset, count)


def _typed(dtype: str, count: int) -> str:
    return dtype if count == 1 else f"{dtype}x{count}"


def _real(value: Expr) -> Expr:
    """Whole numbers as float32."""
    wide = value.astype(_typed("int32", lanes(value)))
    return wide.astype(_typed("float32", lanes(value)))
