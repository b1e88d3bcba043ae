"""What verification allows: 1e-4, and more only where a model itself turns a rounding into more."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from rewriting import model, normal

from coda_edge.errors import VerificationError
from coda_edge.inputs import input_specs
from coda_edge.verify import TOLERANCE, Verifier, nudge, ort_session


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


def test_a_model_that_does_not_quantise_is_not_nudged() -> None:
    assert nudge(_plain()) == []
    verifier = Verifier.of(input_specs(_plain()), ort_session(_plain()))
    assert verifier.tolerances == {"y": TOLERANCE}


def _verifier(m: onnx.ModelProto) -> Verifier:
    return Verifier.of(input_specs(m), ort_session(m), [ort_session(n) for n in nudge(m)])


def test_a_border_of_quanta_allows_a_quantum_and_says_so() -> None:
    m = _quantised()
    verifier = _verifier(m)
    assert 0.01 < verifier.tolerances["y"] <= 0.05
    reference = ort_session(m)
    assert verifier.check(lambda names, feeds: [reference.run(names, dict(feeds))[0] - 0.01], "a quantum less") > 0.009
    assert "'y'" in verifier.notes()[0]
    with pytest.raises(VerificationError, match="changes output 'y' by"):
        verifier.check(lambda names, feeds: [-2 * reference.run(names, dict(feeds))[0]], "another number")


def test_coarse_quanta_are_no_excuse() -> None:
    m = _quantised(0.2)
    reference = ort_session(m)
    with pytest.raises(VerificationError, match="changes output 'y' by"):
        _verifier(m).check(lambda names, feeds: [reference.run(names, dict(feeds))[0] - 0.2], "a quantum less")


def test_nudging_moves_float_weights_by_about_a_rounding() -> None:
    (w, s, *_) = (onnx.numpy_helper.to_array(i) for i in _quantised().graph.initializer)
    for moved in nudge(_quantised()):
        (w2, s2, *_) = (onnx.numpy_helper.to_array(i) for i in moved.graph.initializer)
        assert np.abs(w2 / w - 1).max() < 1e-5 and abs(s2 / s - 1) < 1e-5
        assert (w2 != w).any() or s2 != s
