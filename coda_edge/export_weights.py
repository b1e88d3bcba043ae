"""Narrow constants of a graph in ONNX: stored as they are, with what makes float32 of them as nodes, which runtimes fold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from onnx import NodeProto, TensorProto, helper, numpy_helper

from .ir import Array
from .weights import Blocks, FactoredConstant, Weight, weight_of

# The first opset with tensors of 4 bits.
_FOUR_BITS = 21


@dataclass
class _Writing:
    """Initializers and nodes, one behind another, on the way to the tensor ``name``."""

    name: str
    initializers: list[TensorProto] = field(default_factory=list)
    nodes: list[NodeProto] = field(default_factory=list)
    last: str = ""

    def operand(self, values: Array, part: str) -> str:
        """An initializer of ``values``; its name."""
        self.initializers.append(_initializer(values, f"{self.name}.{part}"))
        return f"{self.name}.{part}"

    def step(self, op: str, operands: list[str], part: str, **attrs: Any) -> None:
        """The next node, on the last result and ``operands``."""
        self.nodes.append(
            helper.make_node(op, [self.last, *operands], [f"{self.name}.{part}"], f"{self.name}.{part}", **attrs)
        )
        self.last = f"{self.name}.{part}"

    def spread(self, blocks: Blocks, dims: tuple[int, ...], part: str) -> str:
        """The name of the numbers of ``blocks``, one for each element of ``dims`` or broadcasting to that."""
        name = self.operand(blocks.numbers, part)
        for axis, (size, dim) in enumerate(zip(blocks.sizes, dims, strict=True)):
            if 1 < size < dim:
                index = self.operand(np.arange(dim) // size, f"{part}.block{axis}")
                spread = f"{self.name}.{part}.spread{axis}"
                self.nodes.append(helper.make_node("Gather", [name, index], [spread], spread, axis=axis))
                name = spread
        return name


def stored(tensor: gs.Constant, name: str, opset: int) -> tuple[list[TensorProto], list[NodeProto]]:
    """The initializers and nodes that make the tensor ``name`` of a constant's value in a model of ``opset``.

    A float32 constant that is exact in half or made of whole numbers is an initializer of these and a Cast; zero points, factors, a scale
    of its rows and an offset of its columns follow as Sub and Mul. Anything else is an initializer. Whole numbers of 4 bits are stored in
    8 where the opset has no such tensors.
    """
    weight = weight_of(tensor)
    if weight.stored.dtype == tensor.values.dtype and not isinstance(tensor, FactoredConstant):
        return [_initializer(tensor.values, name)], []
    writing = _Writing(name)
    numbers = weight.stored
    if weight.is_whole and numbers.dtype.kind == "V" and opset < _FOUR_BITS:
        numbers = numbers.astype(np.int8)
    writing.last = writing.operand(numbers, "stored")
    writing.step("Cast", [], "Cast", to=TensorProto.FLOAT)
    for op, part, operand in _steps(writing, weight):
        writing.step(op, [operand], part)
    writing.nodes[-1].output[0] = name
    return writing.initializers, writing.nodes


def _steps(writing: _Writing, weight: Weight) -> Iterator[tuple[str, str, str]]:
    """Operator, name and operand of each step behind the conversion."""
    dims = weight.stored.shape
    if weight.zero is not None:
        yield "Sub", "centred", writing.spread(weight.zero, dims, "zero")
    if weight.quantum is not None:
        yield "Mul", "scaled", writing.spread(weight.quantum, dims, "quantum")
    if weight.scale is not None:
        yield "Mul", "Mul", writing.operand(weight.scale[:, None], "Mul.operand")
    if weight.offset is not None:
        yield "Sub", "Sub", writing.operand(weight.offset, "Sub.operand")


def _initializer(values: Array, name: str) -> TensorProto:
    return numpy_helper.from_array(np.ascontiguousarray(values).reshape(values.shape), name)
