"""Half-precision models, and those of float64, are computed in float32: every such tensor inside becomes float32.

Only what a caller sees keeps its dtype: inputs are converted as they are read, outputs as they are written. So nothing overflows or
is rounded on the way (row statistics of values up to 6e4, sums of long rows), casts up and down vanish, and a half model comes to the
normal form of its float32 twin.

What a model would get from half's rounding itself, it does not get: a cast to half of 1e9 stays 1e9 (not infinity), a sum beyond 65504
stays finite (so that a test whether anything has overflowed, as T5 makes before it clamps, finds nothing), and a cast of a half to an
integer truncates the float32 value. A mask that was infinite by such a cast is then the finite number that its author wrote, which masks as
well, and a row that is masked altogether gives the mean of the values, not NaN.
Half constants, infinities included, have the values that they were stored with.

A float64 model is one with an input, an output or a large weight in float64. What a float32 model computes in float64 on purpose stays so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

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


def is_double(model: onnx.ModelProto) -> bool:
    """Whether ``model`` (from ``load``) is one of float64."""
    weights = (i for i in model.graph.initializer if i.data_type == TensorProto.DOUBLE)
    return any(e == TensorProto.DOUBLE for e in _elements((*model.graph.input, *model.graph.output))) or any(
        _size(w) > _LARGE for w in weights
    )


def promote(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` (from ``load``) with all half tensors float32, inputs and outputs too; the same object if it has none.

    Large initializers stay as they are stored, with a Cast behind.
    """
    if not has_half(model):
        return model
    promoted, weights = _retyped(model, _HALF, TensorProto.FLOAT)
    graph = promoted.graph
    taken = {v.name for v in (*graph.input, *graph.initializer, *weights)} | {t for n in graph.node for t in n.output}
    nodes = list(graph.node)
    del graph.node[:]
    for weight in weights:
        graph.initializer.append(weight)
        stored = graph.initializer[-1]
        while stored.name in taken:
            stored.name += ".half"
        taken.add(stored.name)
        graph.node.append(helper.make_node("Cast", [stored.name], [weight.name], stored.name, to=TensorProto.FLOAT))
    graph.node.extend(nodes)
    return promoted


def import_promoted(model: onnx.ModelProto) -> gs.Graph:
    """``model`` (from ``load``) as a graph whose half tensors are float32, but for its inputs and outputs, which a Cast converts.

    So are the float64 tensors of a float64 model.
    """
    types = (_HALF if has_half(model) else frozenset()) | ({TensorProto.DOUBLE} if is_double(model) else frozenset())
    if not types:
        return gs.import_onnx(model)
    graph = _import(model, types, TensorProto.FLOAT)
    if types & _HALF:
        _pass_overflow_tests(graph)
    _keep_ends(graph, model, types)
    return graph


def _pass_overflow_tests(graph: gs.Graph) -> None:
    """Whether any element of what the model has computed is infinite: none is, but where the model itself has infinities."""
    editor = ir.GraphEditor(graph)
    inputs = {id(t) for t in graph.inputs} | _behind_infinities(graph)
    for node in graph.nodes:
        if node.op != "IsInf" or node.domain or not node.outputs[0].outputs:
            continue
        x = node.inputs[0]
        while (cast := ir.made_by(x, "Cast")) is not None:
            x = cast.inputs[0]
        if id(x) in inputs or ir.producer(x) is None or ir.is_output(graph, node.outputs[0]):
            continue
        if all(_asks_for_any(user) for user in ir.consumers(node.outputs[0])):
            editor.replace(node.outputs[0], editor.constant(f"{node.outputs[0].name}.none", np.zeros(1, np.bool_)))


def _behind_infinities(graph: gs.Graph) -> set[int]:
    """The ids of the tensors that infinite constants may be in."""
    found: set[int] = set()
    for node in ir.in_order(graph):
        if any(id(t) in found or _is_infinite(t) for t in node.inputs) or any(map(_is_infinite, node.attrs.values())):
            found.update(map(id, node.outputs))
    return found


def _is_infinite(value: object) -> bool:
    """Whether a constant has an infinite element; graphs within a node are taken to."""
    if isinstance(value, gs.Constant):
        value = np.asarray(value.values)
        return bool(
            value.size
            and value.dtype.kind == "f"
            and np.isinf([np.fmin.reduce(value, None), np.fmax.reduce(value, None)]).any()
        )
    return isinstance(value, gs.Graph) or (isinstance(value, float) and np.isinf(value))


def _asks_for_any(node: gs.Node) -> bool:
    """Whether all that ``node`` and the casts behind it give is one number for the whole tensor."""
    if node.op == "Cast" and not node.domain:
        users = ir.consumers(node.outputs[0])
        return bool(users) and all(map(_asks_for_any, users))
    alone = node.op in ("ReduceSum", "ReduceMax") and not any(t.name for t in node.inputs[1:])
    return alone and "axes" not in node.attrs and not node.attrs.get("noop_with_empty_axes", 0)


def import_sized(model: onnx.ModelProto) -> gs.Graph:
    """``model`` (from ``load``) for counting bytes: bfloat16, which graphs cannot hold, is float16, which is as large."""
    return _import(model, _HALF, TensorProto.FLOAT16) if has_half(model) else gs.import_onnx(model)


def _import(model: onnx.ModelProto, types: Set[int], wanted: int) -> gs.Graph:
    """``model`` as a graph with all tensors of ``types`` of type ``wanted``."""
    retyped, weights = _retyped(model, types, wanted)
    count = len(retyped.graph.input)
    retyped.graph.input.extend(helper.make_tensor_value_info(w.name, wanted, w.dims) for w in weights)
    graph = gs.import_onnx(retyped)
    dtype = helper.tensor_dtype_to_np_dtype(wanted)
    for tensor, weight in zip(graph.inputs[count:], weights, strict=True):
        tensor.to_constant(numpy_helper.to_array(weight).astype(dtype, copy=False))
    del graph.inputs[count:]
    return graph


def _retyped(model: onnx.ModelProto, types: Set[int], wanted: int) -> tuple[onnx.ModelProto, list[TensorProto]]:
    """``model`` with all tensors of ``types`` of type ``wanted``, without its large initializers of ``types``; and those as they are."""
    weights = [i for i in model.graph.initializer if i.data_type in types and _size(i) > _LARGE]
    names = {w.name for w in weights}
    source = model.graph
    retyped = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    retyped.graph.name = source.name
    retyped.graph.node.extend(source.node)
    retyped.graph.input.extend(source.input)
    retyped.graph.output.extend(source.output)
    retyped.graph.value_info.extend(source.value_info)
    retyped.graph.initializer.extend(i for i in source.initializer if i.name not in names)
    for graph in _graphs(retyped.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            _retype(value.type, types, wanted)
        for tensor in graph.initializer:
            _convert(tensor, types, wanted)
        for attribute in (a for node in graph.node for a in node.attribute):
            if attribute.type == AttributeProto.TENSOR:
                _convert(attribute.t, types, wanted)
            elif _element(attribute) in types:
                attribute.i = wanted
    return retyped, weights


def _keep_ends(graph: gs.Graph, model: onnx.ModelProto, types: Set[int]) -> None:
    """Gives ``graph`` the inputs and outputs of ``types`` that ``model`` declares."""
    editor = ir.GraphEditor(graph)
    outer: dict[int, gs.Variable] = {}

    def end(inner: gs.Variable, element: int) -> gs.Variable:
        """The tensor that a caller sees of ``inner``, in its name."""
        made = gs.Variable(inner.name, dtype=helper.tensor_dtype_to_np_dtype(element), shape=inner.shape)
        inner.name = editor.names.fresh(f"{inner.name}.float32")
        return made

    for i, element in enumerate(_elements(model.graph.input)):
        if element in types:
            inner = graph.inputs[i]
            graph.inputs[i] = outer[id(inner)] = end(inner, element)
            editor.node("Cast", [graph.inputs[i]], [inner], inner.name, to=TensorProto.FLOAT)
    for i, element in enumerate(_elements(model.graph.output)):
        inner = graph.outputs[i]
        if id(inner) in outer:
            graph.outputs[i] = outer[id(inner)]
        elif element in types:
            graph.outputs[i] = end(inner, element)
            editor.node("Cast", [inner], [graph.outputs[i]], f"{inner.name}.cast", to=element)


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
        or any(_element(a) in _HALF for n in graph.node for a in n.attribute)
    )


def _element(attribute: AttributeProto) -> int:
    """The element type that an attribute holds or names; 0 if it does neither."""
    if attribute.type == AttributeProto.TENSOR:
        return attribute.t.data_type
    return attribute.i if attribute.type == AttributeProto.INT and attribute.name in _ELEMENT_TYPES else 0


def _retype(kind: TypeProto, types: Set[int], wanted: int) -> None:
    if kind.HasField("sequence_type"):
        _retype(kind.sequence_type.elem_type, types, wanted)
    elif kind.HasField("optional_type"):
        _retype(kind.optional_type.elem_type, types, wanted)
    elif kind.tensor_type.elem_type in types:
        kind.tensor_type.elem_type = wanted


def _convert(tensor: TensorProto, types: Set[int], wanted: int) -> None:
    if tensor.data_type in types:
        array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(wanted))
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _size(tensor: TensorProto) -> int:
    return int(np.prod(tensor.dims, dtype=np.int64))
