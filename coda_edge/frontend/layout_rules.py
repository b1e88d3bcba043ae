"""Shape rules of the operators that make and rearrange tensors: reshape, slice, gather, expand and their like.

Source: the ONNX operator specifications, opsets 18 to 24.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import sympy

from ..symbolic import Dim, divide, exact, nonnegative, product, simplify
from .shape_rules import INT64, axes_of, broadcast
from .shapes import Call, Type, shape_rule

# Slice bounds at least this large mean "to the end".
UNBOUNDED = 2**31 - 1


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


@shape_rule("Reshape")
def _reshape(call: Call) -> list[Type]:
    target = call.sizes(1)
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
        if call.attr("allowzero", 0) and rest_in != rest_out and any(map(call.of_data, dims)):
            # There may be no elements at all, and then any sizes will do: a run sees that.
            call.equate(product(dims), product(out))
        else:
            _equate_products(call, rest_in, rest_out)
        return [(call.dtype(), tuple(out))]
    quotient = divide(rest_in, rest_out)
    if quotient is None:
        # A batch that another input's batch names: the two are one size.
        for axis, dim in enumerate(out[: len(dims)]):
            named = isinstance(dim, sympy.Symbol) and isinstance(dims[axis], sympy.Symbol) and dim != dims[axis]
            if named and not call.of_data(dim) and not call.of_data(dims[axis]):
                out[axis] = call.equate(dim, dims[axis])
        dims = call.shape()
        rest_in, rest_out = map(product, _without_common(dims, out))
        quotient = divide(rest_in, rest_out)
    if quotient is None and isinstance(rest_in, int) and isinstance(rest_out, int):
        raise call.error(f"cannot be reshaped to {list(target)}")
    if quotient is None:
        call.divisible(rest_in, rest_out, f"a Reshape of '{call.node.inputs[0].name}'")
        quotient = simplify(sympy.sympify(rest_in) / rest_out)
    out[inferred] = quotient
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
    axes = axes_of(call, 1)
    if axes is None:
        raise call.error("the axes are not known")
    rank = len(call.shape()) + len(axes)
    new = {call.axis(a, rank) for a in axes}
    rest = iter(call.shape())
    return [(call.dtype(), tuple(1 if i in new else next(rest) for i in range(rank)))]


@shape_rule("Squeeze")
def _squeeze(call: Call) -> list[Type]:
    dims = call.shape()
    axes = axes_of(call, 1)
    gone = {i for i, d in enumerate(dims) if d == 1} if axes is None else {call.axis(a, len(dims)) for a in axes}
    for axis in gone:
        call.equate(dims[axis], 1)
    return [(call.dtype(), tuple(d for i, d in enumerate(dims) if i not in gone))]


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
    return [(call.dtype(), (*dims[:axis], size, *dims[axis + 1 :])) for size in _split_sizes(call, dims[axis])]


def _split_sizes(call: Call, size: Dim) -> list[Dim]:
    """The sizes of the parts that a Split node makes of an axis."""
    if call.has(1):
        value = call.sizes(1)
        if value is None:
            raise call.error("the split sizes are not known")
        call.equate(size, simplify(sympy.Add(*value)))
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
        axes = axes_of(call, 3) if call.has(3) else list(range(count if isinstance(count, int) else len(dims)))
        for axis in axes or range(len(dims)):
            dims[call.axis(axis, len(dims))] = call.fresh(axis)
        return [(call.dtype(), tuple(dims))]
    for axis, start, end, step in parts:
        low, high = (start, end) if step > 0 else (end, start)
        if call.of_data(low) or call.of_data(high):
            end = _later(low, high) if step > 0 else end
            start = start if step > 0 else _later(low, high)
        elif not (isinstance(low, int) and isinstance(high, int)):
            call.at_most(low, high, call.axis_of(axis))
        dims[axis] = slice_length(start, end, step)
    return [(call.dtype(), tuple(dims))]


def _later(low: Dim, high: Dim) -> Dim:
    """``high``, or ``low`` if that is more: what data decides may be an empty range."""
    return high if nonnegative(simplify(sympy.sympify(high - low))) else simplify(sympy.Max(low, high))


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

    A symbolic bound is assumed to lie within the axis, which is recorded; one that data decides is clamped. For a negative step,
    end may be −1.
    """
    dims = call.shape()
    starts, ends = call.sizes(1), call.sizes(2)
    axes = call.ints(3) if call.has(3) else list(range(len(dims)))
    steps = call.ints(4) if call.has(4) else [1] * len(axes or ())
    if starts is None or ends is None or axes is None or steps is None:
        return None
    parts = []
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=False):
        axis = call.axis(axis, len(dims))
        size = dims[axis]
        low, high = (0, size) if step > 0 else (-1, size - 1)
        first, last = (_bound(call, axis, bound, low, high) for bound in (start, end))
        parts.append((axis, first, last, step))
    return parts


def _bound(call: Call, axis: int, bound: Any, low: int, high: Dim) -> Dim:
    """``bound`` counted from 0 and within [low, high], which are those of ``axis``."""
    size, reason = call.shape()[axis], call.axis_of(axis)
    if isinstance(bound, int):
        if bound >= UNBOUNDED:
            return high
        if bound <= -UNBOUNDED:
            return low
        if bound < 0:
            moved = simplify(size + bound)
            if isinstance(moved, int):
                return max(moved, low)
            call.at_most(low, moved, reason)
            return moved
        if isinstance(high, int):
            return min(bound, high)
        call.at_most(bound, high, reason)
        return bound
    if bound.is_nonpositive:
        bound = simplify(size + bound)
    if call.of_data(bound):
        above = bound if nonnegative(simplify(bound - low)) else sympy.Max(low, bound)
        return simplify(above if nonnegative(simplify(sympy.sympify(high - bound))) else sympy.Min(above, high))
    call.at_most(low, bound, reason)
    call.at_most(bound, high, reason)
    return simplify(bound)


@shape_rule("Gather")
def _gather(call: Call) -> list[Type]:
    dims = call.shape()
    axis = call.axis(call.attr("axis", 0), len(dims))
    return [(call.dtype(), (*dims[:axis], *call.shape(1), *dims[axis + 1 :]))]


@shape_rule("GatherElements")
def _gather_elements(call: Call) -> list[Type]:
    dims, picked = call.shape(), call.shape(1)
    if len(picked) != len(dims):
        raise call.error("the ranks differ")
    for axis in set(range(len(dims))) - {call.axis(call.attr("axis", 0), len(dims))}:
        call.at_most(picked[axis], dims[axis], call.axis_of(axis))
    return [(call.dtype(), call.shape(1))]


@shape_rule("GatherND")
def _gather_nd(call: Call) -> list[Type]:
    data, indices = call.shape(0), call.shape(1)
    batch = call.attr("batch_dims", 0)
    if not isinstance(indices[-1], int):
        raise call.error("the length of an index is not known")
    if indices[-1] > len(data) - batch:
        raise call.error(f"an index has {indices[-1]} elements, the data {len(data) - batch} axes for them")
    for a, b in zip(data[:batch], indices[:batch], strict=True):
        call.equate(a, b)
    return [(call.dtype(), (*indices[:-1], *data[batch + indices[-1] :]))]


@shape_rule("Expand")
def _expand(call: Call) -> list[Type]:
    target = call.sizes(1)
    if target is None:
        rank = call.shape(1)[0]
        if not isinstance(rank, int):
            raise call.error("the length of the target shape is not known")
        return [(call.dtype(), tuple(call.fresh(i) for i in range(max(rank, len(call.shape())))))]
    dims = list(broadcast(call, call.shape(), tuple(target)))
    for axis, (have, want) in enumerate(zip(call.shape()[::-1], target[::-1], strict=False), 1):
        # Taken to be equal, but 1 might be repeated: it stays an Expand, so that a run sees whether they are.
        if isinstance(have, sympy.Expr) and not call.of_data(have) and call.of_data(want):
            dims[-axis] = want
    return [(call.dtype(), tuple(dims))]


@shape_rule("Tile")
def _tile(call: Call) -> list[Type]:
    repeats = call.sizes(1)
    if repeats is None:
        return [(call.dtype(), tuple(call.fresh(i) for i in range(len(call.shape()))))]
    return [(call.dtype(), tuple(simplify(d * r) for d, r in zip(call.shape(), repeats, strict=True)))]


@shape_rule("Range")
def _range(call: Call) -> list[Type]:
    start, limit, delta = (call.sizes(i) for i in range(3))
    if start is None or limit is None or delta is None:
        return [(call.dtype(), (call.fresh(0),))]
    first, last, step = map(exact, (start.item(), limit.item(), delta.item()))
    if all(isinstance(v, int | float) for v in (first, last, step)):
        return [(call.dtype(), (max(int(np.ceil((last - first) / step)), 0),))]
    if any(isinstance(v, float) for v in (first, last, step)):
        first, last, step = (sympy.Rational(v) if isinstance(v, float) else v for v in (first, last, step))
        count = simplify(sympy.ceiling((last - first) / step))
        call.at_most(0, count, "the length of a range")
        return [(call.dtype(), (count,))]
    low, high = (last, first) if isinstance(step, int | float) and step < 0 else (first, last)
    if call.of_data(low) or call.of_data(high):
        later = _later(low, high)
        first, last = (later, low) if low is last else (low, later)
    else:
        call.at_most(low, high, "the length of a range")
    if step in (1, -1):
        return [(call.dtype(), (simplify((last - first) * step),))]
    return [(call.dtype(), (simplify(sympy.ceiling((last - first) / step)),))]


@shape_rule("ConstantOfShape")
def _constant_of_shape(call: Call) -> list[Type]:
    fill = call.attr("value")
    dtype = np.dtype(np.float32) if fill is None else fill.dtype
    target = call.sizes(0)
    if target is None:
        rank = call.shape(0)[0]
        if not isinstance(rank, int):
            raise call.error("the length of the target shape is not known")
        return [(dtype, tuple(call.fresh(i) for i in range(rank)))]
    return [(dtype, tuple(target.flat))]


# By mode: how long an axis must be, to be padded by an amount.
_PAD_NEEDS: dict[str, Callable[[Dim], Dim]] = {
    "constant": lambda amount: 0,
    "edge": lambda amount: 1,
    "reflect": lambda amount: amount + 1,
    "wrap": lambda amount: amount,
}


@shape_rule("Pad")
def _pad(call: Call) -> list[Type]:
    dims = list(call.shape())
    pads = call.sizes(1)
    axes = call.ints(3) if call.has(3) else list(range(len(dims)))
    if axes is None:
        raise call.error("the axes are not known")
    for i, axis in enumerate(axes):
        axis = call.axis(axis, len(dims))
        if pads is None:
            dims[axis] = call.fresh(axis)
            continue
        before, after, size = pads[i], pads[i + len(axes)], dims[axis]
        for amount in (before, after):
            if amount != 0:
                call.at_most(
                    _PAD_NEEDS[call.attr("mode", "constant")](amount), size, f"padding of {call.axis_of(axis)}"
                )
        dims[axis] = simplify(size + before + after)
        call.at_most(0, dims[axis], f"padding of {call.axis_of(axis)}")
    return [(call.dtype(), tuple(dims))]
