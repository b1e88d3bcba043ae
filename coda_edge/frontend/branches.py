"""Control flow that sizes decide: an If whose condition is known is its branch."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from .. import ir
from ..errors import UnsupportedOperator
from .fold import inline_constants
from .shapes import Call, Type, infer_nested, shape_rule

_CONTROL_FLOW = ("If", "Loop", "Scan", "SequenceMap")


@shape_rule("If")
def _if(call: Call) -> list[Type]:
    condition = call.value(0)
    if condition is None:
        raise _refusal(call.node)
    return infer_nested(call, _branch(call.node, bool(condition.item())))


def _branch(node: gs.Node, condition: bool) -> gs.Graph:
    return node.attrs["then_branch" if condition else "else_branch"]


def inline_branches(graph: gs.Graph) -> int:
    """Replaces each If of constant condition by the branch taken; returns how many.

    Raises UnsupportedOperator for control flow that data decides.
    """
    found = [n for n in graph.nodes if n.op in _CONTROL_FLOW and not n.domain]
    if not found:
        return 0
    editor = ir.GraphEditor(graph)
    for node in found:
        condition = ir.scalar_value(node.inputs[0]) if node.op == "If" else None
        if condition is None:
            raise _refusal(node)
        branch = _branch(node, bool(condition))
        inline_constants(branch)
        for inner in branch.nodes:
            inner.name = editor.names.fresh(inner.name or inner.op)
            for tensor in inner.outputs:
                tensor.name = editor.names.fresh(tensor.name) if tensor.name else ""
        results, outputs = list(branch.outputs), list(node.outputs)
        ir.remove_nodes(graph, [node])
        graph.nodes.extend(branch.nodes)
        for old, new in zip(outputs, results, strict=True):
            editor.replace(old, new)
    return len(found)


def _refusal(node: gs.Node) -> UnsupportedOperator:
    return UnsupportedOperator(
        node.op, node.name, "its path depends on data; export the model without control flow, or pin sizes with --shape"
    )
