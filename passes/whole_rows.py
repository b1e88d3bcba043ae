"""What is done to all rows but the first or last few is done to all, and those few are chosen.

Rule: for x of S rows along an axis and f that makes of each row a row of its own,

    Concat(x[:n], f(x[n:])) = Where(row < n, x, f'(x))        Concat(f(x[:S-n]), x[S-n:]) = Where(row < S-n, f'(x), x)

where f' is f with operands of as many rows as it has, to which n rows of zeros are added in front or behind. So a rotary embedding that leaves class and
register tokens alone (DINOv3, EVA-02) is one of all tokens, which the epilogue behind the product takes.

Conditions: n is a number, the axis is the last but one; f is elementwise operators, and Slices, Concats and Gathers along the last axis, that only the Concat reads; its
operands have one row or as many as x[n:], and dimensions that are numbers besides. Refused: nothing else.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge import frontend
from coda_edge.frontend.sizes import SizeEmitter
from coda_edge.ir import (
    ELEMENTWISE,
    Tensor,
    constant_value,
    in_order,
    is_output,
    made_by,
    producer,
    remove_dead,
    same_shape,
    set_shape,
    shape,
    sort,
)
from coda_edge.symbolic import Dim, same, simplify

from .base import Pass, PassLog


def run(graph: gs.Graph, log: PassLog) -> int:
    """Applies the rule everywhere; returns how often."""
    emitter: SizeEmitter | None = None
    count = 0
    for join in in_order(graph):
        found = _match(graph, join)
        if found is None:
            continue
        emitter = emitter or SizeEmitter(graph, frontend.infer(graph))
        found.rewrite(emitter)
        count += 1
    if count:
        remove_dead(graph)
        sort(graph)
    return count


def _match(graph: gs.Graph, join: gs.Node) -> _Match | None:
    rank = len(shape(join.outputs[0])) if join.op == "Concat" else 0
    if rank < 3 or len(join.inputs) != 2 or int(join.attrs["axis"]) % rank != rank - 2:
        return None
    for few, most in (join.inputs, join.inputs[::-1]):
        first = few is join.inputs[0]
        kept = _cut(few)
        if (
            kept is None
            or not isinstance(shape(few)[-2], int)
            or not same_shape(shape(kept[0]), shape(join.outputs[0]))
        ):
            continue
        match = _Match(graph, join, kept[0], int(shape(few)[-2]), first)
        if kept[1] == (0 if first else shape(most)[-2]) and match.follow(most):
            return match
    return None


def _cut(tensor: Tensor) -> tuple[Tensor, Dim] | None:
    """x and the first row, if ``tensor`` is some rows of x that follow each other."""
    node = made_by(tensor, "Slice")
    if node is None or len(node.inputs) < 4:
        return None
    start, axes = constant_value(node.inputs[1]), constant_value(node.inputs[3])
    steps = constant_value(node.inputs[4]) if len(node.inputs) > 4 else np.ones(1)
    x = node.inputs[0]
    rank, rows = len(shape(x)), shape(x)[-2]
    if start is None or axes is None or steps is None or start.size != 1 or steps.any() != 1 or int(steps.sum()) != 1:
        return None
    if int(axes.reshape(-1)[0]) % rank != rank - 2:
        return None
    at = int(start.reshape(-1)[0])
    return x, at if at >= 0 else simplify(rows + at)


class _Match:
    """A Concat of ``count`` rows of ``x``, the first ones or the last, with what is made of the others."""

    def __init__(self, graph: gs.Graph, join: gs.Node, x: Tensor, count: int, first: bool) -> None:
        self.graph = graph
        self.join = join
        self.x = x
        self.count = count
        self.first = first
        self.nodes: list[gs.Node] = []
        self.starts: set[int] = set()
        self.operands: dict[int, Tensor] = {}

    def follow(self, result: Tensor) -> bool:
        """Finds what makes ``result`` of the other rows; whether that is of the rule."""
        rows = shape(result)[-2]
        stack, seen = [result], set[int]()
        while stack:
            tensor = stack.pop()
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            cut = _cut(tensor)
            if cut is not None and cut[0] is self.x and same(shape(tensor)[-2], rows):
                if not same(cut[1], self.count if self.first else 0):
                    return False
                self.starts.add(id(tensor))
                continue
            node = producer(tensor)
            if node is not None and self._within(node) and same(shape(tensor)[-2], rows):
                self.nodes.append(node)
                stack += [t for t in node.inputs if not _moves(node) or node.op == "Concat" or t is node.inputs[0]]
            else:
                self.operands[id(tensor)] = tensor
        return (
            bool(self.starts)
            and self._drop_others()
            and bool(self.nodes)
            and all(self._pads(t, rows) for t in self.operands.values())
        )

    def _within(self, node: gs.Node) -> bool:
        out = node.outputs[0]
        if node.domain or len(shape(out)) < 2:
            return False
        return (node.op in ELEMENTWISE or _moves(node)) and len(shape(out)) == len(shape(self.x))

    def _drop_others(self) -> bool:
        """Leaves only nodes that depend on the rows of x: others make operands. Whether nothing else reads those."""
        reached = set(self.starts)
        inside = []
        for node in (n for n in in_order(self.graph) if any(n is m for m in self.nodes)):
            if any(id(t) in reached for t in node.inputs):
                reached.add(id(node.outputs[0]))
                inside.append(node)
        self.nodes = inside
        self.operands = {
            id(t): t
            for n in inside
            for i, t in enumerate(n.inputs)
            if id(t) not in reached and (i == 0 or not _moves(n) or n.op == "Concat")
        }
        users = {id(n) for n in (*inside, self.join)}
        made = [n.outputs[0] for n in inside]
        return all(id(u) in users for t in made for u in t.outputs) and not any(is_output(self.graph, t) for t in made)

    def _pads(self, tensor: Tensor, rows: Dim) -> bool:
        """Whether an operand has one row, or as many as it needs and numbers besides."""
        dims = shape(tensor)
        if len(dims) < 2 or same(dims[-2], 1):
            return True
        return same(dims[-2], rows) and all(isinstance(d, int) for d in (*dims[:-2], dims[-1]))

    def rewrite(self, emitter: SizeEmitter) -> None:
        """Puts the choice in the place of the Concat."""
        editor, out = emitter.editor, self.join.outputs[0]
        rows = shape(out)[-2]
        for node in self.nodes:
            for i, t in enumerate(node.inputs):
                if id(t) in self.starts:
                    node.inputs[i] = self.x
                elif id(t) in self.operands and len(shape(t)) >= 2 and not same(shape(t)[-2], 1):
                    node.inputs[i] = self._padded(emitter, t)
            made = node.outputs[0]
            dims = shape(made)
            set_shape(made, (*dims[:-2], rows, dims[-1]))
        (most,) = [t for t in self.join.inputs if producer(t) in self.nodes or id(t) in self.starts]
        taken = self._taken(emitter, rows)
        editor.replace(out, editor.apply("Where", [taken, self.x, most], shape(out), f"{out.name}.whole"))

    def _padded(self, emitter: SizeEmitter, tensor: Tensor) -> Tensor:
        editor, dims = emitter.editor, shape(tensor)
        key = f"{tensor.name}.padded{self.count}{'first' if self.first else 'last'}"
        known = next((n for n in tensor.outputs if n.name == key), None)
        if known is not None:
            return known.outputs[0]
        zeros = np.zeros([*(int(d) for d in dims[:-2]), self.count, int(dims[-1])], tensor.dtype)
        value = constant_value(tensor)
        if value is not None:
            return editor.constant(key, np.concatenate([zeros, value] if self.first else [value, zeros], -2))
        pieces = [editor.constant(f"{tensor.name}.zeros", zeros), tensor]
        whole = (*dims[:-2], simplify(dims[-2] + self.count), dims[-1])
        out = editor.variable(key, tensor.dtype, whole)
        editor.node("Concat", pieces if self.first else pieces[::-1], [out], key, axis=len(dims) - 2)
        return out

    def _taken(self, emitter: SizeEmitter, rows: Dim) -> Tensor:
        """bool ``[S,1]``: which rows are x's own."""
        editor = emitter.editor
        if isinstance(rows, int):
            number = np.arange(rows)[:, None]
            return editor.constant("rows.kept", number < self.count if self.first else number >= rows - self.count)
        known = editor.constant("rows.kept", np.ones((self.count, 1), np.bool_))
        size = emitter.vector([simplify(rows - self.count), 1])
        one = editor.constant("rows.one", np.zeros((1, 1), np.bool_))
        others = editor.variable("rows.others", np.dtype(np.bool_), (simplify(rows - self.count), 1))
        editor.node("Expand", [one, size], [others], "rows.others")
        out = editor.variable("rows.taken", np.dtype(np.bool_), (rows, 1))
        editor.node("Concat", [known, others] if self.first else [others, known], [out], "rows.taken", axis=0)
        return out


def _moves(node: gs.Node) -> bool:
    """Whether ``node`` moves elements within rows."""
    rank = len(shape(node.outputs[0]))
    if node.op in ("Concat", "Gather"):
        return int(node.attrs.get("axis", 0)) % rank == rank - 1
    if node.op != "Slice" or len(node.inputs) < 4:
        return False
    axes = constant_value(node.inputs[3])
    return axes is not None and all(int(a) % rank == rank - 1 for a in axes.reshape(-1))


PASS = Pass("whole_rows", run)
