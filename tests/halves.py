"""Half-precision versions of float32 models, as an exporter writes them after the whole model was cast."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, TensorProto, numpy_helper

NUMPY = {TensorProto.FLOAT16: np.dtype(np.float16), TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16)}


def to_half(model: onnx.ModelProto, element: int = TensorProto.FLOAT16) -> onnx.ModelProto:
    """``model`` with every float32 tensor of type ``element``: weights, inputs, outputs, constants, casts."""
    half = onnx.ModelProto()
    half.CopyFrom(model)
    for graph in _graphs(half.graph):
        del graph.value_info[:]
        for tensor in graph.initializer:
            _convert(tensor, element)
        for value in (*graph.input, *graph.output):
            if value.type.tensor_type.elem_type == TensorProto.FLOAT:
                value.type.tensor_type.elem_type = element
        for attribute in (a for n in graph.node for a in n.attribute):
            if attribute.type == AttributeProto.TENSOR:
                _convert(attribute.t, element)
            elif attribute.name in ("to", "dtype") and attribute.i == TensorProto.FLOAT:
                attribute.i = element
    return half


def _convert(tensor: TensorProto, element: int) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        with np.errstate(over="ignore"):
            array = numpy_helper.to_array(tensor).astype(NUMPY[element])
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for attribute in (a for n in graph.node for a in n.attribute if a.type == AttributeProto.GRAPH):
        yield from _graphs(attribute.g)
