"""Microsoft's RelativePositionBias, which its CPU kernels lack. Source: onnxruntime's ContribOperators documentation; T5 (arXiv 1910.10683)."""

from __future__ import annotations

import numpy as np

from .. import ir
from .attention import INT64
from .builder import Builder
from .composite import composite


@composite("RelativePositionBias")
def _relative(b: Builder) -> ir.Tensor:
    """``[1,H,S,T]`` of ``bias_table [buckets,H]``: by the bucket of each distance, exact near 0 and logarithmic beyond."""
    table, queries, keys = b.node.inputs
    buckets, distance = ir.shape(table)[0], int(b.required("max_distance"))
    both = bool(b.attr("is_bidirectional", 0))
    with b.numbers(INT64):
        scalar = [b("Squeeze", b("Reshape", b.cast(t, np.int64), [1]), [0]) for t in (queries, keys)]
        i, j = (b("Unsqueeze", b("Range", 0, n, 1), [axis]) for axis, n in zip((1, 0), scalar, strict=True))
        back = b("Sub", i, j)
        count = int(buckets) // 2 if both else int(buckets)
        away = b("Abs", back) if both else b("Max", back, 0)
    exact = count // 2
    with b.numbers(np.float32):
        apart = b("Max", b("Cast", away, to=1), 1.0)
        logarithm = b("Div", b("Log", b("Div", apart, float(exact))), float(np.log(np.float32(distance / exact))))
        further = b("Cast", b("Mul", logarithm, float(count - exact)), to=7)
    with b.numbers(INT64):
        far = b("Min", b("Add", further, exact), count - 1)
        bucket = b("Where", b("Less", away, exact), away, far)
        if both:
            bucket = b("Add", bucket, b("Where", b("Less", back, 0), count, 0))
    return b("Unsqueeze", b("Transpose", b("Gather", table, bucket, axis=0), perm=[2, 0, 1]), [0])
