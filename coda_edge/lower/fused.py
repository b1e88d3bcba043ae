"""How ``coda`` nodes with a template are lowered: from a graph node to the arguments of ``gemm`` and ``attention``."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from ..epilogue.program import EpilogueProgram
from ..errors import ShapeError
from ..ir import Tensor, constant_value, shape
from ..symbolic import Dim
from .attention import AttentionSizes, ScoreOperand, lower_attention
from .gemm import lower_gemm
from .kernel import KernelCall
from .pointwise import product
from .registry import Context, kernel


@kernel("Gemm")
def lower_gemm_node(node: gs.Node, context: Context) -> list[KernelCall]:
    """``coda.Gemm``: rows are all leading dimensions of A together."""
    a, weight, *operands = node.inputs
    value = constant_value(weight)
    if value is None or value.ndim != 2 or value.dtype != np.float32:
        raise ShapeError(f"Gemm (node '{node.name}') needs constant float32 weights [K, N], found '{weight.name}'")
    dims = shape(a)
    return [
        lower_gemm(
            context.target,
            node.name,
            EpilogueProgram.parse(node.attrs["epilogue"]),
            a.name,
            value,
            [t.name for t in operands],
            [t.name for t in node.outputs],
            product(dims[:-1]),
            dims[-2],
            source=tuple(node.attrs.get("source", ())),
        )
    ]


@kernel("Attention")
def lower_attention_node(node: gs.Node, context: Context) -> list[KernelCall]:
    """``coda.Attention``."""
    q, k, v, *operands = node.inputs
    batch, heads, queries, depth = shape(q)
    _, kv_heads, keys, columns = shape(v)
    return [
        lower_attention(
            context.target,
            node.name,
            EpilogueProgram.parse(node.attrs["score"]),
            (q.name, k.name, v.name),
            [ScoreOperand(t.name, _four(t)) for t in operands],
            node.outputs[0].name,
            AttentionSizes(batch, heads, queries, keys, int(depth), int(columns), int(heads) // int(kv_heads)),
            bool(node.attrs["guard"]),
            source=tuple(node.attrs.get("source", ())),
        )
    ]


def _four(tensor: Tensor) -> tuple[Dim, Dim, Dim, Dim]:
    """The shape of a score operand, with leading ones to four dimensions."""
    dims = (*(1,) * (4 - len(shape(tensor))), *shape(tensor))
    return dims[0], dims[1], dims[2], dims[3]
