"""Operators that onnxruntime's own optimiser writes, in domain ``com.microsoft``.

Source: onnxruntime's ContribOperators documentation. Those that fuse whole attentions are not here.
"""

from __future__ import annotations

from .. import ir
from .builder import Builder
from .composite import composite
from .decompose import divide_by_rms, gelu, scale_shift, standardize, swish


@composite("Gelu")
def _gelu(b: Builder) -> ir.Tensor:
    return gelu(b, b.node.inputs[0], tanh=False)


@composite("BiasGelu")
def _bias_gelu(b: Builder) -> ir.Tensor:
    return gelu(b, b("Add", *b.node.inputs), tanh=False)


@composite("FastGelu")
def _fast_gelu(b: Builder) -> ir.Tensor:
    return gelu(b, scale_shift(b, b.node.inputs[0], None, b.input(1)), tanh=True)


@composite("QuickGelu")
def _quick_gelu(b: Builder) -> ir.Tensor:
    return swish(b, b.node.inputs[0], b.attr("alpha", 1.702))


@composite("SimplifiedLayerNormalization")
def _simplified_layer_norm(b: Builder) -> ir.Tensor:
    y = divide_by_rms(b, b.node.inputs[0], [b.rank() - 1], b.attr("epsilon", 1e-5))
    return scale_shift(b, y, b.input(1), None)


@composite("SkipLayerNormalization")
def _skip_layer_norm(b: Builder) -> list[ir.Tensor]:
    total = scale_shift(b, b("Add", b.node.inputs[0], b.node.inputs[1]), None, b.input(4))
    y, mean, deviation = standardize(b, total, [b.rank() - 1], b.attr("epsilon", 1e-5))
    return [scale_shift(b, y, b.input(2), b.input(3)), mean, deviation, total]


@composite("SkipSimplifiedLayerNormalization")
def _skip_simplified_layer_norm(b: Builder) -> list[ir.Tensor] | None:
    if any(t.name and (t.outputs or ir.is_output(b.editor.graph, t)) for t in b.node.outputs[1:3]):
        return None
    total = scale_shift(b, b("Add", b.node.inputs[0], b.node.inputs[1]), None, b.input(3))
    y = scale_shift(b, divide_by_rms(b, total, [b.rank() - 1], b.attr("epsilon", 1e-5)), b.input(2), None)
    return [y, total, total, total]


@composite("FusedMatMul")
def _fused_matmul_in_parts(b: Builder) -> ir.Tensor | None:
    if b.attr("transBatchA", 0) or b.attr("transBatchB", 0):
        return None
    left, right = b.node.inputs
    left = _swapped(b, left, b.rank(0)) if b.attr("transA", 0) else left
    right = _swapped(b, right, b.rank(1)) if b.attr("transB", 0) else right
    product, alpha = b("MatMul", left, right), b.attr("alpha", 1.0)
    return product if alpha == 1 else b("Mul", product, alpha)


def _swapped(b: Builder, x: ir.Tensor, rank: int) -> ir.Tensor:
    return b("Transpose", x, perm=[*range(rank - 2), rank - 1, rank - 2])


@composite("FusedGemm")
def _fused_gemm_in_parts(b: Builder) -> ir.Tensor:
    attrs = dict(b.node.attrs)
    activation = str(attrs.pop("activation"))
    own = {n.removeprefix("activation_"): attrs.pop(n) for n in list(attrs) if n.startswith("activation_")}
    return b(activation, b("Gemm", *b.node.inputs, **attrs), **own)
