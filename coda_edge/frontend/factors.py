"""A norm that is written as one scale and one shift, as TensorFlow's batch normalisation is, becomes centre, scale, shift.

1. ``x·s + (b - m·s) = (x - m)·s + b``.
2. ``x·(r·c) = (x·r)·c`` and ``x·(c/r) = (x/r)·c`` where r has one number a row ``[…, 1]``, c is constant and x has the product's shape.

So neither the scale nor the shift, which have x's size, is ever stored. Refused: products that others read too.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from .. import ir
from .builder import Builder, decomposition


@decomposition("Add")
def _centre_first(b: Builder) -> ir.Tensor | None:
    for scaled, shift in (b.node.inputs, reversed(b.node.inputs)):
        product, difference = _own(b, scaled, b.node, "Mul"), _own(b, shift, b.node, "Sub")
        offset = None if difference is None else _own(b, difference.inputs[1], difference, "Mul")
        if product is None or difference is None or offset is None:
            continue
        for x, s in (product.inputs, reversed(product.inputs)):
            mean = next((t for t in offset.inputs if t is not s), None)
            whole = (
                ir.constant_value(x) is None and x.shape is not None and ir.same_shape(ir.shape(x), ir.shape(scaled))
            )
            if whole and mean is not None and any(t is s for t in offset.inputs) and _is_row(mean, x):
                return b("Add", b("Mul", b("Sub", x, mean), s), difference.inputs[0])
    return None


@decomposition("Mul")
def _row_first(b: Builder) -> ir.Tensor | None:
    for x, other in (b.node.inputs, reversed(b.node.inputs)):
        factors = _own(b, other, b.node, "Mul", "Div")
        if factors is None or x is other or ir.constant_value(x) is not None or x.shape is None:
            continue
        if not ir.same_shape(ir.shape(x), ir.shape(other)):
            continue
        column, row = factors.inputs
        if factors.op == "Mul" and ir.constant_value(column) is None:
            row, column = column, row
        if ir.constant_value(column) is not None and _is_row(row, x):
            return b("Mul", b(factors.op, x, row), column)
    return None


def _own(b: Builder, tensor: ir.Tensor, reader: gs.Node, *ops: str) -> gs.Node | None:
    """The node, one of ``ops``, that makes ``tensor``, if only ``reader`` reads it."""
    node = ir.made_by(tensor, *ops)
    known = node is not None and tensor.shape is not None and ir.sole_consumer(b.editor.graph, tensor) is reader
    return node if known else None


def _is_row(row: ir.Tensor, x: ir.Tensor) -> bool:
    """Whether ``row`` has one number for each row of ``x``, which has several."""
    if row.shape is None or x.shape is None or ir.constant_value(row) is not None or not ir.shape(x):
        return False
    return ir.shape(x)[-1] != 1 and ir.same_shape(ir.shape(row), (*ir.shape(x)[:-1], 1))
