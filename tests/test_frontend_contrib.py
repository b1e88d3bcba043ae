"""Microsoft's operators, decomposed, give what onnxruntime computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from contrib_nodes import both, contrib_node, normal
from graphs import run, to_model, worst_error
from onnx import helper, numpy_helper

from coda_edge.errors import UnsupportedOperator
from coda_edge.frontend import load, normalize

X, COLUMN = normal(2, 5, 8), [normal(8, seed=i) for i in range(3)]

# (operator, inputs, attributes, outputs)
CASES: dict[str, tuple[str, list[Any], dict[str, Any], list[str]]] = {
    "Gelu": ("Gelu", [X], {}, ["y"]),
    "BiasGelu": ("BiasGelu", [X, COLUMN[0]], {}, ["y"]),
    "FastGelu": ("FastGelu", [X], {}, ["y"]),
    "FastGelu with bias": ("FastGelu", [X, COLUMN[0]], {}, ["y"]),
    "QuickGelu": ("QuickGelu", [X], {"alpha": 1.5}, ["y"]),
    "SkipLayerNormalization": ("SkipLayerNormalization", [X, normal(2, 5, 8, seed=4), *COLUMN], {}, ["y"]),
    "SkipLayerNormalization and its sum": (
        "SkipLayerNormalization",
        [X, normal(2, 5, 8, seed=4), COLUMN[0]],
        {"epsilon": 1e-3},
        ["y", "", "", "s"],
    ),
    "SkipSimplifiedLayerNormalization": (
        "SkipSimplifiedLayerNormalization",
        [X, normal(2, 5, 8, seed=4), COLUMN[0], COLUMN[1]],
        {},
        ["y", "", "", "s"],
    ),
    "FusedMatMul": ("FusedMatMul", [X, normal(2, 5, 8, seed=1)], {"transB": 1, "alpha": 0.3}, ["y"]),
    "FusedMatMul transposed": ("FusedMatMul", [X, normal(2, 5, 3, seed=1)], {"transA": 1}, ["y"]),
    "FusedGemm": (
        "FusedGemm",
        [X[0], normal(3, 8, seed=1), COLUMN[0][:3]],
        {"transB": 1, "alpha": 0.5, "activation": "Tanh"},
        ["y"],
    ),
    "FusedGemm transposed": (
        "FusedGemm",
        [X[0], normal(5, 3, seed=1), COLUMN[0][:3]],
        {"transA": 1, "activation": "LeakyRelu", "activation_alpha": 0.3},
        ["y"],
    ),
    "FusedMatMul of batches that come second": (
        "FusedMatMul",
        [normal(8, 2, 3, 5), normal(2, 3, 8, 4)],
        {"transBatchA": 1, "transA": 1},
        ["y"],
    ),
    "TransposeMatMul": ("TransposeMatMul", [X, normal(2, 3, 8)], {"transB": 1}, ["y"]),
    **{
        f"FusedConv {activation}": (
            "FusedConv",
            [normal(2, 3, 7, 6), normal(4, 3, 3, 3), normal(4)],
            {"activation": activation, "pads": [1, 1, 1, 1]} | ({"activation_params": numbers} if numbers else {}),
            ["y"],
        )
        for activation, numbers in {
            "Relu": [],
            "LeakyRelu": [0.2],
            "Clip": [-0.5, 0.7],
            "HardSigmoid": [0.2, 0.5],
        }.items()
    },
    "FusedConv and a sum": (
        "FusedConv",
        [normal(2, 3, 7, 6), normal(4, 3, 3, 3), normal(4), normal(2, 4, 5, 4)],
        {"activation": "Relu"},
        ["y"],
    ),
    "Trilu": ("Trilu", [X, np.array(1)], {"upper": 0}, ["y"]),
    "UnfoldTensor": ("UnfoldTensor", [normal(2, 9, 5)], {"dim": 1, "size": 3, "step": 2}, ["y"]),
    "ExpandDims": ("ExpandDims", [X, np.array(1, np.int32)], {}, ["y"]),
    "GatherND": ("GatherND", [X, np.array([[0, 1], [1, 2]])], {}, ["y"]),
    "SkipLayerNormalization of rows": (
        "SkipLayerNormalization",
        [X, normal(5, 8, seed=4), COLUMN[0]],
        {},
        ["y"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_to_onnxruntime(case: str) -> None:
    op, inputs, attrs, outputs = CASES[case]
    dims = {0: ("b", *inputs[0].shape[1:])}
    model, feeds = contrib_node(op, inputs, outputs, attrs, range(1, len(inputs)), dims)
    assert worst_error(*both(model, feeds)) <= 2e-6


def test_norm_in_the_domain_of_onnx() -> None:
    """onnxruntime's optimiser writes this one of its operators without its domain."""
    node = helper.make_node("SimplifiedLayerNormalization", ["x", "g"], ["y"], axis=-1)
    values = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["B", 5, 8]) for n in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:], [numpy_helper.from_array(COLUMN[0], "g")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    assert worst_error(run(model, {"x": X}), run(to_model(normalize(load(model))), {"x": X})) <= 2e-6


IDS = np.random.default_rng(0).integers(0, 9, (3, 5)).astype(np.int32)


@pytest.mark.parametrize(
    ("segments", "mask", "places"), [(IDS % 2, IDS % 2, None), (None, None, IDS[::-1]), (None, None, IDS[:1])]
)
def test_embeddings(segments: Any, mask: Any, places: Any) -> None:
    tables = [normal(9, 8, seed=1), normal(9, 8, seed=2), None if segments is None else normal(2, 8)]
    inputs = [IDS, segments, *tables, *COLUMN[:2], mask, places]
    types = [np.float32, np.int32, np.float32]
    made = contrib_node("EmbedLayerNormalization", inputs, ["y", "lengths", "sum"], constants=range(2, 7), types=types)
    assert worst_error(*both(*made)) <= 2e-6


def test_on_gpus_only() -> None:
    """Operators that onnxruntime has no CPU kernel for, by their definitions."""

    def found(op: str, inputs: list[Any], **attrs: Any) -> list[Any]:
        model, feeds = contrib_node(op, inputs, ["y"], attrs, range(1, len(inputs)))
        return run(to_model(normalize(load(model))), feeds)

    def expected(op: str, inputs: list[Any], **attrs: Any) -> list[Any]:
        return run(*contrib_node(op, inputs, ["y"], attrs, range(1, len(inputs))))

    w, rows = normal(8, 6), normal(5, 8)
    product = expected("FastGelu", [rows @ w, normal(6)])
    assert worst_error(product, found("GemmFastGelu", [rows, w, normal(6)])) <= 2e-6
    gate = expected("Gelu", [(X + COLUMN[0])[..., 4:]])[0]
    assert worst_error([(X + COLUMN[0])[..., :4] * gate], found("BiasSplitGelu", [X, COLUMN[0]])) <= 2e-6
    assert worst_error([X + COLUMN[0] + X], found("BiasAdd", [X, COLUMN[0], X])) <= 1e-6
    image = normal(2, 4, 3, 8)
    for op, extra in (("GroupNorm", []), ("SkipGroupNorm", [normal(2, 8), COLUMN[2]])):
        total = image if not extra else image + extra[0][:, None, None] + extra[1]
        groups = total.reshape(2, 12, 2, 4)
        mean, variance = (f(groups, axis=(1, 3), keepdims=True) for f in (np.mean, np.var))
        y = ((groups - mean) / np.sqrt(variance + 1e-5)).reshape(image.shape) * COLUMN[0] + COLUMN[1]
        inputs = [image, *COLUMN[:2], *extra]
        assert worst_error([y / (1 + np.exp(-y))], found(op, inputs, groups=2, activation=1)) <= 2e-6
        turned = [image.transpose(0, 3, 1, 2), *inputs[1:]]
        got = found(op, turned, groups=2, activation=0, channels_last=0)
        assert worst_error([y.transpose(0, 3, 1, 2)], got) <= 2e-6


@pytest.mark.parametrize(
    ("domain", "advice"),
    [("com.microsoft.nchwc", "basic or extended"), ("com.microsoft", "before"), ("my.own", "export the model without")],
)
def test_foreign_operators_are_refused_by_name(domain: str, advice: str) -> None:
    model, _ = contrib_node("Mystery", [X])
    model.graph.node[0].domain = domain
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.opset_import.append(helper.make_opsetid(domain, 1))
    with pytest.raises(UnsupportedOperator, match=f"{domain}::Mystery.*{advice}"):
        normalize(load(model))
