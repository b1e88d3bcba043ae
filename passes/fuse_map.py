"""What no GEMM took becomes few kernels: each maximal group of pointwise operators is one ``Map``.

Rule: from a pointwise operator whose result must be stored (a *sink*), the group grows upwards over every pointwise
operator, and every node of shape arithmetic, all of whose readers are in the group already. What is inside is never stored.
Row statistics of the sink join it: RowMoments, and sums over the last axis (ReduceSum, ReduceMean, ReduceSumSquare) of the sink or of
what elementwise operators make of it for them alone. So embedding lookups, their sum and its norm's statistics are one kernel.

Conditions: none on what the operators are; Gather, Slice, Concat, Transpose and the like only rename indices.
Refused: a group of views alone (Reshape, Squeeze, Unsqueeze, Flatten) needs no kernel, and shape arithmetic needs none.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_graphsurgeon as gs

from coda_edge.frontend import infer
from coda_edge.ir import (
    DOMAIN,
    ELEMENTWISE,
    POINTWISE,
    VIEWS,
    GraphEditor,
    Tensor,
    consumers,
    copy_nodes,
    in_order,
    is_output,
    producer,
    reduces_rows,
    remove_dead,
    remove_nodes,
    same_shape,
    shape,
    sort,
)

from .base import Pass, PassLog, sources

#: Constants of up to this many elements are written into a Map's body; larger ones are its inputs.
LITERAL_SIZE = 16
_ROW_SUMS = ("ReduceSum", "ReduceMean", "ReduceSumSquare")


def run(graph: gs.Graph, log: PassLog) -> int:
    """Groups all pointwise operators; returns the number of Maps."""
    remove_dead(graph)
    values = infer(graph).values
    known = {id(n) for n in graph.nodes if n.outputs and all(o.name in values for o in n.outputs)}
    editor = GraphEditor(graph)
    statistics = _statistics(graph)
    taken = {id(n) for nodes in statistics.values() for n in nodes}
    count = 0
    for sink in reversed(in_order(graph)):
        if id(sink) in taken or id(sink) in known or sink.domain or sink.op not in POINTWISE - VIEWS:
            continue
        inside = _group(graph, sink, known) | {id(n) for n in statistics.get(id(sink), [])}
        group = [n for n in in_order(graph) if id(n) in inside]
        taken.update(id(n) for n in group)
        _replace(editor, group, sink)
        count += 1
    if count:
        remove_dead(graph)
        sort(graph)
    return count


def _statistics(graph: gs.Graph) -> dict[int, list[gs.Node]]:
    """For each pointwise node by id: the row statistics of its result that join it, with the nodes between, which nobody else needs."""
    found: dict[int, list[gs.Node]] = {}
    joining: set[int] = set()
    for node in reversed(in_order(graph)):
        if not (_is_statistic(node) or _leads_to(graph, node, joining)):
            continue
        source = producer(_operand(node))
        if source is None or source.domain or source.op not in POINTWISE - VIEWS:
            continue
        joining.add(id(node))
        found.setdefault(id(source), []).extend([node, *found.pop(id(node), [])])
    return found


def _is_statistic(node: gs.Node) -> bool:
    return (node.op == "RowMoments" and node.domain == DOMAIN) or any(reduces_rows(node, op) for op in _ROW_SUMS)


def _leads_to(graph: gs.Graph, node: gs.Node, joining: set[int]) -> bool:
    """Whether ``node`` is elementwise, of one tensor of its result's shape, and only nodes of ``joining`` need it."""
    if node.domain or node.op not in ELEMENTWISE or is_output(graph, node.outputs[0]):
        return False
    sources = {id(t) for t in node.inputs if not isinstance(t, gs.Constant)}
    users = consumers(node.outputs[0])
    one = len(sources) == 1 and same_shape(shape(_operand(node)), shape(node.outputs[0]))
    return one and bool(users) and all(id(u) in joining for u in users)


def _operand(node: gs.Node) -> Tensor:
    """The first input that is no constant."""
    return next((t for t in node.inputs if not isinstance(t, gs.Constant)), node.inputs[0])


def _group(graph: gs.Graph, sink: gs.Node, known: set[int]) -> set[int]:
    """The sink and all that only it needs."""
    inside = {id(sink)}
    for node in reversed(in_order(graph)):
        eligible = not node.domain and (node.op in POINTWISE or id(node) in known)
        if not eligible or id(node) in inside or any(is_output(graph, o) for o in node.outputs):
            continue
        users = [u for o in node.outputs for u in consumers(o)]
        if users and all(id(u) in inside for u in users):
            inside.add(id(node))
    return inside


def _replace(editor: GraphEditor, group: list[gs.Node], sink: gs.Node) -> None:
    made = {id(o) for n in group for o in n.outputs}
    inputs = _distinct(t for n in group for t in n.inputs if id(t) not in made and not _is_literal(t))
    outputs = [o for n in group if n is sink or n.op in ("RowMoments", *_ROW_SUMS) for o in n.outputs]
    body = _body(group, inputs, outputs)
    name = sink.name or sink.outputs[0].name
    source = sources(group)
    remove_nodes(editor.graph, group)
    editor.node("Map", inputs, outputs, f"{name}.map", domain=DOMAIN, body=body, source=source)


def _is_literal(tensor: Tensor) -> bool:
    """Whether ``tensor`` is written into the body: a small constant, or an absent optional input."""
    if isinstance(tensor, gs.Constant):
        return int(tensor.values.size) <= LITERAL_SIZE
    return not tensor.name


def _body(group: list[gs.Node], inputs: list[Tensor], outputs: list[Tensor]) -> gs.Graph:
    """The group as a graph of its own. Its tensors keep their names; large constants are inputs."""
    copies: dict[int, Tensor] = {}

    def copy(t: Tensor) -> Tensor:
        if id(t) not in copies:
            copies[id(t)] = (
                gs.Constant(t.name, t.values)
                if isinstance(t, gs.Constant) and _is_literal(t)
                else gs.Variable(t.name, dtype=t.dtype, shape=list(t.shape or ()))
            )
        return copies[id(t)]

    nodes = copy_nodes(group, copy)
    return gs.Graph(nodes=nodes, inputs=[copy(t) for t in inputs], outputs=[copy(t) for t in outputs])


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(t): t for t in tensors}.values())


PASS = Pass("fuse_map", run)
