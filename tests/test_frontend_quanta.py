"""Quantisation stands before the split of heads and behind their merging, where it is one with a product's epilogue."""

from __future__ import annotations

import numpy as np
import pytest
from coda_edge.passes import PIPELINE
from graphs import run, to_model, worst_error
from rewriting import Array, model, normal, rewrite

from coda_edge.frontend import load, normalize

CONSTANTS: dict[str, Array] = {
    "w": normal(24, 24, seed=1, scale=0.3),
    "b": normal(24, seed=2),
    "heads": np.array([0, 0, 4, 6]),
    "flat": np.array([0, 0, 24]),
    "s": np.float32(0.03),
    "z": np.uint8(121),
    "s2": np.float32(0.011),
    "z2": np.uint8(7),
    "sc": np.linspace(0.01, 0.05, 4).astype(np.float32),
    "zc": np.arange(4).astype(np.uint8),
    "half": np.float32(0.5),
    "r": np.float32(2.5),
}
_SPLIT = "p = MatMul(x, w) d = Add(p, b) h = Reshape(d, heads) t = Transpose<perm = [0, 2, 1, 3]>(h)"


def _model(body: str, out: str = "float[B, 4, 7, 6]") -> tuple[object, dict[str, Array]]:
    return model(f"g (float[B, 7, 24] x) => ({out} y) {{ {body} }}", CONSTANTS), {"x": normal(3, 7, 24)}


@pytest.mark.parametrize(
    "body",
    [
        "q = QuantizeLinear(t, s, z) y = DequantizeLinear(q, s, z)",
        "m = Mul(t, half) q = QuantizeLinear(m, s, z) y = DequantizeLinear(q, s, z)",
        "m = Div(t, r) u = Mul(half, m) q = QuantizeLinear(u, s2, z2) y = DequantizeLinear(q, s, z)",
        "e = Shape(t) m = Mul(t, half) n = Reshape(m, e) l = Shape(m) o = Reshape(n, l) "
        "q = QuantizeLinear(o, s, z) y = DequantizeLinear(q, s, z)",
    ],
    ids=["as it is", "scaled behind the split", "scaled twice, read by another scale", "its shape is read too"],
)
def test_comes_before_the_split_of_heads(body: str) -> None:
    m, feeds = _model(f"{_SPLIT} {body}")
    graph = normalize(load(m))
    order = [n.op for n in graph.nodes]
    assert order.index("Min") < order.index("Transpose")
    assert worst_error(run(m, feeds), run(to_model(graph), feeds)) < 1e-6
    assert set(rewrite(m, PIPELINE).ops()) - {"Reshape"} == {"Gemm"}


@pytest.mark.parametrize(
    "body",
    [
        f"{_SPLIT} q = QuantizeLinear<axis = 1>(t, sc, zc) y = DequantizeLinear<axis = 1>(q, sc, zc)",
        f"{_SPLIT} q = QuantizeLinear(t, s, z) k = DequantizeLinear(q, s, z) y = Add(k, t)",
        "h = Reshape(x, heads) t = Transpose<perm = [0, 2, 1, 3]>(h) q = QuantizeLinear(t, s, z) y = DequantizeLinear(q, s, z)",
        f"{_SPLIT} m = Div(r, t) q = QuantizeLinear(m, s, z) y = DequantizeLinear(q, s, z)",
    ],
    ids=["a scale for each head", "heads that others read", "no product", "divides by the heads"],
)
def test_stays_where_that_is_no_use_or_wrong(body: str) -> None:
    m, feeds = _model(body)
    graph = normalize(load(m))
    order = [n.op for n in graph.nodes]
    assert order.index("Transpose") < order.index("Round")
    assert worst_error(run(m, feeds), run(to_model(graph), feeds)) < 1e-6


def test_comes_behind_the_merging_of_heads() -> None:
    m, feeds = _model(
        f"""{_SPLIT} u = Transpose<perm = [0, 1, 3, 2]>(t) a = MatMul(t, u) c = MatMul(a, t)
        q = QuantizeLinear(c, s, z) k = DequantizeLinear(q, s, z)
        f = Transpose<perm = [0, 2, 1, 3]>(k) y = Reshape(f, flat)""",
        "float[B, 7, 24]",
    )
    graph = normalize(load(m))
    order = [n.op for n in graph.nodes]
    last_move = len(order) - 1 - order[::-1].index("Transpose")
    assert last_move < order.index("Round")
    assert worst_error(run(m, feeds), run(to_model(graph), feeds)) < 1e-6


def test_scales_of_two_operands_stand_behind_the_merging_of_heads() -> None:
    m, feeds = _model(
        f"""{_SPLIT} q1 = QuantizeLinear(t, s, z) k1 = DequantizeLinear(q1, s, z)
        u = Transpose<perm = [0, 1, 3, 2]>(t) q2 = QuantizeLinear(u, s, z) k2 = DequantizeLinear(q2, s, z)
        a = MatMul(k1, k2) e = Softmax(a) q3 = QuantizeLinear(e, s2, z2) k3 = DequantizeLinear(q3, s2, z2)
        q4 = QuantizeLinear(t, s2, z) k4 = DequantizeLinear(q4, s2, z) c = MatMul(k3, k4)
        f = Transpose<perm = [0, 2, 1, 3]>(c) y = Reshape(f, flat)""",
        "float[B, 7, 24]",
    )
    graph = normalize(load(m))
    assert graph.nodes[-1].op == "Mul"
    assert worst_error(run(m, feeds), run(to_model(graph), feeds)) < 1e-5
