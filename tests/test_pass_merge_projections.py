"""Gemms over one tensor become one, whatever their epilogues do; those that need whole rows or tensors stay apart."""

from __future__ import annotations

import numpy as np
from coda_edge.passes import grow_epilogue, merge_gates, merge_projections
from rewriting import Array, model, normal, rewrite

from coda_edge.epilogue.program import EpilogueProgram, Kind

_PASSES = [grow_epilogue.PASS, merge_projections.PASS]
_CONSTANTS: dict[str, Array] = {
    **{f"w{i}": normal(12, n, seed=i) for i, n in enumerate((8, 24, 16))},
    **{f"b{i}": normal(n, seed=10 + i) for i, n in enumerate((8, 24, 16))},
    "heads": np.array([0, 0, 4, 2]),
    "square": normal(8, 8, seed=20),
}
_FEEDS = {"x": normal(2, 5, 12)}


def test_projections_of_different_widths_and_layouts_join() -> None:
    m = model(
        """g (float[B, S, 12] x) => (float[B, 4, S, 2] h, float[B, S, 24] y, float[B, S, 16] z) {
            p0 = MatMul(x, w0) a0 = Add(p0, b0) r = Reshape(a0, heads) h = Transpose <perm = [0, 2, 1, 3]> (r)
            p1 = MatMul(x, w1) y = Add(b1, p1)
            p2 = MatMul(x, w2) z = Add(p2, b2)
        }""",
        _CONSTANTS,
    )
    done = rewrite(m, _PASSES)
    assert done.ops() == {"Gemm": 1}
    outputs = EpilogueProgram.parse(done.node("Gemm").attrs["epilogue"]).outputs
    assert [(o.columns, o.heads) for o in outputs] == [((0, 8), 2), ((8, 32), None), ((32, 48), None)]
    assert done.error(_FEEDS) < 2e-6


def test_different_epilogues_join_and_share_what_is_alike() -> None:
    """Columns of another program are zero: there log and division give infinities and NaN, which nobody stores."""
    m = model(
        """g (float[B, S, 12] x, float[B, S, 1] s, float[B, S, 1] t) => (float[B, S, 8] y, float[B, S, 24] z, float[B, S, 16] u) {
            p0 = MatMul(x, w0) s0 = Mul(p0, s) a0 = Add(s0, b0) y = Tanh(a0)
            p1 = MatMul(x, w1) s1 = Mul(p1, s) a1 = Add(s1, b1) d1 = Div(a1, g1) e1 = Abs(d1) z = Log(e1)
            p2 = MatMul(x, w2) u = Mul(p2, t)
        }""",
        _CONSTANTS | {"g1": normal(24, seed=30)},
    )
    done = rewrite(m, _PASSES)
    assert done.ops() == {"Gemm": 1}
    program = EpilogueProgram.parse(done.node("Gemm").attrs["epilogue"])
    assert [p.kind for p in program.params[1:]] == [Kind.ROW, Kind.COL, Kind.COL, Kind.ROW]
    assert [s.op for s in program.steps].count("add") == 1
    for lead in ((2, 5), (3, 1), (1, 7)):
        rows = {name: normal(*lead, 1, seed=40 + i) for i, name in enumerate("st")}
        assert done.error({"x": normal(*lead, 12), **rows}) < 2e-6


def test_gated_and_plain_products_join() -> None:
    for width in (5, 6):
        m = model(
            f"""g (float[B, S, 12] x) => (float[B, S, 16] y, float[B, S, {width}] z) {{
                a = MatMul(x, w2) h = Sigmoid(a) c = MatMul(x, v2) y = Mul(h, c) d = MatMul(x, u) z = Add(d, bias) }}""",
            _CONSTANTS
            | {"v2": normal(12, 16, seed=31), "u": normal(12, width, seed=32), "bias": normal(width, seed=33)},
        )
        done = rewrite(m, [grow_epilogue.PASS, merge_gates.PASS, merge_projections.PASS])
        assert done.ops() == {"Gemm": 1 + width % 2}, "37 columns are not pairs"
        assert any("do not lie well" in r.reason for r in done.log.refusals) == (width == 5)
        assert done.error(_FEEDS) < 2e-6


def test_whole_tensors_keep_a_gemm_apart() -> None:
    m = model(
        """g (float[B, S, 12] x, float[B, S, 8] r) => (float[B, S, 8] y, float[B, S, 24] z) {
            p = MatMul(x, w0) y = Add(p, r) z = MatMul(x, w1) }""",
        _CONSTANTS,
    )
    done = rewrite(m, _PASSES)
    assert done.ops() == {"Gemm": 2}
    assert done.error(_FEEDS | {"r": normal(2, 5, 8, seed=9)}) < 2e-6


def test_row_statistics_keep_a_gemm_apart() -> None:
    m = model(
        """g (float[B, S, 12] x) => (float[B, S, 8] y, float[B, S, 1] m, float[B, S, 24] z, float[B, S, 1] n) {
            y = MatMul(x, w0) m = ReduceMax(y, last) z = MatMul(x, w1) n = ReduceMax(z, last) }""",
        _CONSTANTS | {"last": np.array([-1])},
    )
    done = rewrite(m, _PASSES)
    assert done.ops() == {"Gemm": 2}
    assert done.error(_FEEDS) < 2e-6


def test_a_gemm_that_needs_the_other_stays_behind_it() -> None:
    m = model(
        """g (float[B, S, 8] x) => (float[B, S, 8] y) {
            p = MatMul(x, square) t = Softmax <axis = 1> (p) u = Add(t, x) q = MatMul(u, square) y = Add(q, p) }""",
        _CONSTANTS,
    )
    done = rewrite(m, _PASSES)
    assert done.ops()["Gemm"] == 2
    assert done.error({"x": normal(2, 5, 8)}) < 2e-6


def test_groups_that_would_wait_for_each_other_stay_apart() -> None:
    """x·w0 → y·w1 and y·w2 → x·w3: either pair may join, not both."""
    m = model(
        """g (float[B, S, 12] x, float[B, S, 12] y) => (float[B, S, 24] p, float[B, S, 24] q) {
            a = MatMul(x, w0) s = ReduceProd(a, last) b = MatMul(y, w1) p = Mul(b, s)
            c = MatMul(y, w2) t = ReduceProd(c, last) d = MatMul(x, w3) q = Mul(d, t)
        }""",
        {
            **{f"w{i}": normal(12, 24 if i % 2 else 8, seed=i) for i in range(4)},
            "last": np.array([-1]),
        },
    )
    done = rewrite(m, _PASSES)
    assert done.ops()["Gemm"] == 3
    assert done.error({"x": normal(2, 5, 12), "y": normal(2, 5, 12, seed=9)}) < 2e-6
