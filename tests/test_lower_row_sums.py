"""Row sums at the end of a Map are taken in its one pass, those within it once a row."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
import pytest
import rewriting
from coda_edge.passes import PassLog, fuse_map, row_moments
from lowering import Compiled, assert_same, model, reference
from onnx import helper

from coda_edge import frontend
from coda_edge.frontend import infer

node = helper.make_node


@pytest.mark.parametrize("width", [1, 7, 16, 20, 384])
@pytest.mark.parametrize("moments", [False, True])
def test_sums_and_moments_are_one_kernel(width: int, moments: bool) -> None:
    nodes = [
        node("Tanh", ["a"], ["t"]),
        node("Add", ["t", "c"], ["x"]),
        node("Mul", ["x", "x"], ["p"]),
        node("ReduceMean", ["p", "last"], ["mean_square"], keepdims=1),
        node("ReduceSumSquare", ["x", "last"], ["squares"], keepdims=1),
        node("Abs", ["x"], ["e"]),
        node("ReduceSum", ["e", "last"], ["total"], keepdims=1),
    ]
    inputs = {"a": ("float32", ("B", "S", width)), "c": ("float32", (width,))}
    proto = model(nodes, inputs, ["x", "mean_square", "squares", "total"], {"last": np.array([2])})
    body = gs.import_onnx(proto)
    infer(body)
    if moments:
        value = body.tensors()["x"]
        rows = [gs.Variable(name, np.dtype(np.float32), [*value.shape[:-1], 1]) for name in ("mean", "var")]
        body.nodes.append(gs.Node("RowMoments", "moments", {}, [value], rows, domain="coda"))
        body.outputs.extend(rows)
    ends = [[gs.Variable(t.name, t.dtype, t.shape) for t in tensors] for tensors in (body.inputs, body.outputs)]
    one = gs.Node("Map", "map", {"body": body, "source": []}, *ends, domain="coda")
    compiled = Compiled(gs.Graph([one], *ends, opset=20))
    assert len(compiled.lowered.plan.steps) == 1
    for batch, length in ((1, 1), (3, 7), (2, 0)):
        rng = np.random.default_rng(batch)
        given = {
            "a": rng.standard_normal((batch, length, width)).astype(np.float32),
            "c": (3 + rng.standard_normal(width)).astype(np.float32),
        }
        found, expected = compiled.run(given), reference(proto, given)
        if moments:
            x = expected["x"].astype(np.float64)
            expected |= {"mean": x.mean(-1, keepdims=True), "var": x.var(-1, keepdims=True)}
        for name, value in expected.items():
            assert_same(found[name], value.astype(np.float32), 1e-5)


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceSumSquare"])
def test_sums_of_empty_rows_are_stored(op: str) -> None:
    nodes = [node("Tanh", ["x"], ["t"]), node(op, ["t", "last"], ["y"])]
    proto = model(nodes, {"x": ("float32", ("B", "S"))}, ["y"], {"last": np.array([-1])})
    graph = frontend.normalize(proto)
    fuse_map.PASS.run(graph, PassLog())
    assert [n.op for n in graph.nodes] == ["Map"]
    found = Compiled(graph).run({"x": np.zeros((3, 0), np.float32)})
    np.testing.assert_array_equal(found["y"], np.zeros((3, 1), np.float32))


_HEADS = 3
_NORMS = {
    "mean square": "q = Mul(x, x) m = ReduceMean(q, last) e = Add(m, eps) r = Sqrt(e) d = Div(x, r) n = Mul(d, g)",
    "moments": "n = LayerNormalization(x, g, b)",
}
_ROTATED = {
    "whole": "l = Slice(t, zero, half, last) h = Slice(t, half, end, last) i = Neg(h) c = Concat <axis = -1> (i, l) "
    "u = Mul(t, cos) v = Mul(c, sin) y = Add(u, v)",
    "in part": "w = Mul(t, cos) f = Slice(w, zero, half, last) rest = Slice(w, half, end, last) l = Slice(f, zero, quarter, last) "
    "h = Slice(f, quarter, half, last) i = Neg(h) c = Concat <axis = -1> (i, l) k = Add(f, c) z = Concat <axis = -1> (k, rest) y = Mul(z, sin)",
}


@pytest.mark.parametrize("rotated", _ROTATED)
@pytest.mark.parametrize("norm", _NORMS)
@pytest.mark.parametrize("size", [8, 20])
def test_a_norm_of_each_head_and_its_rotation_are_one_kernel(norm: str, rotated: str, size: int) -> None:
    constants = {
        "last": np.array([-1]),
        "eps": np.float32(1e-6),
        "g": np.linspace(0.5, 2, size, dtype=np.float32),
        "b": np.linspace(-1, 1, size, dtype=np.float32),
        "zero": np.array([0]),
        "quarter": np.array([size // 4]),
        "half": np.array([size // 2]),
        "end": np.array([size]),
    }
    proto = rewriting.model(
        f"g (float[B, S, {_HEADS}, {size}] x, float[S, {size}] cos, float[S, {size}] sin) => (float[B, {_HEADS}, S, {size}] y) {{ "
        f"{_NORMS[norm]} t = Transpose <perm = [0, 2, 1, 3]> (n) {_ROTATED[rotated]} }}",
        constants,
    )
    graph = frontend.normalize(proto)
    for p in (row_moments.PASS, fuse_map.PASS):
        p.run(graph, PassLog())
        infer(graph)
    assert [n.op for n in graph.nodes] == ["Map"]
    compiled = Compiled(graph)
    assert len(compiled.lowered.plan.steps) == 1
    for batch, length in ((1, 1), (3, 7)):
        rng = np.random.default_rng(batch)
        feeds = {"x": rng.standard_normal((batch, length, _HEADS, size)).astype(np.float32) * 3 + 1}
        feeds |= {name: rng.standard_normal((length, size)).astype(np.float32) for name in ("cos", "sin")}
        assert_same(compiled.run(feeds)["y"], reference(proto, feeds)["y"], 2e-6)


def test_statistics_that_other_rows_read_are_stored() -> None:
    """A mean over one axis that is laid along another cannot be taken while the row is made."""
    proto = rewriting.model(
        "g (float[B, 6, 6] x) => (float[B, 6, 6] y) { m = ReduceMean(x, last) t = Transpose <perm = [0, 2, 1]> (m) y = Sub(x, t) }",
        {"last": np.array([-1])},
    )
    graph = frontend.normalize(proto)
    fuse_map.PASS.run(graph, PassLog())
    assert sorted(n.op for n in graph.nodes) == ["Map", "ReduceMean"]
    x = np.random.default_rng(0).standard_normal((2, 6, 6)).astype(np.float32)
    assert_same(Compiled(graph).run({"x": x})["y"], reference(proto, {"x": x})["y"])
