"""Lazy Expand: broadcasting is left to the operators that broadcast anyway.

An Expand whose reader gives the same shape without it goes. Otherwise it moves behind its reader, so that the reader
works on the small tensor, until something absorbs it or something needs it. One of which it is not known what it repeats stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_graphsurgeon as gs

from .. import ir
from ..symbolic import Dim, format_dim, same
from .movement import View, reshape
from .shapes import SymbolicInfo
from .sizes import SizeEmitter, expand_target

_ELEMENTWISE = frozenset(ir.ELEMENTWISE) | {"Mod", "Xor", "IsInf"}
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})


def defer_expands(graph: gs.Graph, info: SymbolicInfo) -> int:
    """Drops or moves every Expand as far as it goes; returns how many steps that took. Shapes must be annotated."""
    emitter = SizeEmitter(graph, info)
    work = [n for n in ir.in_order(graph) if n.op == "Expand" and not n.domain]
    count = 0
    while work:
        node = work.pop(0)
        if not node.outputs or not _repeats(node):
            continue
        spread = node.outputs[0]
        for user in ir.consumers(spread):
            rule = _rule(user)
            if rule is None or not user.outputs:
                continue
            moved = rule(emitter, user, spread, node.inputs[0])
            if moved is None:
                continue
            count += 1
            work.extend(moved)
    return count


def _repeats(expand: gs.Node) -> bool:
    """Whether each axis is known to be repeated or to stay: of two sizes, where data decides one, only a run tells."""
    wide, narrow = ir.shape(expand.outputs[0]), ir.shape(expand.inputs[0])
    return all(n == 1 or same(n, w) for n, w in zip(narrow, wide[len(wide) - len(narrow) :], strict=True))


Rule = Callable[[SizeEmitter, gs.Node, gs.Variable, "ir.Tensor"], "list[gs.Node] | None"]


def _rule(user: gs.Node) -> Rule | None:
    if user.domain:
        return None
    if user.op in _ELEMENTWISE:
        return _through_elementwise
    if user.op in _VIEWS:
        return _through_view
    return {"Transpose": _through_view, "MatMul": _into_matmul, "Gather": _through_gather, "Expand": _into_expand}.get(
        user.op
    )


def _behind(emitter: SizeEmitter, user: gs.Node, dims: Sequence[Dim]) -> list[gs.Node]:
    """Lets ``user`` give ``dims`` and expands its result to what it gave before."""
    out = user.outputs[0]
    small = emitter.editor.variable(f"{out.name}.small", out.dtype, dims)
    user.outputs = [small]
    return [_expand(emitter, small, out)]


def _expand(emitter: SizeEmitter, small: ir.Tensor, out: gs.Variable) -> gs.Node:
    target = emitter.vector(expand_target(ir.shape(small), ir.shape(out)))
    return emitter.editor.node("Expand", [small, target], [out], f"{out.name}.spread")


def _through_elementwise(
    emitter: SizeEmitter, user: gs.Node, spread: gs.Variable, x: ir.Tensor
) -> list[gs.Node] | None:
    if not _agree([ir.shape(t) for t in user.inputs]):
        return None
    inputs = [x if t is spread else t for t in user.inputs]
    dims = _broadcast([ir.shape(t) for t in inputs])
    user.inputs = inputs
    return [] if ir.same_shape(dims, ir.shape(user.outputs[0])) else _behind(emitter, user, dims)


def _columns(shapes: Sequence[Sequence[Dim]]) -> list[tuple[Dim, ...]]:
    """The dimensions that meet in each axis."""
    rank = max(map(len, shapes))
    return list(zip(*([1] * (rank - len(s)) + list(s) for s in shapes), strict=True))


def _broadcast(shapes: Sequence[Sequence[Dim]]) -> list[Dim]:
    return [next((d for d in column if d != 1), 1) for column in _columns(shapes)]


def _agree(shapes: Sequence[Sequence[Dim]]) -> bool:
    """Whether all dimensions that meet are known to be equal or 1: if data decides one, a run has to see both."""
    wide = [[d for d in column if d != 1] for column in _columns(shapes)]
    return all(same(d, column[0]) for column in wide for d in column)


def _through_view(emitter: SizeEmitter, user: gs.Node, spread: gs.Variable, x: ir.Tensor) -> list[gs.Node] | None:
    """Behind a movement that keeps the repeated axes in one piece."""
    wide, out = ir.shape(spread), ir.shape(user.outputs[0])
    narrow = [1] * (len(wide) - len(ir.shape(x))) + list(ir.shape(x))
    start = View.of(gs.Variable("x", shape=[format_dim(d) for d in wide]))
    repeated = {
        id(start.source[i][0]) for i, (n, w) in enumerate(zip(narrow, wide, strict=True)) if not same(n, w) and w != 1
    }
    if user.op == "Transpose":
        end: View | None = start.transposed(user.attrs.get("perm") or range(len(wide))[::-1])
    else:
        end = start.reshaped(out)
    if end is None:
        return None
    for group in end.axes:
        if len(group) > 1 and any(id(a) in repeated for a in group):
            return None
    if not repeated <= {id(a) for group in end.axes for a in group}:
        return None
    dims = [1 if group and id(group[0]) in repeated else d for group, d in zip(end.axes, out, strict=True)]
    target, base = user.outputs[0], user.outputs[0].name
    if user.op == "Transpose":
        x = x if len(ir.shape(x)) == len(wide) else reshape(emitter, x, narrow, base)
        user.inputs = [x]
        return _behind(emitter, user, dims)
    user.outputs.clear()
    return [_expand(emitter, reshape(emitter, x, dims, base), target)]


def _into_matmul(emitter: SizeEmitter, user: gs.Node, spread: gs.Variable, x: ir.Tensor) -> list[gs.Node] | None:
    """A matrix product broadcasts its leading axes."""
    inputs = [x if t is spread else t for t in user.inputs]
    left, right = (ir.shape(t) for t in inputs)
    wide = ir.shape(spread)
    if min(len(left), len(right)) < 2 or not ir.same_shape(ir.shape(x)[-2:], wide[-2:]):
        return None
    if not ir.same_shape([*_broadcast([left[:-2], right[:-2]]), left[-2], right[-1]], ir.shape(user.outputs[0])):
        return None
    user.inputs = inputs
    return []


def _through_gather(emitter: SizeEmitter, user: gs.Node, spread: gs.Variable, x: ir.Tensor) -> list[gs.Node] | None:
    """Repeated indices gather repeated rows."""
    data, indices = user.inputs
    if indices is not spread or data is spread:
        return None
    axis = user.attrs.get("axis", 0)
    narrow = [1] * (len(ir.shape(spread)) - len(ir.shape(x))) + list(ir.shape(x))
    x = x if len(ir.shape(x)) == len(narrow) else reshape(emitter, x, narrow, user.outputs[0].name)
    dims = ir.shape(data)
    user.inputs = [data, x]
    return _behind(emitter, user, [*dims[:axis], *narrow, *dims[axis + 1 :]])


def _into_expand(emitter: SizeEmitter, user: gs.Node, spread: gs.Variable, x: ir.Tensor) -> list[gs.Node] | None:
    out = user.outputs[0]
    if user.inputs[0] is not spread:
        return None
    user.outputs.clear()
    return [_expand(emitter, x, out)]
