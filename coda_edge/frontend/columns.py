"""A constant for each column applies before the columns are split into heads.

Rule: where r = Reshape(x) splits x's last axis n into (d₁, …, dₖ) and keeps the rest, and c is a constant that has one number for each
of these, ``op(r, c) = Reshape(op(x, c'))`` with c' of shape ``[n]``. Dense layers written with Einsum have such a bias ``[heads, depth]``; before
the split, it is an epilogue of the product.

Refused: a Reshape with other readers, which would have to be kept beside its copy.
"""

from __future__ import annotations

import numpy as np

from .. import ir
from ..symbolic import same
from .builder import Builder, decomposition


@decomposition("Add", "Sub", "Mul", "Div")
def _before_the_split(b: Builder) -> ir.Tensor | None:
    node = b.node
    r = next((t for t in node.inputs if ir.made_by(t, "Reshape")), None)
    source = None if r is None else ir.producer(r)
    others = [t for t in node.inputs if t is not r]
    value = ir.constant_value(others[0]) if len(others) == 1 else None
    alone = r is not None and ir.sole_consumer(b.editor.graph, r) is node
    if r is None or source is None or value is None or not alone:
        return None
    x, target = source.inputs
    if x.shape is None:
        return None
    before, after = ir.shape(x), ir.shape(r)
    kept = len(before) - 1
    split = after[kept:]
    if kept < 0 or len(split) < 2 or not isinstance(before[-1], int) or not all(isinstance(d, int) for d in split):
        return None
    if not all(same(p, q) for p, q in zip(before[:kept], after, strict=False)) or value.size < 2:
        return None
    if value.ndim > len(after) or any(d != 1 for d in value.shape[: max(value.ndim - len(split), 0)]):
        return None
    own = value.reshape(value.shape[max(value.ndim - len(split), 0) :])
    sizes = [d for d in split if isinstance(d, int)]
    if any(own.shape[-i] not in (1, sizes[-i]) for i in range(1, own.ndim + 1)):
        return None  # r is what broadcasts
    column = b.editor.constant(
        f"{others[0].name}.column", np.ascontiguousarray(np.broadcast_to(own, sizes)).reshape(-1)
    )
    return b("Reshape", b(node.op, *(x if t is r else column for t in node.inputs)), target, **source.attrs)
