"""However a norm is spelled, it costs no kernel between the GEMM before it and the GEMM behind it."""

from __future__ import annotations

import numpy as np
import pytest
from coda_edge.passes import PassLog, run_pipeline
from rewriting import Array, Rewritten, model, normal

import coda_edge
from coda_edge import frontend
from coda_edge.bundle import to_bytes

_WIDTH = 24
_CONSTANTS: dict[str, Array] = {
    "u": normal(12, _WIDTH, seed=9),
    "w": normal(_WIDTH, 40, seed=1) / 5,
    "c": normal(40, seed=2),
    "g": normal(_WIDTH, seed=3) + 1,
    "b": normal(_WIDTH, seed=4),
    "less": normal(_WIDTH, seed=3),
    "gc": normal(_WIDTH, 1, seed=3) + 1,
    "bc": normal(_WIDTH, 1, seed=4),
    "spread": np.abs(normal(_WIDTH, seed=8)) + 0.5,
    "eps": np.float32(1e-5),
    "tiny": np.float32(1e-12),
    "one": np.float32(1),
    "two": np.float32(2),
    "half": np.float32(-0.5),
    "width": np.float32(_WIDTH),
    "share": np.float32(1 / _WIDTH),
    "unbiased": np.float32(1 / (_WIDTH - 1)),
    "root": np.float32(_WIDTH**0.5),
    "last": np.array([-1]),
    "first": np.array([1]),
    "new": np.array([2]),
    "flat": np.array([-1, _WIDTH]),
    "back": np.array([-1, 7, _WIDTH]),
}
_MEAN = "m = ReduceMean(x, last) d = Sub(x, m) s = Mul(d, d)"
_VARIANCE = f"{_MEAN} v = ReduceMean(s, last) e = Add(v, eps)"
_SHIFT = "h = Mul(q, g) y0 = Add(h, b)"
_ROOT = f"r = Sqrt(e) q = Div(d, r) {_SHIFT}"
_SPELLINGS = {
    "LayerNormalization": "y0 = LayerNormalization <epsilon = 1e-5> (x, g, b)",
    "by Reciprocal": f"{_VARIANCE} r = Sqrt(e) i = Reciprocal(r) q = Mul(d, i) y0 = Mul(q, g)",
    "by Pow": f"{_VARIANCE} i = Pow(e, half) q = Mul(d, i) y0 = Mul(q, g)",
    "sums over the width": f"""t = ReduceSum(x, last) m = Div(t, width) d = Sub(x, m) s = Pow(d, two) o = ReduceSum(s, last)
        v = Mul(o, share) e = Add(v, eps) {_ROOT}""",
    "sum of squares": f"m = ReduceMean(x, last) d = Sub(x, m) o = ReduceSumSquare(d, last) v = Div(o, width) e = Add(v, eps) {_ROOT}",
    "unbiased": f"{_MEAN} o = ReduceSum(s, last) v = Mul(o, unbiased) k = Sqrt(v) r = Add(k, eps) q = Div(d, r) y0 = Mul(q, g)",
    "mean of squares less square of mean": f"""m = ReduceMean(x, last) d = Sub(x, m) s = Mul(x, x) k = ReduceMean(s, last)
        l = Mul(m, m) v = Sub(k, l) e = Add(v, eps) {_ROOT}""",
    "axes dropped and inserted": f"""l = ReduceMean <keepdims = 0> (x, last) m = Unsqueeze(l, new) d = Sub(x, m) s = Mul(d, d)
        o = ReduceMean <keepdims = 0> (s, last) v = Unsqueeze(o, new) e = Add(v, eps) {_ROOT}""",
    "axes inserted late": f"""l = ReduceMean <keepdims = 0> (x, last) m = Unsqueeze(l, new) d = Sub(x, m) s = Mul(d, d)
        o = ReduceMean <keepdims = 0> (s, last) e = Add(o, eps) k = Sqrt(e) r = Unsqueeze(k, new) q = Div(d, r) {_SHIFT}""",
    "mean negated": f"""m = ReduceMean(x, last) l = Neg(m) d = Add(x, l) s = Mul(d, d) v = ReduceMean(s, last) e = Add(v, eps) {_ROOT}""",
    "gain first": f"{_VARIANCE} r = Sqrt(e) h = Mul(d, g) q = Div(h, r) y0 = Add(q, b)",
    "scale and shift of rows": f"""{_VARIANCE} r = Sqrt(e) i = Reciprocal(r) k = Mul(x, i) l = Mul(m, i) q = Sub(k, l)
        h = Mul(q, g) y0 = Add(h, b)""",
    "RMSNorm, gain 1 + g": """s = Mul(x, x) v = ReduceMean(s, last) e = Add(v, eps) r = Sqrt(e) i = Div(one, r)
        q = Mul(x, i) k = Add(less, one) y0 = Mul(q, k)""",
    "RMSNorm, gain on the row": """s = Mul(x, x) v = ReduceMean(s, last) e = Add(v, eps) r = Sqrt(e) i = Reciprocal(r)
        k = Mul(g, i) y0 = Mul(x, k)""",
    "L2, bounded": "l = ReduceL2(x, last) z = Max(l, tiny) q = Div(x, z) k = Mul(q, root) y0 = Mul(k, g)",
    "L2, expanded": """l = ReduceL2 <keepdims = 0> (x, last) z = Clip(l, tiny) k = Unsqueeze(z, new) o = Shape(x)
        r = Expand(k, o) q = Div(x, r) y0 = Mul(q, g)""",
    "LpNormalization": "q = LpNormalization <axis = -1, p = 2> (x) y0 = Mul(q, g)",
    "L1": "q = LpNormalization <axis = -1, p = 1> (x) y0 = Mul(q, g)",
    "MeanVarianceNormalization": "y0 = MeanVarianceNormalization <axes = [2]> (x)",
    "channels first": """k = Transpose <perm = [0, 2, 1]> (x) m = ReduceMean(k, first) d = Sub(k, m) s = Mul(d, d)
        v = ReduceMean(s, first) e = Add(v, eps) r = Sqrt(e) q = Div(d, r) h = Mul(q, gc) l = Add(h, bc)
        y0 = Transpose <perm = [0, 2, 1]> (l)""",
    "batch norm": """k = Transpose <perm = [0, 2, 1]> (x) l = BatchNormalization(k, g, b, b, spread)
        y0 = Transpose <perm = [0, 2, 1]> (l)""",
    "flattened": f"z = Reshape(x, flat) {_VARIANCE.replace('(x', '(z')} r = Sqrt(e) q = Div(d, r) h = Mul(q, g) l = Add(h, b) y0 = Reshape(l, back)",
    "scaled and dropped out": "h = LayerNormalization (x, g, b) k = Mul(h, root) l = Dropout(k) y0 = Identity(l)",
    "LayerScale before": "k = Mul(x, less) y0 = LayerNormalization(k, g, b)",
}


def _through_pipeline(text: str, opset: int = 20) -> Rewritten:
    """A projection and a residual, which make x; ``text``, which makes y0 of it; and another projection."""
    m = model(
        f"""g (float[B, 7, 12] a, float[B, 7, {_WIDTH}] residual) => (float[B, 7, 40] y)
        {{ p = MatMul(a, u) x = Add(p, residual) {text} y1 = MatMul(y0, w) y = Add(y1, c) }}""",
        _CONSTANTS,
        opset,
    )
    graph = frontend.normalize(frontend.load(m), None)
    log: PassLog = run_pipeline(graph)
    frontend.infer(graph)
    return Rewritten(m, graph, log)


@pytest.mark.parametrize("spelling", _SPELLINGS)
def test_a_norm_costs_no_kernel(spelling: str) -> None:
    done = _through_pipeline(_SPELLINGS[spelling])
    assert done.ops() == {"Gemm": 2}
    assert done.error({"a": normal(3, 7, 12), "residual": normal(3, 7, _WIDTH, seed=5)}) < 3e-6


@pytest.mark.parametrize(("offset", "kernels"), [(10, 2), (10_000, 3)])
def test_a_mean_that_is_too_large_for_the_weights_is_taken_off_before(offset: int, kernels: int) -> None:
    """Whole numbers, so that float64 knows what float32 should have given; weights to which the rounding of a mean is nothing."""
    gain, weights = (_CONSTANTS[name].astype(np.float64) for name in ("g", "w"))
    balanced = (weights - gain @ weights / gain.sum()).astype(np.float32)
    m = model(
        f"""g (float[B, S, {_WIDTH}] a) => (float[B, S, 40] y)
        {{ z = Round(a) x = Add(z, offset) {_SPELLINGS["LayerNormalization"]} y = MatMul(y0, w) }}""",
        _CONSTANTS | {"offset": np.float32(offset), "w": balanced},
    )
    done = coda_edge.optimize(m)
    assert done.report.kernels == kernels
    assert any("standard deviations off zero" in u.reason for u in done.report.unfused) == (kernels == 3)
    a = normal(3, 5, _WIDTH, seed=7)
    x = np.round(a.astype(np.float64))
    centred = x - x.mean(-1, keepdims=True)
    norm = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * gain + _CONSTANTS["b"]
    expected = norm @ balanced.astype(np.float64)
    with coda_edge.Session(to_bytes(done.bundle)) as session:
        (found,) = session.run(None, {"a": a})
    assert np.abs(found - expected).max() / np.abs(expected).max() < 2e-6


def test_a_shift_that_nobody_measured_is_reported() -> None:
    m = model(
        f"g (float[B, {_WIDTH}] x) => (float[B, 40] y) {{ {_SPELLINGS['LayerNormalization']} y = MatMul(y0, w) }}",
        _CONSTANTS,
    )
    assert any("not measured" in note for note in coda_edge.optimize(m, verify=False).report.notes)
    assert not coda_edge.optimize(m).report.notes


_BETWEEN = {
    "a gate for each row": ("gate = ReduceMean(a, last) k = Mul(n, gate)", {"ReduceMean": 1, "Gemm": 2}),
    "a gate for each batch entry": ("gate = ReduceMean(a, both) k = Mul(n, gate)", {"ReduceMean": 1, "Gemm": 2}),
    "a shift for each position": ("k = Add(n, position)", {"Map": 1, "Gemm": 2}),
    "a temperature": ("k = Div(n, temperature)", {"Gemm": 2}),
}


@pytest.mark.parametrize("between", _BETWEEN)
def test_numbers_of_rows_move_behind_the_product(between: str) -> None:
    text, kernels = _BETWEEN[between]
    m = model(
        f"""g (float[B, 7, 12] a, float[1, 7, 1] position, float[1] temperature) => (float[B, 7, 40] y)
        {{ x = MatMul(a, u) n = LayerNormalization (x, g, b) {text} y = MatMul(k, w) }}""",
        _CONSTANTS | {"both": np.array([1, 2])},
    )
    graph = frontend.normalize(frontend.load(m), None)
    done = Rewritten(m, graph, run_pipeline(graph))
    assert done.ops() == kernels
    feeds = {"a": normal(3, 7, 12), "position": normal(1, 7, 1), "temperature": np.array([1.7], np.float32)}
    assert done.error(feeds) < 3e-6


def test_layers_share_norms_and_residuals() -> None:
    """Post-norm: the norm's result goes to a product and, rebuilt from the raw tensor, to the next residual."""
    m = model(
        f"""g (float[B, 7, 12] a, float[B, 7, {_WIDTH}] residual) => (float[B, 7, 40] y) {{
            p = MatMul(a, u) scaled = Mul(residual, two) x = Add(p, scaled) n1 = LayerNormalization (x, g, b)
            h = MatMul(n1, v) t = Tanh(h) f = MatMul(t, v) r = Add(f, n1) n2 = LayerNormalization (r, g, b) y = MatMul(n2, w) }}""",
        _CONSTANTS | {"v": normal(_WIDTH, _WIDTH, seed=6) / 5},
    )
    graph = frontend.normalize(frontend.load(m), None)
    done = Rewritten(m, graph, run_pipeline(graph))
    assert done.ops() == {"Gemm": 4}
    assert done.error({"a": normal(3, 7, 12), "residual": normal(3, 7, _WIDTH, seed=5)}) < 3e-6


@pytest.mark.parametrize(
    "text",
    [
        "s = ReduceMean <keepdims = 0> (x, last) y = Add(s, several)",
        "r = Squeeze(x, middle) s = ReduceSum(r, middle) y = Mul(s, several)",
    ],
)
def test_a_constant_of_one_number_may_repeat_a_statistic(text: str) -> None:
    constants = {"several": np.full(5, 1 / 7, np.float32), "last": np.array([2]), "middle": np.array([1])}
    m = model(f"g (float[B, 1, 7] x) => (float[B, 5] y) {{ {text} }}", constants)
    done = Rewritten(m, frontend.normalize(frontend.load(m), None), PassLog())
    feeds = {"x": normal(3, 1, 7)}
    assert done.outputs(feeds)[0].shape == (3, 5)
    assert done.error(feeds) < 1e-6
