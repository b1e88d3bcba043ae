"""Grouped convolutions against numpy in float64: widths of groups, windows, epilogues, sizes, symbolic ones too."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from kernel_harness import VECTOR_TARGETS, Library, run

from coda_edge import targets
from coda_edge.epilogue import library
from coda_edge.epilogue.program import EpilogueProgram, Kind
from coda_edge.errors import ShapeError
from coda_edge.lower.gemm import Windows
from coda_edge.lower.grouped import lower_grouped
from coda_edge.lower.kernel import KernelCall
from coda_edge.symbolic import symbol
from coda_edge.window import Window

PLAIN = EpilogueProgram.parse("(acc: tile f32) -> (y: tile = v0) {\n  v0 = mul acc 1.0\n}")


def window(
    kernel: tuple[int, ...],
    strides: int = 1,
    dilations: int = 1,
    before: int = 0,
    after: int = 0,
) -> Window:
    one = (1,) * len(kernel)
    return Window(
        kernel,
        *(tuple(n * v for n in one) for v in (strides, dilations, before, after)),
    )


def expected(x: np.ndarray, w: np.ndarray, view: Window, group: int) -> np.ndarray:
    """``[batch, *out, N]`` in float64."""
    count, (batch, *sizes, channels) = len(view.kernel), x.shape
    pads = [(0, 0), *zip(view.before, view.after, strict=True), (0, 0)]
    padded = np.pad(x.astype(np.float64), pads)
    out = view.out(sizes)
    per, n = channels // group, w.shape[1]
    y = np.zeros((batch, *out, n))
    for number, tap in enumerate(itertools.product(*map(range, view.kernel))):
        places = tuple(
            slice(t * d, t * d + (o - 1) * s + 1, s)
            for t, d, o, s in zip(tap, view.dilations, out, view.strides, strict=True)
        )
        seen = padded[(slice(None), *places)]
        for g in range(group):
            columns = slice(g * n // group, (g + 1) * n // group)
            weights = w[number * per : (number + 1) * per, columns].astype(np.float64)
            y[..., columns] += seen[..., g * per : (g + 1) * per] @ weights
    assert y.ndim == count + 2
    return y


@cache
def built(
    target: targets.Target, program: EpilogueProgram, view: Window, group: int, channels: int, n: int
) -> tuple[KernelCall, Library]:
    sizes = tuple(symbol(f"s{i}") for i in range(len(view.kernel)))
    names = [p.name for p in program.params[1:]], [o.name for o in program.outputs]
    windows = Windows(view, symbol("B"), sizes)
    call = lower_grouped(target, "conv", program, "input", weights(view, group, channels, n), *names, windows, group)
    return call, Library(target.build([call.kernel, *([call.finish] if call.finish else [])]))


def weights(view: Window, group: int, channels: int, n: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal((view.taps * channels // group, n)).astype(np.float32)


def check(
    target: targets.Target,
    view: Window,
    shape: tuple[int, ...],
    n: int,
    group: int,
    program: EpilogueProgram = PLAIN,
) -> None:
    rng = np.random.default_rng(sum(shape))
    x = rng.standard_normal(shape).astype(np.float32)
    acc = expected(x, weights(view, group, shape[-1], n), view, group)
    rows = int(np.prod(acc.shape[:-1]))
    operands = {}
    for param in program.params[1:]:
        width = program.operand_width(param, n) if param.kind in (Kind.TILE, Kind.COL) else 1
        dims = {Kind.TILE: (rows, width), Kind.ROW: (rows, 1), Kind.COL: (width,), Kind.SCALAR: ()}[param.kind]
        operands[param.name] = np.abs(rng.standard_normal(dims)).astype(np.float32) + 0.1
    positions = int(np.prod(acc.shape[1:-1]))
    reference = program.reference(acc.reshape(rows, n), operands, positions)
    outputs = {name: np.zeros(value.shape, np.float32) for name, value in reference.items()}
    call, lib = built(target, program, view, group, shape[-1], n)
    sizes = {"B": shape[0], **{f"s{i}": size for i, size in enumerate(shape[1:-1])}}
    got = run(target, call, {"input": x, **operands, **outputs}, sizes, chunk=2, library=lib)
    for name, value in got.items():
        scale = max(1.0, float(np.abs(reference[name]).max(initial=0)))
        assert np.abs(value - reference[name]).max(initial=0) <= 3e-6 * scale, (name, shape, n, group)


each_target = pytest.mark.parametrize("target", VECTOR_TARGETS, ids=lambda t: t.name)

WINDOWS = {
    "3x3": (window((3, 3), before=1, after=1), [(3, 7, 9), (1, 1, 1), (2, 2, 60)]),
    "5x5, strides": (window((5, 5), 2, before=2, after=2), [(1, 12, 71), (3, 4, 3)]),
    "dilations": (window((3, 2), 1, 3, 2, 4), [(2, 7, 40)]),
    "1-D": (window((7,), before=3, after=3), [(3, 110), (1, 1), (1, 130)]),
    "1-D, many taps": (window((31,), before=30), [(2, 49)]),
    "3-D": (window((2, 3, 3), 1, 1, 1, 1), [(1, 3, 4, 9)]),
    "nothing but padding at the ends": (window((3,), 1, 1, 5, 6), [(1, 2)]),
    "one place": (window((1, 4)), [(2, 3, 4)]),
}


@each_target
@pytest.mark.parametrize("name", WINDOWS)
def test_depthwise(target: targets.Target, name: str) -> None:
    view, shapes = WINDOWS[name]
    for shape in shapes:
        check(target, view, (*shape, 37), 37, 37)


GROUPS = {
    "two filters a channel": (12, 24, 12),
    "narrow groups": (32, 32, 8),
    "narrow groups of odd widths": (30, 18, 6),
    "as wide as vectors": (32, 64, 4),
    "wide groups": (40, 96, 2),
    "many channels, few columns": (256, 4, 2),
    "one group": (5, 7, 1),
}


@each_target
@pytest.mark.parametrize("name", GROUPS)
def test_groups(target: targets.Target, name: str) -> None:
    channels, n, group = GROUPS[name]
    for shape in ((2, 5, 11, channels), (1, 3, 1, channels)):
        check(target, window((3, 3), before=1, after=1), shape, n, group)


PROGRAMS = {
    "bias, residual, moments": library.bias_residual_moments.program,
    "row steps": EpilogueProgram.parse(
        "(acc: tile f32, var: row f32, g: col f32) -> (y: tile = v2) {\n"
        "  v0 = rsqrt var\n  v1 = mul acc v0\n  v2 = mul v1 g\n}"
    ),
    "pairs": EpilogueProgram.parse(
        "(acc: tile f32) -> (y: tile = v3) {\n  v0 = even acc\n  v1 = odd acc\n  v2 = sigmoid v1\n  v3 = mul v0 v2\n}"
    ),
}


@each_target
@pytest.mark.parametrize("name", PROGRAMS)
def test_epilogues(target: targets.Target, name: str) -> None:
    for channels, n, group in ((40, 40, 40), (12, 36, 4)):
        check(target, window((3,), before=1, after=1), (3, 57, channels), n, group, PROGRAMS[name])


def test_columns_that_do_not_fall_into_groups_are_refused() -> None:
    with pytest.raises(ShapeError, match="7 columns of 6 weights do not fall into 2 groups"):
        lower_grouped(
            targets.get(), "c", PLAIN, "x", np.zeros((6, 7), np.float32), [], ["y"], Windows(window((3,)), 1, (5,)), 2
        )
