"""What no GEMM took becomes few kernels: each maximal group of pointwise operators is one ``Map``.

Rule: from a pointwise operator whose result must be stored (a *sink*), the group grows upwards over every pointwise
operator, and every node of shape arithmetic, all of whose readers are in the group already. What is inside is never stored.
A RowMoments of the sink joins it: the embedding lookups, their sum and its row statistics are one kernel.

Conditions: none on what the operators are; Gather, Slice, Concat, Transpose and the like only rename indices.
Refused: a group of views alone (Reshape, Squeeze, Unsqueeze, Flatten) needs no kernel, and shape arithmetic needs none.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_graphsurgeon as gs

from coda_edge.frontend import infer
from coda_edge.ir import (
    DOMAIN,
    POINTWISE,
    VIEWS,
    GraphEditor,
    Tensor,
    consumers,
    in_order,
    is_output,
    remove_dead,
    remove_nodes,
    sort,
)

from .base import Pass, PassLog, sources

#: Constants of up to this many elements are written into a Map's body; larger ones are its inputs.
LITERAL_SIZE = 16


def run(graph: gs.Graph, log: PassLog) -> int:
    """Groups all pointwise operators; returns the number of Maps."""
    remove_dead(graph)
    values = infer(graph).values
    known = {id(n) for n in graph.nodes if n.outputs and all(o.name in values for o in n.outputs)}
    editor = GraphEditor(graph)
    taken: set[int] = set()
    count = 0
    for sink in reversed(in_order(graph)):
        if id(sink) in taken or id(sink) in known or sink.domain or sink.op not in POINTWISE - VIEWS:
            continue
        group = _group(graph, sink, known)
        taken.update(id(n) for n in group)
        _replace(editor, group, sink)
        count += 1
    if count:
        remove_dead(graph)
        sort(graph)
    return count


def _group(graph: gs.Graph, sink: gs.Node, known: set[int]) -> list[gs.Node]:
    """The sink and all that only it needs, in topological order."""
    inside = {id(sink)}
    group = [sink]
    for node in reversed(in_order(graph)):
        eligible = not node.domain and (node.op in POINTWISE or id(node) in known)
        if not eligible or id(node) in inside or any(is_output(graph, o) for o in node.outputs):
            continue
        users = [u for o in node.outputs for u in consumers(o)]
        if users and all(id(u) in inside for u in users):
            inside.add(id(node))
            group.append(node)
    group += [u for o in sink.outputs for u in consumers(o) if u.op == "RowMoments" and u.domain == DOMAIN]
    return [n for n in in_order(graph) if any(n is g for g in group)]


def _replace(editor: GraphEditor, group: list[gs.Node], sink: gs.Node) -> None:
    made = {id(o) for n in group for o in n.outputs}
    inputs = _distinct(t for n in group for t in n.inputs if id(t) not in made and not _is_literal(t))
    outputs = [o for n in group if n is sink or n.op == "RowMoments" for o in n.outputs]
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

    nodes = [
        gs.Node(
            op=n.op,
            name=n.name,
            attrs=dict(n.attrs),
            inputs=[copy(t) for t in n.inputs],
            outputs=[copy(t) for t in n.outputs],
            domain=n.domain,
        )
        for n in group
    ]
    return gs.Graph(nodes=nodes, inputs=[copy(t) for t in inputs], outputs=[copy(t) for t in outputs])


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(t): t for t in tensors}.values())


PASS = Pass("fuse_map", run)
