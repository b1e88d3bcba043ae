"""Microsoft's RotaryEmbedding. Source: onnxruntime's ContribOperators documentation."""

from __future__ import annotations

import numpy as np

from .. import ir
from ..errors import UnsupportedOperator
from .attention import positions, rotate, split_heads
from .builder import Builder
from .composite import MICROSOFT, composite


@composite("RotaryEmbedding")
def _rotary(b: Builder) -> ir.Tensor:
    x, at, cos, sin = b.node.inputs
    flat, dims = b.rank() == 3, ir.shape(x)
    half, width = ir.shape(cos)[-1], dims[-1]
    heads = b.attr("num_heads", 0) if b.attr("rotary_embedding_dim", 0) else 0
    if b.attr("is_packed_batching", 0) or not isinstance(half, int) or not isinstance(width, int):
        raise UnsupportedOperator(
            f"{MICROSOFT}::RotaryEmbedding", b.node.name, "the width of a head must be fixed, and sequences not packed"
        )
    depth = width if not flat else width // heads if heads else 2 * half
    if len(ir.shape(at)) == 1:
        # One position: of the first element, the others follow.
        size = b("Shape", x, start=1 if flat else 2, end=2 if flat else 3)
        at = b("Unsqueeze", b("Add", positions(b, size, []), b.cast(at, np.int64)), [0])
    cos, sin = (b("Unsqueeze", b("Gather", table, at, axis=0), [1]) for table in (cos, sin))
    y = rotate(b, split_heads(b, x, width // depth) if flat else x, cos, sin, half, depth, b.attr("interleaved", 0))
    return b("Reshape", b("Transpose", y, perm=[0, 2, 1, 3]), [0, 0, width]) if flat else y
