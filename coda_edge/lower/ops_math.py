"""Elementwise operators: one row each, from expressions of the input elements to that of the output element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce

from tvm import tirx

from ..epilogue.ops import OPERATORS
from . import intrinsics
from .emit import HALF, Expr, dtype_of
from .registry import ELEMENTWISE, POINTWISE, Application, View, broadcast, constant, elementwise, pointwise

_BITS = {
    "float32": ("uint32", 0x7FFFFFFF, 0x7F800000),
    "float64": ("uint64", 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}


def is_float(expr: Expr) -> bool:
    """Whether ``expr`` is a floating-point number."""
    return dtype_of(expr).startswith(("float", "bfloat"))


def is_nan(x: Expr) -> Expr:
    """Whether ``x`` is NaN, by its bits: comparisons of floats are reordered by the simplifier as if there were none."""
    if not is_float(x):
        return tirx.const(False, "bool")
    if dtype_of(x) not in _BITS:
        return is_nan(tirx.Cast("float32", x))
    bits, mask, infinity = _BITS[dtype_of(x)]
    return (tirx.reinterpret(bits, x) & tirx.const(mask, bits)) > tirx.const(infinity, bits)


def is_inf(x: Expr) -> Expr:
    """Whether ``x`` is an infinity."""
    bits, mask, infinity = _BITS[dtype_of(x)]
    return (tirx.reinterpret(bits, x) & tirx.const(mask, bits)).equal(tirx.const(infinity, bits))


def maximum(a: Expr, b: Expr) -> Expr:
    """The larger, NaN if one is (as numpy.maximum)."""
    larger = tirx.Select(a > b, a, b)
    return tirx.Select(is_nan(a), a, larger) if is_float(a) else larger


def minimum(a: Expr, b: Expr) -> Expr:
    """The smaller, NaN if one is (as numpy.minimum)."""
    smaller = tirx.Select(a < b, a, b)
    return tirx.Select(is_nan(a), a, smaller) if is_float(a) else smaller


def divide(a: Expr, b: Expr) -> Expr:
    """Quotient; of integers truncated, and 0 where the divisor is 0 (ONNX leaves that open, processors trap)."""
    if is_float(a):
        return tirx.div(a, b)
    kind = dtype_of(a)
    factor = tirx.Select(b.equal(constant(0, kind)), constant(0, kind), constant(1, kind))
    if kind.startswith("int"):
        factor = tirx.Select(b.equal(constant(-1, kind)), constant(-1, kind), factor)
    return tirx.truncdiv(a, _divisor(b)) * factor


def remainder(a: Expr, b: Expr) -> Expr:
    """The remainder with the sign of the divisor, 0 for a zero divisor (Mod with fmod=0)."""
    rest = tirx.truncmod(a, _divisor(b))
    zero = constant(0, dtype_of(a))
    return tirx.Select(tirx.all(tirx.Not(rest.equal(zero)), (rest < zero) ^ (b < zero)), rest + b, rest)


def float_remainder(a: Expr, b: Expr) -> Expr:
    """The remainder with the sign of the dividend (Mod with fmod=1), of floats by way of float64."""
    if not is_float(a):
        return tirx.truncmod(a, _divisor(b))
    x, y = tirx.Cast("float64", a), tirx.Cast("float64", b)
    return tirx.Cast(dtype_of(a), x - y * tirx.trunc(x / y))


def _divisor(b: Expr) -> Expr:
    """``b``, or 1 where it is 0 or -1 and the processor might trap.

    It must not stand under a condition on ``b``: the simplifier would drop the guard there, yet both sides are computed.
    """
    kind = dtype_of(b)
    unsafe = b.equal(constant(0, kind))
    if kind.startswith("int"):
        unsafe = tirx.Or(unsafe, b.equal(constant(-1, kind)))
    return tirx.Select(unsafe, constant(1, kind), b)


def power(a: Expr, b: Expr) -> Expr:
    """``a`` to the power ``b``, in the dtype of ``a``; small constant exponents are multiplications or a root."""
    exponent = b.value if isinstance(b, (tirx.FloatImm, tirx.IntImm)) else None
    if exponent is not None and float(exponent).is_integer() and 0 <= float(exponent) <= 16:
        return _by_squaring(a, int(exponent))
    if exponent is not None and float(exponent) == 0.5:
        return tirx.sqrt(a)
    if exponent is not None and float(exponent) == -1:
        return tirx.div(constant(1, dtype_of(a)), a)
    kind = dtype_of(a) if is_float(a) else "float32"
    return tirx.Cast(dtype_of(a), _wide(intrinsics.power)(tirx.Cast(kind, a), tirx.Cast(kind, b)))


def _by_squaring(a: Expr, exponent: int) -> Expr:
    result = constant(1, dtype_of(a))
    square = a
    first = True
    while exponent:
        if exponent & 1:
            result = square if first else result * square
            first = False
        exponent >>= 1
        if exponent:
            square = square * square
    return result


def convert(x: Expr, dtype: str) -> Expr:
    """``x`` as ``dtype``: floats to integers towards zero, anything to bool as "is not zero", to half as a rounded float32."""
    source = dtype_of(x)
    if dtype in HALF:
        stored = HALF[dtype].narrow(x if source == "float32" else convert(x, "float32"))
        return HALF[dtype].widen(stored)
    if source == dtype:
        return x
    if dtype == "bool":
        return tirx.Not(x.equal(constant(0, source)))
    if source == "bool":
        return tirx.Select(x, constant(1, dtype), constant(0, dtype))
    return tirx.Cast(dtype, x)


def sign(x: Expr) -> Expr:
    """-1, 0 or 1; NaN stays NaN."""
    kind = dtype_of(x)
    zero, one = constant(0, kind), constant(1, kind)
    lower = zero if kind.startswith("uint") else tirx.Select(x < zero, constant(-1, kind), zero)
    result = tirx.Select(x > zero, one, lower)
    return tirx.Select(is_nan(x), x, result) if is_float(x) else result


def round_even(x: Expr) -> Expr:
    """``x`` rounded to the nearest integer, halves to even."""
    return tirx.nearbyint(x)


def _wide(function: Callable[..., Expr]) -> Callable[..., Expr]:
    """``function`` of float32, for other floats too: computed in float32."""

    def apply(*args: Expr) -> Expr:
        kind = dtype_of(args[0])
        if kind == "float32":
            return function(*args)
        return tirx.Cast(kind, function(*(tirx.Cast("float32", a) for a in args)))

    return apply


def _zero_like(x: Expr) -> Expr:
    return constant(0, dtype_of(x))


def _variadic(apply: Callable[[Expr, Expr], Expr]) -> Callable[..., Expr]:
    return lambda *args: reduce(apply, args)


_ELEMENTWISE: dict[str, Callable[..., Expr]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": divide,
    "Pow": power,
    "Min": _variadic(minimum),
    "Max": _variadic(maximum),
    "Sum": _variadic(lambda a, b: a + b),
    "Neg": lambda x: _zero_like(x) - x if not is_float(x) else x * constant(-1, dtype_of(x)),
    "Abs": lambda x: x if dtype_of(x).startswith("uint") else tirx.abs(x),
    "Sqrt": tirx.sqrt,
    "Reciprocal": lambda x: tirx.div(constant(1, dtype_of(x)), x),
    "Relu": lambda x: maximum(x, _zero_like(x)),
    "Floor": tirx.floor,
    "Ceil": tirx.ceil,
    "Round": round_even,
    "Sign": sign,
    "IsNaN": is_nan,
    "Equal": lambda a, b: tirx.Not(tirx.Select(a, tirx.Not(b), b)) if dtype_of(a) == "bool" else a.equal(b),
    "Less": lambda a, b: a < b,
    "LessOrEqual": lambda a, b: a <= b,
    "Greater": lambda a, b: a > b,
    "GreaterOrEqual": lambda a, b: a >= b,
    "And": lambda a, b: tirx.And(a, b),
    "Or": lambda a, b: tirx.Or(a, b),
    "Xor": lambda a, b: tirx.Select(a, tirx.Not(b), b),
    "Not": lambda a: tirx.Not(a),
    "BitwiseAnd": tirx.bitwise_and,
    "BitwiseOr": tirx.bitwise_or,
    "BitwiseXor": tirx.bitwise_xor,
    "BitwiseNot": tirx.bitwise_not,
    "Where": tirx.Select,
    "Identity": lambda x: x,
}
_FUNCTIONS = {
    op.onnx: _wide(partial(op.kernel, intrinsics))
    for op in OPERATORS.values()
    if op.kernel is not None and isinstance(op.onnx, str) and op.onnx not in _ELEMENTWISE
}
"""Functions of floats are what epilogues have."""
POINTWISE.update({name: elementwise(apply) for name, apply in {**_ELEMENTWISE, **_FUNCTIONS}.items()})
ELEMENTWISE.update(_ELEMENTWISE, _FUNCTIONS, ("Cast", "Mod", "IsInf", "LeakyRelu"))


@pointwise("Cast")
def cast(op: Application) -> View:
    """Cast and CastLike (by the annotated output dtype): see :func:`convert`."""
    return elementwise(lambda x: convert(x, op.dtype))(op)


@pointwise("Mod")
def mod(op: Application) -> View:
    """Mod: sign of the divisor, or with fmod=1 of the dividend."""
    return elementwise(float_remainder if op.attribute("fmod", 0) else remainder)(op)


@pointwise("IsInf")
def isinf(op: Application) -> View:
    """IsInf with its two detect attributes."""
    positive, negative = op.attribute("detect_positive", 1), op.attribute("detect_negative", 1)

    def apply(x: Expr) -> Expr:
        wanted = tirx.any(
            tirx.all(x > _zero_like(x), tirx.const(bool(positive), "bool")),
            tirx.all(x < _zero_like(x), tirx.const(bool(negative), "bool")),
        )
        return tirx.all(is_inf(x), wanted)

    return elementwise(apply)(op)


@pointwise("LeakyRelu")
def leaky_relu(op: Application) -> View:
    """LeakyRelu: ``alpha·x`` below zero."""
    alpha = float(op.attribute("alpha", 0.01))
    return elementwise(lambda x: tirx.Select(x < _zero_like(x), x * constant(alpha, dtype_of(x)), x))(op)


@pointwise("Clip")
def clip(op: Application) -> View:
    """Clip: the bounds are optional scalars; NaN stays NaN."""
    low, high = op.optional(1), op.optional(2)

    def at(indices: Sequence[Expr]) -> Expr:
        x = op.view(0).at(indices)
        x = maximum(x, low.at(broadcast(indices, low.shape))) if low is not None else x
        return minimum(x, high.at(broadcast(indices, high.shape))) if high is not None else x

    return op.result(at)
