"""Models for the generic library: each region that a bundle computes is one node, whose function holds the model's own nodes.

A node ``Region<i>`` of the domain ``coda.bundle`` has the bundle as its first input, then the bundle's inputs, then the constants that its function reads. The
bundle is a constant whose bytes are a file beside the model, which onnxruntime finds and maps: an operator is told no other way
where its model lies, on any release and in any language. So are the large constants: those of a node that runs by its bundle are
mapped as well, and never read.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
from onnx import TensorProto, helper, numpy_helper

from .. import frontend, noise
from ..bundle.plan import ExecutionPlan, ExprOp, TensorInfo
from ..driver import Model, Optimized, Progress, optimize
from ..dtypes import numpy_dtype
from ..errors import InvalidModel, ShapeError, UnsupportedOperator
from ..export import INLINE_LIMIT
from ..export import save as save_model
from ..files import atomic
from ..inputs import generate_inputs, input_specs
from ..targets import get_all
from ..verify import Runner, Verifier, ort_session, run_session
from .compile import load_model
from .library import library_path
from .parts import compile_parts, reads

if TYPE_CHECKING:
    import onnxruntime

#: How many regions a model may have: as many operators has the library (native/ep/custom_op.c).
MAX_REGIONS = 64
DOMAIN = "coda.bundle"
METADATA = "coda.bundles"
"""The model's metadata entry that lists the bundles' files."""

_LARGE = 1024
"""Bytes of a constant that is no part of a function, but an input of its node."""
_OPSET = 1
_IR_VERSION = 8
"""The first with functions."""


@dataclass(frozen=True)
class Bundled:
    """A model and its bundles. ``regions``: of each bundle, the names of the model's nodes (of those without, their outputs).

    ``left`` says why the others are onnxruntime's; None: there are no others. ``max_rel_error``: with the library, against the source
    model; None: not compared.
    """

    model: onnx.ModelProto
    bundles: tuple[Optimized, ...]
    regions: tuple[tuple[str, ...], ...]
    left: str | None
    max_rel_error: float | None = None

    def save(self, path: str | os.PathLike[str]) -> list[Path]:
        """Writes the model, its weights (``<path>.data``) and its bundles beside it, whole or not at all; returns the files.

        Raises FileError if the folder cannot be written.
        """
        path = Path(path)
        stem = path.name.removesuffix(".onnx")
        names = [f"{stem}{f'.{i}' if i else ''}.coda" for i in range(len(self.bundles))]
        files = [path.with_name(name) for name in names]
        with ExitStack() as stack:
            parts = [stack.enter_context(atomic(file)) for file in files]
            for made, part in zip(self.bundles, parts, strict=True):
                made.save(part)
            model = _with_bundles(self.model, names, [part.stat().st_size for part in parts])
            save_model(model, path, inline_limit=0 if names else INLINE_LIMIT)
        data = path.with_name(f"{path.name}.data")
        return [path, *([data] if names and data.exists() else []), *files]


def package_regions(
    model: Model,
    target: str = "native",
    shapes: Mapping[str, tuple[int | str, ...]] | None = None,
    verify: bool = True,
    progress: Progress | None = None,
) -> Bundled:
    """Compiles ``model`` for ``target``, or the parts of it that can be, and makes each a node that the generic library runs.

    ``shapes`` pins input dimensions. ``verify`` compares what comes out with the source model, with the library and without, on made-up
    inputs. ``progress(stage, fraction)`` hears how far each stage is. A model of which nothing can be compiled comes out as it is.

    Raises InvalidModel if this is no model, TargetError, or VerificationError naming the way that fails.
    """
    source = load_model(model)
    left = None
    try:
        bundles = [optimize(model, target, shapes, verify, progress)]
    except (UnsupportedOperator, InvalidModel, ShapeError) as error:
        left = str(error)
        bundles = compile_parts(source, target, verify)
    if len(bundles) > MAX_REGIONS:
        left = f"{left}; there are {len(bundles)} regions, more than {MAX_REGIONS}"
        bundles = sorted(bundles, key=lambda made: -made.bundle.constants.nbytes)[:MAX_REGIONS]
    made, regions = _make(source, bundles, shapes or {})
    result = Bundled(made, tuple(bundles), tuple(regions), left)
    if not verify or not bundles:
        return result
    return replace(result, max_rel_error=_verify(source, result, target))


def _make(
    source: onnx.ModelProto, bundles: Sequence[Optimized], shapes: Mapping[str, tuple[int | str, ...]]
) -> tuple[onnx.ModelProto, list[tuple[str, ...]]]:
    made = onnx.ModelProto()
    made.CopyFrom(source)
    if not bundles:
        return made, []
    made.ir_version = max(made.ir_version, _IR_VERSION)
    graph = made.graph
    _drop_constant_inputs(graph)
    _pin(graph, shapes)
    _lift_constants(graph)
    builder = _Builder(made)
    regions = [builder.add(i, bundle) for i, bundle in enumerate(bundles)]
    builder.finish()
    del made.opset_import[:]
    made.opset_import.extend(o for o in source.opset_import if o.domain != DOMAIN)
    made.opset_import.append(helper.make_opsetid(DOMAIN, _OPSET))
    return made, regions


def _drop_constant_inputs(graph: onnx.GraphProto) -> None:
    """Inputs that are initializers are constants from here on, as they are in a bundle."""
    constants = {t.name for t in graph.initializer}
    inputs = [v for v in graph.input if v.name not in constants]
    del graph.input[:]
    graph.input.extend(inputs)


def _pin(graph: onnx.GraphProto, shapes: Mapping[str, tuple[int | str, ...]]) -> None:
    for value in graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False):
            if isinstance(size, int):
                dim.dim_value = size


def _lift_constants(graph: onnx.GraphProto) -> None:
    """Makes initializers of large Constant nodes, and has the bytes of all in one place, as a file wants them."""
    nodes = []
    for node in graph.node:
        value = next((a.t for a in node.attribute if a.name == "value"), None)
        if node.op_type != "Constant" or value is None or _bytes(value) <= _LARGE:
            nodes.append(node)
            continue
        tensor = graph.initializer.add()
        tensor.CopyFrom(value)
        tensor.name = node.output[0]
    del graph.node[:]
    graph.node.extend(nodes)
    for tensor in graph.initializer:
        if not tensor.raw_data and _bytes(tensor) > _LARGE:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))


class _Builder:
    """Takes regions out of a model, one after another, and puts their nodes in at the end."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._types: list[onnx.ValueInfoProto] = []
        graph = model.graph
        self._nodes = list(graph.node)
        self._producer = {name: node for node in self._nodes for name in node.output if name}
        self._constants = {t.name: t for t in graph.initializer}
        self._outputs = [v.name for v in graph.output]
        self._calls: list[onnx.NodeProto] = []
        self._functions: list[onnx.FunctionProto] = []

    def add(self, number: int, made: Optimized) -> tuple[str, ...]:
        """Makes the nodes of a bundle a function and a call of it; returns what they are called."""
        plan = made.bundle.best.plan
        inputs, outputs = [t.name for t in plan.inputs], [t.name for t in plan.outputs]
        body = self._between(inputs, outputs)
        names = tuple(node.name or node.output[0] for node in body)
        read = {name for node in body for name in reads(node)} | set(outputs)
        constants = [t for name, t in self._constants.items() if name in read and name not in inputs]
        large = [t.name for t in constants if _bytes(t) > _LARGE and t.name not in outputs]
        nodes = [helper.make_node("Constant", [], [t.name], value=t) for t in constants if t.name not in large] + body
        # An input that is an output too: one that nobody reads takes its place.
        results = [f"{name}.copy" if name in inputs else name for name in outputs]
        copied = [(name, copy) for name, copy in zip(outputs, results, strict=True) if name != copy]
        nodes += [helper.make_node("Identity", [name], [copy]) for name, copy in copied]
        for i, node in enumerate(nodes):  # onnxruntime 1.20 refuses two that are inlined without
            node.name = f"{node.op_type}_{i}"
        opsets = [o for o in self._model.opset_import if o.domain != DOMAIN]
        name, values = f"Region{number}", [f"{DOMAIN}.{number}", *inputs, *large]
        self._functions.append(helper.make_function(DOMAIN, name, values, results, nodes, opsets))
        self._calls.append(helper.make_node(name, values, results, name=name, domain=DOMAIN))
        self._types += [_type(plan, t, result) for t, result in zip(plan.outputs, results, strict=True)]
        return names

    def _between(self, inputs: Sequence[str], outputs: Sequence[str]) -> list[onnx.NodeProto]:
        """Copies of the nodes between values, in order, those that make constants too."""
        found: dict[int, onnx.NodeProto] = {}
        pending, known = [*outputs], {*inputs, *self._constants}
        while pending:
            name = pending.pop()
            node = None if name in known else self._producer.get(name)
            if node is not None and id(node) not in found:
                found[id(node)] = node
                pending.extend(reads(node))
        copies = []
        for node in self._nodes:
            if id(node) in found:
                copies.append(onnx.NodeProto())
                copies[-1].CopyFrom(node)
        return copies

    def finish(self) -> None:
        """Leaves in the graph what somebody reads: calls, the other nodes, constants, and the types of what calls make."""
        graph = self._model.graph
        made = {name for call in self._calls for name in call.output}
        nodes = _sorted(
            [*self._calls, *(n for n in self._nodes if not made.intersection(n.output))],
            self._outputs,
            set(self._constants) - made,
        )
        read = {name for node in nodes for name in reads(node)} | set(self._outputs)
        constants = [t for name, t in self._constants.items() if name in read and name not in made]
        ends = {v.name for v in (*graph.input, *graph.output)}
        del graph.node[:], graph.initializer[:], graph.value_info[:]
        graph.node.extend(nodes)
        graph.initializer.extend(constants)
        graph.value_info.extend(value for value in self._types if value.name not in ends)
        self._model.functions.extend(self._functions)


def _type(plan: ExecutionPlan, tensor: TensorInfo, name: str) -> onnx.ValueInfoProto:
    """The type of an output of a bundle, which the operator itself does not tell onnxruntime."""
    sizes = (plan.exprs.entries[dim] for dim in tensor.dims)
    dims = [size.a if size.op is ExprOp.CONST else None for size in sizes]
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(numpy_dtype(tensor.dtype)), dims)


def _sorted(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str], constants: set[str]) -> list[onnx.NodeProto]:
    """Those of ``nodes`` that the outputs need, each behind what it reads."""
    producer = {name: node for node in nodes for name in node.output if name}
    done: dict[int, onnx.NodeProto] = {}
    pending = [(producer[name], False) for name in reversed(outputs) if name in producer]
    while pending:
        node, ready = pending.pop()
        if id(node) in done:
            continue
        if ready:
            done[id(node)] = node
            continue
        pending.append((node, True))
        needed = (
            producer[name] for name in sorted(reads(node), reverse=True) if name in producer and name not in constants
        )
        pending.extend((other, False) for other in needed if id(other) not in done)
    return list(done.values())


def _with_bundles(model: onnx.ModelProto, names: Sequence[str], sizes: Sequence[int]) -> onnx.ModelProto:
    """``model`` with the bundles' files as constants."""
    if not names:
        return model
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for i, (name, size) in enumerate(zip(names, sizes, strict=True)):
        tensor = made.graph.initializer.add(
            name=f"{DOMAIN}.{i}", data_type=TensorProto.UINT8, dims=[size], data_location=TensorProto.EXTERNAL
        )
        for key, value in {"location": name, "offset": 0, "length": size}.items():
            tensor.external_data.add(key=key, value=str(value))
    made.metadata_props.add(key=METADATA, value="\n".join(names))
    return made


def _bytes(tensor: onnx.TensorProto) -> int:
    return len(tensor.raw_data) or numpy_helper.to_array(tensor).nbytes


def _verify(source: onnx.ModelProto, made: Bundled, target: str) -> float | None:
    """The error with the library; None if this machine cannot run it, or there is nothing to compare with. Raises VerificationError."""
    if noise.draws(source):  # onnxruntime draws other random numbers each time
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        made.save(path)
        runs = not all(one.missing() for one in get_all(target))
        ours = session(path) if runs else None
        try:
            loaded = frontend.load(source)
            verifier = _verifier(loaded, made, ours)
        except InvalidModel:  # its bundles were compared, part by part
            if made.left is None:
                raise
            return None
        verifier.check(_runner(ort_session(str(path))), "the model without the library")
        return None if ours is None else verifier.check(_runner(ours), "the model with the library")


def _verifier(loaded: onnx.ModelProto, made: Bundled, ours: onnxruntime.InferenceSession | None) -> Verifier:
    """The reference results, at sizes that the bundles are meant for: each was verified by itself, and says so when it runs."""
    specs = input_specs(loaded)

    def allowed(sizes: Mapping[str, int]) -> bool:
        try:
            if ours is not None:
                run_session(ours, [o.name for o in ours.get_outputs()], generate_inputs(specs, sizes))
        except Exception:  # onnxruntime's errors have no common class of their own
            return False
        return True

    by_data = any(one.bundle.best.plan.reads for one in made.bundles)
    outputs = frozenset(o.name for o in loaded.graph.output)
    return Verifier.of_model(loaded, specs, allowed=allowed, by_data=outputs if by_data else frozenset())


def _runner(candidate: onnxruntime.InferenceSession) -> Runner:
    return lambda names, feeds: run_session(candidate, names, feeds)


def session(path: str | os.PathLike[str], threads: int = 0) -> onnxruntime.InferenceSession:
    """onnxruntime on the model at ``path`` with the generic library, on the CPU with ``threads`` threads (0: as many as it likes)."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # what fails is raised
    options.register_custom_ops_library(library_path())
    return onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
