"""Symbolic sizes: a dimension is an ``int`` or a sympy expression over named, non-negative sizes.

ONNX stores a dimension as a number or a string; ``parse_dim`` and ``format_dim`` go between the two. A string that
is not an arithmetic expression (exporters write names such as ``batch size``) is one symbol of that name.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import sympy

Dim: TypeAlias = "int | sympy.Expr"

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: sympy.floor(a / b),
    ast.Div: lambda a, b: a / b,
    ast.Mod: lambda a, b: sympy.Mod(a, b),
    ast.Pow: lambda a, b: a**b,
}
_CALLS: dict[str, Callable[..., Any]] = {
    "floor": sympy.floor,
    "ceiling": sympy.ceiling,
    "ceil": sympy.ceiling,
    "max": sympy.Max,
    "min": sympy.Min,
    "Max": sympy.Max,
    "Min": sympy.Min,
    "Mod": sympy.Mod,
}


@lru_cache(maxsize=65536)
def symbol(name: str) -> sympy.Symbol:
    """The size called ``name``: an integer that may be zero."""
    return sympy.Symbol(name, integer=True, nonnegative=True)


@lru_cache(maxsize=65536)
def parse_dim(dim: int | str) -> Dim:
    """A dimension from its ONNX form."""
    if isinstance(dim, int):
        return dim
    try:
        return simplify(_parse(ast.parse(dim, mode="eval").body))
    except (SyntaxError, KeyError, ValueError, TypeError):
        return symbol(dim)


def _parse(node: ast.expr) -> sympy.Expr:
    if isinstance(node, ast.Name):
        return symbol(node.id)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return sympy.Integer(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_parse(node.operand)
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_parse(node.left), _parse(node.right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _CALLS[node.func.id](*(_parse(a) for a in node.args))
    raise ValueError("not an arithmetic expression")


def simplify(dim: Dim) -> Dim:
    """``dim`` in canonical form; a constant becomes an ``int``."""
    return dim if isinstance(dim, int) else _canonical(dim)


@lru_cache(maxsize=65536)
def _canonical(dim: sympy.Expr) -> Dim:
    dim = dim if dim.is_Symbol else sympy.expand(dim)
    if dim.has(sympy.floor, sympy.ceiling):
        dim = sympy.expand(dim.replace(lambda t: isinstance(t, sympy.floor | sympy.ceiling), _rounded))
    return int(dim) if dim.is_Integer else dim


def _rounded(term: sympy.Expr) -> sympy.Expr:
    """The one form of a rounded quotient: floor((a - 1)/2) is floor(a/2 + 1/2) - 1, and ceiling(a/2) is floor(a/2 + 1/2).

    A whole number over a whole number is rounded once, however it was cut: floor(floor(a/2)/3) is floor(a/6). What only falls as sizes grow is turned
    round: floor(-a/2) is -floor(a/2 + 1/2). Whatever is divided is then rarely negative, so that integer division gives it whichever way it rounds.
    """
    quotient = term.args[0]
    if isinstance(term, sympy.ceiling):
        quotient = _raised(quotient)
    quotient = _rounded_once(sympy.expand(quotient))
    number, rest = quotient.as_coeff_Add()
    if all(part.as_coeff_Mul()[0].is_negative for part in sympy.Add.make_args(rest)):
        number, rest = sympy.expand(_raised(-quotient)).as_coeff_Add()
        whole = sympy.floor(number)
        return -(sympy.floor(number - whole + rest) + whole)
    whole = sympy.floor(number)
    return sympy.floor(quotient - whole) + whole


def _raised(quotient: sympy.Expr) -> sympy.Expr:
    """What has the ceiling of a quotient of whole numbers for its floor."""
    numerator, denominator = sympy.fraction(sympy.together(quotient))
    return (numerator + denominator - 1) / denominator


def _rounded_once(quotient: sympy.Expr) -> sympy.Expr:
    """``quotient``, of which the floor is to be taken: floor((floor(u) + n)/m) is floor((u + n)/m) for whole n and positive whole m."""
    for inner in quotient.atoms(sympy.floor):
        share = quotient.coeff(inner)
        if not share.is_Rational or share.p != 1 or share.q == 1:
            continue
        rest = sympy.expand((quotient - share * inner) * share.q)
        if rest.is_integer and not rest.has(inner):
            return _rounded_once(sympy.expand(share * (inner.args[0] + rest)))
    return quotient


def format_dim(dim: Dim) -> int | str:
    """The ONNX form of a dimension."""
    return dim if isinstance(dim, int) else _format(dim)


@lru_cache(maxsize=65536)
def _format(dim: sympy.Expr) -> int | str:
    canonical = simplify(dim)
    return canonical if isinstance(canonical, int) else str(canonical)


def same(a: Dim, b: Dim) -> bool:
    """Whether two dimensions are equal for every value of their symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return a == b or simplify(sympy.sympify(a) - sympy.sympify(b)) == 0


def product(dims: Iterable[Dim]) -> Dim:
    """The number of elements of a shape; 1 for none."""
    number, symbolic = 1, []
    for dim in dims:
        if isinstance(dim, int):
            number *= dim
        else:
            symbolic.append(dim)
    return simplify(sympy.Mul(number, *symbolic)) if symbolic else number


@lru_cache(maxsize=65536)
def divide(a: Dim, b: Dim) -> Dim | None:
    """``a / b`` when it is a whole polynomial for every value of the symbols (b taken as non-zero), else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    if a == b:
        return 1
    quotient = sympy.cancel(sympy.sympify(a) / sympy.sympify(b))
    numerator, denominator = sympy.fraction(sympy.together(quotient))
    return simplify(quotient) if denominator == 1 and numerator.is_integer else None


def exact(value: int | float | sympy.Expr) -> int | sympy.Expr | float:
    """``value`` without floating point where it is a whole number or has whole numbers as factors and terms."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, int) or not value.has(sympy.Float):
        return value
    return value.xreplace({f: sympy.Rational(str(f)) for f in value.atoms(sympy.Float)})


def nonnegative(dim: Dim) -> bool:
    """Whether ``dim`` is provably at least 0."""
    return dim >= 0 if isinstance(dim, int) else bool(dim.is_nonnegative)


def evaluate(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The number that ``dim`` is, given each symbol's value by name."""
    if isinstance(dim, int):
        return dim
    return int(dim.subs({s: sizes[s.name] for s in dim.free_symbols}))
