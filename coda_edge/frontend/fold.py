"""Constant folding: whatever constants or shapes alone determine becomes a constant, computed by onnxruntime.

Also equal constants and equal nodes are merged here, and dead nodes removed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
from onnx.reference import ReferenceEvaluator

from .. import ir
from ..weights import store_as
from .shapes import SymbolicInfo, Values, constant_of
from .whole_numbers import Followed

# Operators that give another result each time.
RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
)
_SPREADING = ("Expand", "ConstantOfShape")


def inline_constants(graph: gs.Graph) -> None:
    """Makes every Constant node a ``gs.Constant``."""
    dead = [n for n in graph.nodes if n.op == "Constant" and not n.domain]
    for node in dead:
        output = node.outputs[0]
        node.outputs.clear()
        output.to_constant(constant_of(node))
    ir.remove_nodes(graph, dead)


def fold_values(graph: gs.Graph, info: SymbolicInfo) -> int:
    """Replaces variables whose value shapes determine as plain numbers; returns how many."""
    made: list[gs.Node] = []
    editor = ir.GraphEditor(graph)
    count = 0
    for node in graph.nodes:
        known = {t.name: v for t in node.outputs if (v := info.values.get(t.name)) is not None and _plain(v)}
        if len(known) == len(node.outputs):
            made.append(node)
            continue
        for output in (t for t in node.outputs if t.name in known):
            constant = editor.constant(f"{output.name}.value", known[output.name].astype(output.dtype))
            for user in ir.consumers(output):
                ir.rewire(user, output, constant)
                count += 1
    for node in made:
        outputs = list(node.outputs)
        node.outputs.clear()
        for output in outputs:
            output.to_constant(info.values[output.name].astype(output.dtype))
    ir.remove_nodes(graph, made)
    return len(made) + count


def _plain(value: Values) -> bool:
    return all(isinstance(v, int | float | np.generic) for v in value.flat)


def fold_constants(graph: gs.Graph, expand: bool = False) -> int:
    """Evaluates the nodes whose inputs are all constant; returns how many there were.

    Expand and its like only if ``expand``: they make large constants of small ones, and their readers may broadcast anyway.
    """
    known: set[int] = set()
    nodes = []
    for node in ir.in_order(graph):
        given = [t for t in node.inputs if t.name]
        ready = given and all(isinstance(t, gs.Constant) or id(t) in known for t in given)
        if node.domain or node.op in RANDOM or _has_graph(node) or (node.op in _SPREADING and not expand):
            continue
        if ready:
            nodes.append(node)
            known.update(id(t) for t in node.outputs)
    if not nodes:
        return 0
    inside = {id(n) for n in nodes}
    wanted = [
        t
        for n in nodes
        for t in n.outputs
        if t.name and (ir.is_output(graph, t) or any(id(user) not in inside for user in t.outputs))
    ]
    opset = graph.opset or 18
    values = [np.asarray(value) for value in evaluate(nodes, wanted, opset)]
    followed = Followed(lambda some, tensors: evaluate(some, tensors, opset))
    weights = [followed.weight(tensor, value) for tensor, value in zip(wanted, values, strict=True)]
    ir.remove_nodes(graph, nodes)
    for tensor, value, weight in zip(wanted, values, weights, strict=True):
        store_as(tensor, value, weight)
    return len(nodes)


def _has_graph(node: gs.Node) -> bool:
    return any(isinstance(v, gs.Graph) for v in node.attrs.values())


def evaluate(
    nodes: Sequence[gs.Node], wanted: Sequence[ir.Tensor], opset: int, given: Mapping[str, ir.Array] | None = None
) -> list[ir.Array]:
    """The values of ``wanted``, by those of ``given`` tensors. Constants are fed, not embedded: nothing is serialised but the nodes."""
    constants = {t.name: t for n in nodes for t in n.inputs if isinstance(t, gs.Constant) and t.name}
    feeds = {name: np.asarray(t.values) for name, t in constants.items()} | dict(given or {})
    graph = onnx.helper.make_graph(
        [gs.exporters.onnx_exporter.OnnxExporter.export_node(n) for n in nodes],
        "constants",
        [
            onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for name, v in feeds.items()
        ],
        [onnx.helper.make_empty_tensor_value_info(t.name) for t in wanted],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    model.ir_version = onnx.helper.find_min_ir_version_for(model.opset_import, ignore_unknown=True)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return list(session.run(None, feeds))
    except Exception:
        # Whatever onnxruntime lacks, the reference evaluator has.
        return list(ReferenceEvaluator(model).run(None, feeds))


#: The digest of each constant's data, by name; the data itself tells whether it is still that constant.
Digests: TypeAlias = "dict[str, tuple[ir.Array, Hashable]]"


def merge_constants(graph: gs.Graph, digests: Digests) -> None:
    """Makes constants of equal dtype, shape and data one. ``digests`` is kept between calls, so that none is read twice."""
    first: dict[Hashable, gs.Constant] = {}
    before = dict(digests)
    digests.clear()
    for tensor in graph.tensors().values():
        if not isinstance(tensor, gs.Constant) or not tensor.name:
            continue
        data = tensor.values
        known = before.get(tensor.name)
        digest = known[1] if known is not None and known[0] is data else _digest(np.asarray(data, order="C"))
        digests[tensor.name] = (data, digest)
        kept = first.setdefault(digest, tensor)
        if kept is not tensor and not ir.is_output(graph, tensor):
            for user in ir.consumers(tensor):
                ir.rewire(user, tensor, kept)


def _digest(data: ir.Array) -> Hashable:
    # A view of bytes: dtypes that NumPy does not know by itself (bfloat16) have no buffer of their own.
    content = data.reshape(-1).view(np.uint8).data if data.size else b""
    return (str(data.dtype), data.shape, hashlib.blake2b(content, digest_size=16).digest())


def merge_nodes(graph: gs.Graph) -> int:
    """Makes nodes of equal operator, attributes and inputs one; returns how many went."""
    editor = ir.GraphEditor(graph)
    first: dict[Hashable, gs.Node] = {}
    dead = []
    for node in ir.in_order(graph):
        if node.op in RANDOM or _has_graph(node):
            continue
        given = tuple(bool(t.name) for t in node.outputs)
        key = (node.op, node.domain or "", _attributes(node), tuple(t.name for t in node.inputs), given)
        kept = first.setdefault(key, node)
        if kept is node or any(ir.is_output(graph, t) for t in node.outputs):
            continue
        for old, new in zip(node.outputs, kept.outputs, strict=True):
            editor.replace(old, new)
        dead.append(node)
    ir.remove_nodes(graph, dead)
    return len(dead)


def _attributes(node: gs.Node) -> Hashable:
    return tuple(sorted((name, _frozen(value)) for name, value in node.attrs.items()))


def _frozen(value: Any) -> str:
    if isinstance(value, gs.Constant):
        return repr(_digest(np.asarray(value.values, order="C")))
    return repr(value)
