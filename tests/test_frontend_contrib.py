"""Microsoft's operators, decomposed, give what onnxruntime computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from graphs import run, to_model, worst_error
from onnx import helper, numpy_helper

from coda_edge.frontend import load, normalize


def _normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X, COLUMN = _normal(2, 5, 8), [_normal(8, seed=i) for i in range(3)]

# (operator, inputs, attributes, outputs)
CASES: dict[str, tuple[str, list[Any], dict[str, Any], list[str]]] = {
    "Gelu": ("Gelu", [X], {}, ["y"]),
    "BiasGelu": ("BiasGelu", [X, COLUMN[0]], {}, ["y"]),
    "FastGelu": ("FastGelu", [X], {}, ["y"]),
    "FastGelu with bias": ("FastGelu", [X, COLUMN[0]], {}, ["y"]),
    "QuickGelu": ("QuickGelu", [X], {"alpha": 1.5}, ["y"]),
    "SkipLayerNormalization": ("SkipLayerNormalization", [X, _normal(2, 5, 8, seed=4), *COLUMN], {}, ["y"]),
    "SkipLayerNormalization and its sum": (
        "SkipLayerNormalization",
        [X, _normal(2, 5, 8, seed=4), COLUMN[0]],
        {"epsilon": 1e-3},
        ["y", "", "", "s"],
    ),
    "SkipSimplifiedLayerNormalization": (
        "SkipSimplifiedLayerNormalization",
        [X, _normal(2, 5, 8, seed=4), COLUMN[0], COLUMN[1]],
        {},
        ["y", "", "", "s"],
    ),
    "FusedMatMul": ("FusedMatMul", [X, _normal(2, 5, 8, seed=1)], {"transB": 1, "alpha": 0.3}, ["y"]),
    "FusedMatMul transposed": ("FusedMatMul", [X, _normal(2, 5, 3, seed=1)], {"transA": 1}, ["y"]),
    "FusedGemm": (
        "FusedGemm",
        [X[0], _normal(3, 8, seed=1), COLUMN[0][:3]],
        {"transB": 1, "alpha": 0.5, "activation": "Tanh"},
        ["y"],
    ),
    "FusedGemm transposed": (
        "FusedGemm",
        [X[0], _normal(5, 3, seed=1), COLUMN[0][:3]],
        {"transA": 1, "activation": "LeakyRelu", "activation_alpha": 0.3},
        ["y"],
    ),
    "SimplifiedLayerNormalization": ("SimplifiedLayerNormalization", [X, COLUMN[0]], {"axis": -1}, ["y"]),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_to_onnxruntime(case: str) -> None:
    op, arrays, attrs, outputs = CASES[case]
    domain = "" if op == "SimplifiedLayerNormalization" else "com.microsoft"
    names = [f"x{i}" for i in range(len(arrays))]
    node = helper.make_node(op, names, outputs, domain=domain, **attrs)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x0", onnx.TensorProto.FLOAT, ["B", *arrays[0].shape[1:]])],
        [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [None] * arrays[0].ndim) for n in outputs if n],
        [numpy_helper.from_array(a, n) for a, n in zip(arrays[1:], names[1:], strict=True)],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    normal = to_model(normalize(load(model)))
    assert op not in {n.op_type for n in normal.graph.node}
    feeds = {"x0": arrays[0]}
    assert worst_error(run(model, feeds), run(normal, feeds)) <= 2e-6
