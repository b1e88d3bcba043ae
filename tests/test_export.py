"""Graphs with coda nodes as ONNX models: valid, run by onnxruntime and the ONNX reference alike, and read back."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator

from coda_edge import export
from coda_edge.epilogue import library
from coda_edge.errors import InvalidModel

HEADS, DEPTH, WIDTH, VOCAB = 2, 4, 8, 11
F32 = np.dtype(np.float32)
RNG = np.random.default_rng(7)
WEIGHTS = {
    "table": RNG.standard_normal((VOCAB, WIDTH)).astype(np.float32),
    "wqkv": RNG.standard_normal((WIDTH, 3 * WIDTH)).astype(np.float32) / 3,
    "bqkv": RNG.standard_normal(3 * WIDTH).astype(np.float32),
    "wo": RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 3,
    "bo": RNG.standard_normal(WIDTH).astype(np.float32),
}
QKV = """(acc: tile f32, var: row f32, bias: col f32) -> (q: tile = v3[0:8] heads[4], k: tile = v3[8:16] heads[4], v: tile = v3[16:24] heads[4]) {
  v0 = add var 1e-05
  v1 = rsqrt v0
  v2 = mul acc v1
  v3 = add v2 bias
}"""
SCORE = """(acc: tile f32, mask: col f32) -> (scores: tile = v1) {
  v0 = mul acc 0.5
  v1 = add v0 mask
}"""


def var(name: str, *shape: int | str, dtype: type = np.float32) -> gs.Variable:
    return gs.Variable(name, dtype=np.dtype(dtype), shape=list(shape))


def weight(name: str) -> gs.Constant:
    return gs.Constant(name, WEIGHTS[name])


def coda(op: str, name: str, inputs: list, outputs: list, **attrs) -> gs.Node:
    return gs.Node(op, name, attrs, inputs, outputs, domain="coda")


def embedding_body() -> gs.Graph:
    table, ids, x = var("table", VOCAB, WIDTH), var("ids", "b", "s", dtype=np.int64), var("raw", "b", "s", WIDTH)
    y, mean, variance = var("x", "b", "s", WIDTH), var("m", "b", "s", 1), var("v", "b", "s", 1)
    nodes = [
        gs.Node("Gather", inputs=[table, ids], outputs=[x], attrs={"axis": 0}),
        gs.Node("Add", inputs=[x, gs.Constant("shift", np.array(0.25, np.float32))], outputs=[y]),
        coda("RowMoments", "stats", [y], [mean, variance]),
    ]
    return gs.Graph(nodes, inputs=[table, ids], outputs=[y, mean, variance])


def layer(nodes: list[gs.Node], x: gs.Variable, variance: gs.Variable, mask: gs.Variable, i: int, guard: int) -> tuple:
    """Attention and its output projection; appends three nodes."""
    q, k, v = (var(f"{n}{i}", "b", HEADS, "s", DEPTH) for n in "qkv")
    context, y = var(f"context{i}", "b", "s", WIDTH), var(f"y{i}", "b", "s", WIDTH)
    mean, after = var(f"mean{i}", "b", "s", 1), var(f"var{i}", "b", "s", 1)
    nodes += [
        coda(
            "Gemm",
            f"qkv{i}",
            [x, weight("wqkv"), variance, weight("bqkv")],
            [q, k, v],
            epilogue=QKV,
            source=["MatMul a", "Add b"],
        ),
        coda("Attention", f"attention{i}", [q, k, v, mask], [context], score=SCORE, guard=guard),
        coda(
            "Gemm",
            f"out{i}",
            [context, weight("wo"), weight("bo"), x],
            [y, mean, after],
            epilogue=str(library.bias_residual_moments.program),
        ),
    ]
    return y, after


def encoder(layers: int = 2, guard: int = 0) -> gs.Graph:
    ids, mask = var("ids", "b", "s", dtype=np.int64), var("mask", "b", 1, 1, "s")
    x, mean, variance = var("embedded", "b", "s", WIDTH), var("mean", "b", "s", 1), var("var", "b", "s", 1)
    nodes = [coda("Map", "embed", [weight("table"), ids], [x, mean, variance], body=embedding_body())]
    for i in range(layers):
        x, variance = layer(nodes, x, variance, mask, i, guard)
    mean, variance = var("last_mean", "b", "s", 1), var("last_var", "b", "s", 1)
    nodes.append(coda("RowMoments", "last", [x], [mean, variance]))
    return gs.Graph(nodes, inputs=[ids, mask], outputs=[x, mean, variance], opset=18, name="encoder")


def by_hand(ids: np.ndarray, mask: np.ndarray, layers: int = 2) -> list[np.ndarray]:
    """The encoder in float64."""
    w = {name: a.astype(np.float64) for name, a in WEIGHTS.items()}
    x = w["table"][ids] + 0.25
    for _ in range(layers):
        scaled = x @ w["wqkv"] / np.sqrt(x.var(-1, keepdims=True) + 1e-5) + w["bqkv"]
        q, k, v = (np.stack(np.split(t, HEADS, -1), 1) for t in np.split(scaled, 3, -1))
        scores = q @ k.transpose(0, 1, 3, 2) * 0.5 + mask
        p = np.exp(scores - scores.max(-1, keepdims=True))
        context = p / p.sum(-1, keepdims=True) @ v
        x = np.concatenate([context[:, h] for h in range(HEADS)], -1) @ w["wo"] + w["bo"] + x
    return [x, x.mean(-1, keepdims=True), x.var(-1, keepdims=True)]


def feeds(batch: int, length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(length)
    mask = np.where(rng.random((batch, 1, 1, length)) < 0.3, -10000.0, 0.0).astype(np.float32)
    return {"ids": rng.integers(0, VOCAB, (batch, length)), "mask": mask}


def run(model: onnx.ModelProto | str, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    source = model if isinstance(model, str) else model.SerializeToString()
    return ort.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, inputs)


def assert_same(results: list[np.ndarray], expected: list[np.ndarray], tolerance: float = 5e-6) -> None:
    for got, want in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize("opset", [18, 20, 23])
def test_valid_and_equal_in_onnxruntime_and_the_reference(opset):
    graph = encoder()
    graph.opset = opset
    model = export.to_model(graph)
    onnx.checker.check_model(model, full_check=True)
    for shape in ((1, 1), (2, 7)):
        inputs = feeds(*shape)
        expected = by_hand(inputs["ids"], inputs["mask"])
        assert_same(run(model, inputs), expected)
        assert_same(ReferenceEvaluator(model).run(None, inputs), expected)


def test_equal_bodies_share_a_function_with_a_readable_name():
    model = export.to_model(encoder())
    names = [f.name for f in model.functions]
    assert [n.rpartition("_")[0] for n in names] == [
        "RowMoments",
        "Map_gather_add_rowmoments",
        "Gemm_norm_bias_heads",
        "Attention_scale_mask",
        "Gemm_bias_residual_moments",
    ]
    assert [n.op_type for n in model.graph.node].count(names[2]) == 2
    assert {n.domain for n in model.graph.node} == {"coda"}


def test_calls_show_the_program():
    model = export.to_model(encoder(1))
    node = next(n for n in model.graph.node if n.name == "qkv0")
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert attributes == {"epilogue": QKV.encode(), "source": [b"MatMul a", b"Add b"]}
    function = next(f for f in model.functions if f.name == node.op_type)
    assert sorted(function.attribute) == ["epilogue", "source"]


def test_bodies_are_basic_operators():
    basic = {
        "MatMul",
        "Transpose",
        "Reshape",
        "Softmax",
        "Add",
        "Sub",
        "Mul",
        "Sqrt",
        "Reciprocal",
        "ReduceMean",
        "Slice",
        "Constant",
        "Gather",
    }
    model = export.to_model(encoder())
    ops = {n.op_type for f in model.functions for n in f.node if not n.domain}
    assert ops <= basic


def test_inputs_and_outputs_are_kept():
    model = export.to_model(encoder())
    shapes = {
        v.name: (v.type.tensor_type.elem_type, [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim])
        for v in (*model.graph.input, *model.graph.output)
    }
    assert shapes == {
        "ids": (onnx.TensorProto.INT64, ["b", "s"]),
        "mask": (onnx.TensorProto.FLOAT, ["b", 1, 1, "s"]),
        "y1": (onnx.TensorProto.FLOAT, ["b", "s", WIDTH]),
        "last_mean": (onnx.TensorProto.FLOAT, ["b", "s", 1]),
        "last_var": (onnx.TensorProto.FLOAT, ["b", "s", 1]),
    }
    assert model.ir_version <= 10
    assert {o.domain: o.version for o in model.opset_import} == {"": 18, "coda": 1}


def test_the_graph_is_left_as_it_is():
    graph = encoder()
    before = [(n.op, n.name, dict(n.attrs)) for n in graph.nodes]
    first = export.to_model(graph)
    assert [(n.op, n.name, dict(n.attrs)) for n in graph.nodes] == before
    assert export.to_model(graph).SerializeToString(deterministic=True) == first.SerializeToString(deterministic=True)


def test_a_fully_masked_row_with_guard_is_zero():
    inputs = feeds(1, 5)
    inputs["mask"][:] = -np.inf
    graph = encoder(1, guard=1)
    graph.outputs = [graph.nodes[2].outputs[0]]
    assert np.isfinite(run(export.to_model(graph), inputs)[0]).all()
    unguarded = encoder(1)
    unguarded.outputs = [unguarded.nodes[2].outputs[0]]
    assert np.isnan(run(export.to_model(unguarded), inputs)[0]).all()


def test_constants_of_one_name():
    x, y, z = var("x", "m", 2), var("y", "m", 3), var("z", "m", 3)
    eye = np.array([[1, 0, 0], [0, 1, 0]], np.float32)

    def gemm(name: str, source: gs.Variable, w: np.ndarray, bias: float, out: gs.Variable) -> gs.Node:
        constants = [gs.Constant("w", w), gs.Constant("b", np.full(3, bias, np.float32))]
        return coda("Gemm", name, [source, *constants], [out], epilogue=str(library.bias.program))

    graph = gs.Graph(
        [gemm("a", x, eye, 1.0, y), gemm("b", x, eye.copy(), 2.0, z)], inputs=[x], outputs=[y, z], opset=18
    )
    model = export.to_model(graph)
    assert sorted(i.name for i in model.graph.initializer) == ["b", "b.1", "w"]
    a = np.array([[3, 4]], np.float32)
    assert_same(run(model, {"x": a}), [a @ eye + 1, a @ eye + 2])


def test_half_precision_accumulates_wide():
    text = "(acc: tile f32, b: col f16) -> (y: tile = v1) {\n  v0 = add acc b\n  v1 = cast v0 to=f16\n}"
    x, y = var("x", "m", 4, dtype=np.float16), var("y", "m", 3, dtype=np.float16)
    constants = [gs.Constant("w", np.ones((4, 3), np.float16)), gs.Constant("b", np.array([1, 2, 3], np.float16))]
    graph = gs.Graph([coda("Gemm", "g", [x, *constants], [y], epilogue=text)], inputs=[x], outputs=[y], opset=18)
    model = export.to_model(graph)
    onnx.checker.check_model(model, full_check=True)
    (result,) = run(model, {"x": np.array([[1, 2, 3, 4.5]], np.float16)})
    assert result.dtype == np.float16
    np.testing.assert_array_equal(result, [[11.5, 12.5, 13.5]])


def test_a_map_may_return_its_input_and_a_result_twice():
    x, y = var("x", "m"), var("y", "m")
    body = gs.Graph([gs.Node("Neg", inputs=[x], outputs=[y])], inputs=[x], outputs=[y, x, y])
    outer, outputs = var("a", "m"), [var(n, "m") for n in "pqr"]
    graph = gs.Graph([coda("Map", "m", [outer], outputs, body=body)], inputs=[outer], outputs=outputs, opset=18)
    a = np.array([1, 2], np.float32)
    assert_same(run(export.to_model(graph), {"a": a}), [-a, a, -a])


def test_read_back():
    graph = encoder()
    model = export.to_model(graph)
    back = export.from_model(model)
    assert [(n.op, n.name, n.domain) for n in back.nodes] == [(n.op, n.name, n.domain) for n in graph.nodes]
    assert [{k: v for k, v in n.attrs.items() if k != "body"} for n in back.nodes] == [
        {k: v for k, v in n.attrs.items() if k != "body"} for n in graph.nodes
    ]
    body = back.nodes[0].attrs["body"]
    assert [n.op for n in body.nodes] == ["Gather", "Add", "RowMoments"]
    assert body.outputs[0].shape == ["b", "s", WIDTH]
    assert not back.functions
    assert [f.name for f in export.to_model(back).functions] == [f.name for f in model.functions]


def test_a_plain_model_comes_back_as_it_is():
    x, y = var("x", "m"), var("y", "m")
    model = gs.export_onnx(gs.Graph([gs.Node("Relu", inputs=[x], outputs=[y])], inputs=[x], outputs=[y], opset=18))
    assert [n.op for n in export.from_model(model).nodes] == ["Relu"]


def test_save_in_one_file(tmp_path):
    path = tmp_path / "model.onnx"
    export.save(export.to_model(encoder()), path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    inputs = feeds(2, 3)
    assert_same(run(str(path), inputs), by_hand(inputs["ids"], inputs["mask"]))


def test_save_with_external_data(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "_MIN_EXTERNAL", 300)
    model = export.to_model(encoder())
    before = model.SerializeToString(deterministic=True)
    path = tmp_path / "model.onnx"
    export.save(model, path, inline_limit=0)
    assert model.SerializeToString(deterministic=True) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert (tmp_path / "model.onnx.data").stat().st_size >= WEIGHTS["wqkv"].nbytes
    onnx.checker.check_model(str(path), full_check=True)
    inputs = feeds(2, 3)
    assert_same(run(str(path), inputs), by_hand(inputs["ids"], inputs["mask"]))
    loaded = onnx.load(str(path))
    assert loaded.functions[0] == model.functions[0]
    assert {i.name: onnx.numpy_helper.to_array(i).tolist() for i in loaded.graph.initializer} == {
        name: a.tolist() for name, a in WEIGHTS.items()
    }


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "_externalize", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(Exception, match="cannot be written"):
        export.save(export.to_model(encoder()), tmp_path / "model.onnx", inline_limit=0)
    assert list(tmp_path.iterdir()) == []


def test_errors_name_the_node():
    graph = encoder()
    graph.opset = 17
    with pytest.raises(InvalidModel, match="opset 17"):
        export.to_model(graph)
    graph = encoder()
    graph.nodes[1].op = "Fancy"
    with pytest.raises(InvalidModel, match=r"'qkv0': there is no operator coda.Fancy"):
        export.to_model(graph)
    graph = encoder()
    graph.inputs[0].dtype = None
    with pytest.raises(InvalidModel, match="'ids' has no dtype"):
        export.to_model(graph)
    model = export.to_model(encoder())
    del model.functions[:]
    with pytest.raises(InvalidModel, match="which the model does not define"):
        export.from_model(model)


def test_a_product_that_is_also_returned_as_it_is() -> None:
    """No Identity stands between: onnxruntime, inlining the body, loses the product behind one."""
    x, y, square = var("x", "b", WIDTH), var("y", "b", 3 * WIDTH), var("square", "b", 1)
    program = "(acc: tile f32) -> (y: tile = acc, square: row = v1) {\n  v0 = mul acc acc\n  v1 = mean v0\n}"
    z = var("z", "b", 3 * WIDTH)
    body_y, body_square, root, out = (
        var("y", "b", 3 * WIDTH),
        var("square", "b", 1),
        var("root", "b", 1),
        var("z", "b", 3 * WIDTH),
    )
    body = gs.Graph(
        [gs.Node("Sqrt", inputs=[body_square], outputs=[root]), gs.Node("Div", inputs=[body_y, root], outputs=[out])],
        inputs=[body_y, body_square],
        outputs=[out],
    )
    nodes = [
        coda("Gemm", "product", [x, weight("wqkv")], [y, square], epilogue=program),
        coda("Map", "norm", [y, square], [z], body=body),
    ]
    model = export.to_model(gs.Graph(nodes, inputs=[x], outputs=[z], opset=18))
    assert "Identity" not in {n.op_type for f in model.functions for n in f.node}
    data = RNG.standard_normal((5, WIDTH)).astype(np.float32)
    product = data.astype(np.float64) @ WEIGHTS["wqkv"]
    expected = product / np.sqrt((product**2).mean(-1, keepdims=True))
    found = ort.InferenceSession(model.SerializeToString()).run(None, {"x": data})[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)
