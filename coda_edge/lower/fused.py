"""How ``coda.Gemm`` is lowered: from a graph node to the arguments of ``gemm``."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from ..epilogue.program import EpilogueProgram
from ..errors import ShapeError
from ..ir import constant_value, shape
from ..weights import weight_of
from ..window import Window, rows_shape
from .gemm import Windows, lower_gemm
from .kernel import KernelCall
from .pointwise import product
from .problems import gemm_problem
from .registry import Context, kernel


@kernel("Gemm")
def lower_gemm_node(node: gs.Node, context: Context) -> list[KernelCall]:
    """``coda.Gemm``: rows are all leading dimensions of A, or of its windows, together."""
    a, weight, *operands = node.inputs
    value = constant_value(weight)
    whole = np.dtype(a.dtype).kind in "iu"
    if value is None or value.ndim != 2 or value.dtype != (np.int8 if whole else np.float32):
        kind = "int8" if whole else "float32"
        raise ShapeError(f"Gemm (node '{node.name}') needs constant {kind} weights [K, N], found '{weight.name}'")
    window = node.attrs.get("window")
    dims = rows_shape(shape(a), window)
    windows = None if window is None else Windows(Window.parse(window), shape(a)[0], shape(a)[1:-1])
    return [
        lower_gemm(
            context.target,
            node.name,
            EpilogueProgram.parse(node.attrs["epilogue"]),
            a.name,
            weight_of(weight) if context.narrow and not whole else value,
            [t.name for t in operands],
            [t.name for t in node.outputs],
            product(dims[:-1]),
            product(dims[1:-1]),
            context.schedules.gemm(gemm_problem(node, context.target)),
            source=tuple(node.attrs.get("source", ())),
            windows=windows,
            zero=int(node.attrs.get("zero", 0)),
        )
    ]
