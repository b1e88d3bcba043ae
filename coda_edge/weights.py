"""Constant weights in the narrowest form that gives their float32 values back exactly.

A half-precision model's weights become float32 in normal form, and so do whole numbers with factors and zero points; passes fold gains and
means into them. What is stored stays narrow:

    value[k, n] = scale[k] · ((stored[k, n] - zero) · quantum) - offset[n]

with a factor and a zero point for each block of elements, a norm's gain as the scale, and what centres the columns as the offset;
kernels compute the value as they read, rounding to float32 after each operation. Without scale and offset that is the number of the model,
bit for bit. With them it is within ``2⁻²⁴ · (3·|value + offset| + |offset| + |value|)`` of what passes compute in float64 and round once:
the gain and the offset are rounded, and each product and difference with them.

A float32 weight whose every number happens to be half's (a half checkpoint, exported in float32) is stored like one: nothing is lost by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd

import ml_dtypes
import numpy as np
import onnx_graphsurgeon as gs

from .ir import Array, GraphEditor, Tensor, constant_value

#: Elements below which a constant stays as it is.
SMALLEST = 1024
# Looked at before all of an array is: most float32 weights are told apart by these.
_SAMPLE = 256
_BLOCK = 1 << 20
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Whole numbers are worth their factors if there are at least as many to each.
_FEWEST = 8

#: Dtypes of whole numbers, narrowest first.
WHOLE: tuple[np.dtype[np.generic], ...] = (
    np.dtype(ml_dtypes.int4),
    np.dtype(ml_dtypes.uint4),
    np.dtype(np.int8),
    np.dtype(np.uint8),
)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Numbers of which each is that of a block of a tensor: block i of an axis begins at element ``i · sizes[axis]``."""

    numbers: Array
    sizes: tuple[int, ...]

    @staticmethod
    def of(values: Array) -> Blocks:
        """The largest blocks of equal elements of ``values``."""
        sizes = tuple(_block_size(values, axis) for axis in range(values.ndim))
        return Blocks(np.array(values[tuple(slice(None, None, size) for size in sizes)], order="C"), sizes)

    def spread(self, dims: Sequence[int]) -> Array:
        """The number of each element of a tensor of ``dims``."""
        numbers = self.numbers
        for axis, (size, dim) in enumerate(zip(self.sizes, dims, strict=True)):
            if 1 < size < dim:
                numbers = numbers.take(np.arange(dim) // size, axis)
        return np.broadcast_to(numbers, tuple(dims))


def _block_size(values: Array, axis: int) -> int:
    """The largest size of blocks along ``axis`` within which nothing changes."""
    dim = int(values.shape[axis])
    if dim < 2 or values.strides[axis] == 0:
        return max(dim, 1)
    rows = np.moveaxis(values, axis, 0)
    changed = (rows[1:] != rows[:-1]).reshape(dim - 1, -1).any(axis=1)
    places = [int(at) + 1 for at in np.flatnonzero(changed)]
    return gcd(*places) or dim


@dataclass(frozen=True, eq=False)
class Weight:
    """What is stored of a constant: a tensor in float32, half precision or one of ``WHOLE``, which ``quantum`` and ``zero`` go with.

    Of a matrix ``[K, N]`` there may also be a ``scale`` ``[K]`` and an ``offset`` ``[N]``, in float32.
    """

    stored: Array
    scale: Array | None = None
    offset: Array | None = None
    quantum: Blocks | None = None
    zero: Blocks | None = None

    @property
    def is_whole(self) -> bool:
        """Whether whole numbers are stored."""
        return self.stored.dtype in WHOLE

    @property
    def plain(self) -> bool:
        """Whether what is stored is the value."""
        return all(part is None for part in (self.scale, self.offset, self.quantum, self.zero))

    def value(self) -> Array:
        """The float32 tensor, rounded as kernels round it."""
        value = self.stored.astype(np.float32)
        if self.zero is not None:
            value = value - self.zero.spread(value.shape)
        if self.quantum is not None:
            value = value * self.quantum.spread(value.shape)
        value = value if self.scale is None else value * self.scale[:, None]
        return value if self.offset is None else value - self.offset

    def arranged(self, arrange: Callable[[Array], Array]) -> Weight:
        """``arrange`` applied to a tensor without scale and offset: any movement of its elements."""
        blocks = (self.quantum, self.zero)
        quantum, zero = (b and Blocks.of(arrange(b.spread(self.stored.shape))) for b in blocks)
        return Weight(np.ascontiguousarray(arrange(self.stored)), None, None, quantum, zero)

    def columns(self, order: Sequence[int]) -> Weight:
        """Some of the columns of a matrix, in that order."""
        offset = None if self.offset is None else self.offset[order]
        quantum, zero = (b and _chosen(b, self.stored.shape[1], order) for b in (self.quantum, self.zero))
        return Weight(np.ascontiguousarray(self.stored[:, order]), self.scale, offset, quantum, zero)

    def with_row_scale(self) -> Weight:
        """Of a matrix, factors that are the same in all columns as part of its ``scale``, where zero points do not stand before them."""
        quantum = self.quantum
        if quantum is None or quantum.sizes[1] < self.stored.shape[1] or quantum.sizes[0] >= self.stored.shape[0]:
            return self
        if quantum.sizes[0] > 1 or self.zero is not None:
            return self
        rows = quantum.numbers[:, 0]
        return replace(self, quantum=None, scale=rows if self.scale is None else rows * self.scale)


def _chosen(blocks: Blocks, columns: int, order: Sequence[int]) -> Blocks:
    """The numbers of the columns ``order`` of a matrix."""
    size = blocks.sizes[1]
    if size >= columns:
        return Blocks(blocks.numbers, (blocks.sizes[0], len(order)))
    return Blocks(np.ascontiguousarray(blocks.numbers[:, np.asarray(order) // size]), (blocks.sizes[0], 1))


class FactoredConstant(gs.Constant):  # type: ignore[misc]  # graphsurgeon is untyped
    """A float32 constant of which ``weight`` is what is to be stored."""

    def __init__(self, name: str, values: Array, weight: Weight) -> None:
        super().__init__(name, values)
        self.weight = weight


def store_as(tensor: gs.Variable, values: Array, weight: Weight | None) -> None:
    """Makes a variable a constant, stored as ``weight``; None: by its values alone."""
    tensor.to_constant(values)
    if weight is not None:
        tensor.__class__ = FactoredConstant
        tensor.weight = weight


def narrowest(values: Array) -> Array:
    """``values`` in bfloat16 or float16 if they are float32, not few, and exact in it; else as they are."""
    if values.dtype != np.float32 or values.size < SMALLEST:
        return values
    flat = np.ascontiguousarray(values).reshape(-1)
    for dtype in (_BFLOAT16, np.dtype(np.float16)):
        blocks = [slice(0, _SAMPLE), *(slice(at, at + _BLOCK) for at in range(0, flat.size, _BLOCK))]
        if all(_exact(flat[block], dtype) for block in blocks):
            return values.astype(dtype)
    return values


def whole_dtype(values: Array, dtypes: Sequence[np.dtype[np.generic]] = WHOLE) -> np.dtype[np.generic] | None:
    """The first of ``dtypes`` that holds whole numbers ``values``; None if none does."""
    low, high = float(values.min(initial=0)), float(values.max(initial=0))
    return next((d for d in dtypes if _least(d) <= low and high < _least(d) + (1 << _bits(d))), None)


def quantised(values: Array, stored: Array, zero: Array | None, quantum: Array | None) -> Weight | None:
    """How float32 ``values`` are stored that are ``(stored - zero) · quantum``, whole numbers and what broadcasts to them.

    None if they are not that to the last bit, if the numbers are of no dtype in ``WHOLE``, or if there are too many factors to gain by it.
    """
    weight = _packed(stored, zero, quantum, values.shape) if values.size >= SMALLEST else None
    return weight if weight is not None and np.array_equal(weight.value(), values) else None


def _packed(stored: Array, zero: Array | None, quantum: Array | None, dims: tuple[int, ...]) -> Weight | None:
    """``(stored - zero) · quantum``; None if no dtype in ``WHOLE`` has the numbers, or if there are too many factors."""
    dtype = whole_dtype(stored)
    if dtype is None:
        return None
    numbers = stored
    if zero is not None:
        shifts = np.broadcast_to(zero.astype(np.float32), dims)
        centred = stored.astype(np.float32) - shifts
        found = whole_dtype(centred) if np.array_equal(zero, np.rint(zero)) else None
        if found is not None and _bits(found) <= _bits(dtype):
            numbers, zero, dtype = centred, None, found
    blocks = [
        None if part is None else Blocks.of(np.broadcast_to(part.astype(np.float32), dims)) for part in (quantum, zero)
    ]
    if blocks[0] is not None and np.all(blocks[0].numbers == 1):
        blocks[0] = None
    if any(b is not None and b.numbers.size * _FEWEST > numbers.size for b in blocks):
        return None
    if numbers.dtype != dtype:  # by way of float32: there is no cast between two types of few bits
        numbers = numbers.astype(np.float32, copy=False).astype(dtype)
    return Weight(np.ascontiguousarray(numbers), None, None, *blocks)


def dequantised(
    editor: GraphEditor, name: str, stored: Array, zero: Array, quantum: Array, dtype: np.dtype[np.generic]
) -> gs.Constant:
    """The constant ``(stored - zero) · quantum`` of whole numbers, computed in float32 and rounded to ``dtype``, stored as they are."""
    small = stored.size < SMALLEST or dtype != np.float32
    weight = None if small else _packed(stored, zero, quantum, stored.shape)
    if weight is not None:
        return FactoredConstant(editor.names.fresh(name), weight.value(), weight)
    values = (stored.astype(np.float32) - zero.astype(np.float32)) * quantum.astype(np.float32)
    return editor.constant(name, values.astype(dtype))


def _bits(dtype: np.dtype[np.generic]) -> int:
    return 8 * dtype.itemsize if dtype.kind in "iu" else 4


def _least(dtype: np.dtype[np.generic]) -> int:
    """The smallest number of a dtype in ``WHOLE``."""
    return 0 if dtype.name.startswith("u") else -1 << (_bits(dtype) - 1)


def weight_of(tensor: gs.Constant) -> Weight:
    """How a constant is stored."""
    return tensor.weight if isinstance(tensor, FactoredConstant) else Weight(narrowest(np.asarray(tensor.values)))


def arranged(editor: GraphEditor, name: str, source: Tensor, arrange: Callable[[Array], Array]) -> gs.Constant:
    """A constant that is the constant ``source`` with its elements moved or chosen by ``arrange``, and stored like it."""
    made = editor.constant(name, arrange(np.asarray(source.values)))
    weight = source.weight if isinstance(source, FactoredConstant) else None
    if weight is None or weight.scale is not None or weight.offset is not None or made.values.size < SMALLEST:
        return made
    return FactoredConstant(made.name, made.values, weight.arranged(arrange))


def factored(
    editor: GraphEditor, name: str, values: Array, source: Tensor, scale: Array, offset: Array | None
) -> gs.Constant:
    """A constant of ``values`` ``[K, N]``, which are those of ``source`` times ``scale`` ``[K]``, less ``offset`` ``[N]`` (None: 0)."""
    weight = weight_of(source)
    made = editor.constant(name, values)
    if weight.stored.dtype == np.float32 or weight.scale is not None or weight.offset is not None:
        return made
    rows = None if np.all(scale == 1) else scale.astype(np.float32)
    column = None if offset is None else offset.astype(np.float32)
    return FactoredConstant(made.name, made.values, replace(weight, scale=rows, offset=column))


def choose_columns(
    editor: GraphEditor, name: str, sources: Sequence[Tensor], order: Sequence[int] | Array | None = None
) -> gs.Constant:
    """The columns numbered ``order`` (None: all) of constant matrices ``sources`` ``[K, …]`` side by side, as one constant."""
    values = np.concatenate([constant_value(s) for s in sources], axis=1)
    weights = [s.weight for s in sources if isinstance(s, FactoredConstant)]
    made = editor.constant(name, values if order is None else values[:, list(order)])
    if len(weights) < len(sources) or not all(_alike(weights[0], w) for w in weights):
        return made
    joined = _side_by_side(weights)
    return FactoredConstant(made.name, made.values, joined if order is None else joined.columns(list(order)))


def _side_by_side(weights: Sequence[Weight]) -> Weight:
    first = weights[0]
    if len(weights) == 1:
        return first
    if first.is_whole:
        numbers = np.concatenate([w.stored.astype(np.int16) for w in weights], axis=1)
        stored = numbers.astype(whole_dtype(numbers))
    else:
        stored = np.concatenate([w.stored for w in weights], axis=1)
    offsets = [w.offset for w in weights if w.offset is not None]
    shapes = [w.stored.shape for w in weights]
    return Weight(
        stored,
        first.scale,
        np.concatenate(offsets) if offsets else None,
        _joined([w.quantum for w in weights], shapes, 1.0),
        _joined([w.zero for w in weights], shapes, 0.0),
    )


def _joined(parts: Sequence[Blocks | None], shapes: Sequence[tuple[int, ...]], default: float) -> Blocks | None:
    """The blocks of matrices side by side; ``default`` stands for those without."""
    if all(part is None for part in parts):
        return None
    whole = [
        np.broadcast_to(np.float32(default), dims) if part is None else part.spread(dims)
        for part, dims in zip(parts, shapes, strict=True)
    ]
    return Blocks.of(np.concatenate(whole, axis=1))


def _alike(a: Weight, b: Weight) -> bool:
    numbers = a.stored.dtype == b.stored.dtype or (
        a.is_whole
        and b.is_whole
        and whole_dtype(np.array([f(w.stored.astype(np.int16)) for w in (a, b) for f in (np.min, np.max)])) is not None
    )
    return (
        numbers
        and (a.offset is None) == (b.offset is None)
        and (a.scale is b.scale or (a.scale is not None and b.scale is not None and np.array_equal(a.scale, b.scale)))
    )


def _exact(values: Array, dtype: np.dtype[np.generic]) -> bool:
    if dtype == _BFLOAT16:
        return not np.any(values.view(np.uint32) & 0xFFFF)
    if np.any(values.view(np.uint32) & 0x1FFF):
        # float16's subnormals have fewer bits still; nothing of more is exact.
        return False
    with np.errstate(over="ignore"):
        return np.array_equal(values.astype(dtype).astype(np.float32), values)
