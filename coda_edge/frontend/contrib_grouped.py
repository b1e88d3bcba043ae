"""Microsoft's GroupQueryAttention: a causal attention whose past may be shorter than its buffer, each sequence by its own length.

Source: onnxruntime's ContribOperators documentation, and its CPU kernel for the order of scale, cap and bias.

Sequence b has ``T = seqlens_k[b] + 1`` keys: ``T − S`` from the past (none for a first prompt, where S is total_sequence_length),
then the S new ones. Where T follows from the inputs' shapes the present is past and new in a row; else its rows are gathered.
"""

from __future__ import annotations

import math

import numpy as np

from .. import ir
from ..errors import UnsupportedOperator
from .attention import INT64, attend, columns, length, merge_heads, repeat_heads, rotate, rows, split_heads, where
from .builder import Builder
from .composite import MICROSOFT, composite

# Inputs beyond the first 12 that change the result: scales of a quantised cache, norms of q and k, lengths of a padded chunk.
_REFUSED_INPUTS = {
    12: "a quantised cache",
    13: "a quantised cache",
    14: "norms of q and k",
    15: "norms of q and k",
    16: "query_seqlens",
}
_REFUSED_ATTRIBUTES = {"qk_output": 0, "sliding_window_cache": 0}
_BY_SHAPES = (
    "its total_sequence_length must follow from the inputs' shapes: compute it from the shape of a mask or of past_key"
)


@composite("GroupQueryAttention")
def _grouped(b: Builder) -> list[ir.Tensor]:
    _refuse(b)
    heads, shared = b.required("num_heads"), b.required("kv_num_heads")
    query, key, value = b.node.inputs[0], b.input(1), b.input(2)
    width = ir.shape(query)[2]
    if not isinstance(width, int):
        raise UnsupportedOperator(f"{MICROSOFT}::GroupQueryAttention", b.node.name, "the width of q must be fixed")
    if key is None or value is None:
        depth = width // (heads + 2 * shared)
        ends = [heads * depth, (heads + shared) * depth, width]
        query, key, value = (
            b("Slice", query, [start], [end], [2]) for start, end in zip([0, *ends], ends, strict=False)
        )
    else:
        depth = width // heads
    q, k, v = split_heads(b, query, heads), split_heads(b, key, shared), split_heads(b, value, shared)
    before = _before(b, q)
    if b.attr("do_rotary", 0):
        q, k = _rotated(b, q, k, before, depth)
    if b.input(3) is not None and b.input(4) is not None:
        k, v = _present(b, b.node.inputs[3], k, before), _present(b, b.node.inputs[4], v, before)
    present = [k, v]
    bias = b.input(10)
    if bias is not None and b.input(3) is not None:
        # A buffer may be longer than what is in use, which the bias is for.
        k, v = (b("Slice", x, [0], _total(b), [2]) for x in (k, v))
    terms = _masks(b, q, k, before) + ([] if bias is None else [bias])
    k, v = (repeat_heads(b, x, shared, heads // shared, depth) for x in (k, v))
    scale = b.attr("scale", 0.0) or 1 / math.sqrt(depth)
    stages = attend(b, q, k, v, scale, b.attr("softcap", 0.0), terms, _sink(b, heads))
    return [merge_heads(b, stages.y), *present][: len(b.node.outputs)]


def _refuse(b: Builder) -> None:
    found = next((what for i, what in _REFUSED_INPUTS.items() if b.input(i) is not None), None)
    found = found or next((n for n, default in _REFUSED_ATTRIBUTES.items() if b.attr(n, default) != default), None)
    if found is not None:
        choices = f"it uses {found}: export the model without that"
        raise UnsupportedOperator(f"{MICROSOFT}::GroupQueryAttention", b.node.name, choices)


def _total(b: Builder) -> ir.Tensor:
    """int64 ``[1]``: total_sequence_length."""
    return b("Reshape", b.cast(b.node.inputs[6], np.int64), [1])


def _before(b: Builder, q: ir.Tensor) -> ir.Tensor | None:
    """int64 ``[B,1]``: how many keys of the past each sequence has; None without a past."""
    if b.input(3) is None:
        return None
    with b.numbers(INT64):
        used = b("Sub", b("Add", b.cast(b.node.inputs[5], np.int64), 1), length(b, q))
        started = b("Where", b("Equal", length(b, q), _total(b)), 0, used)
    return b("Reshape", started, [-1, 1])


def _present(b: Builder, past: ir.Tensor, new: ir.Tensor, before: ir.Tensor | None) -> ir.Tensor:
    """``[B,H,max(P,T),D]``: of each sequence the first ``before`` rows of the past, the new rows, and zeros."""
    whole = b("Transpose", b("Concat", past, new, axis=2), perm=[0, 2, 1, 3])
    size = b("Max", b("Shape", past, start=2, end=3), _total(b))
    with b.numbers(INT64):
        place = b("Unsqueeze", b("Range", 0, b("Squeeze", size, [0]), 1), [0])
        after = b("Sub", place, before)
        last = b("Sub", length(b, new), 1)
        fresh = b("Add", b("Min", b("Max", after, 0), last), b("Shape", past, start=2, end=3))
        index = b("Where", b("Less", place, before), place, fresh)
        used = b("LessOrEqual", after, last)
    rows_ = b("GatherND", whole, b("Unsqueeze", index, [2]), batch_dims=1)
    kept = b("Where", b("Unsqueeze", used, [2, 3]), rows_, 0.0)
    return b("Transpose", kept, perm=[0, 2, 1, 3])


def _rotated(
    b: Builder, q: ir.Tensor, k: ir.Tensor, before: ir.Tensor | None, depth: int
) -> tuple[ir.Tensor, ir.Tensor]:
    half = ir.shape(b.node.inputs[7])[-1]
    if not isinstance(half, int):
        raise UnsupportedOperator(f"{MICROSOFT}::GroupQueryAttention", b.node.name, "cos_cache's width must be fixed")
    at = b.input(9)
    if at is None:
        with b.numbers(INT64):
            counted = b("Unsqueeze", b("Range", 0, b("Squeeze", length(b, q), [0]), 1), [0])
        at = counted if before is None else b("Add", counted, before)
    cos, sin = (b("Unsqueeze", b("Gather", b.node.inputs[i], at, axis=0), [1]) for i in (7, 8))
    interleaved = b.attr("rotary_interleaved", 0)
    return rotate(b, q, cos, sin, half, depth, interleaved), rotate(b, k, cos, sin, half, depth, interleaved)


def _masks(b: Builder, q: ir.Tensor, k: ir.Tensor, before: ir.Tensor | None) -> list[ir.Tensor]:
    """−∞ for the keys after a query and those before its window, or without causality for those beyond each sequence's end."""
    at = rows(b, q)
    if before is not None:
        at = b("Add", at, b("Unsqueeze", before, [2, 3]))
    if not b.attr("causal", 1):
        with b.numbers(INT64):
            end = b("Add", b.cast(b.node.inputs[5], np.int64), 1)
        return [where(b, b("Less", columns(b, k), b("Unsqueeze", b("Reshape", end, [-1]), [1, 2, 3])), -math.inf)]
    allowed = b("LessOrEqual", columns(b, k), at)
    window = b.attr("local_window_size", -1)
    if window > 0:
        with b.numbers(INT64):
            allowed = b("And", allowed, b("Greater", columns(b, k), b("Sub", at, window)))
    return [where(b, allowed, -math.inf)]


def _sink(b: Builder, heads: int) -> ir.Tensor | None:
    """``[1,H,1,1]``: a score of each head for attending to nothing."""
    sink = b.input(11)
    if sink is not None:
        return b("Reshape", sink, [1, heads, 1, 1])
    if b.attr("smooth_softmax", 0) <= 0:
        return None
    return b.editor.constant(f"{b.node.outputs[0].name}.sink", np.zeros((1, heads, 1, 1), b.dtype))
