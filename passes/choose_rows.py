"""Rows that nobody reads are not computed: a choice of few rows moves up to where all of them are needed.

Rule: let c(t) be a Slice or Gather of one axis of t, the only reader of t. If t = f(x, …) and every element of f's result depends on the
same place of that axis of x, then c(f(x, …)) = f(c(x), …), and so on upwards over every operator all of whose readers are such. Such are
elementwise operators, products with a constant along their left operand's rows, softmaxes and reductions of other axes, Transpose, Reshape
that keeps the axis, choices and joints of other axes, and look-ups in a table. So the logits of the last token are one row of one product,
and behind the last attention of a classifier everything works on the first token alone.

Conditions: what is chosen is a number of places that is known, and at most half of them; a matrix product is among what moves; nothing
that moves reads all of a tensor of which places are chosen.
Refused: products of two run-time tensors. Queries of attention could be chosen too, but then q no longer shares a product with k and v: two
kernels more for a twelfth of one layer's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge.frontend.sizes import reshape_target
from coda_edge.ir import (
    ELEMENTWISE,
    VIEWS,
    GraphEditor,
    Tensor,
    constant_value,
    consumers,
    in_order,
    is_output,
    made_by,
    producer,
    remove_dead,
    set_shape,
    shape,
    sort,
)
from coda_edge.symbolic import product, same

from .base import Pass, PassLog

Axes: TypeAlias = "list[int | None] | None"
"""For each operand the axis in which a place of the result's axis is found; None: it is needed whole. Or no list: nothing is."""
_Rule: TypeAlias = Callable[[gs.Node, int], Axes]


@dataclass(frozen=True)
class _Choice:
    """``count`` places of ``axis`` of ``data``, which ``node`` takes."""

    node: gs.Node
    data: gs.Variable
    axis: int
    count: int


@dataclass
class _Above:
    """What moves: nodes, in reverse order, and the axis of the places in each tensor between and before them."""

    nodes: list[gs.Node]
    axes: dict[int, int]
    tensors: dict[int, Tensor]


def run(graph: gs.Graph, log: PassLog) -> int:
    """Moves every such choice; returns how many."""
    editor = GraphEditor(graph)
    count = 0
    for node in in_order(graph):
        choice = _choice(graph, node)
        if choice is None:
            continue
        above = _above(graph, choice)
        if any(n.op == "MatMul" for n in above.nodes) and _fits(choice, above):
            _move(editor, choice, above)
            count += 1
    if count:
        remove_dead(graph)
        sort(graph)
    return count


def _choice(graph: gs.Graph, node: gs.Node) -> _Choice | None:
    if node.domain or node.op not in ("Slice", "Gather") or not isinstance(node.inputs[0], gs.Variable):
        return None
    data, dims = node.inputs[0], shape(node.inputs[0])
    if producer(data) is None or len(consumers(data)) > 1 or is_output(graph, data):
        return None
    if node.op == "Gather":
        axis, index = int(node.attrs.get("axis", 0)) % len(dims), shape(node.inputs[1])
        count = 1 if not index else index[0]
        if len(index) > 1:
            return None
    else:
        given = constant_value(node.inputs[3]) if len(node.inputs) > 3 else np.arange(len(dims))
        bounds = shape(node.inputs[1])
        if given is None or given.size != 1 or len(bounds) != 1:
            return None
        axis = int(given.reshape(-1)[0]) % len(dims)
        count = shape(node.outputs[0])[axis]
    few = isinstance(count, int) and count > 0 and (not isinstance(dims[axis], int) or 2 * count <= int(dims[axis]))
    return _Choice(node, data, axis, int(count)) if few else None


def _above(graph: gs.Graph, choice: _Choice) -> _Above:
    above = _Above([], {id(choice.data): choice.axis}, {id(choice.data): choice.data})
    members = {id(choice.node)}
    whole = {id(t) for t in choice.node.inputs[1:]}  # what is read in all places
    places = shape(choice.data)[choice.axis]
    for node in reversed(in_order(graph)):
        out = node.outputs[0] if len(node.outputs) == 1 else None
        if out is None or id(out) not in above.axes or is_output(graph, out) or node.domain:
            continue
        rule = _RULES.get(node.op)
        if rule is None or any(id(u) not in members for u in consumers(out)):
            continue
        axes = rule(node, above.axes[id(out)])
        found = None if axes is None else [(t, a) for t, a in zip(node.inputs, axes, strict=True) if a is not None]
        if axes is None or not found:
            continue
        rest = whole | {id(t) for t, a in zip(node.inputs, axes, strict=True) if a is None}
        placed = {**above.axes, **{id(t): a for t, a in found}}
        if not rest.isdisjoint(placed) or any(
            above.axes.get(id(t), a) != a or not same(shape(t)[a], places) for t, a in found
        ):
            continue
        whole = rest
        members.add(id(node))
        above.nodes.append(node)
        for t, a in found:
            above.axes[id(t)] = a
            above.tensors[id(t)] = t
    return above


def _fits(choice: _Choice, above: _Above) -> bool:
    """Whether every Reshape that moves can say what it makes of fewer rows."""
    return all(_target(choice, above, n) is not None for n in above.nodes if n.op in ("Reshape", "Flatten"))


def _target(choice: _Choice, above: _Above, node: gs.Node) -> list[int] | None:
    source, out = node.inputs[0], node.outputs[0]
    return reshape_target(_chosen(choice, above, source), _chosen(choice, above, out))


def _chosen(choice: _Choice, above: _Above, tensor: Tensor) -> list[Any]:
    """The dimensions of ``tensor`` with the chosen places only."""
    axis = above.axes[id(tensor)]
    return [choice.count if i == axis else d for i, d in enumerate(shape(tensor))]


def _move(editor: GraphEditor, choice: _Choice, above: _Above) -> None:
    made = {id(n.outputs[0]) for n in above.nodes}
    targets = {id(n): _target(choice, above, n) for n in above.nodes if n.op in ("Reshape", "Flatten")}
    chosen = {
        key: _written(editor, choice, tensor, above.axes[key], _chosen(choice, above, tensor))
        for key, tensor in above.tensors.items()
        if key not in made
    }
    dims = {id(n): _chosen(choice, above, n.outputs[0]) for n in above.nodes}
    for node in above.nodes:
        if id(node) in targets:
            target = editor.constant(f"{node.name}.chosen", np.array(targets[id(node)], np.int64))
            node.op, node.attrs, node.inputs = "Reshape", {}, [node.inputs[0], target]
        node.inputs = [chosen.get(id(t), t) for t in node.inputs]
        set_shape(node.outputs[0], dims[id(node)])
    out, result = choice.node.outputs[0], choice.data
    if len(shape(out)) < len(shape(result)):
        numbers = reshape_target(shape(result), shape(out))
        op, operand = ("Squeeze", [choice.axis]) if numbers is None else ("Reshape", numbers)
        with_operand = [result, editor.constant(f"{choice.node.name}.axis", np.array(operand, np.int64))]
        result = editor.apply(op, with_operand, shape(out), f"{choice.node.name}.row")
    choice.node.outputs.clear()
    choice.node.inputs.clear()
    editor.replace(out, result)
    for view in [u for u in consumers(result) if u.op == "Squeeze"]:
        numbers = reshape_target(shape(result), shape(view.outputs[0]))
        if numbers is not None:  # as what ``sink_reshape`` moves
            view.op, view.attrs = "Reshape", {}
            view.inputs = [result, editor.constant(f"{view.name}.axes", np.array(numbers, np.int64))]


def _written(editor: GraphEditor, choice: _Choice, tensor: Tensor, axis: int, dims: list[Any]) -> gs.Variable:
    """The chosen places of ``tensor``."""
    node, name = choice.node, f"{tensor.name}.chosen"
    if node.op == "Gather":
        index = node.inputs[1]
        if not shape(index):
            value, one = constant_value(index), editor.constant("one", np.array([1], np.int64))
            row = None if value is None else editor.constant(f"{index.name}.row", value.reshape(1))
            index = row if row is not None else editor.apply("Reshape", [index, one], [1], f"{index.name}.row")
        return editor.apply("Gather", [tensor, index], dims, name, axis=axis)
    starts, ends, _, *steps = (*node.inputs, *([None] if len(node.inputs) == 3 else []))[1:]
    axes = editor.constant(f"{name}.axes", np.array([axis], np.int64))
    return editor.apply("Slice", [tensor, starts, ends, axes, *steps], dims, name)


def _pointwise(node: gs.Node, axis: int) -> Axes:
    out = shape(node.outputs[0])
    at = [axis - len(out) + len(shape(t)) for t in node.inputs]
    return [a if a >= 0 and not same(shape(t)[a], 1) else None for t, a in zip(node.inputs, at, strict=True)]


def _product(node: gs.Node, axis: int) -> Axes:
    left, right = (shape(t) for t in node.inputs)
    rank = len(shape(node.outputs[0]))
    if constant_value(node.inputs[1]) is None or len(left) < 2 or len(right) < 2 or axis == rank - 1:
        return None
    if made_by(node.inputs[0], "Window") is not None:
        return None  # its kernel makes the rows, of places next to each other
    if axis == rank - 2:
        return [len(left) - 2, None]
    return _pointwise(node, axis)


def _softmax(node: gs.Node, axis: int) -> Axes:
    return None if int(node.attrs.get("axis", -1)) % len(shape(node.outputs[0])) == axis else [axis]


def _reduction(node: gs.Node, axis: int) -> Axes:
    given = constant_value(node.inputs[1]) if len(node.inputs) > 1 else None
    rank = len(shape(node.inputs[0]))
    if given is None or not given.size:
        return None
    gone = {int(a) % rank for a in given.reshape(-1)}
    left = [a for a in range(rank) if node.attrs.get("keepdims", 1) or a not in gone]
    return None if left[axis] in gone else [left[axis], None]


def _transpose(node: gs.Node, axis: int) -> Axes:
    return [int(node.attrs["perm"][axis])]


def _view(node: gs.Node, axis: int) -> Axes:
    """The axis with as many elements before it, if it is as long."""
    before, after = shape(node.inputs[0]), shape(node.outputs[0])
    at = next(
        (
            a
            for a, d in enumerate(before)
            if same(d, after[axis]) and same(product(before[:a]), product(after[:axis])) and not same(d, 1)
        ),
        None,
    )
    return None if at is None else [at, *(None for _ in node.inputs[1:])]


def _concat(node: gs.Node, axis: int) -> Axes:
    rank = len(shape(node.outputs[0]))
    return None if int(node.attrs["axis"]) % rank == axis else [axis for _ in node.inputs]


def _slice(node: gs.Node, axis: int) -> Axes:
    rank = len(shape(node.inputs[0]))
    axes = constant_value(node.inputs[3]) if len(node.inputs) > 3 else np.arange(rank)
    if axes is None or axis in {int(a) % rank for a in axes.reshape(-1)}:
        return None
    return [axis, *(None for _ in node.inputs[1:])]


def _gather(node: gs.Node, axis: int) -> Axes:
    along, index = int(node.attrs.get("axis", 0)) % len(shape(node.inputs[0])), len(shape(node.inputs[1]))
    if axis < along:
        return [axis, None]
    if axis < along + index:
        return [None, axis - along]
    return [axis - index + 1, None]


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(ELEMENTWISE, _pointwise),
    "MatMul": _product,
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    **dict.fromkeys(
        ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare", "ReduceL2"), _reduction
    ),
    "Transpose": _transpose,
    **dict.fromkeys(VIEWS, _view),
    "Concat": _concat,
    "Slice": _slice,
    "Gather": _gather,
}
PASS = Pass("choose_rows", run)
