"""Norms, gains and scales before a MatMul move into its weights and behind it."""

from __future__ import annotations

import numpy as np
import pytest
from coda_edge.passes import absorb_norm, grow_epilogue, row_moments, run_pipeline
from rewriting import Array, model, normal, rewrite, run

from coda_edge import export, frontend
from coda_edge.epilogue.program import EpilogueProgram

_PASSES = [row_moments.PASS, absorb_norm.PASS]
_CONSTANTS: dict[str, Array] = {
    "w": normal(24, 40, seed=1),
    "c": normal(40, seed=2),
    "g": normal(24, seed=3),
    "b": normal(24, seed=4),
    "eps": np.float32(1e-5),
    "last": np.array([-1]),
    "two": np.float32(2),
}
_NORMS = {
    "LayerNormalization": "n = LayerNormalization <epsilon = 1e-5> (x, g, b)",
    "LayerNormalization without bias": "n = LayerNormalization <epsilon = 1e-5> (x, g)",
    "spelled out": """m = ReduceMean(x, last) d = Sub(x, m) s = Pow(d, two) v = ReduceMean(s, last) e = Add(v, eps)
        r = Sqrt(e) q = Div(d, r) h = Mul(q, g) n = Add(h, b)""",
    "RMSNorm by Reciprocal": """s = Mul(x, x) v = ReduceMean(s, last) e = Add(v, eps) r = Sqrt(e) i = Reciprocal(r)
        q = Mul(x, i) n = Mul(g, q)""",
    "RMSNorm by Div": "s = Pow(x, two) v = ReduceMean(s, last) e = Add(v, eps) r = Sqrt(e) q = Div(x, r) n = Mul(q, g)",
}


@pytest.mark.parametrize("norm", _NORMS)
def test_norm_is_absorbed(norm: str) -> None:
    m = model(
        f"g (float[B, S, 24] x) => (float[B, S, 40] y) {{ {_NORMS[norm]} p = MatMul(n, w) y = Add(p, c) }}", _CONSTANTS
    )
    done = rewrite(m, _PASSES)
    assert done.log.rewrites["absorb_norm"] == 1
    (matmul,) = [n for n in done.graph.nodes if n.op == "MatMul"]
    assert matmul.inputs[0].name == "x"
    assert done.error({"x": normal(3, 7, 24)}) < 2e-6


@pytest.mark.parametrize("ratio", [1.0, 100.0, 1000.0])
def test_a_large_mean_costs_no_more_than_storing_it_does(ratio: float) -> None:
    """Against float64: the error stays within a small multiple of the rounding of x itself, ratio · 2^-24."""
    text = f"g (float[B, 24] x) => (float[B, 40] y) {{ {_NORMS['LayerNormalization']} y = MatMul(n, w) }}"
    m = model(text, _CONSTANTS)
    x = normal(64, 24) + np.float32(ratio)
    wide = x.astype(np.float64)
    d = wide - wide.mean(-1, keepdims=True)
    n = d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5) * _CONSTANTS["g"] + _CONSTANTS["b"]
    expected = n @ _CONSTANTS["w"].astype(np.float64)
    from rewriting import run

    from coda_edge import export

    (found,) = run(export.to_model(rewrite(m, _PASSES).graph), {"x": x})
    assert np.abs(found - expected).max() / np.abs(expected).max() < 4 * (ratio + 1) * 2.0**-23


def test_two_gemms_share_one_norm() -> None:
    m = model(
        f"""g (float[B, S, 24] x) => (float[B, S, 40] y) {{ {_NORMS["LayerNormalization"]}
            p = MatMul(n, w) q = MatMul(n, u) t = Tanh(q) y = Mul(p, t) }}""",
        _CONSTANTS | {"u": normal(24, 40, seed=9)},
    )
    done = rewrite(m, [*_PASSES, grow_epilogue.PASS])
    assert done.ops() == {"RowMoments": 1, "Gemm": 2}
    assert done.error({"x": normal(2, 5, 24)}) < 2e-6


def test_bias_of_the_raw_tensor_stays_where_its_statistics_are_taken() -> None:
    m = model(
        f"""g (float[B, S, 12] a) => (float[B, S, 40] y) {{ t = MatMul(a, u) x = Add(t, b)
            {_NORMS["LayerNormalization"]} y = MatMul(n, w) }}""",
        _CONSTANTS | {"u": normal(12, 24, seed=9)},
    )
    done = rewrite(m, [*_PASSES, grow_epilogue.PASS])
    first, second = [n for n in done.graph.nodes if n.op == "Gemm"]
    assert [s.op for s in EpilogueProgram.parse(first.attrs["epilogue"]).steps] == ["add", "moments"]
    assert second.inputs[0] is first.outputs[0]
    assert done.error({"a": normal(2, 5, 12)}) < 2e-6


def test_a_bias_that_adds_a_dimension_is_not_joined() -> None:
    m = model(
        f"g (float[S, 24] x) => (float[1, S, 40] y) {{ {_NORMS['LayerNormalization']} p = MatMul(n, w) y = Add(p, c) }}",
        _CONSTANTS | {"c": normal(1, 1, 40, seed=2)},
    )
    done = rewrite(m, [*_PASSES, grow_epilogue.PASS])
    assert done.graph.outputs[0].shape[0] == 1
    assert done.error({"x": normal(7, 24)}) < 2e-6


def test_a_norm_that_was_measured_to_be_faster_apart_stays_apart() -> None:
    """What is asked is the norm's width, the columns of all its readers, and whether it takes off a mean."""
    m = model(
        f"""g (float[B, S, 24] x) => (float[B, S, 40] y) {{ {_NORMS["LayerNormalization"]}
            p = MatMul(n, w) q = MatMul(n, u) t = Tanh(q) y = Mul(p, t) }}""",
        _CONSTANTS | {"u": normal(24, 40, seed=9)},
    )
    asked: list[tuple[int, int, bool]] = []

    def never(k: int, n: int, centred: bool) -> bool:
        asked.append((k, n, centred))
        return False

    graph = frontend.normalize(m, None)
    log = run_pipeline(graph, absorbs=never)
    assert asked == [(24, 80, True)] * 2 and log.rewrites["absorb_norm"] == 0
    assert any("measured" in r.reason for r in log.refusals)
    feeds = {"x": normal(2, 5, 24)}
    expected, found = run(m, feeds)[0], run(export.to_model(graph), feeds)[0]
    assert np.abs(found - expected).max() / np.abs(expected).max() < 2e-6
