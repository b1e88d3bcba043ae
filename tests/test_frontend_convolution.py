"""Convolutions as matrix products: equal to onnxruntime's Conv, and without a transpose where the model undoes it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from coda_edge.passes import PIPELINE
from lowering import Compiled, assert_same
from onnx import TensorProto, helper
from rewriting import model, normal, rewrite, run

Array = npt.NDArray[Any]


def _conv(weight: Array, dims: list[Any], bias: bool = True, **attributes: Any) -> onnx.ModelProto:
    """``y = Conv(x)`` with constant weights; the output's sizes are left open."""
    tensors = [onnx.numpy_helper.from_array(weight, "w")]
    if bias:
        tensors.append(onnx.numpy_helper.from_array(normal(weight.shape[0], seed=1), "b"))
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w", "b"][: 2 + bias], ["y"], name="conv", **attributes)],
        "conv",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(dims))],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


# (shape of the weights, attributes, shape of the input as declared, shapes fed)
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], list[Any], list[tuple[int, ...]]]] = {
    "1×1": ((5, 3, 1, 1), {}, ["n", 3, "h", "w"], [(1, 3, 4, 7), (3, 3, 1, 5)]),
    "1×1 with strides": ((5, 3, 1, 1), {"strides": [2, 3]}, ["n", 3, "h", "w"], [(2, 3, 5, 7), (1, 3, 6, 6)]),
    "1-D, kernel 1": ((5, 3, 1), {}, ["n", 3, "t"], [(2, 3, 9)]),
    "1×1 with padding": ((5, 3, 1, 1), {"pads": [1, 0, 0, 2]}, ["n", 3, "h", "w"], [(2, 3, 4, 5)]),
    "patches": ((6, 3, 4, 2), {"strides": [4, 2]}, ["n", 3, 12, 10], [(1, 3, 12, 10), (3, 3, 12, 10)]),
    "patches of dynamic images": (
        (6, 3, 4, 2),
        {"strides": [4, 2]},
        ["n", 3, "h", "w"],
        [(2, 3, 12, 10), (1, 3, 15, 9)],
    ),
    "patches with a rest": ((6, 3, 4, 4), {"strides": [4, 4]}, ["n", 3, 14, 9], [(2, 3, 14, 9)]),
    "1-D patches": ((6, 3, 5), {"strides": [5]}, ["n", 3, "t"], [(2, 3, 23)]),
    "kernel 3": ((6, 4, 3), {"pads": [1, 1]}, ["n", 4, "t"], [(2, 4, 11), (1, 4, 1)]),
    "kernel 3, stride 2": ((6, 4, 3), {"pads": [1, 1], "strides": [2]}, ["n", 4, "t"], [(2, 4, 11), (1, 4, 8)]),
    "dilated": ((6, 4, 3), {"pads": [2, 2], "dilations": [2]}, ["n", 4, "t"], [(2, 4, 11), (1, 4, 5)]),
    "uneven padding": ((6, 4, 4), {"pads": [3, 0]}, ["n", 4, "t"], [(2, 4, 11)]),
    "3×3, stride 2": (
        (6, 3, 3, 3),
        {"pads": [1, 1, 1, 1], "strides": [2, 2]},
        ["n", 3, "h", "w"],
        [(2, 3, 9, 8), (1, 3, 3, 3)],
    ),
    "same, upper": ((6, 4, 4), {"auto_pad": "SAME_UPPER"}, ["n", 4, "t"], [(2, 4, 11)]),
    "same, lower, stride 2": ((6, 4, 3), {"auto_pad": "SAME_LOWER", "strides": [2]}, ["n", 4, 10], [(2, 4, 10)]),
    "same, upper, strides, dynamic": (
        (6, 3, 4, 3),
        {"auto_pad": "SAME_UPPER", "strides": [3, 2]},
        ["n", 3, "h", "w"],
        [(2, 3, 9, 8), (1, 3, 10, 7), (1, 3, 11, 1)],
    ),
    "same, lower, strides, dynamic": (
        (6, 3, 1, 4),
        {"auto_pad": "SAME_LOWER", "strides": [2, 2], "dilations": [1, 1]},
        ["n", 3, "h", "w"],
        [(2, 3, 9, 8), (1, 3, 4, 5)],
    ),
    "same, 1×1, strides, dynamic": (
        (6, 3, 1, 1),
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        ["n", 3, "h", "w"],
        [(2, 3, 9, 8)],
    ),
    "3×3": ((6, 3, 3, 3), {"pads": [1, 1, 1, 1]}, ["n", 3, "h", "w"], [(2, 3, 5, 6), (1, 3, 1, 1)]),
    "9×9": ((4, 3, 9, 9), {"pads": [4, 4, 4, 4]}, [1, 3, "h", "w"], [(1, 3, 5, 12)]),
    "3-D": ((4, 2, 3, 1, 2), {"pads": [1, 0, 1, 1, 0, 0], "strides": [2, 1, 1]}, [2, 2, 5, 3, 4], [(2, 2, 5, 3, 4)]),
    "valid": ((6, 4, 3), {"auto_pad": "VALID"}, ["n", 4, "t"], [(2, 4, 11)]),
}


@pytest.mark.parametrize("name", CASES)
def test_conv_is_a_gemm(name: str) -> None:
    shape, attributes, dims, fed = CASES[name]
    done = rewrite(_conv(normal(*shape), dims, **attributes), PIPELINE)
    assert "Conv" not in done.ops()
    assert done.ops()["Gemm"] == 1
    assert "Window" not in done.ops()
    plain = rewrite(_conv(normal(*shape), dims, **attributes), [])
    for feed in fed:
        assert plain.error({"x": normal(*feed, seed=2)}) < 1e-6
        assert done.error({"x": normal(*feed, seed=2)}) < 1e-6


GROUPED: dict[str, tuple[tuple[int, ...], dict[str, Any], list[Any], list[tuple[int, ...]]]] = {
    "depthwise": ((6, 1, 3), {"group": 6, "pads": [1, 1]}, ["n", 6, "t"], [(2, 6, 11), (1, 6, 1)]),
    "depthwise, 2-D, strides": (
        (8, 1, 3, 5),
        {"group": 4, "pads": [1, 2, 0, 3], "strides": [2, 1]},
        ["n", 4, "h", "w"],
        [(2, 4, 7, 9)],
    ),
    "groups of several channels": ((6, 2, 3, 3), {"group": 2, "dilations": [1, 2]}, ["n", 4, 5, "w"], [(3, 4, 5, 7)]),
    "1×1": ((6, 2, 1), {"group": 3}, ["n", 6, "t"], [(2, 6, 5)]),
}


@pytest.mark.parametrize("name", GROUPED)
def test_conv_in_groups_has_an_epilogue(name: str) -> None:
    """Its bias joins it; the exported function is the convolution in ONNX's own operators."""
    shape, attributes, dims, fed = GROUPED[name]
    done = rewrite(_conv(normal(*shape), dims, **attributes), PIPELINE)
    assert done.ops()["GroupedConv"] == 1 and not set(done.ops()) - {"GroupedConv", "Map", "Reshape"}
    (node,) = (n for n in done.graph.nodes if n.op == "GroupedConv")
    assert "add acc col0" in node.attrs["epilogue"]
    for feed in fed:
        assert done.error({"x": normal(*feed, seed=2)}) < 1e-6


def test_padding_by_a_dynamic_size_in_groups() -> None:
    """Computed from the size, and put in front of the convolution."""
    weight = normal(6, 1, 3)
    done = rewrite(_conv(weight, ["n", 6, "t"], group=6, auto_pad="SAME_LOWER", strides=[2]), PIPELINE)
    assert done.ops()["GroupedConv"] == 1 and "Conv" not in done.ops()
    for length in (1, 8, 11):
        assert done.error({"x": normal(2, 6, length, seed=2)}) < 1e-6


def test_squeeze_and_excite_stays_channels_last() -> None:
    """Between depthwise and 1×1 convolutions nothing is turned: not for the pooling, nor for the factors that come of it."""
    m = model(
        """
        g (float[n, 8, h, w] x) => (float[n, 6, h, w] y) {
            depthwise = Conv <group = 8, pads = [1, 1, 1, 1]> (x, w)
            active = HardSwish (depthwise)
            pooled = GlobalAveragePool (active)
            squeezed = Conv (pooled, s)
            factors = Sigmoid (squeezed)
            excited = Mul (active, factors)
            y = Conv (excited, v)
        }
        """,
        {"w": normal(8, 1, 3, 3), "s": normal(8, 8, 1, 1, seed=1), "v": normal(6, 8, 1, 1, seed=2)},
    )
    done = rewrite(m, PIPELINE)
    turned = [n for n in done.graph.nodes if n.op == "Map" and any(i.op == "Transpose" for i in n.attrs["body"].nodes)]
    assert len(turned) == 2  # the picture and the result
    assert done.ops()["GroupedConv"] == 1 and done.ops()["Gemm"] == 2
    assert done.error({"x": normal(2, 8, 5, 6)}) < 1e-6


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_resizing_between_convolutions_stays_channels_last(mode: str) -> None:
    m = model(
        f"""
        g (float[n, 4, 5, 7] x) => (float[n, 6, 10, 14] y) {{
            a = Conv (x, w)
            b = Relu (a)
            wide = Resize <mode = "{mode}"> (b, , scales)
            y = Conv <pads = [1, 1, 1, 1]> (wide, v)
        }}
        """,
        {"w": normal(8, 4, 1, 1), "v": normal(6, 8, 3, 3, seed=1), "scales": np.array([1, 1, 2, 2], np.float32)},
    )
    done = rewrite(m, PIPELINE)
    turned = [n for n in done.graph.nodes if n.op == "Map" and any(i.op == "Transpose" for i in n.attrs["body"].nodes)]
    assert len(turned) == 2  # the picture and the result
    assert done.error({"x": normal(2, 4, 5, 7)}) < 1e-5


KEPT: dict[str, tuple[tuple[int, ...], dict[str, Any], list[Any]]] = {
    "padding that a dynamic size may clamp": ((6, 3, 2), {"auto_pad": "SAME_UPPER", "strides": [3]}, ["n", 3, "t"]),
}


@pytest.mark.parametrize("name", KEPT)
def test_conv_is_kept(name: str) -> None:
    shape, attributes, dims = KEPT[name]
    assert rewrite(_conv(normal(*shape), dims, **attributes), PIPELINE).ops() == Counter({"Conv": 1})


def test_patch_embedding_needs_one_gather_and_one_gemm() -> None:
    """The layout that the convolution gives is turned by the model into rows: nothing of that is left."""
    m = model(
        """
        g (float[n, 3, 8, 12] x) => (float[n, 6, 16] y) <int64[3] flat = {0, 16, -1}> {
            image = Conv <kernel_shape = [4, 4], strides = [4, 4]> (x, w, b)
            grid = Reshape (image, flat)
            rows = Transpose <perm = [0, 2, 1]> (grid)
            y = Add (rows, position)
        }
        """,
        {"w": normal(16, 3, 4, 4), "b": normal(16, seed=1), "position": normal(1, 6, 16, seed=2)},
    )
    done = rewrite(m, PIPELINE)
    kernels = done.ops()
    assert kernels["Gemm"] == 1
    assert kernels["Map"] == 1
    assert not set(kernels) - {"Gemm", "Map", "Reshape"}
    assert done.error({"x": normal(3, 3, 8, 12)}) < 1e-6


def test_activation_and_residual_between_convolutions_cross_no_transpose() -> None:
    m = model(
        """
        g (float[n, 4, t] x) => (float[n, t, 6] y) <float half = {0.5}> {
            a = Conv <kernel_shape = [3], pads = [1, 1]> (x, w1, b)
            gate = Sigmoid (a)
            c = Mul (a, gate)
            d = Conv <kernel_shape = [3], pads = [1, 1]> (c, w2, b)
            e = Add (d, c)
            f = Mul (e, half)
            g = Add (f, channel)
            y = Transpose <perm = [0, 2, 1]> (g)
        }
        """,
        {
            "w1": normal(6, 4, 3),
            "w2": normal(6, 6, 3, seed=1),
            "b": normal(6, seed=2),
            "channel": normal(6, 1, seed=3),
        },
    )
    done = rewrite(m, PIPELINE)
    assert done.ops() == Counter({"Gemm": 2, "Map": 1})
    inside = [n.op for node in done.graph.nodes if node.op == "Map" for n in node.attrs["body"].nodes]
    assert inside.count("Transpose") == 1
    for shape in ((1, 4, 1), (3, 4, 7)):
        assert done.error({"x": normal(*shape)}) < 1e-6


def test_transposes_that_do_not_undo_each_other_stay() -> None:
    m = model(
        """
        g (float[2, 3, 4] x) => (float[3, 4, 2] y) {
            a = Transpose <perm = [2, 0, 1]> (x)
            b = Tanh (a)
            y = Transpose <perm = [2, 0, 1]> (b)
        }
        """
    )
    done = rewrite(m, [])
    assert done.error({"x": normal(2, 3, 4)}) < 1e-6
    assert done.ops()["Tanh"] == 1


def test_an_operand_that_is_not_transposed_keeps_the_transpose() -> None:
    m = model(
        """
        g (float[2, 3, 4] x, float[2, 4, 3] z) => (float[2, 3, 4] y) {
            a = Transpose <perm = [0, 2, 1]> (x)
            b = Add (a, z)
            y = Transpose <perm = [0, 2, 1]> (b)
        }
        """
    )
    done = rewrite(m, [])
    assert done.ops() == Counter({"Transpose": 2, "Add": 1})
    assert done.error({"x": normal(2, 3, 4), "z": normal(2, 4, 3, seed=1)}) < 1e-6


def test_a_height_that_the_model_needs_to_be_one_after_strides() -> None:
    """A quotient of a size cannot be solved for it: it is known as a whole, and the assumption is kept."""
    m = model(
        """
        g (float[n, 3, h, w] x) => (float[n, s, 4] y) <int64[3] flat = {0, 4, -1}, int64[1] two = {2}> {
            a = Conv <kernel_shape = [8, 1], strides = [8, 1]> (x, k)
            shape = Shape <start = 0, end = 2> (a)
            width = Shape <start = 3, end = 4> (a)
            target = Concat <axis = 0> (shape, width)
            b = Reshape (a, target)
            y = Transpose <perm = [0, 2, 1]> (b)
        }
        """,
        {"k": normal(4, 3, 8, 1)},
    )
    done = rewrite(m, PIPELINE)
    assert done.ops()["Gemm"] == 1
    for shape in ((2, 3, 8, 5), (1, 3, 15, 7)):
        assert done.error({"x": normal(*shape)}) < 1e-6


def test_what_each_image_adds_to_its_channels_joins_the_convolution() -> None:
    m = model(
        """
        g (float[n, 4, h, w] x, float[n, 6, 1, 1] e) => (float[n, 5, h, w] y) {
            a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1, b)
            c = Add (a, e)
            d = Relu (c)
            f = Mul (d, place)
            y = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (f, w2)
        }
        """,
        {
            "w1": normal(6, 4, 3, 3),
            "w2": normal(5, 6, 3, 3, seed=1),
            "b": normal(6, seed=2),
            "place": normal(1, 6, 1, 1, seed=3),
        },
    )
    done = rewrite(m, PIPELINE)
    assert done.ops() == Counter({"Gemm": 2, "Map": 2, "Reshape": 1})
    compiled = Compiled(done.graph)
    for n, h, w in ((1, 2, 3), (3, 5, 4)):
        feeds = {"x": normal(n, 4, h, w), "e": normal(n, 6, 1, 1, seed=4)}
        assert done.error(feeds) < 1e-6
        (expected,) = run(m, feeds)
        assert_same(compiled.run(feeds)["y"], expected)


def test_transposes_cancel_through_slices_joints_and_padding() -> None:
    m = model(
        """
        g (float[n, h, w, 4] x) => (float[n, p, q, 8] y)
          <int64[1] one = {1}, int64[1] last = {-1}, int64[1] axis = {-2}, int64[8] pads = {0, 0, 1, 0, 0, 0, 0, 2}> {
            a = Transpose <perm = [0, 3, 1, 2]> (x)
            c = Slice (a, one, last, axis)
            d = Sigmoid (c)
            j = Concat <axis = 1> (c, d)
            f = Pad (j, pads)
            y = Transpose <perm = [0, 2, 3, 1]> (f)
        }
        """
    )
    done = rewrite(m, [])
    assert "Transpose" not in done.ops()
    assert done.error({"x": normal(2, 5, 3, 4)}) == 0
