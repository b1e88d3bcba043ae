"""Values that shapes alone determine: small integer and bool tensors, as ints and expressions in the inputs' sizes.

Each rule evaluates one operator on object arrays, or gives None where data or an undecidable comparison is involved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import sympy

from ..symbolic import Dim, divide, exact, nonnegative, product, simplify
from .layout_rules import shape_range, slice_parts
from .shape_rules import dtype_of
from .shapes import Call, Type, Values, constant_of, objects, value_rule

Scalar = Any  # int, float, bool or sympy.Expr
Scalars = Callable[..., "Scalar | None"]


def _map(call: Call, found: list[Type], function: Scalars) -> Values | None:
    """``function`` of the elements of all inputs, broadcast; None if any element is unknown."""
    operands = []
    for index in range(len(call)):
        value = call.value(index)
        if value is None:
            return None
        operands.append(value)
    out = np.broadcast_arrays(*operands) if len(operands) > 1 else operands
    results = [function(*args) for args in zip(*(a.flat for a in out), strict=True)]
    return None if any(r is None for r in results) else objects(results, found[0][1])


def _add(a: Scalar, b: Scalar) -> Scalar:
    return simplify(exact(a + b)) if isinstance(a + b, sympy.Expr) else a + b


def _sub(a: Scalar, b: Scalar) -> Scalar:
    return _add(a, -b)


def _mul(a: Scalar, b: Scalar) -> Scalar:
    return simplify(exact(a * b)) if isinstance(a * b, sympy.Expr) else a * b


def _min(a: Scalar, b: Scalar) -> Scalar:
    order = sign(_sub(b, a))
    return simplify(sympy.Min(exact(a), exact(b))) if order is None else a if order >= 0 else b


def _max(a: Scalar, b: Scalar) -> Scalar:
    order = sign(_sub(b, a))
    return simplify(sympy.Max(exact(a), exact(b))) if order is None else b if order >= 0 else a


def floor_divide(a: Dim, b: Dim) -> Dim | None:
    """``a / b`` rounded to zero; None if that depends on their signs, which are not known."""
    if isinstance(a, int) and isinstance(b, int):
        return None if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    exact = divide(a, b)
    if exact is not None or not (nonnegative(a) and nonnegative(b)):
        return exact
    whole: Dim = sympy.floor(a / b)
    return simplify(whole)


def sign(difference: Scalar) -> int | None:
    """−1, 0 or 1 as ``difference`` is for all sizes; 1 also for "at least 0"; None if it depends on them."""
    if not isinstance(difference, sympy.Expr):
        return int(difference > 0) - int(difference < 0)
    if difference.is_nonnegative:
        return 1
    return -1 if difference.is_negative else None


def _equal(a: Scalar, b: Scalar) -> bool | None:
    difference = _sub(a, b) if not isinstance(a, bool) else int(a) - int(b)
    if not isinstance(difference, sympy.Expr):
        return bool(difference == 0)
    return False if difference.is_nonzero else None


def _less(a: Scalar, b: Scalar) -> bool | None:
    return _negate(_less_or_equal(b, a))


def _less_or_equal(a: Scalar, b: Scalar) -> bool | None:
    order = sign(_sub(b, a))
    return None if order is None else order >= 0


def _negate(value: bool | None) -> bool | None:
    return None if value is None else not value


_ELEMENTWISE: dict[str, Scalars] = {
    "Add": _add,
    "Sub": _sub,
    "Mul": _mul,
    "Neg": lambda a: _mul(a, -1),
    "Abs": lambda a: abs(a),
    "Equal": _equal,
    "LessOrEqual": _less_or_equal,
    "GreaterOrEqual": lambda a, b: _less_or_equal(b, a),
    "Less": _less,
    "Greater": lambda a, b: _less(b, a),
    "And": operator.and_,
    "Or": operator.or_,
    "Not": operator.not_,
    "Where": lambda c, a, b: a if c else b,
    "Identity": lambda a: a,
}


@value_rule(*_ELEMENTWISE)
def _elementwise(call: Call, found: list[Type]) -> Values | None:
    return _map(call, found, _ELEMENTWISE[call.node.op])


@value_rule("Min", "Max")
def _extreme(call: Call, found: list[Type]) -> Values | None:
    pick = _min if call.node.op == "Min" else _max

    def fold(*args: Scalar) -> Scalar:
        result = args[0]
        for arg in args[1:]:
            result = pick(result, arg)
        return result

    return _map(call, found, fold)


def _quotient(call: Call, a: Dim, b: Dim) -> Dim | None:
    """``a / b`` rounded to zero; of an ``a`` that small sizes make negative, 0 down to -b, and beyond that assumed not to be."""
    found = floor_divide(a, b)
    if found is not None or isinstance(a, int) or not isinstance(b, int) or b <= 0 or a.is_negative or a.is_nonpositive:
        return found
    if nonnegative(simplify(a + b - 1)):
        return simplify(sympy.Max(0, sympy.floor(a / b)))
    call.at_most(0, a, "a quotient that is a size")
    return simplify(sympy.floor(a / b))


@value_rule("Div")
def _div(call: Call, found: list[Type]) -> Values | None:
    if np.dtype(found[0][0]).kind in "iu":
        return _map(call, found, lambda a, b: _quotient(call, a, b))
    return _map(call, found, lambda a, b: (exact(a / b) if isinstance(a / b, sympy.Expr) else a / b) if b else None)


@value_rule("Mod")
def _mod(call: Call, found: list[Type]) -> Values | None:
    def mod(a: Scalar, b: Scalar) -> Scalar | None:
        if isinstance(a, int) and isinstance(b, int):
            return a % b if b else None
        return simplify(sympy.Mod(a, b))

    return None if call.attr("fmod", 0) else _map(call, found, mod)


@value_rule("Floor", "Ceil")
def _rounded(call: Call, found: list[Type]) -> Values | None:
    whole, numeric = (sympy.floor, np.floor) if call.node.op == "Floor" else (sympy.ceiling, np.ceil)
    return _map(call, found, lambda a: simplify(whole(exact(a))) if isinstance(a, sympy.Expr) else float(numeric(a)))


@value_rule("Cast")
def _cast(call: Call, found: list[Type]) -> Values | None:
    kind = np.dtype(dtype_of(call.attr("to"))).kind

    def cast(a: Scalar) -> Scalar | None:
        if isinstance(a, sympy.Expr) and not a.is_number:
            if kind == "b":
                return True if a.is_positive else None
            return a if kind == "f" or a.is_integer else simplify(sympy.floor(a)) if a.is_nonnegative else None
        return {"b": bool, "i": int, "u": int, "f": float}[kind](a)

    return _map(call, found, cast) if kind in "biuf" else None


@value_rule("Constant")
def _constant(call: Call, found: list[Type]) -> Values | None:
    return constant_of(call.node).astype(object)


@value_rule("Shape")
def _shape(call: Call, found: list[Type]) -> Values | None:
    dims = call.shape()
    start, end = shape_range(call, len(dims))
    return objects(dims[start:end], found[0][1])


@value_rule("Size")
def _size(call: Call, found: list[Type]) -> Values | None:
    return objects([product(call.shape())], ())


@value_rule("Reshape", "Squeeze", "Unsqueeze", "Flatten")
def _view(call: Call, found: list[Type]) -> Values | None:
    value = call.value(0)
    return None if value is None else value.reshape(found[0][1])


@value_rule("Transpose")
def _transpose(call: Call, found: list[Type]) -> Values | None:
    value = call.value(0)
    return None if value is None else value.transpose(call.attr("perm"))


@value_rule("Concat")
def _concat(call: Call, found: list[Type]) -> Values | None:
    values = [call.value(i) for i in range(len(call))]
    return None if any(v is None for v in values) else np.concatenate(values, axis=call.attr("axis"))  # type: ignore[arg-type]


@value_rule("Gather")
def _gather(call: Call, found: list[Type]) -> Values | None:
    value, indices = call.value(0), call.ints(1)
    if value is None or indices is None:
        return None
    taken = np.take(value, np.asarray(indices, np.int64), axis=call.attr("axis", 0))
    return taken.reshape(found[0][1])


@value_rule("Slice")
def _slice(call: Call, found: list[Type]) -> Values | None:
    value, parts = call.value(0), slice_parts(call)
    if value is None or parts is None:
        return None
    for axis, start, end, step in parts:
        if not isinstance(start, int) or not isinstance(end, int):
            return None
        indices = np.arange(start, end, step)
        value = np.take(value, indices, axis=axis)
    return value


@value_rule("Split")
def _split(call: Call, found: list[Type]) -> list[Values] | None:
    value = call.value(0)
    if value is None:
        return None
    axis = call.axis(call.attr("axis", 0), value.ndim)
    ends = np.cumsum([dims[axis] for _, dims in found])[:-1]
    return np.split(value, ends.astype(np.int64), axis)


@value_rule("Expand")
def _expand(call: Call, found: list[Type]) -> Values | None:
    value = call.value(0)
    return None if value is None else np.broadcast_to(value, found[0][1]).copy()


@value_rule("ConstantOfShape")
def _constant_of_shape(call: Call, found: list[Type]) -> Values | None:
    fill = call.attr("value")
    scalar = 0.0 if fill is None else np.asarray(fill.values).reshape(-1)[0].item()
    return objects([scalar] * int(np.prod(found[0][1], dtype=np.int64)), found[0][1])


@value_rule("Range")
def _range(call: Call, found: list[Type]) -> Values | None:
    start, step = call.value(0), call.value(2)
    if start is None or step is None:
        return None
    return objects([_add(start.item(), _mul(step.item(), i)) for i in range(found[0][1][0])], found[0][1])


@value_rule("ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin")
def _reduce(call: Call, found: list[Type]) -> Values | None:
    value = call.value(0)
    if value is None or not value.size or (call.has(1) and call.ints(1) is None):
        return None
    combine = {"ReduceProd": _mul, "ReduceSum": _add, "ReduceMax": _max, "ReduceMin": _min}[call.node.op]
    axes = call.ints(1) if call.has(1) else call.attr("axes")
    if axes and len(axes) < value.ndim:
        return None
    result = value.flat[0]
    for element in value.flat[1:]:
        result = combine(result, element)
    return objects([result], found[0][1])


@value_rule("ScatterND")
def _scatter_nd(call: Call, found: list[Type]) -> Values | None:
    data, updates = call.value(0), call.value(2)
    if data is None or updates is None or call.value(1) is None or call.attr("reduction", "none") != "none":
        return None
    out = data.copy()
    indices = call.value(1)
    assert indices is not None
    for position in np.ndindex(indices.shape[:-1]):
        out[tuple(int(i) for i in indices[position])] = updates[position]
    return out
