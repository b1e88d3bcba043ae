"""Reshapes of the leading dimensions leave no trace around projections."""

from __future__ import annotations

import numpy as np
from coda_edge.passes import grow_epilogue, sink_reshape
from rewriting import Array, model, normal, rewrite

_CONSTANTS: dict[str, Array] = {
    "flat": np.array([-1, 12]),
    "back": np.array([-1, 7, 24]),
    "w": normal(12, 24, seed=1),
    "b": normal(24, seed=2),
    "b2": normal(1, 24, seed=2),
}
_FEEDS = {"x": normal(3, 7, 12)}


def test_flattened_projection_is_a_gemm_on_the_tensor_itself() -> None:
    m = model(
        "g (float[B, 7, 12] x) => (float[B, 7, 24] y) { r = Reshape(x, flat) p = MatMul(r, w) t = Add(p, b) h = Tanh(t) y = Reshape(h, back) }",
        _CONSTANTS,
    )
    done = rewrite(m, [sink_reshape.PASS, grow_epilogue.PASS])
    assert done.ops() == {"Gemm": 1}
    assert done.node("Gemm").inputs[0].name == "x"
    assert done.error(_FEEDS) < 2e-6


def test_two_dimensional_bias_becomes_a_column() -> None:
    m = model(
        "g (float[B, 7, 12] x) => (float[B, 7, 24] y) { r = Reshape(x, flat) p = MatMul(r, w) t = Add(b2, p) y = Reshape(t, back) }",
        _CONSTANTS,
    )
    done = rewrite(m, [sink_reshape.PASS, grow_epilogue.PASS])
    assert done.ops() == {"Gemm": 1}
    assert done.error(_FEEDS) < 2e-6


def test_flat_output_keeps_its_shape() -> None:
    m = model(
        "g (float[B, 7, 12] x) => (float[M, 24] y) { r = Reshape(x, flat) p = MatMul(r, w) y = Add(p, b) }", _CONSTANTS
    )
    done = rewrite(m, [sink_reshape.PASS, grow_epilogue.PASS])
    assert done.ops() == {"Gemm": 1, "Reshape": 1}
    assert done.error(_FEEDS) < 2e-6


def test_reshape_with_a_reader_that_needs_the_flat_rows_stays() -> None:
    m = model(
        "g (float[B, 7, 12] x) => (float[M, 24] y, float[M, 12] z) { r = Reshape(x, flat) y = MatMul(r, w) z = Softmax <axis = 0> (r) }",
        _CONSTANTS,
    )
    done = rewrite(m, [sink_reshape.PASS])
    assert done.log.rewrites["sink_reshape"] == 0
    assert done.error(_FEEDS) < 1e-6


def test_input_reshaped_to_itself_is_still_copied_to_the_output() -> None:
    m = model(
        "g (float[B, 7, 12] x) => (float[B, 7, 12] y) { r = Reshape(x, flat) y = Reshape(r, back) }",
        {"flat": np.array([-1, 12]), "back": np.array([-1, 7, 12])},
    )
    done = rewrite(m, [sink_reshape.PASS])
    assert done.error(_FEEDS) == 0.0


def test_a_projection_to_one_column_stays_a_matrix() -> None:
    m = model(
        "g (float[B, 7, 12] x) => (float[B, 7, 1] y) { r = Reshape(x, flat) p = MatMul(r, w) y = Reshape(p, back) }",
        _CONSTANTS | {"w": normal(12, 1), "back": np.array([-1, 7, 1])},
    )
    done = rewrite(m, [sink_reshape.PASS, grow_epilogue.PASS])
    assert done.node("Gemm").inputs[1].shape == (12, 1)
    assert done.error(_FEEDS) < 2e-6
