"""Constants of whole numbers that kernels other than GEMMs read: rows of an embedding, which a look-up makes float32 of.

Numbers lie as in ONNX, one a byte. Of 4 bits, two neighbours along the first axis share a byte, so that whatever reads along the last axis
reads whole vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import tirx

from ..ir import Array
from ..weights import Blocks, Weight, narrowest
from .emit import Emitter, Expr, int64
from .kernel import Packed

_BIAS = {"int4": 8, "uint4": 0}


def readable(weight: Weight) -> bool:
    """Whether ``element`` reads such a weight."""
    return weight.is_whole and weight.scale is None and weight.offset is None and weight.stored.ndim > 1


def element(name: str, weight: Weight, emit: Emitter, indices: Sequence[Expr]) -> Expr:
    """The float32 element of a constant at ``indices``, one for each axis of what is stored."""
    dims = weight.stored.shape
    bias = _BIAS.get(weight.stored.dtype.name)
    if bias is None:
        stored = emit.load(Packed(name, weight.stored), weight.stored.dtype.name, emit.ravel(indices, dims))
        value = _real(stored)
    else:
        first, *rest = indices
        half = (-(-dims[0] // 2), *dims[1:])
        at = emit.ravel([emit.bind(tirx.floordiv(first, int64(2))), *rest], half)
        byte = emit.load(Packed(name, _pairs(weight.stored, bias)), "uint8", at)
        shift = emit.bind(tirx.floormod(first, int64(2)) * int64(4)).astype("uint8")
        value = _real((byte >> shift) & tirx.const(15, "uint8"))
    zero = _block(f"{name}.zero", weight.zero, bias or 0, emit, indices)
    if zero is not None:
        value = value - zero
    elif bias:
        value = value - tirx.const(float(bias), "float32")
    quantum = _block(f"{name}.quantum", weight.quantum, 0, emit, indices)
    return emit.bind(value if quantum is None else value * quantum)


def _pairs(numbers: Array, bias: int) -> Array:
    """Numbers of 4 bits, two neighbours of the first axis in a byte, the first in its low half."""
    count = len(numbers)
    fields = np.zeros((count + count % 2, *numbers.shape[1:]), np.uint8)
    fields[:count] = (numbers.astype(np.int16) + bias).astype(np.uint8)
    pairs: Array = fields[::2] | (fields[1::2] << np.uint8(4))
    return pairs


def _block(name: str, blocks: Blocks | None, bias: int, emit: Emitter, indices: Sequence[Expr]) -> Expr | None:
    """The number of the block of an element, plus ``bias``."""
    if blocks is None:
        return None
    numbers = narrowest(blocks.numbers + np.float32(bias))
    places = [
        int64(0) if dim == 1 else index if size == 1 else emit.bind(tirx.floordiv(index, int64(size)))
        for index, size, dim in zip(indices, blocks.sizes, numbers.shape, strict=True)
    ]
    if numbers.size == 1:
        return tirx.const(float(numbers.reshape(-1)[0]), "float32")
    return emit.load(Packed(name, numbers), numbers.dtype.name, emit.ravel(places, numbers.shape))


def _real(value: Expr) -> Expr:
    return tirx.Cast("float32", tirx.Cast("int32", value))
