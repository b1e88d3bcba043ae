"""Symbolic sizes: a dimension is an ``int`` or a sympy expression over named, non-negative sizes.

ONNX stores a dimension as a number or a string; ``parse_dim`` and ``format_dim`` go between the two. A string that
is not an arithmetic expression (exporters write names such as ``batch size``) is one symbol of that name.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeAlias

import sympy

Dim: TypeAlias = "int | sympy.Expr"

_BINARY = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: sympy.floor(a / b),
    ast.Div: lambda a, b: a / b,
    ast.Mod: lambda a, b: sympy.Mod(a, b),
}
_CALLS = {
    "floor": sympy.floor,
    "ceiling": sympy.ceiling,
    "ceil": sympy.ceiling,
    "max": sympy.Max,
    "min": sympy.Min,
    "Max": sympy.Max,
    "Min": sympy.Min,
    "Mod": sympy.Mod,
}


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
    except (SyntaxError, KeyError, ValueError):
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
    if isinstance(dim, int):
        return dim
    dim = sympy.expand(dim)
    return int(dim) if dim.is_Integer else dim


def format_dim(dim: Dim) -> int | str:
    """The ONNX form of a dimension."""
    dim = simplify(dim)
    return dim if isinstance(dim, int) else str(dim)


def same(a: Dim, b: Dim) -> bool:
    """Whether two dimensions are equal for every value of their symbols."""
    return bool(simplify(sympy.sympify(a) - sympy.sympify(b)) == 0)


def evaluate(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The number that ``dim`` is, given each symbol's value by name."""
    if isinstance(dim, int):
        return dim
    return int(dim.subs({s: sizes[s.name] for s in dim.free_symbols}))
