"""A Reshape of the leading dimensions moves behind the row-wise operators that follow it, until it meets its inverse.

Rule: Reshape(Reshape(x)) is one Reshape of x, or x itself if the shape is x's. And where r = Reshape(x) keeps the last axis, a
*row-wise* operator of r is the same operator on x, and the Reshape behind it. Row-wise are

1. MatMul(r, W) with a constant matrix W: the rows are the same rows;
2. a Slice of the last axis by constants, and a reduction of it (RowMoments, ReduceMean, …) that keeps it as 1;
3. an elementwise operator whose other operands are scalars, columns, or tensors reshaped from the same leading dimensions to
   the same: so a whole norm is row-wise.

So exporters that flatten ``[B, S, K]`` to ``[B·S, K]`` around each projection, or around each layer, leave no trace.

Conditions: the target of the Reshape that moves is a constant; x has at least two dimensions. A second target that copies dimensions
(0) must be known in numbers. Where r has more dimensions than x, only operators of r alone count, no reductions; where x has more than
three, no result may be reshaped but back: heads are laid out from ``[B, S, K]``, so what has that form keeps it.
Refused: moving a Reshape that is a graph output, or one whose readers are not all of these kinds: it would be kept beside its copies.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge.ir import (
    ELEMENTWISE,
    VIEWS,
    GraphEditor,
    Tensor,
    column_range,
    column_value,
    constant_value,
    consumers,
    in_order,
    is_output,
    made_by,
    producer,
    reduces_rows,
    remove_dead,
    same_shape,
    shape,
)
from coda_edge.symbolic import same

from .base import Pass, PassLog

_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd")


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
    region = _Region(reshape)
    if not all(region.has(u) for u in readers) or region.loses_heads():
        return 0
    region.move(editor)
    return len(region.nodes)


def _keeps_rows(reshape: gs.Node) -> bool:
    before, after = shape(reshape.inputs[0]), shape(reshape.outputs[0])
    constant = constant_value(reshape.inputs[1]) is not None and not reshape.attrs.get("allowzero", 0)
    return constant and min(len(before), len(after)) >= 2 and same(before[-1], after[-1])


class _Region:
    """The row-wise operators behind ``reshape``, in order of evaluation, and the tensors that they may read unreshaped."""

    def __init__(self, reshape: gs.Node) -> None:
        self.nodes: list[gs.Node] = []
        self._reshape = reshape
        self._before, self._after = shape(reshape.inputs[0])[:-1], shape(reshape.outputs[0])[:-1]
        self._joint = len(self._before) >= len(self._after)
        self._inside = {id(reshape.outputs[0])}
        self._rows: dict[int, Tensor] = {id(reshape.outputs[0]): reshape.inputs[0]}
        waiting = consumers(reshape.outputs[0])
        while waiting:
            joined = [u for u in waiting if self._joins(u)]
            self.nodes += joined
            self._inside.update(id(o) for n in joined for o in n.outputs)
            behind = [u for n in joined for o in n.outputs for u in consumers(o)]
            left = [u for u in waiting if not any(u is j for j in joined)] if joined else []
            waiting = list({id(n): n for n in (*left, *behind) if not self.has(n)}.values())

    def has(self, node: gs.Node) -> bool:
        """Whether ``node`` moves."""
        return any(node is n for n in self.nodes)

    def loses_heads(self) -> bool:
        """Whether a result is split further (into heads, which a product lays out from ``[B, S, K]`` only) and would come from more axes."""
        if len(self._before) < 3:
            return False
        made = [o for n in self.nodes for o in n.outputs]
        behind = [(o, u) for o in made for u in consumers(o) if u.op in VIEWS and not self.has(u)]
        return any(not same_shape(shape(u.outputs[0]), (*self._before, shape(o)[-1])) for o, u in behind)

    def _joins(self, node: gs.Node) -> bool:
        if node.domain:
            return self._joint and node.op == "RowMoments"
        if node.op == "MatMul":
            weights = constant_value(node.inputs[1])
            return id(node.inputs[0]) in self._inside and weights is not None and weights.ndim == 2
        if node.op == "Slice":
            return column_range(node) is not None
        if node.op in _REDUCTIONS:
            return self._joint and reduces_rows(node, node.op)
        return node.op in ELEMENTWISE and self._is_row_wise(node)

    def _is_row_wise(self, node: gs.Node) -> bool:
        dims = shape(node.outputs[0])
        if not same_shape(dims[:-1], self._after) or not isinstance(dims[-1], int):
            return False
        return all(
            id(t) in self._inside or column_value(t, dims[-1]) is not None or self._alike(t) for t in node.inputs
        )

    def _alike(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is reshaped just as ``reshape`` does it."""
        view = made_by(tensor, "Reshape") if self._joint else None
        if view is None or view.domain or not _keeps_rows(view):
            return False
        alike = same_shape(shape(view.inputs[0])[:-1], self._before) and same_shape(shape(tensor)[:-1], self._after)
        if alike:
            self._rows[id(tensor)] = view.inputs[0]
        return alike

    def move(self, editor: GraphEditor) -> None:
        """Lets the operators work on the rows as they were, and reshapes what others read of them."""
        target = constant_value(self._reshape.inputs[1])
        assert target is not None
        given: list[gs.Variable] = []
        for node in self.nodes:
            before = list(node.outputs)
            node.inputs = self._operands(editor, node)
            node.outputs = [editor.variable(f"{o.name}.rows", o.dtype, (*self._before, shape(o)[-1])) for o in before]
            self._rows.update({id(o): rows for o, rows in zip(before, node.outputs, strict=True)})
            given += before
        for old in given:
            if consumers(old) or is_output(editor.graph, old):
                shaped = editor.constant(f"{old.name}.shape", np.array([*target[:-1], shape(old)[-1]], np.int64))
                rows = self._rows[id(old)]
                editor.replace(old, editor.apply("Reshape", [rows, shaped], shape(old), f"{old.name}.reshape"))

    def _operands(self, editor: GraphEditor, node: gs.Node) -> list[Tensor]:
        if node.op == "Slice":
            first, last = column_range(node) or (0, 0)
            bounds = (first, last, len(self._before))
            return [
                self._rows[id(node.inputs[0])],
                *(editor.constant(f"{node.name}.bound", np.array([v])) for v in bounds),
            ]
        if node.op in _REDUCTIONS:
            return [
                self._rows[id(node.inputs[0])],
                editor.constant(f"{node.name}.axis", np.array([len(self._before)])),
            ]
        n = shape(node.outputs[0])[-1]
        return [
            self._rows[id(t)] if id(t) in self._rows else _as_column(editor, t, n) if node.op in ELEMENTWISE else t
            for t in node.inputs
        ]


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


def _as_column(editor: GraphEditor, tensor: Tensor, n: object) -> Tensor:
    """``tensor`` without leading ones, so that it broadcasts to any rank."""
    value = constant_value(tensor)
    if value is None or value.ndim < 2 or value.size not in (1, n):
        return tensor
    return editor.constant(f"{tensor.name}.col", value.reshape(-1))


PASS = Pass("sink_reshape", run)
