"""Scales of quantised operands stand behind the product: sums of whole numbers, the same in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from graphs import run, worst_error
from rewriting import Array, model

from coda_edge import ir
from coda_edge.export import to_model
from coda_edge.frontend import load, normalize

_RNG = np.random.default_rng(0)
DEPTH = 700  # 700 · 255 · 127 > 2²⁴: beyond what float32 surely holds, but sums of random signs stay far below
CONSTANTS: dict[str, Array] = {
    "w": _RNG.integers(-127, 128, (DEPTH, 6)).astype(np.int8),
    "wt": _RNG.integers(-127, 128, (6, DEPTH)).astype(np.int8),
    "f": _RNG.integers(-127, 128, (4, 5, 3)).astype(np.int8),
    "sa": np.float32(0.0213),
    "za": np.uint8(119),
    "sw": np.float32(0.0047),
    "zw": np.int8(-3),
    "sc": np.linspace(0.003, 0.009, 6).astype(np.float32),
    "zc": np.zeros(6, np.int8),
    "sr": np.linspace(0.003, 0.009, DEPTH).astype(np.float32),
    "zr": np.zeros(DEPTH, np.int8),
    "sf": np.linspace(0.003, 0.009, 4).astype(np.float32),
    "zf": np.zeros(4, np.int8),
    "bias": _RNG.standard_normal(6).astype(np.float32),
    "filter_bias": _RNG.standard_normal(4).astype(np.float32),
}
MATRIX, IMAGE, PAIR = f"uint8[n, {DEPTH}] x", "uint8[n, 5, 11] x", "uint8[n, 2, 9, 8] x"

PRODUCTS: dict[str, tuple[str, str, str]] = {
    "one scale": (
        MATRIX,
        "float[n, 6] y",
        "a = DequantizeLinear(x, sa, za) b = DequantizeLinear(w, sw, zw) y = MatMul(a, b)",
    ),
    "a scale for each column": (
        MATRIX,
        "float[n, 6] y",
        "a = DequantizeLinear(x, sa, za) b = DequantizeLinear<axis = 1>(w, sc, zc) y = MatMul(a, b)",
    ),
    "weights turned": (
        MATRIX,
        "float[n, 6] y",
        "a = DequantizeLinear(x, sa, za) b = DequantizeLinear<axis = 0>(wt, sc, zc) "
        "t = Transpose<perm = [1, 0]>(b) y = MatMul(a, t)",
    ),
    "a dense layer": (
        MATRIX,
        "float[n, 6] y",
        "a = DequantizeLinear(x, sa, za) b = DequantizeLinear<axis = 0>(wt, sc, zc) y = Gemm<transB = 1>(a, b, bias)",
    ),
    "a dense layer with a factor": (
        MATRIX,
        "float[n, 6] y",
        "a = DequantizeLinear(x, sa, za) b = DequantizeLinear(w, sw, zw) y = Gemm<alpha = 0.5>(a, b, bias)",
    ),
    "filters": (
        IMAGE,
        "float[n, 4, 11] y",
        "a = DequantizeLinear(x, sa, za) b = DequantizeLinear<axis = 0>(f, sf, zf) "
        "y = Conv<pads = [1, 1]>(a, b, filter_bias)",
    ),
    "two run-time operands": (
        PAIR,
        "float[n, 2, 9, 9] y",
        "a = DequantizeLinear(x, sa, za) b = DequantizeLinear(x, sw, za) "
        "t = Transpose<perm = [0, 1, 3, 2]>(b) y = MatMul(a, t)",
    ),
}


def _graph(name: str) -> tuple[Any, gs.Graph, dict[str, Array]]:
    given, made, body = PRODUCTS[name]
    m = model(f"g ({given}) => ({made}) {{ {body} }}", CONSTANTS)
    shape = [3 if d == "n" else int(d) for d in given[6 : given.index("]")].split(", ")]
    return m, normalize(load(m)), {"x": np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)}


@pytest.mark.parametrize("name", PRODUCTS)
def test_operands_are_whole_numbers(name: str) -> None:
    m, graph, feeds = _graph(name)
    (product,) = (n for n in graph.nodes if n.op in ("MatMul", "Conv"))
    weights = ir.constant_value(product.inputs[1])
    assert weights is None or np.array_equal(weights, np.round(weights))
    assert "Mul" not in _before(product)
    assert worst_error(run(m, feeds), run(to_model(graph), feeds)) < 2e-6


def _before(node: gs.Node) -> set[str]:
    """The operators that a node's operands come from."""
    made = [s for t in node.inputs if (s := ir.producer(t)) is not None]
    return {s.op for s in made}.union(*(_before(s) for s in made))


@pytest.mark.parametrize(
    ("body", "width"),
    [
        ("b = DequantizeLinear(w, sw, zw) y = MatMul(x, b)", 1),
        ("b = DequantizeLinear<axis = 1>(w, sc, zc) y = MatMul(x, b)", 6),
        ("b = DequantizeLinear<axis = 1>(w, sc, zc) y = Gemm<alpha = 0.5>(x, b, bias)", 6),
    ],
    ids=["one number", "a scale for each column", "Gemm"],
)
def test_weights_alone_are_whole_numbers(body: str, width: int) -> None:
    m = model(f"g (float[n, {DEPTH}] x) => (float[n, 6] y) {{ {body} }}", CONSTANTS)
    graph = normalize(load(m))
    (product,) = (n for n in graph.nodes if n.op == "MatMul")
    weights = ir.constant_value(product.inputs[1])
    assert weights is not None and np.array_equal(weights, np.round(weights))
    (scaled,) = product.outputs[0].outputs
    factor = next(v for t in scaled.inputs if (v := ir.constant_value(t)) is not None)
    assert scaled.op == "Mul" and factor.size == width
    x = np.random.default_rng(3).standard_normal((3, DEPTH)).astype(np.float32)
    assert worst_error(run(m, {"x": x}), run(to_model(graph), {"x": x})) < 2e-6


def test_sums_are_exact() -> None:
    _, graph, feeds = _graph("a scale for each column")
    whole = (feeds["x"].astype(np.int64) - 119) @ CONSTANTS["w"].astype(np.int64)
    expected = whole.astype(np.float32) * (CONSTANTS["sa"] * CONSTANTS["sc"])
    (found,) = run(to_model(graph), feeds)
    assert found.tobytes() == expected.tobytes()
    order = np.random.default_rng(2).permutation(DEPTH)
    turned = {**CONSTANTS, "w": CONSTANTS["w"][order]}
    again = normalize(
        load(model(f"g ({MATRIX}) => (float[n, 6] y) {{ {PRODUCTS['a scale for each column'][2]} }}", turned))
    )
    (found,) = run(to_model(again), {"x": feeds["x"][:, order]})
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "body",
    [
        "a = DequantizeLinear(x, sa, za) b = DequantizeLinear<axis = 0>(w, sr, zr) y = MatMul(a, b)",
        "a = DequantizeLinear(x, sa, za) b = DequantizeLinear(w, sw, zw) y = Gemm<beta = 0.5>(a, b, bias)",
    ],
    ids=["a scale for each row of the weights", "a factor of the bias"],
)
def test_others_stay(body: str) -> None:
    m = model(f"g ({MATRIX}) => (float[n, 6] y) {{ {body} }}", CONSTANTS)
    graph = normalize(load(m))
    (product,) = (n for n in graph.nodes if n.op == "MatMul")
    assert "Mul" in _before(product)
    feeds = {"x": np.random.default_rng(1).integers(0, 256, (3, DEPTH)).astype(np.uint8)}
    assert worst_error(run(m, feeds), run(to_model(graph), feeds)) < 2e-6


def test_scales_of_a_vector_of_weights_stay() -> None:
    """They go along what is summed over."""
    constants = {**CONSTANTS, "vector": CONSTANTS["w"][:, 0].copy()}
    body = "a = DequantizeLinear(x, sa, za) b = DequantizeLinear <axis = 0> (vector, sr, zr) y = MatMul(a, b)"
    graph = normalize(load(model(f"g ({MATRIX}) => (float[n] y) {{ {body} }}", constants)))
    x = np.random.default_rng(1).integers(0, 256, (3, DEPTH)).astype(np.uint8)
    expected = (
        (x.astype(np.float64) - 119) * CONSTANTS["sa"] @ (constants["vector"] * CONSTANTS["sr"].astype(np.float64))
    )
    assert worst_error([expected.astype(np.float32)], run(to_model(graph), {"x": x})) < 2e-6
