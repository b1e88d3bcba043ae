"""Columns of a tensor as a tensor of their own, made once and as far up as possible."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge.ir import (
    ELEMENTWISE,
    VIEWS,
    Array,
    GraphEditor,
    Tensor,
    constant_value,
    made_by,
    producer,
    same_shape,
    shape,
)
from coda_edge.symbolic import Dim, same
from coda_edge.weights import arranged


class Pieces:
    """Takes columns (elements of the last axis) of tensors.

    The choice moves up through elementwise operators, products, concatenations and table look-ups, so that only what is asked for is
    computed; equal pieces are one tensor. So both halves of ``Cos(Concat(f, f))`` are ``Cos(f)``.
    """

    def __init__(self, editor: GraphEditor) -> None:
        self._editor = editor
        self._made: dict[Hashable, Tensor] = {}
        self._taken: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        self._kept: list[Tensor] = []

    def columns(self, tensor: Tensor, columns: Sequence[int]) -> Tensor:
        """``tensor[..., columns]``."""
        key = (id(tensor), tuple(columns))
        if key not in self._taken:
            self._kept.append(tensor)  # so that no other tensor gets its id
            self._taken[key] = self._columns(tensor, tuple(columns))
        return self._taken[key]

    def squeezed(self, tensor: Tensor, axes: Sequence[int]) -> Tensor:
        """``tensor`` without ``axes``, which are all 1."""
        if not axes:
            return tensor
        dims = [d for i, d in enumerate(shape(tensor)) if i not in axes]
        value = constant_value(tensor)
        if value is not None:
            return self._constant(tensor, lambda v: np.squeeze(v, tuple(axes)))
        node = made_by(tensor, *VIEWS)
        if node is not None and same_shape(shape(node.inputs[0]), dims):
            return node.inputs[0]
        return self._node("Squeeze", [tensor, self._ints(axes)], dims, tensor)

    def _columns(self, tensor: Tensor, columns: tuple[int, ...]) -> Tensor:
        dims = shape(tensor)
        value = constant_value(tensor)
        if value is not None:
            return self._constant(tensor, lambda v: v[..., list(columns)])
        if columns == tuple(range(int(dims[-1]))):
            return tensor
        node = producer(tensor)
        rule = None if node is None or node.domain else _RULES.get(node.op)
        found = rule(self, node, columns) if rule is not None else None
        return found if found is not None else self._select(tensor, columns)

    def _elementwise(self, node: gs.Node, columns: tuple[int, ...]) -> Tensor | None:
        out = node.outputs[0]
        inputs = []
        for t in node.inputs:
            dims = shape(t)
            narrow = not dims or same(dims[-1], 1)
            if not narrow and not same(dims[-1], shape(out)[-1]):
                return None
            inputs.append(t if narrow else self.columns(t, columns))
        if all(not shape(t) or same(shape(t)[-1], 1) for t in node.inputs):
            return None
        return self._node(node.op, inputs, (*shape(out)[:-1], len(columns)), out, **node.attrs)

    def _concat(self, node: gs.Node, columns: tuple[int, ...]) -> Tensor | None:
        rank = len(shape(node.outputs[0]))
        if int(node.attrs["axis"]) % rank != rank - 1:
            return None
        start = 0
        for part in node.inputs:
            width = shape(part)[-1]
            if not isinstance(width, int):
                return None
            if all(start <= c < start + width for c in columns):
                return self.columns(part, [c - start for c in columns])
            start += width
        return None

    def _gather(self, node: gs.Node, columns: tuple[int, ...]) -> Tensor | None:
        table, rows = node.inputs
        if len(shape(table)) != 2 or int(node.attrs.get("axis", 0)) % 2:
            return None
        dims = (*shape(node.outputs[0])[:-1], len(columns))
        return self._node("Gather", [self.columns(table, columns), rows], dims, node.outputs[0], **node.attrs)

    def _product(self, node: gs.Node, columns: tuple[int, ...]) -> Tensor | None:
        weights = constant_value(node.inputs[1])
        if weights is None or weights.ndim != 2:
            return None
        chosen = self._constant(node.inputs[1], lambda v: v[:, list(columns)])
        return self._node(
            "MatMul", [node.inputs[0], chosen], (*shape(node.outputs[0])[:-1], len(columns)), node.outputs[0]
        )

    def _unsqueeze(self, node: gs.Node, columns: tuple[int, ...]) -> Tensor | None:
        """Through a view that only inserts axes of 1, before the last one."""
        x, out = node.inputs[0], node.outputs[0]
        dims, before = shape(out), list(shape(x))
        axes = []
        for i, d in enumerate(dims):
            if before and same(d, before[0]):
                before.pop(0)
            elif same(d, 1) and i < len(dims) - 1:
                axes.append(i)
            else:
                return None
        if before or not axes:
            return None
        inner = self.columns(x, columns)
        return self._node("Unsqueeze", [inner, self._ints(axes)], (*dims[:-1], len(columns)), out)

    def _select(self, tensor: Tensor, columns: tuple[int, ...]) -> Tensor:
        dims = (*shape(tensor)[:-1], len(columns))
        last = len(dims) - 1
        steps = {b - a for a, b in pairwise(columns)} or {1}
        if len(steps) == 1 and min(steps) > 0:
            (step,) = steps
            bounds = [self._ints([v]) for v in (columns[0], columns[-1] + 1, last, step)]
            return self._node("Slice", [tensor, *(bounds if step > 1 else bounds[:3])], dims, tensor)
        return self._node("Gather", [tensor, self._ints(columns)], dims, tensor, axis=last)

    def _node(self, op: str, inputs: Sequence[Tensor], dims: Sequence[Dim], like: Tensor, **attrs: Any) -> Tensor:
        key = (op, tuple(id(t) for t in inputs), repr(sorted(attrs.items())))
        if key not in self._made:
            out = self._editor.variable(f"{like.name}.part", like.dtype, dims)
            self._editor.node(op, inputs, [out], out.name, **attrs)
            self._made[key] = out
        return self._made[key]

    def _ints(self, values: Sequence[int]) -> Tensor:
        array = np.array(values, np.int64)
        key = ("ints", *values)
        return self._made.setdefault(key, self._editor.constant("columns", array))

    def _constant(self, source: Tensor, choose: Callable[[Array], Array]) -> Tensor:
        made = arranged(self._editor, f"{source.name}.part", source, choose)
        value = np.asarray(made.values)
        return self._made.setdefault(("constant", str(value.dtype), value.shape, value.tobytes()), made)


_RULES = {
    **dict.fromkeys(ELEMENTWISE, Pieces._elementwise),
    "Concat": Pieces._concat,
    "Gather": Pieces._gather,
    "MatMul": Pieces._product,
    **dict.fromkeys(VIEWS, Pieces._unsqueeze),
}
