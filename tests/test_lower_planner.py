"""The plan of a graph: buffers, views, constants, outputs, lifetimes, and what cannot be lowered."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lowering import assert_same, compile_model, model, reference
from onnx import helper

from coda_edge.bundle.plan import BufferKind
from coda_edge.errors import UnsupportedOperator
from coda_edge.lower import KERNELS, POINTWISE
from coda_edge.targets import get

node = helper.make_node
F = "float32"
X = {"x": (F, ("B", "S", 12))}


def test_views_share_their_input_and_cost_no_step() -> None:
    nodes = [
        node("Tanh", ["x"], ["a"]),
        node("Reshape", ["a", "s"], ["b"]),
        node("Unsqueeze", ["b", "one"], ["c"]),
        node("Exp", ["c"], ["d"]),
        node("Squeeze", ["d", "one"], ["y"]),
    ]
    proto = model(nodes, X, ["y"], {"s": np.array([0, 0, 3, 4]), "one": np.array([1])})
    compiled = compile_model(proto)
    plan = compiled.lowered.plan
    assert [s.name for s in plan.steps] == ["tanh", "exp"]
    assert sorted(b.kind for b in plan.buffers) == [BufferKind.INPUT, BufferKind.OUTPUT, BufferKind.ARENA]
    x = np.random.default_rng(0).standard_normal((2, 5, 12)).astype(np.float32)
    assert_same(compiled.run({"x": x})["y"], reference(proto, {"x": x})["y"])


def test_a_view_of_an_input_or_of_another_output_is_copied() -> None:
    nodes = [
        node("Reshape", ["x", "s"], ["y"]),
        node("Tanh", ["x"], ["a"]),
        node("Reshape", ["a", "s"], ["b"]),
        node("Identity", ["x"], ["z"]),
    ]
    proto = model(nodes, X, ["y", "a", "b", "z"], {"s": np.array([0, 0, 4, 3])})
    compiled = compile_model(proto)
    assert sorted(s.name for s in compiled.lowered.plan.steps) == ["copy", "copy", "copy", "tanh"]
    x = np.random.default_rng(0).standard_normal((2, 5, 12)).astype(np.float32)
    found, expected = compiled.run({"x": x}), reference(proto, {"x": x})
    for name in expected:
        assert_same(found[name], expected[name])


def test_a_returned_view_of_an_input_may_be_read() -> None:
    nodes = [
        node("Reshape", ["x", "s"], ["v"]),
        node("Transpose", ["v"], ["t"], perm=[0, 1, 3, 2]),
        node("Exp", ["t"], ["y"]),
    ]
    proto = model(nodes, X, ["v", "y"], {"s": np.array([0, 0, 4, 3])})
    x = np.random.default_rng(0).standard_normal((2, 5, 12)).astype(np.float32)
    found, expected = compile_model(proto).run({"x": x}), reference(proto, {"x": x})
    for name in expected:
        assert_same(found[name], expected[name])


def test_a_returned_view_of_an_output_may_be_read() -> None:
    nodes = [node("Tanh", ["x"], ["a"]), node("Reshape", ["a", "s"], ["v"]), node("Exp", ["v"], ["y"])]
    proto = model(nodes, X, ["a", "v", "y"], {"s": np.array([0, 0, 4, 3])})
    x = np.random.default_rng(0).standard_normal((2, 5, 12)).astype(np.float32)
    found, expected = compile_model(proto).run({"x": x}), reference(proto, {"x": x})
    for name in expected:
        assert_same(found[name], expected[name])


def test_an_output_that_later_steps_read() -> None:
    nodes = [node("Tanh", ["x"], ["a"]), node("Exp", ["a"], ["b"]), node("Neg", ["b"], ["y"])]
    compiled = compile_model(model(nodes, X, ["a", "y"]))
    plan = compiled.lowered.plan
    kinds = [[plan.buffers[b].kind.name for b in s.buffers] for s in plan.steps]
    assert [sorted(k) for k in kinds] == [["INPUT", "OUTPUT"], ["ARENA", "OUTPUT"], ["ARENA", "OUTPUT"]]


def test_equal_constants_and_equal_kernels_are_kept_once() -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(100).astype(np.float32)
    nodes = [node("Add", ["x", "a"], ["u"]), node("Add", ["u", "b"], ["v"]), node("Add", ["v", "c"], ["y"])]
    constants = {"a": weights, "b": weights.copy(), "c": weights + 1}
    lowered = compile_model(model(nodes, {"x": (F, ("B", 100))}, ["y"], constants)).lowered
    assert len(lowered.plan.steps) == 3
    assert len(lowered.kernels) == 1
    offsets = sorted(b.index for b in lowered.plan.buffers if b.kind == BufferKind.CONSTANT)
    assert offsets == [0, 448]  # 100 floats, to a multiple of 64
    assert lowered.constants.nbytes == 448 + 400


def test_arena_buffers_live_from_first_to_last_use() -> None:
    nodes = [
        node("Tanh", ["x"], ["a"]),
        node("Exp", ["a"], ["b"]),
        node("Neg", ["b"], ["c"]),
        node("Add", ["a", "c"], ["y"]),
    ]
    lowered = compile_model(model(nodes, X, ["y"])).lowered
    lives = sorted((b.first, b.last) for b in lowered.plan.buffers if b.kind == BufferKind.ARENA)
    assert lives == [(0, 3), (1, 2), (2, 3)]
    assert lowered.arena_bytes({"B": 2, "S": 4}) == 3 * 2 * 4 * 12 * 4


def test_values_that_shapes_determine_have_no_buffer() -> None:
    nodes = [
        node("Shape", ["x"], ["s"], start=1, end=2),
        node("Cast", ["s"], ["f"], to=1),
        node("Div", ["x", "f"], ["y"]),
    ]
    proto = model(nodes, X, ["y"])
    compiled = compile_model(proto)
    x = np.random.default_rng(0).standard_normal((2, 5, 12)).astype(np.float32)
    assert_same(compiled.run({"x": x})["y"], reference(proto, {"x": x})["y"])


def test_constants_and_sizes_as_outputs() -> None:
    nodes = [node("Shape", ["x"], ["s"]), node("Identity", ["c"], ["k"]), node("Neg", ["x"], ["y"])]
    proto = model(nodes, X, ["s", "k", "y"], {"c": np.arange(40, dtype=np.float32)})
    compiled = compile_model(proto)
    x = np.ones((2, 5, 12), np.float32)
    found, expected = compiled.run({"x": x}), reference(proto, {"x": x})
    for name in expected:
        assert_same(found[name], expected[name])


def test_flops_and_bytes_are_counted() -> None:
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Tanh", ["h"], ["y"])]
    plan = compile_model(model(nodes, X | {"w": (F, (12, 7))}, ["y"])).lowered.plan
    values = plan.exprs.evaluate({"B": 2, "S": 5})
    assert values[plan.steps[0].flops] == 2 * 2 * 5 * 12 * 7
    assert values[plan.steps[0].bytes] == 4 * (2 * 5 * 12 + 12 * 7 + 2 * 5 * 7)
    assert values[plan.steps[1].bytes] == 2 * 4 * 2 * 5 * 7


@pytest.mark.parametrize(("op", "domain"), [("Det", ""), ("Softmax", "com.example")])
def test_an_operator_that_is_not_lowered_is_named_with_the_choices(op: str, domain: str) -> None:
    proto = model([node("Tanh", ["x"], ["y"])], {"x": (F, ("N", "N"))}, ["y"])
    proto.graph.node[0].op_type, proto.graph.node[0].domain, proto.graph.node[0].name = op, domain, "odd"
    if domain:
        proto.opset_import.append(helper.make_opsetid(domain, 1))
    with pytest.raises(UnsupportedOperator, match=r"(?s)odd.*docs/operators\.md") as error:
        compile_model(proto)
    assert error.value.node == "odd"


def test_the_documented_operators_are_those_that_are_lowered() -> None:
    text = (Path(__file__).parents[1] / "docs" / "operators.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    for kind, registered in (("pointwise", POINTWISE), ("kernel", KERNELS)):
        documented = [op for row in rows if row[2].strip() == kind for op in row[3].split()]
        assert sorted(documented) == sorted(registered)


@pytest.mark.parametrize("name", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_every_target_has_the_same_results(name: str) -> None:
    target = get(name)
    if target.missing():
        pytest.skip(f"this CPU is no {name}")
    nodes = [
        node("Pow", ["x", "two"], ["p"]),
        node("Round", ["p"], ["r"]),
        node("Erf", ["r"], ["e"]),
        node("Softmax", ["e"], ["m"], axis=-1),
        node("ReduceSum", ["m", "axes"], ["s"]),
        node("Transpose", ["s"], ["t"], perm=[2, 1, 0]),
        node("MatMul", ["m", "w"], ["y"]),
    ]
    constants = {"two": np.array(1.5, np.float32), "axes": np.array([1])}
    proto = model(nodes, X | {"w": (F, (12, 33))}, ["t", "y"], constants)
    rng = np.random.default_rng(0)
    x, w = (rng.uniform(0.1, 3, s).astype(np.float32) for s in ((2, 5, 12), (12, 33)))
    found, expected = compile_model(proto, target).run({"x": x, "w": w}), reference(proto, {"x": x, "w": w})
    for output in expected:
        assert_same(found[output], expected[output], 1e-5)


def test_an_input_that_is_returned_is_copied() -> None:
    proto = model([node("Tanh", ["x"], ["y"])], X, ["x", "y"])
    compiled = compile_model(proto)
    x = np.random.default_rng(0).standard_normal((2, 5, 12)).astype(np.float32)
    found = compiled.run({"x": x})
    assert_same(found["x"], x)
    assert_same(found["y"], np.tanh(x))
