"""Microsoft's quantised operators by ONNX's QuantizeLinear and DequantizeLinear, which ``quantization`` takes further.

Each computes in float32 between the two, as onnxruntime's documentation defines it; its integer kernels differ by at most one
step where a result lies between two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import ir
from ..errors import UnsupportedOperator
from .builder import Builder
from .composite import MICROSOFT, composite
from .contrib_attention import project_and_attend
from .contrib_embedding import embed

_FLOAT = np.dtype(np.float32)


def _real(b: Builder, at: int, axis: int = 1) -> ir.Tensor:
    """The input at ``at`` less its zero point and times its scale, which are the next two inputs."""
    zero = b.input(at + 2)
    return b("DequantizeLinear", *b.node.inputs[at : at + 2], *([] if zero is None else [zero]), axis=axis)


def _whole(b: Builder, y: ir.Tensor, at: int) -> ir.Tensor:
    """``y`` quantised by the scale at input ``at`` and the zero point after it, to the type of the first quantised input."""
    zero = b.input(at + 1)
    if zero is not None:
        return b("QuantizeLinear", y, b.node.inputs[at], zero)
    dtype = next(t.dtype for t in b.node.inputs if t.name and np.dtype(t.dtype).itemsize == 1)
    return b("QuantizeLinear", y, b.node.inputs[at], output_dtype=_number(dtype))


def _number(dtype: Any) -> int:
    return {np.dtype(np.uint8): 2, np.dtype(np.int8): 3}[np.dtype(dtype)]


@composite("QuantizeLinear", "DequantizeLinear")
def _as_in_onnx(b: Builder) -> ir.Tensor:
    return b(b.node.op, *b.node.inputs, **b.node.attrs)


@composite("QLinearAdd", "QLinearMul")
def _binary(b: Builder) -> ir.Tensor:
    return _whole(b, b(b.node.op.removeprefix("QLinear"), _real(b, 0), _real(b, 3)), 6)


@composite("QLinearSigmoid", "QLinearLeakyRelu")
def _unary(b: Builder) -> ir.Tensor:
    return _whole(b, b(b.node.op.removeprefix("QLinear"), _real(b, 0), **b.node.attrs), 3)


@composite("QLinearSoftmax")
def _softmax(b: Builder) -> ir.Tensor:
    axis = b.attr("axis", -1)
    if b.attr("opset", 13) < 13 and axis % b.rank() != b.rank() - 1:
        choices = "a softmax over several axes at once is not: convert the model to opset 13 or later"
        raise UnsupportedOperator(f"{MICROSOFT}::QLinearSoftmax", b.node.name, choices)
    return _whole(b, b("Softmax", _real(b, 0), axis=axis), 3)


@composite("QLinearReduceMean")
def _reduce_mean(b: Builder) -> ir.Tensor:
    axes = b.attr("axes", None) or list(range(b.rank()))
    return _whole(b, b("ReduceMean", _real(b, 0), axes, keepdims=b.attr("keepdims", 1)), 3)


@composite("QLinearAveragePool", "QLinearGlobalAveragePool")
def _pool(b: Builder) -> ir.Tensor:
    op = b.node.op.removeprefix("QLinear")
    return _whole(b, _channels_first(b, op, [_real(b, 0)], b.attr("channels_last", 0)), 3)


@composite("NhwcMaxPool")
def _max_pool(b: Builder) -> ir.Tensor:
    pooled = _channels_first(b, "MaxPool", [b.cast(b.node.inputs[0], _FLOAT)], last=1)
    return b.cast(pooled, b.node.inputs[0].dtype, _FLOAT)


@composite("QLinearConv")
def _conv(b: Builder) -> ir.Tensor:
    return _channels_first(b, "QLinearConv", b.node.inputs, b.attr("channels_last", 0))


def _channels_first(b: Builder, op: str, inputs: Sequence[ir.Tensor], last: int) -> ir.Tensor:
    """``op`` on an image, its channels ``last`` or first."""
    attrs = {n: v for n, v in b.node.attrs.items() if n != "channels_last"}
    if not last:
        return b(op, *inputs, **attrs)
    rank = b.rank()
    first = b("Transpose", inputs[0], perm=[0, rank - 1, *range(1, rank - 1)])
    return b("Transpose", b(op, first, *inputs[1:], **attrs), perm=[0, *range(2, rank), 1])


@composite("QLinearConcat")
def _concat(b: Builder) -> ir.Tensor:
    parts = [_real(b, at) for at in range(2, len(b.node.inputs), 3)]
    return _whole(b, b("Concat", *parts, axis=b.attr("axis", 0)), 0)


@composite("QLinearWhere")
def _where(b: Builder) -> ir.Tensor:
    return _whole(b, b("Where", b.node.inputs[0], _real(b, 1), _real(b, 4)), 7)


@composite("QGemm")
def _gemm(b: Builder) -> ir.Tensor:
    """The sums are of whole numbers, as is C: its scale is α times that of the products."""
    left, right = _real(b, 0), _real(b, 3, axis=0 if b.attr("transB", 0) else 1)
    alpha, added = b.attr("alpha", 1.0), b.input(6)
    y = b("Gemm", left, right, alpha=alpha, transA=b.attr("transA", 0), transB=b.attr("transB", 0))
    if added is not None:
        with b.numbers(_FLOAT):
            unit = b("Mul", b("Mul", b.node.inputs[1], b.node.inputs[4]), alpha)
        y = b("Add", y, b("Mul", b.cast(added, _FLOAT), unit))
    return _whole(b, y, 7) if b.input(7) is not None else y


@composite("QAttention")
def _attention(b: Builder) -> list[ir.Tensor]:
    x, weights, bias, x_scale, weight_scale = b.node.inputs[:5]
    x_zero, weight_zero = b.input(6), b.input(7)
    x = b("DequantizeLinear", x, x_scale, *([] if x_zero is None else [x_zero]))
    weights = b("DequantizeLinear", weights, weight_scale, *([] if weight_zero is None else [weight_zero]), axis=1)
    with b.numbers(_FLOAT):
        return project_and_attend(b, x, weights, bias, b.input(5), b.input(8), None)


@composite("QEmbedLayerNormalization")
def _embed(b: Builder) -> list[ir.Tensor]:
    def real(at: int) -> ir.Tensor | None:
        """One of the tables at inputs 2 to 6, whose scales are inputs 8 to 12 and zero points 13 to 17."""
        table = b.input(at)
        return None if table is None else b("DequantizeLinear", table, b.node.inputs[at + 6], b.node.inputs[at + 11])

    words, places, kinds, gamma, beta = (real(at) for at in range(2, 7))
    with b.numbers(_FLOAT):
        return embed(b, (words, places, kinds, gamma, beta), None)[:2]
