"""What a pass is: a function that edits a graph in place, and a log in which it says what it did and what it refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import onnx_graphsurgeon as gs

from coda_edge.ir import Array, Tensor

Measure: TypeAlias = Callable[[gs.Graph, Sequence[Tensor]], Sequence[Sequence[Array]]]
"""The values of tensors of the graph, in order, for each of some made-up inputs."""


Absorbs: TypeAlias = Callable[[int, int, bool], bool]
"""Whether a norm over K columns that products with N columns together read is done by them: ``(K, N, whether it takes off a mean)``."""


@dataclass(frozen=True)
class Refusal:
    """Why a rewrite did not happen at a node."""

    rule: str
    node: str
    op: str
    reason: str


@dataclass
class PassLog:
    """What the passes did: rewrites by pass, refusals with their reasons, and what else a user must know.

    ``measure``, where there are inputs to measure on, is for passes whose accuracy depends on the numbers. ``absorbs`` is asked
    which norms to absorb, where that was measured; otherwise all are.
    """

    rewrites: dict[str, int] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    measure: Measure | None = None
    absorbs: Absorbs | None = None

    def refuse(self, rule: str, node: gs.Node, reason: str) -> None:
        """Records that ``rule`` does not apply at ``node``, in one line that a user can act on."""
        self.refusals.append(Refusal(rule, node.name, node.op, reason))

    def reasons(self, node_name: str) -> list[str]:
        """The reasons recorded for a node."""
        return [r.reason for r in self.refusals if r.node == node_name]


def sources(nodes: Iterable[gs.Node]) -> list[str]:
    """Where a fused node comes from: ``"op name"`` of each node, or what a fused node among them came from itself."""
    found: list[str] = []
    for node in nodes:
        found += node.attrs.get("source", [f"{node.op} {node.name}"])
    return found


@dataclass(frozen=True)
class Pass:
    """A named rewrite. ``run(graph, log)`` edits ``graph`` in place and returns the number of rewrites."""

    name: str
    run: Callable[[gs.Graph, PassLog], int]
