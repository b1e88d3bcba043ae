"""A model as onnxruntime gets it, with what its nodes become: rewritten as a whole, or in the parts that can be, or left as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from graphlib import TopologicalSorter

import onnx
import onnx_graphsurgeon as gs

from .. import export, frontend
from ..calibrate import measure_on
from ..driver import Model
from ..errors import CodaError, InvalidModel, ShapeError, UnsupportedOperator
from ..frontend.model import OPSET, bind
from ..inputs import bound_specs, input_specs
from ..lower.kernel import KernelSource
from ..passes import run_pipeline
from ..schedule import Schedules
from ..targets import Target
from ..verify import Verifier, ort_session
from .compile import load_model
from .operators import Call, Claims, claim
from .parts import each_part, reads

Shapes = Mapping[str, tuple[int | str, ...]]
Tell = Callable[[str, float], None]


@dataclass(frozen=True)
class Settings:
    """How a model is rewritten. ``verify``: what comes out is to be compared, and what accuracy depends on measured."""

    target: Target
    verify: bool
    in_library: bool
    tell: Tell
    schedules: Schedules = field(default_factory=Schedules.packaged)


@dataclass(frozen=True)
class Rewritten:
    """``model`` calls functions, ``claims`` says which of these calls become operators, ``left`` why not all of the source was rewritten.

    ``verifier`` has the results of the source; None: nothing is to be compared, or nothing can be, for the reason ``unchecked``.
    """

    model: onnx.ModelProto
    claims: Claims
    verifier: Verifier | None
    unchecked: str | None = None
    left: str | None = None


def rewrite(source: Model, shapes: Shapes | None, settings: Settings) -> Rewritten:
    """Rewrites ``source``, with input dimensions pinned by ``shapes``.

    Raises InvalidModel if it is no model, ShapeError if ``shapes`` do not fit.
    """
    settings.tell("load", 0.0)
    loaded, left = _load(source)
    if left is None:
        try:
            whole = _whole(loaded, shapes, settings)
            if whole.claims.calls:
                return whole
            return replace(whole, model=load_model(source), left="nothing in it becomes a kernel")
        except (UnsupportedOperator, ShapeError, InvalidModel) as error:
            left = str(error)
    if shapes:
        loaded = _pinned(loaded, shapes)
    verifier, unchecked = _reference(loaded, None, settings)
    parts = _in_parts(loaded, settings)
    model, claims = parts if parts is not None else (load_model(source), Claims({}, {}, []))
    return Rewritten(model, claims, verifier, unchecked, left)


def _load(source: Model) -> tuple[onnx.ModelProto, str | None]:
    """The model from ``frontend.load``; if that refuses what ONNX allows, the model as it is, or of a recent opset, and the reason."""
    try:
        return frontend.load(source), None
    except InvalidModel as error:
        try:
            model = load_model(source)
        except Exception:  # onnx's, protobuf's and the system's errors have no common base
            raise error from None
        if not _is_valid(model):
            raise
        return model, str(error)


def _is_valid(model: onnx.ModelProto) -> bool:
    """Whether ONNX or onnxruntime takes ``model``."""
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError):
        try:
            ort_session(model)
        except InvalidModel:
            return False
    return True


def _pinned(loaded: onnx.ModelProto, shapes: Shapes) -> onnx.ModelProto:
    """``loaded`` with input dimensions pinned. Raises ShapeError if they do not fit."""
    graph = gs.import_onnx(loaded)
    bind(graph, shapes)
    made = onnx.ModelProto()
    made.CopyFrom(loaded)
    for value, tensor in zip(made.graph.input, graph.inputs, strict=True):
        for dim, size in zip(value.type.tensor_type.shape.dim, tensor.shape or (), strict=False):
            if isinstance(size, int):
                dim.dim_value = size
            else:
                dim.dim_param = str(size)
    return made


def _whole(loaded: onnx.ModelProto, shapes: Shapes | None, settings: Settings) -> Rewritten:
    settings.tell("normalize", 0.0)
    normal = frontend.to_normal_form(loaded, dict(shapes) if shapes else None)
    settings.tell("reference", 0.0)
    verifier, unchecked = _reference(loaded, normal, settings)
    model, claims = _claim(normal, verifier, settings)
    return Rewritten(model, claims, verifier, unchecked)


def _reference(
    loaded: onnx.ModelProto, normal: frontend.NormalForm | None, settings: Settings
) -> tuple[Verifier | None, str | None]:
    """The results of ``loaded``, or why there are none."""
    if not settings.verify:
        return None, None
    ends = (*loaded.graph.input, *loaded.graph.output)
    other = next((v.name for v in ends if not v.type.HasField("tensor_type")), None)
    if other is not None:
        return None, f"'{other}' is no tensor, so values cannot be made up"
    try:
        if normal is None:
            return Verifier.of_model(loaded, input_specs(loaded)), None
        specs, by_data = bound_specs(loaded, normal.graph), frontend.decided_by_data(normal.graph)
        return Verifier.of_model(loaded, specs, allowed=normal.allows, by_data=by_data), None
    except CodaError as error:
        return None, str(error)


def _claim(
    normal: frontend.NormalForm, verifier: Verifier | None, settings: Settings
) -> tuple[onnx.ModelProto, Claims]:
    measure = None if verifier is None else measure_on([feeds for feeds, _ in verifier.cases])
    target, schedules = settings.target, settings.schedules
    absorbs = partial(schedules.absorbs, target.measured_as)
    run_pipeline(normal.graph, lambda done: settings.tell(f"pass {done.name}", 0.5), measure, absorbs)
    settings.tell("export", 0.0)
    model = export.to_model(normal.graph, narrow=True)
    settings.tell("lower", 0.0)
    return model, claim(normal.graph, target, normal.constraints, schedules, settings.in_library)


def _in_parts(loaded: onnx.ModelProto, settings: Settings) -> tuple[onnx.ModelProto, Claims] | None:
    """Puts what becomes of the parts of ``loaded`` in their place; None if nothing does."""
    opset = _opset(loaded)
    parts: list[tuple[onnx.ModelProto, Claims]] = []
    if opset >= OPSET:
        parts = each_part(loaded, partial(_part, settings=settings))
    parts = [(model, claims) for model, claims in parts if claims.calls and _opset(model) == opset]
    if not parts:
        return None
    made = onnx.ModelProto()
    made.CopyFrom(loaded)
    nodes, calls, kept, kernels = (
        list(loaded.graph.node),
        dict[str, Call](),
        dict[str, str](),
        dict[str, KernelSource](),
    )
    functions = {(f.domain, f.name): f for f in loaded.functions}
    initializers = list(loaded.graph.initializer)
    for number, (model, claims) in enumerate(parts):
        renamed = _apart(model, f"part{number}.")
        outputs = {o.name for o in model.graph.output}
        nodes = [*(n for n in nodes if not outputs.intersection(n.output)), *renamed.graph.node]
        initializers.extend(renamed.graph.initializer)
        calls |= {f"part{number}.{name}": call for name, call in claims.calls.items()}
        kept |= {f"part{number}.{name}": why for name, why in claims.left.items()}
        kernels |= {kernel.symbol: kernel for kernel in claims.kernels}
        functions |= {(f.domain, f.name): f for f in renamed.functions}
    ordered = _ordered(nodes, made.graph)
    read = {name for node in ordered for name in reads(node)} | {o.name for o in made.graph.output}
    made.graph.ClearField("node")
    made.graph.ClearField("initializer")
    made.graph.node.extend(ordered)
    made.graph.initializer.extend(t for t in initializers if t.name in read)
    made.ClearField("functions")
    made.functions.extend(functions.values())
    domains = {o.domain for o in made.opset_import}
    made.opset_import.extend(o for o in parts[0][0].opset_import if o.domain not in domains)
    made.ir_version = max(made.ir_version, *(model.ir_version for model, _ in parts))
    return made, Claims(calls, kept, list(kernels.values()))


def _part(cut: onnx.ModelProto, settings: Settings) -> tuple[onnx.ModelProto, Claims]:
    loaded = frontend.load(cut)
    normal = frontend.to_normal_form(loaded)
    verifier, _ = _reference(loaded, normal, settings)
    return _claim(normal, verifier, settings)


def _opset(model: onnx.ModelProto) -> int:
    return next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), OPSET)


def _apart(model: onnx.ModelProto, prefix: str) -> onnx.ModelProto:
    """``model`` with ``prefix`` before the names of its nodes and of all tensors but its inputs and outputs."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    ends = {v.name for v in (*model.graph.input, *model.graph.output)}

    def named(names: Iterable[str]) -> list[str]:
        return [name if not name or name in ends else prefix + name for name in names]

    for node in made.graph.node:
        node.name = prefix + node.name
        node.input[:], node.output[:] = named(node.input), named(node.output)
    for tensor in made.graph.initializer:
        (tensor.name,) = named([tensor.name])
    return made


def _ordered(nodes: Sequence[onnx.NodeProto], graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Those of ``nodes`` that the outputs of ``graph`` need, each behind what it reads."""
    makers = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    wanted = [makers[o.name] for o in graph.output if o.name in makers]
    needs: dict[int, list[int]] = {}
    while wanted:
        i = wanted.pop()
        if i not in needs:
            needs[i] = sorted(makers[name] for name in reads(nodes[i]) if name in makers)
            wanted.extend(needs[i])
    return [nodes[i] for i in TopologicalSorter(dict(sorted(needs.items()))).static_order()]
