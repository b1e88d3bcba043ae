"""GEMM schedules: every field with every other one gives the same values, for rows that do and do not fill tiles and blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_harness import VECTOR_TARGETS, Library, run

from coda_edge import targets
from coda_edge.epilogue import library
from coda_edge.epilogue.program import EpilogueProgram
from coda_edge.lower.gemm import lower_gemm
from coda_edge.schedule import GemmSchedule, choose_gemm, gemm_space
from coda_edge.symbolic import symbol
from coda_edge.weights import Weight

BASE = GemmSchedule(4, 2, 0, block=12)
"""Without lanes; blocks of three tiles."""
SCHEDULES = {
    "tails of one row": replace(BASE, tail=1),
    "tails of three rows": replace(BASE, rows=7, tail=3, block=20),
    "whole tiles at the end": replace(BASE, tail=4),
    "groups of panels": replace(BASE, panels=2),
    "rows outside": replace(BASE, panels=3, rows_outer=True, prefetch=False),
    "rows first": replace(BASE, rows_first=True),
    "rows first, packed": replace(BASE, rows_first=True, pack=True, panels=2),
    "packed": replace(BASE, rows=6, pack=True, unroll=4),
    "packed, odd tile": replace(BASE, rows=3, vectors=1, pack=True, tail=3),
    "parts of K": replace(BASE, k_block=32),
    "parts of K, groups of panels": replace(BASE, k_block=24, panels=2, unroll=3),
    "parts of K, packed, rows first": replace(BASE, k_block=16, pack=True, rows_first=True, panels=4, stride=4),
    "parts of K that do not fill a stride": replace(BASE, k_block=5, stride=8, unroll=2),
    "one tile a block": replace(BASE, rows=5, block=1, vectors=1, stride=32),
}
NORM = library.norm_bias.program
RESIDUAL = EpilogueProgram.parse(
    "(acc: tile f32, b: col f32, r: tile f16) -> (y: tile = v1, mean: row = v2.0, var: row = v2.1) {\n"
    "  v0 = add acc b\n  v1 = add v0 r\n  v2 = moments v1\n}"
)
N, K, ROWS = 83, 70, (5, 7, 11, 13, 37)
"""83 columns are panels of full vectors, a narrower one, and single lanes on every target."""


def check(target: targets.Target, program: EpilogueProgram, schedule: GemmSchedule, dtype: type = np.float32) -> None:
    """Compares ``program`` with numpy in float64 at each number of rows, weights stored as ``dtype``."""
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((K, N)).astype(dtype)
    names = [p.name for p in program.params[1:]], [o.name for o in program.outputs]
    call = lower_gemm(target, "gemm", program, "input", Weight(weight), *names, symbol("M"), schedule=schedule)
    lib = Library(target.build([call.kernel, *([call.finish] if call.finish else [])]))
    for m in ROWS:
        a = rng.standard_normal((m, K)).astype(np.float32)
        shapes = {"bias": (N,), "b": (N,), "mean": (m, 1), "var": (m, 1), "r": (m, N), "rstd": (m, 1)}
        operands = {
            p.name: (np.abs(rng.standard_normal(shapes[p.name])) + 0.1).astype(
                np.float16 if p.dtype == "f16" else np.float32
            )
            for p in program.params[1:]
        }
        expected = program.reference(a.astype(np.float64) @ weight.astype(np.float64), operands)
        outputs = {o.name: np.zeros(expected[o.name].shape, np.float32) for o in program.outputs}
        got = run(target, call, {"input": a, **operands, **outputs}, {"M": m}, chunk=3, library=lib)
        for name, value in got.items():
            scale = max(1.0, float(np.abs(expected[name]).max()))
            assert np.abs(value - expected[name]).max() <= 3e-6 * scale, (name, m)


@pytest.mark.parametrize("name", SCHEDULES)
def test_values(name: str) -> None:
    target = VECTOR_TARGETS[len(name) % len(VECTOR_TARGETS)]
    check(target, RESIDUAL if "rows" in name else NORM, replace(SCHEDULES[name], lanes=target.lanes(4)))


@pytest.mark.parametrize("name", [name for name in SCHEDULES if "parts of K" in name or "outside" in name])
def test_values_of_narrow_weights(name: str) -> None:
    """Panels are converted whole, or a part at a time."""
    target = VECTOR_TARGETS[0]
    check(target, NORM, replace(SCHEDULES[name], lanes=target.lanes(4)), np.float16)


def test_heights_of_tails() -> None:
    assert GemmSchedule(8, 3, 8, tail=2).tails == (2, 4, 6, 8)
    assert GemmSchedule(8, 3, 8, tail=1).tails == (1, 2, 3, 4, 5, 6, 7)
    assert GemmSchedule(5, 3, 8, tail=3).tails == (3, 5)
    assert GemmSchedule(4, 3, 8, tail=9).tails == (4,)
    assert GemmSchedule(1, 3, 8).tails == ()


def test_space_begins_with_the_untuned_choice() -> None:
    for target in targets.targets().values():
        if target.vector > 64 or target.registers > 32:
            continue
        for n, k in ((384, 384), (50257, 768), (768, 3072), (24, 16)):
            space = gemm_space(target, n, k)
            assert space[0] == choose_gemm(target, n, k)
            assert 5 <= len(space) <= 60 and len(set(space)) == len(space)
