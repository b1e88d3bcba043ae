"""Row moments are found however mean and variance are spelled."""

from __future__ import annotations

import numpy as np
import pytest
from coda_edge.passes import row_moments
from rewriting import model, normal, rewrite

_SPELLINGS = {
    "mul": "d = Sub(x, m) s = Mul(d, d)",
    "pow": "d = Sub(x, m) s = Pow(d, two)",
    "mean minus x": "d = Sub(m, x) s = Mul(d, d)",
}


@pytest.mark.parametrize("spelling", _SPELLINGS)
def test_mean_and_variance_become_one_node(spelling: str) -> None:
    m = model(
        f"""g (float[B, S, 24] x) => (float[B, S, 24] y) {{
            m = ReduceMean(x, axes)
            {_SPELLINGS[spelling]}
            v = ReduceMean(s, axes)
            e = Add(v, eps)
            r = Sqrt(e)
            y = Div(d, r)
        }}""",
        {"axes": np.array([-1]), "two": np.float32(2), "eps": np.float32(1e-5)},
    )
    done = rewrite(m, [row_moments.PASS])
    assert done.ops()["RowMoments"] == 1
    assert done.ops()["ReduceMean"] == 0
    assert done.error({"x": normal(3, 7, 24)}) < 1e-6


def test_one_node_serves_two_norms_of_one_tensor() -> None:
    norm = "m{0} = ReduceMean(x, axes) d{0} = Sub(x, m{0}) s{0} = Mul(d{0}, d{0}) v{0} = ReduceMean(s{0}, axes)"
    m = model(
        f"""g (float[B, 8] x) => (float[B, 1] y) {{
            {norm.format(1)}
            {norm.format(2)}
            y = Add(v1, v2)
        }}""",
        {"axes": np.array([1])},
    )
    done = rewrite(m, [row_moments.PASS])
    assert done.ops()["RowMoments"] == 1
    assert done.error({"x": normal(5, 8)}) < 1e-6


@pytest.mark.parametrize(
    ("name", "body"),
    {
        "mean of squares (RMSNorm)": "s = Mul(x, x) y = ReduceMean(s, last)",
        "another axis": "m = ReduceMean(x, first) d = Sub(x, m) s = Mul(d, d) y = ReduceMean(s, first)",
        "a product of two tensors": "m = ReduceMean(x, last) d = Sub(x, m) s = Mul(d, x) y = ReduceMean(s, last)",
    }.items(),
)
def test_other_reductions_are_left_alone(name: str, body: str) -> None:
    m = model(f"g (float[B, 8] x) => (float[A, C] y) {{ {body} }}", {"last": np.array([-1]), "first": np.array([0])})
    done = rewrite(m, [row_moments.PASS])
    assert done.ops()["RowMoments"] == 0
    assert done.error({"x": normal(5, 8)}) == 0.0


def test_means_of_integers_stay() -> None:
    m = model(
        """g (int32[B, 12] x) => (int32[B, 1] y) {
            m = ReduceMean(x, last) d = Sub(x, m) s = Mul(d, d) y = ReduceMean(s, last) }""",
        {"last": np.array([-1])},
    )
    done = rewrite(m, [row_moments.PASS])
    assert "RowMoments" not in done.ops()
    assert done.error({"x": np.arange(36, dtype=np.int32).reshape(3, 12)}) == 0.0
