"""Reads an ONNX model and checks it, before anything is done to it."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from keyword import iskeyword
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import external_data_helper, inliner, version_converter

from ..errors import InvalidModel, ShapeError
from ..messages import copy_fields
from ..symbolic import parse_dim

Source: TypeAlias = "str | os.PathLike[str] | bytes | onnx.ModelProto"

#: The lowest opset of the default domain that the frontend works on; older models are converted to it.
OPSET = 18
# The opset of the Scan that is not over batches.
_SCAN = 9
# Initializers above this size are taken out while C++ works on the model: it serialises, and protobuf ends at 2 GB.
_LARGE = 1024
# The longest dimension that a caller can pin: products of a few of them stay within int64.
_LONGEST = 2**31 - 1


def load(source: Source) -> onnx.ModelProto:
    """Reads ``source`` (a path, a serialised model or a ``ModelProto``), external data included, and checks it.

    The result has opset ≥ 18, no model-local functions, no initializer among its inputs, and a name for every dynamic
    dimension of an input: the exporter's, or ``<input>_<axis>``. An input ``ModelProto`` is not changed.

    Raises InvalidModel, in one line, if this is not a valid ONNX model, its data is missing, or it cannot be converted.
    """
    model, name = _read(source)
    if not model.HasField("graph") or not model.opset_import:
        raise InvalidModel(f"{name} is not an ONNX model: it holds no graph")
    # Before version 4, initializers had to be inputs too, which they are no longer after this.
    model.ir_version = max(model.ir_version, 4)
    if model.graph.sparse_initializer:
        name = model.graph.sparse_initializer[0].values.name
        raise InvalidModel(f"initializer '{name}' is sparse: store it densely")
    _allow_what_runs(model.graph)
    slim = without_weights(model)
    _move_norms(slim)
    _sort(slim.graph)
    _check(slim, name)
    if slim.functions:
        slim = inliner.inline_local_functions(slim)
    _put_back(_convert(slim, name), model)
    _name_inputs(model.graph)
    return model


def _read(source: Source) -> tuple[onnx.ModelProto, str]:
    if isinstance(source, onnx.ModelProto):
        copy = onnx.ModelProto()
        copy.CopyFrom(source)
        return copy, "the model"
    try:
        if isinstance(source, bytes):
            return onnx.load_model_from_string(source), "the model"
        name = f"'{os.fspath(source)}'"
        model = onnx.load(source, load_external_data=False)
    except (DecodeError, ValueError) as error:
        name = "the data" if isinstance(source, bytes) else f"'{os.fspath(source)}'"
        raise InvalidModel(f"{name} is not an ONNX model: it does not parse as one; export it again") from error
    except OSError as error:
        raise InvalidModel(f"{name} cannot be read: {error.strerror}") from error
    try:
        external_data_helper.load_external_data_for_model(model, str(Path(source).parent))
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise InvalidModel(f"{name} keeps weights in another file, which cannot be read: {_line(error)}") from error
    return model, name


def external_files(path: Path) -> list[Path]:
    """The files beside the model at ``path`` that its initializers are in; none if it cannot be read."""
    try:
        graph = onnx.load(path, load_external_data=False).graph
    except (DecodeError, ValueError, OSError):
        return []
    names = {e.value for t in graph.initializer for e in t.external_data if e.key == "location"}
    return [path.parent / name for name in sorted(names)]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of ``model`` with its large initializers as inputs, behind the others."""
    graph = model.graph
    initializers = {i.name for i in graph.initializer}
    slim = onnx.ModelProto()
    copy_fields(model, slim, skip=("graph",))
    copy_fields(graph, slim.graph, skip=("input", "initializer"))
    slim.graph.input.extend(i for i in graph.input if i.name not in initializers)
    for tensor in graph.initializer:
        if _is_large(tensor):
            slim.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
        else:
            slim.graph.initializer.append(tensor)
    return slim


def _put_back(slim: onnx.ModelProto, model: onnx.ModelProto) -> None:
    """Makes ``model`` what ``slim`` has become; its large initializers stay where they are, since a copy would take their memory again."""
    initializers = model.graph.initializer
    for i in reversed(range(len(initializers))):
        if not _is_large(initializers[i]):
            del initializers[i]
    weights = {i.name for i in initializers}
    for message, kept in ((model, "graph"), (model.graph, "initializer")):
        for field, _ in message.ListFields():
            if field.name != kept:
                message.ClearField(field.name)
    copy_fields(slim, model, skip=("graph",))
    copy_fields(slim.graph, model.graph, skip=("input", "initializer"))
    model.graph.input.extend(i for i in slim.graph.input if i.name not in weights)
    initializers.extend(slim.graph.initializer)


def _is_large(tensor: onnx.TensorProto) -> bool:
    return int(np.prod(tensor.dims, dtype=np.int64)) > _LARGE


def _move_norms(model: onnx.ModelProto) -> None:
    """onnxruntime's optimiser writes one operator of its own in ONNX's domain, where the checker refuses it."""
    norms = [n for n in model.graph.node if n.op_type == "SimplifiedLayerNormalization" and not n.domain]
    for node in norms:
        node.domain = "com.microsoft"
    if norms and all(o.domain != "com.microsoft" for o in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))


def _sort(graph: onnx.GraphProto) -> None:
    """Puts nodes behind those whose results they read, as onnxruntime does: converters to half precision append their Casts at the end."""
    makers = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    reads = [{makers[name] for name in _read_by(node) if name in makers} for node in graph.node]
    if all(all(r < i for r in some) for i, some in enumerate(reads)):
        return
    try:
        order = list(TopologicalSorter(dict(enumerate(reads))).static_order())
    except CycleError as error:
        names = ", ".join(dict.fromkeys(graph.node[i].name or graph.node[i].output[0] for i in error.args[1]))
        raise InvalidModel(
            f"the graph is no order of computation: nodes read each other's results ({names})"
        ) from error
    nodes = [graph.node[i] for i in order]
    sorted_graph = onnx.GraphProto()
    sorted_graph.node.extend(nodes)
    del graph.node[:]
    graph.node.extend(sorted_graph.node)


def _read_by(node: onnx.NodeProto) -> Iterator[str]:
    """The names of what a node reads, also in its nested graphs; those may call something of their own as something outside is called."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            own = {name for inner in graph.node for name in inner.output}
            own.update(value.name for value in (*graph.input, *graph.initializer))
            names = chain((value.name for value in graph.output), *map(_read_by, graph.node))
            yield from (name for name in names if name not in own)


def _check(model: onnx.ModelProto, name: str) -> None:
    # The checker wants a shape of each output, which some exporters leave out and inference finds.
    bare = [v.type.tensor_type for v in model.graph.output if v.type.HasField("tensor_type")]
    bare = [t for t in bare if not t.HasField("shape")]
    for tensor in bare:
        tensor.shape.SetInParent()
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise InvalidModel(f"{name} is not valid: {_line(error)}") from error
    finally:
        for tensor in bare:
            tensor.ClearField("shape")
    outputs = Counter(v.name for v in model.graph.output)
    twice = [output for output, count in outputs.items() if count > 1]
    if twice:
        raise InvalidModel(f"{name} lists output '{twice[0]}' more than once: give each output a name, by an Identity")
    for value in model.graph.input:
        if not value.type.HasField("tensor_type"):
            raise InvalidModel(f"{name}: input '{value.name}' is not a tensor; only tensors are supported")


def _convert(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    version = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), OPSET)
    if version >= OPSET:
        return model
    batched = next((n for n in model.graph.node if n.op_type == "Scan"), None) if version < _SCAN else None
    if batched is not None:
        where = f"Scan (node '{batched.name or batched.output[0]}')"
        raise InvalidModel(
            f"{name} is of opset {version}, whose {where} is another operator: export it with opset {_SCAN} or later"
        )
    try:
        return version_converter.convert_version(model, OPSET)
    except (RuntimeError, onnx.shape_inference.InferenceError) as error:
        raise InvalidModel(
            f"{name} is of opset {version} and cannot be converted to {OPSET}: {_culprit(model)}{_line(error)}; "
            f"export it with opset {OPSET} or later"
        ) from error


def _culprit(model: onnx.ModelProto) -> str:
    """The first node that cannot be converted by itself, for the message."""
    inferred = onnx.shape_inference.infer_shapes(model).graph
    types = {v.name: v for v in (*inferred.input, *inferred.value_info, *inferred.output)}
    constants = {i.name: i for i in model.graph.initializer}
    for node in model.graph.node:
        graph = onnx.helper.make_graph(
            [node],
            "one",
            [types[n] for n in node.input if n in types],
            [types[n] for n in node.output if n in types],
            [constants[n] for n in node.input if n in constants],
        )
        try:
            version_converter.convert_version(
                onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version), OPSET
            )
        except (RuntimeError, onnx.shape_inference.InferenceError):
            return f"{node.op_type} (node '{node.name or node.output[0]}') stands in the way: "
    return ""


def _allow_what_runs(graph: onnx.GraphProto) -> None:
    """Gives a graph the name, and negative dimensions of inputs the openness, without which the checker refuses what onnxruntime runs.

    Raises InvalidModel for an input without a shape.
    """
    graph.name = graph.name or "graph"
    weights = {i.name for i in graph.initializer}
    for value in graph.input:
        if not value.type.HasField("tensor_type") or value.name in weights:
            continue
        if not value.type.tensor_type.HasField("shape"):
            raise InvalidModel(
                f"input '{value.name}' has no shape, not even a number of dimensions: write one into the model, with names for sizes that stay open"
            )
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value < 0:
                dim.ClearField("dim_value")


def _name_inputs(graph: onnx.GraphProto) -> None:
    alone = {d.dim_param for value in graph.input for d in value.type.tensor_type.shape.dim}
    for value in graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value"):
                dim.dim_param = _size_name(dim.dim_param, alone) or re.sub(r"\W", "_", f"{value.name}_{axis}")


def _size_name(name: str, alone: Collection[str]) -> str:
    """``name`` if expressions can contain it, else with every odd character replaced; '' if nothing of it is left.

    An expression of sizes that no dimension has ``alone`` is a name too, such as ``batch-size``.
    """
    dim = parse_dim(name)
    symbols = () if isinstance(dim, int) else dim.free_symbols
    if symbols and all(s.name in alone and s.name.isidentifier() and not iskeyword(s.name) for s in symbols):
        return name
    cleaned = re.sub(r"\W+", "_", name).strip("_")
    return cleaned if cleaned.isidentifier() and not iskeyword(cleaned) else f"size_{cleaned}" if cleaned else ""


def bind(graph: gs.Graph, shapes: Mapping[str, Sequence[int | str]]) -> None:
    """Gives inputs of ``graph`` the dimensions in ``shapes``, in place; a string names a size that stays dynamic.

    A size that is bound here is bound wherever else the inputs name it.

    Raises ShapeError if an input is unknown, the rank differs, a fixed dimension would change, or a size is beyond 2³¹ − 1.
    """
    inputs = {i.name: i for i in graph.inputs}
    listing = ", ".join(f"{i.name}[{', '.join(map(str, i.shape or ()))}]" for i in graph.inputs)
    bound: dict[str, int | str] = {}
    for name, dims in shapes.items():
        if name not in inputs:
            raise ShapeError(f"there is no input '{name}'; the inputs are {listing}")
        have = inputs[name].shape if inputs[name].shape is not None else list(dims)
        if len(have) != len(dims):
            raise ShapeError(f"input '{name}' has {len(have)} dimensions, not {len(dims)}; the inputs are {listing}")
        for old, new in zip(have, dims, strict=True):
            if isinstance(new, int) and not 0 <= new <= _LONGEST:
                raise ShapeError(
                    f"input '{name}' cannot have a dimension fixed to {new}, only 0 to {_LONGEST}; the inputs are {listing}"
                )
            if isinstance(old, int) and old != new:
                raise ShapeError(f"input '{name}' fixes a dimension to {old}, not {new}; the inputs are {listing}")
            if isinstance(old, str) and bound.setdefault(old, new) != new:
                raise ShapeError(f"size '{old}' is bound to both {bound[old]} and {new}; the inputs are {listing}")
        inputs[name].shape = list(have)
    for tensor in graph.inputs:
        if tensor.shape is not None:
            tensor.shape = [bound.get(d, d) if isinstance(d, str) else d for d in tensor.shape]
