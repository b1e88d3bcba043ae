"""Pooling, transposed convolutions, resizing and softmaxes of flattened rows: onnxruntime's results, in other operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from coda_edge.passes import PIPELINE
from graphs import one_node, run, to_model, worst_error
from onnx import TensorProto, helper, numpy_helper
from rewriting import model, normal, rewrite

from coda_edge.frontend import load, normalize

Array = npt.NDArray[Any]


def _node(op: str, dims: list[Any], constants: dict[str, Array], absent: int = 0, **attributes: Any) -> onnx.ModelProto:
    """``y = op(x, constants…)``, with ``absent`` inputs left out between them."""
    rank = len(dims)
    graph = helper.make_graph(
        [helper.make_node(op, ["x", *[""] * absent, *constants], ["y"], name="node", **attributes)],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * rank)],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


IMAGE: list[Any] = ["n", 3, "h", "w"]
POOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "max": ("MaxPool", {"kernel_shape": [2, 3]}),
    "max, padded": ("MaxPool", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}),
    "max, dilated": ("MaxPool", {"kernel_shape": [2, 2], "dilations": [2, 3]}),
    "average": ("AveragePool", {"kernel_shape": [3, 2], "strides": [3, 2]}),
    "average, padded": ("AveragePool", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    "average, padding counted": (
        "AveragePool",
        {"kernel_shape": [3, 3], "pads": [1, 0, 1, 2], "strides": [2, 1], "count_include_pad": 1},
    ),
    "average, rounded up": (
        "AveragePool",
        {"kernel_shape": [2, 1], "strides": [2, 1], "ceil_mode": 1, "count_include_pad": 1},
    ),
    "average, padded and rounded up": (
        "AveragePool",
        {"kernel_shape": [4, 3], "strides": [3, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1},
    ),
    "max, rounded up": ("MaxPool", {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1}),
    "max, same": ("MaxPool", {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "average, same": ("AveragePool", {"kernel_shape": [4, 1], "strides": [3, 2], "auto_pad": "SAME_LOWER"}),
    "average, same, padding counted": (
        "AveragePool",
        {"kernel_shape": [3, 3], "strides": [2, 1], "auto_pad": "SAME_UPPER", "count_include_pad": 1},
    ),
    "norm, same": ("LpPool", {"kernel_shape": [3, 3], "strides": [2, 3], "auto_pad": "SAME_LOWER", "p": 1}),
}


@pytest.mark.parametrize("name", POOLS)
def test_pool(name: str) -> None:
    op, attributes = POOLS[name]
    done = rewrite(_node(op, IMAGE, {}, **attributes), PIPELINE)
    assert op not in done.ops() and set(done.ops()) == {"Map"}
    for shape in ((2, 3, 7, 9), (1, 3, 6, 6)):
        assert done.error({"x": normal(*shape)}) < 1e-6


def test_pool_of_a_static_and_a_dynamic_size() -> None:
    """SAME at a stride along both: what the static one asks for is a number."""
    attributes: dict[str, Any] = {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"}
    for op in ("MaxPool", "AveragePool"):
        done = rewrite(_node(op, ["n", 3, 7, "w"], {}, **attributes), PIPELINE)
        assert op not in done.ops()
        for width in (1, 6, 9):
            assert done.error({"x": normal(2, 3, 7, width)}) < 1e-6


LARGE: dict[str, tuple[str, dict[str, Any], list[Any], set[str]]] = {
    "average of all": ("AveragePool", {"kernel_shape": [7, 9]}, [7, 9], {"ReduceMean", "Map"}),
    "max of all": ("MaxPool", {"kernel_shape": [7, 9]}, [7, 9], {"ReduceMax", "Map"}),
    "max of one axis": ("MaxPool", {"kernel_shape": [7, 2], "pads": [0, 1, 0, 0]}, [7, "w"], {"ReduceMax", "Map"}),
    "padded": (
        "AveragePool",
        {"kernel_shape": [5, 5], "pads": [2, 2, 2, 2], "strides": [4, 4]},
        [2, 3],
        {"ReduceMean", "Map"},
    ),
    "the last rows left out": ("LpPool", {"kernel_shape": [5, 4], "strides": [3, 5]}, [7, 8], {"ReduceSum", "Map"}),
    "beyond the end": (
        "AveragePool",
        {"kernel_shape": [320, 320], "strides": [320, 320], "ceil_mode": 1, "count_include_pad": 1},
        [2, 3],
        {"ReduceMean", "Map"},
    ),
    "mostly padding": ("MaxPool", {"kernel_shape": [41, 41], "pads": [40, 40, 40, 40]}, [2, 3], {"Map"}),
}


@pytest.mark.parametrize("name", LARGE)
def test_windows_larger_than_the_picture(name: str) -> None:
    op, attributes, sizes, expected = LARGE[name]
    done = rewrite(_node(op, ["n", 3, *sizes], {}, **attributes), PIPELINE)
    assert set(done.ops()) <= expected and len(done.graph.nodes) < 10
    assert done.error({"x": normal(2, 3, *(s if isinstance(s, int) else 6 for s in sizes))}) < 1e-6


TRANSPOSED: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "patches": ((3, 4, 2, 2), {"strides": [2, 2]}),
    "uneven patches": ((3, 4, 3, 2), {"strides": [3, 2]}),
    "overlapping": ((3, 4, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "stride 1": ((3, 4, 3, 3), {"pads": [1, 0, 0, 2]}),
    "more at the end": ((3, 4, 3, 3), {"strides": [2, 3], "output_padding": [1, 2]}),
    "dilated": ((3, 4, 3, 2), {"strides": [2, 1], "dilations": [2, 3]}),
    "groups": ((4, 3, 3, 3), {"strides": [2, 2], "group": 2}),
    "groups, all phases at once": ((4, 3, 4, 2), {"strides": [2, 1], "group": 2, "pads": [1, 0, 0, 1]}),
    "each channel by itself": ((4, 1, 4, 4), {"strides": [2, 2], "group": 4, "pads": [1, 1, 1, 1]}),
    "phases without taps": ((3, 4, 2, 1), {"strides": [3, 3], "output_padding": [2, 1]}),
    "dilated and strided": ((3, 4, 3, 3), {"strides": [2, 3], "dilations": [3, 2], "pads": [2, 1, 3, 4]}),
    "more cut off than a stride": ((3, 4, 7, 5), {"strides": [2, 1], "pads": [3, 3, 3, 1]}),
    "same": ((3, 4, 5, 3), {"strides": [2, 3], "auto_pad": "SAME_LOWER"}),
}


@pytest.mark.parametrize("name", TRANSPOSED)
@pytest.mark.parametrize("bias", [False, True])
def test_transposed_convolution(name: str, bias: bool) -> None:
    shape, attributes = TRANSPOSED[name]
    group = attributes.get("group", 1)
    constants = {"w": normal(*shape)} | ({"b": normal(shape[1] * group, seed=1)} if bias else {})
    done = rewrite(_node("ConvTranspose", ["n", shape[0], "h", "w"], constants, **attributes), PIPELINE)
    assert "ConvTranspose" not in done.ops()
    assert "patches" not in name or "Conv" not in done.ops()
    for size in ((2, shape[0], 4, 5), (1, shape[0], 1, 3)):
        assert done.error({"x": normal(*size, seed=2)}) < 1e-6


@pytest.mark.parametrize("size", [[19, 13], [21, 16]])
def test_transposed_convolution_to_a_size(size: list[int]) -> None:
    attributes: dict[str, Any] = {"strides": [2, 3], "output_shape": size, "kernel_shape": [4, 3]}
    done = rewrite(_node("ConvTranspose", [2, 3, 9, 5], {"w": normal(3, 4, 4, 3)}, **attributes), PIPELINE)
    assert "ConvTranspose" not in done.ops()
    assert done.error({"x": normal(2, 3, 9, 5, seed=2)}) < 1e-6


def test_transposed_convolution_of_a_sequence() -> None:
    done = rewrite(_node("ConvTranspose", ["n", 3, "t"], {"w": normal(3, 2, 8)}, strides=[4], pads=[2, 2]), PIPELINE)
    assert "ConvTranspose" not in done.ops()
    assert done.error({"x": normal(2, 3, 9)}) < 1e-6


RESIZES: dict[str, tuple[dict[str, Array], int, dict[str, Any]]] = {
    "linear": ({"s": np.array([1, 1, 2, 1.5], np.float32)}, 1, {"mode": "linear"}),
    "linear, to a size": ({"s": np.array([2, 3, 11, 4], np.int64)}, 2, {"mode": "linear"}),
    "corners": (
        {"s": np.array([2, 3, 9, 13], np.int64)},
        2,
        {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
    ),
    "cubic": ({"s": np.array([1, 1, 1.7, 2.3], np.float32)}, 1, {"mode": "cubic", "cubic_coeff_a": -0.75}),
    "nearest": (
        {"s": np.array([1, 1, 2, 3], np.float32)},
        1,
        {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    ),
}


@pytest.mark.parametrize("name", RESIZES)
def test_resize(name: str) -> None:
    constants, absent, attributes = RESIZES[name]
    done = rewrite(_node("Resize", [2, 3, 5, 7], constants, absent, **attributes), PIPELINE)
    assert "Resize" not in done.ops()
    assert done.error({"x": normal(2, 3, 5, 7)}) < 1e-5


def test_softmax_of_flattened_rows_is_on_the_rows() -> None:
    """What conversion from opset 11 makes of Softmax: Flatten, Softmax, Reshape to the shape that it had."""
    m = model(
        """
        g (float[n, 2, s, 5] x) => (float[n, 2, s, 5] y) {
            shape = Shape (x)
            flat = Flatten <axis = 3> (x)
            p = Softmax <axis = -1> (flat)
            y = Reshape (p, shape)
        }
        """
    )
    done = rewrite(m, [])
    assert done.ops() == {"Softmax": 1}
    assert done.error({"x": normal(3, 2, 4, 5)}) < 1e-6


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("place", ["half_pixel", "asymmetric", "pytorch_half_pixel", "align_corners"])
def test_resize_of_dynamic_sizes(place: str, mode: str) -> None:
    """By scales up and down, and to sizes."""
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 7)).astype(np.float32)
    attrs = {"mode": mode, "coordinate_transformation_mode": place}
    for last in ({"s": np.array([1, 1, 2.0, 0.6], np.float32)}, {"_s": x, "z": np.array([2, 3, 11, 9])}):
        constants = tuple(n for n in last if n in ("s", "z"))
        model = one_node("Resize", {"x": x, "_r": x, **last}, 1, 19, constants, {"x": (2, 3, "h", "w")}, **attrs)
        made = to_model(normalize(load(model)))
        assert "Resize" not in {n.op_type for n in made.graph.node}
        assert worst_error(run(model, {"x": x}), run(made, {"x": x})) <= 1e-5
