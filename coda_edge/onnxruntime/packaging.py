"""The whole way to onnxruntime: an ONNX model in, the optimized graph and its operator library out, checked by running both ways."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import onnx

from .. import export, frontend
from ..driver import Model, Progress
from ..errors import InvalidModel, TargetError
from ..files import atomic
from ..inputs import bound_specs
from ..ir import DOMAIN
from ..passes import run_pipeline
from ..targets import Target, get
from ..verify import Runner, Verifier, ort_session
from .build import build
from .operators import Claims, claim

if TYPE_CHECKING:
    import onnxruntime


@dataclass(frozen=True)
class Packaged:
    """A model for onnxruntime. ``operators``: by node name, the custom operator that runs it.

    ``functions``: by node name, why a ``coda`` node runs as its function. ``max_rel_error``: with the library, against the source
    model; None if nothing was compared.
    """

    model: onnx.ModelProto
    library: bytes
    operators: dict[str, str]
    functions: dict[str, str]
    max_rel_error: float | None

    def save(self, model: str | os.PathLike[str], library: str | os.PathLike[str]) -> None:
        """Writes both files, each whole or not at all."""
        with atomic(Path(library)) as part:
            part.write_bytes(self.library)
            part.chmod(0o755)
        export.save(self.model, model)


def package(
    model: Model,
    target: str = "native",
    shapes: Mapping[str, tuple[int | str, ...]] | None = None,
    verify: bool = True,
    progress: Progress | None = None,
) -> Packaged:
    """Rewrites ``model`` and compiles its ``coda`` nodes into custom operators for ``target``; all other nodes stay as they are.

    ``shapes`` pins input dimensions. ``verify`` compares both ways of running with the source model, on made-up inputs.
    ``progress(stage, fraction)`` hears how far each stage is.

    Raises InvalidModel, ShapeError, TargetError, or VerificationError naming the way that fails.
    """
    tell = progress or (lambda stage, fraction: None)
    chosen = get(target)
    if chosen.tvm["kind"] != "llvm":
        raise TargetError(f"target '{chosen.name}' is no CPU: custom operators are built for CPUs only")
    tell("load", 0.0)
    loaded = frontend.load(model)
    tell("normalize", 0.0)
    normal = frontend.to_normal_form(loaded, dict(shapes) if shapes else None)
    run_pipeline(normal.graph, lambda done: tell(f"pass {done.name}", 0.5))
    tell("export", 0.0)
    exported = export.to_model(normal.graph, narrow=True)
    tell("lower", 0.0)
    claims = claim(normal.graph, chosen, normal.constraints)
    if not claims.operators:
        raise InvalidModel(
            "nothing in the model becomes a kernel, so there is no library to make: onnxruntime runs it as it is"
        )
    named = _rename(exported, claims)
    tell("build kernels", 0.0)
    library = build({name: claims.operators[node] for node, name in _firsts(named).items()}, claims.kernels, chosen)
    error = None
    if verify:
        tell("verify", 0.0)
        specs = bound_specs(loaded, normal.graph)
        by_data = frontend.decided_by_data(normal.graph)
        verifier = Verifier.of_model(loaded, specs, allowed=normal.allows, by_data=by_data)
        # onnxruntime draws other random numbers each time: there is nothing to compare with.
        error = None if verifier.random else _verify(verifier, exported, library, chosen)
    tell("done", 1.0)
    return Packaged(exported, library, named, claims.left, error)


def session(
    model: onnx.ModelProto | bytes | str, library: str | os.PathLike[str], threads: int = 0
) -> onnxruntime.InferenceSession:
    """onnxruntime on a packaged model with its operator ``library``, on the CPU with ``threads`` threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(os.fspath(library))
    source = model if isinstance(model, (bytes, str)) else model.SerializeToString()
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def _firsts(named: Mapping[str, str]) -> dict[str, str]:
    """Of all nodes with one operator, the first."""
    first: dict[str, str] = {}
    for node, name in named.items():
        first.setdefault(name, node)
    return {node: name for name, node in first.items()}


def _rename(model: onnx.ModelProto, claims: Claims) -> dict[str, str]:
    """Gives each claimed node, and its function, a name that says what its operator does too; returns the names by node.

    A function is equal for GEMMs of any width; an operator is not.
    """
    functions = {f.name: f for f in model.functions}
    named: dict[str, str] = {}
    made: dict[str, onnx.FunctionProto] = {}
    for node in model.graph.node:
        if node.domain != DOMAIN or node.name not in claims.operators:
            continue
        name = f"{node.op_type}_{claims.operators[node.name].key()}"
        if name not in made:
            made[name] = onnx.FunctionProto()
            made[name].CopyFrom(functions[node.op_type])
            made[name].name = name
        named[node.name] = node.op_type = name
    used = {n.op_type for owner in (model.graph, *model.functions) for n in owner.node if n.domain == DOMAIN}
    kept = [f for f in functions.values() if f.name in used]
    del model.functions[:]
    model.functions.extend([*kept, *made.values()])
    # onnxruntime 1.20 gives equal names to what it makes of inlined nodes without one, and then refuses them.
    for function in model.functions:
        for i, node in enumerate(function.node):
            node.name = f"{node.op_type}_{i}"
    return named


def _verify(verifier: Verifier, exported: onnx.ModelProto, library: bytes, target: Target) -> float | None:
    """The error with the library; None if this machine cannot run it. Raises VerificationError."""
    verifier.check(_runner(ort_session(exported)), "the model without its library")
    if target.missing():
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "operators.so")
        path.write_bytes(library)
        return verifier.check(_runner(session(exported, path)), "the model with its library")


def _runner(candidate: onnxruntime.InferenceSession) -> Runner:
    def run(names: Sequence[str], feeds: Mapping[str, npt.NDArray[Any]]) -> Sequence[npt.NDArray[Any]]:
        results: Sequence[npt.NDArray[Any]] = candidate.run(list(names), dict(feeds))
        return results

    return run
