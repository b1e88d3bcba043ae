"""Rows in their own order: a matrix product with constant weights treats every row alike, so it comes before the rearranging.

Models that work on ``[S, B, K]``, or flatten to ``[B·S, K]``, rearrange rows before a projection and back after it. Moved
behind the projection (and behind a bias on its columns), the two rearrangements meet and cancel.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from .. import ir
from ..symbolic import Dim, product
from .movement import MOVES, Atom, View, plan, trace, write
from .shapes import SymbolicInfo
from .sizes import SizeEmitter

_COLUMNWISE = ("Add", "Sub", "Mul", "Div")


def sink_row_movement(graph: gs.Graph, info: SymbolicInfo) -> int:
    """Moves rearrangements of rows behind matrix products and columns; returns how many. Shapes must be annotated."""
    emitter, views = SizeEmitter(graph, info), trace(graph)
    replaced: set[str] = set()
    for node in ir.in_order(graph):
        if node.domain or not node.outputs:
            continue
        rule = _behind_product if node.op == "MatMul" else _behind_column if node.op in _COLUMNWISE else None
        data = next((t for t in node.inputs if t.name in views), None)
        if rule is None or data is None or views[data.name].root.name in replaced:
            continue
        moved = rule(emitter, node, data, views[data.name])
        if moved is not None:
            out = node.outputs[0]
            replaced.add(out.name)
            node.outputs.clear()
            emitter.editor.replace(out, write(emitter, moved, out.name))
    return len(replaced)


def _behind_product(emitter: SizeEmitter, node: gs.Node, data: gs.Variable, view: View) -> View | None:
    """The product of the rows in their source's order, as a view with the rows rearranged."""
    weight = node.inputs[1]
    if node.inputs[0] is not data or not isinstance(weight, gs.Constant) or len(weight.shape) != 2:
        return None
    groups = _source_order(view)
    if not groups or not view.axes[-1] or groups == [g for g in view.axes[:-1] if g]:
        return None
    ordered = View(view.root, view.source, [*groups, view.axes[-1]])
    gain = len(plan(view)) - len(plan(ordered))
    if gain < 0 or (gain == 0 and not _is_rearranged(node)) or (plan(view) and _splits_heads(node)):
        return None
    rows = write(emitter, ordered, data.name)
    width = int(weight.shape[1])
    dims: list[Dim] = [*(product(a.size for a in g) for g in groups), width]
    result = emitter.editor.apply("MatMul", [rows, weight], dims, node.outputs[0].name)
    column = [Atom(width)] if width != 1 else []
    return View(result, [*groups, column], [*view.axes[:-1], column])


def _splits_heads(node: gs.Node) -> bool:
    """Whether all that becomes of ``node``, but for operators on its columns, is ``[A, B, H·D]`` as ``[A, H, B, D]``.

    A product stores its result so at no cost, and several of them share one rearrangement before.
    """
    out = node.outputs[0]
    users = ir.consumers(out)
    if len(users) != 1 or len(ir.shape(out)) != 3:
        return False
    user = users[0]
    if user.op in _COLUMNWISE and _has_column(user):
        return _splits_heads(user)
    turned = ir.consumers(user.outputs[0]) if user.op == "Reshape" else []
    split = ir.shape(user.outputs[0])
    heads = len(split) == 4 and ir.same_shape(split[:2], ir.shape(out)[:2])
    return heads and len(turned) == 1 and turned[0].attrs.get("perm") in ([0, 2, 1, 3], [0, 2, 3, 1])


def _is_rearranged(node: gs.Node) -> bool:
    """Whether something rearranges the result of ``node``, possibly after operators on its columns."""
    users = ir.consumers(node.outputs[0])
    if any(u.op in MOVES for u in users):
        return True
    return any(_is_rearranged(u) for u in users if u.op in _COLUMNWISE and _has_column(u))


def _has_column(node: gs.Node) -> bool:
    width = ir.shape(node.outputs[0])[-1]
    return isinstance(width, int) and any(ir.column_value(t, width) is not None for t in node.inputs)


def _source_order(view: View) -> list[list[Atom]]:
    """The atoms of the rows in the order of the view's source, those of one source axis that stay in a row together."""
    rows = {id(a) for group in view.axes[:-1] for a in group}
    return [kept for group in view.source if (kept := [a for a in group if id(a) in rows])]


def _behind_column(emitter: SizeEmitter, node: gs.Node, data: gs.Variable, view: View) -> View | None:
    """A column added to (…) a rearranged product, done before the rearranging if that keeps the columns."""
    source = ir.made_by(view.root, "MatMul")
    if source is None or not view.axes[-1] or view.axes[-1] != view.source[-1] or not plan(view):
        return None
    side = 1 if node.inputs[0] is data else 0
    value = ir.constant_value(node.inputs[side])
    width = ir.shape(data)[-1]
    if value is None or value.size != width or value.ndim > len(view.axes) or value.shape[-1] != width:
        return None
    column = emitter.editor.constant(f"{node.inputs[side].name}.column", np.asarray(value).reshape(-1))
    operands = [view.root, column] if side else [column, view.root]
    result = emitter.editor.apply(node.op, operands, ir.shape(view.root), node.outputs[0].name)
    return View(result, view.source, view.axes)
