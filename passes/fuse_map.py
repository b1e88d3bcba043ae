"""What no GEMM took becomes few kernels: each maximal group of pointwise operators is one ``Map``.

Rule: from a pointwise operator whose result must be stored (a *sink*), the group grows upwards over every pointwise
operator, and every node of shape arithmetic, all of whose readers are in the group already. What is inside is never stored.
Row statistics of the sink join it: RowMoments, and sums over the last axis (ReduceSum, ReduceMean, ReduceSumSquare) of the sink or of
what elementwise operators make of it for them alone. So embedding lookups, their sum and its norm's statistics are one kernel.

Row statistics within a group, of cheap operators, that only elementwise operators of the same rows read are computed in the kernel, once
a row: so a norm of each head and the rotation behind it are one kernel.

Groups whose sinks have one shape, and which read one tensor or results of one node, are one group of several sinks if none needs
another's result; what only they need joins then. So the cosines and sines of angles are one kernel, and so are both ends of a cache.
What is made of sizes alone by cheap operators (positions, zeros), or one element of single elements, is made again in each group that
reads it.

What sizes are read from (``SymbolicInfo.sources``) is stored: all sizes of a kernel are known when it begins.

Conditions: none on what the operators are; Gather, Slice, Concat, Transpose and the like only rename indices.
Refused: a group of views alone (Reshape, Squeeze, Unsqueeze, Flatten, a Transpose of axes of 1) needs no kernel, and shape arithmetic
needs none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge.epilogue.ops import OPERATORS
from coda_edge.frontend import infer
from coda_edge.frontend.sizes import reshape_target
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
from coda_edge.symbolic import product, same

from .base import Pass, PassLog, sources

#: Constants of up to this many elements are written into a Map's body; larger ones are its inputs.
LITERAL_SIZE = 16
_ROW_SUMS = ("ReduceSum", "ReduceMean", "ReduceSumSquare")


_MADE_OF_SIZES = frozenset({"Range", "ConstantOfShape", "EyeLike"})


@dataclass
class _Group:
    """Nodes that become a Map by id: ``sinks``, what ``ends`` in statistics of one, and what only they need."""

    sinks: list[gs.Node]
    ends: list[gs.Node]
    inside: set[int]


@dataclass(frozen=True)
class _Grouping:
    """``known``: nodes whose results sizes determine; ``free``: those that are better done again than stored; ``sources``: those from whose
    results sizes are read; ``inner``: statistics within a group, by id.
    """

    graph: gs.Graph
    known: set[int]
    free: set[int]
    sources: set[int]
    inner: set[int]


def run(graph: gs.Graph, log: PassLog) -> int:
    """Groups all pointwise operators; returns the number of Maps."""
    remove_dead(graph)
    _view_moves(graph)
    _expand_moments(graph)
    info = infer(graph)
    known = {id(n) for n in graph.nodes if n.outputs and all(o.name in info.values for o in n.outputs)}
    read = {id(n) for n in graph.nodes if any(o.name in info.sources for o in n.outputs)}
    inner = {id(n) for n in graph.nodes if _is_inner(graph, n)}
    grouping = _Grouping(graph, known, _free(graph, known) - read, read, inner)
    groups = _joined(grouping, _groups(grouping))
    _replace(grouping, groups)
    if groups:
        remove_dead(graph)
        sort(graph)
    return len(groups)


def _free(graph: gs.Graph, known: set[int]) -> set[int]:
    """The nodes that cost next to nothing and read no tensor."""
    free: set[int] = set()
    for node in in_order(graph):
        cheap = node.op in _MADE_OF_SIZES or (node.op in ELEMENTWISE and OPERATORS[ELEMENTWISE[node.op]].flops <= 1)
        sources = [producer(t) for t in node.inputs if not _is_literal(t)]
        alone = all(s is not None and (id(s) in known or id(s) in free) for s in sources)
        single = (node.op in ELEMENTWISE or node.op in VIEWS) and _is_single(node)
        if not node.domain and (((cheap or node.op in VIEWS) and alone) or single) and id(node) not in known:
            free.add(id(node))
    return free


def _is_single(node: gs.Node) -> bool:
    """Whether one element is made of single elements."""
    tensors = [*node.outputs, *(t for t in node.inputs if not _is_literal(t))]
    return all(same(d, 1) for t in tensors for d in shape(t))


def _groups(grouping: _Grouping) -> list[_Group]:
    """A group for each sink, those that need others' results first."""
    statistics = _statistics(grouping.graph, grouping.inner)
    members = {id(n) for nodes in statistics.values() for n in nodes}
    groups: list[_Group] = []
    for sink in reversed(in_order(grouping.graph)):
        if id(sink) in grouping.known or sink.domain or sink.op not in POINTWISE - VIEWS:
            continue
        if id(sink) in members and not (id(sink) in grouping.free and _is_stored(grouping, sink, members)):
            continue
        ends = statistics.get(id(sink), [])
        group = _Group([sink], ends, _upwards(grouping, [sink], ends))
        members |= group.inside
        groups.append(group)
    return groups


def _is_stored(grouping: _Grouping, node: gs.Node, members: set[int]) -> bool:
    """Whether something in no group reads a result of ``node``, as it is or through views."""
    for out in node.outputs:
        if is_output(grouping.graph, out):
            return True
        for user in consumers(out):
            view = user.op in VIEWS and not user.domain
            if id(user) not in members and not (view and not _is_stored(grouping, user, members)):
                return True
    return False


def _joined(grouping: _Grouping, groups: list[_Group]) -> list[_Group]:
    """``groups``, those that can be one kernel joined, and what only they need then with them."""
    groups = list(groups)
    at = 0
    while at < len(groups):
        group = groups[at]
        other = next((g for g in groups[at + 1 :] if _alike(grouping, group, g) and _apart(groups, group, g)), None)
        if other is None:
            at += 1
            continue
        group.sinks += other.sinks
        group.ends += other.ends
        group.inside = _upwards(grouping, group.sinks, group.ends)
        groups = [g for g in groups if g is group or (g is not other and _is_left(grouping, g, group))]
        at = 0
    return groups


def _is_left(grouping: _Grouping, group: _Group, taker: _Group) -> bool:
    """Takes out of ``group`` the sinks that only ``taker`` needs; whether others are left."""
    kept = [n for n in group.sinks if id(n) not in taker.inside - grouping.free]
    if len(kept) < len(group.sinks):
        group.sinks = kept
        group.inside = _upwards(grouping, kept, group.ends)
    return bool(kept)


def _alike(grouping: _Grouping, a: _Group, b: _Group) -> bool:
    """Whether the two run over one shape, one of them without statistics, and read one tensor or results of one node."""
    if (a.ends and b.ends) or not same_shape(shape(a.sinks[0].outputs[0]), shape(b.sinks[0].outputs[0])):
        return False
    return bool(_read(grouping, a) & _read(grouping, b))


def _read(grouping: _Grouping, group: _Group) -> set[int]:
    """The tensors that a group reads, and the nodes that made them, by id."""
    found: set[int] = set()
    for node in grouping.graph.nodes:
        if id(node) not in group.inside:
            continue
        for t in node.inputs:
            source = producer(t)
            if _is_literal(t) or (source is not None and id(source) in group.inside | grouping.known):
                continue
            found.add(id(t) if source is None else id(source))
    return found


def _apart(groups: list[_Group], a: _Group, b: _Group) -> bool:
    """Whether neither needs a result of the other, groups being done as a whole."""
    return not any(_reaches(groups, x, y) for x, y in ((a, b), (b, a)))


def _reaches(groups: list[_Group], start: _Group, goal: _Group) -> bool:
    hosts = {id(n): g for g in groups for n in g.sinks}
    wanted = {id(n) for n in (*goal.sinks, *goal.ends)}
    seen: set[int] = set()
    stack = [u for n in (*start.sinks, *start.ends) for t in n.outputs for u in t.outputs]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        if id(node) in wanted:
            return True
        seen.add(id(node))
        host = hosts.get(id(node))
        stack += [n for n in (host.sinks if host is not None else []) if id(n) not in seen]
        stack += [u for t in node.outputs for u in t.outputs]
    return False


def _statistics(graph: gs.Graph, inner: set[int]) -> dict[int, list[gs.Node]]:
    """For each pointwise node by id: the row statistics of its result that join it, with the nodes between, which nobody else needs."""
    found: dict[int, list[gs.Node]] = {}
    joining: set[int] = set()
    for node in reversed(in_order(graph)):
        if id(node) in inner or not (_is_statistic(node) or _leads_to(graph, node, joining)):
            continue
        source = producer(_operand(node))
        if source is None or source.domain or source.op not in POINTWISE - VIEWS:
            continue
        joining.add(id(node))
        found.setdefault(id(source), []).extend([node, *found.pop(id(node), [])])
    return found


def _is_statistic(node: gs.Node) -> bool:
    return (node.op == "RowMoments" and node.domain == DOMAIN) or any(reduces_rows(node, op) for op in _ROW_SUMS)


def _is_inner(graph: gs.Graph, node: gs.Node) -> bool:
    """Whether ``node`` is a row sum of cheap operators, and all that follows is of its rows and ends in one sink."""
    stored = any(is_output(graph, o) for o in node.outputs)
    if not _is_statistic(node) or stored or not _is_cheap(node.inputs[0]) or _ends_a_map(graph, node.inputs[0]):
        return False
    rows = product(shape(node.outputs[0])[:-1])
    behind = {id(node)}
    sinks: list[gs.Node] = []
    waiting = [u for o in node.outputs for u in consumers(o)]
    while waiting:
        user = waiting.pop()
        if id(user) in behind:
            continue
        behind.add(id(user))
        out = user.outputs[0]
        users = consumers(out)
        if _is_statistic(user):
            if not _is_inner(graph, user):
                return False
        elif user.domain or not _keeps_rows(user):
            return False
        pointwise = [u for u in users if not u.domain and (u.op in POINTWISE - VIEWS or _is_statistic(u))]
        if is_output(graph, out) or len(pointwise) < len(users):
            sinks.append(user)
        waiting += pointwise
    return len(sinks) == 1 and same(product(shape(sinks[0].outputs[0])[:-1]), rows)


def _ends_a_map(graph: gs.Graph, tensor: Tensor) -> bool:
    """Whether a Map stores ``tensor`` in any case, and takes statistics of it at no cost."""
    source = producer(tensor)
    if source is None or source.domain or source.op not in POINTWISE - VIEWS:
        return False
    return is_output(graph, tensor) or any(
        u.domain or u.op not in POINTWISE for u in consumers(tensor) if not _is_statistic(u)
    )


def _view_moves(graph: gs.Graph) -> None:
    """A Transpose that moves axes of 1 alone is a view."""
    editor = GraphEditor(graph)
    for node in in_order(graph):
        if node.op != "Transpose" or node.domain:
            continue
        dims, out = shape(node.inputs[0]), shape(node.outputs[0])
        wide = [p for p in (int(p) for p in node.attrs["perm"]) if not same(dims[p], 1)]
        target = reshape_target(dims, out) if wide == sorted(wide) else None
        if target is not None:
            node.op, node.attrs = "Reshape", {}
            node.inputs = [node.inputs[0], editor.constant(f"{node.name}.axes", np.array(target, np.int64))]


def _expand_moments(graph: gs.Graph) -> None:
    """RowMoments that are taken within a group are means, of which a kernel has several as it has one."""
    editor = GraphEditor(graph)
    for node in in_order(graph):
        if node.op != "RowMoments" or not _is_inner(graph, node):
            continue
        x, (mean, var) = node.inputs[0], node.outputs
        dims, axis = shape(x), editor.constant(f"{mean.name}.axis", np.array([len(shape(x)) - 1], np.int64))
        node.outputs.clear()
        editor.node("ReduceMean", [x, axis], [mean], f"{mean.name}.mean", keepdims=1)
        centred = editor.apply("Sub", [x, mean], dims, f"{mean.name}.centred")
        square = editor.apply("Mul", [centred, centred], dims, f"{mean.name}.square")
        editor.node("ReduceMean", [square, axis], [var], f"{var.name}.mean", keepdims=1)
    remove_dead(graph)


def _keeps_rows(node: gs.Node) -> bool:
    """Whether the elements of a row of the result are of one row of the operands, whichever element it is."""
    if node.op == "Transpose":
        return int(node.attrs["perm"][-1]) == len(node.attrs["perm"]) - 1
    if node.op == "Concat":
        return int(node.attrs["axis"]) % len(shape(node.outputs[0])) == len(shape(node.outputs[0])) - 1
    return node.op in ELEMENTWISE or node.op == "Slice"


def _is_cheap(tensor: Tensor) -> bool:
    """Whether it costs little to compute ``tensor`` again, from what is stored or looked up."""
    node = producer(tensor)
    if node is None or node.domain or node.op not in POINTWISE:
        return True
    costly = node.op in ELEMENTWISE and OPERATORS[ELEMENTWISE[node.op]].flops > 4
    return not costly and all(_is_cheap(t) for t in node.inputs)


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


def _upwards(grouping: _Grouping, sinks: list[gs.Node], ends: list[gs.Node]) -> set[int]:
    """The sinks, their ends, and all that only they need, by id."""
    graph = grouping.graph
    start = {id(n) for n in sinks}
    inside = set(start)
    for node in reversed(in_order(graph)):
        plain = not node.domain and (node.op in POINTWISE or id(node) in grouping.known)
        eligible = plain or id(node) in grouping.inner
        if not eligible or id(node) in inside | grouping.sources:
            continue
        users = [id(u) in inside for o in node.outputs for u in consumers(o)]
        stored = any(is_output(graph, o) for o in node.outputs)
        if any(users) and (id(node) in grouping.free or (all(users) and not stored)):
            inside.add(id(node))
    return inside | {id(n) for n in ends}


def _replace(grouping: _Grouping, groups: list[_Group]) -> None:
    """Puts a Map in the place of each group."""
    editor = GraphEditor(grouping.graph)
    order = in_order(grouping.graph)
    maps = []
    for group in groups:
        nodes = [n for n in order if id(n) in group.inside]
        made = {id(o) for n in nodes for o in n.outputs}
        inputs = _distinct(t for n in nodes for t in n.inputs if id(t) not in made and not _is_literal(t))
        results = {id(n) for n in (*group.sinks, *(n for n in group.ends if n.op in ("RowMoments", *_ROW_SUMS)))}
        outputs = [o for n in nodes if id(n) in results for o in n.outputs]
        sink = group.sinks[0]
        name = sink.name or sink.outputs[0].name
        maps.append((inputs, outputs, f"{name}.map", _body(nodes, inputs, outputs), sources(nodes)))
    stored = {id(n) for g in groups for n in g.sinks}
    members = set().union(*(g.inside for g in groups))
    remove_nodes(
        grouping.graph, [n for n in order if id(n) in stored or id(n) in members - grouping.free - grouping.known]
    )
    for inputs, outputs, name, body, source in maps:
        editor.node("Map", inputs, outputs, name, domain=DOMAIN, body=body, source=source)


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
