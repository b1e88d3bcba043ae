"""The whole way to onnxruntime: an ONNX model in, the optimized graph and its operator library out, checked by running both ways."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from .. import export
from ..driver import Model, Progress
from ..errors import TargetError
from ..files import atomic
from ..ir import DOMAIN, Array
from ..targets import Target, get
from ..verify import Runner, Verifier, ort_session
from .build import build
from .constants import digest
from .operators import Call, Claims
from .parts import reads
from .rewritten import Settings, rewrite

if TYPE_CHECKING:
    import onnxruntime

Weights = Literal["model", "library"]

INLINE_LIMIT = 1 << 24
"""Bytes of initializers above which a packaged model has them in a file of its own: a copy of fewer does no harm."""


@dataclass(frozen=True)
class Packaged:
    """A model for onnxruntime. ``operators``: by node name, the custom operator that runs it.

    ``functions``: by node name, why a ``coda`` node runs as its function. ``max_rel_error``: with the library, against the source
    model; None if nothing was compared, for the reason ``unchecked`` if it was to be. ``left``: why parts of the model, or all of it, are as they were; None: all was rewritten.
    """

    model: onnx.ModelProto
    library: bytes
    operators: dict[str, str]
    functions: dict[str, str]
    max_rel_error: float | None
    unchecked: str | None = None
    left: str | None = None

    def save(self, model: str | os.PathLike[str], library: str | os.PathLike[str]) -> None:
        """Writes both files, each whole or not at all; the weights of a model that has many into ``<model>.data`` beside it.

        onnxruntime maps that file, and kernels read it in place.
        """
        with atomic(Path(library)) as part:
            part.write_bytes(self.library)
            part.chmod(0o755)
        export.save(self.model, model, inline_limit=INLINE_LIMIT)


def package(
    model: Model,
    target: str = "native",
    shapes: Mapping[str, tuple[int | str, ...]] | None = None,
    verify: bool = True,
    progress: Progress | None = None,
    weights: Weights = "model",
) -> Packaged:
    """Rewrites ``model`` and compiles its ``coda`` nodes into custom operators for ``target``; all other nodes stay as they are.

    A model that cannot be rewritten as a whole is in the parts that can be; one in which there is nothing to rewrite comes out as it is.

    ``shapes`` pins input dimensions. ``verify`` compares both ways of running with the source model, on made-up inputs.
    ``progress(stage, fraction)`` hears how far each stage is. ``weights``: where the operators' constants are, in the kernels' layout: in the
    ``"model"``, or in the ``"library"``, without which the model does not run then.

    Raises InvalidModel, ShapeError, TargetError, or VerificationError naming the way that fails.
    """
    tell = progress or (lambda stage, fraction: None)
    chosen = get(target)
    if chosen.tvm["kind"] != "llvm":
        raise TargetError(f"target '{chosen.name}' is no CPU: custom operators are built for CPUs only")
    # Products of bytes have no form in functions.
    chosen = get(chosen.base) if chosen.base else chosen
    done = rewrite(model, shapes, Settings(chosen, verify, weights == "library", tell))
    named = _rename(done.model, done.claims) if done.claims.calls else {}
    tell("build kernels", 0.0)
    operators = {name: done.claims.calls[node].operator for node, name in named.items()}
    library = build(operators, done.claims.kernels, chosen, _weights(done.claims))
    error = None
    # onnxruntime draws other random numbers each time: there is nothing to compare with.
    if done.verifier is not None and not done.verifier.random:
        tell("verify", 0.0)
        error = _verify(done.verifier, done.model, library, chosen, alone=weights == "model")
    tell("done", 1.0)
    return Packaged(done.model, library, named, done.claims.left, error, done.unchecked, done.left)


def session(
    model: onnx.ModelProto | bytes | str, library: str | os.PathLike[str], threads: int = 0
) -> onnxruntime.InferenceSession:
    """onnxruntime on a packaged model with its operator ``library``, on the CPU with ``threads`` threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(os.fspath(library))
    if isinstance(model, (bytes, str)):
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        export.save(model, path, inline_limit=INLINE_LIMIT)
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _rename(model: onnx.ModelProto, claims: Claims) -> dict[str, str]:
    """Gives each claimed node, and its function, a name that says what its operator does too, and its constants in their layout.

    Returns the names by node. A function is equal for GEMMs of any width; an operator is not. Of a node whose weights the library has, there is no function.
    """
    functions = {f.name: f for f in model.functions}
    named: dict[str, str] = {}
    made: dict[str, onnx.FunctionProto] = {}
    stored: dict[str, str] = {}
    for node in model.graph.node:
        if node.domain != DOMAIN or node.name not in claims.calls:
            continue
        call = claims.calls[node.name]
        name = f"{node.op_type}_{call.operator.key()}"
        if name not in made and not call.weights:
            made[name] = _function(functions[node.op_type], name, call)
        inputs = [*call.sized, *(node.input[i] for i in call.kept)]
        for position, layout in call.layouts.items():
            for part, data in layout.parts.items():
                key = digest(data)
                if key not in stored:
                    stored[key] = ".".join(filter(None, (node.input[position], part, key)))
                    model.graph.initializer.append(numpy_helper.from_array(data, stored[key]))
                inputs.append(stored[key])
        node.input[:] = inputs
        if call.weights:
            node.attribute.append(helper.make_attribute("weights", " ".join(digest(w) for w in call.weights)))
        named[node.name] = node.op_type = name
    used = {n.op_type for owner in (model.graph, *model.functions) for n in owner.node if n.domain == DOMAIN}
    kept = [f for f in functions.values() if f.name in used]
    del model.functions[:]
    model.functions.extend([*kept, *made.values()])
    # onnxruntime 1.20 gives equal names to what it makes of inlined nodes without one, and then refuses them.
    for function in model.functions:
        for i, node in enumerate(function.node):
            node.name = f"{node.op_type}_{i}"
    _prune(model.graph)
    return named


def _function(source: onnx.FunctionProto, name: str, call: Call) -> onnx.FunctionProto:
    """The function ``source`` over the inputs of ``call``'s operator."""
    made = onnx.FunctionProto()
    made.CopyFrom(source)
    made.name = name
    inputs = [*(f"sized{i}" for i in range(len(call.sized))), *(source.input[i] for i in call.kept)]
    before: list[onnx.NodeProto] = []
    for position, layout in call.layouts.items():
        plain = source.input[position]
        names = [f"{plain}_{part or 'stored'}" for part in layout.parts]
        inputs += names
        before += layout.undo(names, plain)
    made.input[:] = inputs
    nodes = [*before, *source.node]
    del made.node[:]
    made.node.extend(nodes)
    return made


def _prune(graph: onnx.GraphProto) -> None:
    """Removes the initializers that nobody reads any more, and the nodes that made something of them only."""
    needed = {o.name for o in graph.output}
    nodes = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed |= reads(node)
            nodes.append(node)
    kept = [t for t in graph.initializer if t.name in needed]
    rest = onnx.GraphProto()
    rest.node.extend(reversed(nodes))
    rest.initializer.extend(kept)
    del graph.node[:], graph.initializer[:]
    graph.node.extend(rest.node)
    graph.initializer.extend(rest.initializer)


def _weights(claims: Claims) -> dict[str, Array]:
    """What the library holds, by digest."""
    return {digest(w): w for call in claims.calls.values() for w in call.weights}


def _verify(verifier: Verifier, exported: onnx.ModelProto, library: bytes, target: Target, alone: bool) -> float | None:
    """The error with the library; None if this machine cannot run it. ``alone``: it runs without, too. Raises VerificationError."""
    if alone:
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
