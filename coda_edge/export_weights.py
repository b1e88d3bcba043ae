"""Half-precision constants of a graph in ONNX: stored as they are, with what makes float32 of them as nodes, which runtimes fold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from onnx import NodeProto, TensorProto, helper, numpy_helper

from .ir import Array
from .weights import FactoredConstant, Weight, narrowest


def stored(tensor: gs.Constant, name: str) -> tuple[list[TensorProto], list[NodeProto]]:
    """The initializers and nodes that make the tensor ``name`` of a constant's value.

    A float32 constant that is exact in half is a half initializer and a Cast; a scale of its rows and an offset of its columns follow
    as Mul and Sub. Anything else is an initializer.
    """
    factored = isinstance(tensor, FactoredConstant)
    weight = tensor.weight if factored else Weight(narrowest(np.asarray(tensor.values)))
    if weight.stored.dtype == tensor.values.dtype and not factored:
        return [_initializer(tensor.values, name)], []
    initializers = [_initializer(weight.stored, f"{name}.stored")]
    steps = list(_steps(weight))
    nodes, value = [], f"{name}.stored"
    for i, (op, operand) in enumerate(steps):
        inputs, result = [value], name if i == len(steps) - 1 else f"{name}.{op}"
        if operand is not None:
            inputs.append(f"{name}.{op}.operand")
            initializers.append(_initializer(operand, inputs[-1]))
        attributes: dict[str, Any] = {"to": TensorProto.FLOAT} if op == "Cast" else {}
        nodes.append(helper.make_node(op, inputs, [result], f"{name}.{op}", **attributes))
        value = result
    return initializers, nodes


def _steps(weight: Weight) -> Iterator[tuple[str, Array | None]]:
    yield "Cast", None
    if weight.scale is not None:
        yield "Mul", weight.scale[:, None]
    if weight.offset is not None:
        yield "Sub", weight.offset


def _initializer(values: Array, name: str) -> TensorProto:
    return numpy_helper.from_array(np.ascontiguousarray(values).reshape(values.shape), name)
