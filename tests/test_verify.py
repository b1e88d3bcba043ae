"""What verification allows: 1e-4, and more only where a model itself turns a rounding into more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from rewriting import model, normal

from coda_edge.errors import VerificationError
from coda_edge.inputs import input_specs
from coda_edge.rounding import nudged, share_unequal
from coda_edge.verify import TOLERANCE, Runner, Verifier, ort_session


def _plain() -> onnx.ModelProto:
    return model("g (float[n, 8] x) => (float[n, 6] y) { y = MatMul (x, w) }", {"w": normal(8, 6)})


def _quantised(quantum: float = 0.01) -> onnx.ModelProto:
    """Every value lies on the border of the two largest quanta up to 1."""
    return model(
        """
        g (float[n, 4] x) => (float[n, 1] y) {
            p = ReduceMax <keepdims = 1> (x, last)
            one = Div (p, p)
            half = Mul (one, w)
            q = QuantizeLinear (half, s, z)
            y = DequantizeLinear (q, s, z)
        }
        """,
        {
            "w": np.full(1, 1 - quantum / 2, np.float32),
            "s": np.float32(quantum),
            "z": np.uint8(0),
            "last": np.array([1]),
        },
    )


def _layer(dequantised: int = 117, label: bool = False) -> onnx.ModelProto:
    """A quantised layer, or the label that it gives; ``dequantised``: the zero point of the activations, 117 for one that is right."""
    return model(
        f"""
        g (float[n, 24] x) => ({"int64[n, 1]" if label else "float[n, 6]"} y) {{
            q = QuantizeLinear (x, s, z)
            a = DequantizeLinear (q, s, z2)
            {"c" if label else "y"} = MatMul (a, w)
            {"y = ArgMax <axis = 1> (c)" if label else ""}
        }}
        """,
        {"w": normal(24, 6), "s": np.float32(0.03), "z": np.uint8(117), "z2": np.uint8(dequantised)},
    )


def _run(m: onnx.ModelProto) -> Runner:
    session = ort_session(m)
    return lambda names, feeds: session.run(list(names), dict(feeds))


def _less(m: onnx.ModelProto, what: float, rows: int = 0) -> Runner:
    """``m`` in onnxruntime, less ``what`` where there are at least ``rows`` rows."""
    run = _run(m)
    return lambda names, feeds: [run(names, feeds)[0] - np.float32(what if len(feeds["x"]) >= rows else 0)]


def _verifier(m: onnx.ModelProto) -> Verifier:
    return Verifier.of_model(m, input_specs(m))


def test_a_model_that_does_not_quantise_has_no_spread() -> None:
    verifier = _verifier(_plain())
    assert verifier.tolerances == {"y": TOLERANCE} and verifier.spread is None
    assert verifier.check(_run(_plain()), "itself") == 0.0 and verifier.notes() == []


def test_a_border_of_quanta_allows_a_quantum_and_says_so() -> None:
    m = _quantised()
    verifier = _verifier(m)
    assert verifier.spread is not None and 0.009 < verifier.spread.outputs["y"] < 0.011
    assert verifier.check(_less(m, 0.01), "a quantum less") > 0.009
    assert "0 of 12 cases agree" in verifier.notes()[0] and "output 'y' differs by up to 1.0e-02" in verifier.notes()[0]
    with pytest.raises(VerificationError, match=r"changes output 'y' by .* \(at most 3e-02 is allowed\)"):
        verifier.check(_less(m, 0.04), "four quanta less")
    assert verifier.check(_run(m), "itself") == 0.0 and verifier.notes() == []


def test_coarse_quanta_are_no_excuse_unless_some_inputs_agree() -> None:
    m = _quantised(0.2)
    verifier = _verifier(m)
    with pytest.raises(VerificationError, match=r"changes output 'y' by .* \(at most 5e-02 is allowed\)"):
        verifier.check(_less(m, 0.2), "a quantum less")
    assert verifier.check(_less(m, 0.2, rows=2), "a quantum less for large inputs") > 0.19
    assert "7 of 12 cases agree" in verifier.notes()[0]


@pytest.mark.parametrize("label", [False, True])
def test_a_wrong_zero_point_is_found(label: bool) -> None:
    verifier = _verifier(_layer(label=label))
    assert verifier.check(_run(_layer(label=label)), "itself") == 0.0
    with pytest.raises(VerificationError, match="changes output 'y' by"):
        verifier.check(_run(_layer(119 if not label else 250, label)), "a wrong zero point")


def test_labels_are_compared_by_how_many_are_unequal() -> None:
    assert share_unequal(np.array([3, 900, 5, 5]), np.array([3, 1, 5, 5])) == 0.25
    assert share_unequal(np.array([3]), np.array([[3]])) == float("inf")
    assert share_unequal(np.zeros(0, np.int64), np.zeros(0, np.int64)) == 0.0


def test_nudging_moves_float_weights_by_about_a_rounding() -> None:
    (w, s, *_) = (onnx.numpy_helper.to_array(i) for i in _quantised().graph.initializer)
    for moved in nudged(_quantised()):
        (w2, s2, *_) = (onnx.numpy_helper.to_array(i) for i in moved.graph.initializer)
        assert np.abs(w2 / w - 1).max() < 1e-5 and abs(s2 / s - 1) < 1e-5
        assert (w2 != w).any() or s2 != s


def _ordered(scores: npt.NDArray[np.float32]) -> onnx.ModelProto:
    """The rows of x in order of one score each, whatever x is, and their sum."""
    return model(
        """
        g (float[n, 6, 4] x) => (float[n, 6, 4] y, float[n, 1, 4] total) {
            zero = Constant <value_float = 0.0> ()
            none = Mul (x, zero)
            row = ReduceSum <keepdims = 0> (none, last)
            score = Add (row, scores)
            s, i = TopK <axis = -1> (score, k)
            at = Unsqueeze (i, last)
            picked = Expand (at, width)
            y = GatherElements <axis = 1> (x, picked)
            total = ReduceSum <keepdims = 1> (y, rows)
        }
        """,
        {
            "scores": scores,
            "last": np.array([-1]),
            "rows": np.array([1]),
            "k": np.array([6]),
            "width": np.array([1, 1, 4]),
        },
    )


def test_equal_scores_may_be_ordered_otherwise() -> None:
    m = _ordered(np.ones(6, np.float32))
    verifier = _verifier(m)
    run = _run(m)

    def otherwise(names: Sequence[str], feeds: Mapping[str, npt.NDArray[np.float32]]) -> list[npt.NDArray[np.float32]]:
        y, total = run(names, feeds)
        return [y[:, ::-1], total]

    assert verifier.check(otherwise, "another order") == 0.0
    assert (
        "output 'y' is compared by its values in ascending order" in verifier.notes()[0] and len(verifier.notes()) == 1
    )
    with pytest.raises(VerificationError, match="changes output 'y' by"):
        verifier.check(
            lambda names, feeds: [2 * v for v in otherwise(names, feeds)][:1] + run(names, feeds)[1:], "twice"
        )
    with pytest.raises(VerificationError, match="changes output 'total' by"):
        verifier.check(
            lambda names, feeds: [otherwise(names, feeds)[0], run(names, feeds)[1][..., ::-1]], "a wrong sum"
        )
    assert verifier.check(run, "itself") == 0.0 and verifier.notes() == []


def test_scores_that_differ_have_one_order() -> None:
    m = _ordered(np.arange(6, dtype=np.float32))
    with pytest.raises(VerificationError, match="changes output 'y' by"):
        _verifier(m).check(lambda names, feeds: [v[:, ::-1] for v in _run(m)(names, feeds)], "another order")


def test_a_model_that_needs_more_entries_than_one() -> None:
    """The best two of the entries: there is no result for a batch of one."""
    best = model(
        "g (float[n, 4] x) => (float[2, 4] y) { y, i = TopK <axis = 0> (x, k) }",
        {"k": np.array([2])},
    )
    verifier = Verifier.of_model(best, input_specs(best))
    assert verifier.sizes["n"] == 3
    assert verifier.check(_run(best), "the model") == 0.0


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("g (float[n, h, w] x) => (float[n, 6, 6] y) { y = Reshape (x, six) }", {"h": 6, "w": 6}),
        ("g (float[n, s] x) => (float[n, t] y) { y = Gather <axis = 1> (x, far) }", {"s": 512}),
    ],
)
def test_sizes_are_found_that_the_model_needs(text: str, sizes: dict[str, int]) -> None:
    """Two that are 36 together, and one that is longer than a text is as a rule."""
    made = model(text, {"six": np.array([0, 6, 6]), "far": np.array([300])})

    def allowed(at: Mapping[str, int]) -> bool:
        return "h" not in at or at["h"] * at["w"] == 36

    verifier = Verifier.of(input_specs(made), ort_session(made), allowed=allowed)
    assert sizes.items() <= verifier.sizes.items()
    assert verifier.check(_run(made), "the model itself") == 0.0
    assert all(feeds["x"].shape[1:] == tuple(sizes.values()) for feeds, _ in verifier.cases[:1])


def test_inputs_that_would_fill_the_memory_are_not_made_up() -> None:
    m = model("g (float[N, S, T, 9] x) => (float[M] y) { y = Reshape(x, to) }", {"to": np.array([67], np.int64)})
    with pytest.raises(VerificationError, match="onnxruntime runs the model on no made-up inputs"):
        Verifier.of_model(m, input_specs(m))
