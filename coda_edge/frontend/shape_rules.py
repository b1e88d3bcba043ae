"""Shape rules of the ONNX operators that Transformers carry: one function per group of operators.

Each gives the dtype and dimensions of every output. Source: the ONNX operator specifications, opsets 18 to 24.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import sympy

from ..epilogue.ops import OPERATORS, Group, Rule
from ..symbolic import Dim, divide, simplify
from .shapes import Call, Type, constant_of, shape_rule

INT64 = np.dtype(np.int64)
BOOL = np.dtype(np.bool_)


def broadcast(call: Call, *shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    """The common shape (NumPy's rule); two different sizes that are not 1 are assumed equal."""
    rank = max(map(len, shapes))
    dims: list[Dim] = []
    for axis in range(-rank, 0):
        out: Dim = 1
        for shape in shapes:
            dim = shape[axis] if len(shape) >= -axis else 1
            if dim == 1 or dim == out:
                continue
            out = dim if out == 1 else call.equate(out, dim)
        dims.append(out)
    return tuple(dims)


@shape_rule(
    *("Acos", "Asin", "Atan", "BitwiseNot", "Celu", "Clip", "Cosh", "CumSum"),
    *("Elu", "Gelu", "Hardmax", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "LogSoftmax"),
    *("Mish", "PRelu", "ScatterElements", "ScatterND", "Selu", "Shrink", "Sinh", "Softmax"),
    *("Softplus", "Softsign", "Swish", "Tan", "ThresholdedRelu", "Trilu", "RotaryEmbedding", "RMSNormalization"),
    *("InstanceNormalization", "GroupNormalization", "LpNormalization"),
)
def _like_first(call: Call) -> list[Type]:
    return [(call.dtype(), call.shape())]


@shape_rule("Mod", "Sum", "Mean", "Xor", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitShift")
def _broadcasting(call: Call) -> list[Type]:
    return [(call.dtype(), broadcast(call, *map(call.shape, range(len(call)))))]


@shape_rule("IsInf")
def _comparing(call: Call) -> list[Type]:
    return [(BOOL, broadcast(call, *map(call.shape, range(len(call)))))]


_ELEMENTWISE = {
    Rule.COMPARE: _comparing,
    Rule.PREDICATE: _comparing,
    **dict.fromkeys((Rule.NUMERIC, Rule.FLOAT, Rule.LOGIC), _broadcasting),
}
for _operator in OPERATORS.values():
    if _operator.group is Group.POINTWISE and isinstance(_operator.onnx, str) and _operator.rule in _ELEMENTWISE:
        shape_rule(_operator.onnx)(_ELEMENTWISE[_operator.rule])


@shape_rule("Where")
def _where(call: Call) -> list[Type]:
    return [(call.dtype(1), broadcast(call, call.shape(1), call.shape(2), call.shape(0)))]


@shape_rule("Cast")
def _cast(call: Call) -> list[Type]:
    return [(dtype_of(call.attr("to")), call.shape())]


@shape_rule("CastLike")
def _cast_like(call: Call) -> list[Type]:
    return [(call.dtype(1), call.shape())]


@shape_rule("Dropout")
def _dropout(call: Call) -> list[Type]:
    return [(call.dtype(), call.shape()), (BOOL, call.shape())][: len(call.node.outputs)]


@shape_rule("QuantizeLinear")
def _quantize(call: Call) -> list[Type]:
    declared = call.attr("output_dtype", 0)
    dtype = dtype_of(declared) if declared else call.dtype(2) if call.has(2) else np.dtype(np.uint8)
    return [(dtype, call.shape())]


@shape_rule("DequantizeLinear")
def _dequantize(call: Call) -> list[Type]:
    return [(call.dtype(1), call.shape())]


@shape_rule("DynamicQuantizeLinear")
def _dynamic_quantize(call: Call) -> list[Type]:
    return [(np.dtype(np.uint8), call.shape()), (call.dtype(), ()), (np.dtype(np.uint8), ())]


@shape_rule("LayerNormalization")
def _layer_norm(call: Call) -> list[Type]:
    dims = call.shape()
    axis = call.axis(call.attr("axis", -1), len(dims))
    row = (dtype_of(call.attr("stash_type", 1)), (*dims[:axis], *(1 for _ in dims[axis:])))
    return [(call.dtype(), dims), row, row][: len(call.node.outputs)]


@shape_rule("BatchNormalization")
def _batch_norm(call: Call) -> list[Type]:
    return [(call.dtype(), call.shape())] + [(call.dtype(3), call.shape(3))] * (len(call.node.outputs) - 1)


@shape_rule("MatMul")
def _matmul(call: Call) -> list[Type]:
    return [(call.dtype(), matmul(call, call.shape(0), call.shape(1)))]


@shape_rule("MatMulInteger")
def _matmul_integer(call: Call) -> list[Type]:
    return [(np.dtype(np.int32), matmul(call, call.shape(0), call.shape(1)))]


def matmul(call: Call, a: tuple[Dim, ...], b: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """The shape of a matrix product, NumPy's rule."""
    if not a or not b:
        raise call.error("a matrix product needs operands of rank 1 or more")
    left = a if len(a) > 1 else (1, *a)
    right = b if len(b) > 1 else (*b, 1)
    call.equate(left[-1], right[-2])
    dims = (*broadcast(call, left[:-2], right[:-2]), left[-2], right[-1])
    if len(a) == 1:
        dims = (*dims[:-2], dims[-1])
    return dims if len(b) > 1 else dims[:-1]


@shape_rule("Gemm")
def _gemm(call: Call) -> list[Type]:
    a, b = call.shape(0), call.shape(1)
    a = a[::-1] if call.attr("transA", 0) else a
    b = b[::-1] if call.attr("transB", 0) else b
    call.equate(a[1], b[0])
    return [(call.dtype(), (a[0], b[1]))]


@shape_rule("Constant")
def _constant(call: Call) -> list[Type]:
    value = constant_of(call.node)
    return [(value.dtype, value.shape)]


def axes_of(call: Call, index: int) -> list[int] | None:
    """The axes that an input gives, None if it is left out."""
    if not call.has(index):
        return None
    axes = call.ints(index)
    if axes is None:
        raise call.error("its axes are not known")
    return axes


@shape_rule("EyeLike")
def _eye_like(call: Call) -> list[Type]:
    return [(dtype_of(call.attr("dtype")) if call.attr("dtype") else call.dtype(), call.shape())]


@shape_rule(
    *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum"),
    *("ReduceLogSumExp", "ReduceSumSquare"),
)
def _reduce(call: Call) -> list[Type]:
    dims = call.shape()
    axes = call.attr("axes") or axes_of(call, 1)
    if not axes and call.attr("noop_with_empty_axes", 0):
        return [(call.dtype(), dims)]
    gone = {call.axis(a, len(dims)) for a in axes} if axes else set(range(len(dims)))
    return [(call.dtype(), _reduced(dims, gone, call.attr("keepdims", 1)))]


@shape_rule("ArgMax", "ArgMin")
def _arg(call: Call) -> list[Type]:
    dims = call.shape()
    return [(INT64, _reduced(dims, {call.axis(call.attr("axis", 0), len(dims))}, call.attr("keepdims", 1)))]


def _reduced(dims: tuple[Dim, ...], gone: set[int], keep: int) -> tuple[Dim, ...]:
    return tuple(1 if i in gone else d for i, d in enumerate(dims) if keep or i not in gone)


@shape_rule("TopK")
def _top_k(call: Call) -> list[Type]:
    dims = list(call.shape())
    k = call.sizes(1)
    axis = call.axis(call.attr("axis", -1), len(dims))
    if k is not None:
        call.at_most(k.item(), dims[axis], f"the elements to choose from: {call.axis_of(axis)}")
    dims[axis] = call.fresh(axis) if k is None else k.item()
    return [(call.dtype(), tuple(dims)), (INT64, tuple(dims))]


@shape_rule("OneHot")
def _one_hot(call: Call) -> list[Type]:
    dims = list(call.shape())
    depth = call.sizes(1)
    axis = call.axis(call.attr("axis", -1), len(dims) + 1)
    dims.insert(axis, call.fresh(axis) if depth is None else depth.item())
    return [(call.dtype(2), tuple(dims))]


@shape_rule("NonZero")
def _non_zero(call: Call) -> list[Type]:
    return [(INT64, (max(len(call.shape()), 1), call.counted()))]


@shape_rule("Resize", "Upsample")
def _resize(call: Call) -> list[Type]:
    dims = list(call.shape())
    sizes, scales = call.sizes(3), call.value(2)
    axes = [call.axis(a, len(dims)) for a in call.attr("axes") or range(len(dims))]
    if sizes is not None and sizes.size:
        wanted = _by_aspect(call, dims, axes, sizes.tolist())
        for axis, size in zip(axes, wanted, strict=True):
            dims[axis] = size
    elif scales is not None and scales.size:
        for axis, scale in zip(axes, scales.tolist(), strict=True):
            whole = int(scale) if float(scale).is_integer() else sympy.Rational(str(scale))
            dim = dims[axis]
            dims[axis] = int(np.floor(dim * scale)) if isinstance(dim, int) else simplify(sympy.floor(dim * whole))
    else:
        for axis in axes:
            dims[axis] = call.fresh(axis)
    return [(call.dtype(), tuple(dims))]


def _by_aspect(call: Call, dims: Sequence[Dim], axes: Sequence[int], sizes: list[Dim]) -> list[Dim]:
    """The sizes that Resize makes of those that it is given, as it keeps the aspect ratio or not."""
    policy = call.attr("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return sizes
    pairs = [(size, dims[axis]) for size, axis in zip(sizes, axes, strict=True)]
    ratios = [size / dim for size, dim in pairs if isinstance(size, int) and isinstance(dim, int)]
    if len(ratios) < len(pairs):
        raise call.error(f"keep_aspect_ratio_policy '{policy}' needs fixed sizes: pin them with --shape")
    scale = min(ratios) if policy == "not_larger" else max(ratios)
    return [int(np.floor(int(dim) * scale + 0.5)) for _, dim in pairs]


@shape_rule("Conv", "MaxPool", "AveragePool")
def _window(call: Call) -> list[Type]:
    dims = call.shape()
    spatial = len(dims) - 2
    kernel = list(call.attr("kernel_shape") or call.shape(1)[2:])
    strides = call.attr("strides") or [1] * spatial
    dilations = call.attr("dilations") or [1] * spatial
    pads = call.attr("pads") or [0] * (2 * spatial)
    auto = call.attr("auto_pad", "NOTSET")
    ceil = call.attr("ceil_mode", 0)
    out: list[Dim] = [dims[0], call.shape(1)[0] if call.node.op == "Conv" else dims[1]]
    for i, dim in enumerate(dims[2:]):
        if auto.startswith("SAME"):
            span = simplify(dim + strides[i] - 1)
        else:
            reach = dilations[i] * (kernel[i] - 1) + 1
            around = 0 if auto == "VALID" else pads[i] + pads[i + spatial]
            span = simplify(dim + around - reach + strides[i] + (strides[i] - 1 if ceil else 0))
        if isinstance(span, int):
            out.append(span // strides[i])
        else:
            out.append(span if strides[i] == 1 else simplify(sympy.floor(span / strides[i])))
    result = (call.dtype(), tuple(out))
    return [result, (INT64, tuple(out))][: len(call.node.outputs)]


@shape_rule("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(call: Call) -> list[Type]:
    dims = call.shape()
    return [(call.dtype(), (*dims[:2], *(1 for _ in dims[2:])))]


@shape_rule("LSTM", "GRU", "RNN")
def _recurrent(call: Call) -> list[Type]:
    sequence, batch = call.shape()[:2]
    directions, hidden = call.shape(2)[0], call.shape(2)[2]
    if call.attr("layout", 0):
        sequence, batch = batch, sequence
        last: tuple[Dim, ...] = (batch, directions, hidden)
        every: tuple[Dim, ...] = (batch, sequence, directions, hidden)
    else:
        last, every = (directions, batch, hidden), (sequence, directions, batch, hidden)
    return [(call.dtype(), dims) for dims in (every, last, last)][: len(call.node.outputs)]


@shape_rule("Attention")
def _attention(call: Call) -> list[Type]:
    call.equate(call.shape(1)[-2], call.shape(2)[-2])
    q, k, v = (call.shape(i) for i in range(3))
    if len(q) == 4:
        batch, heads, rows, depth = q
        keys, key_heads, value_depth = k[2], k[1], v[3]
    else:
        batch, rows = q[:2]
        heads, key_heads = call.attr("q_num_heads"), call.attr("kv_num_heads")
        keys = k[1]
        parts = divide(q[2], heads), divide(v[2], key_heads)
        if parts[0] is None or parts[1] is None:
            raise call.error("the number of heads does not divide the width")
        depth, value_depth = parts
    total = simplify(keys + call.shape(4)[2]) if call.has(4) else keys
    out = (batch, heads, rows, value_depth) if len(q) == 4 else (batch, rows, simplify(heads * value_depth))
    found: list[tuple[Dim, ...]] = [
        out,
        (batch, key_heads, total, depth),
        (batch, key_heads, total, value_depth),
        (batch, heads, rows, total),
    ]
    return [(call.dtype(), dims) for dims in found][: len(call.node.outputs)]


@shape_rule("Einsum")
def _einsum(call: Call) -> list[Type]:
    shapes = [call.shape(i) for i in range(len(call.node.inputs))]
    try:
        terms, result = einsum_terms(call.attr("equation"), [len(s) for s in shapes])
    except ValueError as error:
        raise call.error(str(error)) from error
    sizes: dict[str, Dim] = {}
    for term, dims in zip(terms, shapes, strict=True):
        for index, dim in zip(term, dims, strict=True):
            sizes[index] = call.equate(sizes[index], dim) if index in sizes else dim
    return [(call.dtype(), tuple(sizes[c] for c in result))]


def einsum_terms(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """One character for each axis of operands of ``ranks``, and of the result, with ellipses and a missing result written out.

    Raises ValueError if the equation does not fit the operands.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise ValueError(f"the equation '{equation}' has {len(terms)} terms for {len(ranks)} operands")
    hidden = [rank - len(t.replace("...", "")) for t, rank in zip(terms, ranks, strict=True)]
    if any(n < 0 or (n > 0 and "..." not in t) for t, n in zip(terms, hidden, strict=True)):
        raise ValueError(f"the equation '{equation}' does not fit operands of ranks {list(ranks)}")
    # Digits stand for what ellipses hide; they are aligned from the right.
    dots = "".join(map(str, range(max(hidden))))
    terms = [t.replace("...", dots[len(dots) - n :]) for t, n in zip(terms, hidden, strict=True)]
    if not arrow:
        right = "..." + "".join(sorted(c for c in set(left) - set(".,") if left.count(c) == 1))
    result = right.replace("...", dots)
    if not set(result) <= set("".join(terms)):
        raise ValueError(f"the result of the equation '{equation}' has an index that no operand has")
    return terms, result


def dtype_of(onnx_type: int) -> Any:
    """NumPy's dtype for an ONNX element type."""
    return onnx.helper.tensor_dtype_to_np_dtype(int(onnx_type))
