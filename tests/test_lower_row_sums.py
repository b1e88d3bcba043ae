"""Row sums at the end of a Map are taken in its one pass."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from coda_edge.passes import PassLog, fuse_map
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
