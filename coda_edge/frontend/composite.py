"""Operators that are known by a decomposition alone: those of other domains than ONNX's own, and rare ones of ONNX.

``composite`` registers a decomposition, and for the types of the outputs those of what it writes: so such an operator is one
function. ``refuse_foreign`` names those that nothing is known of, before anything is done to a model.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_graphsurgeon as gs

from .. import ir
from ..errors import UnsupportedOperator
from .builder import TABLE, Builder, Decomposition, decomposition
from .shapes import SHAPE_RULES, Call, Type, ask_onnx, infer_nested, shape_rule

MICROSOFT = "com.microsoft"

_LAYOUT = (
    "onnxruntime wrote it for the memory layout of one machine when it saved its optimised model: give the original model, or one saved "
    "at optimisation level basic or extended"
)
#: What to do about operators of a domain, by the domain.
_ADVICE = {
    "com.microsoft.nchwc": _LAYOUT,
    "com.ms.internal.nhwc": _LAYOUT,
    MICROSOFT: "it has no form in ONNX's own operators here: give the model as it was before onnxruntime's tools changed it",
}
_OTHERWISE = "only ONNX's own operators and most of com.microsoft's are known: export the model without it"


def composite(*ops: str, domain: str = MICROSOFT) -> Callable[[Decomposition], Decomposition]:
    """Registers the only way to write ``ops`` of ``domain`` in ONNX's own operators; their types follow from it."""

    def register(function: Decomposition) -> Decomposition:
        shape_rule(*ops, domain=domain)(lambda call: _types(call, function))
        return decomposition(*ops, domain=domain)(function)

    return register


def _types(call: Call, function: Decomposition) -> list[Type]:
    """The types of the outputs that ``function`` makes of ``call``'s node, tried on a copy."""
    graph = gs.Graph(opset=call.opset)
    inputs: list[ir.Tensor] = []
    for tensor in call.node.inputs:
        if isinstance(tensor, gs.Constant):
            inputs.append(gs.Constant(tensor.name, tensor.values))
        elif tensor.name:
            index = len(inputs)
            variable = gs.Variable(tensor.name, dtype=call.dtype(index))
            ir.set_shape(variable, call.shape(index))
            inputs.append(variable)
        else:
            inputs.append(gs.Variable.empty())
    outputs = [gs.Variable(f"{t.name}.untyped" if t.name else "") for t in call.node.outputs]
    copy = gs.Node(call.node.op, call.name, call.node.attrs, inputs, outputs, call.node.domain)
    found = function(Builder(ir.GraphEditor(graph), copy))
    if found is None:
        return ask_onnx(call)
    graph.outputs = [found] if isinstance(found, gs.Variable | gs.Constant) else list(found)[: len(outputs)]
    return infer_nested(call, graph)


def refuse_foreign(graph: gs.Graph) -> None:
    """Raises UnsupportedOperator for an operator of another domain that nothing is known of, with what the user can do."""
    for node in graph.nodes:
        key = (node.domain or "", node.op)
        if key[0] not in ("", "ai.onnx", ir.DOMAIN) and key not in TABLE and key not in SHAPE_RULES:
            raise UnsupportedOperator(f"{node.domain}::{node.op}", node.name, _ADVICE.get(node.domain, _OTHERWISE))
