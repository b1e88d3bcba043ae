"""Transposes that cancel through elementwise operators and reductions.

``T₂(f(T₁(a), T₁(b), c))`` is ``f(a, b, T₂(c))`` where T₂ undoes T₁ and ``f`` is any tree of elementwise operators with
constants ``c``, and of reductions that keep their axes: a norm over channels that come first is
one over channels that come last, never the other way. It happens only if every leaf that is no constant cancels, so it never adds a transpose.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from .. import ir
from .builder import Builder, decomposition

# Operators between two transposes: a norm, an activation and a residual or two.
_MOST_NODES = 64
_REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")


@decomposition("Transpose")
def _cancelled(b: Builder) -> ir.Tensor | None:
    x = b.node.inputs[0]
    perm = list(b.attr("perm", None) or range(b.rank())[::-1])
    source = ir.producer(x)
    if source is None or source.op not in ir.ELEMENTWISE:
        return None
    undone = [perm.index(axis) for axis in range(len(perm))]
    tree = _tree(source, undone)
    if tree is None:
        return None
    made: dict[str, ir.Tensor] = {}
    for node in tree:
        operands = [_operand(b, t, made, perm) for t in node.inputs]
        if node.op in _REDUCTIONS:
            axes = ir.constant_value(node.inputs[1])
            assert axes is not None
            operands[1] = b.tensor(sorted(perm.index(a) for a in axes.tolist()))
        made[node.outputs[0].name] = b(node.op, *operands, **node.attrs)
    return made[x.name]


def _tree(root: gs.Node, undone: list[int]) -> list[gs.Node] | None:
    """The elementwise nodes and reductions under ``root`` in order of evaluation; None if a leaf is neither constant nor transposed by ``undone``."""
    order: list[gs.Node] = []
    seen: set[int] = set()

    def visit(node: gs.Node) -> bool:
        if id(node) in seen:
            return True
        seen.add(id(node))
        if len(seen) > _MOST_NODES or len(node.outputs) != 1 or node.domain:
            return False
        for tensor in node.inputs:
            if isinstance(tensor, gs.Constant):
                continue
            source = ir.producer(tensor)
            if source is None or tensor.shape is None or len(tensor.shape) != len(undone):
                return False
            if source.op == "Transpose" and not source.domain:
                if list(source.attrs.get("perm", ())) != undone:
                    return False
            elif not (source.op in ir.ELEMENTWISE or _turns(source, undone)) or not visit(source):
                return False
        order.append(node)
        return True

    return order if visit(root) else None


def _turns(node: gs.Node, undone: list[int]) -> bool:
    """Whether ``node`` reduces axes that are known and stay as 1; of the last axis only if it is the last one afterwards too."""
    kept = node.op in _REDUCTIONS and node.attrs.get("keepdims", 1) and len(node.inputs) == 2
    axes = ir.constant_value(node.inputs[1]) if kept else None
    last = len(undone) - 1
    return axes is not None and (last not in axes or last in [undone[a] for a in axes.tolist()])


def _operand(b: Builder, tensor: ir.Tensor, made: dict[str, ir.Tensor], perm: list[int]) -> ir.Tensor:
    """``tensor`` in the order that the cancelled transpose gives."""
    if tensor.name in made:
        return made[tensor.name]
    value = ir.constant_value(tensor)
    if value is None:
        (source,) = tensor.inputs
        kept: ir.Tensor = source.inputs[0]
        return kept
    if value.size == 1:
        return tensor
    full = value.reshape([1] * (len(perm) - value.ndim) + list(value.shape))
    return b.editor.constant(f"{tensor.name}.turned", np.ascontiguousarray(full.transpose(perm)))
