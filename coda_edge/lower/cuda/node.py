"""How a graph's nodes are lowered for GPUs: products and attention of halves to tensor cores, pointwise operators by blocks, all else by threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs
from tvm import tirx

from ... import ir
from ...epilogue.program import EpilogueProgram
from ...targets import Target
from ...targets.cuda import CudaTarget
from ...window import Window
from ..attention_node import attention_call
from ..emit import Emitter, Expr, int64
from ..kernel import KernelCall
from ..pointwise import product
from ..registry import Application, Context, KernelRule, View, constant, pointwise
from .attention import lower_cuda_attention
from .block import BlockEmitter
from .gemm import lower_cuda_gemm
from .threads import by_threads


def emitter_for(target: Target) -> type[Emitter]:
    """What writes the pointwise kernels of a target."""
    return BlockEmitter if isinstance(target, CudaTarget) else Emitter


def cuda_rule(node: gs.Node, rule: KernelRule | None) -> KernelRule | None:
    """The rule of ``node`` on a GPU, where ``rule`` is that of CPUs; None for a pointwise operator."""
    halves = bool(node.inputs) and node.domain == ir.DOMAIN and node.inputs[0].dtype == np.float16
    if halves and node.op in _TENSOR_CORES:
        return _TENSOR_CORES[node.op]
    if rule is None or node.op in _BY_BLOCKS:
        return rule
    return lambda node, context: [by_threads(call) for call in rule(node, context)]


_BY_BLOCKS = frozenset({"Map", "RowMoments"})


def _gemm(node: gs.Node, context: Context) -> list[KernelCall]:
    a, weight, *operands = node.inputs
    assert isinstance(context.target, CudaTarget)
    dims = ir.shape(a)
    return [
        lower_cuda_gemm(
            context.target,
            node.name,
            EpilogueProgram.parse(node.attrs["epilogue"]),
            a.name,
            np.asarray(ir.constant_value(weight)),
            [t.name for t in operands],
            [t.name for t in node.outputs],
            product(dims[:-1]),
            product(dims[1:-1]),
            source=tuple(node.attrs.get("source", ())),
        )
    ]


def _attention(node: gs.Node, context: Context) -> list[KernelCall]:
    return [attention_call(node, context.target, lower_cuda_attention)]


_TENSOR_CORES = {"Gemm": _gemm, "Attention": _attention}


@pointwise("Window")
def window(op: Application) -> View:
    """``coda.Window``: the places under each tap, taps in row-major order, zeros beyond the tensor."""
    x, parsed = op.view(0), Window.parse(op.node.attrs["window"])
    sizes, channels = x.shape[1:-1], x.shape[-1]

    def at(indices: Sequence[Expr]) -> Expr:
        batch, *places, column = indices
        *taps, channel = op.emit.unravel(column, [*parsed.kernel, channels])
        source, inside = [], tirx.const(True, "bool")
        for i, (place, tap) in enumerate(zip(places, taps, strict=True)):
            index = op.emit.bind(
                place * int64(parsed.strides[i]) + tap * int64(parsed.dilations[i]) - int64(parsed.before[i])
            )
            source.append(index)
            if parsed.before[i] or parsed.after[i]:
                inside = tirx.And(inside, tirx.And(index >= 0, index < op.emit.size(sizes[i])))
        if not parsed.padded:
            return x.at([batch, *source, channel])
        zero = constant(0, op.dtype)
        return op.emit.branch(inside, lambda: x.at([batch, *source, channel]), lambda: zero, op.dtype)

    return op.result(at)
