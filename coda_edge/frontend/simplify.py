"""Operators that do nothing, or that another says more simply: the identities of arithmetic, logic and data movement."""

from __future__ import annotations

import numpy as np

from .. import ir
from .builder import Builder, decomposition
from .layout_rules import UNBOUNDED
from .sizes import TO_END

# For each operator, the operand that has no effect, and on which sides.
_NEUTRAL: dict[str, tuple[float, tuple[int, ...]]] = {
    "Add": (0, (0, 1)),
    "Sub": (0, (1,)),
    "Mul": (1, (0, 1)),
    "Div": (1, (1,)),
    "Pow": (1, (1,)),
    "And": (True, (0, 1)),
    "Or": (False, (0, 1)),
    "Xor": (False, (0, 1)),
}
# A constant operand that decides the result alone.
_ABSORBING: dict[str, bool] = {"And": False, "Or": True}


def unchanged(b: Builder, x: ir.Tensor) -> bool:
    """Whether ``x`` has the shape and dtype of the node's output."""
    out = b.node.outputs[0]
    return ir.same_shape(ir.shape(x), ir.shape(out)) and np.dtype(x.dtype) == np.dtype(out.dtype)


def uniform(tensor: ir.Tensor) -> float | None:
    """The value that all elements of a constant have, None if they differ or it is no constant."""
    value = ir.constant_value(tensor)
    if value is None or not value.size:
        return None
    first = value.reshape(-1)[0]
    return first.item() if (value == first).all() else None


@decomposition(*_NEUTRAL)
def _neutral(b: Builder) -> ir.Tensor | None:
    neutral, sides = _NEUTRAL[b.node.op]
    for side in sides:
        other = b.node.inputs[1 - side]
        if uniform(b.node.inputs[side]) == neutral and unchanged(b, other):
            return other
    return None


@decomposition(*_ABSORBING)
def _absorbing(b: Builder) -> ir.Tensor | None:
    for side in (0, 1):
        other = b.node.inputs[1 - side]
        if uniform(b.node.inputs[side]) is _ABSORBING[b.node.op] and unchanged(b, other):
            value = np.full([1] * b.rank(1 - side), _ABSORBING[b.node.op])
            return b("Expand", b.editor.constant("fill", value), b("Shape", other))
    return None


@decomposition("Where")
def _where(b: Builder) -> ir.Tensor | None:
    condition = uniform(b.node.inputs[0])
    if condition is None:
        return None
    chosen = b.node.inputs[1 if condition else 2]
    return chosen if unchanged(b, chosen) else None


@decomposition("Not")
def _not(b: Builder) -> ir.Tensor | None:
    inner = ir.made_by(b.node.inputs[0], "Not")
    return inner.inputs[0] if inner is not None else None


@decomposition("Mul")
def _reciprocal(b: Builder) -> ir.Tensor | None:
    """``a · (1 / c)`` is ``a / c``."""
    for side in (1, 0):
        inverse = ir.made_by(b.node.inputs[side], "Reciprocal")
        if inverse is not None and len(ir.consumers(b.node.inputs[side])) == 1:
            return b("Div", b.node.inputs[1 - side], inverse.inputs[0])
    return None


@decomposition("Add", "Sub")
def _negated(b: Builder) -> ir.Tensor | None:
    """``a + (-c)`` is ``a - c``, and ``a - (-c)`` is ``a + c``."""
    for side in (1, 0) if b.node.op == "Add" else (1,):
        inner = ir.made_by(b.node.inputs[side], "Neg")
        if inner is not None:
            return b("Sub" if b.node.op == "Add" else "Add", b.node.inputs[1 - side], inner.inputs[0])
    return None


@decomposition("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand")
def _same_view(b: Builder) -> ir.Tensor | None:
    return b.node.inputs[0] if unchanged(b, b.node.inputs[0]) else None


@decomposition("Softmax")
def _softmax_of_view(b: Builder) -> ir.Tensor | None:
    """Rows that were flattened, as conversion from opset 11 does it: the rows as they were, and the view behind."""
    view = ir.made_by(b.node.inputs[0], "Reshape", "Flatten", "Squeeze")
    if view is None or view.inputs[0].shape is None or b.attr("axis", -1) % b.rank() != b.rank() - 1:
        return None
    before, after = ir.shape(view.inputs[0]), ir.shape(b.node.inputs[0])
    if len(before) <= len(after) or not ir.same_shape(before[-1:], after[-1:]):
        return None
    rows = b("Softmax", view.inputs[0], axis=len(before) - 1)
    return b(view.op, rows, *view.inputs[1:], **view.attrs)


@decomposition("Transpose")
def _same_order(b: Builder) -> ir.Tensor | None:
    perm = list(b.attr("perm", None) or range(b.rank())[::-1])
    return b.node.inputs[0] if perm == list(range(b.rank())) else None


@decomposition("Concat")
def _single(b: Builder) -> ir.Tensor | None:
    if len(b.node.inputs) == 1:
        return b.node.inputs[0]
    axis = b.attr("axis", 0)
    return b("Concat", *b.node.inputs, axis=axis % b.rank()) if axis < 0 else None


@decomposition("Gather")
def _gather(b: Builder) -> ir.Tensor | None:
    """One index is a slice; else the axis is made non-negative."""
    axis, index = b.attr("axis", 0), ir.scalar_value(b.node.inputs[1])
    if index is not None and b.rank(1) < 2:
        start = int(index)
        part = b("Slice", b.node.inputs[0], [start], [start + 1 if start != -1 else TO_END], [axis % b.rank()])
        return part if b.rank(1) else b("Squeeze", part, [axis % b.rank()])
    return b("Gather", *b.node.inputs, axis=axis % b.rank()) if axis < 0 else None


@decomposition("Cast")
def _cast_of_bool(b: Builder) -> ir.Tensor | None:
    """A bool made a number and a bool again."""
    inner = ir.made_by(b.node.inputs[0], "Cast")
    is_bool = np.dtype(b.node.outputs[0].dtype).kind == "b"
    return inner.inputs[0] if inner is not None and is_bool and np.dtype(inner.inputs[0].dtype).kind == "b" else None


@decomposition("IsInf", "IsNaN")
def _of_widened(b: Builder) -> ir.Tensor | None:
    """A float made a wider one is infinite, or NaN, where it was before."""
    inner = ir.made_by(b.node.inputs[0], "Cast")
    if inner is None:
        return None
    source, wide = np.dtype(inner.inputs[0].dtype), np.dtype(b.node.inputs[0].dtype)
    widened = source.kind == wide.kind == "f" and source.itemsize < wide.itemsize
    return b(b.node.op, inner.inputs[0], **b.node.attrs) if widened else None


@decomposition("Slice")
def _slice(b: Builder) -> ir.Tensor | None:
    """Constant bounds on sorted, non-negative axes, clipped where sizes are known; axes that are kept whole go."""
    given = [ir.constant_value(t) for t in b.node.inputs[1:]]
    if any(v is None for v in given):
        return None
    starts, ends, *more = [v.tolist() for v in given if v is not None]
    axes = [a % b.rank() for a in more[0]] if more else list(range(len(starts)))
    steps = more[1] if len(more) > 1 else [1] * len(axes)
    parts = []
    for axis, start, end, step in sorted(zip(axes, starts, ends, steps, strict=True)):
        dim = ir.shape(b.node.inputs[0])[axis]
        if isinstance(dim, int) and step > 0:
            start, end = (min(v + dim if v < 0 else v, dim) for v in (max(start, -dim), max(end, -dim)))
        end = min(end, TO_END)
        whole = start == 0 and step == 1 and (end == dim if isinstance(dim, int) else end >= UNBOUNDED)
        if not whole:
            parts.append((start, end, axis, step))
    if not parts:
        return b.node.inputs[0]
    wanted = [list(column) for column in zip(*parts, strict=True)]
    if all(step == 1 for step in wanted[3]):
        wanted.pop()
    if wanted == [v.tolist() for v in given if v is not None]:
        return None
    return b("Slice", b.node.inputs[0], *wanted)
