"""A Reshape of the leading dimensions moves behind the row-wise operators that follow it, until it meets its inverse.

Rule: Reshape(Reshape(x)) is one Reshape of x, or x itself if the shape is x's. And where r = Reshape(x) keeps the last axis,

1. MatMul(r, W) with a constant matrix W is Reshape(MatMul(x, W)): the rows are the same rows;
2. an elementwise operator whose other operands are scalars or columns is the same operator on x, and the Reshape behind it;
3. a Slice of the last axis by constants likewise.

So exporters that flatten ``[B, S, K]`` to ``[B·S, K]`` around each projection leave no trace.

Conditions: the target of the Reshape that moves is a constant; x has at least two dimensions. A second target that copies dimensions
(0) must be known in numbers.
Refused: moving a Reshape that is a graph output, or one whose readers are not all of these kinds: it would be kept beside its copies.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge.ir import (
    ELEMENTWISE,
    GraphEditor,
    Tensor,
    column_range,
    column_value,
    constant_value,
    consumers,
    in_order,
    is_output,
    producer,
    remove_dead,
    same_shape,
    shape,
)
from coda_edge.symbolic import same

from .base import Pass, PassLog


def run(graph: gs.Graph, log: PassLog) -> int:
    """Sinks Reshapes until none moves; returns the number of moves."""
    editor = GraphEditor(graph)
    total = 0
    while True:
        moved = sum(_sink(graph, editor, node) for node in in_order(graph) if node.op == "Reshape")
        if not moved:
            return total
        total += moved
        remove_dead(graph)


def _sink(graph: gs.Graph, editor: GraphEditor, reshape: gs.Node) -> int:
    if not reshape.outputs:
        return 0
    readers = consumers(reshape.outputs[0])
    composed = sum(_compose(editor, reshape, u) for u in readers if u.op == "Reshape" and not u.domain)
    if composed or not readers or not _keeps_rows(reshape) or is_output(graph, reshape.outputs[0]):
        return composed
    if not all(_passes_rows(u, reshape.outputs[0]) for u in readers):
        return 0
    for reader in readers:
        _swap(editor, reshape, reader)
    return len(readers)


def _keeps_rows(reshape: gs.Node) -> bool:
    before, after = shape(reshape.inputs[0]), shape(reshape.outputs[0])
    constant = constant_value(reshape.inputs[1]) is not None and not reshape.attrs.get("allowzero", 0)
    return constant and min(len(before), len(after)) >= 2 and same(before[-1], after[-1])


def _passes_rows(node: gs.Node, r: Tensor) -> bool:
    """Whether ``node`` treats every row of ``r`` alike, so that the Reshape may stand behind it."""
    n = shape(r)[-1]
    if node.domain or not isinstance(n, int):
        return False
    others = [t for t in node.inputs if t is not r]
    if node.op == "MatMul":
        weights = constant_value(node.inputs[1])
        return node.inputs[0] is r and weights is not None and weights.ndim == 2
    if node.op == "Slice":
        return column_range(node) is not None
    return (
        node.op in ELEMENTWISE
        and same_shape(shape(node.outputs[0]), shape(r))
        and all(column_value(t, n) is not None for t in others)
    )


def _compose(editor: GraphEditor, first: gs.Node, second: gs.Node) -> int:
    x, out, target = first.inputs[0], second.outputs[0], second.inputs[1]
    if same_shape(shape(x), shape(out)) and not (producer(x) is None and is_output(editor.graph, out)):
        editor.replace(out, x)
        return 1
    value = constant_value(target)
    if value is not None and np.any(value == 0) and not second.attrs.get("allowzero", 0):
        middle = shape(first.outputs[0])
        known = [middle[i] if t == 0 else t for i, t in enumerate(value.tolist())]
        if not all(isinstance(d, int) for d in known):
            return 0
        target = editor.constant(f"{out.name}.shape", np.array(known, np.int64))
    second.inputs = [x, target]
    return 1


def _swap(editor: GraphEditor, reshape: gs.Node, node: gs.Node) -> None:
    x, r, out = reshape.inputs[0], reshape.outputs[0], node.outputs[0]
    n = shape(out)[-1]
    target = constant_value(reshape.inputs[1])
    assert target is not None
    if node.op == "Slice":
        first, last = column_range(node) or (0, 0)
        bounds = [editor.constant(f"{out.name}.bound", np.array([v])) for v in (first, last, len(shape(x)) - 1)]
        inputs = [x, *bounds]
    else:
        column = node.op in ELEMENTWISE
        inputs = [x if t is r else _as_column(editor, t, shape(r)[-1]) if column else t for t in node.inputs]
    moved = editor.variable(f"{out.name}.rows", out.dtype, (*shape(x)[:-1], n))
    editor.node(node.op, inputs, [moved], node.name or out.name, **node.attrs)
    new_target = editor.constant(f"{out.name}.shape", np.array([*target[:-1], n], np.int64))
    editor.replace(out, editor.apply("Reshape", [moved, new_target], shape(out), f"{out.name}.reshape"))


def _as_column(editor: GraphEditor, tensor: Tensor, n: object) -> Tensor:
    """``tensor`` without leading ones, so that it broadcasts to any rank."""
    value = constant_value(tensor)
    if value is None or value.ndim < 2 or value.size not in (1, n):
        return tensor
    return editor.constant(f"{tensor.name}.col", value.reshape(-1))


PASS = Pass("sink_reshape", run)
