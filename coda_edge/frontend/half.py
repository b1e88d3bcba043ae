"""Half-precision models are computed in float32: every float16 and bfloat16 tensor inside becomes float32.

Only what a caller sees keeps its dtype: inputs are converted as they are read, outputs as they are written. So nothing overflows or
is rounded on the way (row statistics of values up to 6e4, sums of long rows), casts up and down vanish, and a half model comes to the
normal form of its float32 twin.

What a model would get from half's rounding itself, it does not get: a cast to half of 1e9 stays 1e9 (not infinity), a sum beyond 65504
stays finite, and a cast of a half to an integer truncates the float32 value. A mask that was infinite by such a cast is then the finite
number that its author wrote, which masks as well, and a row that is masked altogether gives the mean of the values, not NaN.
Half constants, infinities included, have the values that they were stored with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import AttributeProto, GraphProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

from .. import ir

_HALF = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})
# Attributes of ONNX operators that hold an element type (Cast; EyeLike, RandomNormal, …; DequantizeLinear; HannWindow, …; norms; Attention).
_ELEMENT_TYPES = frozenset({"to", "dtype", "output_dtype", "output_datatype", "stash_type", "softmax_precision"})
# Elements of an initializer above which it is not copied where it need not be.
_LARGE = 1024


def has_half(model: onnx.ModelProto) -> bool:
    """Whether a tensor of ``model`` (from ``load``) that it declares, stores or makes is float16 or bfloat16."""
    return any(_graph_has_half(graph) for graph in _graphs(model.graph))


def promote(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` (from ``load``) with all half tensors float32, inputs and outputs too; the same object if it has none.

    Large initializers stay as they are stored, with a Cast behind.
    """
    if not has_half(model):
        return model
    promoted, weights = _promote(model)
    graph = promoted.graph
    taken = {v.name for v in (*graph.input, *graph.initializer, *weights)} | {t for n in graph.node for t in n.output}
    nodes = list(graph.node)
    del graph.node[:]
    for tensor in weights:
        name = tensor.name
        while tensor.name in taken:
            tensor.name += ".half"
        taken.add(tensor.name)
        graph.initializer.append(tensor)
        graph.node.append(helper.make_node("Cast", [tensor.name], [name], tensor.name, to=TensorProto.FLOAT))
    graph.node.extend(nodes)
    return promoted


def import_promoted(model: onnx.ModelProto) -> gs.Graph:
    """``model`` (from ``load``) as a graph whose half tensors are float32, but for its inputs and outputs, which a Cast converts."""
    if not has_half(model):
        return gs.import_onnx(model)
    promoted, weights = _promote(model)
    count = len(promoted.graph.input)
    promoted.graph.input.extend(helper.make_tensor_value_info(w.name, TensorProto.FLOAT, w.dims) for w in weights)
    graph = gs.import_onnx(promoted)
    for tensor, weight in zip(graph.inputs[count:], weights, strict=True):
        tensor.to_constant(_widened(weight))
    del graph.inputs[count:]
    _keep_ends(graph, model)
    return graph


def _promote(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[TensorProto]]:
    """``model`` in float32, without its large half initializers, and those."""
    promoted = onnx.ModelProto()
    promoted.CopyFrom(model)
    weights = [i for i in model.graph.initializer if i.data_type in _HALF and _size(i) > _LARGE]
    names = {w.name for w in weights}
    kept = [i for i in promoted.graph.initializer if i.name not in names]
    del promoted.graph.initializer[:]
    promoted.graph.initializer.extend(kept)
    for graph in _graphs(promoted.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            _promote_type(value.type)
        for tensor in graph.initializer:
            _promote_tensor(tensor)
        for attribute in (a for node in graph.node for a in node.attribute):
            _promote_attribute(attribute)
    copies = [TensorProto() for _ in weights]
    for copy, weight in zip(copies, weights, strict=True):
        copy.CopyFrom(weight)
    return promoted, copies


def _keep_ends(graph: gs.Graph, model: onnx.ModelProto) -> None:
    """Gives ``graph`` the half inputs and outputs that ``model`` declares."""
    editor = ir.GraphEditor(graph)
    outer: dict[int, gs.Variable] = {}

    def end(inner: gs.Variable, element: int) -> gs.Variable:
        """The half tensor that a caller sees of ``inner``, in its name."""
        made = gs.Variable(inner.name, dtype=helper.tensor_dtype_to_np_dtype(element), shape=inner.shape)
        inner.name = editor.names.fresh(f"{inner.name}.float32")
        return made

    for i, element in enumerate(_elements(model.graph.input)):
        if element in _HALF:
            inner = graph.inputs[i]
            graph.inputs[i] = outer[id(inner)] = end(inner, element)
            editor.node("Cast", [graph.inputs[i]], [inner], inner.name, to=TensorProto.FLOAT)
    for i, element in enumerate(_elements(model.graph.output)):
        inner = graph.outputs[i]
        if id(inner) in outer:
            graph.outputs[i] = outer[id(inner)]
        elif element in _HALF:
            graph.outputs[i] = end(inner, element)
            editor.node("Cast", [inner], [graph.outputs[i]], f"{inner.name}.half", to=element)


def _elements(values: Iterable[ValueInfoProto]) -> Iterator[int]:
    return (v.type.tensor_type.elem_type for v in values)


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """``graph`` and the graphs of its nodes' attributes, however deep."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.type in _GRAPHS else ():
                yield from _graphs(inner)


_GRAPHS = (AttributeProto.GRAPH, AttributeProto.GRAPHS)


def _graph_has_half(graph: GraphProto) -> bool:
    values = (*graph.input, *graph.output, *graph.value_info)
    return (
        any(i.data_type in _HALF for i in graph.initializer)
        or any(element in _HALF for element in _elements(values))
        or any(_attribute_is_half(a) for n in graph.node for a in n.attribute)
    )


def _attribute_is_half(attribute: AttributeProto) -> bool:
    if attribute.type == AttributeProto.TENSOR:
        return attribute.t.data_type in _HALF
    return attribute.type == AttributeProto.INT and attribute.name in _ELEMENT_TYPES and attribute.i in _HALF


def _promote_attribute(attribute: AttributeProto) -> None:
    if not _attribute_is_half(attribute):
        return
    if attribute.type == AttributeProto.INT:
        attribute.i = TensorProto.FLOAT
    else:
        _promote_tensor(attribute.t)


def _promote_type(kind: TypeProto) -> None:
    if kind.HasField("sequence_type"):
        _promote_type(kind.sequence_type.elem_type)
    elif kind.HasField("optional_type"):
        _promote_type(kind.optional_type.elem_type)
    elif kind.tensor_type.elem_type in _HALF:
        kind.tensor_type.elem_type = TensorProto.FLOAT


def _promote_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in _HALF:
        tensor.CopyFrom(numpy_helper.from_array(_widened(tensor), tensor.name))


def _widened(tensor: TensorProto) -> ir.Array:
    return numpy_helper.to_array(tensor).astype(np.float32)


def _size(tensor: TensorProto) -> int:
    return int(np.prod(tensor.dims, dtype=np.int64))
