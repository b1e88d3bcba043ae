"""The schedules that a problem's best one is searched among, the heuristic's first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_graphsurgeon as gs

from ..epilogue.program import EpilogueProgram
from ..epilogue.tir import depth as halvings
from ..schedule import AnySchedule, Problem, attention_space, gemm_space
from ..targets.target import Target


def _gemm(problem: Problem, node: gs.Node, target: Target) -> Sequence[AnySchedule]:
    n, k = problem.shape
    return gemm_space(target, n, k, 1 << halvings(EpilogueProgram.parse(node.attrs["epilogue"])))


def _attention(problem: Problem, node: gs.Node, target: Target) -> Sequence[AnySchedule]:
    depth, columns = problem.shape
    return attention_space(target, depth, columns)


_SPACES: dict[str, Callable[[Problem, gs.Node, Target], Sequence[AnySchedule]]] = {
    "gemm": _gemm,
    "attention": _attention,
}


def space(problem: Problem, node: gs.Node, target: Target) -> Sequence[AnySchedule]:
    """The schedules of ``problem``, which is that of ``node``."""
    return _SPACES[problem.kind](problem, node, target)
