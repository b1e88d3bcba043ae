"""Composite operators written in basic ones: one function for each, equal in value to the operator's definition.

Sources: the ONNX operator specifications, opsets 18 to 24. Attention and rotary embedding are in
``decompose_attention``, Microsoft's operators in ``decompose_contrib``.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_graphsurgeon as gs

from .. import ir
from .builder import Builder, decomposition
from .shape_rules import dtype_of
from .sizes import reshape_target


@decomposition("LayerNormalization")
def _layer_norm(b: Builder) -> list[ir.Tensor]:
    x = b.node.inputs[0]
    y, mean, deviation = standardize(b, x, norm_axes(b), b.attr("epsilon", 1e-5), b.attr("stash_type", 1))
    return [scale_shift(b, y, b.input(1), b.input(2)), mean, deviation]


def norm_axes(b: Builder) -> list[int]:
    """The axes from ``axis`` to the last."""
    rank = b.rank()
    return list(range(b.attr("axis", -1) % rank, rank))


def standardize(
    b: Builder, x: ir.Tensor, axes: list[int], epsilon: float, stash: int = 1
) -> tuple[ir.Tensor, ir.Tensor, ir.Tensor]:
    """``(x − mean) / sqrt(var + ε)`` over ``axes`` in x's dtype, the mean, and 1 / deviation, both of the stash type."""
    outer, b.dtype = b.dtype, dtype_of(stash)
    x = b.cast(x, b.dtype, outer)
    mean = b("ReduceMean", x, axes, keepdims=1)
    centred = b("Sub", x, mean)
    variance = b("ReduceMean", b("Mul", centred, centred), axes, keepdims=1)
    deviation = b("Sqrt", b("Add", variance, epsilon))
    y = b.cast(b("Div", centred, deviation), outer, b.dtype)
    reciprocal = b("Reciprocal", deviation) if len(b.node.outputs) > 2 else deviation
    b.dtype = outer
    return y, mean, reciprocal


def scale_shift(b: Builder, y: ir.Tensor, scale: ir.Tensor | None, bias: ir.Tensor | None) -> ir.Tensor:
    """``y · scale + bias``, either left out if None."""
    y = y if scale is None else b("Mul", y, scale)
    return y if bias is None else b("Add", y, bias)


@decomposition("RMSNormalization")
def _rms_norm(b: Builder) -> ir.Tensor:
    y = divide_by_rms(b, b.node.inputs[0], norm_axes(b), b.attr("epsilon", 1e-5), b.attr("stash_type", 1))
    return scale_shift(b, y, b.input(1), None)


def divide_by_rms(b: Builder, x: ir.Tensor, axes: list[int], epsilon: float, stash: int = 1) -> ir.Tensor:
    """``x / sqrt(mean(x²) + ε)`` over ``axes``, in x's dtype."""
    outer, b.dtype = b.dtype, dtype_of(stash)
    x = b.cast(x, b.dtype, outer)
    root = b("Sqrt", b("Add", b("ReduceMean", b("Mul", x, x), axes, keepdims=1), epsilon))
    y = b.cast(b("Div", x, root), outer, b.dtype)
    b.dtype = outer
    return y


@decomposition("BatchNormalization")
def _batch_norm(b: Builder) -> ir.Tensor | None:
    if b.attr("training_mode", 0):
        return None
    x, scale, bias, mean, variance = b.node.inputs
    gain = b("Div", scale, b("Sqrt", b("Add", variance, b.attr("epsilon", 1e-5))))
    shift = b("Sub", bias, b("Mul", mean, gain))
    target = [-1] + [1] * (b.rank() - 2)
    return b("Add", b("Mul", x, b("Reshape", gain, target)), b("Reshape", shift, target))


@decomposition("InstanceNormalization")
def _instance_norm(b: Builder) -> ir.Tensor:
    x, scale, bias = b.node.inputs
    y, _, _ = standardize(b, x, list(range(2, b.rank())), b.attr("epsilon", 1e-5))
    target = [-1] + [1] * (b.rank() - 2)
    return scale_shift(b, y, b("Reshape", scale, target), b("Reshape", bias, target))


@decomposition("GroupNormalization")
def _group_norm(b: Builder) -> ir.Tensor | None:
    x, scale, bias = b.node.inputs
    dims, groups = ir.shape(x), b.attr("num_groups", 1)
    channels = dims[1]
    if not isinstance(channels, int) or any(not isinstance(d, int) for d in dims[2:]):
        return None
    grouped = b("Reshape", x, [0, groups, channels // groups, *dims[2:]])
    y, _, _ = standardize(b, grouped, list(range(2, b.rank() + 1)), b.attr("epsilon", 1e-5), b.attr("stash_type", 1))
    target = [groups, channels // groups] + [1] * (b.rank() - 2)
    y = scale_shift(b, y, b("Reshape", scale, target), b("Reshape", bias, target))
    return b("Reshape", y, [0, channels, *dims[2:]])


@decomposition("MeanVarianceNormalization")
def _mean_variance_norm(b: Builder) -> ir.Tensor:
    x, epsilon = b.node.inputs[0], 1e-9
    axes = sorted(a % b.rank() for a in b.attr("axes", [0, 2, 3]))
    centred = b("Sub", x, b("ReduceMean", x, axes, keepdims=1))
    variance = b("ReduceMean", b("Mul", centred, centred), axes, keepdims=1)
    return b("Div", centred, b("Add", b("Sqrt", variance), epsilon))


@decomposition("LpNormalization")
def _lp_norm(b: Builder) -> ir.Tensor:
    """A row of zeros stays one."""
    x, axes = b.node.inputs[0], [b.attr("axis", -1) % b.rank()]
    if b.attr("p", 2) == 1:
        norm = b("ReduceSum", b("Abs", x), axes, keepdims=1)
    else:
        norm = b("Sqrt", b("ReduceSum", b("Mul", x, x), axes, keepdims=1))
    return b("Div", x, b("Where", b("Equal", norm, 0.0), 1.0, norm))


@decomposition("Gelu")
def _gelu(b: Builder) -> ir.Tensor:
    return gelu(b, b.node.inputs[0], b.attr("approximate", "none") == "tanh")


def gelu(b: Builder, x: ir.Tensor, tanh: bool) -> ir.Tensor:
    """GELU by erf, or its approximation by tanh."""
    if tanh:
        cubic = b("Mul", b("Mul", b("Mul", x, x), x), 0.044715)
        gate = b("Tanh", b("Mul", b("Add", x, cubic), math.sqrt(2 / math.pi)))
    else:
        gate = b("Erf", b("Mul", x, math.sqrt(0.5)))
    return b("Mul", b("Mul", x, 0.5), b("Add", gate, 1.0))


@decomposition("Swish")
def _swish(b: Builder) -> ir.Tensor:
    return swish(b, b.node.inputs[0], b.attr("alpha", 1.0))


def swish(b: Builder, x: ir.Tensor, alpha: float) -> ir.Tensor:
    """``x · sigmoid(α x)``."""
    return b("Mul", x, b("Sigmoid", x if alpha == 1 else b("Mul", x, alpha)))


@decomposition("HardSigmoid")
def _hard_sigmoid(b: Builder) -> ir.Tensor:
    return hard_sigmoid(b, b.attr("alpha", 0.2), b.attr("beta", 0.5))


def hard_sigmoid(b: Builder, alpha: float, beta: float) -> ir.Tensor:
    """``max(0, min(1, α x + β))``."""
    return b("Max", b("Min", b("Add", b("Mul", b.node.inputs[0], alpha), beta), 1.0), 0.0)


@decomposition("HardSwish")
def _hard_swish(b: Builder) -> ir.Tensor:
    return b("Mul", b.node.inputs[0], hard_sigmoid(b, 1 / 6, 0.5))


@decomposition("Elu")
def _elu(b: Builder) -> ir.Tensor:
    return elu(b, b.attr("alpha", 1.0))


@decomposition("Selu")
def _selu(b: Builder) -> ir.Tensor:
    alpha, gamma = b.attr("alpha", 1.67326319217681884765625), b.attr("gamma", 1.05070102214813232421875)
    return b("Mul", elu(b, alpha), gamma)


def elu(b: Builder, alpha: float) -> ir.Tensor:
    """``x`` where positive, else ``α (eˣ − 1)``."""
    x = b.node.inputs[0]
    negative = b("Mul", b("Sub", b("Exp", b("Min", x, 0.0)), 1.0), alpha)
    return b("Where", b("Less", x, 0.0), negative, x)


@decomposition("Celu")
def _celu(b: Builder) -> ir.Tensor:
    x, alpha = b.node.inputs[0], b.attr("alpha", 1.0)
    negative = b("Mul", b("Sub", b("Exp", b("Div", x, alpha)), 1.0), alpha)
    return b("Add", b("Max", x, 0.0), b("Min", negative, 0.0))


@decomposition("LeakyRelu")
def _leaky_relu(b: Builder) -> ir.Tensor:
    x = b.node.inputs[0]
    return b("Where", b("Less", x, 0.0), b("Mul", x, b.attr("alpha", 0.01)), x)


@decomposition("PRelu")
def _prelu(b: Builder) -> ir.Tensor:
    x, slope = b.node.inputs
    return b("Where", b("Less", x, 0.0), b("Mul", x, slope), x)


@decomposition("ThresholdedRelu")
def _thresholded_relu(b: Builder) -> ir.Tensor:
    x = b.node.inputs[0]
    return b("Where", b("Greater", x, b.attr("alpha", 1.0)), x, 0.0)


@decomposition("Softplus")
def _softplus(b: Builder) -> ir.Tensor:
    return softplus(b, b.node.inputs[0])


def softplus(b: Builder, x: ir.Tensor) -> ir.Tensor:
    """``log(1 + eˣ)`` without overflow."""
    return b("Add", b("Max", x, 0.0), b("Log", b("Add", b("Exp", b("Neg", b("Abs", x))), 1.0)))


@decomposition("Softsign")
def _softsign(b: Builder) -> ir.Tensor:
    x = b.node.inputs[0]
    return b("Div", x, b("Add", b("Abs", x), 1.0))


@decomposition("Mish")
def _mish(b: Builder) -> ir.Tensor:
    x = b.node.inputs[0]
    return b("Mul", x, b("Tanh", softplus(b, x)))


@decomposition("Clip")
def _clip(b: Builder) -> ir.Tensor:
    x = b.node.inputs[0]
    low, high = b.input(1), b.input(2)
    x = x if low is None else b("Max", x, low)
    return x if high is None else b("Min", x, high)


@decomposition("Gemm")
def _gemm(b: Builder) -> ir.Tensor:
    left, right, bias = b.node.inputs[0], b.node.inputs[1], b.input(2)
    left = b("Transpose", left, perm=[1, 0]) if b.attr("transA", 0) else left
    right = b("Transpose", right, perm=[1, 0]) if b.attr("transB", 0) else right
    alpha, beta = b.attr("alpha", 1.0), b.attr("beta", 1.0)
    if alpha != 1 and isinstance(b.node.inputs[1], gs.Constant):
        right, alpha = b("Mul", right, alpha), 1.0
    y = b("MatMul", left, right)
    y = y if alpha == 1 else b("Mul", y, alpha)
    if bias is None or beta == 0:
        return y
    return b("Add", y, bias if beta == 1 else b("Mul", bias, beta))


@decomposition("Split")
def _split(b: Builder) -> list[ir.Tensor] | None:
    x = b.node.inputs[0]
    axis = b.attr("axis", 0) % b.rank()
    sizes = [ir.shape(t)[axis] for t in b.node.outputs]
    if not all(isinstance(s, int) for s in sizes):
        return None
    ends = np.cumsum(sizes).tolist()
    return [b("Slice", x, [end - size], [end], [axis]) for end, size in zip(ends, sizes, strict=True)]


@decomposition("Sum", "Max", "Min", "Mean")
def _variadic(b: Builder) -> ir.Tensor | None:
    first, *rest = b.node.inputs
    binary = {"Sum": "Add", "Mean": "Add"}.get(b.node.op, b.node.op)
    if binary == b.node.op and len(rest) == 1:
        return None
    result: ir.Tensor = first
    for other in rest:
        result = b(binary, result, other)
    return b("Div", result, float(1 + len(rest))) if b.node.op == "Mean" else result


_REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")


@decomposition(*_REDUCTIONS)
def _reduce(b: Builder) -> ir.Tensor | None:
    axes = reduced_axes(b)
    given = ir.constant_value(b.node.inputs[1]) if b.input(1) is not None else None
    if axes is None or (given is not None and given.tolist() == axes and "axes" not in b.node.attrs):
        return None
    return b(b.node.op, b.node.inputs[0], axes, keepdims=b.attr("keepdims", 1)) if axes else b.node.inputs[0]


def reduced_axes(b: Builder) -> list[int] | None:
    """The axes that a ReduceX node takes away, sorted and non-negative; None if data decides."""
    axes = b.attr("axes", None)
    if axes is None and b.input(1) is not None:
        value = ir.constant_value(b.node.inputs[1])
        if value is None:
            return None
        axes = value.reshape(-1).tolist()
    if not axes:
        return [] if b.attr("noop_with_empty_axes", 0) else list(range(b.rank()))
    return sorted(a % b.rank() for a in axes)


@decomposition("ReduceMax", "ReduceMin")
def _reduce_bool(b: Builder) -> ir.Tensor | None:
    """Whether any, or all, are true: by counting those that are, or are not."""
    if np.dtype(b.dtype) != np.bool_:
        return None
    counted = b.node.inputs[0] if b.node.op == "ReduceMax" else b("Not", b.node.inputs[0])
    count = b("ReduceSum", b.cast(counted, np.int32, np.bool_), *b.node.inputs[1:], **b.node.attrs)
    with b.numbers(np.int32):
        return b("Greater" if b.node.op == "ReduceMax" else "Equal", count, 0)


@decomposition("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")
def _composite_reduce(b: Builder) -> ir.Tensor | None:
    x, axes, keep = b.node.inputs[0], reduced_axes(b), b.attr("keepdims", 1)
    if not axes:
        return None
    if b.node.op == "ReduceLogSumExp":
        top = b("ReduceMax", x, axes, keepdims=1)
        total = b("ReduceSum", b("Exp", b("Sub", x, top)), axes, keepdims=1)
        y = b("Add", b("Log", total), top)
        return y if keep else b("Squeeze", y, axes)
    inner = {"ReduceL1": lambda: b("Abs", x), "ReduceLogSum": lambda: x}.get(b.node.op, lambda: b("Mul", x, x))()
    total = b("ReduceSum", inner, axes, keepdims=keep)
    outer = {"ReduceL2": "Sqrt", "ReduceLogSum": "Log"}.get(b.node.op)
    return total if outer is None else b(outer, total)


@decomposition("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(b: Builder) -> ir.Tensor:
    op = "ReduceMean" if b.node.op == "GlobalAveragePool" else "ReduceMax"
    return b(op, b.node.inputs[0], list(range(2, b.rank())), keepdims=1)


@decomposition("Softmax")
def _softmax(b: Builder) -> ir.Tensor | None:
    axis = b.attr("axis", -1)
    positive = axis % b.rank()
    return None if axis == positive else b("Softmax", b.node.inputs[0], axis=positive)


@decomposition("LogSoftmax")
def _log_softmax(b: Builder) -> ir.Tensor:
    x, axes = b.node.inputs[0], [b.attr("axis", -1) % b.rank()]
    shifted = b("Sub", x, b("ReduceMax", x, axes, keepdims=1))
    return b("Sub", shifted, b("Log", b("ReduceSum", b("Exp", shifted), axes, keepdims=1)))


@decomposition("Pow")
def _pow(b: Builder) -> ir.Tensor | None:
    x, exponent = b.node.inputs[0], ir.scalar_value(b.node.inputs[1])
    if exponent is None or len(ir.shape(b.node.inputs[1])) > b.rank():
        return None
    powers = {
        1.0: lambda: x,
        2.0: lambda: b("Mul", x, x),
        3.0: lambda: b("Mul", b("Mul", x, x), x),
        0.5: lambda: b("Sqrt", x),
        -1.0: lambda: b("Reciprocal", x),
        -0.5: lambda: b("Reciprocal", b("Sqrt", x)),
    }
    return powers[exponent]() if exponent in powers and np.dtype(b.dtype).kind == "f" else None


@decomposition("CastLike")
def _cast_like(b: Builder) -> ir.Tensor:
    return b.cast(b.node.inputs[0], b.node.inputs[1].dtype)


@decomposition("Cast")
def _cast(b: Builder) -> ir.Tensor | None:
    return b.node.inputs[0] if np.dtype(dtype_of(b.attr("to", 1))) == np.dtype(b.dtype) else None


@decomposition("Identity")
def _identity(b: Builder) -> ir.Tensor | None:
    outputs, x = b.editor.graph.outputs, b.node.inputs[0]
    passed = any(b.node.outputs[0] is o for o in outputs)
    # Only an output that is an input, or that is returned twice, needs a copy.
    return None if passed and (not x.inputs or any(x is o for o in outputs)) else x


@decomposition("Dropout")
def _dropout(b: Builder) -> list[ir.Tensor] | None:
    """Of inference, or one that drops nothing; the mask is all true."""
    training, ratio = b.input(2), b.input(1)
    drops = training is not None and ir.scalar_value(training) != 0
    if drops and (ratio is None or ir.scalar_value(ratio) != 0):
        return None
    x = b.node.inputs[0]
    if len(b.node.outputs) == 1:
        return [x]
    kept = b.editor.constant(f"{b.node.outputs[1].name}.true", np.ones([1] * b.rank(), np.bool_))
    return [x, b("Expand", kept, b("Shape", x))]


@decomposition("ConstantOfShape")
def _constant_of_shape(b: Builder) -> ir.Tensor | None:
    fill = b.attr("value", None)
    value = np.zeros(1, np.float32) if fill is None else np.asarray(fill.values)
    rank = len(ir.shape(b.node.outputs[0]))
    return b("Expand", b.editor.constant(f"{b.node.outputs[0].name}.fill", value.reshape([1] * rank)), b.node.inputs[0])


@decomposition("Tile")
def _tile(b: Builder) -> ir.Tensor | None:
    """An Expand, of a new axis before each repeated one that is longer than 1."""
    x, given = b.node.inputs[0], ir.constant_value(b.node.inputs[1])
    if given is None:
        return None
    dims, repeats = ir.shape(x), given.tolist()
    long = [r != 1 and d != 1 for d, r in zip(dims, repeats, strict=True)]
    if not any(long):
        return b("Expand", x, repeats)
    split = [d for dim, new in zip(dims, long, strict=True) for d in ((1, dim) if new else (dim,))]
    times = [r for r, new in zip(repeats, long, strict=True) for r in ((r, 1) if new else (r,))]
    spread = [d if r == 1 else d * r for d, r in zip(split, times, strict=True)]
    before = reshape_target(dims, split)
    after = reshape_target(spread, [d * r for d, r in zip(dims, repeats, strict=True)])
    if before is None or after is None:
        return None
    return b("Reshape", b("Expand", b("Reshape", x, before), times), after)


@decomposition("Trilu")
def _trilu(b: Builder) -> ir.Tensor | None:
    x = b.node.inputs[0]
    k = ir.scalar_value(b.node.inputs[1]) if b.input(1) is not None else 0.0
    if k is None:
        return None
    dtype, b.dtype = b.dtype, np.dtype(np.int64)
    rows = b("Unsqueeze", counting(b, x, -2), [1])
    columns = b("Unsqueeze", counting(b, x, -1), [0])
    offset = b("Sub", columns, rows)
    keep = b("GreaterOrEqual" if b.attr("upper", 1) else "LessOrEqual", offset, int(k))
    b.dtype = dtype
    return b("And", keep, x) if np.dtype(dtype).kind == "b" else b("Where", keep, x, 0)


def counting(b: Builder, x: ir.Tensor, axis: int) -> ir.Tensor:
    """int64 0, 1, … along an axis of ``x``."""
    end = axis + 1 if axis != -1 else None
    size = b("Shape", x, start=axis) if end is None else b("Shape", x, start=axis, end=end)
    return b("Range", 0, b("Squeeze", size, [0]), 1)
