"""Elementary functions as arithmetic on float32 expressions, scalar or vector: no library calls, no branches.

Each docstring states the largest error found against float64 (``tests/test_intrinsics.py``), with fused multiply-add; "relative"
is |error| / |result|. NaN gives NaN, and limits at ±inf are exact, unless stated. Results below 1.7e-38 may be 0. The coefficients are
minimax fits by weighted least squares; range reductions are Cody and Waite's (Software Manual for the Elementary Functions, 1980).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import tirx

from .body import Expr, f32, lanes, widen

_ROUND = 12582912.0
"""1.5·2²³: adding it rounds a float32 of magnitude below 2²² to an integer, which is then in the low bits of the sum."""
_LOG2_E = math.log2(math.e)
_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.428606765330187e-06
_ROUND64 = 6755399441055744.0
"""1.5·2⁵², which does the same to a float64."""
_HALF_PI = (1.570796012878418, 3.139164164167596e-07, 6.223372171896613e-14)
"""π/2 in float64s, of which the first two have 21 bits: their products with a number of 32 bits are exact."""

_EXP = (0.49999993346222216, 0.1666651912792635, 0.04166840576587279, 0.008368898874219566, 0.0013814219773022535)
_EXP2 = (
    0.6931472031163379,
    0.24022647879932363,
    0.05550331852579109,
    0.009618439856689073,
    0.0013399133023534705,
    0.00015353152598748056,
)
_EXP2_SHORT = (
    0.6931469775987167,
    0.24022242084634718,
    0.05550733743574366,
    0.009671512688178861,
    0.0013264727247151993,
)
_LOG = (
    0.33333331659547466,
    -0.2500082273596469,
    0.20001233174445746,
    -0.16623297500425413,
    0.14201557540510995,
    -0.13160595243550724,
    0.12763300312478587,
    -0.07635588162597821,
)
_SIN = (-0.16666654506932158, 0.00833215414301594, -0.00019514368236507433)
_COS = (0.04166664550204328, -0.0013887307268514622, 2.443211110744036e-05)
_ERF = (
    (
        1.1283791437661292,
        0.19154946045789056,
        0.052875333241043154,
        0.003808125005300152,
        0.0002846869198186838,
        2.025914747188264e-06,
    ),
    (
        1.0,
        0.5030889652438206,
        0.114559271600588,
        0.015055016378558385,
        0.0011707169260208737,
        3.783182832118367e-05,
    ),
    3.93,
)
_TANH = (
    (0.9999999783728101, 0.1337775117553751, 0.0034916989621027804, 2.0545044520238974e-05, 1.326576748047108e-08),
    (1.0, 0.46711065884945235, 0.02586218714265675, 0.00032792733153291244, 7.740214705381421e-07),
    9.02,
)


def bind(value: Expr, body: Callable[[Expr], Expr]) -> Expr:
    """``body`` of a variable that holds ``value``, so that ``value`` is computed once however often it is used."""
    if isinstance(value, (tirx.Var, tirx.FloatImm, tirx.IntImm)):
        return body(value)
    variable = tirx.Var("t", value.ty)
    return tirx.Let(variable, value, body(variable))


def select(condition: Expr, yes: Expr | float, no: Expr | float) -> Expr:
    """``yes`` where ``condition`` holds, else ``no``, lane by lane; floats are literals."""
    count = lanes(condition)
    yes, no = (f32(v) if isinstance(v, float) else v for v in (yes, no))
    return tirx.Select(condition, widen(yes, count), widen(no, count))


def is_nan(x: Expr) -> Expr:
    """Whether ``x`` is not a number, by its bits: a comparison with itself would be folded away."""
    return (_bits(x) & _int(0x7FFFFFFF, x)) > _int(0x7F800000, x)


def maximum(a: Expr, b: Expr) -> Expr:
    """The larger one; NaN if either is NaN."""
    return bind(a, lambda a: bind(b, lambda b: select(tirx.Or(a > b, is_nan(a)), a, b)))


def minimum(a: Expr, b: Expr) -> Expr:
    """The smaller one; NaN if either is NaN."""
    return bind(a, lambda a: bind(b, lambda b: select(tirx.Or(a < b, is_nan(a)), a, b)))


def relu(x: Expr) -> Expr:
    """max(x, 0), exact."""
    return bind(x, lambda x: select(x < f32(0), 0.0, x))


def absolute(x: Expr) -> Expr:
    """|x|, exact."""
    return _float(_bits(x) & _int(0x7FFFFFFF, x), x)


def sign(x: Expr) -> Expr:
    """-1, 0 or 1; NaN for NaN."""
    return bind(x, lambda x: select(x > f32(0), 1.0, select(x < f32(0), -1.0, x)))


def exp(x: Expr) -> Expr:
    """eˣ: relative error 1.5e-7; 0 below -87, inf above 88.73."""
    return bind(_at_least(x, -87.0), lambda x: bind(_at_most(x, 89.0), _exp_reduced))


def exp_of_negative(x: Expr) -> Expr:
    """eˣ for x ≤ 0 or NaN, in fewer steps than ``exp``: relative error 1.7e-7 + 7.4e-8·|x| (1.4e-8·|x| where
    multiplication and addition round once); 0 below -87.7."""

    def scaled(x: Expr, z: Expr, n: Expr) -> Expr:
        # 2ⁿ of n = -127 is 0.
        scale = _float((_bits(z) + _int(127, z)) << _int(23, z), z)
        return bind(x * f32(_LOG2_E) - n, lambda r: (_poly(_EXP2_SHORT, r) * r + 1.0) * scale)

    def reduced(x: Expr) -> Expr:
        return bind(x * f32(_LOG2_E) + f32(_ROUND), lambda z: bind(z - f32(_ROUND), lambda n: scaled(x, z, n)))

    return bind(_at_least(x, -88.0), reduced)


def _exp_reduced(x: Expr) -> Expr:
    def scaled(z: Expr, n: Expr) -> Expr:
        return bind(
            x - n * f32(_LN2_HIGH) - n * f32(_LN2_LOW), lambda r: _scale((_poly(_EXP, r) * r + 1.0) * r + 1.0, z)
        )

    return bind(x * f32(_LOG2_E) + f32(_ROUND), lambda z: bind(z - f32(_ROUND), lambda n: scaled(z, n)))


def exp2(x: Expr) -> Expr:
    """2ˣ: relative error 1.5e-7; 0 below -125.5, inf from 128."""

    def reduced(x: Expr) -> Expr:
        return bind(
            x + f32(_ROUND), lambda z: bind(x - (z - f32(_ROUND)), lambda r: _scale(_poly(_EXP2, r) * r + 1.0, z))
        )

    return bind(_at_least(x, -126.0), lambda x: bind(_at_most(x, 128.0), reduced))


def log(x: Expr) -> Expr:
    """ln x: relative error 1.5e-7, subnormal x included; -inf at 0, NaN below."""

    def normal(x: Expr) -> Expr:
        small = x < f32(1.1754943508222875e-38)
        return bind(
            select(small, x * f32(8388608.0), x), lambda y: exponent(x, _bits(y) - select_int(small, 23 << 23, 0, x))
        )

    def select_int(condition: Expr, yes: int, no: int, like: Expr) -> Expr:
        return tirx.Select(condition, _int(yes, like), _int(no, like))

    def exponent(x: Expr, bits: Expr) -> Expr:
        # The mantissa is taken in [√½, √2): 0x3f3504f3 is √½.
        return bind(bits, lambda b: bind((b - _int(0x3F3504F3, x)) >> _int(23, x), lambda e: mantissa(x, b, e)))

    def mantissa(x: Expr, bits: Expr, e: Expr) -> Expr:
        f = _float(bits - (e << _int(23, x)), x) - f32(1)
        return bind(f, lambda f: bind(_to_float(e), lambda e: special(x, series(f, e))))

    def series(f: Expr, e: Expr) -> Expr:
        return ((_poly(_LOG, f) * f - 0.5) * (f * f) + e * f32(_LN2_LOW) + f) + e * f32(_LN2_HIGH)

    def special(x: Expr, y: Expr) -> Expr:
        y = select(x > f32(0), y, select(x < f32(0), math.nan, select(is_nan(x), x, -math.inf)))
        return select(x > f32(3.4028234663852886e38), x, y)

    return bind(x, normal)


def erf(x: Expr) -> Expr:
    """The error function: relative error 3e-7."""
    return _odd_rational(x, *_ERF)


def tanh(x: Expr) -> Expr:
    """tanh x: relative error 3.5e-7."""
    return _odd_rational(x, *_TANH)


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + e⁻ˣ): relative error 3e-7."""
    return f32(1) / (exp(f32(0) - x) + f32(1))


def sqrt(x: Expr) -> Expr:
    """√x, correctly rounded."""
    return tirx.sqrt(x)


def rsqrt(x: Expr) -> Expr:
    """1 / √x, each step correctly rounded."""
    return f32(1) / tirx.sqrt(x)


def floor(x: Expr) -> Expr:
    """⌊x⌋, exact."""
    return tirx.floor(x)


def ceil(x: Expr) -> Expr:
    """⌈x⌉, exact."""
    return tirx.ceil(x)


def round_even(x: Expr) -> Expr:
    """The nearest integer, of two the even one; exact."""
    return tirx.nearbyint(x)


def sin(x: Expr) -> Expr:
    """sin x: absolute error 1.5e-7 for |x| ≤ 5e9, |x|·2⁻⁵² more up to 1e15, beyond that no more than in [-1, 1]; NaN at ±inf."""
    return _sine(x, 0)


def cos(x: Expr) -> Expr:
    """cos x: as ``sin``."""
    return _sine(x, 1)


def power(x: Expr, y: Expr) -> Expr:
    """xʸ: exact steps for y = ±½, ±1, ±2, ±3, ±4 given as literals, else relative error 2e-7·(1 + |y·ln x|).

    NaN for negative x and y no integer, as IEEE 754 ``pow``; 0⁰ = 1.
    """
    if isinstance(y, tirx.Broadcast):
        y = y.value
    if isinstance(y, tirx.FloatImm) and abs(float(y.value)) in _POWERS:
        exponent = float(y.value)
        result = bind(x, _POWERS[abs(exponent)])
        return f32(1) / result if exponent < 0 else result
    return bind(x, lambda x: bind(widen(y, lanes(x)), lambda y: _general_power(x, y)))


_POWERS: dict[float, Callable[[Expr], Expr]] = {
    0.5: sqrt,
    1.0: lambda x: x,
    2.0: lambda x: x * x,
    3.0: lambda x: x * x * x,
    4.0: lambda x: bind(x * x, lambda s: s * s),
}


def _general_power(x: Expr, y: Expr) -> Expr:
    half = y * f32(0.5)
    integral = tirx.floor(y).equal(y)
    odd = tirx.And(integral, tirx.Not(tirx.floor(half).equal(half)))

    def signed(p: Expr) -> Expr:
        negative = select(odd, f32(0) - p, select(integral, p, math.nan))
        return select(y.equal(f32(0)), 1.0, select(x < f32(0), negative, p))

    return bind(exp(y * log(absolute(x))), signed)


def widen_float16(bits: Expr) -> Expr:
    """The float32 of a float16 given by its bits (uint16), exact; NaN stays NaN."""

    def widened(h: Expr) -> Expr:
        magnitude = (h & _uint(0x7FFF, h)) << _uint(13, h)
        exponent = magnitude & _uint(0x0F800000, h)
        # The exponents' biases differ by 112; infinities and NaN are moved twice as far.
        shift = tirx.Select(exponent.equal(_uint(0x0F800000, h)), _uint(224 << 23, h), _uint(112 << 23, h))
        subnormal = (h & _uint(0x3FF, h)).astype(_like("float32", h)) * f32(2.0**-24)
        value = tirx.Select(exponent.equal(_uint(0, h)), _reinterpret("uint32", subnormal), magnitude + shift)
        return _reinterpret("float32", value | ((h & _uint(0x8000, h)) << _uint(16, h)))

    return bind(bits.astype(_like("uint32", bits)), widened)


def narrow_float16(x: Expr) -> Expr:
    """The bits (uint16) of the float16 nearest to a float32, halves to even; beyond 65520 infinity, NaN stays NaN."""

    def narrowed(b: Expr, a: Expr) -> Expr:
        odd = (a >> _uint(13, a)) & _uint(1, a)
        normal = (a - _uint(112 << 23, a) + _uint(0xFFF, a) + odd) >> _uint(13, a)
        # 0.5 has the spacing of float16's subnormals: adding it rounds to them, and leaves their bits.
        subnormal = _reinterpret("uint32", _reinterpret("float32", a) + f32(0.5)) - _uint(126 << 23, a)
        value = tirx.Select(a < _uint(113 << 23, a), subnormal, normal)
        value = tirx.Select(a >= _uint(0x477FF000, a), _uint(0x7C00, a), value)
        value = tirx.Select(a > _uint(0x7F800000, a), _uint(0x7E00, a), value)
        return (value | ((b >> _uint(16, b)) & _uint(0x8000, b))).astype(_like("uint16", b))

    return bind(_reinterpret("uint32", x), lambda b: bind(b & _uint(0x7FFFFFFF, b), lambda a: narrowed(b, a)))


def widen_bfloat16(bits: Expr) -> Expr:
    """The float32 of a bfloat16 given by its bits (uint16), exact."""
    wide = bits.astype(_like("uint32", bits))
    return _reinterpret("float32", wide << _uint(16, wide))


def narrow_bfloat16(x: Expr) -> Expr:
    """The bits (uint16) of the bfloat16 nearest to a float32, halves to even; NaN stays NaN."""

    def narrowed(b: Expr) -> Expr:
        odd = (b >> _uint(16, b)) & _uint(1, b)
        not_a_number = (b & _uint(0x7FFFFFFF, b)) > _uint(0x7F800000, b)
        value = tirx.Select(not_a_number, b | _uint(0x400000, b), b + _uint(0x7FFF, b) + odd)
        return (value >> _uint(16, b)).astype(_like("uint16", b))

    return bind(_reinterpret("uint32", x), narrowed)


def _sine(x: Expr, quarter: int) -> Expr:
    """sin(x + quarter·π/2)."""

    def reduced(x: Expr, z: Expr, n: Expr) -> Expr:
        r = x
        for part in _HALF_PI:
            r = r - n * _f64(part)
        return bind(r, lambda r: bind(bounded(r).astype(_like("float32", r)), lambda r: of_quadrant(z, r)))

    def bounded(r: Expr) -> Expr:
        most = widen(_f64(0.8), lanes(r))
        return tirx.Select(r > most, most, tirx.Select(r < most * -1.0, most * -1.0, r))

    def of_quadrant(z: Expr, r: Expr) -> Expr:
        number = _reinterpret("int64", z).astype(_like("int32", z)) + _int(quarter, z)
        return bind(r * r, lambda s: choose(r, s, number))

    def choose(r: Expr, s: Expr, quadrant: Expr) -> Expr:
        sine = _poly(_SIN, s) * s * r + r
        cosine = (_poly(_COS, s) * s - 0.5) * s + 1.0
        return bind(
            quadrant,
            lambda q: bind(
                select((q & _int(1, r)).equal(_int(0, r)), sine, cosine),
                lambda v: _float(_bits(v) ^ ((q & _int(2, r)) << _int(30, r)), r),
            ),
        )

    def rounded(x: Expr) -> Expr:
        z = x * _f64(2 / math.pi) + _f64(_ROUND64)
        return bind(z, lambda z: bind(z - _f64(_ROUND64), lambda n: reduced(x, z, n)))

    return bind(x.astype(_like("float64", x)), rounded)


def _odd_rational(x: Expr, top: Sequence[float], bottom: Sequence[float], limit: float) -> Expr:
    """x·top(x²)/bottom(x²), and ±1 beyond ±limit."""

    def ratio(x: Expr) -> Expr:
        value = bind(x * x, lambda s: x * _poly(top, s) / _poly(bottom, s))
        return select(x > f32(limit), 1.0, select(x < f32(-limit), -1.0, value))

    return bind(x, ratio)


def _poly(coefficients: Sequence[float], x: Expr) -> Expr:
    """The polynomial with ``coefficients`` from the constant on, by Horner's rule; ``x`` must be a variable."""
    value = widen(f32(coefficients[-1]), lanes(x))
    for c in reversed(coefficients[:-1]):
        value = value * x + f32(c)
    return value


def _at_least(x: Expr, low: float) -> Expr:
    """max(x, low), NaN for NaN: a comparison with NaN fails."""
    return bind(x, lambda x: select(x < f32(low), low, x))


def _at_most(x: Expr, high: float) -> Expr:
    """min(x, high), NaN for NaN."""
    return bind(x, lambda x: select(x > f32(high), high, x))


def _scale(p: Expr, z: Expr) -> Expr:
    """p·2ⁿ for z = n + _ROUND, -126 ≤ n ≤ 128: as 2p·2ⁿ⁻¹, whose power is 0 at n = -126 and finite at 128."""
    return (p + p) * _float((_bits(z) + _int(126, z)) << _int(23, z), z)


def _bits(x: Expr) -> Expr:
    return tirx.reinterpret(x.ty.dtype.replace("float32", "int32"), x)


def _float(bits: Expr, like: Expr) -> Expr:
    return tirx.reinterpret(like.ty.dtype, bits)


def _to_float(value: Expr) -> Expr:
    return value.astype(value.ty.dtype.replace("int32", "float32"))


def _f64(value: float) -> Expr:
    return tirx.const(value, "float64")


def _int(value: int, like: Expr) -> Expr:
    return widen(tirx.const(value, "int32"), lanes(like))


def _reinterpret(dtype: str, x: Expr) -> Expr:
    return tirx.reinterpret(_like(dtype, x), x)


def _like(dtype: str, x: Expr) -> str:
    return dtype if lanes(x) == 1 else f"{dtype}x{lanes(x)}"


def _uint(value: int, like: Expr) -> Expr:
    return widen(tirx.const(value, "uint32"), lanes(like))
