"""What ``optimize`` did to a model: counts, traffic, memory, error and speed, as JSON for scripts and a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Fused:
    """``count`` kernels called ``kernel``, and the ONNX operators (with repeats) that each of them stands for."""

    kernel: str
    count: int
    sources: Sequence[str]


@dataclass(frozen=True)
class Unfused:
    """A memory-bound operator that stayed outside a GEMM or attention kernel, and why."""

    op: str
    node: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The outcome of one ``optimize``.

    ``nodes_before`` counts the model's ONNX nodes, ``kernels`` the plan's steps, ``gemm`` and ``attention`` those of each
    kind. ``bytes_before`` and ``bytes_after``: bytes read and written by one run at ``sizes`` if every ONNX node, or
    every kernel, reads its inputs and writes its outputs once. ``arena_bytes``: peak of intermediate tensors at ``sizes``.
    ``max_rel_error``: worst |difference| against onnxruntime over the largest |output|, None if not verified.
    ``seconds``: what optimizing took. ``ort_ms``, ``ours_ms``: time of a run at ``sizes`` on this machine, and
    ``ratio`` the median of paired ort/ours, where measured.
    """

    nodes_before: int
    kernels: int
    gemm: int
    attention: int
    target: str
    seconds: float
    bytes_before: int = 0
    bytes_after: int = 0
    weights_bytes: int = 0
    arena_bytes: int = 0
    max_rel_error: float | None = None
    fused: Sequence[Fused] = ()
    unfused: Sequence[Unfused] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    ort_ms: float | None = None
    ours_ms: float | None = None
    ratio: float | None = None
    threads: int | None = None
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values under the field names; an entry of ``fused`` has ``kernel``, ``count`` and ``from``."""
        return {
            "target": self.target,
            "nodes_before": self.nodes_before,
            "kernels": self.kernels,
            "gemm": self.gemm,
            "attention": self.attention,
            "fused": [{"kernel": f.kernel, "count": f.count, "from": list(f.sources)} for f in self.fused],
            "unfused": [{"op": u.op, "node": u.node, "reason": u.reason} for u in self.unfused],
            "sizes": dict(self.sizes),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "weights_bytes": self.weights_bytes,
            "arena_bytes": self.arena_bytes,
            "max_rel_error": self.max_rel_error,
            "ort_ms": self.ort_ms,
            "ours_ms": self.ours_ms,
            "ratio": self.ratio,
            "threads": self.threads,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }

    def render(self, console: Console, title: str = "") -> None:
        """The report as tables on ``console``."""
        console.print(Group(*self._parts(title)))

    def _parts(self, title: str) -> list[RenderableType]:
        summary = Table(title=title or None, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        summary.add_column(style="bold")
        summary.add_column()
        for label, value in self._summary():
            summary.add_row(label, value)
        parts: list[RenderableType] = [summary]
        if self.fused:
            parts += [Text(), _fused_table(self.fused)]
        if self.unfused:
            parts += [Text(), _unfused_table(self.unfused)]
        return parts + [Text(f"note: {note}", style="dim") for note in self.notes]

    def _summary(self) -> list[tuple[str, str]]:
        other = self.kernels - self.gemm - self.attention
        left = len(self.unfused)
        at = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        where = f"  (at {at})" if at else ""
        error = (
            "not verified" if self.max_rel_error is None else f"{self.max_rel_error:.1e} of the output's largest value"
        )
        rows = [
            ("target", self.target),
            (
                "graph",
                f"{self.nodes_before} ONNX nodes → {self.kernels} kernels: "
                f"{self.gemm} GEMM, {self.attention} attention, {other} other",
            ),
            ("left on their own", f"{left} memory-bound operator{'s' if left > 1 else ''}" if left else "nothing"),
            ("bytes moved", f"{megabytes(self.bytes_before)} → {megabytes(self.bytes_after)}{where}"),
            ("weights", megabytes(self.weights_bytes)),
            ("peak arena", f"{megabytes(self.arena_bytes)}{where}"),
            ("worst error", f"{error}{'' if self.max_rel_error is None else ', against onnxruntime'}"),
        ]
        if self.ours_ms is not None and self.ort_ms is not None and self.ratio is not None:
            threads = f", {self.threads} thread{'s' if self.threads != 1 else ''}" if self.threads else ""
            speed = f"{self.ours_ms:.2f} ms, onnxruntime {self.ort_ms:.2f} ms: {self.ratio:.2f} ×{threads}{where}"
            rows.append(("time here", speed))
        return [*rows, ("took", f"{self.seconds:.1f} s")]


def megabytes(count: int) -> str:
    """``count`` bytes in MB (10^6) with one digit, or in kB below a tenth of one."""
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


def census(ops: Sequence[str]) -> str:
    """Operator names in order of first appearance, with how often each occurs: ``MatMul Add ×2 Softmax``."""
    return " ".join(f"{op} ×{n}" if (n := ops.count(op)) > 1 else op for op in dict.fromkeys(ops))


def _fused_table(fused: Sequence[Fused]) -> Table:
    table = Table(title="fused kernels", title_justify="left", title_style="bold", header_style="dim", box=None)
    table.add_column("kernel", overflow="fold")
    table.add_column("count", justify="right")
    table.add_column("each from", overflow="fold")
    for row in fused:
        table.add_row(Text(row.kernel), str(row.count), Text(census(row.sources)))
    return table


def _unfused_table(unfused: Sequence[Unfused]) -> Table:
    table = Table(title="left on their own", title_justify="left", title_style="bold", header_style="dim", box=None)
    for heading in ("operator", "node", "because"):
        table.add_column(heading, overflow="fold")
    for row in unfused:
        table.add_row(Text(row.op), Text(row.node), Text(row.reason))
    return table
