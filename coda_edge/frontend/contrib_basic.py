"""Microsoft's GELUs, norms, fused products and convolutions, and operators that ONNX has taken over since.

Source: onnxruntime's ContribOperators documentation.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .. import ir
from ..errors import UnsupportedOperator
from .builder import Builder
from .composite import MICROSOFT, composite
from .decompose import divide_by_rms, gelu, scale_shift, standardize, swish

# Of the norms that add first, where the node gives none.
_SKIP_EPSILON = 1e-12


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
    y, mean, deviation = standardize(b, total, [b.rank() - 1], b.attr("epsilon", _SKIP_EPSILON))
    return [scale_shift(b, y, b.input(2), b.input(3)), mean, deviation, total]


@composite("SkipSimplifiedLayerNormalization")
def _skip_simplified_layer_norm(b: Builder) -> list[ir.Tensor] | None:
    if any(t.name and (t.outputs or ir.is_output(b.editor.graph, t)) for t in b.node.outputs[1:3]):
        return None
    total = scale_shift(b, b("Add", b.node.inputs[0], b.node.inputs[1]), None, b.input(3))
    y = scale_shift(b, divide_by_rms(b, total, [b.rank() - 1], b.attr("epsilon", _SKIP_EPSILON)), b.input(2), None)
    return [y, total, total, total]


@composite("GemmFastGelu")
def _gemm_fast_gelu(b: Builder) -> ir.Tensor:
    return gelu(b, scale_shift(b, b("MatMul", *b.node.inputs[:2]), None, b.input(2)), tanh=True)


@composite("BiasSplitGelu")
def _bias_split_gelu(b: Builder) -> ir.Tensor:
    last = b.rank() - 1
    width = ir.shape(b.node.inputs[1])[0]
    if not isinstance(width, int):
        raise UnsupportedOperator(f"{MICROSOFT}::{b.node.op}", b.node.name, "the width of its bias must be fixed")
    total = b("Add", *b.node.inputs)
    left, right = (b("Slice", total, [i * width // 2], [(i + 1) * width // 2], [last]) for i in (0, 1))
    return b("Mul", left, gelu(b, right, tanh=False))


@composite("BiasAdd")
def _bias_add(b: Builder) -> ir.Tensor:
    x, bias, skip = b.node.inputs
    return b("Add", b("Add", x, bias), skip)


@composite("FusedMatMul", "TransposeMatMul", "FusedMatMulActivation")
def _fused_matmul(b: Builder) -> ir.Tensor:
    left, right = (
        b.node.inputs[i]
        if (perm := _order(b.rank(i), b.attr(f"trans{side}", 0), b.attr(f"transBatch{side}", 0))) == sorted(perm)
        else b("Transpose", b.node.inputs[i], perm=perm)
        for i, side in enumerate("AB")
    )
    product, alpha = b("MatMul", left, right), b.attr("alpha", 1.0)
    return activated(b, product if alpha == 1 else b("Mul", product, alpha), _activation_attributes(b))


def _order(rank: int, swap: int, batch: int) -> list[int]:
    """The axes of an operand in order: ``batch`` takes the first before the last, ``swap`` exchanges the last two."""
    if rank < 2:
        return list(range(rank))
    axes = [*range(1, rank - 1), 0, rank - 1] if batch else list(range(rank))
    return [*axes[:-2], axes[-1], axes[-2]] if swap else axes


def _activation_attributes(b: Builder) -> dict[str, float]:
    return {n.removeprefix("activation_"): v for n, v in b.node.attrs.items() if n.startswith("activation_")}


def activated(b: Builder, y: ir.Tensor, attrs: Mapping[str, float]) -> ir.Tensor:
    """``y`` after the activation that the node names, if it names one."""
    name = str(b.attr("activation", ""))
    return b(name, y, **attrs) if name else y


@composite("FusedGemm")
def _fused_gemm(b: Builder) -> ir.Tensor:
    attrs = {n: v for n, v in b.node.attrs.items() if not n.startswith("activation")}
    return activated(b, b("Gemm", *b.node.inputs, **attrs), _activation_attributes(b))


#: What the numbers of FusedConv's activation_params are.
_PARAMETERS = {"LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta")}


@composite("FusedConv")
def _fused_conv(b: Builder) -> ir.Tensor:
    attrs = {n: v for n, v in b.node.attrs.items() if not n.startswith("activation")}
    y = b("Conv", *b.node.inputs[:3], **attrs)
    added, name, numbers = b.input(3), str(b.attr("activation", "")), b.attr("activation_params", [])
    y = y if added is None else b("Add", y, added)
    if name == "Clip":
        return b("Clip", y, *map(float, numbers))
    return activated(b, y, dict(zip(_PARAMETERS.get(name, ()), numbers, strict=False)))


@composite("GroupNorm", "SkipGroupNorm")
def _group_norm(b: Builder) -> list[ir.Tensor]:
    """Of an image, its channels last unless the node says otherwise; SkipGroupNorm adds an image or a row, and a bias, before."""
    x, gamma, beta = b.node.inputs[:3]
    last = b.attr("channels_last", 1)
    if b.node.op == "SkipGroupNorm":
        x = _skipped(b, x, bool(last))
    channels = ir.shape(gamma)[0]
    y = b("Transpose", x, perm=[0, 3, 1, 2]) if last else x
    groups = b.attr("groups", 1)
    grouped = b("Reshape", y, [0, groups, -1])
    grouped, _, _ = standardize(b, grouped, [2], b.attr("epsilon", 1e-5))
    if not isinstance(channels, int):
        raise UnsupportedOperator(f"{MICROSOFT}::{b.node.op}", b.node.name, "the number of channels must be fixed")
    y = b("Reshape", grouped, b("Shape", y))
    y = scale_shift(b, y, b("Reshape", gamma, [-1, 1, 1]), b("Reshape", beta, [-1, 1, 1]))
    y = swish(b, y, 1.0) if b.attr("activation", 0) else y
    return [b("Transpose", y, perm=[0, 2, 3, 1]) if last else y, x][: len(b.node.outputs)]


def _skipped(b: Builder, x: ir.Tensor, last: bool) -> ir.Tensor:
    skip, bias = b.node.inputs[3], b.input(4)
    if len(ir.shape(skip)) == 2:
        skip = b("Unsqueeze", skip, [1, 2] if last else [2, 3])
    x = b("Add", x, skip)
    return x if bias is None else b("Add", x, bias if last else b("Reshape", bias, [-1, 1, 1]))


@composite("Trilu", "Pad", "GatherND")
def _as_in_onnx(b: Builder) -> ir.Tensor:
    """Operators that ONNX has taken over since."""
    return b(b.node.op, *b.node.inputs, **b.node.attrs)


@composite("ExpandDims")
def _expand_dims(b: Builder) -> ir.Tensor:
    axis = ir.scalar_value(b.node.inputs[1])
    if axis is None:
        raise UnsupportedOperator(f"{MICROSOFT}::ExpandDims", b.node.name, "its axis must be constant")
    return b("Unsqueeze", b.node.inputs[0], [int(axis)])


@composite("UnfoldTensor")
def _unfold(b: Builder) -> ir.Tensor:
    """Every window of ``size`` along one axis, the windows' elements as a new last axis."""
    x, axis = b.node.inputs[0], b.attr("dim", -1) % b.rank()
    size, step = b.attr("size", 1), b.attr("step", 1)
    with b.numbers(np.int64):
        extent = b("Squeeze", b("Shape", x, start=axis, end=axis + 1), [0])
        starts = b("Range", 0, b("Sub", extent, size - 1), step)
        index = b("Add", b("Unsqueeze", starts, [1]), list(range(size)))
    windows = b("Gather", x, index, axis=axis)
    rank = b.rank() + 1
    return b("Transpose", windows, perm=[i for i in range(rank) if i != axis + 1] + [axis + 1])
