"""Mean and variance of a row, however they are spelled, become one ``RowMoments``.

Rule: for a tensor x with m = ReduceMean(x, last axis), d = x - m (or m - x) and v = ReduceMean(d·d or d^2, last axis):
m, v = RowMoments(x).

Conditions: x is floating point (a mean of integers is rounded); both means keep the reduced axis. The variance is the biased one of LayerNormalization (ONNX, opset 17).
Refused: a mean of squares without the mean taken off (RMSNorm): that is a plain row reduction, which an epilogue does.
"""

from __future__ import annotations

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


def run(graph: gs.Graph, log: PassLog) -> int:
    """Applies the rule everywhere; returns how often."""
    editor = GraphEditor(graph)
    made: dict[int, tuple[gs.Variable, gs.Variable]] = {}
    count = 0
    for node in in_order(graph):
        found = _variance(node)
        if found is None:
            continue
        x, mean_node = found
        if id(x) not in made:
            dims = (*shape(x)[:-1], 1)
            mean, var = (
                editor.variable(f"{x.name}.mean", x.dtype, dims),
                editor.variable(f"{x.name}.var", x.dtype, dims),
            )
            editor.node("RowMoments", [x], [mean, var], f"{node.name}.moments", domain=DOMAIN)
            editor.replace(mean_node.outputs[0], mean)
            made[id(x)] = (mean, var)
        editor.replace(node.outputs[0], made[id(x)][1])
        count += 1
    if count:
        remove_dead(graph)
    return count


def _variance(node: gs.Node) -> tuple[Tensor, gs.Node] | None:
    """x and the node of its mean, if ``node`` computes x's variance."""
    if not reduces_rows(node, "ReduceMean") or np.dtype(node.outputs[0].dtype).kind in "iu":
        return None
    deviation = _squared(node.inputs[0])
    source = made_by(deviation, "Sub") if deviation is not None else None
    if source is None:
        return None
    for x, m in (source.inputs, source.inputs[::-1]):
        mean = producer(m)
        if (
            mean is not None
            and reduces_rows(mean, "ReduceMean")
            and mean.inputs[0] is x
            and same_shape(shape(x), shape(deviation))
        ):
            return x, mean
    return None


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
