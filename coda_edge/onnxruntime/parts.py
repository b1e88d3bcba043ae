"""Bundles for the parts of a model that can be compiled, where the whole cannot: what lies between operators without a lowering.

A node's *level* is the greatest number of such operators on a way from the inputs to it. The nodes of one level are a part: no way leads out
of it and back in, for that would pass an operator without a lowering, and end a level higher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import onnx
from onnx import helper, shape_inference

from ..driver import Optimized, optimize
from ..errors import CodaError, UnsupportedOperator

#: A part without any of these is not worth a bundle.
HEAVY = frozenset(
    {"MatMul", "Gemm", "Conv", "ConvTranspose", "Attention", "LSTM", "GRU", "MatMulInteger", "QLinearMatMul"}
)

_ELEMENTS = {
    "tensor(float)": onnx.TensorProto.FLOAT,
    "tensor(float16)": onnx.TensorProto.FLOAT16,
    "tensor(bool)": onnx.TensorProto.BOOL,
    **{
        f"tensor({kind}{bits})": getattr(onnx.TensorProto, f"{kind}{bits}".upper())
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
}
Made = TypeVar("Made")
_RANDOM = frozenset({"RandomNormal", "RandomUniform"})


@dataclass
class _Model:
    """A model's nodes in order, and what is known of its values."""

    model: onnx.ModelProto
    types: dict[str, onnx.ValueInfoProto] = field(default_factory=dict)
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict)
    outputs: set[str] = field(default_factory=set)


def compile_parts(model: onnx.ModelProto, target: str, verify: bool = True) -> list[Optimized]:
    """Compiles the parts of ``model`` for ``target``; their inputs and outputs are values of the model, by its names.

    An empty list if there is nothing worth it. ``model`` has its external data loaded.
    """
    return each_part(model, lambda cut: optimize(cut, target, verify=verify))


def each_part(model: onnx.ModelProto, make: Callable[[onnx.ModelProto], Made]) -> list[Made]:
    """What ``make`` makes of each part of ``model``: a model whose inputs and outputs are values of it, by its names.

    Where it raises UnsupportedOperator, a part is cut again, without that operator; where it raises another CodaError, without what
    has values of unknown types or ranks, if there is any.
    """
    return list(_make(_read(model), list(model.graph.node), set(), make))


def _known_types(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """The values of ``model`` whose types and ranks are known, by name."""
    graph = model.graph
    inferred = shape_inference.infer_shapes(model, data_prop=True).graph
    types = {v.name: v for v in (*inferred.value_info, *graph.input, *graph.output) if _is_known(v)}
    unknown = [name for node in graph.node for name in node.output if name and name not in types]
    types.update(_ask_onnxruntime(model, unknown))
    return types


def _read(model: onnx.ModelProto) -> _Model:
    graph = model.graph
    return _Model(model, _known_types(model), {t.name: t for t in graph.initializer}, {v.name for v in graph.output})


def _ask_onnxruntime(model: onnx.ModelProto, names: Sequence[str]) -> dict[str, onnx.ValueInfoProto]:
    """The types of values that onnx cannot infer, of operators that only onnxruntime knows; without those of unknown rank."""
    import onnxruntime

    if not names:
        return {}
    asked = onnx.ModelProto()
    asked.CopyFrom(model)
    asked.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(asked.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # operators that it does not know either, or more than 2 GB: its exceptions have no common base
        return {}
    found = {}
    for value in session.get_outputs()[len(model.graph.output) :]:
        element = _ELEMENTS.get(value.type)
        if element is not None and value.shape:
            dims = [d if isinstance(d, int) else None for d in value.shape]
            found[value.name] = helper.make_tensor_value_info(value.name, element, dims)
    return found


def _make(
    known: _Model, nodes: list[onnx.NodeProto], hard: set[str], make: Callable[[onnx.ModelProto], Made]
) -> Iterator[Made]:
    """What is made of the parts of ``nodes``; ``hard``: first outputs of nodes without a lowering."""
    fixed = _constant_values(known, nodes)
    for part in _parts(nodes, hard, fixed):
        if not any(node.op_type in HEAVY for node in part):
            continue
        cut = _extract(known, part, fixed)
        found = _untyped(known, part, fixed)
        try:
            if cut is not None:
                yield make(cut)
                continue
        except UnsupportedOperator as error:
            found = {node.output[0] for node in _named(part, error)}
        except CodaError:
            pass
        if found:
            yield from _make(known, part, hard | found, make)


def _untyped(known: _Model, nodes: Sequence[onnx.NodeProto], fixed: Mapping[str, onnx.NodeProto]) -> set[str]:
    """First outputs of those of ``nodes`` that read or make values of which nothing is known: sequences, or tensors of unknown rank."""
    typed = known.types.keys() | known.constants.keys() | fixed.keys()
    return {node.output[0] for node in nodes if not typed.issuperset(reads(node) | set(filter(None, node.output)))}


def _named(nodes: Sequence[onnx.NodeProto], error: UnsupportedOperator) -> list[onnx.NodeProto]:
    """The nodes that an error is about: the one of its name, or else all of its operator."""
    operator = error.op.rpartition("::")[2]
    return [n for n in nodes if n.name and n.name == error.node] or [n for n in nodes if n.op_type == operator]


def _constant_values(known: _Model, nodes: Sequence[onnx.NodeProto]) -> dict[str, onnx.NodeProto]:
    """By value, the nodes that read no input: onnxruntime evaluates them, and every part has its own."""
    fixed: dict[str, onnx.NodeProto] = {}
    for node in known.model.graph.node:
        if (
            node.op_type not in _RANDOM
            and not _subgraphs(node)
            and all(name in known.constants or name in fixed for name in reads(node))
        ):
            fixed.update({name: node for name in node.output})
    return fixed


def _parts(
    nodes: Sequence[onnx.NodeProto], hard: set[str], fixed: Mapping[str, onnx.NodeProto]
) -> Iterator[list[onnx.NodeProto]]:
    """The nodes of each level, but those without a lowering, and those with subgraphs."""
    levels: dict[str, int] = {}
    found: dict[int, list[onnx.NodeProto]] = {}
    for node in nodes:
        if node.output[0] in fixed:
            continue
        level = max((levels.get(name, 0) for name in reads(node)), default=0)
        apart = node.output[0] in hard or bool(_subgraphs(node))
        levels.update({name: level + apart for name in node.output})
        if not apart:
            found.setdefault(level, []).append(node)
    yield from found.values()


def _subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [g for a in node.attribute for g in ((a.g,) if a.type == onnx.AttributeProto.GRAPH else a.graphs)]


def reads(node: onnx.NodeProto) -> set[str]:
    """What a node reads, by itself and in its subgraphs."""
    inner = (n for g in _subgraphs(node) for n in g.node)
    results = {v.name for g in _subgraphs(node) for v in g.output}
    return {name for name in node.input if name}.union(results, *(reads(n) for n in inner))


def _extract(
    known: _Model, part: Sequence[onnx.NodeProto], fixed: Mapping[str, onnx.NodeProto]
) -> onnx.ModelProto | None:
    """``part`` as a model; None if the type of a value at its border is not known, or nobody reads it."""
    made = {name for node in part for name in node.output if name}
    read = set().union(*(reads(node) for node in part))
    elsewhere = set().union(*(reads(n) for n in known.model.graph.node if n.output[0] not in made))
    inputs = sorted(read - made - known.constants.keys() - fixed.keys())
    outputs = sorted(made & (known.outputs | elsewhere))
    if not outputs or not all(name in known.types for name in (*inputs, *outputs)):
        return None
    shared = _needed(read, fixed)
    used = read.union(*(reads(node) for node in shared))
    graph = helper.make_graph(
        [*shared, *part],
        known.model.graph.name,
        [known.types[name] for name in inputs],
        [known.types[name] for name in outputs],
        [tensor for name, tensor in known.constants.items() if name in used],
    )
    opsets, functions = known.model.opset_import, known.model.functions
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=known.model.ir_version)


def _needed(read: set[str], fixed: Mapping[str, onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The constant nodes that make what is read, in order."""
    needed, pending = set(), list(read)
    while pending:
        node = fixed.get(pending.pop())
        if node is not None and node.output[0] not in needed:
            needed.add(node.output[0])
            pending.extend(reads(node))
    return [node for name, node in fixed.items() if name in needed]


def _is_known(value: onnx.ValueInfoProto) -> bool:
    return bool(value.type.tensor_type.elem_type) and value.type.tensor_type.HasField("shape")
