"""A softmax that is written out becomes the operator, and its neighbours are brought into place, so that attention is seen whoever wrote it.

Rules, all over one and the same axis:

1. ``e / ReduceSum(e)`` or ``e · Reciprocal(ReduceSum(e))`` with ``e = Exp(x - ReduceMax(x))`` is Softmax(x); so is ``Exp(log e - Log(ReduceSum(e)))``, the exponential of LogSoftmax;
2. Softmax(x - ReduceMax(x)) is Softmax(x);
3. A · Softmax(x)ᵀ is (Softmax(x) · Aᵀ)ᵀ, for a softmax over the last axis.

Refused: the first without the maximum, since that overflows where Softmax does not.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from .. import ir
from .builder import Builder, decomposition


@decomposition("Div")
def _divided(b: Builder) -> ir.Tensor | None:
    return _written_out(b, *b.node.inputs)


@decomposition("Mul")
def _multiplied(b: Builder) -> ir.Tensor | None:
    for e, factor in (b.node.inputs, b.node.inputs[::-1]):
        inverse = ir.made_by(factor, "Reciprocal")
        found = None if inverse is None else _written_out(b, e, inverse.inputs[0])
        if found is not None:
            return found
    return None


def _written_out(b: Builder, e: ir.Tensor, total: ir.Tensor) -> ir.Tensor | None:
    top, bottom = ir.made_by(e, "Exp"), ir.made_by(total, "ReduceSum")
    if top is None or bottom is None or bottom.inputs[0] is not e:
        return None
    found = _shifted(top.inputs[0])
    if found is None:
        return None
    x, axis = found
    return b("Softmax", x, axis=axis) if axis == _axis(bottom, len(ir.shape(x))) else None


@decomposition("Exp")
def _exponential(b: Builder) -> ir.Tensor | None:
    log_softmax = ir.made_by(b.node.inputs[0], "Sub")
    log = None if log_softmax is None else ir.made_by(log_softmax.inputs[1], "Log")
    total = None if log is None else ir.made_by(log.inputs[0], "ReduceSum")
    e = None if total is None else ir.made_by(total.inputs[0], "Exp")
    if log_softmax is None or log is None or e is None or e.inputs[0] is not log_softmax.inputs[0]:
        return None
    return _written_out(b, e.outputs[0], log.inputs[0])


@decomposition("Softmax")
def _of_shifted(b: Builder) -> ir.Tensor | None:
    found = _shifted(b.node.inputs[0])
    if found is None:
        return None
    x, axis = found
    return b("Softmax", x, axis=axis) if axis == int(b.attr("axis", -1)) % len(ir.shape(x)) else None


@decomposition("MatMul")
def _from_the_right(b: Builder) -> ir.Tensor | None:
    a, right = b.node.inputs
    turn = ir.made_by(right, "Transpose")
    softmax = None if turn is None else ir.made_by(turn.inputs[0], "Softmax")
    if turn is None or softmax is None or a.shape is None:
        return None
    rank = len(ir.shape(right))
    swap = [*range(rank - 2), rank - 1, rank - 2]
    last = int(softmax.attrs.get("axis", -1)) % rank == rank - 1
    if rank < 2 or not last or list(turn.attrs.get("perm", ())) != swap or len(ir.shape(a)) != rank:
        return None
    return b("Transpose", b("MatMul", turn.inputs[0], b("Transpose", a, perm=swap)), perm=swap)


def _shifted(tensor: ir.Tensor) -> tuple[ir.Tensor, int] | None:
    """x and the axis, if ``tensor`` is ``x - ReduceMax(x)``."""
    node = ir.made_by(tensor, "Sub")
    largest = None if node is None else ir.made_by(node.inputs[1], "ReduceMax")
    if node is None or largest is None or largest.inputs[0] is not node.inputs[0] or node.inputs[0].shape is None:
        return None
    axis = _axis(largest, len(ir.shape(node.inputs[0])))
    return None if axis is None else (node.inputs[0], axis)


def _axis(node: gs.Node, rank: int) -> int | None:
    """The one axis that a reduction makes 1; None if it is not such."""
    axes = ir.constant_value(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None or axes.size != 1 or not node.attrs.get("keepdims", 1):
        return None
    return int(axes.reshape(-1)[0]) % rank
