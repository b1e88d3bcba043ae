"""LSTM, GRU and RNN kernels against onnxruntime: directions, lengths, initial states, attributes, odd sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lowering import assert_same, compile_model, model, reference
from onnx import helper

STEPS, BATCH, INPUTS, HIDDEN = 7, 3, 11, 19
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}

# (operator, directions, attributes, optional inputs)
CASES: dict[str, tuple[str, int, dict[str, Any], set[str]]] = {
    "LSTM": ("LSTM", 1, {}, set()),
    "LSTM of two directions": ("LSTM", 2, {"direction": "bidirectional"}, {"b", "lengths", "h", "c", "p"}),
    "LSTM reversed": ("LSTM", 1, {"direction": "reverse", "input_forget": 1, "clip": 0.4}, {"b", "lengths"}),
    "LSTM whose cell exceeds the clip": ("LSTM", 1, {"clip": 0.7}, {"b", "c", "p"}),
    "LSTM of other activations": ("LSTM", 1, {"activations": ["HardSigmoid", "Relu", "Softsign"]}, {"b", "h"}),
    "GRU": ("GRU", 1, {}, {"b", "h"}),
    "GRU that clips": ("GRU", 1, {"clip": 0.3}, {"b", "h"}),
    "GRU of two directions": ("GRU", 2, {"direction": "bidirectional", "linear_before_reset": 1}, {"b", "lengths"}),
    "GRU reversed": ("GRU", 1, {"direction": "reverse", "linear_before_reset": 1}, {"b", "h"}),
    "RNN": ("RNN", 2, {"direction": "bidirectional", "activations": ["Relu", "Relu"]}, {"b", "lengths", "h"}),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_to_onnxruntime(case: str) -> None:
    op, directions, attrs, extra = CASES[case]
    rng = np.random.default_rng(0)

    def made(*shape: int) -> Any:
        return (rng.standard_normal(shape) / 3).astype(np.float32)

    rows = GATES[op] * HIDDEN
    constants = {"w": made(directions, rows, INPUTS), "r": made(directions, rows, HIDDEN)}
    feeds: dict[str, Any] = {"x": made(STEPS, BATCH, INPUTS)}
    inputs: dict[str, Any] = {"x": (np.float32, ["t", "n", INPUTS])}
    if "b" in extra:
        constants["b"] = made(directions, 2 * rows)
    if "p" in extra:
        constants["p"] = made(directions, 3 * HIDDEN)
    for name in sorted(extra & {"h", "c"}):
        inputs[name], feeds[name] = (np.float32, [directions, "n", HIDDEN]), made(directions, BATCH, HIDDEN)
    if "lengths" in extra:
        inputs["lengths"], feeds["lengths"] = (np.int32, ["n"]), np.array([7, 2, 5], np.int32)
    names = ["x", "w", "r", *(n if n in extra else "" for n in ("b", "lengths", "h", "c", "p"))]
    outputs = ["y", "yh", "yc"][: 3 if op == "LSTM" else 2]
    node = helper.make_node(op, names[: 8 if op == "LSTM" else 6], outputs, hidden_size=HIDDEN, **attrs)
    proto = model([node], inputs, outputs, constants, opset=14)
    found, expected = compile_model(proto).run(feeds, chunk=1), reference(proto, feeds)
    for name in outputs:
        assert_same(found[name], expected[name], 5e-6)
