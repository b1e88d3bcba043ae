"""Products of whole numbers in integers: exact sums, and quantised models as onnxruntime computes them unoptimised."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from kernel_harness import run
from lowering import reference
from onnx import TensorProto, helper, numpy_helper

import coda_edge
from coda_edge import Session, targets
from coda_edge.bundle.writer import to_bytes
from coda_edge.epilogue.program import EpilogueProgram
from coda_edge.lower.gemm import Windows, lower_gemm
from coda_edge.symbolic import symbol
from coda_edge.window import Window

Array = npt.NDArray[Any]
DOTTED = targets.targets()["x86-64-v4-vnni"]
runs = pytest.mark.skipif(bool(DOTTED.missing()), reason="this CPU has no products of bytes")
on_each = pytest.mark.parametrize(
    "target",
    [
        pytest.param(t, id=t.name, marks=pytest.mark.skipif(bool(t.missing()), reason=f"this CPU lacks {t.missing()}"))
        for t in (targets.get("x86-64-v3-vnni"), DOTTED)
    ],
)
SUMS = EpilogueProgram.parse("(acc: tile i32) -> (y: tile = v0) {\n  v0 = add acc acc\n}")
SCALED = EpilogueProgram.parse(
    "(acc: tile i32, shift: col i32, scale: col f32) -> (y: tile = v3, m: row = v4) {\n"
    "  v0 = sub acc shift\n  v1 = cast v0 to=f32\n  v2 = mul v1 scale\n  v3 = round v2\n  v4 = rowmax v3\n}"
)


def whole(low: int, high: int, *shape: int, seed: int = 0) -> Array:
    """Whole numbers from ``low`` to ``high``, both of which occur if there is room."""
    values = np.random.default_rng(seed).integers(low, high + 1, shape)
    values.reshape(-1)[: 2 * min(1, values.size // 2)] = [low, high][: 2 * min(1, values.size // 2)]
    return values


@on_each
@pytest.mark.parametrize(("k", "n"), [(1, 5), (3, 48), (7, 33), (130, 51), (1024, 16)])
def test_sums_are_exact(target: targets.Target, k: int, n: int) -> None:
    w = whole(-128, 127, k, n).astype(np.int8)
    call = lower_gemm(target, "g", SUMS, "a", w, [], ["y"], symbol("rows"))
    for rows in (1, 7, 130):
        a = whole(0, 255, rows, k, seed=rows).astype(np.uint8)
        found = run(target, call, {"a": a, "y": np.zeros((rows, n), np.int32)}, {"rows": rows}, chunk=1)["y"]
        np.testing.assert_array_equal(found, 2 * (a.astype(np.int64) @ w))


@on_each
def test_epilogues_and_statistics_follow_whole_sums(target: targets.Target) -> None:
    w, scale = whole(-128, 127, 70, 100).astype(np.int8), np.linspace(0.01, 0.02, 100).astype(np.float32)
    shift = (131 * w.sum(0, dtype=np.int64)).astype(np.int32)
    call = lower_gemm(target, "g", SCALED, "a", w, ["shift", "scale"], ["y", "m"], symbol("rows"))
    a = whole(0, 255, 37, 70, seed=1).astype(np.uint8)
    tensors = {
        "a": a,
        "shift": shift,
        "scale": scale,
        "y": np.zeros((37, 100), np.float32),
        "m": np.zeros((37, 1), np.float32),
    }
    found = run(target, call, tensors, {"rows": 37})
    expected = np.rint(((a.astype(np.int64) - 131) @ w).astype(np.float32) * scale)
    np.testing.assert_array_equal(found["y"], expected)
    np.testing.assert_array_equal(found["m"], expected.max(1, keepdims=True))


@on_each
def test_windows_have_the_zero_point_around_them(target: targets.Target) -> None:
    window = Window((3, 3), (2, 1), (1, 2), (1, 2), (1, 2))
    batch, height, width, channels, n, zero = 2, 9, 11, 12, 20, 117
    w = whole(-127, 127, 9 * channels, n).astype(np.int8)
    out = window.out((height, width))
    windows = Windows(window, batch, (height, width))
    rows = batch * int(out[0]) * int(out[1])
    call = lower_gemm(target, "g", SUMS, "a", w, [], ["y"], rows, windows=windows, zero=zero)
    x = whole(0, 255, batch, height, width, channels).astype(np.uint8)
    padded = np.pad(x.astype(np.int64), [(0, 0), (1, 1), (2, 2), (0, 0)], constant_values=zero)
    taps = [padded[:, i : i + 2 * out[0] - 1 : 2, 2 * j : 2 * j + out[1]] for i in range(3) for j in range(3)]
    expected = np.stack(taps, 3).reshape(rows, -1) @ w
    found = run(target, call, {"a": x, "y": np.zeros((rows, n), np.int32)})["y"]
    np.testing.assert_array_equal(found, 2 * expected)


def _model(nodes: list[onnx.NodeProto], x: Any, out: int, constants: dict[str, Array]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "quantised",
        [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), ["b", *x.shape[1:]])],
        [helper.make_tensor_value_info("y", out, None)],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def _both(model: onnx.ModelProto, x: Array, target: targets.Target = DOTTED) -> tuple[Array, Array]:
    """Ours, which must be in integers, and onnxruntime's of the model as it is."""
    made = coda_edge.optimize(model, target=target.name, verify=False)
    assert made.bundle.best.target == target.name, "a product of whole numbers is done in integers"
    with Session(to_bytes(made.bundle), threads=2) as session:
        (found,) = session.run(None, {"x": x})
    return found, reference(model, {"x": x})["y"]


U8, I8, F32 = np.uint8, np.int8, np.float32


@runs
@pytest.mark.parametrize(
    ("zero", "w_zero", "columns"),
    [
        (U8(0), I8(0), True),
        (U8(128), U8(128), False),
        (U8(131), I8(0), True),
        (I8(-3), I8(0), False),
        (I8(0), I8(0), True),
    ],
)
def test_dequantised_operands(zero: Any, w_zero: Any, columns: bool) -> None:
    k, n = 66, 49
    w = whole(*((0, 255) if w_zero.dtype == U8 else (-128, 127)), k, n).astype(w_zero.dtype)
    scale = np.linspace(0.001, 0.01, n).astype(F32) if columns else F32(0.004)
    constants = {"w": w, "s": scale, "z": np.full(n, w_zero) if columns else w_zero, "xs": F32(0.03), "xz": zero}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "xs", "xz"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["v"], axis=1),
        helper.make_node("MatMul", ["d", "v"], ["y"]),
    ]
    x = np.random.default_rng(0).standard_normal((3, 7, k)).astype(F32) * 3
    found, expected = _both(_model(nodes, x, TensorProto.FLOAT, constants), x)
    np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max(), rtol=0)


@runs
@pytest.mark.parametrize(("dtype", "zero"), [(U8, 0), (U8, 77), (I8, -128)])
def test_matmul_integer_is_exact_beyond_what_float32_holds(dtype: Any, zero: int) -> None:
    limits = np.iinfo(dtype)
    x, w = np.full((2, 5, 1500), limits.max, dtype), np.full((1500, 6), 127, I8)
    x[0] = whole(limits.min, limits.max, 5, 1500)
    w[:, 1::2] = whole(-128, 127, 1500, 3)
    node = helper.make_node("MatMulInteger", ["x", "w", "z"], ["y"])
    found, expected = _both(_model([node], x, TensorProto.INT32, {"w": w, "z": np.array(zero, dtype)}), x)
    assert np.abs(expected).max() > 2**24
    np.testing.assert_array_equal(found, expected)


@runs
def test_qlinear_matmul_and_a_second_one_behind() -> None:
    first, second = whole(-128, 127, 24, 40).astype(I8), whole(-128, 127, 40, 9, seed=1).astype(I8)
    constants = {
        "w": first, "v": second, "xs": F32(0.02), "xz": U8(11), "ws": np.linspace(0.01, 0.02, 40).astype(F32),
        "wz": np.zeros(40, I8), "hs": F32(0.25), "hz": U8(100), "vs": F32(0.01), "vz": I8(0), "ys": F32(0.5), "yz": U8(128),
    }  # fmt: skip
    nodes = [
        helper.make_node("QLinearMatMul", ["x", "xs", "xz", "w", "ws", "wz", "hs", "hz"], ["h"]),
        helper.make_node("QLinearMatMul", ["h", "hs", "hz", "v", "vs", "vz", "ys", "yz"], ["y"]),
    ]
    x = whole(0, 255, 3, 7, 24).astype(U8)
    found, expected = _both(_model(nodes, x, TensorProto.UINT8, constants), x)
    np.testing.assert_array_equal(found, expected)


@runs
def test_qlinear_conv() -> None:
    w = whole(-128, 127, 20, 8, 3, 3).astype(I8)
    constants = {
        "w": w, "xs": F32(0.02), "xz": U8(113), "ws": np.linspace(0.01, 0.02, 20).astype(F32), "wz": np.zeros(20, I8),
        "ys": F32(0.5), "yz": U8(128), "bias": whole(-4000, 4000, 20).astype(np.int32),
    }  # fmt: skip
    names = ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz", "bias"]
    node = helper.make_node("QLinearConv", names, ["y"], pads=[1, 1, 1, 1], strides=[1, 2])
    x = whole(0, 255, 2, 8, 7, 9).astype(U8)
    found, expected = _both(_model([node], x, TensorProto.UINT8, constants), x)
    np.testing.assert_array_equal(found, expected)


@on_each
def test_dynamic_quantisation_with_a_residual(target: targets.Target) -> None:
    """The quantised tensor has two readers, one of which takes it as float32."""
    w = whole(-127, 127, 36, 36).astype(I8)
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("MatMulInteger", ["q", "w", "z"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["s", "ws"], ["t"]),
        helper.make_node("Mul", ["f", "t"], ["m"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("Add", ["m", "d"], ["y"]),
    ]
    x = np.random.default_rng(3).standard_normal((3, 7, 36)).astype(F32)
    found, expected = _both(_model(nodes, x, TensorProto.FLOAT, {"w": w, "ws": F32(0.01)}), x, target)
    np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("base", ["x86-64-v3", "x86-64-v4"])
def test_a_level_with_products_of_bytes_is_for_models_that_have_some(base: str) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    x = np.zeros((2, 8), F32)
    made = coda_edge.optimize(
        _model([node], x, TensorProto.FLOAT, {"w": np.eye(8, dtype=F32) / 3}), target=f"{base}-vnni", verify=False
    )
    assert [level.target for level in made.bundle.levels] == [base]
