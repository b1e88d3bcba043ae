"""No model is refused on the way to onnxruntime: what cannot be rewritten stays as it is, around what can."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from coda_edge.cli import main
from coda_edge.errors import InvalidModel, ShapeError
from coda_edge.ir import Array
from coda_edge.onnxruntime import Packaged, package
from coda_edge.onnxruntime.packaging import session
from coda_edge.verify import ort_session, relative_error

_HEAD = [
    helper.make_node("MatMul", ["x", "w"], ["p"]),
    helper.make_node("Add", ["p", "b"], ["q"]),
    helper.make_node("Relu", ["q"], ["r"]),
]
_TAIL = [helper.make_node("MatMul", ["s", "v"], ["t"]), helper.make_node("Tanh", ["t"], ["y"])]
_FLOAT, _INT64, _BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
_value = helper.make_tensor_value_info


def layers(
    between: list[onnx.NodeProto],
    opset: int = 20,
    inputs: list[onnx.ValueInfoProto] | None = None,
    constants: dict[str, Array] | None = None,
    domain: str = "",
) -> onnx.ModelProto:
    """Two layers, ``[n, 7] → [n, 17] → [n, 7]``, with ``between`` them what makes s of r."""
    rng = np.random.default_rng(0)
    weights = {n: rng.standard_normal(d, np.float32) for n, d in {"w": (7, 17), "b": (17,), "v": (17, 7)}.items()}
    tensors = [numpy_helper.from_array(a, n) for n, a in {**weights, **(constants or {})}.items()]
    given = [_value("x", _FLOAT, ["n", 7]), *(inputs or [])]
    graph = helper.make_graph([*_HEAD, *between, *_TAIL], "layers", given, [_value("y", _FLOAT, ["n", 7])], tensors)
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=7)


def x(rows: int = 5) -> Array:
    return np.random.default_rng(rows).standard_normal((rows, 7), np.float32)


def assert_runs(source: onnx.ModelProto, packaged: Packaged, folder: Path, feeds: dict[str, Array]) -> None:
    """Both ways equal the source."""
    files = folder / "m.onnx", folder / "m.so"
    packaged.save(*files)
    expected = ort_session(source).run(None, feeds)
    for way in (session(str(files[0]), files[1]), ort_session(str(files[0]))):
        for got, want in zip(way.run(None, feeds), expected, strict=True):
            assert got.shape == want.shape and got.dtype == want.dtype
            assert relative_error(got, want) <= 1e-5


def _loop() -> onnx.ModelProto:
    """As often as an input says: the loop's body reads q from outside."""
    body = helper.make_graph(
        [helper.make_node("Add", ["c", "q"], ["d"]), helper.make_node("Identity", ["go"], ["on"])],
        "body",
        [_value("i", _INT64, []), _value("go", _BOOL, []), _value("c", _FLOAT, ["n", 17])],
        [_value("on", _BOOL, []), _value("d", _FLOAT, ["n", 17])],
    )
    node = helper.make_node("Loop", ["turns", "true", "r"], ["s"], body=body)
    return layers([node], inputs=[_value("turns", _INT64, [])], constants={"true": np.array(True)})


def _scan() -> onnx.ModelProto:
    """A running sum over the rows, of which there are any number."""
    body = helper.make_graph(
        [helper.make_node("Add", ["c", "e"], ["d"]), helper.make_node("Identity", ["d"], ["o"])],
        "body",
        [_value("c", _FLOAT, [17]), _value("e", _FLOAT, [17])],
        [_value("d", _FLOAT, [17]), _value("o", _FLOAT, [17])],
    )
    return layers([helper.make_node("Scan", ["b", "r"], ["last", "s"], body=body, num_scan_inputs=1)])


def _sequence() -> onnx.ModelProto:
    made = helper.make_node("SequenceConstruct", ["r", "q"], ["both"])
    taken = helper.make_node("SequenceAt", ["both", "one"], ["s"])
    return layers([made, taken], constants={"one": np.array(1)})


def _optional() -> onnx.ModelProto:
    nodes = [helper.make_node("Optional", ["r"], ["o"]), helper.make_node("OptionalGetElement", ["o"], ["s"])]
    return layers(nodes)


def _sparse() -> onnx.ModelProto:
    made = layers([helper.make_node("Identity", ["r"], ["s"])])
    values, places = numpy_helper.from_array(np.float32([1, 2]), "sparse"), numpy_helper.from_array(np.array([0, 5]))
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [17]))
    made.graph.node[1].input[1] = "sparse"
    return made


def _normed(opset: int) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Reshape", ["r", "image"], ["i"]),
        helper.make_node("LRN", ["i"], ["m"], size=3),
        helper.make_node("Reshape", ["m", "rows"], ["s"]),
    ]
    shapes = {"image": np.array([-1, 17, 1, 1]), "rows": np.array([-1, 17])}
    return layers(nodes, opset, constants=shapes)


#: Models, what else is fed, the operators that stay, how many layers run as kernels, and a part of the reason.
CASES: dict[str, tuple[onnx.ModelProto, dict[str, Array], list[str], int, str | None]] = {
    # Of what a loop carries, no rank is known, so what follows stays too.
    "loop": (_loop(), {"turns": np.array(3)}, ["Loop"], 1, "operator Loop (node 's') is not lowered"),
    "scan": (_scan(), {}, ["Scan"], 2, "operator Scan (node 'last') is not lowered"),
    "sequence": (_sequence(), {}, ["SequenceConstruct", "SequenceAt"], 2, "SequenceConstruct (node 'both')"),
    "optional": (_optional(), {}, ["Optional", "OptionalGetElement"], 2, "Optional (node 'o')"),
    "sparse": (_sparse(), {}, ["Add"], 2, "initializer 'sparse' is sparse"),
    "opset 7": (_normed(7), {}, ["LRN"], 2, None),
    "opset 23": (_normed(23), {}, ["LRN"], 2, None),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_lowered_stays_around_what_is(name: str, tmp_path: Path) -> None:
    source, feeds, stay, kernels, why = CASES[name]
    packaged = package(source)
    assert set(stay) <= {n.op_type for n in packaged.model.graph.node if not n.domain}
    assert sum(n.startswith("Gemm") for n in packaged.operators.values()) == kernels
    assert packaged.max_rel_error is not None and packaged.unchecked is None
    assert packaged.left is None if why is None else why in str(packaged.left)
    assert_runs(source, packaged, tmp_path, {"x": x(), **feeds})


def test_an_operator_that_nobody_here_knows(tmp_path: Path) -> None:
    """onnxruntime does not load the source without the library that has the operator, so nothing is compared."""
    source = layers([helper.make_node("Foo", ["r"], ["s"], domain="com.acme")], domain="com.acme")
    packaged = package(source)
    assert [n.op_type for n in packaged.model.graph.node if n.domain == "com.acme"] == ["Foo"]
    assert "com.acme::Foo" in str(packaged.left) and "does not load the model" in str(packaged.unchecked)
    assert len(packaged.operators) == 1


@pytest.mark.parametrize("weights", ["model", "library"])
def test_a_model_with_nothing_to_rewrite_comes_out_as_it_is(weights, tmp_path: Path) -> None:
    ends = [_value("x", _FLOAT, ["n", 3, 3])], [_value("y", _FLOAT, ["n"])]
    graph = helper.make_graph([helper.make_node("Det", ["x"], ["y"])], "g", *ends)
    source = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    packaged = package(source, weights=weights)
    assert packaged.model == source
    assert (packaged.operators, packaged.left) == ({}, "nothing in it becomes a kernel")
    assert_runs(source, packaged, tmp_path, {"x": np.random.default_rng(0).standard_normal((4, 3, 3), np.float32)})


def test_an_input_of_unknown_rank(tmp_path: Path) -> None:
    source = layers([helper.make_node("Identity", ["r"], ["s"])])
    source.graph.input[0].type.tensor_type.ClearField("shape")
    packaged = package(source)
    assert packaged.model == source and "input 'x' has no shape" in str(packaged.left)
    assert_runs(source, packaged, tmp_path, {"x": x()})


def test_an_input_that_is_no_tensor() -> None:
    source = layers([helper.make_node("SequenceAt", ["many", "one"], ["s"])], constants={"one": np.array(1)})
    source.graph.input.append(helper.make_tensor_sequence_value_info("many", _FLOAT, ["n", 17]))
    packaged = package(source)
    assert packaged.unchecked == "'many' is no tensor, so values cannot be made up"
    assert "only tensors are supported" in str(packaged.left)


def test_pinned_sizes_hold_for_parts(tmp_path: Path) -> None:
    packaged = package(_sequence(), shapes={"x": (5, 7)})
    assert [d.dim_value for d in packaged.model.graph.input[0].type.tensor_type.shape.dim] == [5, 7]
    assert_runs(_sequence(), packaged, tmp_path, {"x": x(5)})
    with pytest.raises(ShapeError, match="fixes a dimension to 7, not 8"):
        package(_sequence(), shapes={"x": (5, 8)})


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.onnx"
    file.write_bytes(b"\x08\x07garbage")
    with pytest.raises(InvalidModel):
        package(file)
    broken = layers([])  # nobody makes s
    with pytest.raises(InvalidModel, match="is not valid"):
        package(broken)


def test_the_command_says_what_stays(tmp_path: Path) -> None:
    file = tmp_path / "m.onnx"
    onnx.save(_scan(), file)
    result = CliRunner().invoke(main, ["package", str(file), "--form", "ort", "-o", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "not all of it is rewritten: operator Scan (node 'last') is not lowered" in result.output
