"""The functions an epilogue is written with: one operator each, and composites of them (activations, rotary embedding).

Operands are epilogue values and numbers. A new activation is one function here, in terms of those above it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .frontend import Moments, Operand, Stored, Value, apply, apply_moments


def exp(x: Value) -> Value:
    """e to the power x."""
    return apply("exp", x)


def log(x: Value) -> Value:
    """Natural logarithm."""
    return apply("log", x)


def sqrt(x: Value) -> Value:
    """Square root."""
    return apply("sqrt", x)


def rsqrt(x: Value) -> Value:
    """1/√x."""
    return apply("rsqrt", x)


def reciprocal(x: Value) -> Value:
    """1/x."""
    return apply("reciprocal", x)


def erf(x: Value) -> Value:
    """The Gauss error function."""
    return apply("erf", x)


def tanh(x: Value) -> Value:
    """Hyperbolic tangent."""
    return apply("tanh", x)


def sigmoid(x: Value) -> Value:
    """1/(1 + e^-x)."""
    return apply("sigmoid", x)


def relu(x: Value) -> Value:
    """max(x, 0)."""
    return apply("relu", x)


def floor(x: Value) -> Value:
    """Rounds down."""
    return apply("floor", x)


def ceil(x: Value) -> Value:
    """Rounds up."""
    return apply("ceil", x)


def round_even(x: Value) -> Value:
    """Rounds to the nearest integer, halves to the even one."""
    return apply("round", x)


def sign(x: Value) -> Value:
    """-1, 0 or 1."""
    return apply("sign", x)


def sin(x: Value) -> Value:
    """Sine, of radians."""
    return apply("sin", x)


def cos(x: Value) -> Value:
    """Cosine, of radians."""
    return apply("cos", x)


def maximum(a: Operand, b: Operand) -> Value:
    """The larger; NaN if either is."""
    return apply("max", a, b)


def minimum(a: Operand, b: Operand) -> Value:
    """The smaller; NaN if either is."""
    return apply("min", a, b)


def clip(x: Value, low: float, high: float) -> Value:
    """x within [low, high]."""
    return minimum(maximum(x, low), high)


def equal(a: Operand, b: Operand) -> Value:
    """Whether a equals b."""
    return apply("eq", a, b)


def isnan(x: Value) -> Value:
    """Whether x is NaN."""
    return apply("isnan", x)


def where(condition: Value, a: Operand, b: Operand) -> Value:
    """a where the condition holds, else b."""
    return apply("where", condition, a, b)


def cast(x: Value, dtype: str) -> Value:
    """x as f32, f16, bf16, i8, u8, i32, i64 or bool."""
    return apply("cast", x, to=dtype)


def gelu(x: Value) -> Value:
    """GELU by the error function: x·Φ(x) (Hendrycks & Gimpel, arXiv 1606.08415)."""
    return 0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))


def gelu_tanh(x: Value) -> Value:
    """GELU's tanh approximation (same paper)."""
    return 0.5 * x * (1.0 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def quick_gelu(x: Value) -> Value:
    """x·σ(1.702 x) (same paper)."""
    return x * sigmoid(1.702 * x)


def silu(x: Value) -> Value:
    """x·σ(x), also called swish."""
    return x * sigmoid(x)


def softplus(x: Value) -> Value:
    """log(1 + e^x), without overflow."""
    return relu(x) + log(1.0 + exp(-abs(x)))


def mish(x: Value) -> Value:
    """x·tanh(softplus(x)) (arXiv 1908.08681)."""
    return x * tanh(softplus(x))


def hard_sigmoid(x: Value, alpha: float = 1 / 6, beta: float = 0.5) -> Value:
    """αx + β within [0, 1]."""
    return clip(alpha * x + beta, 0.0, 1.0)


def hard_swish(x: Value) -> Value:
    """x·hard_sigmoid(x) (arXiv 1905.02244)."""
    return x * hard_sigmoid(x)


def leaky_relu(x: Value, alpha: float = 0.01) -> Value:
    """x where positive, else αx."""
    return where(x < 0.0, alpha * x, x)


def elu(x: Value, alpha: float = 1.0) -> Value:
    """x where positive, else α(e^x − 1)."""
    return where(x < 0.0, alpha * (exp(minimum(x, 0.0)) - 1.0), x)


def softcap(x: Value, cap: float) -> Value:
    """x softly limited to ±cap: cap·tanh(x/cap)."""
    return cap * tanh(x / cap)


def even(x: Value) -> Value:
    """Columns 0, 2, 4, … of a tile or column value."""
    return apply("even", x)


def odd(x: Value) -> Value:
    """Columns 1, 3, 5, … of a tile or column value."""
    return apply("odd", x)


def interleave(a: Value, b: Value) -> Value:
    """The value whose even columns are a and whose odd ones are b."""
    return apply("interleave", a, b)


def rope(x: Value, cos: Value, sin: Value) -> Value:
    """Rotates each pair of columns (2i, 2i+1) by an angle whose cosine and sine are given, N/2 columns (arXiv 2104.09864)."""
    a, b = even(x), odd(x)
    return interleave(a * cos - b * sin, b * cos + a * sin)


def row_sum(x: Value) -> Value:
    """Row output: the sum of each row."""
    return apply("sum", x)


def row_sumsq(x: Value) -> Value:
    """Row output: the sum of squares of each row."""
    return apply("sumsq", x)


def row_max(x: Value) -> Value:
    """Row output: the largest value of each row."""
    return apply("rowmax", x)


def row_min(x: Value) -> Value:
    """Row output: the smallest value of each row."""
    return apply("rowmin", x)


def row_argmax(x: Value) -> Value:
    """Row output, i64: the first column that has the largest value of each row."""
    return apply("argmax", x)


def row_mean(x: Value) -> Value:
    """Row output: the mean of each row."""
    return apply("mean", x)


def moments(x: Value) -> Moments:
    """Row outputs: the mean and the biased variance of each row."""
    return apply_moments(x)


def store(
    value: Value,
    columns: tuple[int, int] | None = None,
    heads: int | None = None,
    halves: bool | Sequence[tuple[int, int]] = False,
) -> Stored:
    """A tile output of only ``columns`` (c0, c1), or with ``heads`` of D columns laid out ``[B, H, S, D]``.

    ``halves`` stores columns 2j and 2j + 1 of a head as its columns j and j + D/2; given as ranges of a head's columns, the
    pairs of each of them.
    """
    whole = ((0, heads or 0),)
    return Stored(value, columns, heads, (whole if halves else ()) if isinstance(halves, bool) else tuple(halves))
