"""Each composite operator, decomposed, gives what onnxruntime computes for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from graphs import one_node, run, to_model, worst_error

from coda_edge.frontend import load, normalize

Array = npt.NDArray[Any]


def _normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


X = _normal(3, 5, 7, scale=2)
IMAGE = _normal(2, 6, 5, 3)
CHANNEL = [_normal(6, seed=i) for i in range(3)]
SMALL = np.array([[-3.0, -1.0, -0.5], [0.0, 0.5, 4.0]], np.float32)

# (operator, inputs, attributes, opset, names of constant inputs)
CASES: dict[str, tuple[str, dict[str, Array], dict[str, Any], int, tuple[str, ...]]] = {
    "LayerNormalization": ("LayerNormalization", {"x": X, "s": _normal(7), "b": _normal(7, seed=1)}, {}, 18, ()),
    "LayerNormalization without bias": (
        "LayerNormalization",
        {"x": X, "s": _normal(7)},
        {"epsilon": 1e-3},
        18,
        (),
    ),
    "LayerNormalization of two axes": (
        "LayerNormalization",
        {"x": X, "s": _normal(5, 7), "b": _normal(5, 7, seed=1)},
        {"axis": 1},
        18,
        ("s", "b"),
    ),
    "RMSNormalization": ("RMSNormalization", {"x": X, "s": _normal(7)}, {"epsilon": 1e-4}, 23, ()),
    "RMSNormalization of two axes": ("RMSNormalization", {"x": X, "s": _normal(5, 7)}, {"axis": -2}, 23, ()),
    "BatchNormalization": (
        "BatchNormalization",
        {"x": IMAGE, "s": CHANNEL[0], "b": CHANNEL[1], "m": CHANNEL[2], "v": np.abs(CHANNEL[0]) + 1},
        {},
        18,
        ("s", "b", "m", "v"),
    ),
    "InstanceNormalization": (
        "InstanceNormalization",
        {"x": IMAGE, "s": CHANNEL[0], "b": CHANNEL[1]},
        {},
        18,
        ("s",),
    ),
    "GroupNormalization": (
        "GroupNormalization",
        {"x": IMAGE, "s": CHANNEL[0], "b": CHANNEL[1]},
        {"num_groups": 2},
        21,
        (),
    ),
    "LpNormalization 1": ("LpNormalization", {"x": X}, {"p": 1, "axis": 1}, 18, ()),
    "LpNormalization 2": ("LpNormalization", {"x": X}, {}, 18, ()),
    "Gelu erf": ("Gelu", {"x": X}, {}, 20, ()),
    "Gelu tanh": ("Gelu", {"x": X}, {"approximate": "tanh"}, 20, ()),
    "Swish": ("Swish", {"x": X}, {"alpha": 1.702}, 24, ()),
    "HardSwish": ("HardSwish", {"x": X}, {}, 18, ()),
    "HardSigmoid": ("HardSigmoid", {"x": X}, {"alpha": 0.3, "beta": 0.4}, 18, ()),
    "Elu": ("Elu", {"x": SMALL}, {"alpha": 1.5}, 18, ()),
    "Selu": ("Selu", {"x": SMALL}, {}, 18, ()),
    "Celu": ("Celu", {"x": SMALL}, {"alpha": 2.0}, 18, ()),
    "LeakyRelu": ("LeakyRelu", {"x": SMALL}, {"alpha": 0.2}, 18, ()),
    "PRelu": ("PRelu", {"x": X, "s": _normal(7)}, {}, 18, ()),
    "ThresholdedRelu": ("ThresholdedRelu", {"x": SMALL}, {"alpha": 0.5}, 18, ()),
    "Softplus": ("Softplus", {"x": _normal(3, 5, scale=60)}, {}, 18, ()),
    "Softsign": ("Softsign", {"x": X}, {}, 18, ()),
    "Mish": ("Mish", {"x": X}, {}, 18, ()),
    "Clip": ("Clip", {"x": X, "l": np.float32(-0.5), "h": np.float32(1.5)}, {}, 18, ("l", "h")),
    "Clip from above": ("Clip", {"x": X, "_": X, "h": np.float32(0.5)}, {}, 18, ("h",)),
    "Gemm": ("Gemm", {"a": _normal(5, 3), "b": _normal(3, 4), "c": _normal(4)}, {"alpha": 0.5, "beta": 2.0}, 18, ()),
    "Gemm transposed": (
        "Gemm",
        {"a": _normal(3, 5), "b": _normal(4, 3), "c": _normal(5, 1)},
        {"transA": 1, "transB": 1, "alpha": 3.0},
        18,
        ("b",),
    ),
    "Gemm without bias": ("Gemm", {"a": _normal(5, 3), "b": _normal(3, 4)}, {}, 18, ("b",)),
    "Sum": ("Sum", {"a": X, "b": X + 1, "c": _normal(7)}, {}, 18, ()),
    "Mean": ("Mean", {"a": X, "b": X + 1, "c": _normal(7)}, {}, 18, ()),
    "Max": ("Max", {"a": X, "b": -X, "c": _normal(7)}, {}, 18, ()),
    "Min of one": ("Min", {"a": X}, {}, 18, ()),
    "ReduceMean of all": ("ReduceMean", {"x": X}, {"keepdims": 0}, 18, ()),
    "ReduceSum of none": ("ReduceSum", {"x": X}, {"noop_with_empty_axes": 1}, 18, ()),
    "ReduceMax": ("ReduceMax", {"x": X, "axes": np.array([-1, 0])}, {"keepdims": 0}, 18, ("axes",)),
    "ReduceL1": ("ReduceL1", {"x": X, "axes": np.array([1])}, {}, 18, ("axes",)),
    "ReduceL2": ("ReduceL2", {"x": X, "axes": np.array([-1])}, {}, 18, ("axes",)),
    "ReduceSumSquare": ("ReduceSumSquare", {"x": X, "axes": np.array([-1])}, {"keepdims": 0}, 18, ("axes",)),
    "ReduceLogSum": ("ReduceLogSum", {"x": np.abs(X), "axes": np.array([-1])}, {}, 18, ("axes",)),
    "ReduceLogSumExp": ("ReduceLogSumExp", {"x": X, "axes": np.array([-1])}, {"keepdims": 0}, 18, ("axes",)),
    "GlobalAveragePool": ("GlobalAveragePool", {"x": IMAGE}, {}, 18, ()),
    "GlobalMaxPool": ("GlobalMaxPool", {"x": IMAGE}, {}, 18, ()),
    "Softmax": ("Softmax", {"x": X}, {"axis": -2}, 18, ()),
    "LogSoftmax": ("LogSoftmax", {"x": X}, {}, 18, ()),
    "CastLike": ("CastLike", {"x": X, "t": np.int64(1)}, {}, 18, ("t",)),
    "Tile": ("Tile", {"x": X, "r": np.array([1, 3, 2])}, {}, 18, ("r",)),
    "Tile of ones": ("Tile", {"x": _normal(3, 1, 7), "r": np.array([1, 4, 1])}, {}, 18, ("r",)),
    "Trilu upper": ("Trilu", {"x": X, "k": np.int64(1)}, {"upper": 1}, 18, ("k",)),
    "Trilu lower": ("Trilu", {"x": X}, {"upper": 0}, 18, ()),
    "Trilu bool": ("Trilu", {"x": X > 0, "k": np.int64(-1)}, {"upper": 0}, 18, ("k",)),
    "Gather one": ("Gather", {"x": X, "i": np.int64(-1)}, {"axis": 1}, 18, ("i",)),
    "Gather one of many": ("Gather", {"x": X, "i": np.array([2])}, {"axis": -1}, 18, ("i",)),
    **{
        f"Pow {p}": ("Pow", {"x": np.abs(X) + 0.1, "p": np.float32(p)}, {}, 18, ("p",))
        for p in (1.0, 2.0, 3.0, 0.5, -1.0, -0.5, 1.7)
    },
}


@pytest.mark.parametrize("case", CASES)
def test_equal_to_onnxruntime(case: str) -> None:
    op, inputs, attrs, opset, constants = CASES[case]
    feeds = {n: v for n, v in inputs.items() if n not in constants and not n.startswith("_")}
    first = next(iter(inputs))
    dims = {first: ("n", *inputs[first].shape[1:])}
    model = one_node(op, inputs, 1, opset, constants, dims, **attrs)
    normal = to_model(normalize(load(model)))
    onnx.checker.check_model(normal)
    if case not in ("Pow 1.7", "Softmax", "Max", "ReduceMax", "ReduceMean of all"):
        assert op not in {n.op_type for n in normal.graph.node}
    assert worst_error(run(model, feeds), run(normal, feeds)) <= 1e-6


def test_layer_norm_gives_its_statistics() -> None:
    inputs = {"x": X, "s": _normal(7), "b": _normal(7, seed=1)}
    model = one_node("LayerNormalization", inputs, 3, constants=("s", "b"))
    assert worst_error(run(model, {"x": X}), run(to_model(normalize(load(model))), {"x": X})) <= 1e-6


@pytest.mark.parametrize("op", ["LayerNormalization", "RMSNormalization"])
def test_norms_of_half_precision_compute_in_single(op: str) -> None:
    x = (_normal(4, 33, scale=200)).astype(np.float16)
    inputs = {"x": x, "s": _normal(33).astype(np.float16)}
    model = one_node(op, inputs, 1, 23, ("s",))
    expected, got = run(model, {"x": x})[0], run(to_model(normalize(load(model))), {"x": x})[0]
    assert got.dtype == np.float16
    np.testing.assert_allclose(got.astype(np.float32), expected.astype(np.float32), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("parts", [(2, 5), (1, 1, 5)])
def test_split(parts: tuple[int, ...]) -> None:
    model = one_node("Split", {"x": X, "sizes": np.array(parts)}, len(parts), 18, ("sizes",), axis=-1)
    normal = to_model(normalize(load(model)))
    assert {n.op_type for n in normal.graph.node} == {"Slice"}
    assert worst_error(run(model, {"x": X}), run(normal, {"x": X})) == 0


def test_dropout_goes() -> None:
    model = one_node("Dropout", {"x": X}, 1)
    graph = normalize(load(model))
    assert [n.op for n in graph.nodes] == ["Identity"]  # an output that is an input needs a copy
    assert worst_error(run(model, {"x": X}), run(to_model(graph), {"x": X})) == 0
