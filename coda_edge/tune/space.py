"""The schedules that a problem's best one is searched among, the heuristic's first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from ..epilogue.program import EpilogueProgram
from ..epilogue.tir import depth
from ..schedule import AnySchedule, Problem, choose_attention, gemm_space
from ..targets.target import Target


def _gemm(problem: Problem, node: gs.Node, target: Target) -> Sequence[AnySchedule]:
    n, k = problem.shape
    return gemm_space(target, n, k, 1 << depth(EpilogueProgram.parse(node.attrs["epilogue"])))


def _attention(problem: Problem, node: gs.Node, target: Target) -> Sequence[AnySchedule]:
    chosen = choose_attention(target)
    step = math.lcm(chosen.value_rows, chosen.lanes)
    queries = sorted({step * -(-size // step) for size in _QUERIES})
    found = [chosen, *(replace(chosen, keys=keys) for keys in _KEYS), *(replace(chosen, queries=q) for q in queries)]
    return tuple(dict.fromkeys(found))


_KEYS = (32, 48, 64, 96, 128, 192)
_QUERIES = (16, 32, 48, 64, 96)


_SPACES: dict[str, Callable[[Problem, gs.Node, Target], Sequence[AnySchedule]]] = {
    "gemm": _gemm,
    "attention": _attention,
}


def space(problem: Problem, node: gs.Node, target: Target) -> Sequence[AnySchedule]:
    """The schedules of ``problem``, which is that of ``node``."""
    return _SPACES[problem.kind](problem, node, target)
