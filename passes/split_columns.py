"""Chosen columns of a product are a product with the chosen columns of its weights.

Rule: let p = x · W, or what elementwise operators with columns make of it, and let everything that is read of p be some of its columns:
after Reshape, Transpose, Squeeze and Unsqueeze of the axes that the columns are (heads, groups, gate and up, q, k and v, in any order,
also interleaved), a Slice or Gather. Then each choice C is x · W[:, C], with the columns C of the operands, in its own axes. What is
packed is thus no different from what is not; ``merge_gates`` and ``merge_projections`` find again what is best done at once, and columns
that nobody reads are not computed.

Conditions: W is a constant matrix; no column is in two different choices; choices do not become one tensor again (the parts of a head
that is rotated in part).
Refused without a word: a product that something reads whole. It is stored anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge.ir import (
    ELEMENTWISE,
    VIEWS,
    GraphEditor,
    Tensor,
    constant_value,
    consumers,
    in_order,
    is_output,
    remove_dead,
    same_shape,
    shape,
    sole_consumer,
    sort,
)
from coda_edge.symbolic import Dim, same

from .base import Pass, PassLog
from .heads import Labels, sliced
from .pieces import Pieces

_MOVES = ("Transpose", "Slice", "Gather", *VIEWS)
"""Operators that choose and rearrange."""


@dataclass(frozen=True)
class _Seen:
    """A tensor that columns of ``base`` make up: which one each element is, axes of rows being 1; ``rows`` are those axes."""

    base: gs.Variable
    columns: Labels
    rows: tuple[int, ...]

    @property
    def plain(self) -> bool:
        """Whether it has the axes of a product."""
        return len(self.rows) == self.columns.ndim - 1 and self.rows == tuple(range(len(self.rows)))


def run(graph: gs.Graph, log: PassLog) -> int:
    """Splits every such product; returns how many."""
    editor = GraphEditor(graph)
    pieces = Pieces(editor)
    count = sum(_split(graph, editor, pieces, node) for node in in_order(graph) if node.op == "MatMul")
    if count:
        remove_dead(graph)
        sort(graph)
    return count


def _split(graph: gs.Graph, editor: GraphEditor, pieces: Pieces, matmul: gs.Node) -> bool:
    weights, product = constant_value(matmul.inputs[1]), matmul.outputs[0]
    rank = len(shape(product))
    if weights is None or weights.ndim != 2 or rank < 2:
        return False
    choices = _choices(graph, product, weights.shape[1])
    if not choices:
        return False
    taken = [c for columns in {tuple(_flat(s)) for _, s in choices} for c in columns]
    if len(set(taken)) < len(taken) or _joined([t for t, _ in choices]):
        return False
    for tensor, seen in choices:
        editor.replace(tensor, _written(editor, pieces.columns(seen.base, _flat(seen)), tensor, seen))
    return True


def _choices(graph: gs.Graph, product: gs.Variable, width: int) -> list[tuple[gs.Variable, _Seen]]:
    """The choices of columns that are all that is read of ``product``; none if there is anything else."""
    rank = len(shape(product))
    columns = np.arange(width).reshape((*(1,) * (rank - 1), width))
    choices: list[tuple[gs.Variable, _Seen]] = []
    waiting = [(product, _Seen(product, columns, tuple(range(rank - 1))))]
    while waiting:
        tensor, seen = waiting.pop()
        if is_output(graph, tensor):
            return []
        for node in consumers(tensor):
            made = _through(node, tensor, seen)
            if made is None:
                return []
            if made.columns.size == width:
                waiting.append((node.outputs[0], made))
            else:
                choices.append(_arranged(graph, node.outputs[0], made))
    return choices


def _arranged(graph: gs.Graph, tensor: gs.Variable, seen: _Seen) -> tuple[gs.Variable, _Seen]:
    """The last of the tensors that only rearrange ``tensor``."""
    node = sole_consumer(graph, tensor)
    made = _through(node, tensor, seen) if node is not None and node.op in ("Transpose", *VIEWS) else None
    return (tensor, seen) if node is None or made is None else _arranged(graph, node.outputs[0], made)


def _joined(choices: list[gs.Variable]) -> bool:
    """Whether a Concat takes what elementwise operators and rearrangements make of two of ``choices``."""
    met: dict[int, int] = {}
    for i, choice in enumerate(choices):
        stack, seen = list(choice.outputs), set[int]()
        while stack:
            node = stack.pop()
            if id(node) in seen or node.domain:
                continue
            seen.add(id(node))
            if node.op == "Concat" and met.setdefault(id(node), i) != i:
                return True
            if node.op in ELEMENTWISE or node.op in _MOVES:
                stack += [u for t in node.outputs for u in t.outputs]
    return False


def _through(node: gs.Node, tensor: gs.Variable, seen: _Seen) -> _Seen | None:
    """What ``node`` makes of ``tensor``; None if it is not a choice, or another arrangement, of columns."""
    if node.domain or len(node.outputs) != 1:
        return None
    out = node.outputs[0]
    if node.op in ELEMENTWISE:
        others = [t for t in node.inputs if t is not tensor]
        keeps = seen.plain and same_shape(shape(out), shape(tensor)) and all(map(_is_column, others))
        return _Seen(out, seen.columns, seen.rows) if keeps else None
    if node.inputs[0] is not tensor:
        return None
    if node.op == "Transpose":
        perm = [int(p) for p in node.attrs["perm"]]
        return _Seen(seen.base, seen.columns.transpose(perm), tuple(perm.index(a) for a in seen.rows))
    if node.op in VIEWS:
        return _viewed(seen, shape(tensor), shape(out))
    if node.op == "Gather":
        axis, index = int(node.attrs.get("axis", 0)) % seen.columns.ndim, constant_value(node.inputs[1])
        if axis in seen.rows or index is None or index.ndim > 1:
            return None
        rows = tuple(a - 1 if index.ndim == 0 and a > axis else a for a in seen.rows)
        return _Seen(seen.base, np.take(seen.columns, index, axis), rows)
    chosen = sliced(node, seen.columns, seen.rows) if node.op == "Slice" else None
    return None if chosen is None else _Seen(seen.base, chosen, seen.rows)


def _is_column(tensor: Tensor) -> bool:
    """Whether ``tensor`` is constant and differs from column to column at most."""
    value = constant_value(tensor)
    return value is not None and value.size == (value.shape[-1] if value.ndim else 1)


def _viewed(seen: _Seen, before: tuple[Dim, ...], after: tuple[Dim, ...]) -> _Seen | None:
    """A Reshape that keeps the axes of rows: each is found again with its size, between columns of the same number."""
    rows: list[int] = []
    waiting, passed = list(seen.rows), 1
    for axis, size in enumerate(after):
        if waiting and passed == int(np.prod(seen.columns.shape[: waiting[0]])) and same(size, before[waiting[0]]):
            rows.append(axis)
            waiting.pop(0)
        elif isinstance(size, int):
            passed *= size
        else:
            return None
    if waiting or passed != seen.columns.size:
        return None
    dims = [1 if axis in rows else size for axis, size in enumerate(after)]
    return _Seen(seen.base, seen.columns.reshape([d for d in dims if isinstance(d, int)]), tuple(rows))


def _flat(seen: _Seen) -> list[int]:
    return [int(c) for c in seen.columns.reshape(-1)]


def _written(editor: GraphEditor, columns: Tensor, like: gs.Variable, seen: _Seen) -> gs.Variable:
    """The chosen ``columns`` ``[rows…, C]`` in the axes of ``like``."""
    inner = [a for a in range(seen.columns.ndim) if a not in seen.rows]
    order = [*seen.rows, *inner]
    dims = [shape(like)[a] for a in order]
    made = columns
    if len(inner) != 1:
        target = editor.constant(
            f"{like.name}.axes", np.array([*(0 for _ in seen.rows), *dims[len(seen.rows) :]], np.int64)
        )
        made = editor.apply("Reshape", [columns, target], dims, f"{like.name}.split")
    if order != sorted(order):
        perm = [order.index(a) for a in range(len(order))]
        made = editor.apply("Transpose", [made], shape(like), f"{like.name}.moved", perm=perm)
    assert isinstance(made, gs.Variable)
    return made


PASS = Pass("split_columns", run)
