"""Elementary functions by those that kernels have: tangent, hyperbolic functions, their inverses, shrinking.

Where a formula would lose the digits of a small argument, a Taylor polynomial stands in; its first omitted term is below
float32's rounding.

Source: the ONNX operator specifications.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .. import ir
from .builder import Builder
from .composite import composite


def _odd(b: Builder, x: ir.Tensor, coefficients: Sequence[float]) -> ir.Tensor:
    """``x · (1 + c₀ x² + c₁ x⁴ + …)``."""
    square = b("Mul", x, x)
    total: ir.Tensor | float = coefficients[-1]
    for c in coefficients[-2::-1]:
        total = b("Add", b("Mul", square, total), c)
    return b("Mul", x, b("Add", b("Mul", square, total), 1.0))


def _small(b: Builder, x: ir.Tensor, bound: float, coefficients: Sequence[float], formula: ir.Tensor) -> ir.Tensor:
    """An odd polynomial where |x| is below ``bound``, elsewhere ``formula``."""
    return b("Where", b("Less", b("Abs", x), bound), _odd(b, x, coefficients), formula)


@composite("Tan", domain="")
def _tan(b: Builder) -> ir.Tensor:
    x = b.node.inputs[0]
    return b("Div", b("Sin", x), b("Cos", x))


@composite("Sinh", domain="")
def _sinh(b: Builder) -> ir.Tensor:
    x = b.node.inputs[0]
    half = b("Mul", b("Sub", b("Exp", x), b("Exp", b("Neg", x))), 0.5)
    return _small(b, x, 0.5, [1 / 6, 1 / 120, 1 / 5040], half)


@composite("Cosh", domain="")
def _cosh(b: Builder) -> ir.Tensor:
    x = b.node.inputs[0]
    return b("Mul", b("Add", b("Exp", x), b("Exp", b("Neg", x))), 0.5)


@composite("Asinh", domain="")
def _asinh(b: Builder) -> ir.Tensor:
    x = b.node.inputs[0]
    size = b("Abs", x)
    grown = b("Log", b("Add", size, b("Sqrt", b("Add", b("Mul", x, x), 1.0))))
    return _small(b, x, 0.25, [-1 / 6, 3 / 40, -15 / 336, 105 / 3456], b("Mul", b("Sign", x), grown))


@composite("Acosh", domain="")
def _acosh(b: Builder) -> ir.Tensor:
    x = b.node.inputs[0]
    root = b("Sqrt", b("Mul", b("Sub", x, 1.0), b("Add", x, 1.0)))
    return b("Log", b("Add", x, root))


@composite("Atanh", domain="")
def _atanh(b: Builder) -> ir.Tensor:
    x = b.node.inputs[0]
    ratio = b("Div", b("Add", x, 1.0), b("Sub", b.tensor(1.0), x))
    return _small(b, x, 0.25, [1 / 3, 1 / 5, 1 / 7, 1 / 9, 1 / 11], b("Mul", b("Log", ratio), 0.5))


@composite("Atan", domain="")
def _atan(b: Builder) -> ir.Tensor:
    return arctangent(b, b.node.inputs[0])


def arctangent(b: Builder, x: ir.Tensor) -> ir.Tensor:
    """By atan x = π/2 − atan 1/x and atan x = π/4 + atan (x − 1)/(x + 1) for |x| below tan π/8: absolute error 2e-7."""
    size = b("Abs", x)
    large, middle = b("Greater", size, math.tan(3 * math.pi / 8)), b("Greater", size, math.tan(math.pi / 8))
    inverse = b("Div", b.tensor(-1.0), b("Max", size, 1.0))
    turned = b("Div", b("Sub", size, 1.0), b("Add", size, 1.0))
    reduced = b("Where", large, inverse, b("Where", middle, turned, size))
    offset = b("Where", large, math.pi / 2, b("Where", middle, math.pi / 4, 0.0))
    # A minimax polynomial of |x| ≤ tan π/8.
    angle = b("Add", offset, _odd(b, reduced, [-0.333329491539, 0.199777106478, -0.138776856032, 0.0805374449538]))
    return b("Where", b("Less", x, 0.0), b("Neg", angle), angle)


@composite("Asin", domain="")
def _asin(b: Builder) -> ir.Tensor:
    return arcsine(b, b.node.inputs[0])


def arcsine(b: Builder, x: ir.Tensor) -> ir.Tensor:
    """The angle whose tangent is x / √(1 − x²)."""
    one = b.tensor(1.0)
    return arctangent(b, b("Div", x, b("Sqrt", b("Mul", b("Sub", one, x), b("Add", one, x)))))


@composite("Acos", domain="")
def _acos(b: Builder) -> ir.Tensor:
    return b("Sub", b.tensor(math.pi / 2), arcsine(b, b.node.inputs[0]))


@composite("Shrink", domain="")
def _shrink(b: Builder) -> ir.Tensor:
    x, bound, bias = b.node.inputs[0], b.attr("lambd", 0.5), b.attr("bias", 0.0)
    below = b("Where", b("Less", x, -bound), b("Add", x, bias), 0.0)
    return b("Where", b("Greater", x, bound), b("Sub", x, bias), below)


@composite("SwiGLU", domain="")
def _swiglu(b: Builder) -> ir.Tensor:
    gate, value = b.node.inputs[:2]
    return b("Mul", b("Swish", gate, alpha=b.attr("alpha", 1.0)), value)
