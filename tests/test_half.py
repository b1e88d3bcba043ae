"""float16 and bfloat16 models: computed in float32, half only where a caller sees it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from graphs import load_fixture, run
from halves import to_half
from onnx import TensorProto
from rewriting import model, normal

from coda_edge import verify
from coda_edge.driver import Optimized, optimize
from coda_edge.export import to_model
from coda_edge.frontend import load, normalize
from coda_edge.frontend.half import has_half, promote
from coda_edge.inputs import generate_inputs
from coda_edge.session import Session
from coda_edge.verify import ROUNDING, TOLERANCE


def _session(optimized: Optimized, tmp_path) -> Session:
    optimized.save(tmp_path / "m.coda")
    return Session(str(tmp_path / "m.coda"), threads=1)


def _ops(m: onnx.ModelProto) -> list[str]:
    return sorted(n.op for n in normalize(load(m)).nodes if n.op != "Cast")


@pytest.mark.parametrize(
    ("name", "element"),
    [
        ("bert.sdpa.ts17", TensorProto.BFLOAT16),
        ("llama.sdpa.dyn20", TensorProto.FLOAT16),
        ("gpt2.sdpa.dyn23", TensorProto.BFLOAT16),
    ],
)
def test_a_half_model_comes_to_the_normal_form_of_its_float32_twin(name: str, element: int) -> None:
    graph = normalize(load(to_half(load_fixture(name), element)))
    assert sorted(n.op for n in graph.nodes if n.op != "Cast") == _ops(load_fixture(name))
    floats = {str(np.dtype(t.dtype)) for n in graph.nodes for t in n.outputs if t not in graph.outputs}
    assert not floats & {"float16", "bfloat16"}


@pytest.mark.parametrize("keep_io", [True, False])
def test_what_onnxruntime_converted_comes_to_the_same_normal_form(keep_io: bool) -> None:
    """Its converter leaves float32 islands with casts around them."""
    converter = pytest.importorskip("onnxruntime.transformers.float16")
    mixed = converter.convert_float_to_float16(load_fixture("llama.sdpa.ts17"), keep_io_types=keep_io)
    assert _ops(mixed) == _ops(load_fixture("llama.sdpa.ts17"))


def test_external_half_weights(tmp_path) -> None:
    half = to_half(load_fixture("unit.swiglu.dyn20"))
    onnx.save_model(half, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    graphs = [
        normalize(load(source)) for source in (str(tmp_path / "m.onnx"), to_half(load_fixture("unit.swiglu.dyn20")))
    ]
    values = [{n: t.values for n, t in g.tensors().items() if isinstance(t, gs.Constant)} for g in graphs]
    assert values[0].keys() == values[1].keys()
    assert all(np.array_equal(values[0][n], values[1][n]) for n in values[0])


def test_a_model_without_half_is_left_alone() -> None:
    m = load(load_fixture("unit.swiglu.dyn20"))
    assert not has_half(m) and promote(m) is m


@pytest.mark.parametrize(
    "body",
    [
        "y = Cast <to = 10> (x)",
        "s = Shape (x) c = ConstantOfShape <value = float16[1] {2}> (s) f = Cast <to = 1> (c) y = Mul (x, f)",
        "h = Cast <to = 10> (x) z = CastLike (x, h) y = Cast <to = 1> (z)",
        "i = EyeLike <dtype = 10> (x) f = Cast <to = 1> (i) y = Mul (x, f)",
    ],
)
def test_half_is_found_wherever_a_model_makes_it(body: str) -> None:
    out = "float16" if "to = 10> (x)" in body and "CastLike" not in body else "float"
    m = load(model(f"g (float[3, 3] x) => ({out}[3, 3] y) {{ {body} }}", {}))
    assert has_half(m)
    assert not has_half(promote(m))


def test_weights_of_a_reference_are_handed_over_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    m = promote(load(to_half(load_fixture("unit.swiglu.dyn20"), TensorProto.BFLOAT16)))
    feeds = generate_inputs(m)
    inline = verify.ort_session(m).run(None, feeds)
    monkeypatch.setattr(verify, "MAPPED", 0)
    assert all(np.array_equal(a, b) for a, b in zip(verify.ort_session(m).run(None, feeds), inline, strict=True))


def test_a_float64_model_is_computed_in_float32_and_says_so(tmp_path) -> None:
    m = model(
        "g (double[n, 40] x) => (double[n, 30] y) { h = MatMul (x, w) e = Exp (h) y = Add (e, b) }",
        {"w": normal(40, 30).astype(np.float64) / 7, "b": normal(30).astype(np.float64)},
    )
    x = np.random.default_rng(0).standard_normal((5, 40))
    optimized = optimize(m)
    assert "float64 model: it is computed in float32" in optimized.report.notes
    with _session(optimized, tmp_path) as session:
        (y,) = session.run(None, {"x": x})
    (expected,) = run(m, {"x": x})
    assert y.dtype == np.float64 and np.abs(y - expected).max() <= 1e-6 * np.abs(expected).max()


def test_float64_in_a_float32_model_stays() -> None:
    """A difference of large numbers, taken in float64 on purpose."""
    m = model(
        "g (float[n] x) => (float[n] y) { a = Cast <to = 11> (x) b = Add (a, c) d = Sub (b, c) y = Cast <to = 1> (d) }",
        {"c": np.float64(1e9)},
    )
    x = np.array([0.125, 3.7], np.float32)
    assert np.abs(run(to_model(normalize(load(m))), {"x": x})[0] - x).max() < 1e-6


def test_a_wrongly_declared_rank_is_a_note() -> None:
    m = model("g (float[n, 4, 8] x) => (float[n, 6] y) { y = MatMul (x, w) }", {"w": normal(8, 6)})
    report = optimize(m, verify=False).report
    assert report.notes == ["output 'y' is declared with 2 dimensions and has 3, which it is given"]


def test_bfloat16_ends_are_verified_after_each_pass() -> None:
    """A norm, whose numbers are measured too; onnxruntime takes and gives no arrays of bfloat16."""
    m = model(
        """
        g (bfloat16[n, 24] x) => (bfloat16[n, 20] y, int64[2] s) {
            h = LayerNormalization (x, gain, bias)
            y = MatMul (h, w)
            s = Shape (y)
        }
        """,
        {n: normal(*d, seed=i).astype(ml_dtypes.bfloat16) for i, (n, d) in enumerate(_NORM_WEIGHTS.items())},
    )
    report = optimize(m, verify="each").report
    assert report.max_rel_error is not None and report.max_rel_error <= TOLERANCE + ROUNDING["bfloat16"]


_NORM_WEIGHTS = {"gain": (24,), "bias": (24,), "w": (24, 20)}


def test_an_if_inside_is_promoted() -> None:
    m = load(
        model(
            """
            g (float16[n, 4] x) => (float16[n, 4] y) {
                s = Shape (x) d = Gather (s, zero) c = Greater (d, zero)
                y = If (c) <then_branch = a () => (float16[n, 4] p) { p = Add (x, w) },
                            else_branch = b () => (float16[n, 4] q) { q = Sub (x, w) }>
            }
            """,
            {"w": np.float16(1.5), "zero": np.int64(0)},
        )
    )
    assert not has_half(promote(m))
    x = np.array([[1, 2, 3, 4]], np.float16)
    assert np.array_equal(run(promote(m), {"x": x.astype(np.float32)})[0], x.astype(np.float32) + 1.5)


def test_inputs_and_outputs_keep_their_dtype_and_values(tmp_path) -> None:
    """A 16-bit float that goes in comes out, an input that is an output too."""
    m = model(
        "g (float16[n, 5] x) => (float16[n, 5] x2, float16[n, 5] y) { x2 = Identity (x) y = Mul (x, two) }",
        {"two": np.float16(2)},
    )
    x = np.array([[0, -0.0, 6e-8, 65504, np.inf], [1, np.nan, -6.1e-5, 40000, -2]], np.float16)
    with _session(optimize(m, verify=False), tmp_path) as session:
        assert [i.type for i in (*session.get_inputs(), *session.get_outputs())] == ["tensor(float16)"] * 3
        same, twice = session.run(None, {"x": x})
    assert same.dtype == np.float16 and np.array_equal(same, x, equal_nan=True)
    with np.errstate(over="ignore"):
        assert np.array_equal(twice, x * np.float16(2), equal_nan=True)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_row_statistics_of_large_values(norm: str, tmp_path) -> None:
    """|x| up to 6e4: squares are beyond float16, sums of them too."""
    center = "x" if norm == "rms" else "Sub (x, mean)"
    m = model(
        f"""
        g (float16[n, 48] x) => (float16[n, 20] y) {{
            mean = ReduceMean <keepdims = 1> (x, last)
            c = {center if norm == "layer" else "Identity (x)"}
            s = Mul (c, c)
            v = ReduceMean <keepdims = 1> (s, last)
            e = Add (v, eps)
            d = Sqrt (e)
            h = Div (c, d)
            n = Mul (h, gain)
            y = MatMul (n, w)
        }}
        """,
        {
            "last": np.array([1]),
            "eps": np.float16(1e-5),
            "gain": normal(48).astype(np.float16),
            "w": (normal(48, 20) / 7).astype(np.float16),
        },
    )
    values = {i.name: onnx.numpy_helper.to_array(i).astype(np.float64) for i in m.graph.initializer}
    x = (np.random.default_rng(0).uniform(-6e4, 6e4, (7, 48))).astype(np.float16)
    wide = x.astype(np.float64)
    centred = wide - (wide.mean(1, keepdims=True) if norm == "layer" else 0)
    expected = (centred / np.sqrt((centred**2).mean(1, keepdims=True) + values["eps"]) * values["gain"]) @ values["w"]
    optimized = optimize(m)
    assert "other infinities or NaN" in optimized.report.notes[0] or "differs by" in optimized.report.notes[0]
    with _session(optimized, tmp_path) as session:
        (y,) = session.run(None, {"x": x})
    assert np.abs(y - expected).max() <= 2.0**-10 * np.abs(expected).max()


def test_what_half_would_round_is_not_rounded() -> None:
    """As documented: 1e9 cast to float16 stays 1e9, a sum beyond 65504 stays finite; stored infinities stay."""
    m = model(
        """
        g (float[n, 4] x) => (float[n, 4] y, float[n, 4] z, float[n, 4] u) {
            h = Cast <to = 10> (x)
            y = Cast <to = 1> (h)
            s = Add (h, most)
            z = Cast <to = 1> (s)
            t = Add (h, infinite)
            u = Cast <to = 1> (t)
        }
        """,
        {"most": np.float16(65504), "infinite": np.float16(-np.inf)},
    )
    x = np.array([[-1e9, 60000, 1.0001, 0]], np.float32)
    y, z, u = run(to_model(normalize(load(m))), {"x": x})
    assert np.array_equal(y, x)
    assert np.array_equal(z, x + np.float32(65504))
    assert np.isneginf(u).all()


@pytest.mark.parametrize("name", ["llama_kv.sdpa.ts17", "gpt2.sdpa.ts17"])
def test_kernels_of_float16_models_are_verified(name: str) -> None:
    report = optimize(to_half(load_fixture(name))).report
    assert report.max_rel_error is not None and report.max_rel_error <= TOLERANCE + ROUNDING["float16"]
    assert "judged by onnxruntime on the same model in float32" in report.notes[0]


@pytest.mark.parametrize("element", ["float16", "bfloat16"])
def test_a_guard_against_overflow_clips(element: str, tmp_path) -> None:
    """As T5 has it. Nothing overflows in float32, so that the bound is the largest number, for an infinite input as well."""
    dtype = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[element]
    most = float(ml_dtypes.finfo(dtype).max)
    m = model(
        f"""
        g ({element}[n, 32] x) => ({element}[n, 48] y) {{
            h = MatMul (x, w)
            wide = Cast <to = 11> (h)
            infinite = IsInf (wide)
            ones = Cast <to = 7> (infinite)
            count = ReduceSum <keepdims = 0> (ones)
            any = Cast <to = 9> (count)
            high = Where (any, lower, most)
            low = Neg (high)
            y = Clip (h, low, high)
        }}
        """,
        {"w": normal(32, 48).astype(dtype), "lower": dtype(most - 1000), "most": dtype(most)},
    )
    with _session(optimize(m), tmp_path) as session:
        x = normal(5, 32, seed=1).astype(dtype)
        (y,) = session.run(None, {"x": x})
        expected = x.astype(np.float64) @ normal(32, 48).astype(dtype).astype(np.float64)
        assert np.abs(y.astype(np.float64) - expected).max() <= ROUNDING[element] * np.abs(expected).max()
        x[3, 7] = np.inf
        (y,) = session.run(None, {"x": x})
    assert np.array_equal(np.abs(y[3]), np.full(48, dtype(most)))


_GUARDED = """g (float16[N, 6] x) => (float16[N, 4] y) {{
    p = MatMul(x, w) {test} c = Where(any, low, high) n = Neg(c) h = Clip(p, n, c) y = MatMul(h, v)
}}"""
_TESTS = {
    "a sum": "d = Cast <to = 11> (p) i = IsInf(d) k = Cast <to = 7> (i) r = ReduceSum <keepdims = 0> (k) any = Greater(r, none)",
    "a maximum": "d = Cast <to = 1> (p) i = IsInf(d) k = Cast <to = 7> (i) r = ReduceMax <keepdims = 0> (k) any = Cast <to = 9> (r)",
}


def test_infinities_of_a_model_are_asked_for(tmp_path) -> None:
    """A mask is infinite though nothing overflows: whether it is so anywhere is computed."""
    m = model(
        """
        g (float16[n, 4] x, bool[n, 4] m) => (float16[n, 4] y) {
            h = Where (m, x, lowest) i = IsInf (h) k = Cast <to = 7> (i) r = ReduceMax <keepdims = 0> (k) any = Cast <to = 9> (r)
            y = Where (any, zero, h)
        }
        """,
        {"lowest": np.array([1, -np.inf, np.nan, 2], np.float16), "zero": np.float16(0)},
    )
    x = normal(3, 4).astype(np.float16)
    with _session(optimize(m), tmp_path) as session:
        for mask in (np.ones((3, 4), bool), np.arange(12).reshape(3, 4) != 5):
            (y,) = session.run(None, {"x": x, "m": mask})
            assert np.array_equal(y, x if mask.all() else np.zeros_like(x))


@pytest.mark.parametrize("case", _TESTS)
def test_a_clamp_against_overflow_costs_no_kernel(case: str) -> None:
    """As in T5: the bound is lower if anything is infinite, which in float32 nothing becomes."""
    half = np.float16
    constants = {
        "w": normal(6, 5, seed=1).astype(half),
        "v": normal(5, 4, seed=2).astype(half),
        "low": half(64504),
        "high": half(65504),
        "none": np.int64(0),
    }
    m = model(_GUARDED.format(test=_TESTS[case]), constants)
    assert _ops(m) == ["MatMul", "MatMul", "Max", "Min"]
    x = normal(3, 6).astype(half)
    (found,) = run(to_model(normalize(load(m))), {"x": x})
    (expected,) = run(m, {"x": x})
    assert np.abs(found.astype(np.float64) - expected).max() <= 2e-3 * np.abs(expected).max()


def test_a_test_of_each_element_is_no_test_of_all() -> None:
    text = "g (float16[N, 6] x) => (float16[N, 6] y) { p = Add(x, one) d = Cast <to = 1> (p) i = IsInf(d) y = Where(i, one, p) }"
    m = model(text, {"one": np.float16(1)})
    x = np.array([[np.inf, 1, -np.inf, 2, 3, 4]], np.float16)
    (found,) = run(to_model(normalize(load(m))), {"x": x})
    assert found.tolist() == [[1, 2, 1, 3, 4, 5]]
