"""Scattering: onnxruntime's results for every reduction, negative and repeated places, and places out of range."""

from __future__ import annotations

import numpy as np
import pytest
from rewriting import model, run

import coda_edge
from coda_edge.bundle import to_bytes
from coda_edge.errors import DataError

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_slices(reduction: str) -> None:
    proto = model(
        "g (float[a,b,3] x, int64[n,2] i, float[n,3] u, int64[m,1] j, float[m,b,3] v) => (float[a,b,3] y, float[a,b,3] z)"
        f' {{ y = ScatterND <reduction = "{reduction}"> (x, i, u) z = ScatterND <reduction = "{reduction}"> (x, j, v) }}',
        {},
    )
    session = coda_edge.Session(to_bytes(coda_edge.optimize(proto, verify=False).bundle))
    for a, b, n, m in [(4, 5, 3, 2), (2, 2, 9, 1), (3, 1, 0, 5)]:
        feeds = {
            "x": RNG.standard_normal((a, b, 3)).astype(np.float32),
            "i": np.stack([RNG.integers(-a, a, n), RNG.integers(-b, b, n)], 1),
            "u": RNG.standard_normal((n, 3)).astype(np.float32),
            "j": RNG.integers(-a, a, (m, 1)),
            "v": RNG.standard_normal((m, b, 3)).astype(np.float32),
        }
        for found, right in zip(session.run(None, feeds), run(proto, feeds), strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-6)
    feeds["j"][0] = 7
    with pytest.raises(DataError, match=r"index is out of range in step .*scatternd"):
        session.run(None, feeds)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_elements(axis: int) -> None:
    proto = model(
        "g (float[a,b,4] x, int64[a,c,4] i, float[a,c,4] u, bool[a,b,4] p, bool[a,c,4] q) => (float[a,b,4] y, bool[a,b,4] z)"
        f' {{ y = ScatterElements <axis = {axis}, reduction = "add"> (x, i, u) z = ScatterElements <axis = {axis}> (p, i, q) }}',
        {},
    )
    session = coda_edge.Session(to_bytes(coda_edge.optimize(proto, verify=False).bundle))
    for a, b, c in [(3, 5, 2), (1, 2, 1), (4, 3, 3)]:
        size = (a, b, 4)[axis]
        shape = (a, c, 4)
        feeds = {
            "x": RNG.standard_normal((a, b, 4)).astype(np.float32),
            "i": RNG.integers(-size, size, shape),
            "u": RNG.standard_normal(shape).astype(np.float32),
            "p": RNG.random((a, b, 4)) > 0.5,
            "q": RNG.random(shape) > 0.5,
        }
        for found, right in zip(session.run(None, feeds), run(proto, feeds), strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-6)
