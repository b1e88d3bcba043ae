"""Products that onnxruntime computes on activations of 8 bits, though the model says they are float: where results are compared, it must not.

A MatMulNBits node may allow it (``accuracy_level``), and onnxruntime's optimiser makes such nodes of DequantizeLinear and MatMul. Results are then off
by about a hundredth, in onnxruntime.

Source: onnxruntime's ContribOperators documentation of MatMulNBits, its session option ``session.qdq_matmulnbits_accuracy_level``.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx

#: The session option, and its value for products in float32.
IN_FLOAT = ("session.qdq_matmulnbits_accuracy_level", "1")

_LEVEL = "accuracy_level"
_FLOAT = 1


def is_reduced(model: onnx.ModelProto) -> bool:
    """Whether a node of ``model`` allows products of less than float32."""
    return any(True for node in model.graph.node for _ in _levels(node))


def in_float(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of ``model`` whose nodes all ask for float32."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for attribute in (a for node in copy.graph.node for a in _levels(node)):
        attribute.i = _FLOAT
    return copy


def _levels(node: onnx.NodeProto) -> Iterator[onnx.AttributeProto]:
    return (a for a in node.attribute if a.name == _LEVEL and a.i > _FLOAT)
