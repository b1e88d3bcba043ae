"""Conversions of half-precision numbers in kernels: every one of 16 bits, and float32 between them, as numpy rounds."""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np
import pytest
from kernel_harness import Library
from tvm import tirx

from coda_edge import targets
from coda_edge.lower.body import Body, external, index, lanes, load
from coda_edge.lower.emit import HALF, Expr
from coda_edge.lower.half import converts_float16
from coda_edge.lower.kernel import KernelSource

NATIVE = [t for t in targets.targets().values() if t.tvm["kind"] == "llvm" and not t.missing()]
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_STORED = {"float16": "float16", "bfloat16": "uint16"}


def _widen(dtype: str, x: Expr) -> Expr:
    return (
        x.astype(f"float32x{lanes(x)}" if lanes(x) > 1 else "float32") if dtype == "float16" else HALF[dtype].widen(x)
    )


def _narrow(dtype: str, x: Expr) -> Expr:
    return (
        x.astype(f"float16x{lanes(x)}" if lanes(x) > 1 else "float16") if dtype == "float16" else HALF[dtype].narrow(x)
    )


def _kernel(name: str, target: targets.Target, dtype: str, source: str, wanted: str) -> KernelSource:
    """Converts ``n`` numbers, by vectors and the last ones by themselves."""
    count = target.lanes(4)
    x, y, n = external("x", source), external("y", wanted), tirx.Var("n", "int64")
    body = Body()
    convert = _widen if name.startswith("widen") else _narrow
    whole = body.let(tirx.floordiv(n, index(count)), "whole")
    with body.loop(0, whole) as i:
        body.store(y, i * count, convert(dtype, load(x, i * count, count)))
    with body.loop(whole * count, n) as i:
        body.store(y, i, convert(dtype, load(x, i)))
    return KernelSource(name, lambda: body.function(name, [x, y, n]))


@cache
def built(target: targets.Target) -> Library:
    """``widen_D`` and ``narrow_D`` for both dtypes."""
    kernels = []
    for dtype, stored in _STORED.items():
        kernels.append(_kernel(f"widen_{dtype}", target, dtype, stored, "float32"))
        kernels.append(_kernel(f"narrow_{dtype}", target, dtype, "float32", stored))
    return Library(target.build(kernels))


def check_widening(target: targets.Target, dtype: str) -> None:
    """Every number, NaN and subnormal ones included, becomes exactly what numpy makes of it."""
    bits = np.arange(1 << 16, dtype=np.uint16)[:-1]
    found = np.full(bits.size, 7, np.float32)
    assert built(target).call(f"widen_{dtype}", [bits, found], [bits.size]) == 0
    expected = bits.view(DTYPES[dtype]).astype(np.float32)
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(np.signbit(found), np.signbit(expected))


def check_narrowing(target: targets.Target, dtype: str) -> None:
    """Numbers on, between and just beside those of half precision round to the nearest, ties to even."""
    half = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype]).astype(np.float32)
    half = half[np.isfinite(half)]
    ends = np.array(
        [65504, 65519.99, 65520, 1e9, 3.4e38, np.inf, np.nan, 2.0**-25, 2.0**-24 * 0.75, 1e-30, 0], np.float32
    )
    sorted_half = np.sort(half).astype(np.float64)
    middle = ((sorted_half[1:] + sorted_half[:-1]) / 2).astype(np.float32)
    near = np.concatenate([np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))])
    x = np.concatenate([half, middle, near, ends, -ends]).astype(np.float32)
    found = np.zeros(x.size, np.uint16)
    assert built(target).call(f"narrow_{dtype}", [x, found], [x.size]) == 0
    with np.errstate(over="ignore"):
        expected = x.astype(DTYPES[dtype])
    got = found.view(DTYPES[dtype])
    assert np.array_equal(got.astype(np.float32), expected.astype(np.float32), equal_nan=True)
    assert np.array_equal(np.signbit(got), np.signbit(expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", NATIVE, ids=lambda t: t.name)
def test_conversions_are_exact(target: targets.Target, dtype: str) -> None:
    check_widening(target, dtype)
    check_narrowing(target, dtype)


def test_a_target_without_the_instruction_is_among_those_tried() -> None:
    assert {converts_float16(t.tvm) for t in NATIVE} == {True, False}
