"""What becomes of a whole folder of models: attention fused, norms absorbed, kernels a layer, what is left and why.

Each model is brought to normal form and rewritten, and then, unless told otherwise, built and compared with onnxruntime.
Models are independent of each other: one process each, and one that fails is a row like any other.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import onnx
import onnx_graphsurgeon as gs
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from . import export, frontend, ir
from .errors import CodaError, InvalidModel
from .inputs import bound_specs
from .passes import run_pipeline
from .report import Unfused
from .verify import Verifier, ort_session, run_session
from .why import unfused

#: ``build``: kernels are built and run. ``onnx``: the rewritten graph is run in onnxruntime. ``none``: nothing is run.
Depth = Literal["build", "onnx", "none"]


@dataclass(frozen=True)
class Share:
    """How many of ``total`` were dealt with."""

    done: int
    total: int

    def __str__(self) -> str:
        return f"{self.done}/{self.total}"


@dataclass(frozen=True)
class Surveyed:
    """One model.

    ``attention``: softmaxes between two products of run-time tensors, fused with both. ``norms``: distinct row statistics that
    rows are divided by (LayerNorm, RMSNorm, L2 in any spelling), applied inside GEMMs. ``kernels``: those that do work; views
    and what sizes alone determine need none. ``per_layer``: kernels from one attention to the next, on average, None if
    there are fewer than two. ``error``: worst |difference| from onnxruntime over the largest |output|, of the made-up inputs of
    ``verify.CASES``; None if nothing was run. ``failure``: why the model did not get through, in one line.
    """

    file: str
    opset: int | None = None
    exporter: str = ""
    nodes: int = 0
    attention: Share = Share(0, 0)
    norms: Share = Share(0, 0)
    gemm: int = 0
    kernels: int = 0
    per_layer: float | None = None
    unfused: Sequence[Unfused] = ()
    error: float | None = None
    failure: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values under the field names; a share is ``[done, total]``."""
        return {
            "file": self.file,
            "opset": self.opset,
            "exporter": self.exporter,
            "nodes": self.nodes,
            "attention": [self.attention.done, self.attention.total],
            "norms": [self.norms.done, self.norms.total],
            "gemm": self.gemm,
            "kernels": self.kernels,
            "per_layer": self.per_layer,
            "unfused": [{"op": u.op, "node": u.node, "reason": u.reason} for u in self.unfused],
            "error": self.error,
            "failure": self.failure,
        }


@dataclass(frozen=True)
class Survey:
    """All models, in order of their names."""

    models: Sequence[Surveyed] = field(default=())

    @property
    def failed(self) -> list[Surveyed]:
        """Those that did not get through."""
        return [m for m in self.models if m.failure is not None]

    def to_json(self) -> dict[str, Any]:
        """``models``, and how many ``failed``."""
        return {"models": [m.to_json() for m in self.models], "failed": len(self.failed)}

    def render(self, console: Console) -> None:
        """The survey as tables."""
        console.print(Group(*self._parts()))

    def _parts(self) -> list[RenderableType]:
        parts: list[RenderableType] = [_model_table(self.models)]
        left = reasons(self.models)
        if left:
            parts += [Text(), _reason_table(left)]
        if self.failed:
            parts += [Text(), Text(f"{len(self.failed)} of {len(self.models)} failed", style="bold red")]
            parts += [Text(f"{m.file}: {m.failure}") for m in self.failed]
        return parts


def find_models(paths: Sequence[Path]) -> list[Path]:
    """The ``.onnx`` files among ``paths`` and in the folders among them, however deep. Raises InvalidModel if there is none."""
    found: dict[Path, None] = {}
    for path in paths:
        files = sorted(p for p in path.rglob("*.onnx") if p.is_file()) if path.is_dir() else [path]
        found.update(dict.fromkeys(files))
    if not found:
        raise InvalidModel(
            f"there is no .onnx file in {', '.join(map(str, paths))}: name models or folders that hold some"
        )
    return list(found)


def survey(
    files: Sequence[Path], depth: Depth = "build", jobs: int | None = None, done: Callable[[int], None] | None = None
) -> Survey:
    """Surveys ``files``, ``jobs`` at a time (by default one a core); ``done`` hears how many are through."""
    found: dict[Path, Surveyed] = {}
    for file, result in _each(files, depth, jobs or os.cpu_count() or 1):
        found[file] = result
        if done is not None:
            done(len(found))
    root = os.path.commonpath([f.parent for f in files])
    return Survey([replace(found[f], file=os.path.relpath(f, root)) for f in files])


def _each(files: Sequence[Path], depth: Depth, jobs: int) -> Iterator[tuple[Path, Surveyed]]:
    if jobs == 1 or len(files) == 1:
        yield from ((file, survey_model(file, depth)) for file in files)
        return
    # A fork of a process that has loaded onnxruntime may hang in its threads.
    with ProcessPoolExecutor(min(jobs, len(files)), multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(survey_model, file, depth): file for file in files}
        for future in as_completed(waiting):
            file = waiting[future]
            crash = future.exception()
            failure = None if crash is None else Surveyed(str(file), failure=_line(crash))
            yield file, failure or future.result()


def survey_model(file: Path, depth: Depth = "build") -> Surveyed:
    """One model; it never raises: what goes wrong is the result's ``failure``, beside what was found before."""
    result = Surveyed(str(file))
    try:
        for stage in _stages(file, depth):
            result = stage
    except Exception as error:  # a survey's purpose is to find what fails, however it does
        return replace(result, failure=_line(error))
    return result


def _stages(file: Path, depth: Depth) -> Iterator[Surveyed]:
    """What is known after each stage."""
    try:
        proto = onnx.load(file, load_external_data=False)
    except DecodeError as corrupt:
        raise InvalidModel(f"{file} is not an ONNX model: {corrupt}") from corrupt
    opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), None)
    exporter = f"{proto.producer_name} {proto.producer_version}".strip()
    result = Surveyed(str(file), opset=opset, exporter=exporter, nodes=len(proto.graph.node))
    yield result
    loaded = frontend.load(file)
    normal = frontend.to_normal_form(loaded)
    graph = normal.graph
    softmaxes, roots = set(attention_softmaxes(graph)), set(norm_roots(graph))
    log = run_pipeline(graph)
    frontend.infer(graph)
    kernels = _kernels(graph)
    bare = {n.name for k in kernels for n in ([k, *k.attrs["body"].nodes] if k.op == "Map" else [k])}
    places = [i for i, n in enumerate(kernels) if n.domain == ir.DOMAIN and n.op == "Attention"]
    result = replace(
        result,
        attention=Share(len(softmaxes - bare), len(softmaxes)),
        norms=Share(len(roots - bare), len(roots)),
        gemm=sum(n.domain == ir.DOMAIN and n.op == "Gemm" for n in kernels),
        kernels=len(kernels),
        per_layer=(places[-1] - places[0]) / (len(places) - 1) if len(places) > 1 else None,
        unfused=unfused(graph, log),
    )
    yield result
    if depth == "build":
        from .driver import optimize

        report = optimize(file).report
        yield replace(result, kernels=report.kernels, error=report.max_rel_error)
    elif depth == "onnx":
        candidate = ort_session(export.to_model(graph))
        by_data = frontend.decided_by_data(graph)
        verifier = Verifier.of_model(loaded, bound_specs(loaded, graph), str(file), normal.allows, by_data)
        if not verifier.random:  # else two runs of the rewritten ONNX would differ
            error = verifier.check(lambda names, feeds: run_session(candidate, names, feeds), "the rewritten ONNX")
            yield replace(result, error=error)


def attention_softmaxes(graph: gs.Graph) -> list[str]:
    """The nodes' names of each Softmax over the last axis whose result is multiplied with another run-time tensor."""
    return [
        n.name
        for n in graph.nodes
        if n.op == "Softmax" and not n.domain and any(_is_product(u) for u in _reached(n, ir.VIEWS | {"Where", "Cast"}))
    ]


def _is_product(node: gs.Node) -> bool:
    return node.op == "MatMul" and not any(isinstance(t, gs.Constant) for t in node.inputs)


def norm_roots(graph: gs.Graph) -> list[str]:
    """The nodes' names of each Sqrt of a row's mean or sum of squares."""
    return [
        n.name
        for n in graph.nodes
        if n.op == "Sqrt" and any(ir.reduces_rows(s, r) for s in _sources(n) for r in ("ReduceMean", "ReduceSum"))
    ]


def _reached(node: gs.Node, through: frozenset[str]) -> list[gs.Node]:
    """The nodes that read the result of ``node``, directly or behind operators ``through``."""
    return _walk(node, lambda n: [u for o in n.outputs for u in ir.consumers(o)], through)


def _sources(node: gs.Node) -> list[gs.Node]:
    """The nodes that ``node`` reads, directly or behind a constant added, a bound or a scale."""
    return _walk(
        node,
        lambda n: [s for t in n.inputs if (s := ir.producer(t)) is not None],
        frozenset({"Add", "Max", "Mul", "Div", "Cast"}),
    )


def _walk(node: gs.Node, next_to: Callable[[gs.Node], list[gs.Node]], through: frozenset[str]) -> list[gs.Node]:
    found: dict[int, gs.Node] = {}
    stack = [node]
    while stack:
        for neighbour in next_to(stack.pop()):
            if id(neighbour) not in found:
                found[id(neighbour)] = neighbour
                stack += [neighbour] if neighbour.op in through else []
    return list(found.values())


def _kernels(graph: gs.Graph) -> list[gs.Node]:
    """The nodes that need a kernel, in order."""
    values = frontend.infer(graph).values
    return [
        n
        for n in ir.in_order(graph)
        if (n.domain or n.op not in ir.VIEWS) and not all(o.name in values for o in n.outputs)
    ]


def _line(error: BaseException) -> str:
    message = " ".join(str(error).split())
    kind = type(error).__name__
    return f"{kind}: {message}" if isinstance(error, CodaError) else f"{kind} (unexpected): {message}"


def _model_table(models: Sequence[Surveyed]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0))
    table.add_column("model", overflow="fold", min_width=12)
    table.add_column("exporter", overflow="fold", min_width=8)
    for heading in ("opset", "attention", "norms", "GEMM", "kernels", "a layer", "left", "worst error"):
        table.add_column(heading, justify="right", no_wrap=" " not in heading)
    for m in models:
        style = "red" if m.failure is not None else None
        table.add_row(*map(Text, _cells(m)), style=style)
    return table


def _cells(m: Surveyed) -> list[str]:
    error = "failed" if m.failure is not None else "–" if m.error is None else f"{m.error:.1e}"
    per_layer = "–" if m.per_layer is None else f"{m.per_layer:.2f}".rstrip("0").rstrip(".")
    return [
        m.file,
        m.exporter,
        "–" if m.opset is None else str(m.opset),
        str(m.attention),
        str(m.norms),
        str(m.gemm),
        str(m.kernels),
        per_layer,
        str(len(m.unfused)),
        error,
    ]


def reasons(models: Sequence[Surveyed]) -> dict[tuple[str, str], int]:
    """How often operators stayed on their own for each reason, by operators and reason; names and sizes do not tell reasons apart."""
    counts: dict[tuple[str, str], int] = {}
    for m in models:
        for u in m.unfused:
            key = (u.op, re.sub(r"'[^']*'|\[[^]]*\]", "…", u.reason))
            counts[key] = counts.get(key, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _reason_table(left: dict[tuple[str, str], int]) -> Table:
    table = Table(
        title="left on their own",
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.add_column("count", justify="right")
    table.add_column("operators", overflow="fold")
    table.add_column("because", overflow="fold")
    for (op, reason), count in left.items():
        table.add_row(str(count), Text(op), Text(reason))
    return table
