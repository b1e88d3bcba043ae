"""Quantised operators: onnxruntime's results, to the last quantum."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from coda_edge.passes import PIPELINE
from onnx import TensorProto, helper, numpy_helper
from rewriting import model, normal, rewrite, run

Array = npt.NDArray[Any]

X = normal(3, 5, 8, scale=2)
LEFT = np.random.default_rng(1).integers(0, 256, (3, 5, 8)).astype(np.uint8)
RIGHT = np.random.default_rng(2).integers(-128, 128, (8, 6)).astype(np.int8)
U8, I8 = np.uint8, np.int8


def _one(op: str, inputs: dict[str, Array], fed: str, outputs: dict[str, int], **attributes: Any) -> onnx.ModelProto:
    """One node; all inputs but ``fed`` are constants."""
    node = helper.make_node(op, list(inputs), list(outputs), name="node", **attributes)
    x = inputs[fed]
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(fed, helper.np_dtype_to_tensor_dtype(x.dtype), ["n", *x.shape[1:]])],
        [helper.make_tensor_value_info(o, t, None) for o, t in outputs.items()],
        [numpy_helper.from_array(v, k) for k, v in inputs.items() if k != fed],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


f32 = np.float32
CASES: dict[str, tuple[str, dict[str, Array], str, dict[str, int], dict[str, Any]]] = {
    "quantize to uint8": (
        "QuantizeLinear",
        {"x": X, "s": f32(0.03), "z": U8(117)},
        "x",
        {"y": TensorProto.UINT8},
        {},
    ),
    "quantize without zero point": ("QuantizeLinear", {"x": X, "s": f32(0.02)}, "x", {"y": TensorProto.UINT8}, {}),
    "quantize by channel": (
        "QuantizeLinear",
        {"x": X, "s": np.linspace(0.01, 0.05, 5).astype(f32), "z": np.arange(-2, 3).astype(I8)},
        "x",
        {"y": TensorProto.INT8},
        {"axis": 1},
    ),
    "quantize in blocks": (
        "QuantizeLinear",
        {"x": X, "s": np.abs(normal(3, 5, 3, seed=4)) / 99, "z": np.arange(45).reshape(3, 5, 3).astype(U8)},
        "x",
        {"y": TensorProto.UINT8},
        {"axis": 2, "block_size": 3},
    ),
    "dequantize in blocks": (
        "DequantizeLinear",
        {"x": LEFT, "s": np.abs(normal(3, 2, 8, seed=4)), "z": np.arange(48).reshape(3, 2, 8).astype(U8)},
        "x",
        {"y": TensorProto.FLOAT},
        {"axis": 1, "block_size": 3},
    ),
    "dequantize": (
        "DequantizeLinear",
        {"x": LEFT, "s": f32(0.03), "z": U8(117)},
        "x",
        {"y": TensorProto.FLOAT},
        {},
    ),
    "dequantize by the last axis": (
        "DequantizeLinear",
        {"x": LEFT, "s": np.linspace(0.01, 0.05, 8).astype(f32)},
        "x",
        {"y": TensorProto.FLOAT},
        {"axis": -1},
    ),
    "dynamic": (
        "DynamicQuantizeLinear",
        {"x": X},
        "x",
        {"y": TensorProto.UINT8, "s": TensorProto.FLOAT, "z": TensorProto.UINT8},
        {},
    ),
    "dynamic, of positive numbers": (
        "DynamicQuantizeLinear",
        {"x": np.abs(X) + 1},
        "x",
        {"y": TensorProto.UINT8, "s": TensorProto.FLOAT, "z": TensorProto.UINT8},
        {},
    ),
    "integer product": (
        "MatMulInteger",
        {"a": LEFT, "b": RIGHT, "az": U8(9), "bz": I8(-3)},
        "a",
        {"y": TensorProto.INT32},
        {},
    ),
    "integer product, a zero point for each column": (
        "MatMulInteger",
        {"a": LEFT, "b": RIGHT, "az": U8(0), "bz": np.arange(6).astype(I8)},
        "a",
        {"y": TensorProto.INT32},
        {},
    ),
    "quantised product": (
        "QLinearMatMul",
        {
            "a": LEFT,
            "as": f32(0.02),
            "az": U8(120),
            "b": RIGHT,
            "bs": f32(0.01),
            "bz": I8(0),
            "s": f32(0.05),
            "z": U8(100),
        },
        "a",
        {"y": TensorProto.UINT8},
        {},
    ),
    "quantised convolution": (
        "QLinearConv",
        {
            "a": LEFT,
            "as": f32(0.02),
            "az": U8(120),
            "w": np.random.default_rng(3).integers(-127, 128, (4, 5, 3)).astype(I8),
            "ws": np.linspace(0.01, 0.02, 4).astype(f32),
            "wz": np.zeros(4, I8),
            "s": f32(0.3),
            "z": U8(128),
            "bias": np.arange(4).astype(np.int32) * 1000,
        },
        "a",
        {"y": TensorProto.UINT8},
        {"pads": [1, 1]},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_operator(name: str) -> None:
    op, inputs, fed, outputs, attributes = CASES[name]
    done = rewrite(_one(op, inputs, fed, outputs, **attributes), PIPELINE)
    assert op not in done.ops()
    assert done.error({fed: inputs[fed]}) < 1e-6
    if "block_size" not in attributes:  # whose scales have a batch axis
        assert done.error({fed: inputs[fed][:1]}) < 1e-6


def test_a_quantised_layer_is_one_gemm() -> None:
    """Quantise, dequantise, multiply, quantise, dequantise: the second pair is in the epilogue, no tensor is an integer."""
    m = model(
        """
        g (float[n, 8] x) => (float[n, 6] y) {
            q = QuantizeLinear (x, s1, z1)
            a = DequantizeLinear (q, s1, z1)
            b = DequantizeLinear (w, s2, z2)
            c = MatMul (a, b)
            p = QuantizeLinear (c, s3, z1)
            y = DequantizeLinear (p, s3, z1)
        }
        """,
        {"w": RIGHT, "s1": f32(0.03), "z1": U8(127), "s2": f32(0.01), "z2": I8(0), "s3": f32(0.11)},
    )
    done = rewrite(m, PIPELINE)
    assert done.ops() == {"Map": 1, "Gemm": 1}
    assert "Cast" not in {n.op for n in done.node("Map").attrs["body"].nodes}
    assert "cast" not in done.node("Gemm").attrs["epilogue"]
    assert done.error({"x": normal(7, 8)}) < 1e-6


def test_a_dynamically_quantised_layer() -> None:
    m = model(
        """
        g (float[n, 8] x) => (float[n, 6] y) {
            q, s, z = DynamicQuantizeLinear (x)
            c = MatMulInteger (q, w, z, wz)
            f = Cast <to = 1> (c)
            scale = Mul (s, ws)
            d = Mul (f, scale)
            y = Add (d, b)
        }
        """,
        {"w": RIGHT, "wz": I8(2), "ws": f32(0.01), "b": normal(6)},
    )
    done = rewrite(m, PIPELINE)
    assert done.ops()["Gemm"] == 1
    assert not {"MatMulInteger", "DynamicQuantizeLinear"} & set(done.ops())
    for rows in (1, 7):
        assert done.error({"x": normal(rows, 8)}) < 1e-6


@pytest.mark.parametrize("scale", [np.inf, 1e38])
@pytest.mark.parametrize(("kind", "zero"), [(np.uint8, 255), (np.int8, 0)])
def test_a_quantised_mask_of_infinities_is_what_onnxruntime_makes_of_it(scale: float, kind: type, zero: int) -> None:
    """With a scale of inf everything is NaN: 0 · inf. A large finite one masks."""
    text = """g (float[1, 4, 4] s, bool[1, 1, 4] keep) => (float[1, 4, 4] y) {
        m = Where(keep, zero, low) q = QuantizeLinear(m, scale, shift) d = DequantizeLinear(q, scale, shift) a = Add(s, d) y = Softmax(a) }"""
    numbers = {"zero": np.float32(0), "low": np.float32(-np.inf), "scale": np.float32(scale), "shift": kind(zero)}
    m = model(text, numbers)
    given = {"s": normal(1, 4, 4), "keep": np.array([[[True, True, False, True]]])}
    (found,) = rewrite(m, PIPELINE).outputs(given)
    (expected,) = run(m, given)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.isnan(found).all() == np.isinf(scale)
