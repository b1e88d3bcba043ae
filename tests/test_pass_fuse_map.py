"""Pointwise operators that no GEMM took become few Maps."""

from __future__ import annotations

import numpy as np
from coda_edge.passes import fuse_map, row_moments
from rewriting import Array, model, normal, rewrite

_CONSTANTS: dict[str, Array] = {
    "words": normal(50, 24, seed=1),
    "types": normal(2, 24, seed=2),
    "positions": normal(1, 16, 24, seed=3),
    "zero": np.array([0]),
    "one": np.array([1]),
    "g": normal(24, seed=4),
    "b": normal(24, seed=5),
    "low": np.float32(-1e9),
    "keep": np.float32(0),
    "axes": np.array([1, 2]),
}


def test_embedding_and_its_statistics_are_one_map() -> None:
    m = model(
        """g (int64[B, S] ids, int64[B, S] kinds) => (float[B, S, 24] x, float[B, S, 24] y) {
            w = Gather(words, ids) t = Gather(types, kinds) a = Add(w, t)
            s = Shape(ids) n = Gather(s, one) p = Slice(positions, zero, n, one) x = Add(a, p)
            y = LayerNormalization(x, g, b)
        }""",
        _CONSTANTS,
    )
    done = rewrite(m, [row_moments.PASS, fuse_map.PASS])
    maps = [n for n in done.graph.nodes if n.op == "Map"]
    assert [len(n.outputs) for n in maps] == [3, 1]
    assert done.ops()["Map"] == sum(1 for n in done.graph.nodes if n.op not in ("Shape", "Gather"))
    rng = np.random.default_rng(0)
    assert done.error({"ids": rng.integers(0, 50, (3, 7)), "kinds": rng.integers(0, 2, (3, 7))}) < 2e-6


def test_embedding_and_its_mean_square_are_one_map() -> None:
    m = model(
        """g (int64[B, S] ids) => (float[B, S, 24] x, float[B, S, 1] q, float[B, S, 1] n, float[B, S, 1] s) {
            x = Gather(words, ids) p = Pow(x, two) q = ReduceMean(p, last) n = ReduceSumSquare(x, last)
            a = Abs(x) e = Mul(a, g) s = ReduceSum(e, last)
        }""",
        _CONSTANTS | {"two": np.float32(2), "last": np.array([-1])},
    )
    done = rewrite(m, [fuse_map.PASS])
    assert done.ops() == {"Map": 1}
    for batch, length in ((1, 1), (3, 7)):
        assert done.error({"ids": np.random.default_rng(0).integers(0, 50, (batch, length))}) < 2e-6


def test_the_sum_of_a_product_joins_the_product() -> None:
    m = model(
        """g (float[B, 24] a, float[B, 24] c) => (float[B, 24] x, float[B, 1] y) {
            x = Tanh(a) p = Mul(x, c) y = ReduceSum(p, last) }""",
        _CONSTANTS | {"last": np.array([-1])},
    )
    done = rewrite(m, [fuse_map.PASS])
    assert done.ops() == {"Map": 2}
    assert done.error({"a": normal(3, 24), "c": normal(3, 24, seed=9)}) < 2e-6


def test_a_mask_is_one_map_for_all_who_read_it() -> None:
    m = model(
        """g (int64[B, S] mask, float[B, 4, S, S] a, float[B, 4, S, S] c) => (float[B, 4, S, S] y, float[B, 4, S, S] z) {
            k = Cast <to = 9> (mask) e = Unsqueeze(k, axes) m = Where(e, keep, low)
            s = Add(a, m) y = Softmax(s) t = Add(c, m) z = Softmax(t)
        }""",
        _CONSTANTS,
    )
    done = rewrite(m, [fuse_map.PASS])
    assert done.ops() == {"Map": 3, "Softmax": 2}
    feeds = {"mask": np.array([[1, 1, 0], [0, 1, 1]]), "a": normal(2, 4, 3, 3), "c": normal(2, 4, 3, 3, seed=1)}
    assert done.error(feeds) < 1e-6


def test_views_alone_need_no_kernel() -> None:
    m = model("g (float[B, S, 24] x) => (float[C, 6] y) { y = Reshape(x, target) }", {"target": np.array([-1, 6])})
    done = rewrite(m, [fuse_map.PASS])
    assert done.ops() == {"Reshape": 1}
    assert done.error({"x": normal(2, 3, 24)}) == 0.0
