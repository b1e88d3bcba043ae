"""The whole way: an ONNX model in, a bundle out, checked against onnxruntime and reported."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

import onnx
import onnx_graphsurgeon as gs

from . import __version__, export, frontend
from .accounting import account, outline
from .bundle import plan as plans
from .bundle import writer
from .bundle.levels import LevelParts, combine
from .calibrate import measure_on
from .fingerprint import fingerprints, model_digest
from .frontend.half import is_double
from .inputs import bound_specs, default_sizes
from .ir import shape
from .noise import seeded
from .passes import PIPELINE, Absorbs, Pass, PassLog, run_pipeline
from .report import Report
from .session import Session
from .verify import Verifier, judged_as_it_is, ort_session, run_session

if TYPE_CHECKING:
    from .schedule import Schedules

Model = str | os.PathLike[str] | bytes | onnx.ModelProto
Progress = Callable[[str, float], None]
Verify = bool | Literal["each"]

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Optimized:
    """An optimized model: the bundle, the graph that it was made of, and the report."""

    bundle: plans.Bundle
    graph: gs.Graph
    report: Report

    @property
    def model(self) -> onnx.ModelProto:
        """The graph as a valid ONNX model, made each time that it is asked for."""
        return export.to_model(self.graph, narrow=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the bundle, atomically."""
        writer.write(self.bundle, path)

    def save_onnx(self, path: str | os.PathLike[str]) -> None:
        """Writes the optimized graph as a valid ONNX model, atomically."""
        export.save(self.model, path)


def optimize(
    model: Model,
    target: str = "native",
    shapes: Mapping[str, tuple[int | str, ...]] | None = None,
    verify: Verify = True,
    progress: Progress | None = None,
    schedules: Schedules | None = None,
) -> Optimized:
    """Rewrites ``model`` into GEMM-plus-epilogue kernels for ``target`` and packages them.

    ``target``: a name; a comma-separated list of names, for a bundle with kernels for each of them, of which the runtime takes the
    best that its CPU can run (the weights lie as the first one wants them); or the name of such a list, as ``x86-64``.

    ``shapes`` pins input dimensions; all others stay symbolic. ``verify`` compares the bundle with onnxruntime on made-up inputs; with
    ``"each"``, the graph after every pass too (but that of a model that draws random numbers, as each run of it differs). ``progress(stage, fraction)`` hears how far each stage is.
    ``schedules``: where measured schedules are looked up; by default in what the package brings.

    Raises InvalidModel, ShapeError, UnsupportedOperator, TargetError, or VerificationError naming the pass or stage.
    """
    from .lower import lower, suited
    from .schedule import Schedules
    from .targets import get_all, ranked

    start = time.perf_counter()
    tell = progress or (lambda stage, fraction: None)
    chosen = get_all(target)

    tell("load", 0.0)
    loaded = frontend.load(model)
    # It parses the model once more, which is cheapest while there is little else in memory.
    digest = _digest(model)
    tell("normalize", 0.0)
    normal = frontend.to_normal_form(loaded, dict(shapes) if shapes else None)
    graph = normal.graph
    specs = bound_specs(loaded, graph)
    original, remarks, name, constants = (
        outline(loaded),
        _remarks(loaded, graph),
        loaded.graph.name,
        fingerprints(loaded),
    )
    path = os.fspath(model) if isinstance(model, (str, os.PathLike)) else None
    if path is not None and judged_as_it_is(loaded):
        loaded = frontend.without_weights(loaded)
    verifier = None
    if verify:
        tell("reference", 0.0)
        verifier = Verifier.of_model(loaded, specs, path, normal.allows, frontend.decided_by_data(graph))
    # The graph holds the weights from here on.
    del loaded
    known = Schedules.packaged() if schedules is None else schedules
    log = _rewrite(graph, verifier, verify == "each", tell, partial(known.absorbs, chosen[0].measured_as))
    tell("lower", 0.0)
    chosen = suited(chosen, graph)
    lowered, *others = (lower(graph, one, normal.constraints, known) for one in chosen)
    parts: list[LevelParts] = []
    for number, (one, made) in enumerate(zip(chosen, (lowered, *others), strict=True)):
        tell("build kernels", number / len(chosen))
        library = one.build(made.kernels, partial(_tell_share, tell, number, len(chosen)))
        level = plans.Level(one.name, one.features, made.plan, library)
        parts.append(LevelParts(level, made.constants, made.stored))
    names = ranked(chosen)
    metadata = {
        "producer": f"coda-edge {__version__}",
        "target": ",".join(names),
        "model": name,
        "source_sha256": digest,
        "constants": constants,
        **({} if isinstance(model, onnx.ModelProto) else {"model_digest": model_digest(model)}),
    }
    bundle = combine(parts, names, metadata)
    error = None
    sizes = dict(verifier.sizes) if verifier is not None else default_sizes(specs)
    for session in _sessions(bundle, [one.name for one in chosen if not one.missing()] if verifier is not None else []):
        assert verifier is not None
        tell("verify", 0.0)
        run = seeded(session)
        error = max(error or 0.0, verifier.check(run, f"the bundle for {session.target}"))
        if lowered.plan.reads:
            run(verifier.names, verifier.cases[0][0])
            sizes |= session.data_sizes
    if lowered.plan.reads:
        bundle.metadata["sizes"] = " ".join(f"{name}={size}" for name, size in sizes.items())
    tell("done", 1.0)
    report = replace(
        account(original, graph, log, lowered, sizes),
        target=metadata["target"],
        max_rel_error=error,
        notes=[
            *remarks,
            *(verifier.notes() if verifier is not None and error is not None else ()),
            *log.notes,
            *known.notes,
        ],
        seconds=time.perf_counter() - start,
    )
    return Optimized(bundle, graph, report)


def _sessions(bundle: plans.Bundle, targets: Sequence[str]) -> Iterator[Session]:
    """A session of one thread for each of ``targets``, of a file, which the runtime maps."""
    if not targets:
        return
    with TemporaryDirectory() as folder:
        path = Path(folder, "model.coda")
        writer.write(bundle, path, durable=False)
        for target in targets:
            with Session(path, threads=1, target=target) as session:
                yield session


def _tell_share(tell: Progress, number: int, count: int, share: float) -> None:
    tell("build kernels", (number + share) / count)


def _remarks(loaded: onnx.ModelProto, graph: gs.Graph) -> list[str]:
    """What is done differently from what the model says."""
    notes = ["float64 model: it is computed in float32"] if is_double(loaded) else []
    for value, tensor in zip(loaded.graph.output, graph.outputs, strict=True):
        declared, rank = value.type.tensor_type, len(shape(tensor))
        if declared.HasField("shape") and len(declared.shape.dim) != rank:
            notes.append(
                f"output '{value.name}' is declared with {len(declared.shape.dim)} dimensions and has {rank}, which it is given"
            )
    return notes


def _rewrite(graph: gs.Graph, verifier: Verifier | None, each: bool, tell: Progress, absorbs: Absorbs) -> PassLog:
    def after(done: Pass) -> None:
        tell(f"pass {done.name}", (PIPELINE.index(done) + 1) / len(PIPELINE))
        if verifier is not None and each and not verifier.random:
            candidate = ort_session(export.to_model(graph), lean=True)
            verifier.check(lambda names, feeds: run_session(candidate, names, feeds), f"pass {done.name}")

    measure = None if verifier is None else measure_on([feeds for feeds, _ in verifier.cases])
    return run_pipeline(graph, after, measure, absorbs)


def _digest(model: Model) -> str:
    """SHA-256 of the model: of its file and, one after another, the files that hold its weights; of a ModelProto, of its ``_parts``."""
    if isinstance(model, bytes):
        return hashlib.sha256(model).hexdigest()
    digest = hashlib.sha256()
    if isinstance(model, onnx.ModelProto):
        for part in _parts(model):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.hexdigest()
    tensors = onnx.load(model, load_external_data=False).graph.initializer
    places = (e.value for t in tensors for e in t.external_data if e.key == "location")
    for path in (Path(model), *(Path(model).parent / place for place in dict.fromkeys(places))):
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def _parts(model: onnx.ModelProto) -> Iterator[bytes]:
    """``model`` in pieces that hold a weight each at most: protobuf serialises no more than 2 GB at once."""
    graph = model.graph
    yield onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import).SerializeToString()
    for message in (*model.functions, *graph.node, *graph.input, *graph.output):
        yield message.SerializeToString()
    for tensor in graph.initializer:
        yield onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims).SerializeToString()
        yield tensor.raw_data or tensor.SerializeToString()
