"""What ``coda-edge inspect --why`` shows: the operators that optimizing a model leaves outside GEMMs and attention, and the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from .errors import InvalidModel
from .report import Unfused


@dataclass(frozen=True)
class WhyView:
    """What is left of a model; ``gemm`` and ``attention`` count the kernels that took the rest. ``notes`` are the passes' own."""

    file: str
    gemm: int
    attention: int
    unfused: Sequence[Unfused]
    notes: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values, and ``kind: "why"``."""
        return {"kind": "why", **asdict(self)}

    def render(self, console: Console) -> None:
        """One line for each kernel that is left."""
        left = f"{len(self.unfused)} left on their own" if self.unfused else "nothing left on its own"
        console.print(
            Text(f"{self.file}: {self.gemm} GEMM, {self.attention} attention, {left}", style="bold"), soft_wrap=True
        )
        for u in self.unfused:
            console.print(Text.assemble((u.op, "bold"), f" {u.node}: {u.reason}"), soft_wrap=True)
        for note in self.notes:
            console.print(Text(f"note: {note}", style="dim"), soft_wrap=True)


def inspect_why(path: Path) -> WhyView:
    """Rewrites the model at ``path``, without building it. Norms are judged by the numbers of made-up inputs, as ``optimize`` does.

    Raises InvalidModel if it is not an ONNX model, and what ``optimize`` raises for one that cannot be rewritten or run.
    """
    from . import frontend
    from .calibrate import measure_on
    from .inputs import bound_specs
    from .ir import DOMAIN
    from .passes import run_pipeline
    from .verify import Verifier
    from .why import unfused

    if path.suffix != ".onnx":
        raise InvalidModel(
            f"{path} is not an ONNX model (.onnx): the report of why is made from the model, not from its bundle"
        )
    loaded = frontend.load(path)
    normal = frontend.to_normal_form(loaded)
    graph = normal.graph
    verifier = Verifier.of_model(loaded, bound_specs(loaded, graph), str(path), normal.allows)
    log = run_pipeline(graph, measure=measure_on([feeds for feeds, _ in verifier.cases]))
    ops = [n.op for n in graph.nodes if n.domain == DOMAIN]
    return WhyView(str(path), ops.count("Gemm"), ops.count("Attention"), unfused(graph, log), log.notes)
