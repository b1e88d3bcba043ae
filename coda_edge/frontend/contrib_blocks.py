"""Microsoft's weights of few bits, a scale for each block: constants of float32, which keep what they are made of (see ``weights``).

Sources: onnxruntime's ContribOperators documentation of MatMulNBits, GatherBlockQuantized and MatMulBnb4; the NF4 code of QLoRA
(arXiv 2305.14314), FP4 of bitsandbytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .. import ir
from ..errors import UnsupportedOperator
from ..weights import dequantised
from .builder import Builder, decomposition
from .composite import MICROSOFT
from .shapes import Call, Type, shape_rule

Array = npt.NDArray[Any]

# The values of a 4-bit code, by quant_type: FP4 (sign, 2 bits of exponent, 1 of mantissa, over its largest), NF4.
_CODES = (
    np.array(
        [0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4, 0, -1 / 192, -2 / 3, -1, -1 / 3, -1 / 2, -1 / 6, -1 / 4],
        np.float32,
    ),
    np.array(
        [
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
            *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
            *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023),
            1.0,
        ],
        np.float32,
    ),
)


def _constant(b: Builder, index: int) -> Array | None:
    """The value of an input, which must be constant; None if it is not given. Raises UnsupportedOperator."""
    tensor = b.input(index)
    if tensor is None:
        return None
    value = ir.constant_value(tensor)
    if value is None:
        raise UnsupportedOperator(
            f"{MICROSOFT}::{b.node.op}", b.node.name, f"its weights '{tensor.name}' must be constant"
        )
    return value


def _required(b: Builder, index: int) -> Array:
    value = _constant(b, index)
    if value is None:
        raise UnsupportedOperator(f"{MICROSOFT}::{b.node.op}", b.node.name, f"input {index} is missing")
    return value


def unpacked(data: Array, bits: int) -> Array:
    """The numbers of ``bits`` in each byte of uint8 ``[…, n]``, the lowest first: uint8 ``[…, 8n/bits]``."""
    if bits == 8:
        return data
    parts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((data[..., None] >> parts) & np.uint8((1 << bits) - 1)).reshape(*data.shape[:-1], -1)


@shape_rule("MatMulNBits", "MatMulBnb4", domain=MICROSOFT)
def _product_type(call: Call) -> list[Type]:
    back = call.node.op == "MatMulBnb4" and not call.attr("transB", 1)
    return [(call.dtype(), (*call.shape()[:-1], call.attr("K" if back else "N")))]


@decomposition("MatMulNBits", domain=MICROSOFT)
def _matmul_bits(b: Builder) -> ir.Tensor:
    rows, columns, bits, size = b.required("N"), b.required("K"), b.attr("bits", 4), b.attr("block_size", 32)
    blocks = -(-columns // size)
    codes = unpacked(_required(b, 1).reshape(rows, blocks, -1), bits).reshape(rows, blocks * size)[:, :columns]
    scales = _required(b, 2).astype(np.float32).reshape(rows, blocks)
    zeros = _zeros(_constant(b, 3), rows, blocks, bits)
    block = _constant(b, 4)
    block = np.arange(columns) // size if block is None else block.reshape(-1)[:columns]
    name = f"{b.node.inputs[1].name}.real"
    weights = dequantised(b.editor, name, codes.T, zeros[:, block].T, scales[:, block].T, np.dtype(b.dtype))
    y = b("MatMul", b.node.inputs[0], weights)
    return y if b.input(5) is None else b("Add", y, b.node.inputs[5])


def _zeros(given: Array | None, rows: int, blocks: int, bits: int) -> Array:
    """float32 ``[rows, blocks]``: the zero point of each block, in the middle of the range if none are given."""
    if given is None:
        return np.full((rows, blocks), 1 << (bits - 1), np.float32)
    if given.dtype == np.uint8:
        given = unpacked(given.reshape(rows, -1), bits)
    return given.reshape(rows, -1)[:, :blocks].astype(np.float32)


def _typed(b: Builder, weights: Array) -> Array:
    return np.ascontiguousarray(weights, np.dtype(b.dtype))


@decomposition("MatMulBnb4", domain=MICROSOFT)
def _matmul_codes(b: Builder) -> ir.Tensor:
    rows, columns, size = b.required("N"), b.required("K"), b.attr("block_size", 64)
    packed = _required(b, 1).reshape(-1)
    # Here the first of two numbers is in the higher bits.
    codes = unpacked(packed, 4).reshape(-1, 2)[:, ::-1].reshape(-1)[: rows * columns]
    scales = np.repeat(_required(b, 2).astype(np.float32).reshape(-1), size)[: rows * columns]
    weights = (_CODES[b.attr("quant_type", 1)][codes] * scales).reshape(rows, columns)
    weights = weights.T if b.attr("transB", 1) else weights
    return b("MatMul", b.node.inputs[0], b.editor.constant(f"{b.node.inputs[1].name}.real", _typed(b, weights)))


@shape_rule("GatherBlockQuantized", domain=MICROSOFT)
def _gather_type(call: Call) -> list[Type]:
    data = list(call.shape())
    if call.dtype() == np.uint8:
        data[-1] *= 8 // call.attr("bits", 4)
    axis = call.axis(call.attr("gather_axis", 0), len(data))
    return [(call.dtype(2), (*data[:axis], *call.shape(1), *data[axis + 1 :]))]


@decomposition("GatherBlockQuantized", domain=MICROSOFT)
def _gather_blocks(b: Builder) -> ir.Tensor:
    data, scales, zeros = _required(b, 0), _required(b, 2), _constant(b, 3)
    bits, packed = b.attr("bits", 4), data.dtype == np.uint8
    if data.dtype.kind not in "iu" and data.dtype.name not in ("int4", "uint4"):
        raise UnsupportedOperator(
            f"{MICROSOFT}::GatherBlockQuantized", b.node.name, f"its table is of {data.dtype}; give one of integers"
        )
    codes = unpacked(data, bits) if packed else data
    axis = b.attr("quantize_axis", 1) % data.ndim
    block = np.arange(codes.shape[axis]) // b.attr("block_size", 128)
    middle: Array = np.array(1 << (bits - 1) if packed else 0, np.float32)
    if zeros is not None:
        zeros = unpacked(zeros, bits) if packed else zeros
        middle = np.take(zeros.astype(np.float32), block, axis)
    factors = np.take(scales, block, axis)
    real = dequantised(b.editor, f"{b.node.inputs[0].name}.real", codes, middle, factors, scales.dtype)
    return b("Gather", real, b.node.inputs[1], axis=b.attr("gather_axis", 0) % data.ndim)
