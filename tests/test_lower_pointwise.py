"""Every pointwise operator against onnxruntime, at two sizes of its symbolic dimensions, odd ones included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from lowering import Array, assert_same, compile_model, model, reference
from onnx import helper

SIZES = ({"B": 2, "S": 5, "N": 37}, {"B": 3, "S": 17, "N": 1})
F, L, U = "float32", "int64", "bool"


@dataclass(frozen=True)
class Case:
    """One operator: attributes, inputs (dtype and shape by name), constants, and inputs that must not be random."""

    op: str
    inputs: Mapping[str, tuple[str, Sequence[int | str]]]
    constants: Mapping[str, Array] = field(default_factory=dict)
    order: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    low: float = -3
    high: float = 3
    tolerance: float = 2e-6
    opset: int = 20

    def __str__(self) -> str:
        shapes = "_".join(f"{t[0]}{'x'.join(map(str, t[1]))}" for t in self.inputs.values())
        return f"{self.op}-{shapes}-{'-'.join(f'{k}{v}' for k, v in self.attributes.items())}"

    def model(self) -> onnx.ModelProto:
        names = self.order.split() if self.order else [*self.inputs, *self.constants]
        node = helper.make_node(self.op, [n if n != "_" else "" for n in names], ["out"], "node", **self.attributes)
        return model([node], self.inputs, ["out"], self.constants, self.opset)


def feeds(case: Case, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    result = {}
    for name, (dtype, shape) in case.inputs.items():
        dims = [sizes[d] if isinstance(d, str) else d for d in shape]
        if dtype == "bool":
            result[name] = rng.random(dims) < 0.5
        elif np.dtype(dtype).kind in "iu":
            result[name] = rng.integers(int(case.low), int(case.high), dims).astype(dtype)
        else:
            result[name] = rng.uniform(case.low, case.high, dims).astype(dtype)
    return result


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


BSN: tuple[str, str, str] = ("B", "S", "N")
UNARY = ["Neg", "Abs", "Exp", "Erf", "Tanh", "Sigmoid", "Sin", "Cos", "Relu", "Floor", "Ceil", "Round", "Sign", "IsNaN"]
BINARY = ["Add", "Sub", "Mul", "Div", "Min", "Max", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"]
CASES = [
    *[Case(op, {"x": (F, BSN)}) for op in UNARY],
    *[Case(op, {"x": (F, BSN)}, low=0.01) for op in ("Sqrt", "Log", "Reciprocal")],
    *[Case(op, {"x": (F, BSN), "y": (F, BSN)}) for op in BINARY],
    *[Case(op, {"x": (F, BSN), "y": (F, ("N",))}) for op in ("Add", "Sub", "Div")],
    *[Case(op, {"x": (F, ("B", 1, "N")), "y": (F, ("S", 1))}) for op in ("Mul", "Max")],
    Case("Add", {"x": (F, BSN)}, {"y": np.array(0.1, np.float32)}),
    Case("Mul", {"x": (F, ())}, {"y": np.array([1, 2, 3], np.float32)}),
    Case("Add", {"x": (F, ()), "y": (F, ())}),
    *[Case(op, {"x": (L, BSN), "y": (L, BSN)}, low=-5, high=5) for op in ("Add", "Mul", "Equal", "Less", "Min", "Max")],
    Case("Div", {"x": (L, BSN)}, {"y": ints(-3)}, low=-20, high=20),
    Case("Mod", {"x": (L, BSN), "y": (L, ("N",))}, low=1, high=20),
    Case("Mod", {"x": (L, BSN)}, {"y": ints(-3)}, low=-20, high=20),
    Case("Mod", {"x": ("int32", BSN)}, {"y": np.array([5], np.int32)}, low=-20, high=20),
    Case("Mod", {"x": (L, BSN)}, {"y": ints(-3)}, low=-20, high=20, attributes={"fmod": 1}),
    Case("Mod", {"x": (F, BSN)}, {"y": np.array(0.7, np.float32)}, attributes={"fmod": 1}),
    *[Case("Pow", {"x": (F, BSN)}, {"y": np.array(e, np.float32)}, low=0.1) for e in (2, 3, 0.5, -1, 1.7, -0.5, 7)],
    Case("Pow", {"x": (F, BSN), "y": (F, BSN)}, low=0.1, tolerance=1e-5),
    Case("Pow", {"x": (L, BSN)}, {"y": ints(2)}),
    Case("Neg", {"x": (L, BSN)}),
    Case("Abs", {"x": ("int32", BSN)}),
    Case("Sign", {"x": (L, BSN)}),
    *[Case(op, {"x": (U, BSN), "y": (U, BSN)}) for op in ("And", "Or", "Xor", "Equal")],
    Case("Not", {"x": (U, BSN)}),
    Case("Where", {"c": (U, ("B", 1, "S", "N")), "x": (F, BSN), "y": (F, ())}),
    Case("Where", {"c": (U, BSN), "x": (L, BSN)}, {"y": ints(-1)}),
    *[Case("Cast", {"x": (F, BSN)}, attributes={"to": t}) for t in (1, 6, 7, 9, 10)],
    *[Case("Cast", {"x": (L, BSN)}, attributes={"to": t}) for t in (1, 2, 3, 6, 7, 9, 11)],
    *[Case("Cast", {"x": (U, BSN)}, attributes={"to": t}) for t in (1, 7, 9)],
    Case("Clip", {"x": (F, BSN)}, {"a": np.array(-1, np.float32), "b": np.array(0.5, np.float32)}),
    Case("Clip", {"x": (F, BSN)}, {"b": np.array(0.5, np.float32)}, order="x _ b"),
    Case("LeakyRelu", {"x": (F, BSN)}, attributes={"alpha": 0.2}),
    Case("Sum", {"x": (F, BSN), "y": (F, ("N",)), "z": (F, (1,))}),
    Case("BitwiseAnd", {"x": (L, BSN), "y": (L, BSN)}),
    Case("IsInf", {"x": (F, BSN)}, attributes={"detect_negative": 0}),
    # movement
    *[Case("Transpose", {"x": (F, BSN)}, attributes={"perm": p}) for p in ([0, 2, 1], [1, 0, 2], [2, 1, 0], [1, 2, 0])],
    Case("Transpose", {"x": (U, ("S", "B"))}),
    Case("Transpose", {"x": (F, ("B", 3, "S", 32))}, attributes={"perm": [0, 2, 1, 3]}),
    Case("Expand", {"x": (F, ("B", 1, 3))}, {"s": ints(2, 1, 4, 3)}),
    Case("Tile", {"x": (F, ("B", "S", 3))}, {"r": ints(1, 2, 3)}),
    Case("Tile", {"x": (F, ("S",))}, {"r": ints(3)}),
    Case("Slice", {"x": (F, BSN)}, {"s": ints(1), "e": ints(2**62), "a": ints(1)}),
    Case(
        "Slice",
        {"x": (F, ("B", "S", 40))},
        {"s": ints(-1, 38), "e": ints(-(2**62), 3), "a": ints(1, 2), "t": ints(-1, -3)},
    ),
    Case("Slice", {"x": (F, ("B", 64))}, {"s": ints(32), "e": ints(64), "a": ints(-1)}),
    Case("Slice", {"x": (F, ("B", "S"))}, {"s": ints(-3), "e": ints(2**62), "a": ints(1)}),
    Case("Concat", {"x": (F, BSN), "y": (F, BSN), "z": (F, BSN)}, attributes={"axis": 1}),
    Case("Concat", {"x": (F, ("B", "S", 32)), "y": (F, ("B", "S", 64))}, attributes={"axis": -1}),
    Case("Concat", {"x": (F, ("B", "S", 3)), "y": (F, ("B", "S", 2))}, attributes={"axis": 2}),
    Case("Concat", {"x": (L, ("S",)), "y": (L, ("N",))}, attributes={"axis": 0}),
    Case("Concat", {"x": (U, ("S",)), "y": (U, ("N",))}, attributes={"axis": 0}),
    Case("Pad", {"x": (F, ("B", "S"))}, {"p": ints(1, 2, 0, 3), "v": np.array(7, np.float32)}),
    Case("Pad", {"x": (F, ("S", 8))}, {"p": ints(-1, 0, 2, 0)}),
    Case("Pad", {"x": (F, ("B", 9))}, {"p": ints(2, 3), "a": ints(1)}, order="x p _ a", attributes={"mode": "reflect"}),
    Case("Gather", {"x": (F, (7, "S")), "i": (L, ("B", "N"))}, low=-7, high=7),
    Case("Gather", {"x": (F, ("B", 7)), "i": ("int32", ("S",))}, low=-7, high=7, attributes={"axis": 1}),
    Case("Gather", {"x": (F, ("B", "S", 5))}, {"i": np.array(-1)}, attributes={"axis": 1}),
    Case("Gather", {"x": (F, ("B", 7, "N")), "i": (L, ())}, low=-7, high=7, attributes={"axis": 1}),
    Case("GatherElements", {"x": (F, ("B", 7)), "i": (L, ("B", "S"))}, low=-7, high=7, attributes={"axis": 1}),
    Case("GatherND", {"x": (F, (3, 4, "N")), "i": (L, ("S", 2))}, low=-3, high=3),
    Case("GatherND", {"x": (F, ("B", 4, "N")), "i": (L, ("B", 1))}, low=-3, high=3, attributes={"batch_dims": 1}),
    Case("Trilu", {"x": (F, BSN)}),
    Case("Trilu", {"x": (F, BSN)}, {"k": np.array(-1)}, attributes={"upper": 0}),
    Case("Trilu", {"x": (L, ("S", "S"))}, {"k": np.array(1)}),
    Case("Reshape", {"x": (F, ("B", "S", 24))}, {"s": ints(0, 0, 3, 8)}),
    Case("Reshape", {"x": (F, ("B", "S", 24))}, {"s": ints(0, -1, 8)}),
    # made from sizes
    Case("EyeLike", {"x": (F, ("S", "N"))}, attributes={"k": 1}),
    Case("OneHot", {"i": (L, ("B", "S"))}, {"d": np.array(6), "v": np.array([-1, 2], np.float32)}, low=-7, high=8),
    Case("Shape", {"x": (F, ("B", "S", 4))}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_onnxruntime(case: Case) -> None:
    proto = case.model()
    compiled = compile_model(proto)
    for seed, sizes in enumerate(SIZES):
        given = feeds(case, sizes, seed)
        assert_same(compiled.run(given)["out"], reference(proto, given)["out"], case.tolerance)


def run_one(proto: onnx.ModelProto, given: Mapping[str, Array]) -> Array:
    (found,) = compile_model(proto).run(given).values()
    return found


SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1, -1, 1e-30, 88.9, -104, 3e38, 5e-39], np.float32)


@pytest.mark.parametrize(
    "op", ["Exp", "Erf", "Tanh", "Sigmoid", "Relu", "Abs", "Neg", "Sign", "Floor", "Round", "IsNaN"]
)
def test_special_values(op: str) -> None:
    proto = Case(op, {"x": (F, ("N",))}).model()
    with np.errstate(all="ignore"):
        expected = reference(proto, {"x": SPECIAL})["out"]
    assert_same(run_one(proto, {"x": SPECIAL}), expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("attributes", [{}, {"detect_negative": 0}, {"detect_positive": 0}])
def test_infinities(dtype: str, attributes: dict[str, int]) -> None:
    """A float64 beyond float32 is no infinity."""
    x = np.append(SPECIAL, [3.4e38, -3.4e38] if dtype == "float32" else [1e300, -1e300]).astype(dtype)
    proto = Case("IsInf", {"x": (dtype, ("N",))}, attributes=attributes).model()
    positive, negative = (attributes.get(f"detect_{sign}", 1) for sign in ("positive", "negative"))
    np.testing.assert_array_equal(
        run_one(proto, {"x": x}), (np.isposinf(x) & bool(positive)) | (np.isneginf(x) & bool(negative))
    )


@pytest.mark.parametrize("op", ["Min", "Max", "Less", "GreaterOrEqual", "Equal", "Add", "Div"])
def test_pairs_of_special_values(op: str) -> None:
    x, y = (a.reshape(-1) for a in np.meshgrid(SPECIAL, SPECIAL))
    proto = Case(op, {"x": (F, ("N",)), "y": (F, ("N",))}).model()
    functions = {"Min": np.minimum, "Max": np.maximum}
    with np.errstate(all="ignore"):
        expected = functions[op](x, y) if op in functions else reference(proto, {"x": x, "y": y})["out"]
    assert_same(run_one(proto, {"x": x, "y": y}), expected)


def test_integer_division_never_traps() -> None:
    x = ints(7, -7, np.iinfo(np.int64).min, 5)
    y = ints(2, 2, -1, 0)
    proto = Case("Div", {"x": (L, ("N",)), "y": (L, ("N",))}).model()
    np.testing.assert_array_equal(run_one(proto, {"x": x, "y": y})[[0, 1, 3]], [3, -3, 0])


@pytest.mark.parametrize("bad", [7, -8, 2**40, -(2**62)])
@pytest.mark.parametrize("shape", [(2, 3), (6,)])
def test_an_index_out_of_range_is_an_error(bad: int, shape: tuple[int, ...]) -> None:
    index = np.zeros(shape, np.int64)
    index.flat[-1] = bad
    for data, axis in (((7, 5), 0), ((5, 7), 1)):
        proto = Case("Gather", {"x": (F, data), "i": (L, shape)}, attributes={"axis": axis}).model()
        with pytest.raises(IndexError, match="node returned 1"):
            compile_model(proto).run({"x": np.zeros(data, np.float32), "i": index})


def test_range_and_constant_of_shape_from_sizes() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], start=1, end=2),
        helper.make_node("Squeeze", ["s"], ["n"]),
        helper.make_node("Range", ["zero", "n", "one"], ["r"]),
        helper.make_node("ConstantOfShape", ["s"], ["c"], value=helper.make_tensor("v", 1, [1], [2.5])),
        helper.make_node("Shape", ["x"], ["all"]),
    ]
    proto = model(nodes, {"x": (F, ("B", "S"))}, ["r", "c", "all"], {"zero": np.array(0), "one": np.array(1)})
    compiled = compile_model(proto)
    for dims in ((2, 5), (1, 3000)):
        given = {"x": np.zeros(dims, np.float32)}
        found, expected = compiled.run(given), reference(proto, given)
        for name in expected:
            assert_same(found[name], expected[name])


def test_empty_tensors() -> None:
    proto = Case("Concat", {"x": (F, ("B", "S", 4)), "y": (F, ("B", "N", 4))}, attributes={"axis": 1}).model()
    compiled = compile_model(proto)
    y = np.ones((2, 3, 4), np.float32)
    np.testing.assert_array_equal(compiled.run({"x": np.empty((2, 0, 4), np.float32), "y": y})["out"], y)
    assert compiled.run({"x": np.empty((0, 1, 4), np.float32), "y": np.empty((0, 2, 4), np.float32)})["out"].shape == (
        0,
        3,
        4,
    )


def test_an_axis_that_is_0_in_every_run() -> None:
    proto = Case("Transpose", {"x": (F, ("B", 0, 4))}, attributes={"perm": [2, 1, 0]}).model()
    assert compile_model(proto).run({"x": np.empty((3, 0, 4), np.float32)})["out"].shape == (4, 0, 3)
