"""Quantised operators as float32 arithmetic with the same rounding: exact up to the order of float32 sums.

A quantised value is a whole number within its type's range, which float32 holds exactly, so a Quantize–Dequantize pair
needs no integer tensor: it is ``(clip(round(x / s) + z) − z) · s``, an elementwise chain that any epilogue takes. Sums of
products of such numbers are whole too, whatever float32 rounds beyond 2²⁴.

Sources: ONNX operators QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear, MatMulInteger, ConvInteger, QLinearMatMul and
QLinearConv; onnxruntime's DynamicQuantizeMatMul and MatMulIntegerToFloat, domain ``com.microsoft``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import ir
from .builder import Builder, decomposition
from .shape_rules import matmul
from .shapes import Call, Type, shape_rule

_FLOAT = np.dtype(np.float32)
_MICROSOFT = "com.microsoft"


@decomposition("QuantizeLinear")
def _quantize(b: Builder) -> ir.Tensor | None:
    if any(user.op == "DequantizeLinear" for user in ir.consumers(b.node.outputs[0])):
        # Those take the quantisation with them.
        return None
    rounded = _quantized(b)
    return None if rounded is None else b.cast(rounded, b.node.outputs[0].dtype, _FLOAT)


@decomposition("DequantizeLinear")
def _dequantize(b: Builder) -> ir.Tensor | None:
    """With the quantisation before it, if there is one, so that no integer is stored between the two."""
    source = ir.made_by(b.node.inputs[0], "QuantizeLinear")
    if source is None:
        value: ir.Tensor | None = b.cast(b.node.inputs[0], _FLOAT)
    else:
        value = _quantized(Builder(b.editor, source))
    if value is None or not _is_float(b.node.inputs[1]):
        return None
    return _rescaled(b, value, b.node.inputs[1], b.input(2), b.rank())


def _quantized(b: Builder) -> ir.Tensor | None:
    """A QuantizeLinear node's result as whole float32 numbers; None for a type or a blocking that is not known."""
    out = b.node.outputs[0].dtype
    if out is None or np.dtype(out).kind not in "iu" or not _is_float(b.node.inputs[0]):
        return None
    scale = _along(b, b.node.inputs[1], b.rank())
    zero = b.input(2)
    if scale is None:
        return None
    shift = None if zero is None else _along(b, b.cast(zero, _FLOAT), b.rank(), len(ir.shape(zero)))
    return _rounded(b, b.node.inputs[0], scale, shift, np.dtype(out))


def _rounded(b: Builder, x: ir.Tensor, scale: ir.Tensor, zero: ir.Tensor | None, dtype: Any) -> ir.Tensor:
    b.dtype = _FLOAT
    return _limited(b, b("Round", b("Div", x, scale)), zero, dtype)


def _limited(b: Builder, rounded: ir.Tensor, zero: ir.Tensor | None, dtype: Any) -> ir.Tensor:
    """Whole numbers plus a zero point, within the range of ``dtype``."""
    limits = np.iinfo(dtype)
    y = rounded if zero is None else b("Add", rounded, zero)
    return b("Min", b("Max", y, float(limits.min)), float(limits.max))


def _rescaled(b: Builder, value: ir.Tensor, scale: ir.Tensor, zero: ir.Tensor | None, rank: int) -> ir.Tensor | None:
    factor = _along(b, scale, rank)
    if factor is None:
        return None
    if zero is not None:
        shift = _along(b, b.cast(zero, _FLOAT), rank, len(ir.shape(zero)))
        value = value if shift is None else b("Sub", value, shift)
    return b("Mul", value, factor)


def _along(b: Builder, x: ir.Tensor, rank: int, own: int | None = None) -> ir.Tensor | None:
    """A scale or zero point so that it broadcasts: a vector, or blocks, along the attribute ``axis``; None for blocks of a dynamic axis."""
    own = len(ir.shape(x)) if own is None else own
    if own == 0:
        return x
    axis, size = b.attr("axis", 1) % rank if rank else 0, b.attr("block_size", 0)
    if size:
        count = ir.shape(b.node.inputs[0])[axis]
        return b("Gather", x, list(np.arange(count) // size), axis=axis) if isinstance(count, int) else None
    if own > 1:
        return None
    return b("Reshape", x, [-1] + [1] * (rank - 1 - axis)) if rank else b("Reshape", x, [])


def _is_float(tensor: ir.Tensor) -> bool:
    return tensor.dtype is not None and np.dtype(tensor.dtype) == _FLOAT


@decomposition("DynamicQuantizeLinear")
def _dynamic_quantize(b: Builder) -> list[ir.Tensor]:
    value, scale, zero = _dynamic(b, b.node.inputs[0], b.rank())
    return [b.cast(value, np.uint8, _FLOAT), scale, b.cast(zero, np.uint8, _FLOAT)]


def _dynamic(b: Builder, x: ir.Tensor, rank: int) -> tuple[ir.Tensor, ir.Tensor, ir.Tensor]:
    """uint8 values as float32, the scale and the zero point (float32 too), from the range of ``x`` widened to 0."""
    b.dtype = _FLOAT
    axes = list(range(rank))
    high = b("Max", b("ReduceMax", x, axes, keepdims=0), 0.0)
    low = b("Min", b("ReduceMin", x, axes, keepdims=0), 0.0)
    span = b("Div", b("Sub", high, low), 255.0)
    scale = b("Where", b("Equal", span, 0.0), 1.0, span)
    zero = b("Min", b("Max", b("Round", b("Div", b("Neg", low), scale)), 0.0), 255.0)
    return _rounded(b, x, scale, zero, np.uint8), scale, zero


@decomposition("MatMulInteger", "ConvInteger")
def _integer_product(b: Builder) -> ir.Tensor:
    return b.cast(_product(b), np.int32, _FLOAT)


@decomposition("Cast")
def _cast_of_product(b: Builder) -> ir.Tensor | None:
    """An integer product that becomes float at once never is an integer."""
    source = ir.made_by(b.node.inputs[0], "MatMulInteger", "ConvInteger")
    if source is None or np.dtype(b.node.outputs[0].dtype) != _FLOAT:
        return None
    if any(t.shape is None for t in source.inputs if t.name):
        return None
    return _product(Builder(b.editor, source))


def _product(b: Builder) -> ir.Tensor:
    """MatMulInteger or ConvInteger on float32."""
    left, right = (_centred(b, side) for side in (0, 1))
    if b.node.op == "MatMulInteger":
        return b("MatMul", left, right)
    return b("Conv", left, right, **b.node.attrs)


def _centred(b: Builder, side: int) -> ir.Tensor:
    """An operand less its zero point, in float32."""
    x, zero = b.cast(b.node.inputs[side], _FLOAT), b.input(2 + side)
    if zero is None or not np.any(ir.constant_value(zero) if ir.constant_value(zero) is not None else 1):
        return x
    rank, own = b.rank(side), len(ir.shape(zero))
    shift = b.cast(zero, _FLOAT)
    if own == 1 and ir.shape(zero)[0] != 1:
        # One for each row of the left operand of a product, each column of the right, each filter of a convolution.
        tail = {("MatMulInteger", 0): 1, ("MatMulInteger", 1): 0}.get((b.node.op, side), rank - 1)
        shift = b("Reshape", shift, [-1] + [1] * tail)
    return b("Sub", x, shift)


@decomposition("QLinearMatMul")
def _quantized_matmul(b: Builder) -> ir.Tensor | None:
    a, a_scale, a_zero, w, w_scale, w_zero, scale, zero = b.node.inputs
    left, right = _whole(b, a, a_zero, len(ir.shape(a)) - 2), _whole(b, w, w_zero, len(ir.shape(w)) - 1)
    rows = a_scale if len(ir.shape(a_scale)) != 1 or ir.shape(a_scale)[0] == 1 else b("Reshape", a_scale, [-1, 1])
    return _requantized(b, b("MatMul", left, right), [rows, w_scale], scale, zero)


@decomposition("QLinearConv")
def _quantized_conv(b: Builder) -> ir.Tensor | None:
    x, x_scale, x_zero, w, w_scale, w_zero, scale, zero = b.node.inputs[:8]
    y = b("Conv", _whole(b, x, x_zero, 0), _whole(b, w, w_zero, 0), **b.node.attrs)
    filters = [-1] + [1] * (b.rank() - 2)
    bias = b.input(8)
    if bias is not None:
        y = b("Add", y, b("Reshape", b.cast(bias, _FLOAT), filters))
    return _requantized(b, y, [x_scale, b("Reshape", w_scale, filters)], scale, zero)


def _whole(b: Builder, x: ir.Tensor, zero: ir.Tensor, axis: int) -> ir.Tensor:
    """``x`` less its zero point, in float32."""
    one = b.editor.constant(f"{x.name}.one", np.ones(ir.shape(zero), np.float32))
    return b("DequantizeLinear", x, one, zero, axis=axis)


def _requantized(
    b: Builder, sums: ir.Tensor, scales: list[ir.Tensor], scale: ir.Tensor, zero: ir.Tensor
) -> ir.Tensor | None:
    """Whole sums as the quantised output: multiplied by one number, as onnxruntime's kernels do, then rounded."""
    dtype = b.node.outputs[0].dtype
    if dtype is None or not all(_is_float(s) for s in (*b.node.inputs[1:2], scale)):
        return None
    b.dtype = _FLOAT
    factor = b("Div", b("Mul", *scales), scale)
    return b.cast(_limited(b, b("Round", b("Mul", sums, factor)), b.cast(zero, _FLOAT), dtype), dtype, _FLOAT)


@shape_rule("DynamicQuantizeLinear")
def _dynamic_types(call: Call) -> list[Type]:
    return [(np.dtype(np.uint8), call.shape()), (_FLOAT, ()), (np.dtype(np.uint8), ())]


@shape_rule("DynamicQuantizeMatMul", "MatMulIntegerToFloat", domain=_MICROSOFT)
def _float_product_type(call: Call) -> list[Type]:
    return [(_FLOAT, matmul(call, call.shape(0), call.shape(1)))]


@decomposition("DynamicQuantizeMatMul", domain=_MICROSOFT)
def _dynamic_matmul(b: Builder) -> ir.Tensor:
    w, w_scale, w_zero, bias = b.node.inputs[1], b.node.inputs[2], b.input(3), b.input(4)
    value, scale, zero = _dynamic(b, b.node.inputs[0], b.rank())
    weights = b.cast(w, _FLOAT)
    weights = weights if w_zero is None else b("Sub", weights, b.cast(w_zero, _FLOAT))
    y = b("Mul", b("MatMul", b("Sub", value, zero), weights), b("Mul", w_scale, scale))
    return y if bias is None else b("Add", y, bias)


@decomposition("MatMulIntegerToFloat", domain=_MICROSOFT)
def _matmul_to_float(b: Builder) -> ir.Tensor:
    a, w, a_scale, w_scale = b.node.inputs[:4]
    a_zero, w_zero, bias = b.input(4), b.input(5), b.input(6)
    left, right = b.cast(a, _FLOAT), b.cast(w, _FLOAT)
    left = left if a_zero is None else b("Sub", left, b.cast(a_zero, _FLOAT))
    right = right if w_zero is None else b("Sub", right, b.cast(w_zero, _FLOAT))
    y = b("Mul", b("MatMul", left, right), b("Mul", a_scale, w_scale))
    return y if bias is None else b("Add", y, bias)
