"""GEMM over windows of a channels-last tensor against numpy in float64: ranks, strides, dilations, padding, batches, blocks."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kernel_harness import VECTOR_TARGETS, Library, run

from coda_edge import targets
from coda_edge.epilogue.program import EpilogueProgram
from coda_edge.lower.gemm import Windows, lower_gemm
from coda_edge.lower.kernel import KernelCall
from coda_edge.symbolic import product, symbol
from coda_edge.window import Window

Array = npt.NDArray[Any]


def window(kernel: tuple[int, ...], **given: tuple[int, ...]) -> Window:
    """A window with ones for strides and dilations and no padding, but for what is given."""
    ones, zeros = (1,) * len(kernel), (0,) * len(kernel)
    plain = {"strides": ones, "dilations": ones, "before": zeros, "after": zeros}
    return Window(kernel, **{**plain, **given})


def gathered(x: Array, w: Window) -> Array:
    """The rows ``[batch, *out, taps · channels]``, as the definition of a window says."""
    count = len(w.kernel)
    x = np.pad(x, [(0, 0), *zip(w.before, w.after, strict=True), (0, 0)])
    out = [(x.shape[1 + i] - w.reach[i]) // w.strides[i] + 1 for i in range(count)]
    taps = [
        x[
            (
                slice(None),
                *(
                    slice(t * d, t * d + (o - 1) * s + 1, s)
                    for t, d, s, o in zip(tap, w.dilations, w.strides, out, strict=True)
                ),
            )
        ]
        for tap in itertools.product(*map(range, w.kernel))
    ]
    return np.concatenate(taps, axis=-1)


# (the window, channels, columns of the weights, spatial sizes)
CASES: dict[str, tuple[Window, int, int, tuple[int, ...]]] = {
    "3×3": (window((3, 3), before=(1, 1), after=(1, 1)), 20, 40, (7, 9)),
    "3×3 of wide lines": (window((3, 3), before=(1, 1), after=(1, 1)), 3, 17, (3, 150)),
    "5×3, strides, uneven padding": (window((5, 3), strides=(2, 3), before=(2, 0), after=(1, 2)), 5, 16, (11, 13)),
    "dilated": (window((3, 3), dilations=(2, 3), before=(2, 3), after=(2, 3)), 18, 33, (8, 10)),
    "no padding": (window((2, 2)), 7, 24, (6, 6)),
    "padding alone under some windows": (window((2, 2), before=(4, 3), after=(3, 5)), 4, 8, (2, 3)),
    "strides larger than the window": (window((2, 2), strides=(3, 4), after=(1, 1)), 4, 8, (8, 9)),
    "1-D": (window((3,), before=(1,), after=(1,)), 16, 24, (300,)),
    "1-D, dilated, strides": (window((4,), dilations=(3,), strides=(2,), before=(5,), after=(4,)), 6, 9, (31,)),
    "1-D of length 1": (window((7,), before=(3,), after=(3,)), 6, 9, (1,)),
    "3-D": (window((3, 2, 3), strides=(2, 1, 1), before=(1, 0, 1), after=(1, 1, 0)), 3, 20, (5, 4, 6)),
    "4-D": (window((2, 1, 2, 2), dilations=(2, 1, 1, 1), before=(1, 0, 1, 0), after=(0, 0, 0, 1)), 2, 5, (4, 2, 3, 4)),
}


@cache
def built(target: targets.Target, name: str) -> tuple[KernelCall, Array, Library]:
    """The call with symbolic sizes, its weights and its library."""
    w, channels, n, sizes = CASES[name]
    weight = np.random.default_rng(n).standard_normal((w.taps * channels, n)).astype(np.float32)
    batch, dims = symbol("B"), tuple(symbol(f"S{i}") for i in range(len(sizes)))
    program = EpilogueProgram.parse(PROGRAM)
    names = [p.name for p in program.params[1:]], [o.name for o in program.outputs]
    rows = product([batch, *w.out(dims)])
    call = lower_gemm(target, "conv", program, "x", weight, *names, rows, windows=Windows(w, batch, dims))
    return call, weight, Library(target.build([call.kernel]))


PROGRAM = """
(acc: tile f32, bias: col f32, residual: tile f32) -> (y: tile = v2) {
  v0 = add acc bias
  v1 = max v0 0.0
  v2 = add v1 residual
}
"""


# The first two cases on every target, the others on targets in turn.
PAIRS = [
    (target, name)
    for i, name in enumerate(CASES)
    for j, target in enumerate(VECTOR_TARGETS)
    if i < 2 or (i - j) % len(VECTOR_TARGETS) == 0
]


@pytest.mark.parametrize(("target", "name"), PAIRS, ids=lambda value: str(getattr(value, "name", value)))
def test_windows(target: targets.Target, name: str) -> None:
    call, weight, lib = built(target, name)
    w, channels, n, sizes = CASES[name]
    rng = np.random.default_rng(1)
    for batch, chunk in ((1, None), (3, None), (3, 1), (2, 2)):
        x = rng.standard_normal((batch, *sizes, channels)).astype(np.float32)
        rows = gathered(x, w).reshape(-1, w.taps * channels)
        bias = rng.standard_normal(n).astype(np.float32)
        residual = rng.standard_normal((len(rows), n)).astype(np.float32)
        expected = np.maximum(rows.astype(np.float64) @ weight + bias, 0) + residual
        tensors = {"x": x, "bias": bias, "residual": residual, "y": np.zeros_like(residual)}
        values = {"B": batch, **{f"S{i}": s for i, s in enumerate(sizes)}}
        (y,) = run(target, call, tensors, values, chunk, lib).values()
        assert np.abs(y - expected).max() <= 3e-6 * max(1.0, np.abs(expected).max())
