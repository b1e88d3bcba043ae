"""Recurrent operators whose batch comes first, as those whose time does.

Source: ONNX operators LSTM, GRU and RNN, attribute ``layout``, opset 14.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from .. import ir
from .builder import Builder, decomposition

# The outputs Y, Y_h and Y_c with the batch first, from those with time (or the directions) first.
_BACK = ([2, 0, 1, 3], [1, 0, 2], [1, 0, 2])


@decomposition("LSTM", "GRU", "RNN")
def _time_first(b: Builder) -> list[ir.Tensor] | None:
    if not b.attr("layout", 0):
        return None
    inputs = list(b.node.inputs)
    for index, perm in ((0, [1, 0, 2]), (5, [1, 0, 2]), (6, [1, 0, 2])):
        if b.input(index) is not None:
            inputs[index] = b("Transpose", inputs[index], perm=perm)
    attrs = {n: v for n, v in b.node.attrs.items() if n != "layout"}
    base = b.node.outputs[0].name or b.node.name
    outputs = [
        gs.Variable(b.editor.names.fresh(f"{base}.{b.node.op}")) if t.name else gs.Variable.empty()
        for t in b.node.outputs
    ]
    b.editor.node(b.node.op, inputs, outputs, f"{base}.{b.node.op}", **attrs)
    return [b("Transpose", t, perm=perm) if t.name else t for t, perm in zip(outputs, _BACK, strict=False)]
