"""A norm as one scale and one shift becomes the norm that every pass knows."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import run, to_model, worst_error
from rewriting import model, normal

from coda_edge.frontend import load, normalize

CONSTANTS = {
    "gain": normal(12, seed=1) + 1,
    "bias": normal(12, seed=2),
    "last": np.array([2]),
    "eps": np.array(1e-6, np.float32),
}
STATISTICS = """m = ReduceMean(x, last) d = Sub(x, m) q = Mul(d, d) v = ReduceMean(q, last)
    e = Add(v, eps) root = Sqrt(e) r = Reciprocal(root)"""
FEEDS = {"x": normal(2, 5, 12, seed=3) + 3}


@pytest.mark.parametrize("scale", ["Mul(r, gain)", "Mul(gain, r)", "Div(gain, root)"])
@pytest.mark.parametrize("shift", ["a = Mul(x, s) o = Mul(m, s) b = Sub(bias, o) y = Add(a, b)",
                                   "a = Mul(s, x) o = Mul(s, m) b = Sub(bias, o) y = Add(b, a)"])  # fmt: skip
def test_a_scale_and_a_shift_are_a_norm(scale: str, shift: str) -> None:
    m = model(f"g (float[B, 5, 12] x) => (float[B, 5, 12] y) {{ {STATISTICS} s = {scale} {shift} }}", CONSTANTS)
    graph = normalize(load(m))
    # No tensor of x's size is made of the statistics alone.
    assert all(
        any(t.shape == ["B", 5, 12] for t in n.inputs) for n in graph.nodes if n.outputs[0].shape == ["B", 5, 12]
    )
    assert worst_error(run(m, FEEDS), run(to_model(graph), FEEDS)) < 2e-6


def test_a_scale_that_is_an_output_stays() -> None:
    m = model(
        f"""g (float[B, 5, 12] x) => (float[B, 5, 12] y, float[B, 5, 12] s) {{ {STATISTICS} s = Mul(r, gain)
        a = Mul(x, s) o = Mul(m, s) b = Sub(bias, o) y = Add(a, b) }}""",
        CONSTANTS,
    )
    assert worst_error(run(m, FEEDS), run(to_model(normalize(load(m))), FEEDS)) < 2e-6
