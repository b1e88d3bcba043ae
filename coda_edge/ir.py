"""Questions and edits on the graph IR (``onnx_graphsurgeon.Graph``) that passes share.

A *tensor* is a ``gs.Variable`` or a ``gs.Constant``. Shapes are read with :func:`shape`, as ints and sympy expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs
from onnx import helper

from .epilogue.ops import OPERATORS, Group
from .symbolic import Dim, format_dim, parse_dim, same

Tensor: TypeAlias = "gs.Variable | gs.Constant"
Array: TypeAlias = npt.NDArray[Any]

DOMAIN = "coda"

#: ONNX elementwise operators, with the name of the epilogue operator that computes the same.
ELEMENTWISE: dict[str, str] = {
    op.onnx: op.name for op in OPERATORS.values() if op.group is Group.POINTWISE and isinstance(op.onnx, str)
}
#: Operators that only rename the indices of the elements, in the same order: no kernel is needed for one alone.
VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})
#: Operators whose every output element is one expression of a few input elements.
POINTWISE = (
    frozenset(ELEMENTWISE)
    | VIEWS
    | frozenset({"Transpose", "Slice", "Concat", "Gather", "GatherND", "GatherElements", "Expand", "Tile", "Pad"})
    | frozenset({"Range", "ConstantOfShape", "OneHot", "EyeLike", "Trilu", "Mod", "IsInf", "Xor"})
    | frozenset({"BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot"})
)


def shape(tensor: Tensor) -> tuple[Dim, ...]:
    """The dimensions of ``tensor``, which the frontend has annotated."""
    if isinstance(tensor, gs.Constant):
        return tuple(int(d) for d in tensor.shape)
    return tuple(parse_dim(d) for d in tensor.shape)


def set_shape(tensor: gs.Variable, dims: Sequence[Dim]) -> None:
    """Annotates ``tensor``."""
    tensor.shape = [format_dim(d) for d in dims]


def same_shape(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether two shapes are equal for all values of their symbols."""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def producer(tensor: Tensor) -> gs.Node | None:
    """The node that computes ``tensor``; None for inputs and constants."""
    return tensor.inputs[0] if isinstance(tensor, gs.Variable) and tensor.inputs else None


def made_by(tensor: Tensor, *ops: str) -> gs.Node | None:
    """The producer of ``tensor`` if it is one of ``ops``."""
    node = producer(tensor)
    return node if node is not None and node.op in ops else None


def consumers(tensor: Tensor) -> list[gs.Node]:
    """The distinct nodes that read ``tensor``."""
    return list({id(n): n for n in tensor.outputs}.values())


def is_output(graph: gs.Graph, tensor: Tensor) -> bool:
    """Whether ``tensor`` is an output of the graph."""
    return any(tensor is o for o in graph.outputs)


def sole_consumer(graph: gs.Graph, tensor: Tensor) -> gs.Node | None:
    """The one node that reads ``tensor``, if there is one and the graph does not return ``tensor``."""
    users = consumers(tensor)
    return users[0] if len(users) == 1 and not is_output(graph, tensor) else None


def constant_value(tensor: Tensor) -> Array | None:
    """The value of a constant, else None."""
    return np.asarray(tensor.values) if isinstance(tensor, gs.Constant) else None


def scalar_value(tensor: Tensor) -> float | None:
    """The value of a constant with one element, else None."""
    value = constant_value(tensor)
    return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None


def column_value(tensor: Tensor, n: int) -> Array | None:
    """A constant that broadcasts along the last axis only, as ``[n]``; None for anything else."""
    value = constant_value(tensor)
    if value is None or value.size not in (1, n) or (value.size == n and n > 1 and value.shape[-1] != n):
        return None
    return np.broadcast_to(value.reshape(-1), (n,))


def reduces_rows(node: gs.Node, op: str) -> bool:
    """Whether ``node`` is ``op`` (a ReduceX) over the last axis only, keeping it as 1."""
    if node.op != op or not node.attrs.get("keepdims", 1) or len(node.inputs) != 2:
        return False
    axes = constant_value(node.inputs[1])
    rank = len(shape(node.inputs[0]))
    return axes is not None and axes.size == 1 and int(axes.reshape(-1)[0]) % rank == rank - 1


def column_range(node: gs.Node) -> tuple[int, int] | None:
    """The column range, if ``node`` slices the last axis by constants."""
    if node.op != "Slice" or len(node.inputs) < 4:
        return None
    bounds = [constant_value(t) for t in node.inputs[1:]]
    if any(b is None or b.size != 1 for b in bounds):
        return None
    start, end, axis, *step = (int(np.asarray(b).reshape(-1)[0]) for b in bounds)
    dims = shape(node.inputs[0])
    n = dims[-1]
    if axis % len(dims) != len(dims) - 1 or step not in ([], [1]) or not isinstance(n, int):
        return None
    first, last, _ = slice(start, end).indices(n)
    return (first, last) if first < last else None


class Names:
    """Fresh tensor and node names for one graph."""

    def __init__(self, graph: gs.Graph) -> None:
        self._taken = set(graph.tensors()) | {n.name for n in graph.nodes}
        self._last: dict[str, int] = {}

    def fresh(self, base: str) -> str:
        """``base``, or ``base`` with the first free number behind it."""
        name, i = base, self._last.get(base, 0)
        while name in self._taken:
            i += 1
            name = f"{base}.{i}"
        self._last[base] = i
        self._taken.add(name)
        return name


def rewire(node: gs.Node, old: Tensor, new: Tensor) -> None:
    """Makes ``node`` read ``new`` wherever it reads ``old``."""
    for i, tensor in enumerate(node.inputs):
        if tensor is old:
            node.inputs[i] = new


class GraphEditor:
    """Adds nodes to a graph, with names and shapes."""

    def __init__(self, graph: gs.Graph) -> None:
        self.graph = graph
        self.names = Names(graph)

    def constant(self, base: str, value: Array) -> gs.Constant:
        """A new constant."""
        return gs.Constant(self.names.fresh(base), np.asarray(value, order="C"))

    def variable(self, base: str, dtype: Any, dims: Sequence[Dim]) -> gs.Variable:
        """A new variable."""
        return gs.Variable(self.names.fresh(base), dtype=dtype, shape=[format_dim(d) for d in dims])

    def node(
        self,
        op: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[gs.Variable],
        name: str,
        domain: str | None = None,
        **attrs: Any,
    ) -> gs.Node:
        """A new node of the graph, its name made fresh from ``name``."""
        node = gs.Node(
            op=op,
            name=self.names.fresh(name),
            attrs=attrs,
            inputs=list(inputs),
            outputs=list(outputs),
            domain=domain,
        )
        self.graph.nodes.append(node)
        return node

    def apply(self, op: str, inputs: Sequence[Tensor], dims: Sequence[Dim], base: str, **attrs: Any) -> gs.Variable:
        """A new node with one output of shape ``dims`` and the dtype of its first input; returns the output."""
        out = self.variable(base, inputs[0].dtype, dims)
        self.node(op, inputs, [out], base, **attrs)
        return out

    def replace(self, old: gs.Variable, new: gs.Variable) -> None:
        """Makes every reader of ``old`` read ``new``; a graph output keeps its name."""
        for user in consumers(old):
            rewire(user, old, new)
        if not is_output(self.graph, old):
            return
        source = producer(new)
        if source is None or is_output(self.graph, new):
            old.inputs.clear()
            self.node("Identity", [new], [old], f"{old.name}.copy")
            return
        old.inputs.clear()
        source.outputs = [old if t is new else t for t in source.outputs]
        for user in consumers(new):
            rewire(user, new, old)


def copy_nodes(nodes: Iterable[gs.Node], copy: Callable[[Tensor], Tensor]) -> list[gs.Node]:
    """The same nodes over other tensors: ``copy`` gives the one that stands for a tensor."""
    return [
        gs.Node(
            op=n.op,
            name=n.name,
            attrs=dict(n.attrs),
            inputs=[copy(t) for t in n.inputs],
            outputs=[copy(t) for t in n.outputs],
            domain=n.domain,
        )
        for n in nodes
    ]


def remove_nodes(graph: gs.Graph, nodes: Iterable[gs.Node]) -> None:
    """Takes ``nodes`` out of the graph and unlinks their tensors."""
    gone = {id(n) for n in nodes}
    removed = [n for n in graph.nodes if id(n) in gone]
    # Not by the lists' own clear(): it searches all readers of a tensor for each use, and a constant may have thousands.
    for tensor in {id(t): t for n in removed for t in n.inputs}.values():
        readers = [n for n in tensor.outputs if id(n) not in gone]
        list.clear(tensor.outputs)
        list.extend(tensor.outputs, readers)
    for node in removed:
        list.clear(node.inputs)
        node.outputs.clear()
    graph.nodes = [n for n in graph.nodes if id(n) not in gone]


def reads(node: gs.Node) -> list[Tensor]:
    """What ``node`` reads: its inputs, and of the tensors around it those that its nested graphs read or return."""
    nested = [g for g in node.attrs.values() if isinstance(g, gs.Graph)] if node.domain != DOMAIN else []
    if not nested:
        return list(node.inputs)
    outside: list[Tensor] = list(node.inputs)
    for graph in nested:
        made = {id(t) for t in (*graph.inputs, *(t for n in graph.nodes for t in n.outputs))}
        used = [*(t for n in graph.nodes for t in reads(n)), *graph.outputs]
        outside.extend(t for t in used if id(t) not in made)
    return outside


def remove_dead(graph: gs.Graph) -> None:
    """Removes every node whose results nobody reads."""
    live = {id(t) for t in graph.outputs}
    keep: list[gs.Node] = []
    for node in reversed(in_order(graph)):
        if any(id(t) in live for t in node.outputs):
            keep.append(node)
            live.update(id(t) for t in reads(node))
    kept = {id(n) for n in keep}
    remove_nodes(graph, [n for n in graph.nodes if id(n) not in kept])


def own_values(graph: gs.Graph) -> None:
    """Reads what ``graph``, imported from a model, would read of it when it is asked for: nothing keeps the model in memory then."""
    graph.import_domains = [helper.make_opsetid(o.domain, o.version) for o in graph.import_domains or ()]
    for node in graph.nodes:
        for held in (*node.inputs, *node.attrs.values()):
            if isinstance(held, gs.Constant):
                held.values  # noqa: B018
            elif isinstance(held, gs.Graph):
                own_values(held)


def in_order(graph: gs.Graph) -> list[gs.Node]:
    """The nodes in an order in which each comes after those it reads from, stable otherwise."""
    order: list[gs.Node] = []
    state: dict[int, bool] = {}
    for root in graph.nodes:
        stack: list[tuple[gs.Node, bool]] = [(root, False)]
        while stack:
            node, done = stack.pop()
            if done:
                order.append(node)
                continue
            if id(node) in state:
                continue
            state[id(node)] = True
            stack.append((node, True))
            sources = [producer(t) for t in reads(node)]
            stack.extend((s, False) for s in reversed(sources) if s is not None and id(s) not in state)
    return order


def sort(graph: gs.Graph) -> None:
    """Puts the nodes of ``graph`` into topological order."""
    graph.nodes = in_order(graph)


def descendants(node: gs.Node) -> set[int]:
    """The ids of all nodes that depend on ``node``, itself included."""
    seen: set[int] = set()
    stack = [node]
    while stack:
        n = stack.pop()
        if id(n) in seen:
            continue
        seen.add(id(n))
        stack.extend(user for t in n.outputs for user in t.outputs)
    return seen
