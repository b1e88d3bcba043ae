"""One spelling of a row's statistics: means rather than scaled sums, kept axes rather than dropped and inserted ones.

1. A reduction that drops its axes is one that keeps them as 1, and a Squeeze.
2. ``f(Squeeze(r), …) = Squeeze(f(r, …))`` for elementwise f whose other operands are single numbers or squeezed alike, where r comes from
   a reduction. The Squeeze then meets the Unsqueeze that undoes it, wherever an exporter put that.
3. ``ReduceSum(x) · c`` and ``ReduceSum(x) / n`` are ``ReduceMean(x)`` where c·n is 1, n being the number of elements of a sum.

Refused: reductions of integers (their means are rounded, their sums are shapes); sums that others read too.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_graphsurgeon as gs

from .. import ir
from .builder import Builder, decomposition

_REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")
# Relative distance of a constant from 1 / n: a float32 rounding or two.
_CLOSE = 2.0**-22


@decomposition(*_REDUCTIONS)
def _keep_axes(b: Builder) -> ir.Tensor | None:
    if b.attr("keepdims", 1) or np.dtype(b.dtype).kind != "f" or len(b.node.inputs) != 2:
        return None
    x, axes = b.node.inputs
    if ir.constant_value(axes) is None:
        return None
    return b("Squeeze", b(b.node.op, x, axes, keepdims=1), axes)


@decomposition(*(op for op in ir.ELEMENTWISE if op != "Cast"))
def _squeeze_later(b: Builder) -> ir.Tensor | None:
    variables = [t for t in b.node.inputs if not isinstance(t, gs.Constant)]
    views = [ir.made_by(t, "Squeeze") for t in variables]
    first = views[0] if views else None
    if first is None or len(first.inputs) != 2 or any(t.values.size != 1 for t in _constants(b.node)):
        return None
    axes = ir.constant_value(first.inputs[1])
    if axes is None or any(t.values.ndim > b.rank() for t in _constants(b.node)):
        return None
    sources: dict[int, ir.Tensor] = {}
    for tensor, view in zip(variables, views, strict=True):
        given = None if view is None or len(view.inputs) != 2 else ir.constant_value(view.inputs[1])
        if view is None or given is None or not np.array_equal(given, axes) or view.inputs[0].shape is None:
            return None
        if len(ir.shape(view.inputs[0])) != len(ir.shape(first.inputs[0])) or not _is_statistic(view.inputs[0]):
            return None
        sources[id(tensor)] = view.inputs[0]
    scalars = {id(t): b.editor.constant(f"{t.name}.scalar", t.values.reshape(-1)[0]) for t in _constants(b.node)}
    operands = [sources.get(id(t)) or scalars[id(t)] for t in b.node.inputs]
    return b("Squeeze", b(b.node.op, *operands, **b.node.attrs), first.inputs[1])


def _constants(node: gs.Node) -> list[gs.Constant]:
    return [t for t in node.inputs if isinstance(t, gs.Constant)]


def _is_statistic(tensor: ir.Tensor) -> bool:
    """Whether ``tensor`` is a reduction's result, or made from one elementwise."""
    node = ir.producer(tensor)
    while node is not None and node.op in ir.ELEMENTWISE:
        node = next((p for t in node.inputs if (p := ir.producer(t)) is not None), None)
    return node is not None and node.op in _REDUCTIONS


@decomposition("Mul", "Div")
def _mean(b: Builder) -> ir.Tensor | None:
    for total, factor in (b.node.inputs, reversed(b.node.inputs)):
        node, c = ir.made_by(total, "ReduceSum"), ir.scalar_value(factor)
        swapped = total is not b.node.inputs[0]
        if node is None or c is None or (swapped and b.node.op == "Div") or len(node.inputs) != 2:
            continue
        x, axes = node.inputs[0], ir.constant_value(node.inputs[1])
        alone = ir.sole_consumer(b.editor.graph, total) is b.node and total.shape is not None
        if not alone or axes is None or x.shape is None or np.dtype(total.dtype).kind != "f":
            continue
        if len(ir.shape(factor)) > len(ir.shape(total)):
            continue
        sizes = [ir.shape(x)[a] for a in axes.tolist()]
        known = sizes and all(isinstance(d, int) for d in sizes)
        count = math.prod(d for d in sizes if isinstance(d, int)) if known else 0
        share = c * count if b.node.op == "Mul" else count / c if c else 0.0
        if abs(share - 1) < _CLOSE:
            return b("ReduceMean", x, node.inputs[1], **node.attrs)
    return None
