"""Attention and RotaryEmbedding of opsets 23 and 24 in basic operators.

Source: the ONNX specification; where it leaves a choice, what onnxruntime computes: scale, then soft cap, then mask;
a masked score is −∞; a row with nothing left to attend to gives zeros.
"""

from __future__ import annotations

import math

import numpy as np

from .. import ir
from ..errors import UnsupportedOperator
from ..symbolic import Dim
from .builder import Builder, decomposition
from .shape_rules import dtype_of

BOOL = np.dtype(np.bool_)
INT64 = np.dtype(np.int64)


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
    outputs: list[ir.Tensor] = [k, v]
    if key_heads != heads:
        k, v = (repeat_heads(b, x, key_heads, heads // key_heads, d) for x, d in ((k, depth), (v, value_depth)))
    scale = b.attr("scale", 0.0) or 1 / math.sqrt(depth)
    scores = scaled = b("Mul", b("MatMul", q, b("Transpose", k, perm=[0, 1, 3, 2])), float(scale))
    if b.attr("softcap", 0.0):
        scores = b("Mul", b("Tanh", b("Div", scores, float(b.attr("softcap", 0.0)))), float(b.attr("softcap", 0.0)))
    capped = scores
    bias = _bias(b, q, k)
    if bias is not None:
        scores = b("Add", scores, bias)
    probabilities = _softmax(b, scores)
    if b.input(3) is not None or b.input(6) is not None:
        probabilities = b("Where", b("IsNaN", probabilities), 0.0, probabilities)
    y = b("MatMul", probabilities, v)
    if flat:
        y = b("Reshape", b("Transpose", y, perm=[0, 2, 1, 3]), [0, 0, -1])
    debug = (scaled, capped, scores, probabilities)[b.attr("qk_matmul_output_mode", 0)]
    return [y, *outputs, debug][: len(b.node.outputs)]


def _depth(b: Builder, index: int, heads: int) -> Dim | None:
    width = ir.shape(b.node.inputs[index])[2]
    return width // heads if isinstance(width, int) and heads else None


def split_heads(b: Builder, x: ir.Tensor, heads: int) -> ir.Tensor:
    """``[B, S, H·D]`` as ``[B, H, S, D]``."""
    return b("Transpose", b("Reshape", x, [0, 0, heads, -1]), perm=[0, 2, 1, 3])


def repeat_heads(b: Builder, x: ir.Tensor, heads: int, times: int, depth: Dim) -> ir.Tensor:
    """``[B, Hk, S, D]`` as ``[B, Hk·times, S, D]``, each head ``times`` times in a row."""
    spread = b("Expand", b("Unsqueeze", x, [2]), [1, 1, times, 1, 1])
    return b("Reshape", spread, [0, heads * times, -1, depth])


def _softmax(b: Builder, scores: ir.Tensor) -> ir.Tensor:
    precision = dtype_of(b.attr("softmax_precision", 0) or 1)
    inside = b.cast(scores, precision, b.dtype) if np.dtype(b.dtype).itemsize < np.dtype(precision).itemsize else scores
    y = b("Softmax", inside, axis=3)
    return y if inside is scores else b.cast(y, b.dtype, precision)


def _bias(b: Builder, q: ir.Tensor, k: ir.Tensor) -> ir.Tensor | None:
    """What is added to the scores: the float mask, and −∞ where a bool mask, causality or padding forbid."""
    mask, lengths = b.input(3), b.input(6)
    allowed = mask if mask is not None and np.dtype(mask.dtype) == BOOL else None
    for extra in (_causal(b, q, k, lengths), _unpadded(b, k, lengths)):
        if extra is not None:
            allowed = extra if allowed is None else b("And", allowed, extra)
    bias = None if allowed is None else b("Where", allowed, 0.0, -math.inf)
    if mask is None or np.dtype(mask.dtype) == BOOL:
        return bias
    return mask if bias is None else b("Add", mask, bias)


def _causal(b: Builder, q: ir.Tensor, k: ir.Tensor, lengths: ir.Tensor | None) -> ir.Tensor | None:
    """Bool ``[Sq, Sk]`` (``[B, 1, Sq, Sk]`` with lengths): key ``j`` is not after query ``i``, which follows the past."""
    if not b.attr("is_causal", 0):
        return None
    rows = _positions(b, b("Shape", q, start=2, end=3), [1])
    columns = _positions(b, b("Shape", k, start=2, end=3), [0])
    if b.input(4) is not None:
        rows = b("Add", rows, b("Shape", b.input(4), start=2, end=3))
    elif lengths is not None:
        behind = b("Sub", lengths, b("Shape", q, start=2, end=3))
        rows = b("Add", rows, b("Unsqueeze", behind, [1, 2, 3]))
    return b("LessOrEqual", columns, rows)


def _unpadded(b: Builder, k: ir.Tensor, lengths: ir.Tensor | None) -> ir.Tensor | None:
    """Bool ``[B, 1, 1, Sk]``: the keys within each sequence's length."""
    if lengths is None:
        return None
    columns = _positions(b, b("Shape", k, start=2, end=3), [0])
    return b("Less", columns, b("Unsqueeze", lengths, [1, 2, 3]))


def _positions(b: Builder, size: ir.Tensor, axes: list[int]) -> ir.Tensor:
    dtype, b.dtype = b.dtype, INT64
    counted = b("Unsqueeze", b("Range", 0, b("Squeeze", size, [0]), 1), axes)
    b.dtype = dtype
    return counted


@decomposition("RotaryEmbedding")
def _rotary(b: Builder) -> ir.Tensor:
    x, cos, sin = b.node.inputs[:3]
    flat = b.rank() == 3
    heads = b.attr("num_heads", 0)
    if flat:
        x = split_heads(b, x, heads)
    return _rotate(b, x, cos, sin, flat)


def _rotate(b: Builder, x: ir.Tensor, cos: ir.Tensor, sin: ir.Tensor, flat: bool) -> ir.Tensor:
    """Rotates pairs of the leading ``2·half`` features of ``[B, H, S, D]`` by the tables' angles."""
    half = ir.shape(b.node.inputs[1])[-1]
    width = ir.shape(b.node.inputs[0])[-1]
    depth = width // b.attr("num_heads", 1) if flat and isinstance(width, int) else width
    if not isinstance(half, int) or not isinstance(depth, int):
        raise UnsupportedOperator("RotaryEmbedding", b.node.name, "the width of a head must be fixed")
    positions = b.input(3)
    if positions is not None:
        cos, sin = (b("Gather", table, positions, axis=0) for table in (cos, sin))
    cos, sin = (b("Unsqueeze", table, [1]) for table in (cos, sin))
    rotated = x if 2 * half == depth else b("Slice", x, [0], [2 * half], [3])
    if b.attr("interleaved", 0):
        pairs = b("Reshape", rotated, [0, 0, 0, half, 2])
        first, second = (b("Squeeze", b("Slice", pairs, [i], [i + 1], [4]), [4]) for i in (0, 1))
    else:
        first, second = b("Slice", rotated, [0], [half], [3]), b("Slice", rotated, [half], [2 * half], [3])
    real = b("Sub", b("Mul", first, cos), b("Mul", second, sin))
    imaginary = b("Add", b("Mul", first, sin), b("Mul", second, cos))
    if b.attr("interleaved", 0):
        paired = b("Concat", b("Unsqueeze", real, [4]), b("Unsqueeze", imaginary, [4]), axis=4)
        y = b("Reshape", paired, [0, 0, 0, 2 * half])
    else:
        y = b("Concat", real, imaginary, axis=3)
    if 2 * half != depth:
        y = b("Concat", y, b("Slice", x, [2 * half], [depth], [3]), axis=3)
    return b("Reshape", b("Transpose", y, perm=[0, 2, 1, 3]), [0, 0, width]) if flat else y
