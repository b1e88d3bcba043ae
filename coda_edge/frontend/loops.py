"""Loops without loops: a Loop or Scan whose number of turns is known before data is, is its body as many times.

1. A Scan takes as many turns as the axis that it scans is long.
2. A Loop takes as many as its limit says and its condition lets it: the condition is a constant, the same all along, or follows from
   constants and the number of the turn.
3. What each turn leaves for the outside is joined along a new axis (a Scan's: the axis that it names, in the direction that it names).

A body reads what stands around it. Refused, by name: a number of turns that data or a dynamic size decides, more than ``MOST_TURNS``, and
bodies of more than ``MOST_NODES`` nodes in all turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from .. import ir
from ..errors import UnsupportedOperator
from ..ir import Array
from ..symbolic import Dim
from .fold import evaluate, inline_constants
from .model import OPSET
from .shapes import Call, Type, Values, infer_nested, objects, shape_rule

#: The most turns of a loop that are written out, and the most nodes that this may take.
MOST_TURNS, MOST_NODES = 2048, 65536
_ADVICE = (
    "pin the size that it depends on with --shape, export the model without the loop (for text, one step with a cache), or let onnxruntime loop "
    "around the compiled body"
)


@dataclass(frozen=True)
class _Loop:
    """A node by its parts: the body's inputs are ``[turn, condition]`` (of a Loop), the states, and elements of what is scanned."""

    node: gs.Node
    body: gs.Graph
    states: int
    scanned: int

    @classmethod
    def of(cls, node: gs.Node) -> _Loop:
        scanned = int(node.attrs.get("num_scan_inputs", 0))
        states = len(node.inputs) - (scanned if node.op == "Scan" else 2)
        return cls(node, node.attrs["body"], states, scanned)

    @property
    def counted(self) -> bool:
        """Whether it is a Loop."""
        return bool(self.node.op == "Loop")

    @property
    def first_states(self) -> list[ir.Tensor]:
        return list(self.node.inputs[2:] if self.counted else self.node.inputs[: self.states])

    @property
    def sequences(self) -> list[ir.Tensor]:
        """What a Scan scans."""
        return [] if self.counted else list(self.node.inputs[self.states :])

    @property
    def results(self) -> list[ir.Tensor]:
        """The body's outputs, without its condition."""
        return list(self.body.outputs[1:] if self.counted else self.body.outputs)

    def has(self, index: int) -> bool:
        """Whether the node has an input."""
        return index < len(self.node.inputs) and bool(self.node.inputs[index].name)

    def axes(self, name: str, ranks: Sequence[int]) -> list[int]:
        """The axes that attribute ``scan_<name>_axes`` gives tensors of ``ranks``."""
        return [a % r for a, r in zip(self._listed(f"scan_{name}_axes", len(ranks)), ranks, strict=True)]

    def backwards(self, name: str, count: int) -> list[bool]:
        """Which of ``count`` tensors attribute ``scan_<name>_directions`` reverses."""
        return [bool(d) for d in self._listed(f"scan_{name}_directions", count)]

    def _listed(self, name: str, count: int) -> list[int]:
        given = self.node.attrs.get(name, [0] * count)
        return [int(i) for i in given]

    def error(self, why: str) -> UnsupportedOperator:
        return UnsupportedOperator(self.node.op, self.node.name or self.node.outputs[0].name, f"{why}: {_ADVICE}")

    def limited(self, turns: int) -> int:
        """``turns``, if they can be written out."""
        if turns > MOST_TURNS or turns * len(self.body.nodes) > MOST_NODES:
            raise self.error(
                f"its body of {len(self.body.nodes)} nodes runs {turns} times, which is too often to write it out"
            )
        return turns


@shape_rule("Loop", "Scan")
def _loop(call: Call) -> list[Type]:
    """The types after all turns: a state may grow, so the body is inferred for each turn until nothing changes."""
    loop = _Loop.of(call.node)
    first = 2 if loop.counted else 0
    turns = loop.limited(_turns(loop, call.value, call.shape))
    states = [(call.dtype(first + i), call.shape(first + i)) for i in range(loop.states)]
    values = [call.value(first + i) for i in range(loop.states)]
    elements: list[Type] = []
    ranks = [len(call.shape(loop.states + i)) for i in range(loop.scanned)]
    for i, axis in enumerate(loop.axes("input", ranks)):
        dims = call.shape(loop.states + i)
        elements.append((call.dtype(loop.states + i), (*dims[:axis], *dims[axis + 1 :])))
    turn_and_condition: list[Type] = [(np.dtype(np.int64), ()), (np.dtype(np.bool_), ())]
    heads = turn_and_condition[:first]
    left: list[Type] = []
    known = call.state.info.values
    for turn in range(max(turns, 1)):
        for tensor, kind in zip(loop.body.inputs, [*heads, *states, *elements], strict=True):
            call.types[tensor.name] = kind
        numbers: list[Values | None] = [objects([turn], ()), objects([True], ())]
        for tensor, value in zip(loop.body.inputs, [*numbers[:first], *values], strict=False):
            known.pop(tensor.name, None)
            if value is not None:
                known[tensor.name] = value
        after = infer_nested(call, loop.body)[first // 2 :]
        left = after[loop.states :]
        if turns == 0 or all(ir.same_shape(a[1], b[1]) for a, b in zip(states, after, strict=False)):
            break
        states = after[: loop.states]
        values = [known.get(t.name) for t in loop.results[: loop.states]]
    axes = loop.axes("output", [len(dims) + 1 for _, dims in left])
    joined = [(dtype, (*dims[:a], turns, *dims[a:])) for (dtype, dims), a in zip(left, axes, strict=True)]
    for tensor in (*loop.body.inputs, *(t for n in loop.body.nodes for t in n.outputs)):
        known.pop(tensor.name, None)
    return [*states, *joined]


def turns_of(node: gs.Node) -> int:
    """How often the body of a Loop or Scan runs, whose tensors are annotated. Raises UnsupportedOperator where that is not known, or too often."""
    loop = _Loop.of(node)
    return loop.limited(
        _turns(
            loop,
            lambda i: ir.constant_value(node.inputs[i]) if i < len(node.inputs) else None,
            lambda i: ir.shape(node.inputs[i]),
        )
    )


def _turns(loop: _Loop, value: Callable[[int], Array | None], dims: Callable[[int], tuple[Dim, ...]]) -> int:
    """How often the body runs, by what is known of the node's inputs."""
    if not loop.counted:
        axis = loop.axes("input", [len(dims(loop.states + i)) for i in range(loop.scanned)])[0]
        length = dims(loop.states)[axis]
        if not isinstance(length, int):
            raise loop.error(
                f"it runs as often as axis {axis} of '{loop.sequences[0].name}' is long, which is the dynamic size {length}"
            )
        return length
    limit, condition = (None if (v := value(i)) is None else v.reshape(-1)[0] for i in (0, 1))
    if loop.has(0) and not isinstance(limit, int | np.integer):
        decides = "data decides" if limit is None else f"the dynamic size {limit} decides"
        raise loop.error(f"{decides} how often its body runs")
    if loop.has(1) and condition is None:
        raise loop.error("data decides whether its body runs at all")
    if condition is not None and not condition:
        return 0
    return _count(loop, MOST_TURNS + 1 if limit is None else max(int(limit), 0))


def _count(loop: _Loop, limit: int) -> int:
    """The turns of a Loop until its condition, if it has one that says anything, ends it."""
    inputs, outputs = loop.body.inputs, loop.body.outputs
    node = ir.producer(outputs[0])
    source: ir.Tensor = outputs[0]
    while node is not None and node.op == "Identity":
        source = node.inputs[0]
        node = ir.producer(source)
    if source is inputs[1] or (isinstance(source, gs.Constant) and bool(source.values.all())):
        return limit
    follows = _Following(loop, source)
    for turn in range(min(limit, MOST_TURNS + 1)):
        if not follows(turn):
            return turn + 1
    return limit


class _Following:
    """A Loop's condition as a function of the turn, and of states that constants and turns alone determine."""

    def __init__(self, loop: _Loop, condition: ir.Tensor) -> None:
        states = loop.body.inputs[2:]
        self._states = {id(t): i for i, t in enumerate(states)}
        self._loop = loop
        wanted, nodes = [condition], dict[int, gs.Node]()
        needed = dict[int, ir.Tensor]()
        while wanted:
            tensor = wanted.pop()
            if isinstance(tensor, gs.Constant) or tensor is loop.body.inputs[0]:
                continue
            index = self._states.get(id(tensor))
            if index is not None:
                if id(tensor) not in needed:
                    needed[id(tensor)] = tensor
                    wanted.append(loop.body.outputs[1 + index])
                continue
            node = ir.producer(tensor)
            inside = node is not None and any(node is n for n in loop.body.nodes)
            if node is None or not inside or any(isinstance(a, gs.Graph) for a in node.attrs.values()):
                raise loop.error("data decides when it ends")
            if id(node) not in nodes:
                nodes[id(node)] = node
                wanted.extend(t for t in node.inputs if t.name)
        self._nodes = [n for n in ir.in_order(loop.body) if id(n) in nodes]
        self._needed = list(needed.values())
        firsts = [loop.node.inputs[2 + self._states[id(t)]] for t in self._needed]
        values = [ir.constant_value(t) for t in firsts]
        if any(v is None for v in values):
            raise loop.error("data decides when it ends")
        self._values = [v for v in values if v is not None]
        self._wanted = [condition, *(loop.body.outputs[1 + self._states[id(t)]] for t in self._needed)]

    def __call__(self, turn: int) -> bool:
        """Whether it goes on after ``turn``; to be asked of each turn, in order."""
        feeds = {self._loop.body.inputs[0].name: np.asarray(turn, np.int64)}
        feeds |= {t.name: v for t, v in zip(self._needed, self._values, strict=True)}
        goes_on, *self._values = evaluate(self._nodes, self._wanted, self._loop.body.opset or OPSET, feeds)
        return bool(goes_on.all())


def unroll(editor: ir.GraphEditor, node: gs.Node) -> list[ir.Tensor]:
    """What ``node``, a Loop or Scan, gives, its body's nodes written into the graph for each turn. Raises UnsupportedOperator as ``turns_of``."""
    loop, turns = _Loop.of(node), turns_of(node)
    inline_constants(loop.body)
    for constant in {id(t): t for n in loop.body.nodes for t in n.inputs if isinstance(t, gs.Constant)}.values():
        constant.name = editor.names.fresh(constant.name)
    first = 2 if loop.counted else 0
    base = node.name or node.outputs[0].name
    elements = [_elements(editor, loop, i, turns) for i in range(loop.scanned)]
    states: list[ir.Tensor] = loop.first_states
    left: list[list[ir.Tensor]] = []
    go = editor.constant(f"{base}.go", np.asarray(True))
    for turn in range(turns):
        given: list[ir.Tensor] = [editor.constant(f"{base}.turn", np.asarray(turn, np.int64)), go][:first]
        given += [*states, *(e[turn] for e in elements)]
        results = _Copy(editor, loop.body, given).results(loop.results)
        states = results[: loop.states]
        left.append(results[loop.states :])
    count = len(loop.results) - loop.states
    joined = [_joined(editor, loop, i, [some[i] for some in left]) for i in range(count)]
    return [*states, *joined]


def _elements(editor: ir.GraphEditor, loop: _Loop, index: int, turns: int) -> list[ir.Tensor]:
    """The elements of what is scanned, in the order of the turns."""
    ranks = [len(ir.shape(t)) for t in loop.sequences]
    axis, backwards = loop.axes("input", ranks)[index], loop.backwards("input", loop.scanned)[index]
    sequence = loop.sequences[index]
    order = range(turns)[::-1] if backwards else range(turns)
    return [
        _made(editor, "Gather", [sequence, editor.constant("turn", np.asarray(i, np.int64))], axis=axis) for i in order
    ]


def _joined(editor: ir.GraphEditor, loop: _Loop, index: int, parts: Sequence[ir.Tensor]) -> ir.Tensor:
    """What all turns left of one result, joined along its axis."""
    out = loop.node.outputs[loop.states + index]
    if not parts:
        dims = [d if isinstance(d, int) else 1 for d in ir.shape(out)]
        return editor.constant(f"{out.name}.none", np.zeros(dims, out.dtype))
    count = len(loop.results) - loop.states
    ranks = [len(ir.shape(t)) for t in loop.node.outputs[loop.states :]]
    axis, backwards = loop.axes("output", ranks)[index], loop.backwards("output", count)[index]
    axes = editor.constant("axis", np.asarray([axis], np.int64))
    rows = [_made(editor, "Unsqueeze", [p, axes]) for p in (parts[::-1] if backwards else parts)]
    return _made(editor, "Concat", rows, axis=axis)


def _made(editor: ir.GraphEditor, op: str, inputs: Sequence[ir.Tensor], **attrs: Any) -> gs.Variable:
    out = gs.Variable(editor.names.fresh(f"{inputs[0].name}.{op}"))
    editor.node(op, inputs, [out], out.name, **attrs)
    return out


class _Copy:
    """A copy of a body in the outer graph, which reads ``given`` for the body's inputs."""

    def __init__(self, editor: ir.GraphEditor, body: gs.Graph, given: Sequence[ir.Tensor]) -> None:
        self._editor = editor
        self._tensors: dict[int, ir.Tensor] = {id(t): g for t, g in zip(body.inputs, given, strict=True)}
        editor.graph.nodes.extend(self._nodes(body.nodes))

    def results(self, outputs: Sequence[ir.Tensor]) -> list[ir.Tensor]:
        """What stands for ``outputs`` of the body."""
        return [self._read(t) for t in outputs]

    def _read(self, tensor: ir.Tensor) -> ir.Tensor:
        return self._tensors.get(id(tensor), tensor)

    def _nodes(self, nodes: Sequence[gs.Node]) -> list[gs.Node]:
        for tensor in (t for n in nodes for t in n.outputs):
            name = self._editor.names.fresh(tensor.name) if tensor.name else ""
            self._tensors[id(tensor)] = gs.Variable(name)
        copies = ir.copy_nodes(nodes, self._read)
        for copy in copies:
            copy.name = self._editor.names.fresh(copy.name or copy.op)
            copy.attrs = {k: self._graph(v) if isinstance(v, gs.Graph) else v for k, v in copy.attrs.items()}
        return copies

    def _graph(self, graph: gs.Graph) -> gs.Graph:
        """A nested graph, whose own inputs are new as well."""
        for tensor in graph.inputs:
            self._tensors[id(tensor)] = gs.Variable(
                self._editor.names.fresh(tensor.name), dtype=tensor.dtype, shape=tensor.shape
            )
        nodes = self._nodes(graph.nodes)
        inputs, outputs = ([self._read(t) for t in some] for some in (graph.inputs, graph.outputs))
        return gs.Graph(nodes=nodes, inputs=inputs, outputs=outputs, name=graph.name, opset=graph.opset)
