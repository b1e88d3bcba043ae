"""Control flow without control: an If of known condition is its branch, any other is both branches and a choice.

1. An If whose condition follows from constants and sizes is replaced by the branch taken.
2. One whose condition data decides is computed both ways, and ``Where`` picks each result. Both branches must give results of the same
   dtypes and shapes, and neither may fail or draw random numbers: no gathers or scatters by indices that are computed.
3. A Loop or Scan is its body as often as it runs (``loops``); what repeats as data decides is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_graphsurgeon as gs

from .. import ir
from ..errors import UnsupportedOperator
from . import loops
from .fold import RANDOM, inline_constants
from .shapes import Call, Type, infer_nested, shape_rule

_CONTROL_FLOW = ("If", "Loop", "Scan", "SequenceMap")
# Operators that fail for some indices; of the branch not taken they might be any.
_INDEXED = frozenset({"Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "OneHot", "Resize"})
_ADVICE = "export the model without control flow, or pin sizes with --shape"


@shape_rule("If")
def _if(call: Call) -> list[Type]:
    condition = call.value(0)
    if condition is not None:
        return infer_nested(call, _branch(call.node, bool(condition.item())))
    _check_branches(call.node)
    results = [infer_nested(call, _branch(call.node, taken)) for taken in (True, False)]
    for (kind, dims), (other, others) in zip(*results, strict=True):
        if np.dtype(kind) != np.dtype(other) or not ir.same_shape(dims, others):
            why = f"data decides between results of {kind}{list(dims)} and {other}{list(others)}"
            raise UnsupportedOperator("If", call.name, f"{why}: {_ADVICE}")
    return results[0]


def _branch(node: gs.Node, condition: bool) -> gs.Graph:
    return node.attrs["then_branch" if condition else "else_branch"]


def _check_branches(node: gs.Node) -> None:
    """Raises UnsupportedOperator for a branch that must not be computed in vain."""
    for taken in (True, False):
        for inner in _branch(node, taken).nodes:
            indexed = inner.op in _INDEXED and len(inner.inputs) > 1 and not _is_constant(inner.inputs[1])
            if inner.op in RANDOM or inner.op in _CONTROL_FLOW[1:] or inner.domain or indexed:
                why = f"data decides whether {inner.op} (node '{inner.name}') is to be computed"
                raise UnsupportedOperator("If", node.name, f"{why}: {_ADVICE}")
            if inner.op == "If":
                _check_branches(inner)


def _is_constant(tensor: ir.Tensor) -> bool:
    return isinstance(tensor, gs.Constant) or ir.made_by(tensor, "Constant") is not None


def inline_branches(graph: gs.Graph) -> int:
    """Replaces each If by what its branches compute; returns how many.

    Raises UnsupportedOperator for control flow that cannot be written so.
    """
    found = [n for n in graph.nodes if n.op in _CONTROL_FLOW and not n.domain]
    if not found:
        return 0
    editor = ir.GraphEditor(graph)
    for node in found:
        if node.op not in _WRITTEN:
            raise UnsupportedOperator(node.op, node.name, f"it works on sequences: {_ADVICE}")
        outputs = list(node.outputs)
        results = _WRITTEN[node.op](editor, node)
        ir.remove_nodes(graph, [node])
        for old, new in zip(outputs, results, strict=True):
            editor.replace(old, new)
    return len(found)


def _choice(editor: ir.GraphEditor, node: gs.Node) -> list[ir.Tensor]:
    """What an If gives."""
    test = node.inputs[0]
    condition = ir.scalar_value(test)
    if condition is not None:
        return _inlined(editor, _branch(node, bool(condition)))
    sides = [_inlined(editor, _branch(node, taken)) for taken in (True, False)]
    return [_chosen(editor, test, *pair) for pair in zip(*sides, strict=True)]


_WRITTEN: dict[str, Callable[[ir.GraphEditor, gs.Node], list[ir.Tensor]]] = {
    "If": _choice,
    "Loop": loops.unroll,
    "Scan": loops.unroll,
}


def _inlined(editor: ir.GraphEditor, branch: gs.Graph) -> list[ir.Tensor]:
    """The results of ``branch``, its nodes moved to the outer graph under names of their own."""
    inline_constants(branch)
    results = list(branch.outputs)
    for inner in branch.nodes:
        inner.name = editor.names.fresh(inner.name or inner.op)
        for tensor in (*inner.outputs, *(t for t in inner.inputs if isinstance(t, gs.Constant))):
            tensor.name = editor.names.fresh(tensor.name) if tensor.name else ""
    editor.graph.nodes.extend(branch.nodes)
    return results


def _chosen(editor: ir.GraphEditor, test: ir.Tensor, yes: ir.Tensor, no: ir.Tensor) -> gs.Variable:
    """``yes`` or ``no``, as the scalar or one-element ``test`` says."""
    scalar = editor.constant(f"{test.name}.shape", np.zeros(0, np.int64))
    flag = editor.apply("Reshape", [test, scalar], (), f"{test.name}.flag")
    out = gs.Variable(editor.names.fresh(f"{yes.name}.chosen"))
    editor.node("Where", [flag, yes, no], [out], f"{yes.name}.chosen")
    return out
