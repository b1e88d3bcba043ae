"""Mean and variance of a row, however they are spelled, become one ``RowMoments``.

Rule: for a tensor x with m = ReduceMean(x, last axis) and d = x - m (or m - x), m, v = RowMoments(x), and

1. ReduceMean(d·d, last axis) is v; ReduceSum(d·d, last axis) is v times the width;
2. ReduceMean(x·x, last axis) - m·m is v.

Conditions: x is floating point (a mean of integers is rounded); the reductions keep the reduced axis; the width is known. The variance is
the biased one of LayerNormalization (ONNX, opset 17), merged from centred parts, so that the second spelling gains accuracy.
Refused: a mean of squares without the mean taken off (RMSNorm): that is a plain row reduction, which an epilogue does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge.ir import (
    DOMAIN,
    GraphEditor,
    Tensor,
    in_order,
    made_by,
    producer,
    reduces_rows,
    remove_dead,
    same_shape,
    scalar_value,
    shape,
)

from .base import Pass, PassLog


@dataclass(frozen=True)
class _Variance:
    """``node`` computes ``scale`` times the variance of ``x``, whose mean ``mean`` computes."""

    node: gs.Node
    x: Tensor
    mean: gs.Node
    scale: int = 1


def run(graph: gs.Graph, log: PassLog) -> int:
    """Applies the rule everywhere; returns how often."""
    editor = GraphEditor(graph)
    made: dict[int, tuple[gs.Variable, gs.Variable]] = {}
    count = 0
    for node in in_order(graph):
        found = _about_mean(node) or _less_square(node)
        if found is None:
            continue
        x = found.x
        if id(x) not in made:
            dims = (*shape(x)[:-1], 1)
            mean, var = (
                editor.variable(f"{x.name}.mean", x.dtype, dims),
                editor.variable(f"{x.name}.var", x.dtype, dims),
            )
            editor.node("RowMoments", [x], [mean, var], f"{node.name}.moments", domain=DOMAIN)
            editor.replace(found.mean.outputs[0], mean)
            made[id(x)] = (mean, var)
        var = made[id(x)][1]
        if found.scale != 1:
            width = editor.constant(f"{x.name}.width", np.array(found.scale, x.dtype))
            var = editor.apply("Mul", [var, width], shape(var), f"{node.name}.total")
        editor.replace(node.outputs[0], var)
        count += 1
    if count:
        remove_dead(graph)
    return count


def _about_mean(node: gs.Node) -> _Variance | None:
    """The mean or sum of the squares of what the mean was taken off."""
    op = next((op for op in ("ReduceMean", "ReduceSum") if reduces_rows(node, op)), None)
    deviation = None if op is None or not _is_float(node) else _squared(node.inputs[0])
    source = made_by(deviation, "Sub") if deviation is not None else None
    if source is None or deviation is None:
        return None
    width = shape(deviation)[-1]
    for x, m in (source.inputs, source.inputs[::-1]):
        mean = _mean(m)
        if mean is not None and mean.inputs[0] is x and same_shape(shape(x), shape(deviation)):
            if op == "ReduceMean":
                return _Variance(node, x, mean)
            return _Variance(node, x, mean, width) if isinstance(width, int) else None
    return None


def _less_square(node: gs.Node) -> _Variance | None:
    """The mean of the squares less the square of the mean."""
    if node.op != "Sub" or node.domain or not _is_float(node):
        return None
    squares, m = _mean(node.inputs[0]), _squared(node.inputs[1])
    x, mean = None if squares is None else _squared(squares.inputs[0]), None if m is None else _mean(m)
    if x is None or mean is None or mean.inputs[0] is not x:
        return None
    return _Variance(node, x, mean)


def _is_float(node: gs.Node) -> bool:
    return np.dtype(node.outputs[0].dtype).kind not in "iu"


def _mean(tensor: Tensor) -> gs.Node | None:
    """The node that computes ``tensor``, if that is the mean of a row."""
    node = producer(tensor)
    return node if node is not None and reduces_rows(node, "ReduceMean") else None


def _squared(tensor: Tensor) -> Tensor | None:
    """d, if ``tensor`` is d·d or d^2."""
    node = made_by(tensor, "Mul", "Pow")
    if node is None:
        return None
    a, b = node.inputs
    if (node.op == "Mul" and a is b) or (node.op == "Pow" and scalar_value(b) == 2.0):
        return a
    return None


PASS = Pass("row_moments", run)
