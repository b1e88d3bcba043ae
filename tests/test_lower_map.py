"""Whole chains of pointwise operators in one kernel, with and without row statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from lowering import Array, Compiled, assert_same, model, reference
from onnx import helper

from coda_edge.frontend import infer

node = helper.make_node


def as_map(proto: onnx.ModelProto, moments: str | None = None) -> gs.Graph:
    """The whole of ``proto`` as the body of one Map; ``moments`` names a value whose row statistics are wanted too."""
    body = gs.import_onnx(proto)
    infer(body)
    large = [t for t in body.tensors().values() if isinstance(t, gs.Constant) and t.values.size > 16]
    outer: dict[str, Any] = {t.name: gs.Variable(t.name, t.dtype, t.shape) for t in body.inputs}
    for t in large:
        outer[t.name] = gs.Constant(t.name, t.values)
        inner = gs.Variable(t.name, t.dtype, t.values.shape)
        for n in body.nodes:
            n.inputs = [inner if i is t else i for i in n.inputs]
        body.inputs.append(inner)
    if moments is not None:
        value = body.tensors()[moments]
        statistics = [gs.Variable(name, np.dtype(np.float32), [*value.shape[:-1], 1]) for name in ("mean", "var")]
        body.nodes.append(gs.Node("RowMoments", "moments", {}, [value], statistics, domain="coda"))
        body.outputs.extend(statistics)
    outputs = [gs.Variable(t.name, t.dtype, t.shape) for t in body.outputs]
    inputs = [outer[t.name] for t in body.inputs]
    one = gs.Node("Map", "map", {"body": body, "source": []}, inputs, outputs, domain="coda")
    return gs.Graph([one], [t for t in inputs if isinstance(t, gs.Variable)], outputs, opset=20)


def check(proto: onnx.ModelProto, feeds: Sequence[Mapping[str, Array]], kernels: int = 1) -> Compiled:
    compiled = Compiled(as_map(proto))
    assert len(compiled.lowered.plan.steps) == kernels
    for given in feeds:
        found, expected = compiled.run(given), reference(proto, given)
        for name in expected:
            assert_same(found[name], expected[name], 1e-5)
    return compiled


def random(*dims: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(dims).astype(np.float32)


def embedding(words: int, length: int, width: int) -> onnx.ModelProto:
    nodes = [
        node("Gather", ["W", "ids"], ["w"]),
        node("Shape", ["ids"], ["n"], start=1, end=2),
        node("Squeeze", ["n"], ["stop"]),
        node("Range", ["zero", "stop", "one"], ["places"]),
        node("Gather", ["P", "places"], ["p"]),
        node("Gather", ["T", "types"], ["t"]),
        node("Add", ["w", "p"], ["wp"]),
        node("Add", ["wp", "t"], ["x"]),
    ]
    tables = {"W": random(words, width), "P": random(length, width, seed=1), "T": random(2, width, seed=2)}
    constants = tables | {"zero": np.array(0), "one": np.array(1)}
    return model(nodes, {"ids": ("int64", ("B", "S")), "types": ("int64", ("B", "S"))}, ["x"], constants)


@pytest.mark.parametrize("width", [1, 16, 20, 384])
@pytest.mark.parametrize("stored", [True, False])
def test_embeddings_with_their_moments_are_one_kernel(width: int, stored: bool) -> None:
    proto = embedding(50, 30, width)
    graph = as_map(proto, moments="x")
    if not stored:
        (one,) = graph.nodes
        graph.outputs.pop(0)
        one.outputs.pop(0)
        one.attrs["body"].outputs.pop(0)
    compiled = Compiled(graph)
    assert len(compiled.lowered.plan.steps) == 1
    rng = np.random.default_rng(3)
    for shape in ((2, 7), (1, 30), (5, 1)):
        given = {"ids": rng.integers(-50, 50, shape), "types": rng.integers(0, 2, shape)}
        x = reference(proto, given)["x"]
        found = compiled.run(given)
        if stored:
            assert_same(found["x"], x, 1e-6)
        assert_same(found["mean"], x.astype(np.float64).mean(-1, keepdims=True).astype(np.float32), 1e-5)
        assert_same(found["var"], x.astype(np.float64).var(-1, keepdims=True).astype(np.float32), 1e-5)
    with pytest.raises(IndexError):
        compiled.run({"ids": np.array([[0, 50]]), "types": np.array([[0, 0]])})


@pytest.mark.parametrize("half", [1, 3, 16, 32])
def test_rotary_embedding(half: int) -> None:
    nodes = [
        node("Slice", ["x", "zero", "half", "axis"], ["a"]),
        node("Slice", ["x", "half", "far", "axis"], ["b"]),
        node("Neg", ["b"], ["nb"]),
        node("Concat", ["nb", "a"], ["r"], axis=-1),
        node("Mul", ["x", "cos"], ["xc"]),
        node("Mul", ["r", "sin"], ["rs"]),
        node("Add", ["xc", "rs"], ["y"]),
    ]
    constants = {"zero": np.array([0]), "half": np.array([half]), "far": np.array([2**62]), "axis": np.array([-1])}
    d = 2 * half
    shapes = {"x": ("B", 3, "S", d), "cos": ("S", d), "sin": ("S", d)}
    proto = model(nodes, {n: ("float32", s) for n, s in shapes.items()}, ["y"], constants)
    given = {"x": random(2, 3, 5, d), "cos": random(5, d, seed=1), "sin": random(5, d, seed=2)}
    check(proto, [given])


def test_heads_are_merged_without_a_division_for_each_element() -> None:
    nodes = [
        node("Transpose", ["x"], ["t"], perm=[0, 2, 1, 3]),
        node("Reshape", ["t", "shape"], ["m"]),
        node("Mul", ["m", "g"], ["y"]),
    ]
    constants = {"shape": np.array([0, 0, 96]), "g": random(96)}
    proto = model(nodes, {"x": ("float32", ("B", 3, "S", 32))}, ["y"], constants)
    compiled = check(proto, [{"x": random(2, 3, 5, 32)}, {"x": random(1, 3, 1, 32)}])
    text = str(compiled.lowered.kernels[0].func)
    inside = text[text.index("T.vectorized") :]
    assert not any(word in inside for word in ("//", "Div", "mod", "%"))


def test_a_cache_is_lengthened_from_nothing() -> None:
    nodes = [node("Transpose", ["k"], ["kt"], perm=[0, 2, 1, 3]), node("Concat", ["past", "kt"], ["y"], axis=2)]
    inputs = {"past": ("float32", ("B", 2, "P", 8)), "k": ("float32", ("B", "S", 2, 8))}
    proto = model(nodes, inputs, ["y"])
    check(proto, [{"past": random(2, 2, p, 8), "k": random(2, s, 2, 8, seed=1)} for p, s in ((0, 5), (4, 1), (3, 3))])


def test_padding_mask_from_integers() -> None:
    nodes = [
        node("Unsqueeze", ["mask", "axes"], ["m4"]),
        node("Cast", ["m4"], ["f"], to=onnx.TensorProto.FLOAT),
        node("Sub", ["one", "f"], ["i"]),
        node("Mul", ["i", "low"], ["y"]),
    ]
    constants = {"axes": np.array([1, 2]), "one": np.float32(1), "low": np.float32(-3.4028234663852886e38)}
    proto = model(nodes, {"mask": ("int64", ("B", "S"))}, ["y"], {k: np.asarray(v) for k, v in constants.items()})
    check(proto, [{"mask": np.random.default_rng(0).integers(0, 2, (3, n))} for n in (1, 9, 130)])


def test_causal_mask_from_sizes() -> None:
    nodes = [
        node("Shape", ["x"], ["n"], start=1, end=2),
        node("Squeeze", ["n"], ["stop"]),
        node("Range", ["zero", "stop", "one"], ["j"]),
        node("Unsqueeze", ["j", "last"], ["i"]),
        node("Greater", ["j", "i"], ["later"]),
        node("Where", ["later", "low", "high"], ["y"]),
    ]
    constants = {"zero": np.array(0), "one": np.array(1), "last": np.array([1])}
    constants |= {"low": np.array(-np.inf, np.float32), "high": np.array(0, np.float32)}
    proto = model(nodes, {"x": ("float32", ("B", "S"))}, ["y"], constants)
    check(proto, [{"x": random(1, n)} for n in (1, 7, 40)])


def test_shared_values_are_computed_once() -> None:
    nodes, value = [], "x"
    for i in range(60):
        nodes += [node("Mul", [value, value], [f"s{i}"]), node("Tanh", [f"s{i}"], [f"v{i}"])]
        value = f"v{i}"
    nodes.append(node("Add", [value, "x"], ["y"]))
    proto = model(nodes, {"x": ("float32", ("N",))}, ["y"])
    check(proto, [{"x": random(37)}])


def test_outputs_of_different_shapes_are_kernels_of_their_own() -> None:
    nodes = [
        node("Exp", ["x"], ["e"]),
        node("Transpose", ["e"], ["t"], perm=[1, 0]),
        node("Neg", ["e"], ["n"]),
    ]
    proto = model(nodes, {"x": ("float32", ("B", 5))}, ["e", "t", "n"])
    check(proto, [{"x": random(7, 5)}], kernels=2)


def test_half_precision_is_widened_for_statistics() -> None:
    proto = model([node("Add", ["x", "x"], ["y"])], {"x": ("float16", ("B", 33))}, ["y"])
    graph = as_map(proto, moments="y")
    for t in (*graph.outputs[1:], *graph.nodes[0].attrs["body"].outputs[1:]):
        t.dtype = np.dtype(np.float16)
    x = random(4, 33).astype(np.float16)
    found = Compiled(graph).run({"x": x})
    y = (x + x).astype(np.float64)
    np.testing.assert_allclose(found["mean"], y.mean(-1, keepdims=True), atol=2e-3)
    np.testing.assert_allclose(found["var"], y.var(-1, keepdims=True), rtol=2e-3)


@pytest.mark.parametrize("channels", [64, 24, 20, 7])
def test_channels_of_interleaved_phases(channels: int) -> None:
    """A row of the result lies in one of the two that a wider row of the source has: no element divides to find its place."""
    proto = model(
        [
            node("Reshape", ["x", "wide"], ["a"]),
            node("Transpose", ["a"], ["b"], perm=[0, 1, 3, 2, 4]),
            node("Reshape", ["b", "tall"], ["c"]),
            node("Slice", ["c", "one", "nine", "axes"], ["d"]),
            node("Relu", ["d"], ["y"]),
        ],
        {"x": (np.float32, ["B", 5, 5, 4 * channels])},
        ["y"],
        {
            "wide": np.array([0, 5, 5, 2, 2 * channels]),
            "tall": np.array([0, 10, 10, channels]),
            "one": np.array([1, 1]),
            "nine": np.array([9, 9]),
            "axes": np.array([1, 2]),
        },
    )
    compiled = check(proto, [{"x": random(b, 5, 5, 4 * channels)} for b in (1, 3)])
    (kernel,) = compiled.lowered.kernels
    assert channels == 7 or "vectorized" in kernel.func.script()
