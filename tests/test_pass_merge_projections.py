"""Gemms over one tensor that do the same become one; others stay apart."""

from __future__ import annotations

import numpy as np
from coda_edge.passes import grow_epilogue, merge_projections
from rewriting import Array, model, normal, rewrite

from coda_edge.epilogue.program import EpilogueProgram

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


def test_different_epilogues_stay_apart() -> None:
    m = model(
        "g (float[B, S, 12] x) => (float[B, S, 8] y, float[B, S, 24] z) { p = MatMul(x, w0) y = Tanh(p) q = MatMul(x, w1) z = Erf(q) }",
        _CONSTANTS,
    )
    done = rewrite(m, _PASSES)
    assert done.ops() == {"Gemm": 2}
    assert done.error(_FEEDS) < 2e-6


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
