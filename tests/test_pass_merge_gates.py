"""A gate and what it gates become one Gemm with a pairwise epilogue."""

from __future__ import annotations

import numpy as np
import pytest
from coda_edge.passes import absorb_norm, grow_epilogue, merge_gates, merge_projections, row_moments
from rewriting import Array, model, normal, rewrite

from coda_edge.epilogue.program import EpilogueProgram

_PASSES = [row_moments.PASS, absorb_norm.PASS, grow_epilogue.PASS, merge_gates.PASS, merge_projections.PASS]
_CONSTANTS: dict[str, Array] = {
    "wg": normal(12, 20, seed=1),
    "wu": normal(12, 20, seed=2),
    "bg": normal(20, seed=3),
    "bu": normal(20, seed=4),
    "one": np.float32(1),
    "half": np.float32(0.5),
    "root": np.float32(np.sqrt(2)),
    "g": normal(12, seed=5),
    "eps": np.float32(1e-6),
    "last": np.array([-1]),
}
_GATES = {
    "SwiGLU": "s = Sigmoid(a) h = Mul(a, s) y = Mul(h, b)",
    "GeGLU": "d = Div(a, root) e = Erf(d) f = Add(e, one) i = Mul(a, f) h = Mul(i, half) y = Mul(b, h)",
    "ReGLU": "h = Relu(a) y = Mul(h, b)",
    "bilinear": "y = Mul(a, b)",
}


@pytest.mark.parametrize("gate", _GATES)
@pytest.mark.parametrize("bias", [True, False])
def test_two_projections_become_one(gate: str, bias: bool) -> None:
    products = (
        "p = MatMul(x, wg) a = Add(p, bg) q = MatMul(x, wu) b = Add(q, bu)"
        if bias
        else "a = MatMul(x, wg) b = MatMul(x, wu)"
    )
    m = model(f"g (float[B, S, 12] x) => (float[B, S, 20] y) {{ {products} {_GATES[gate]} }}", _CONSTANTS)
    done = rewrite(m, _PASSES)
    assert done.ops() == {"Gemm": 1}
    steps = [s.op for s in EpilogueProgram.parse(done.node("Gemm").attrs["epilogue"]).steps]
    assert {"even", "odd"} <= set(steps)
    assert done.error({"x": normal(3, 7, 12)}) < 2e-6


def test_the_norm_before_both_is_applied_once_a_row() -> None:
    m = model(
        f"""g (float[B, S, 12] x) => (float[B, S, 20] y) {{
            s0 = Mul(x, x) v = ReduceMean(s0, last) e0 = Add(v, eps) r = Sqrt(e0) n0 = Div(x, r) n = Mul(n0, g)
            a = MatMul(n, wg) b = MatMul(n, wu) {_GATES["SwiGLU"]} }}""",
        _CONSTANTS,
    )
    done = rewrite(m, _PASSES)
    assert done.ops()["Gemm"] == 1
    assert [p.kind.value for p in EpilogueProgram.parse(done.node("Gemm").attrs["epilogue"]).params] == ["tile", "row"]
    assert done.error({"x": normal(3, 7, 12)}) < 2e-6


def test_a_product_that_others_read_too_stays() -> None:
    m = model(
        f"g (float[B, S, 12] x) => (float[B, S, 20] y, float[B, S, 20] z) {{ a = MatMul(x, wg) b = MatMul(x, wu) {_GATES['ReGLU']} z = Tanh(b) }}",
        _CONSTANTS,
    )
    done = rewrite(m, _PASSES)
    assert done.log.rewrites["merge_gates"] == 0
    assert done.error({"x": normal(3, 7, 12)}) < 2e-6
