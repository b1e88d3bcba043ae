"""How ``coda.GroupedConv`` is lowered: from a graph node to the arguments of ``grouped``."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from ..epilogue.program import EpilogueProgram
from ..errors import ShapeError
from ..ir import constant_value, shape
from ..window import Window
from .gemm import Windows
from .grouped import lower_grouped
from .kernel import KernelCall
from .registry import Context, kernel


@kernel("GroupedConv")
def lower_grouped_node(node: gs.Node, context: Context) -> list[KernelCall]:
    """``coda.GroupedConv``: rows are all windows together."""
    x, weight, *operands = node.inputs
    value = constant_value(weight)
    if value is None or value.ndim != 2 or value.dtype != np.float32:
        raise ShapeError(
            f"GroupedConv (node '{node.name}') needs constant float32 weights [taps·C/group, N], found '{weight.name}'"
        )
    batch, *sizes, _ = shape(x)
    return [
        lower_grouped(
            context.target,
            node.name,
            EpilogueProgram.parse(node.attrs["epilogue"]),
            x.name,
            value,
            [t.name for t in operands],
            [t.name for t in node.outputs],
            Windows(Window.parse(node.attrs["window"]), batch, tuple(sizes)),
            int(node.attrs["group"]),
            source=tuple(node.attrs.get("source", ())),
        )
    ]
