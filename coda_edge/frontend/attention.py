"""What all attention operators have in common, written out in basic operators.

Heads are an axis of their own here: q ``[B,H,Sq,D]``, k ``[B,Hkv,Sk,D]``, v ``[B,Hkv,Sk,Dv]``. Masks are built from positions
(Range) and comparisons, so that later passes can see their structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import ir
from ..symbolic import Dim
from .builder import Builder

BOOL = np.dtype(np.bool_)
INT64 = np.dtype(np.int64)


@dataclass(frozen=True)
class Stages:
    """The result of an attention ``[B,H,Sq,Dv]``, and the scores ``[B,H,Sq,Sk]`` on the way there."""

    y: ir.Tensor
    scaled: ir.Tensor
    capped: ir.Tensor
    biased: ir.Tensor
    probabilities: ir.Tensor


def attend(
    b: Builder,
    q: ir.Tensor,
    k: ir.Tensor,
    v: ir.Tensor,
    scale: float,
    softcap: float = 0.0,
    bias: Sequence[ir.Tensor] = (),
    sink: ir.Tensor | None = None,
    guard: bool = False,
    precision: np.dtype[np.generic] | None = None,
) -> Stages:
    """``softmax(cap(scale · q kᵀ) + Σ bias) v``.

    ``sink`` ``[1,H,1,1]``: one more score of every row, whose value is zero. ``guard``: a row of −∞ alone gives zeros. ``precision``:
    the dtype of the softmax, if it is wider than that of q.
    """
    scores = scaled = b("Mul", b("MatMul", q, b("Transpose", k, perm=[0, 1, 3, 2])), float(scale))
    if softcap:
        scores = b("Mul", b("Tanh", b("Div", scores, float(softcap))), float(softcap))
    capped = scores
    for term in bias:
        scores = b("Add", scores, term)
    probabilities = _softmax(b, scores, sink, precision)
    if guard:
        probabilities = b("Where", b("IsNaN", probabilities), 0.0, probabilities)
    return Stages(b("MatMul", probabilities, v), scaled, capped, scores, probabilities)


def _softmax(
    b: Builder, scores: ir.Tensor, sink: ir.Tensor | None, precision: np.dtype[np.generic] | None
) -> ir.Tensor:
    wider = precision is not None and np.dtype(b.dtype).itemsize < precision.itemsize
    x = b.cast(scores, precision, b.dtype) if wider else scores
    if sink is not None:
        shape = b("Concat", b("Shape", scores, start=0, end=3), [1], axis=0)
        column = b("Expand", b.cast(sink, precision, b.dtype) if wider else sink, shape)
        x = b("Concat", x, column, axis=3)
    y = b("Softmax", x, axis=3)
    if sink is not None:
        y = b("Slice", y, [0], [-1], [3])
    return b.cast(y, b.dtype, precision) if wider else y


def split_heads(b: Builder, x: ir.Tensor, heads: int) -> ir.Tensor:
    """``[B, S, H·D]`` as ``[B, H, S, D]``."""
    return b("Transpose", b("Reshape", x, [0, 0, heads, -1]), perm=[0, 2, 1, 3])


def merge_heads(b: Builder, x: ir.Tensor) -> ir.Tensor:
    """``[B, H, S, D]`` as ``[B, S, H·D]``."""
    return b("Reshape", b("Transpose", x, perm=[0, 2, 1, 3]), [0, 0, -1])


def repeat_heads(b: Builder, x: ir.Tensor, heads: int, times: int, depth: Dim) -> ir.Tensor:
    """``[B, Hk, S, D]`` as ``[B, Hk·times, S, D]``, each head ``times`` times in a row."""
    if times == 1:
        return x
    spread = b("Expand", b("Unsqueeze", x, [2]), [1, 1, times, 1, 1])
    return b("Reshape", spread, [0, heads * times, -1, depth])


def length(b: Builder, x: ir.Tensor) -> ir.Tensor:
    """int64 ``[1]``: S of ``[B, H, S, D]``."""
    return b("Shape", x, start=2, end=3)


def positions(b: Builder, size: ir.Tensor, axes: Sequence[int]) -> ir.Tensor:
    """int64 0 … ``size`` − 1 with new ``axes`` of 1."""
    with b.numbers(INT64):
        counted = b("Range", 0, b("Squeeze", size, [0]), 1)
        return b("Unsqueeze", counted, axes) if axes else counted


def columns(b: Builder, k: ir.Tensor) -> ir.Tensor:
    """int64 ``[1, Sk]``: the position of each key of ``[B, H, Sk, D]``."""
    return positions(b, length(b, k), [0])


def rows(b: Builder, q: ir.Tensor) -> ir.Tensor:
    """int64 ``[Sq, 1]``: the position of each query of ``[B, H, Sq, D]``."""
    return positions(b, length(b, q), [1])


def where(b: Builder, allowed: ir.Tensor, otherwise: float) -> ir.Tensor:
    """0 where ``allowed``, else ``otherwise``: what is added to scores."""
    return b("Where", allowed, 0.0, otherwise)


def rotate(
    b: Builder, x: ir.Tensor, cos: ir.Tensor, sin: ir.Tensor, half: int, depth: int, interleaved: int
) -> ir.Tensor:
    """Rotates pairs of the leading ``2·half`` of the ``depth`` features of ``[B, H, S, D]`` by the angles of ``[B|1, 1, S, half]``."""
    rotated = x if 2 * half == depth else b("Slice", x, [0], [2 * half], [3])
    if interleaved:
        pairs = b("Reshape", rotated, [0, 0, 0, half, 2])
        first, second = (b("Squeeze", b("Slice", pairs, [i], [i + 1], [4]), [4]) for i in (0, 1))
    else:
        first, second = b("Slice", rotated, [0], [half], [3]), b("Slice", rotated, [half], [2 * half], [3])
    real = b("Sub", b("Mul", first, cos), b("Mul", second, sin))
    imaginary = b("Add", b("Mul", first, sin), b("Mul", second, cos))
    if interleaved:
        paired = b("Concat", b("Unsqueeze", real, [4]), b("Unsqueeze", imaginary, [4]), axis=4)
        y = b("Reshape", paired, [0, 0, 0, 2 * half])
    else:
        y = b("Concat", real, imaginary, axis=3)
    return y if 2 * half == depth else b("Concat", y, b("Slice", x, [2 * half], [depth], [3]), axis=3)
