"""Reductions, Softmax, ArgMax, CumSum, TopK, MatMul and Conv against onnxruntime, at two sizes of symbolic dimensions."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from lowering import Compiled, assert_same, compile_model, model, reference
from onnx import helper
from test_lower_pointwise import BSN, SIZES, Case, F, L, feeds, ints

REDUCE = [
    "ReduceSum",
    "ReduceMean",
    "ReduceMax",
    "ReduceMin",
    "ReduceL1",
    "ReduceL2",
    "ReduceSumSquare",
    "ReduceLogSumExp",
]
CASES = [
    *[Case(op, {"x": (F, BSN)}, {"a": ints(-1)}, tolerance=1e-5) for op in REDUCE],
    *[Case(op, {"x": (F, ("B", 6, "N"))}, {"a": ints(1)}, attributes={"keepdims": 0}, tolerance=1e-5) for op in REDUCE],
    Case("ReduceSum", {"x": (F, ("B", 3, "S", 33))}, {"a": ints(1, 3)}, tolerance=1e-5),
    Case("ReduceSum", {"x": (F, ("B", 3, "S", 33))}, {"a": ints(0, 2)}, attributes={"keepdims": 0}, tolerance=1e-5),
    Case("ReduceMean", {"x": (F, ("B", "S"))}, attributes={"keepdims": 0}, tolerance=1e-5),
    *[Case("ReduceMean", {"x": (F, ("B", "S", 3, n))}, {"a": ints(1, 2)}, tolerance=1e-5) for n in (128, 150)],
    Case("ReduceMax", {"x": (F, ("S", 200))}, {"a": ints(0)}, attributes={"keepdims": 0}),
    Case("Softmax", {"x": (F, ("B", "S", 200))}, attributes={"axis": 1}),
    Case("ReduceProd", {"x": (F, ("B", 5))}, {"a": ints(1)}, tolerance=1e-5),
    Case("ReduceLogSum", {"x": (F, ("B", 5))}, {"a": ints(1)}, low=0.1, tolerance=1e-5),
    *[Case(op, {"x": (L, BSN)}, {"a": ints(2)}, low=-9, high=9) for op in ("ReduceSum", "ReduceMax", "ReduceMin")],
    Case("ReduceMax", {"x": (L, ("B", "S"))}, {"a": ints(0)}, low=-9, high=9),
    *[Case(op, {"x": (F, BSN)}, attributes={"axis": a}) for op in ("Softmax", "LogSoftmax") for a in (-1, 1, 0)],
    Case("Softmax", {"x": (F, ("B", 300))}, low=-80, high=80),
    *[Case(op, {"x": (F, BSN)}, attributes={"axis": a}) for op in ("ArgMax", "ArgMin") for a in (-1, 1)],
    *[
        Case(op, {"x": (L, BSN)}, attributes={"axis": a, "keepdims": 0, "select_last_index": 1})
        for op in ("ArgMax", "ArgMin")
        for a in (2, 0)
    ],
    *[
        Case("CumSum", {"x": (d, BSN)}, {"a": np.array(a)}, attributes={"exclusive": e, "reverse": r}, tolerance=1e-5)
        for d, a, e, r in ((F, 1, 0, 0), (F, 2, 1, 0), (L, -1, 0, 1), (L, 0, 1, 1))
    ],
    Case("MatMul", {"x": (F, ("B", "S", "N")), "y": (F, ("B", "N", 19))}, tolerance=1e-5),
    Case("MatMul", {"x": (F, ("B", 3, "S", 32)), "y": (F, ("B", 1, 32, "S"))}, tolerance=1e-5),
    Case("MatMul", {"x": (F, ("S", 7)), "y": (F, ("B", 7, 64))}, tolerance=1e-5),
    Case("MatMul", {"x": (F, (9,)), "y": (F, ("B", 9, "S"))}, tolerance=1e-5),
    Case("MatMul", {"x": (F, ("B", "S", 9)), "y": (F, (9,))}, tolerance=1e-5),
    Case("MatMul", {"x": (L, ("B", 1, "S")), "y": (L, ("S", 3))}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_onnxruntime(case: Case) -> None:
    proto = case.model()
    compiled = compile_model(proto)
    for seed, sizes in enumerate(SIZES):
        given = feeds(case, sizes, seed)
        assert_same(compiled.run(given)["out"], reference(proto, given)["out"], case.tolerance)


CONVS = [
    ((2, 3, 17, 16), (5, 3, 4, 4), {"strides": [4, 4]}, False),
    (("B", 3, 32, 32), (40, 3, 16, 16), {"strides": [16, 16]}, True),
    (("B", 4, "S"), (6, 4, 3), {"pads": [1, 1]}, True),
    (("B", 4, 21), (6, 2, 3), {"pads": [2, 1], "group": 2, "dilations": [2], "strides": [2]}, True),
    ((1, 6, 9, 8), (6, 1, 3, 3), {"group": 6, "auto_pad": "SAME_UPPER"}, False),
    (("B", 6, 53), (6, 1, 7), {"group": 6, "pads": [3, 3]}, True),
    ((2, 5, 11, 41), (5, 1, 3, 4), {"group": 5, "pads": [1, 2, 1, 1], "strides": [2, 2], "dilations": [1, 2]}, True),
    (("B", 20, "S"), (40, 20, 7), {"pads": [6, 6], "dilations": [2]}, False),
]


@pytest.mark.parametrize(("x", "w", "attributes", "bias"), CONVS)
@pytest.mark.parametrize("constant", [True, False])
def test_conv(x: tuple[int | str, ...], w: tuple[int, ...], attributes: dict, bias: bool, constant: bool) -> None:
    rng = np.random.default_rng(1)
    parts = {"w": rng.standard_normal(w).astype(np.float32)}
    if bias:
        parts["b"] = rng.standard_normal(w[0]).astype(np.float32)
    inputs = {"x": (F, x)} | ({} if constant else {n: (F, v.shape) for n, v in parts.items()})
    node = helper.make_node("Conv", ["x", *parts], ["out"], "node", **attributes)
    proto = model([node], inputs, ["out"], parts if constant else {})
    compiled = compile_model(proto)
    for sizes in SIZES:
        given = {"x": rng.standard_normal([sizes[d] if isinstance(d, str) else d for d in x]).astype(np.float32)}
        given |= {} if constant else parts
        assert_same(compiled.run(given)["out"], reference(proto, given)["out"], 1e-5)


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("axis", [-1, 1])
def test_topk(largest: int, axis: int) -> None:
    node = helper.make_node("TopK", ["x", "k"], ["v", "i"], "node", axis=axis, largest=largest)
    proto = model(
        [node], {"x": (F, ("B", 9, "N"))} if axis == 1 else {"x": (F, ("B", "S", 9))}, ["v", "i"], {"k": ints(4)}
    )
    compiled = compile_model(proto)
    rng = np.random.default_rng(0)
    for dims in ((2, 9, 3), (1, 9, 17)):
        x = rng.integers(0, 6, dims if axis == 1 else (dims[0], dims[2], 9)).astype(np.float32)
        found, expected = compiled.run({"x": x}), reference(proto, {"x": x})
        for name in expected:
            assert_same(found[name], expected[name])


@pytest.mark.parametrize("n", [1, 5, 16, 50, 384, "N"])
def test_row_moments(n: int | str) -> None:
    x = gs.Variable("x", np.dtype(np.float32), ["B", "S", n])
    mean, var = (gs.Variable(name, np.dtype(np.float32), ["B", "S", 1]) for name in ("mean", "var"))
    node = gs.Node("RowMoments", "moments", {}, [x], [mean, var], domain="coda")
    compiled = Compiled(gs.Graph([node], [x], [mean, var], opset=20))
    data = (np.random.default_rng(0).standard_normal((3, 7, n if isinstance(n, int) else 77)) + 100).astype(np.float32)
    found, exact = compiled.run({"x": data}), data.astype(np.float64)
    assert_same(found["mean"], exact.mean(-1, keepdims=True).astype(np.float32), 1e-6)
    assert_same(found["var"], exact.var(-1, keepdims=True).astype(np.float32), 1e-5)


def test_long_rows_overflow_nothing() -> None:
    proto = Case("Softmax", {"x": (F, ("B", "S"))}).model()
    x = np.full((2, 1000), -np.float32(3.4e38))
    x[0, 10] = 1000
    found = compile_model(proto).run({"x": x})["out"]
    np.testing.assert_allclose(found[1], np.full(1000, 1e-3), rtol=1e-5)
    assert found[0, 10] == 1 and found[0].sum() == 1
