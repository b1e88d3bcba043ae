"""Operators whose results are as long as data says, in operators whose lengths are elements of integer tensors.

| operator | in others |
|---|---|
| Range of floats | a Range of whole numbers up to the count of elements, times delta, plus start |
| Compress | the places that the condition selects (NonZero), gathered |
| Bernoulli | a uniform number below the element |
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from .. import ir
from .builder import Builder, decomposition
from .shape_rules import dtype_of


@decomposition("Range")
def _range(b: Builder) -> ir.Tensor | None:
    """Of constants and whole numbers it stays: their count is known, or an expression."""
    start, limit, delta = b.node.inputs
    dtype = np.dtype(start.dtype)
    if dtype.kind != "f" or all(isinstance(t, gs.Constant) for t in b.node.inputs):
        return None
    count = b("Max", b("Ceil", b("Div", b("Sub", limit, start), delta)), 0.0)
    with b.numbers(np.int64):
        steps = b("Range", 0, b.cast(count, np.int64, known=dtype), 1)
    return b("Add", b("Mul", b.cast(steps, dtype, known=np.int64), delta), start)


@decomposition("Compress")
def _compress(b: Builder) -> ir.Tensor:
    data, condition = b.node.inputs
    axis = b.attr("axis", None)
    if axis is None:
        data, axis = b("Reshape", data, [-1]), 0
    with b.numbers(np.int64):
        places = b("Reshape", b("NonZero", condition), [-1])
    return b("Gather", data, places, axis=axis)


@decomposition("Bernoulli")
def _bernoulli(b: Builder) -> ir.Tensor:
    probability = b.node.inputs[0]
    seed = {} if b.attr("seed", None) is None else {"seed": b.attr("seed", None)}
    drawn = b("RandomUniformLike", probability, dtype=int(onnx.TensorProto.FLOAT), **seed)
    less = b("Less", drawn, b.cast(probability, np.float32))
    declared = b.attr("dtype", 0)
    return b.cast(less, dtype_of(declared) if declared else probability.dtype, known=np.bool_)
