"""The optimized graph as a valid ONNX model that any runtime runs, and back.

Each ``coda`` node becomes a call of a model-local function in domain ``coda``, whose body is the same computation in basic
operators. The function's name starts with the node's operator and tells what is in it (``Gemm_bias_gelu_1a2b3c4d``); equal
bodies are one function. The call keeps the node's attributes, such as the epilogue's text, for readers and ``from_model``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import FunctionProto, NodeProto, TensorProto, helper
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter

from . import __version__
from .epilogue.onnx import MIN_OPSET, ONNX_DTYPES, Emitter, emit_onnx
from .epilogue.ops import OPERATORS
from .epilogue.program import EpilogueProgram, Kind, StepKind
from .errors import InvalidModel
from .export_attention import attention_nodes, input_names, output_names
from .export_weights import stored
from .export_window import convolution, window_rows
from .files import atomic
from .ir import DOMAIN, Tensor, copy_nodes, in_order
from .messages import copy_fields

INLINE_LIMIT = 2**31 - 2**20
"""Bytes of initializers above which ``save`` puts them into a file of their own: protobuf ends at 2 GiB."""
_ALIGNMENT = 64
_MIN_EXTERNAL = 1024


def to_model(graph: gs.Graph, narrow: bool = False) -> onnx.ModelProto:
    """``graph`` as a model that passes ``onnx.checker`` and runs without any library of ours. ``graph`` is left as it is.

    Inputs and outputs keep names, dtypes and symbolic shapes. ``narrow``: constants that are exact in half precision are stored in it, with
    a Cast behind (see ``export_weights``). Raises InvalidModel for an opset before 18, for a ``coda``
    operator that has no body, and for an input or output without a dtype.
    """
    opset = int(graph.opset)
    if opset < MIN_OPSET:
        raise InvalidModel(
            f"the graph has opset {opset}; an optimized model needs {MIN_OPSET} or later: normalize it first"
        )
    names = _Names(graph)
    functions = _Functions(opset)
    nodes = [functions.export(node, names) for node in in_order(graph)]
    proto = helper.make_graph(
        [],
        graph.name or "coda",
        [_value_info(t) for t in graph.inputs],
        [_value_info(t) for t in graph.outputs],
        doc_string=graph.doc_string or "",
        value_info=[_value_info(t) for t in names.variables() if t.dtype is not None and t.shape is not None],
    )
    opsets = _opsets(graph, opset, {n.domain for n in nodes if n.domain})
    model = helper.make_model(
        proto,
        functions=functions.protos(),
        opset_imports=opsets,
        ir_version=max(8, helper.find_min_ir_version_for([o for o in opsets if o.domain in ("", "ai.onnx")])),
        producer_name="coda-edge",
        producer_version=__version__,
    )
    # One by one, as messages are copied into those that hold them.
    for name, tensor in names.constants.items():
        tensors, made = stored(tensor, name, opset) if narrow else ([_initializer(tensor, name)], list[NodeProto]())
        model.graph.initializer.extend(tensors)
        model.graph.node.extend(made)
    model.graph.node.extend(nodes)
    return model


def from_model(model: onnx.ModelProto) -> gs.Graph:
    """The graph that ``to_model`` made ``model`` from: calls of ``coda`` functions are ``coda`` nodes again, with types inferred.

    Models without such calls come back as they are. Raises InvalidModel for a call whose function is missing.
    """
    from .frontend import infer

    graph = gs.import_onnx(model)
    bodies = {f.name: f for f in graph.functions if f.domain == DOMAIN}
    graph.functions = [f for f in graph.functions if f.domain != DOMAIN]
    _restore(graph, bodies)
    infer(graph)
    return graph


def save(model: onnx.ModelProto, path: str | os.PathLike[str], inline_limit: int = INLINE_LIMIT) -> None:
    """Writes ``model``, whole or not at all; ``model`` is left as it is.

    If its initializers exceed ``inline_limit`` bytes they go to ``<path>.data`` beside it, which must stay with it.
    Raises FileError if the folder cannot be written.
    """
    path = Path(path)
    if sum(len(t.raw_data) for t in model.graph.initializer) <= inline_limit:
        with atomic(path) as part:
            part.write_bytes(model.SerializeToString())
        return
    data = path.with_name(path.name + ".data")
    with atomic(path) as part, atomic(data) as data_part:
        slim = _externalize(model, data.name, data_part)
        part.write_bytes(slim.SerializeToString())


class _Names:
    """A name for each tensor of a graph: its own, unless another constant of that name holds something else."""

    def __init__(self, graph: gs.Graph) -> None:
        self.constants: dict[str, gs.Constant] = {}
        self._names: dict[int, str] = {}
        self._variables: dict[str, gs.Variable] = {}
        ends = {id(t) for t in (*graph.inputs, *graph.outputs)}
        tensors = [t for n in graph.nodes for t in (*n.inputs, *n.outputs)] + list(graph.outputs)
        for tensor in tensors:
            if isinstance(tensor, gs.Variable) and id(tensor) not in ends and tensor.name:
                self._variables[tensor.name] = tensor
        taken = {*self._variables, *(t.name for t in (*graph.inputs, *graph.outputs))}
        for tensor in tensors:
            if isinstance(tensor, gs.Constant) and id(tensor) not in self._names:
                self._names[id(tensor)] = self._constant(tensor, taken)

    def __call__(self, tensor: Tensor) -> str:
        return self._names.get(id(tensor), str(tensor.name))

    def variables(self) -> list[gs.Variable]:
        """The variables that are neither inputs nor outputs."""
        return list(self._variables.values())

    def _constant(self, tensor: gs.Constant, taken: set[str]) -> str:
        name, count = str(tensor.name), 1
        while name in taken or (name in self.constants and not _equal(self.constants[name], tensor)):
            name, count = f"{tensor.name}.{count}", count + 1
        self.constants.setdefault(name, tensor)
        return name


class _Functions:
    """The functions that calls of ``coda`` operators need, each made once."""

    def __init__(self, opset: int) -> None:
        self._opset = opset
        self._protos: dict[str, FunctionProto] = {}

    def protos(self) -> list[FunctionProto]:
        """All functions; those that a body calls come before it."""
        return list(self._protos.values())

    def export(self, node: gs.Node, name_of: Callable[[Tensor], str]) -> NodeProto:
        """``node`` as ONNX spells it: a call, if it is a ``coda`` node."""
        if node.domain != DOMAIN:
            proto: NodeProto = OnnxExporter.export_node(node)
            for field, tensors in ((proto.input, node.inputs), (proto.output, node.outputs)):
                field[:] = [name_of(t) for t in tensors]
            return proto
        if node.op not in _BODIES:
            raise InvalidModel(
                f"node '{node.name}': there is no operator {DOMAIN}.{node.op}; there are {', '.join(_BODIES)}"
            )
        attributes = {name: value for name, value in node.attrs.items() if not isinstance(value, gs.Graph)}
        function = self._function(node, sorted(attributes))
        call = helper.make_node(
            function,
            [name_of(t) for t in node.inputs],
            [name_of(t) for t in node.outputs],
            name=node.name,
            domain=DOMAIN,
        )
        call.attribute.extend(OnnxExporter.export_attributes(attributes))
        return call

    def _function(self, node: gs.Node, attributes: Sequence[str]) -> str:
        tag, inputs, outputs, nodes = _BODIES[node.op](self, node)
        nested = any(n.domain == DOMAIN for n in nodes)
        imports = [helper.make_opsetid("", self._opset), *([helper.make_opsetid(DOMAIN, 1)] if nested else [])]
        proto = helper.make_function(DOMAIN, "", inputs, outputs, nodes, imports, attributes=list(attributes))
        key = hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()[:8]
        proto.name = "_".join([node.op, *tag, key])
        self._protos.setdefault(proto.name, proto)
        return str(proto.name)


# What a body is: words for its name, inputs, outputs, nodes.
_Body = tuple[list[str], list[str], list[str], list[NodeProto]]


def _gemm_body(functions: _Functions, node: gs.Node) -> _Body:
    """Y… = epilogue(A @ W, operands…); with a window, of the rows that it makes of A."""
    program = EpilogueProgram.parse(node.attrs["epilogue"])
    inputs, outputs = _signature(["A", "W"], program)
    emitter = Emitter("product_")
    text = node.attrs.get("window")
    product = emitter.node("MatMul", *inputs[:2]) if text is None else convolution(emitter, inputs[:2], node, text)
    acc = _as_accumulator(emitter, product, node.inputs[0], program)
    columns = int(node.inputs[1].shape[-1])
    nodes = emit_onnx(program, [acc, *inputs[2:]], outputs, "epilogue_", columns=columns, before=emitter.nodes)
    return ([] if text is None else ["conv"]) + _words(program), inputs, outputs, nodes


def _window_body(functions: _Functions, node: gs.Node) -> _Body:
    """The rows of the windows of X."""
    return [], ["X"], ["rows"], window_rows(node, "X", "rows")


def _attention_body(functions: _Functions, node: gs.Node) -> _Body:
    """Y = merge_heads(softmax(score(q @ kᵀ, operands…)) @ v); all keys and values if asked for."""
    program = EpilogueProgram.parse(node.attrs["score"])
    given = input_names(node)
    rest = len(node.inputs) - len(given)
    inputs, _ = _signature(given, program)
    inputs = [*inputs[: len(given)], *(inputs[-rest:] if rest else [])]
    words = _words(program, vector="mask", tensor="mask")
    words += [word for word in ("bands", "past", "sink", "guard") if node.attrs.get(word, 0)]
    return words, inputs, output_names(node), attention_nodes(node, program, inputs)


def _row_moments_body(functions: _Functions, node: gs.Node) -> _Body:
    """mean, var over the last axis."""
    emitter = Emitter("t_")
    spell = OPERATORS["moments"].onnx
    assert callable(spell)
    emitter.name_results(spell(emitter, ["X"]), ["mean", "var"])
    return [], ["X"], ["mean", "var"], emitter.nodes


def _map_body(functions: _Functions, node: gs.Node) -> _Body:
    """The nodes of the node's ``body``, with names that do not depend on where it came from."""
    body: gs.Graph = node.attrs["body"]
    names = {id(t): f"in{i}" for i, t in enumerate(body.inputs)}
    copies: list[NodeProto] = []
    for i, tensor in enumerate(body.outputs):
        if id(tensor) in names or isinstance(tensor, gs.Constant):
            copies.append(helper.make_node("Identity", [_name_in(names, tensor)], [f"out{i}"]))
        else:
            names[id(tensor)] = f"out{i}"
    order = in_order(body)
    for tensor in (t for n in order for t in (*n.inputs, *n.outputs)):
        _name_in(names, tensor)
    constants = {id(t): t for n in order for t in n.inputs if isinstance(t, gs.Constant)}
    constants |= {id(t): t for t in body.outputs if isinstance(t, gs.Constant)}
    nodes = [helper.make_node("Constant", [], [names[i]], value=_initializer(t, "")) for i, t in constants.items()]
    for inner in order:
        proto = functions.export(inner, lambda t: names[id(t)])
        proto.name = ""
        nodes.append(proto)
    words = _distinct(n.op.lower() for n in order if n.op not in _PLAIN)[:4]
    return words, [names[id(t)] for t in body.inputs], [f"out{i}" for i in range(len(body.outputs))], nodes + copies


_BODIES: dict[str, Callable[[_Functions, gs.Node], _Body]] = {
    "Gemm": _gemm_body,
    "GroupedConv": _gemm_body,
    "Window": _window_body,
    "Attention": _attention_body,
    "RowMoments": _row_moments_body,
    "Map": _map_body,
}

_PLAIN = frozenset({"Reshape", "Unsqueeze", "Squeeze", "Cast", "Shape", "Slice", "Concat", "Expand", "Range"})
_OP_WORDS = {
    "erf": "gelu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "relu": "relu",
    "exp": "exp",
    "where": "where",
    "rsqrt": "norm",
    "sqrt": "norm",
    "even": "pairs",
    "interleave": "rotate",
    "moments": "moments",
    "sum": "sum",
    "sumsq": "sumsq",
    "mean": "mean",
    "rowmax": "max",
}


def _words(program: EpilogueProgram, vector: str = "bias", tensor: str = "residual") -> list[str]:
    """What a program does, in a few words for a name; ``vector`` and ``tensor`` are words for what is added to the tile."""
    kinds = program.kinds()
    words: list[str] = []
    for step in program.steps:
        operands = [kinds[a] for a in step.args if isinstance(a, str)]
        adds = step.op in ("add", "sub")
        if step.op in _OP_WORDS:
            words.append(_OP_WORDS[step.op])
        elif adds and program.step_kind(step) is StepKind.TILE:
            words.append(tensor)
        elif adds and {Kind.TILE, Kind.COL} == set(operands):
            words.append(vector)
        elif step.op == "mul" and program.params[0].name in step.args and len(operands) == 1:
            words.append("scale")
    if any(o.heads for o in program.outputs):
        words.append("heads")
    return _distinct(words)


def _signature(first: list[str], program: EpilogueProgram) -> tuple[list[str], list[str]]:
    """Names of a body's inputs and outputs: the program's own, made distinct."""
    taken: list[str] = []
    for name in (*first, *(p.name for p in program.params[1:]), *(o.name for o in program.outputs)):
        while name in taken:
            name += "_"
        taken.append(name)
    count = len(first) + len(program.params) - 1
    return taken[:count], taken[count:]


def _as_accumulator(emitter: Emitter, product: str, operand: Tensor, program: EpilogueProgram) -> str:
    """The product in the accumulator's dtype."""
    dtype = program.params[0].dtype
    return product if _element_type(operand) == ONNX_DTYPES[dtype] else emitter.cast(product, dtype)


def _name_in(names: dict[int, str], tensor: Tensor) -> str:
    if id(tensor) not in names:
        prefix = "c" if isinstance(tensor, gs.Constant) else "v"
        names[id(tensor)] = f"{prefix}{len(names)}" if tensor.name else ""
    return names[id(tensor)]


def _element_type(tensor: Tensor) -> int:
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype)))


def _value_info(tensor: Tensor) -> onnx.ValueInfoProto:
    if tensor.dtype is None:
        raise InvalidModel(f"tensor '{tensor.name}' has no dtype: infer types before exporting")
    return helper.make_tensor_value_info(tensor.name, _element_type(tensor), tensor.shape)


def _initializer(tensor: gs.Constant, name: str) -> TensorProto:
    return onnx.numpy_helper.from_array(np.ascontiguousarray(tensor.values).reshape(tensor.values.shape), name)


def _equal(a: gs.Constant, b: gs.Constant) -> bool:
    return a.values is b.values or (a.values.dtype == b.values.dtype and np.array_equal(a.values, b.values))


def _opsets(graph: gs.Graph, opset: int, domains: Iterable[str]) -> list[onnx.OperatorSetIdProto]:
    versions = {o.domain: o.version for o in graph.import_domains or ()} | {DOMAIN: 1}
    return [helper.make_opsetid("", opset), *(helper.make_opsetid(d, versions.get(d, 1)) for d in sorted(domains))]


def _distinct(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))


def _restore(graph: gs.Graph, bodies: dict[str, gs.Function]) -> None:
    """Calls of ``bodies`` become ``coda`` nodes again, and Constant nodes constants."""
    for node in graph.nodes:
        if node.domain != DOMAIN:
            continue
        if node.op not in bodies:
            raise InvalidModel(f"node '{node.name}' calls {DOMAIN}.{node.op}, which the model does not define")
        name, node.op = node.op, node.op.partition("_")[0]
        if node.op == "Map":
            node.attrs["body"] = _map_graph(bodies[name], bodies)
    for node in [n for n in graph.nodes if n.op == "Constant" and not n.domain]:
        constant = gs.Constant(node.outputs[0].name, node.attrs["value"].values)
        _replace(graph, node.outputs[0], constant)
        node.outputs.clear()
        graph.nodes.remove(node)


def _map_graph(function: gs.Function, bodies: dict[str, gs.Function]) -> gs.Graph:
    """A function's body as a graph of its own."""
    tensors: dict[str, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        return tensors.setdefault(tensor.name, gs.Variable(tensor.name)) if tensor.name else gs.Variable.empty()

    inputs = [copy(t) for t in function.inputs]
    nodes = copy_nodes(function.nodes, copy)
    graph = gs.Graph(nodes=nodes, inputs=inputs, outputs=[copy(t) for t in function.outputs], opset=function.opset)
    _restore(graph, bodies)
    return graph


def _replace(graph: gs.Graph, old: Tensor, new: Tensor) -> None:
    for user in list(old.outputs):
        user.inputs = [new if t is old else t for t in user.inputs]
    graph.outputs = [new if t is old else t for t in graph.outputs]


def _externalize(model: onnx.ModelProto, location: str, data: Path) -> onnx.ModelProto:
    """Writes the large initializers of ``model`` to ``data``; returns a copy of the rest that refers to ``location``."""
    slim = onnx.ModelProto()
    copy_fields(model, slim, skip=("graph",))
    copy_fields(model.graph, slim.graph, skip=("initializer",))
    with data.open("wb") as stream:
        for tensor in model.graph.initializer:
            if len(tensor.raw_data) < _MIN_EXTERNAL:
                slim.graph.initializer.append(tensor)
                continue
            stream.write(b"\0" * (-stream.tell() % _ALIGNMENT))
            entry = slim.graph.initializer.add(
                name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, data_location=TensorProto.EXTERNAL
            )
            place = {"location": location, "offset": stream.tell(), "length": len(tensor.raw_data)}
            for key, value in place.items():
                entry.external_data.add(key=key, value=str(value))
            stream.write(tensor.raw_data)
    return slim
