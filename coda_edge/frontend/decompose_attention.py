"""Attention and RotaryEmbedding of opsets 23 to 25 in basic operators.

Source: the ONNX specification; where it leaves a choice, what onnxruntime computes: scale, then soft cap, then mask;
a masked score is −∞; a row with nothing left to attend to gives zeros.
"""

from __future__ import annotations

import math

import numpy as np

from .. import ir
from ..errors import UnsupportedOperator
from ..symbolic import Dim, simplify
from .attention import (
    BOOL,
    INT64,
    attend,
    columns,
    length,
    merge_heads,
    repeat_heads,
    rotate,
    rows,
    split_heads,
    where,
)
from .builder import Builder, decomposition
from .shape_rules import dtype_of


@decomposition("Attention")
def _attention(b: Builder) -> list[ir.Tensor]:
    q, k, v = b.node.inputs[:3]
    dims = ir.shape(q)
    flat = len(dims) == 3
    heads = b.attr("q_num_heads", 0) if flat else dims[1]
    key_heads = b.attr("kv_num_heads", 0) if flat else ir.shape(k)[1]
    depth, value_depth = (_depth(b, 0, heads), _depth(b, 2, key_heads)) if flat else (dims[3], ir.shape(v)[3])
    if not isinstance(depth, int) or not all(isinstance(n, int) for n in (heads, key_heads, value_depth)):
        raise UnsupportedOperator("Attention", b.node.name, "the number and the width of its heads must be fixed")
    if flat:
        q, k, v = (split_heads(b, x, n) for x, n in ((q, heads), (k, key_heads), (v, key_heads)))
    past = b.input(4)
    if past is not None:
        k, v = b("Concat", past, k, axis=2), b("Concat", b.input(5), v, axis=2)
    present = [k, v]
    k, v = (repeat_heads(b, x, key_heads, heads // key_heads, d) for x, d in ((k, depth), (v, value_depth)))
    total = simplify(ir.shape(b.node.inputs[1])[1 if flat else 2] + (ir.shape(past)[2] if past is not None else 0))
    bias = _bias(b, q, k, total)
    stages = attend(
        b,
        q,
        k,
        v,
        b.attr("scale", 0.0) or 1 / math.sqrt(depth),
        b.attr("softcap", 0.0),
        [] if bias is None else [bias],
        guard=bias is not None and not _leaves_a_key(b),
        precision=np.dtype(dtype_of(b.attr("softmax_precision", 0) or 1)),
    )
    y = merge_heads(b, stages.y) if flat else stages.y
    debug = (stages.scaled, stages.capped, stages.biased, stages.probabilities)
    return [y, *present, debug[b.attr("qk_matmul_output_mode", 0)]][: len(b.node.outputs)]


def _depth(b: Builder, index: int, heads: int) -> Dim | None:
    width = ir.shape(b.node.inputs[index])[2]
    return width // heads if isinstance(width, int) and heads else None


def _leaves_a_key(b: Builder) -> bool:
    """Whether every query has a key: itself, where causality is all that forbids."""
    return b.input(3) is None and b.input(6) is None and not any(side >= 0 for side in _windows(b))


def _windows(b: Builder) -> tuple[int, int]:
    """How many positions to the left and to the right of its own a query may attend to; −1 for all."""
    return b.attr("left_window_size", -1), b.attr("right_window_size", -1)


def _bias(b: Builder, q: ir.Tensor, k: ir.Tensor, total: Dim) -> ir.Tensor | None:
    """What is added to the scores: the float mask, and −∞ where a bool mask, causality, a window or padding forbid."""
    mask, lengths = _whole_mask(b, total), b.input(6)
    is_bool = b.input(3) is not None and np.dtype(b.node.inputs[3].dtype) == BOOL
    allowed = mask if is_bool else None
    for extra in (*_bands(b, q, k, lengths), _unpadded(b, k, lengths)):
        if extra is not None:
            allowed = extra if allowed is None else b("And", allowed, extra)
    bias = None if allowed is None else where(b, allowed, -math.inf)
    if mask is None or is_bool:
        return bias
    return mask if bias is None else b("Add", mask, bias)


def _whole_mask(b: Builder, total: Dim) -> ir.Tensor | None:
    """The mask; one of fewer keys than ``total`` forbids the others."""
    mask = b.input(3)
    if mask is None:
        return None
    keys = ir.shape(mask)[-1]
    missing = simplify(total - keys)
    if keys == 1 or not isinstance(missing, int) or missing <= 0:
        return mask
    pads = [0] * (2 * len(ir.shape(mask)) - 1) + [missing]
    with b.numbers(mask.dtype):
        return b("Pad", mask, pads, 0 if np.dtype(mask.dtype) == BOOL else -math.inf)


def _bands(b: Builder, q: ir.Tensor, k: ir.Tensor, lengths: ir.Tensor | None) -> list[ir.Tensor]:
    """Bool ``[Sq, Sk]`` (``[B, 1, Sq, Sk]`` with lengths): key ``j`` is not after query ``i``, which follows the past; nor outside its window."""
    left, right = _windows(b)
    causal = b.attr("is_causal", 0)
    if not causal and left < 0 and right < 0:
        return []
    at, keys = rows(b, q), columns(b, k)
    if b.input(4) is not None:
        at = b("Add", at, b("Shape", b.input(4), start=2, end=3))
    elif lengths is not None:
        at = b("Add", at, b("Unsqueeze", b("Sub", lengths, length(b, q)), [1, 2, 3]))
    with b.numbers(INT64):
        bands = [b("LessOrEqual", keys, at)] if causal else []
        if left >= 0:
            bands.append(b("GreaterOrEqual", keys, b("Sub", at, left)))
        if right >= 0 and not causal:
            bands.append(b("LessOrEqual", keys, b("Add", at, right)))
    return bands


def _unpadded(b: Builder, k: ir.Tensor, lengths: ir.Tensor | None) -> ir.Tensor | None:
    """Bool ``[B, 1, 1, Sk]``: the keys within each sequence's length."""
    return None if lengths is None else b("Less", columns(b, k), b("Unsqueeze", lengths, [1, 2, 3]))


@decomposition("RotaryEmbedding")
def _rotary(b: Builder) -> ir.Tensor:
    x, cos, sin, at = b.node.inputs[0], b.node.inputs[1], b.node.inputs[2], b.input(3)
    flat, heads = b.rank() == 3, b.attr("num_heads", 0)
    width = ir.shape(x)[-1]
    depth = width // heads if flat and isinstance(width, int) else width
    half = ir.shape(cos)[-1]
    if not isinstance(half, int) or not isinstance(depth, int):
        raise UnsupportedOperator("RotaryEmbedding", b.node.name, "the width of a head must be fixed")
    if at is not None:
        cos, sin = (b("Gather", table, at, axis=0) for table in (cos, sin))
    cos, sin = (b("Unsqueeze", table, [1]) for table in (cos, sin))
    y = rotate(b, split_heads(b, x, heads) if flat else x, cos, sin, half, depth, b.attr("interleaved", 0))
    return b("Reshape", b("Transpose", y, perm=[0, 2, 1, 3]), [0, 0, width]) if flat else y
