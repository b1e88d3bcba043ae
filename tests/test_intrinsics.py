"""Vector functions against float64 over wide ranges, on every x86-64 level that this CPU runs."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from coda_edge import targets
from coda_edge.lower import intrinsics
from coda_edge.lower.body import Body, external, index, load
from coda_edge.lower.kernel import KernelSource

VECTORS = [t for t in targets.targets().values() if not t.missing() and "fma" in t.features]
erf = np.vectorize(math.erf)


def pointwise(target: targets.Target, *names: str) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Each function as a vector kernel applied to whole arrays, and as a scalar kernel to the last few elements."""
    from tvm import tirx

    lanes = target.lanes(4)
    kernels = []
    for name in names:
        function = getattr(intrinsics, name)
        x, y, n = external("x"), external("y"), tirx.Var("n", "int64")
        body = Body()
        whole = body.let(tirx.floordiv(n, index(lanes)), "whole")
        with body.loop(0, whole) as i:
            body.store(y, i * lanes, function(load(x, i * lanes, lanes)))
        with body.loop(whole * lanes, n) as i:
            body.store(y, i, function(load(x, i)))
        kernels.append(KernelSource(name, partial(body.function, name, [x, y, n])))
    library = Library(target.build(kernels))

    def bound(name: str) -> Callable[[np.ndarray], np.ndarray]:
        def call(x: np.ndarray) -> np.ndarray:
            x = np.ascontiguousarray(x, np.float32)
            y = np.full_like(x, np.nan)
            assert library.call(name, [x, y], [x.size]) == 0
            return y

        return call

    return {name: bound(name) for name in names}


class Library:
    """A kernel library in this process."""

    def __init__(self, data: bytes) -> None:
        import tempfile

        with tempfile.NamedTemporaryFile(suffix=".so") as f:
            f.write(data)
            f.flush()
            self._library = ctypes.CDLL(f.name)

    def call(self, name: str, buffers: list[np.ndarray], ints: list[int]) -> int:
        addresses = (ctypes.c_uint64 * (len(buffers) + 1))(*(b.ctypes.data for b in buffers), 0)
        sizes = (ctypes.c_int64 * (len(ints) + 2))(*ints, 0, 1)
        return int(getattr(self._library, name)(addresses, sizes))


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], list[tuple[float, float]], float | Callable[[Any], Any]]] = {
    "exp": (np.exp, [(-86.9, 88.7), (-1, 1), (-1e-3, 1e-3)], 1.5e-7),
    "exp_of_negative": (np.exp, [(-86.9, 0), (-16, 0), (-1, 0)], lambda x: 1.7e-7 + 7.4e-8 * np.abs(x)),
    "exp2": (np.exp2, [(-125, 127.9), (-1, 1)], 1.5e-7),
    "log": (np.log, [(1e-45, 1e-37), (1e-6, 3), (0.9, 1.1), (1, 3e38)], 1.5e-7),
    "erf": (erf, [(-6, 6), (-1, 1), (-1e-4, 1e-4)], 3e-7),
    "tanh": (np.tanh, [(-12, 12), (-1, 1), (-1e-4, 1e-4)], 3.5e-7),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), [(-86, 30), (-1, 1)], 3e-7),
    "rsqrt": (lambda x: 1 / np.sqrt(x), [(1e-12, 10), (1, 1e30)], 1.5e-7),
    "absolute": (np.abs, [(-3, 3)], 0),
    "relu": (lambda x: np.maximum(x, 0), [(-3, 3)], 0),
    "sign": (np.sign, [(-3, 3)], 0),
}


@pytest.fixture(scope="module", params=VECTORS, ids=lambda t: t.name)
def kernels(request: pytest.FixtureRequest) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    return pointwise(request.param, *FUNCTIONS, "sin", "cos")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_relative_error(name: str, kernels: dict[str, Callable[[np.ndarray], np.ndarray]]) -> None:
    reference, ranges, bound = FUNCTIONS[name]
    for low, high in ranges:
        x = np.linspace(low, high, 100_003).astype(np.float32)
        expected = reference(x.astype(np.float64))
        error = np.abs(kernels[name](x) - expected) / np.maximum(np.abs(expected), 1e-38)
        assert (error <= (bound(x) if callable(bound) else bound)).all(), (low, high, x[error.argmax()])


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_sine(name: str, kernels: dict[str, Callable[[np.ndarray], np.ndarray]]) -> None:
    for high in (1.0, 10.0, 1e3, 1e5):
        x = np.linspace(-high, high, 100_003).astype(np.float32)
        assert np.abs(kernels[name](x) - getattr(np, name)(x.astype(np.float64))).max() <= 1.5e-7, high
    for x in (np.float32(3e9) + np.arange(0, 2e9, 2**16), np.exp2(np.linspace(-20, 32, 30_011))):
        x = x.astype(np.float32)
        assert np.abs(kernels[name](x) - getattr(np, name)(x.astype(np.float64))).max() <= 1.5e-7
    assert np.abs(kernels[name](np.float32([1e15, 1e30, -3e38]))).max() <= 1
    assert np.isnan(kernels[name](np.float32([math.inf, -math.inf, math.nan]))).all()


LIMITS = {
    "exp": {-math.inf: 0, -200: 0, -1e30: 0, 0: 1, 89: math.inf, 1e30: math.inf, math.inf: math.inf},
    "exp_of_negative": {-math.inf: 0, -200: 0, -1e30: 0, 0: 1},
    "exp2": {-math.inf: 0, -200: 0, 0: 1, 1: 2, 128: math.inf, math.inf: math.inf},
    "log": {0: -math.inf, 1: 0, -1: math.nan, -math.inf: math.nan, math.inf: math.inf},
    "erf": {-math.inf: -1, -50: -1, -1e30: -1, 0: 0, 50: 1, 1e30: 1, math.inf: 1},
    "tanh": {-math.inf: -1, -50: -1, -1e30: -1, 0: 0, 50: 1, 1e30: 1, math.inf: 1},
    "sigmoid": {-math.inf: 0, -100: 0, 0: 0.5, 100: 1, math.inf: 1},
    "relu": {-math.inf: 0, math.inf: math.inf},
    "sign": {-math.inf: -1, 0: 0, math.inf: 1},
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits(name: str, kernels: dict[str, Callable[[np.ndarray], np.ndarray]]) -> None:
    points = {**LIMITS[name], math.nan: math.nan}
    x = np.float32([*points] * 20)
    np.testing.assert_array_equal(kernels[name](x), np.float32([*points.values()] * 20))
