"""Random operators: the published generator, the same in kernels and NumPy, the right moments; seeds make runs repeat."""

from __future__ import annotations

import numpy as np
import pytest
from rewriting import model

import coda_edge
from coda_edge.bundle import to_bytes
from coda_edge.lower.ops_random import philox, reference

X = np.ones((37, 53), np.float32)


def _session(text: str) -> coda_edge.Session:
    return coda_edge.Session(to_bytes(coda_edge.optimize(model("g " + text, {}), verify=False).bundle), seed=3)


def test_the_published_answer() -> None:
    """Random123's known answers of philox4x32-10 for a counter and key of zeros, and of ones."""
    for word, expected in ((0, (0x6627E8D5, 0xE169C58D)), (0xFFFFFFFF, (0x408F276D, 0x41C83B0E))):
        found = philox([np.uint64(word)] * 4, [np.uint64(word)] * 2, np.uint64, lambda x: x)
        assert tuple(map(int, found)) == expected


OPERATORS = [
    ("RandomNormalLike <seed = 4.0> (x)", {"seed": 4.0}),
    ("RandomNormalLike <seed = 5.0, mean = 2.0, scale = 3.0> (x)", {"seed": 5.0, "mean": 2.0, "scale": 3.0}),
    ("RandomUniformLike <seed = 4.0> (x)", {"seed": 4.0}),
    (
        "RandomUniform <shape = [37, 53], seed = 6.0, low = -1.0, high = 3.0> ()",
        {"seed": 6.0, "low": -1.0, "high": 3.0},
    ),
    ("RandomNormal <shape = [37, 53], seed = 7.0> ()", {"seed": 7.0}),
]


@pytest.mark.parametrize(("text", "attrs"), OPERATORS)
def test_kernels_compute_the_reference(text: str, attrs: dict[str, float]) -> None:
    session = _session(f"(float[a,b] x) => (float[a,b] y, float[a,b] z) {{ y = {text} z = Exp(x) }}")
    y, _ = session.run(None, {"x": X})
    expected = reference(text.split()[0], "y", attrs, 0, X.size).reshape(X.shape)
    np.testing.assert_allclose(y, expected, atol=2e-6 * max(1.0, attrs.get("scale", 1.0)))
    again, _ = session.run(None, {"x": X})
    np.testing.assert_array_equal(y, again)


def test_moments_and_independence() -> None:
    session = _session(
        "(float[a,b] x, float[a,b] p) => (float[a,b] n, float[a,b] m, float[a,b] u, bool[a,b] c)"
        " { n = RandomNormalLike(x) m = RandomNormalLike(x) v = RandomUniformLike(x) u = Mul(v, x) c = Bernoulli <dtype = 9> (p) }"
    )
    feeds = {"x": np.ones((400, 500), np.float32), "p": np.full((400, 500), 0.3, np.float32)}
    first, second = session.run(None, feeds), session.run(None, feeds)
    n, m, u, c = first
    count = n.size
    for normal in (n, m, second[0]):
        assert abs(normal.mean()) < 5 / count**0.5 and abs(normal.std() - 1) < 5 / count**0.5
        assert abs((normal**3).mean()) < 20 / count**0.5 and abs((normal**4).mean() - 3) < 50 / count**0.5
    assert abs(u.mean() - 0.5) < 2 / count**0.5 and abs(u.std() - 12**-0.5) < 2 / count**0.5
    assert u.min() >= 0 and u.max() < 1 and abs(c.mean() - 0.3) < 3 / count**0.5
    pairs = [(n, m), (n, u), (n, second[0]), (n[:, 1:], n[:, :-1]), (n[1:], n[:-1]), (n**2, m**2)]
    for a, b in pairs:
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / count**0.5
    session.seed(3)
    for a, b in zip(first, session.run(None, feeds), strict=True):
        np.testing.assert_array_equal(a, b)


def test_threads_change_nothing() -> None:
    proto = model("g (float[a,b] x) => (float[a,b] y) { n = RandomNormalLike(x) y = Add(n, x) }", {})
    data = to_bytes(coda_edge.optimize(proto, verify=False).bundle)
    one, two = (coda_edge.Session(data, threads=t, seed=9).run(None, {"x": X})[0] for t in (1, 2))
    np.testing.assert_array_equal(one, two)
