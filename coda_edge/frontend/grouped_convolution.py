"""Convolutions in groups, depthwise ones too, over channels-last rows: see ``convolution``.

``Conv(x, W)`` with constant float32 weights and several groups is ``T⁻¹(GroupedConv(T(x), W') + bias)``, T moving channels last: a
product whose epilogue grows as a GEMM's does.

Source: ONNX operator Conv, opsets 1 to 22.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from .. import ir
from .builder import Builder, decomposition
from .convolution import window_of

#: The epilogue of a product that nothing has joined yet.
PLAIN = "(acc: tile f32) -> (y: tile = acc) {\n}"


@decomposition("Conv")
def _grouped_conv(b: Builder) -> ir.Tensor | None:
    x, group = b.node.inputs[0], int(b.attr("group", 1))
    weight = ir.constant_value(b.node.inputs[1])
    if weight is None or group == 1 or weight.dtype != np.float32 or isinstance(x, gs.Constant):
        return None
    window = window_of(b, weight.shape[2:])
    if window is None or min(*window.before, *window.after) < 0:
        return None
    matrix = np.ascontiguousarray(weight.transpose(*range(2, weight.ndim), 1, 0)).reshape(-1, weight.shape[0])
    y = b(
        "GroupedConv",
        b("Transpose", x, perm=[0, *range(2, b.rank()), 1]),
        b.editor.constant(f"{b.node.inputs[1].name}.matrix", matrix),
        domain=ir.DOMAIN,
        window=str(window),
        group=group,
        epilogue=PLAIN,
    )
    bias = b.input(2)
    y = y if bias is None else b("Add", y, bias)
    return b("Transpose", y, perm=[0, b.rank() - 1, *range(1, b.rank() - 1)])
