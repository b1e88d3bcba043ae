"""Builds an ONNX graph from weights, the way an exporter writes one: one operator at a time, nothing fused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

Weights = Mapping[str, npt.NDArray[Any]]

OPSET = 17


class Writer:
    """Grows the graph; methods return the name of the tensor they made. A constant asked for twice is stored once."""

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}

    def node(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=output, **attributes))
        return output

    def constant(self, name: str, value: npt.NDArray[Any]) -> str:
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def weight(self, name: str) -> str:
        return self.constant(name, self.weights[name])

    def number(self, name: str, value: float) -> str:
        return self.constant(name, np.array(value, np.float32))

    def ints(self, *values: int) -> str:
        return self.constant("ints_" + "_".join(map(str, values)), np.array(values, np.int64))

    def length(self, tensor: str, axis: int, name: str) -> str:
        """The size of an axis, int64 ``[1]``."""
        shape = self.node("Shape", [tensor], f"{name}.shape")
        return self.node("Slice", [shape, self.ints(axis), self.ints(axis + 1)], name)

    def heads(self, name: str, x: str, count: int, size: int) -> str:
        """``[batch, sequence, count·size]`` split into heads: ``[batch, count, sequence, size]``."""
        split = self.node("Reshape", [x, self.ints(0, 0, count, size)], f"{name}.split")
        return self.node("Transpose", [split], f"{name}.heads", perm=[0, 2, 1, 3])

    def attention(self, name: str, q: str, k: str, v: str, mask: str, size: int, width: int) -> str:
        """Softmax(q·kᵀ / √size + mask)·v of heads ``[batch, heads, ·, size]``, merged: ``[batch, sequence, width]``."""
        keys = self.node("Transpose", [k], f"{name}.keys", perm=[0, 1, 3, 2])
        scores = self.node("MatMul", [q, keys], f"{name}.scores")
        scaled = self.node("Div", [scores, self.number("sqrt_head_size", float(np.sqrt(size)))], f"{name}.scaled")
        masked = self.node("Add", [scaled, mask], f"{name}.masked")
        weights = self.node("Softmax", [masked], f"{name}.weights", axis=-1)
        context = self.node("MatMul", [weights, v], f"{name}.context")
        merged = self.node("Transpose", [context], f"{name}.merged", perm=[0, 2, 1, 3])
        return self.node("Reshape", [merged, self.ints(0, 0, width)], f"{name}.flat")

    def model(
        self, name: str, inputs: Sequence[onnx.ValueInfoProto], outputs: Mapping[str, onnx.ValueInfoProto]
    ) -> onnx.ModelProto:
        """The checked model; ``outputs`` says which tensor becomes which output."""
        for tensor, value in outputs.items():
            self.node("Identity", [tensor], value.name)
        graph = helper.make_graph(
            self.nodes, name, list(inputs), list(outputs.values()), list(self._constants.values())
        )
        opsets = [helper.make_opsetid("", OPSET)]
        opsets += [helper.make_opsetid(domain, 1) for domain in sorted({n.domain for n in self.nodes} - {""})]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name=f"models.{name}")
        onnx.checker.check_model(model, full_check=True)
        return model
