"""Microsoft's EmbedLayerNormalization. Source: onnxruntime's ContribOperators documentation."""

from __future__ import annotations

import numpy as np

from .. import ir
from .attention import positions
from .builder import Builder
from .composite import composite
from .decompose import scale_shift, standardize


@composite("EmbedLayerNormalization")
def _embed(b: Builder) -> list[ir.Tensor]:
    ids, segments, words, places, kinds, gamma, beta = b.node.inputs[:7]
    at = b.input(8)
    if at is None:
        at = positions(b, b("Shape", ids, start=1, end=2), [])
    total = b("Add", b("Gather", words, ids, axis=0), b("Gather", places, at, axis=0))
    if segments.name:
        total = b("Add", total, b("Gather", kinds, segments, axis=0))
    with b.numbers(words.dtype):
        y, _, _ = standardize(b, total, [2], b.attr("epsilon", 1e-12))
    return [scale_shift(b, y, gamma, beta), _lengths(b), total][: len(b.node.outputs)]


def _lengths(b: Builder) -> ir.Tensor:
    """int32 ``[B]``: how many elements of each row of the mask are 1; none without a mask."""
    mask = b.input(7)
    if mask is None:
        zero = b.editor.constant(f"{b.node.name}.zero", np.zeros(1, np.int32))
        return b("Expand", zero, b("Shape", b.node.inputs[0], start=0, end=1))
    with b.numbers(mask.dtype):
        counted = b.cast(b("Equal", mask, 1), np.int32, np.bool_)
    return b("ReduceSum", counted, [1], keepdims=0)
