"""Microsoft's EmbedLayerNormalization. Source: onnxruntime's ContribOperators documentation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import ir
from .attention import positions
from .builder import Builder
from .composite import composite
from .decompose import scale_shift, standardize


@composite("EmbedLayerNormalization")
def _embed(b: Builder) -> list[ir.Tensor]:
    tables = tuple(b.input(i) for i in range(2, 7))
    with b.numbers(b.node.inputs[2].dtype):
        return embed(b, tables, b.input(8))[: len(b.node.outputs)]


def embed(b: Builder, tables: Sequence[ir.Tensor | None], places: ir.Tensor | None) -> list[ir.Tensor]:
    """The normalised sum of embeddings ``[B,S,N]``, the length of each sequence ``[B]``, and the sum.

    ``tables``: of words, places and segments, then gain and bias. Ids, segments and the mask are the node's inputs 0, 1 and 7;
    without ``places`` they are counted.
    """
    ids, segments = b.node.inputs[0], b.input(1)
    if places is None:
        places = positions(b, b("Shape", ids, start=1, end=2), [])
    total = b("Add", b("Gather", tables[0], ids, axis=0), b("Gather", tables[1], places, axis=0))
    if segments is not None:
        total = b("Add", total, b("Gather", tables[2], segments, axis=0))
    y, _, _ = standardize(b, total, [2], b.attr("epsilon", 1e-12))
    return [scale_shift(b, y, tables[3], tables[4]), _lengths(b), total]


def _lengths(b: Builder) -> ir.Tensor:
    """int32 ``[B]``: how many elements of each row of the mask are 1; none without a mask."""
    mask = b.input(7)
    if mask is None:
        zero = b.editor.constant(f"{b.node.name}.zero", np.zeros(1, np.int32))
        return b("Expand", zero, b("Shape", b.node.inputs[0], start=0, end=1))
    with b.numbers(mask.dtype):
        counted = b.cast(b("Equal", mask, 1), np.int32, np.bool_)
    return b("ReduceSum", counted, [1], keepdims=0)
