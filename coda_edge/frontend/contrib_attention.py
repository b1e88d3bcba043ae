"""Microsoft's attention operators of equal query and key heads: Attention, MultiHeadAttention, DecoderMaskedMultiHeadAttention.

Source: onnxruntime's ContribOperators documentation; where it is silent, what its CPU kernels compute: a padding mask adds
``mask_filter_value`` to the scores, causality −∞.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .. import ir
from ..errors import UnsupportedOperator
from ..symbolic import Dim, divide, same
from .attention import Stages, attend, columns, length, merge_heads, rows, split_heads, where
from .builder import Builder
from .composite import MICROSOFT, composite

# What stands in a mask for a padded key, unless the node says otherwise.
_FILTER = -10000.0


@dataclass(frozen=True)
class _Heads:
    """q ``[B,H,Sq,D]``, k ``[B,H,Sk,D]``, v ``[B,H,Sk,Dv]``, the past included, and how long that is (int64 ``[1]``)."""

    q: ir.Tensor
    k: ir.Tensor
    v: ir.Tensor
    depth: int
    past: ir.Tensor | None


@composite("Attention")
def _attention(b: Builder) -> list[ir.Tensor]:
    _refuse_if(b, b.attr("do_rotary", 0), "rotates q and k by angles of its own: export the rotation as operators")
    _refuse_if(b, b.attr("past_present_share_buffer", 0), _SHARED)
    return project_and_attend(b, b.node.inputs[0], b.node.inputs[1], b.input(2), b.input(3), b.input(4), b.input(5))


_SHARED = "keeps past and present in one buffer: export the model with past and present as separate tensors"


def _refuse_if(b: Builder, condition: object, why: str) -> None:
    if condition:
        raise UnsupportedOperator(f"{MICROSOFT}::{b.node.op}", b.node.name, f"it {why}")


def project_and_attend(
    b: Builder,
    x: ir.Tensor,
    weights: ir.Tensor,
    bias: ir.Tensor | None,
    mask: ir.Tensor | None,
    past: ir.Tensor | None,
    scores_bias: ir.Tensor | None,
) -> list[ir.Tensor]:
    """Attention of ``x [B,S,K]`` with itself by merged ``weights [K, 2·D + Dv]``; the result and the present keys and values."""
    width = ir.shape(b.node.inputs[1])[-1]
    heads = b.required("num_heads")
    widths = b.attr("qkv_hidden_sizes", None) or ([width // 3] * 3 if isinstance(width, int) else None)
    if widths is None:
        raise UnsupportedOperator(f"{MICROSOFT}::{b.node.op}", b.node.name, "the width of its weights must be fixed")
    parts = []
    for start, size in zip(np.cumsum([0, *widths[:2]]).tolist(), widths, strict=True):
        part = b("MatMul", x, b("Slice", weights, [start], [start + size], [1]))
        if bias is not None:
            part = b("Add", part, b("Slice", bias, [start], [start + size], [0]))
        parts.append(split_heads(b, part, heads))
    q, k, v = parts
    if past is not None:
        k, v = (
            b("Concat", b("Squeeze", b("Slice", past, [i], [i + 1], [0]), [0]), new, axis=2)
            for i, new in enumerate((k, v))
        )
    found = _Heads(q, k, v, widths[0] // heads, None if past is None else b("Shape", past, start=3, end=4))
    stages = _attend(b, found, mask, scores_bias)
    y = merge_heads(b, stages.y)
    if len(b.node.outputs) == 1:
        return [y]
    return [y, b("Concat", b("Unsqueeze", k, [0]), b("Unsqueeze", v, [0]), axis=0)]


def _attend(b: Builder, heads: _Heads, mask: ir.Tensor | None, scores_bias: ir.Tensor | None) -> Stages:
    """With the masks of the node's attributes and inputs."""
    bias: list[ir.Tensor] = []
    if mask is not None:
        bias.append(where(b, _allowed(b, heads, mask), b.attr("mask_filter_value", _FILTER)))
    if b.attr("unidirectional", 0):
        at = rows(b, heads.q)
        at = at if heads.past is None else b("Add", at, heads.past)
        bias.append(where(b, b("LessOrEqual", columns(b, heads.k), at), -math.inf))
    if scores_bias is not None:
        bias.append(scores_bias)
    return attend(b, heads.q, heads.k, heads.v, b.attr("scale", 0.0) or 1 / math.sqrt(heads.depth), bias=bias)


def _allowed(b: Builder, heads: _Heads, mask: ir.Tensor) -> ir.Tensor:
    """Bool, of a shape that broadcasts to the scores ``[B,H,Sq,Sk]``: the keys that a mask of any of its forms leaves."""
    dims = ir.shape(mask)
    if len(dims) > 1:
        with b.numbers(mask.dtype):
            kept = b("Greater", mask, 0)
        return b("Unsqueeze", kept, {2: [1, 2], 3: [1]}[len(dims)]) if len(dims) < 4 else _window(b, heads, kept)
    batch: Dim = ir.shape(b.node.inputs[0])[0]
    count = b("Shape", b.node.inputs[0], start=0, end=1)
    ends = mask if same(dims[0], batch) else b("Slice", mask, [0], count, [0])
    kept = b("Less", columns(b, heads.k), _by_batch(b, ends, mask.dtype))
    if not same(dims[0], 2 * batch):
        return kept
    starts = _by_batch(b, b("Slice", mask, count, b("Mul", count, [2]), [0]), mask.dtype)
    return b("And", kept, b("GreaterOrEqual", columns(b, heads.k), starts))


def _window(b: Builder, heads: _Heads, mask: ir.Tensor) -> ir.Tensor:
    """What a mask ``[B,1,N,N]`` of a longest sequence says of these queries and keys."""
    queries = length(b, heads.q)
    first = (
        b.editor.constant(f"{b.node.outputs[0].name}.first", np.zeros(1, np.int64))
        if heads.past is None
        else heads.past
    )
    return b(
        "Slice",
        mask,
        b("Concat", first, [0], axis=0),
        b("Concat", b("Add", first, queries), length(b, heads.k), axis=0),
        [2, 3],
    )


def _by_batch(b: Builder, values: ir.Tensor, dtype: object) -> ir.Tensor:
    """int64 ``[B,1,1,1]`` from ``[B]``."""
    return b("Unsqueeze", b.cast(values, np.int64, dtype), [1, 2, 3])


def _part(width: Dim, parts: int) -> Dim:
    return divide(width, parts) or 0


@composite("MultiHeadAttention")
def _multi_head(b: Builder) -> list[ir.Tensor]:
    _refuse_if(b, b.input(8) is not None or b.input(9) is not None, _SHARED)
    return _separate(b, b.input(3), b.input(4), b.input(5), (b.input(6), b.input(7)))


@composite("DecoderMaskedMultiHeadAttention")
def _decoder(b: Builder) -> list[ir.Tensor]:
    _refuse_if(b, b.attr("past_present_share_buffer", 0) or b.input(9) is not None, _SHARED)
    return _separate(b, b.input(10), b.input(3), b.input(4), (b.input(5), b.input(6)))


def _separate(
    b: Builder,
    bias: ir.Tensor | None,
    mask: ir.Tensor | None,
    scores_bias: ir.Tensor | None,
    past: tuple[ir.Tensor | None, ir.Tensor | None],
) -> list[ir.Tensor]:
    q, k, v, depth = _projected(b, bias)
    if past[0] is not None and past[1] is not None:
        k, v = b("Concat", past[0], k, axis=2), b("Concat", past[1], v, axis=2)
    found = _Heads(q, k, v, depth, None if past[0] is None else length(b, past[0]))
    stages = _attend(b, found, mask, scores_bias)
    return [merge_heads(b, stages.y), k, v, stages.biased][: len(b.node.outputs)]


def _projected(b: Builder, bias: ir.Tensor | None) -> tuple[ir.Tensor, ir.Tensor, ir.Tensor, int]:
    """q, k and v with heads as an axis, and the depth of q's, from any of the forms of the inputs query, key and value."""
    query, key, value = b.node.inputs[0], b.input(1), b.input(2)
    heads, dims = b.required("num_heads"), ir.shape(query)
    packed = 1 if key is not None else 3
    depth = dims[4] if len(dims) == 5 else _part(dims[2], packed * heads)
    value_width = heads * depth if value is None or len(ir.shape(value)) != 3 else ir.shape(value)[2]
    if not isinstance(depth, int) or not isinstance(value_width, int) or depth == 0:
        raise UnsupportedOperator(f"{MICROSOFT}::{b.node.op}", b.node.name, "the width of its heads must be fixed")
    offsets = (0, heads * depth, 2 * heads * depth)
    widths = (heads * depth, heads * depth, value_width)

    def split(x: ir.Tensor, part: int) -> ir.Tensor:
        if bias is not None:
            x = b("Add", x, b("Slice", bias, [offsets[part]], [offsets[part] + widths[part]], [0]))
        return split_heads(b, x, heads)

    def picked(x: ir.Tensor, index: int) -> ir.Tensor:
        taken = b("Squeeze", b("Slice", x, [index], [index + 1], [3]), [3])
        return b("Transpose", taken, perm=[0, 2, 1, 3])

    if len(dims) == 5:
        return picked(query, 0), picked(query, 1), picked(query, 2), depth
    if key is None:
        cut = [b("Slice", query, [start], [start + heads * depth], [2]) for start in offsets]
        return split(cut[0], 0), split(cut[1], 1), split(cut[2], 2), depth
    q = split(query, 0)
    if len(ir.shape(key)) == 5:
        return q, picked(key, 0), picked(key, 1), depth
    if value is None:
        raise UnsupportedOperator(f"{MICROSOFT}::{b.node.op}", b.node.name, "it has keys but no values")
    if len(ir.shape(key)) == 4:
        return q, key, value, depth
    return q, split(key, 1), split(value, 2), depth
