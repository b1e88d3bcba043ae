"""Shape rules of the ONNX operators that Transformers carry: one function per group of operators.

Each gives the dtype and dimensions of every output. Source: the ONNX operator specifications, opsets 18 to 24.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import sympy

from ..symbolic import Dim, divide, product, simplify
from .shapes import Call, Type, shape_rule

INT64 = np.dtype(np.int64)
BOOL = np.dtype(np.bool_)

# Slice bounds at least this large mean "to the end".
UNBOUNDED = 2**31 - 1


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
    *(
        "Abs",
        "Acos",
        "Asin",
        "Atan",
        "BitwiseNot",
        "Ceil",
        "Celu",
        "Clip",
        "Cos",
        "Cosh",
        "CumSum",
        "Elu",
        "Erf",
        "Exp",
    ),
    *("Floor", "Gelu", "Hardmax", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Log", "LogSoftmax", "Mish"),
    *(
        "Neg",
        "Not",
        "PRelu",
        "Reciprocal",
        "Relu",
        "Round",
        "ScatterElements",
        "ScatterND",
        "Selu",
        "Shrink",
        "Sigmoid",
    ),
    *("Sign", "Sin", "Sinh", "Softmax", "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu"),
    *("Trilu", "RotaryEmbedding", "RMSNormalization", "InstanceNormalization", "GroupNormalization", "LpNormalization"),
)
def _like_first(call: Call) -> list[Type]:
    return [(call.dtype(), call.shape())]


@shape_rule(
    *("Add", "Sub", "Mul", "Div", "Mod", "Pow", "Max", "Min", "Sum", "Mean", "And", "Or", "Xor"),
    *("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitShift"),
)
def _broadcasting(call: Call) -> list[Type]:
    return [(call.dtype(), broadcast(call, *map(call.shape, range(len(call)))))]


@shape_rule("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsNaN", "IsInf")
def _comparing(call: Call) -> list[Type]:
    return [(BOOL, broadcast(call, *map(call.shape, range(len(call)))))]


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


@shape_rule("Shape")
def _shape(call: Call) -> list[Type]:
    rank = len(call.shape())
    start, end = shape_range(call, rank)
    return [(INT64, (max(end - start, 0),))]


def shape_range(call: Call, rank: int) -> tuple[int, int]:
    """The axes that a Shape node takes: its start and end, clamped."""
    start, end = call.attr("start", 0), call.attr("end", rank)
    start, end = (v + rank if v < 0 else v for v in (start, end))
    return min(max(start, 0), rank), min(max(end, 0), rank)


@shape_rule("Size")
def _size(call: Call) -> list[Type]:
    return [(INT64, ())]


@shape_rule("Constant")
def _constant(call: Call) -> list[Type]:
    value = np.asarray(call.attr("value").values) if call.attr("value") is not None else None
    if value is None:
        name, data = next(iter(call.node.attrs.items()))
        value = np.asarray(data, np.float32 if "float" in name else np.int64 if "int" in name else object)
    return [(value.dtype, value.shape)]


@shape_rule("Reshape")
def _reshape(call: Call) -> list[Type]:
    target = call.value(1)
    dims = call.shape()
    if target is None:
        rank = call.shape(1)[0]
        if not isinstance(rank, int):
            raise call.error("the length of the target shape is not known")
        return [(call.dtype(), tuple(call.fresh(i) for i in range(rank)))]
    out: list[Dim] = []
    inferred = None
    for axis, dim in enumerate(target.tolist()):
        if dim == 0 and not call.attr("allowzero", 0):
            if axis >= len(dims):
                raise call.error(f"target {list(target)} keeps axis {axis}, which the input does not have")
            dim = dims[axis]
        elif dim == -1:
            inferred, dim = axis, 1
        out.append(dim)
    rest_in, rest_out = map(product, _without_common(dims, out))
    if inferred is None:
        _equate_products(call, rest_in, rest_out)
        return [(call.dtype(), tuple(out))]
    quotient = divide(rest_in, rest_out)
    if quotient is None:
        # A batch that another input's batch names: the two are one size.
        for axis, dim in enumerate(out[: len(dims)]):
            if isinstance(dim, sympy.Symbol) and isinstance(dims[axis], sympy.Symbol) and dim != dims[axis]:
                out[axis] = call.equate(dim, dims[axis])
        dims = call.shape()
        rest_in, rest_out = map(product, _without_common(dims, out))
        quotient = divide(rest_in, rest_out)
    if quotient is None and isinstance(rest_in, int) and isinstance(rest_out, int):
        raise call.error(f"cannot be reshaped to {list(target)}")
    out[inferred] = simplify(sympy.sympify(rest_in) / rest_out) if quotient is None else quotient
    return [(call.dtype(), tuple(out))]


def _equate_products(call: Call, a: Dim, b: Dim) -> None:
    if a == b:
        return
    ratio = sympy.cancel(sympy.sympify(a) / sympy.sympify(b)) if b != 0 else sympy.sympify(a)
    call.equate(*map(simplify, sympy.fraction(ratio)))


def _without_common(a: Sequence[Dim], b: Sequence[Dim]) -> tuple[list[Dim], list[Dim]]:
    """Both lists of factors without those they share."""
    left, right = list(a), []
    for dim in b:
        match = next((i for i, other in enumerate(left) if other == dim), None)
        if match is None:
            right.append(dim)
        else:
            left.pop(match)
    return left, right


@shape_rule("Flatten")
def _flatten(call: Call) -> list[Type]:
    dims = call.shape()
    axis = call.attr("axis", 1)
    axis = axis + len(dims) if axis < 0 else axis
    return [(call.dtype(), (product(dims[:axis]), product(dims[axis:])))]


@shape_rule("Transpose")
def _transpose(call: Call) -> list[Type]:
    dims = call.shape()
    perm = call.attr("perm") or range(len(dims))[::-1]
    if sorted(perm) != list(range(len(dims))):
        raise call.error(f"perm {list(perm)} does not permute {len(dims)} axes")
    return [(call.dtype(), tuple(dims[p] for p in perm))]


@shape_rule("Unsqueeze")
def _unsqueeze(call: Call) -> list[Type]:
    axes = _axes(call, 1)
    if axes is None:
        raise call.error("the axes are not known")
    rank = len(call.shape()) + len(axes)
    new = {call.axis(a, rank) for a in axes}
    rest = iter(call.shape())
    return [(call.dtype(), tuple(1 if i in new else next(rest) for i in range(rank)))]


@shape_rule("Squeeze")
def _squeeze(call: Call) -> list[Type]:
    dims = call.shape()
    axes = _axes(call, 1)
    gone = {i for i, d in enumerate(dims) if d == 1} if axes is None else {call.axis(a, len(dims)) for a in axes}
    for axis in gone:
        call.equate(dims[axis], 1)
    return [(call.dtype(), tuple(d for i, d in enumerate(dims) if i not in gone))]


def _axes(call: Call, index: int) -> list[int] | None:
    if not call.has(index):
        return None
    axes = call.ints(index)
    if axes is None:
        raise call.error("its axes are not known")
    return axes


@shape_rule("Concat")
def _concat(call: Call) -> list[Type]:
    shapes = [call.shape(i) for i in range(len(call))]
    axis = call.axis(call.attr("axis"), len(shapes[0]))
    out = list(shapes[0])
    for shape in shapes[1:]:
        if len(shape) != len(out):
            raise call.error("the ranks differ")
        out = [d if i == axis else call.equate(d, shape[i]) for i, d in enumerate(out)]
    out[axis] = simplify(sympy.Add(*(s[axis] for s in shapes)))
    return [(call.dtype(), tuple(out))]


@shape_rule("Split")
def _split(call: Call) -> list[Type]:
    dims = call.shape()
    axis = call.axis(call.attr("axis", 0), len(dims))
    return [(call.dtype(), (*dims[:axis], size, *dims[axis + 1 :])) for size in split_sizes(call, dims[axis])]


def split_sizes(call: Call, size: Dim) -> list[Dim]:
    """The sizes of the parts that a Split node makes of an axis."""
    if call.has(1):
        value = call.value(1)
        if value is None:
            raise call.error("the split sizes are not known")
        return list(value)
    count = call.attr("num_outputs", len(call.node.outputs))
    each = divide(size, count)
    if each is None:
        if not isinstance(size, int):
            raise call.error(f"{size} does not divide into {count} parts")
        each = -(-size // count)
    return [each] * (count - 1) + [simplify(size - each * (count - 1))]


@shape_rule("Slice")
def _slice(call: Call) -> list[Type]:
    dims = list(call.shape())
    parts = slice_parts(call)
    if parts is None:
        count = call.shape(1)[0]
        axes = _axes(call, 3) if call.has(3) else list(range(count if isinstance(count, int) else len(dims)))
        for axis in axes or range(len(dims)):
            dims[call.axis(axis, len(dims))] = call.fresh(axis)
        return [(call.dtype(), tuple(dims))]
    for axis, start, end, step in parts:
        dims[axis] = slice_length(start, end, step)
    return [(call.dtype(), tuple(dims))]


def slice_length(start: Dim, end: Dim, step: int) -> Dim:
    """How many elements lie from ``start`` to before ``end``, taking every ``step``-th."""
    span = simplify(sympy.sympify(end - start if step > 0 else start - end))
    if abs(step) == 1:
        return max(span, 0) if isinstance(span, int) else span
    if isinstance(span, int):
        return max(-(-span // abs(step)), 0)
    return simplify(sympy.floor((span + abs(step) - 1) / abs(step)))


def slice_parts(call: Call) -> list[tuple[int, Dim, Dim, int]] | None:
    """(axis, start, end, step) of a Slice node with bounds clamped and counted from 0; None if they are not known.

    A symbolic bound is assumed to lie within the axis, which is recorded. For a negative step, end may be −1.
    """
    dims = call.shape()
    starts, ends = call.value(1), call.value(2)
    axes = call.ints(3) if call.has(3) else list(range(len(dims)))
    steps = call.ints(4) if call.has(4) else [1] * len(axes or ())
    if starts is None or ends is None or axes is None or steps is None:
        return None
    parts = []
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=False):
        axis = call.axis(axis, len(dims))
        size = dims[axis]
        low, high = (0, size) if step > 0 else (-1, size - 1)
        parts.append((axis, _bound(call, start, size, low, high), _bound(call, end, size, low, high), step))
    return parts


def _bound(call: Call, bound: Any, size: Dim, low: Dim, high: Dim) -> Dim:
    if isinstance(bound, int):
        if bound >= UNBOUNDED:
            return high
        if bound <= -UNBOUNDED:
            return low
        if bound < 0:
            moved = simplify(size + bound)
            return max(moved, low) if isinstance(moved, int) and isinstance(low, int) else moved
        if isinstance(high, int):
            return min(bound, high)
        if bound:
            call.at_most(bound, high)
        return bound
    if bound.is_nonpositive:
        bound = simplify(size + bound)
    call.at_most(bound, high)
    return simplify(bound)


@shape_rule("Gather")
def _gather(call: Call) -> list[Type]:
    dims = call.shape()
    axis = call.axis(call.attr("axis", 0), len(dims))
    return [(call.dtype(), (*dims[:axis], *call.shape(1), *dims[axis + 1 :]))]


@shape_rule("GatherElements")
def _gather_elements(call: Call) -> list[Type]:
    return [(call.dtype(), call.shape(1))]


@shape_rule("GatherND")
def _gather_nd(call: Call) -> list[Type]:
    data, indices = call.shape(0), call.shape(1)
    batch = call.attr("batch_dims", 0)
    if not isinstance(indices[-1], int):
        raise call.error("the length of an index is not known")
    return [(call.dtype(), (*indices[:-1], *data[batch + indices[-1] :]))]


@shape_rule("Expand")
def _expand(call: Call) -> list[Type]:
    target = call.value(1)
    if target is None:
        rank = call.shape(1)[0]
        if not isinstance(rank, int):
            raise call.error("the length of the target shape is not known")
        return [(call.dtype(), tuple(call.fresh(i) for i in range(max(rank, len(call.shape())))))]
    return [(call.dtype(), broadcast(call, call.shape(), tuple(target)))]


@shape_rule("Tile")
def _tile(call: Call) -> list[Type]:
    repeats = call.value(1)
    if repeats is None:
        return [(call.dtype(), tuple(call.fresh(i) for i in range(len(call.shape()))))]
    return [(call.dtype(), tuple(simplify(d * r) for d, r in zip(call.shape(), repeats, strict=True)))]


@shape_rule("Range")
def _range(call: Call) -> list[Type]:
    start, limit, delta = (call.value(i) for i in range(3))
    if start is None or limit is None or delta is None:
        return [(call.dtype(), (call.fresh(0),))]
    first, last, step = start.item(), limit.item(), delta.item()
    if all(isinstance(v, int | float) for v in (first, last, step)):
        return [(call.dtype(), (max(int(np.ceil((last - first) / step)), 0),))]
    if step in (1, -1):
        return [(call.dtype(), (simplify((last - first) * step),))]
    return [(call.dtype(), (simplify(sympy.ceiling((last - first) / step)),))]


@shape_rule("ConstantOfShape")
def _constant_of_shape(call: Call) -> list[Type]:
    fill = call.attr("value")
    dtype = np.dtype(np.float32) if fill is None else fill.dtype
    target = call.value(0)
    if target is None:
        rank = call.shape(0)[0]
        if not isinstance(rank, int):
            raise call.error("the length of the target shape is not known")
        return [(dtype, tuple(call.fresh(i) for i in range(rank)))]
    return [(dtype, tuple(target.flat))]


@shape_rule("EyeLike")
def _eye_like(call: Call) -> list[Type]:
    return [(dtype_of(call.attr("dtype")) if call.attr("dtype") else call.dtype(), call.shape())]


@shape_rule(
    *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum"),
    *("ReduceLogSumExp", "ReduceSumSquare"),
)
def _reduce(call: Call) -> list[Type]:
    dims = call.shape()
    axes = call.attr("axes") or _axes(call, 1)
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
    k = call.value(1)
    axis = call.axis(call.attr("axis", -1), len(dims))
    dims[axis] = call.fresh(axis) if k is None else k.item()
    return [(call.dtype(), tuple(dims)), (INT64, tuple(dims))]


@shape_rule("OneHot")
def _one_hot(call: Call) -> list[Type]:
    dims = list(call.shape())
    depth = call.value(1)
    axis = call.axis(call.attr("axis", -1), len(dims) + 1)
    dims.insert(axis, call.fresh(axis) if depth is None else depth.item())
    return [(call.dtype(2), tuple(dims))]


@shape_rule("NonZero")
def _non_zero(call: Call) -> list[Type]:
    return [(INT64, (len(call.shape()), call.fresh(1)))]


@shape_rule("Pad")
def _pad(call: Call) -> list[Type]:
    dims = list(call.shape())
    pads = call.value(1)
    axes = call.ints(3) if call.has(3) else list(range(len(dims)))
    if axes is None:
        raise call.error("the axes are not known")
    for i, axis in enumerate(axes):
        axis = call.axis(axis, len(dims))
        dims[axis] = call.fresh(axis) if pads is None else simplify(dims[axis] + pads[i] + pads[i + len(axes)])
    return [(call.dtype(), tuple(dims))]


@shape_rule("Resize", "Upsample")
def _resize(call: Call) -> list[Type]:
    dims = list(call.shape())
    sizes, scales = call.value(3), call.value(2)
    axes = [call.axis(a, len(dims)) for a in call.attr("axes") or range(len(dims))]
    if sizes is not None and sizes.size:
        if call.attr("keep_aspect_ratio_policy", "stretch") != "stretch":
            raise call.error("keep_aspect_ratio_policy is only known as 'stretch'")
        for axis, size in zip(axes, sizes.tolist(), strict=True):
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
    equation = call.attr("equation").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if "." in equation:
        raise call.error(f"an ellipsis in the equation '{equation}' is not understood; write its indices")
    sizes: dict[str, Dim] = {}
    for i, term in enumerate(terms):
        for letter, dim in zip(term, call.shape(i), strict=True):
            sizes[letter] = call.equate(sizes[letter], dim) if letter in sizes else dim
    if not arrow:
        right = "".join(sorted(c for c in sizes if left.count(c) == 1))
    return [(call.dtype(), tuple(sizes[c] for c in right))]


def dtype_of(onnx_type: int) -> Any:
    """NumPy's dtype for an ONNX element type."""
    return onnx.helper.tensor_dtype_to_np_dtype(int(onnx_type))
