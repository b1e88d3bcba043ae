"""Where few rows are read, few rows are computed: through products and norms, up to what needs them all."""

from __future__ import annotations

import numpy as np
import pytest
from coda_edge.passes import PIPELINE, choose_rows
from rewriting import Array, Rewritten, model, normal, rewrite

from coda_edge.ir import shape


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


_CONSTANTS: dict[str, Array] = {
    "w": normal(12, 12, seed=1),
    "v": normal(12, 31, seed=2),
    "b": normal(12, seed=3),
    "wq": normal(12, 12, seed=4),
    "wk": normal(12, 12, seed=5),
    "wv": normal(12, 12, seed=6),
    "g": normal(12, seed=7),
    "axis": ints(1),
    "zero": ints(0),
    "one": ints(1),
    "two": ints(2),
    "from_last": ints(-1),
    "end": ints(np.iinfo(np.int64).max),
    "last": np.array(-1, np.int64),
    "heads": ints(0, 0, 3, 4),
    "flat": ints(0, 0, 12),
    "scale": np.float32(0.5),
}
_SIZES = [(1, 1), (1, 7), (3, 2), (3, 7)]


def products(done: Rewritten) -> list[str]:
    """How many rows each Gemm has: its left operand's dimension before the last."""
    return [str(shape(n.inputs[0])[-2]) for n in done.graph.nodes if n.op == "Gemm"]


def check(done: Rewritten, **others: Array) -> None:
    for batch, length in _SIZES:
        assert done.error({"x": normal(batch, length, 12, seed=batch + length), **others}) < 2e-6, (batch, length)


_CHOICES = {
    "the last": ("y = Slice(l, from_last, end, axis)", "[B, 1, 31]"),
    "the first": ("y = Slice(l, zero, one, axis)", "[B, 1, 31]"),
    "the last by its number": ("y = Gather <axis = 1> (l, last)", "[B, 31]"),
    "two of them": ("y = Gather <axis = 1> (l, pair)", "[B, 2, 31]"),
    "one that an input names": ("y = Gather <axis = 1> (l, i)", "[B, 31]"),
    "some that an input names": ("y = Gather <axis = 1> (l, j)", "[B, 2, 31]"),
}


@pytest.mark.parametrize("case", _CHOICES)
def test_rows_are_chosen_before_the_products(case: str) -> None:
    body, out = _CHOICES[case]
    m = model(
        f"""g (float[B, S, 12] x, int64 i, int64[2] j) => (float{out} y) {{
            h0 = MatMul(x, w) h1 = Add(h0, b) h2 = Tanh(h1) h3 = Add(h2, x) h = LayerNormalization(h3, g, b) l = MatMul(h, v) {body} }}""",
        _CONSTANTS | {"pair": ints(0, -1)},
    )
    done = rewrite(m, PIPELINE)
    assert set(products(done)) <= {"1", "2", "B"} and len(products(done)) == 2
    assert {n.op for n in done.graph.nodes} <= {"Map", "Gemm", "RowMoments", "Reshape", "Squeeze"}
    check(done, i=np.array(0, np.int64), j=ints(-1, 0))


_ATTENTION = (
    "q0 = MatMul(x, wq) k0 = MatMul(x, wk) v0 = MatMul(x, wv) q1 = Reshape(q0, heads) k1 = Reshape(k0, heads) v1 = Reshape(v0, heads) "
    "q2 = Transpose <perm = [0, 2, 1, 3]> (q1) k2 = Transpose <perm = [0, 2, 3, 1]> (k1) v2 = Transpose <perm = [0, 2, 1, 3]> (v1) "
    "s0 = MatMul(q2, k2) s1 = Mul(s0, scale) s2 = Add(s1, mask) p = Softmax(s2) o0 = MatMul(p, v2) "
    "o1 = Transpose <perm = [0, 2, 1, 3]> (o0) o2 = Reshape(o1, flat) o3 = MatMul(o2, w) h = Add(o3, x) l = MatMul(h, v)"
)


def test_rows_are_chosen_behind_attention() -> None:
    m = model(
        f"g (float[B, S, 12] x, float[S, S] mask) => (float[B, 1, 31] y) {{ {_ATTENTION} y = Slice(l, from_last, end, axis) }}",
        _CONSTANTS,
    )
    done = rewrite(m, PIPELINE)
    assert [str(shape(t)[2]) for t in done.node("Attention").inputs[:3]] == ["S", "S", "S"]
    assert sorted(products(done)) == ["1", "1", "S"], "output and logits; queries, keys and values together"
    for batch, length in _SIZES:
        feeds = {"x": normal(batch, length, 12), "mask": normal(length, length, seed=9)}
        assert done.error(feeds) < 2e-6, (batch, length)


_KEPT = {
    "most rows": ("y = Slice(l, one, end, axis)", "float[B, T, 31] y"),
    "all are returned": ("y = Slice(l, from_last, end, axis)", "float[B, 1, 31] y, float[B, S, 31] l"),
    "two choices": (
        "y = Slice(l, zero, one, axis) z = Slice(l, one, two, axis)",
        "float[B, T, 31] y, float[B, U, 31] z",
    ),
    "rows that were summed": (
        "c = CumSum(l, axis0) y = Slice(c, from_last, end, axis)",
        "float[B, 1, 31] y",
    ),
}


@pytest.mark.parametrize("case", _KEPT)
def test_products_that_keep_their_rows(case: str) -> None:
    body, out = _KEPT[case]
    m = model(f"g (float[B, S, 12] x) => ({out}) {{ l = MatMul(x, v) {body} }}", _CONSTANTS | {"axis0": np.array(1)})
    done = rewrite(m, [choose_rows.PASS])
    assert done.log.rewrites == {"choose_rows": 0}
    assert done.error({"x": normal(3, 7, 12)}) < 2e-6


def test_tokens_are_chosen_before_they_are_looked_up() -> None:
    m = model(
        """g (int64[B, S] ids) => (float[B, 31] y) { e = Gather(words, ids) l = MatMul(e, v) y = Gather <axis = 1> (l, last) }""",
        _CONSTANTS | {"words": normal(40, 12, seed=8)},
    )
    done = rewrite(m, PIPELINE)
    assert done.ops()["Map"] == 1 and "1" in products(done)
    for batch, length in _SIZES:
        assert done.error({"ids": np.random.default_rng(0).integers(0, 40, (batch, length))}) < 2e-6


def test_a_tensor_that_is_also_read_whole_keeps_its_rows() -> None:
    """Rows of x, each with another row of x added."""
    m = model(
        """g (float[S, 12] x, int64[S] i) => (float[1, 31] y, float[1, 12] z) {
            a = Gather(x, i) s = Add(a, x) l = MatMul(s, v) y = Slice(l, from_last, end, zero)
            h = MatMul(x, w) c = Gather(h, i) t = Add(h, c) k = MatMul(t, w) z = Slice(k, from_last, end, zero) }""",
        _CONSTANTS,
    )
    done = rewrite(m, PIPELINE)
    assert "1" in products(done)
    assert done.error({"x": normal(6, 12), "i": ints(3, 1, 2, 0, 5, 4)}) < 2e-6
