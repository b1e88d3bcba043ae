"""A softmax that is written out becomes the operator, so that attention is seen whoever wrote it.

Rule: ``e / ReduceSum(e)`` with ``e = Exp(x - ReduceMax(x))``, both over one and the same axis with ``keepdims``, is Softmax(x).

Refused: without the maximum, since that overflows where Softmax does not.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from .. import ir
from .builder import Builder, decomposition


@decomposition("Div")
def _written_out(b: Builder) -> ir.Tensor | None:
    e, total = b.node.inputs
    top, bottom = ir.made_by(e, "Exp"), ir.made_by(total, "ReduceSum")
    shifted = None if top is None else ir.made_by(top.inputs[0], "Sub")
    if shifted is None or bottom is None or bottom.inputs[0] is not e:
        return None
    x, most = shifted.inputs
    largest = ir.made_by(most, "ReduceMax")
    if largest is None or largest.inputs[0] is not x or x.shape is None:
        return None
    axis = _axis(bottom, len(ir.shape(x)))
    return None if axis is None or axis != _axis(largest, len(ir.shape(x))) else b("Softmax", x, axis=axis)


def _axis(node: gs.Node, rank: int) -> int | None:
    """The one axis that a reduction makes 1; None if it is not such."""
    axes = ir.constant_value(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None or axes.size != 1 or not node.attrs.get("keepdims", 1):
        return None
    return int(axes.reshape(-1)[0]) % rank
