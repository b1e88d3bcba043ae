"""Pointwise operators that no GEMM took become few Maps."""

from __future__ import annotations

import numpy as np
from coda_edge.passes import fuse_map, grow_epilogue, merge_projections, row_moments, split_columns
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


def test_a_mask_and_all_who_read_it_are_one_map() -> None:
    m = model(
        """g (int64[B, S] mask, float[B, 4, S, S] a, float[B, 4, S, S] c) => (float[B, 4, S, S] y, float[B, 4, S, S] z) {
            k = Cast <to = 9> (mask) e = Unsqueeze(k, axes) m = Where(e, keep, low)
            s = Add(a, m) y = Softmax(s) t = Add(c, m) z = Softmax(t)
        }""",
        _CONSTANTS,
    )
    done = rewrite(m, [fuse_map.PASS])
    assert done.ops() == {"Map": 1, "Softmax": 2}
    feeds = {"mask": np.array([[1, 1, 0], [0, 1, 1]]), "a": normal(2, 4, 3, 3), "c": normal(2, 4, 3, 3, seed=1)}
    assert done.error(feeds) < 1e-6


def test_cosines_and_sines_of_positions_are_one_map() -> None:
    """Positions are made again where another shape needs them, and are never stored."""
    m = model(
        """g (float[B, S, 24] x) => (float[1, S, 4] c, float[1, S, 4] s, bool[S, S] mask) {
            n = Shape <start = 1, end = 2> (x) n0 = Squeeze(n) p = Range(zero, n0, step) r = Cast <to = 1> (p) i = Unsqueeze(r, axes2)
            a = Mul(i, freq) c = Cos(a) s = Sin(a) q = Unsqueeze(p, last) mask = LessOrEqual(p, q)
        }""",
        {
            "zero": np.array(0, np.int64),
            "step": np.array(1, np.int64),
            "axes2": np.array([0, 2]),
            "last": np.array([-1]),
            "freq": normal(4, seed=3),
        },
    )
    done = rewrite(m, [fuse_map.PASS])
    maps = [n for n in done.graph.nodes if n.op == "Map"]
    assert sorted(len(n.outputs) for n in maps) == [1, 2]
    assert all(n.op != "Range" for n in done.graph.nodes)
    for length in (1, 7):
        assert done.error({"x": normal(2, length, 24)}) < 1e-6


def test_both_ends_of_a_cache_are_one_map() -> None:
    m = model(
        """g (float[B, 2, P, 4] a, float[B, 2, P, 4] c, float[B, S, 12] x) => (float[B, 2, T, 4] y, float[B, 2, T, 4] z) {
            p = MatMul(x, w) k, v = Split <axis = -1, num_outputs = 2> (p) k0 = Reshape(k, heads) k1 = Transpose <perm = [0, 2, 1, 3]> (k0)
            v0 = Reshape(v, heads) v1 = Transpose <perm = [0, 2, 1, 3]> (v0)
            y = Concat <axis = 2> (a, k1) z = Concat <axis = 2> (c, v1)
        }""",
        {"w": normal(12, 16, seed=1), "heads": np.array([0, 0, 2, 4])},
    )
    done = rewrite(m, [split_columns.PASS, grow_epilogue.PASS, merge_projections.PASS, fuse_map.PASS])
    assert done.ops() == {"Gemm": 1, "Map": 1}
    for past in (0, 3):
        feeds = {"a": normal(2, 2, past, 4, seed=2), "c": normal(2, 2, past, 4, seed=3), "x": normal(2, 5, 12)}
        assert done.error(feeds) < 1e-6


def test_groups_that_need_each_other_stay_apart() -> None:
    """Of a → c and d → b, joining a with b forbids joining c with d."""
    m = model(
        """g (float[N, 24] x, float[N, 12] u) => (float[N, 24] b, float[N, 12] c) {
            a = Tanh(x) ax = CumSum(a, one) aw = Slice(ax, from0, to12, last) c = Mul(aw, u)
            d = Neg(u) dx = CumSum(d, one) dw = Concat <axis = -1> (dx, dx) b = Mul(dw, x)
        }""",
        {"one": np.array(1, np.int64), "from0": np.array([0]), "to12": np.array([12]), "last": np.array([-1])},
    )
    done = rewrite(m, [fuse_map.PASS])
    assert done.ops() == {"Map": 3, "CumSum": 2}
    assert done.error({"x": normal(3, 24), "u": normal(3, 12, seed=1)}) < 1e-6


def test_parts_that_two_kernels_need_are_made_in_both() -> None:
    """Functions of two parts of one tensor: joining some takes parts from a group that others are in."""
    m = model(
        """g (float[S, 8] x) => (float[S, 4] a, float[S, 4] b, float[S, 4] c, float[S, 4] d) {
            t = Neg(x) l = Slice(t, from0, to8, last, two) r = Slice(t, from1, to8, last, two)
            a = Cos(l) b = Cos(r) c = Sin(l) d = Sin(r)
        }""",
        {n: np.array([v]) for n, v in (("from0", 0), ("from1", 1), ("to8", 8), ("last", -1), ("two", 2))},
    )
    done = rewrite(m, [fuse_map.PASS])
    assert done.ops() == {"Map": 1}
    assert done.error({"x": normal(7, 8)}) < 1e-6


def test_axes_of_one_move_without_a_kernel() -> None:
    m = model("g (float[B, 1, 6] x) => (float[1, B, 6] y) { y = Transpose <perm = [1, 0, 2]> (x) }")
    done = rewrite(m, [fuse_map.PASS])
    assert done.ops() == {"Reshape": 1}
    assert done.error({"x": normal(3, 1, 6)}) == 0.0


def test_views_alone_need_no_kernel() -> None:
    m = model("g (float[B, S, 24] x) => (float[C, 6] y) { y = Reshape(x, target) }", {"target": np.array([-1, 6])})
    done = rewrite(m, [fuse_map.PASS])
    assert done.ops() == {"Reshape": 1}
    assert done.error({"x": normal(2, 3, 24)}) == 0.0
