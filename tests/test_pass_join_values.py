"""Probabilities that weigh two tensors of values are one attention."""

from __future__ import annotations

import numpy as np
import pytest
from coda_edge.passes import PIPELINE, join_values
from rewriting import model, normal, rewrite

_GUARD = "n = IsNaN(r) p = Where(n, zero, r)"


def graph(tail: str, guard: str = "p = Identity(r)", outputs: str = "") -> str:
    return (
        "g (float[B, 3, S, 8] q, float[B, 3, T, 8] k, float[B, 3, T, 8] v, float[B, 3, T, 5] w) => "
        f"(float[B, 3, S, 8] y, float[B, 3, S, 5] z{outputs}) {{ kt = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul(q, kt) r = Softmax(s) {guard} {tail} }}"
    )


def feeds(batch: int, queries: int, keys: int) -> dict[str, np.ndarray]:
    shapes = {"q": (queries, 8), "k": (keys, 8), "v": (keys, 8), "w": (keys, 5)}
    return {name: normal(batch, 3, *dims, seed=i) for i, (name, dims) in enumerate(shapes.items())}


@pytest.mark.parametrize("guard", ["p = Identity(r)", _GUARD], ids=["plain", "guarded"])
def test_two_products_of_the_same_probabilities_are_one_attention(guard: str) -> None:
    done = rewrite(model(graph("y = MatMul(p, v) z = MatMul(p, w)", guard), {"zero": np.float32(0)}), PIPELINE)
    assert done.ops()["Attention"] == 1 and not {"Softmax", "MatMul"} & set(done.ops())
    for sizes in ((1, 1, 1), (2, 5, 7)):
        assert done.error(feeds(*sizes)) < 2e-6


@pytest.mark.parametrize(
    ("tail", "outputs"),
    [
        ("y = MatMul(p, v) z = MatMul(p, w) t = Identity(p)", ", float[B, 3, S, T] t"),
        ("h = Mul(p, p) y = MatMul(p, v) z = MatMul(h, w)", ""),
        ("y = MatMul(p, v) u = ReduceMean <keepdims = 1> (p, last) z = Mul(u, five)", ""),
    ],
    ids=["returned", "read otherwise", "reduced"],
)
def test_probabilities_that_others_read_stay(tail: str, outputs: str) -> None:
    numbers = {"last": np.array([-1]), "five": normal(5)}
    done = rewrite(model(graph(tail, outputs=outputs), numbers), [join_values.PASS])
    assert done.log.rewrites["join_values"] == 0
    assert done.error(feeds(2, 3, 4)) == 0.0


def test_a_product_of_the_other_product_stays() -> None:
    """``p @ (p @ v)``: neither can wait for the other."""
    text = "g (float[B, 7, 7] q, float[B, 7, 4] v) => (float[B, 7, 4] y) { p = Softmax(q) u = MatMul(p, v) t = Tanh(u) y = MatMul(p, t) }"
    done = rewrite(model(text), [join_values.PASS])
    assert done.log.rewrites["join_values"] == 0
    assert done.error({"q": normal(2, 7, 7), "v": normal(2, 7, 4, seed=1)}) == 0.0
