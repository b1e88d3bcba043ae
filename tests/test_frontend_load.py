"""Loading: what is accepted, what is made of it, and the one line that refuses the rest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import load_fixture, run, to_model, worst_error
from onnx import TensorProto, helper, numpy_helper, parser

from coda_edge.errors import InvalidModel, ShapeError
from coda_edge.frontend import load, normalize


def _model(body: str, opset: int = 18, ir: int = 8) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}]> {body}')


LINEAR = "g (float[N, 4] x) => (float[N, 3] y) <float[4, 3] w = {1,2,3,4,5,6,7,8,9,10,11,12}> { y = MatMul(x, w) }"


def test_path_bytes_and_proto_are_one(tmp_path: Path) -> None:
    model = _model(LINEAR)
    onnx.save(model, tmp_path / "m.onnx")
    texts = {load(s).SerializeToString() for s in (tmp_path / "m.onnx", str(tmp_path / "m.onnx"), model)}
    texts.add(load(model.SerializeToString()).SerializeToString())
    assert len(texts) == 1


def test_the_callers_model_is_not_changed() -> None:
    model = load_fixture("bert.sdpa.ts17")
    before = model.SerializeToString(deterministic=True)
    normalize(load(model), {"input_ids": (1, 8)})
    assert model.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("data", [b"", b"garbage", b"\x08\x07\x12", bytes(range(256)) * 9])
def test_garbage(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "g.onnx").write_bytes(data)
    for source in (data, tmp_path / "g.onnx"):
        with pytest.raises(InvalidModel, match="not an ONNX model") as error:
            load(source)
        assert "\n" not in str(error.value)


def test_truncated() -> None:
    data = load_fixture("bert.sdpa.ts17").SerializeToString()
    with pytest.raises(InvalidModel):
        load(data[: len(data) // 2])


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"m\.onnx' cannot be read: No such file"):
        load(tmp_path / "m.onnx")


def test_external_data(tmp_path: Path) -> None:
    model = _model(LINEAR)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.arange(12, dtype=np.float32).reshape(4, 3), "w"))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    weight = numpy_helper.to_array(load(tmp_path / "m.onnx").graph.initializer[0])
    np.testing.assert_array_equal(weight, np.arange(12).reshape(4, 3))
    (tmp_path / "w.bin").unlink()
    with pytest.raises(InvalidModel, match="keeps weights in another file"):
        load(tmp_path / "m.onnx")


def test_a_node_that_is_no_operator() -> None:
    with pytest.raises(InvalidModel, match="Frobnicate"):
        load(_model("g (float[N] x) => (float[N] y) { y = Frobnicate(x) }"))


def test_a_tensor_that_nothing_computes() -> None:
    with pytest.raises(InvalidModel, match="missing"):
        load(_model("g (float[N] x) => (float[N] y) { y = Add(x, missing) }"))


def test_a_wrong_rank_of_an_output_is_accepted() -> None:
    graph = normalize(load(_model(LINEAR.replace("float[N, 3] y", "float[N] y"))))
    assert graph.outputs[0].shape == ["N", 3]


def test_local_functions_are_inlined() -> None:
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18, "mine": 1]>
        g (float[N, 4] x) => (float[N, 4] y) { y = mine.twice(x) }
        <domain: "mine", opset_import: ["": 18]> twice (a) => (b) { b = Add(a, a) }
    """)
    loaded = load(model)
    assert not loaded.functions
    assert [n.op_type for n in loaded.graph.node] == ["Add"]


def test_old_opsets_are_converted() -> None:
    body = """g (float[N, 4] x) => (float[N] y) {
        e = Unsqueeze <axes = [0]> (x)
        s = Squeeze <axes = [0]> (e)
        r = ReduceSum <axes = [1], keepdims = 0> (s)
        y = Relu(r)
    }"""
    model = _model(body, opset=11)
    loaded = load(model)
    assert loaded.opset_import[0].version == 18
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)}
    assert worst_error(run(model, feeds), run(to_model(normalize(loaded)), feeds)) <= 1e-6


def test_an_opset_that_cannot_be_converted() -> None:
    body = """g (float[N, 4, 3] x, float[4] s) => (float[N, 4, 3] y) {
        z = Relu(x)
        y = BatchNormalization <spatial = 0> (z, s, s, s, s)
    }"""
    with pytest.raises(InvalidModel, match=r"opset 6 and cannot be converted to 18: BatchNormalization \(node 'y'\)"):
        load(_model(body, opset=6))


def test_initializers_are_no_inputs() -> None:
    model = _model(LINEAR, ir=3)
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 3]))
    assert [i.name for i in load(model).graph.input] == ["x"]


def test_dynamic_dimensions_have_usable_names() -> None:
    x = helper.make_tensor_value_info("in.x", TensorProto.FLOAT, ["batch-size", None, "seq + 1", "?", "seq", "lambda"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    y.type.tensor_type.shape.dim.add()
    graph = helper.make_graph([helper.make_node("Relu", ["in.x"], ["y"])], "g", [x], [y])
    loaded = load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
    dims = [d.dim_param for d in loaded.graph.input[0].type.tensor_type.shape.dim]
    assert dims == ["batch_size", "in_x_1", "seq + 1", "in_x_3", "seq", "size_lambda"]
    assert normalize(loaded).outputs[0].shape == dims


def test_a_graph_without_a_name_and_sizes_of_minus_one_are_accepted() -> None:
    model = _model(LINEAR)
    model.graph.name = ""
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    (dim, width) = load(model).graph.input[0].type.tensor_type.shape.dim
    assert (dim.dim_param, width.dim_value) == ("x_0", 4)


def test_an_input_without_a_shape() -> None:
    model = _model(LINEAR)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(InvalidModel, match="input 'x' has no shape, not even a number of dimensions: write one"):
        load(model)


def test_an_output_needs_no_shape() -> None:
    model = _model(LINEAR)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    x = {"x": np.ones((2, 4), np.float32)}
    loaded = load(model)
    assert normalize(loaded).outputs[0].shape == ["N", 3]
    assert worst_error(run(_model(LINEAR), x), run(to_model(normalize(loaded)), x)) == 0


def test_an_output_that_is_listed_twice() -> None:
    model = _model(LINEAR)
    model.graph.output.append(model.graph.output[0])
    with pytest.raises(InvalidModel, match="lists output 'y' more than once"):
        load(model)


@pytest.mark.parametrize("size", [-1, 2**31, 10**20])
def test_a_size_beyond_what_can_be_counted(size: int) -> None:
    with pytest.raises(ShapeError, match=f"cannot have a dimension fixed to {size}"):
        normalize(load(_model(LINEAR)), {"x": (size, 4)})


def test_nodes_in_any_order_are_sorted() -> None:
    """onnxruntime runs such a model, and converters to half precision write it."""
    model = _model("g (float[N, 4] x) => (float[N, 4] y) { z = Exp(x) w = Neg(z) y = Add(w, z) }")
    nodes = list(model.graph.node)[::-1]
    model.graph.ClearField("node")
    model.graph.node.extend(nodes)
    assert [n.op_type for n in load(model).graph.node] == ["Exp", "Neg", "Add"]
    feeds = {"x": np.ones((2, 4), np.float32)}
    assert worst_error(run(model, feeds), run(to_model(normalize(load(model))), feeds)) <= 1e-6


def test_nodes_that_read_each_other_are_refused() -> None:
    model = _model("g (float[N, 4] x) => (float[N, 4] y) { z = Exp(x) y = Add(z, x) }")
    model.graph.node[0].input[0] = "y"
    with pytest.raises(InvalidModel, match=r"read each other's results \(z, y|y, z\)"):
        load(model)
