"""The ONNX form of programs: each operator, each way to store, and random programs, in onnxruntime against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from epilogues import assert_close, random_feeds, run_onnx, split_acc
from hypothesis import given, settings
from hypothesis import strategies as st

from coda_edge.epilogue.builder import Builder
from coda_edge.epilogue.onnx import emit_onnx
from coda_edge.epilogue.ops import OPERATORS
from coda_edge.epilogue.program import EpilogueProgram, Kind
from coda_edge.errors import InvalidModel, ShapeError


def check(program: EpilogueProgram, feeds, tolerance: float = 2e-6, opset: int = 18) -> None:
    acc, operands = split_acc(program, feeds)
    expected = program.reference(acc, operands)
    assert_close(run_onnx(program, feeds, opset), expected, tolerance)


POSITIVE = {"log", "sqrt", "rsqrt", "reciprocal", "pow"}


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator(op):
    operator = OPERATORS[op]
    dtype = "bool" if op in ("and", "or", "not") else "f32"
    b = Builder()
    names = [b.param(f"p{i}", Kind.TILE, "bool" if op == "where" and i == 0 else dtype) for i in range(operator.arity)]
    result = b.add(op, *names, **{"cast": {"to": "i32"}, "headsum": {"heads": 2}}.get(op, {}))
    result = b.add("mul", result, names[0]) if op == "headsum" else result
    for i in range(operator.results):
        b.output(f"y{i}", result if operator.results == 1 else f"{result}.{i}")
    program = b.build()
    wide = 8 if op == "interleave" else 4
    feeds = random_feeds(program, (3, 5), 4) | {
        "acc": np.ones((3, 5, wide // 2 if op == "interleave" else 4), np.float32)
    }
    for name in names:
        feeds[name] = feeds[name][..., : feeds["acc"].shape[-1]]
        if dtype == "f32" and op in POSITIVE:
            feeds[name] = np.abs(feeds[name]) + np.float32(0.1)
        if op in ("eq", "le", "ge", "floor", "ceil", "round", "sign", "cast"):
            feeds[name] = np.round(feeds[name] * 2).astype(feeds[name].dtype) / 2
    check(program, feeds)
    assert_close(run_onnx(program, feeds, reference=True), run_onnx(program, feeds))


@pytest.mark.parametrize("op", ["add", "sub", "mul", "neg", "abs", "min", "max", "sign", "eq", "lt", "ge"])
@pytest.mark.parametrize("dtype", ["i32", "i64"])
def test_integer_operators(op, dtype):
    b = Builder()
    args = [b.param("a", Kind.TILE, dtype), 3.0][: OPERATORS[op].arity]
    b.output("y", b.add(op, *args))
    program = b.build()
    check(program, random_feeds(program, (2,), 6))


@pytest.mark.parametrize("text", ["v0 = min acc b\n  v1 = max v0 acc", "v0 = isnan acc\n  v1 = where v0 0.0 acc"])
def test_nan_and_infinities(text):
    program = EpilogueProgram.parse(f"(acc: tile f32, b: col f32) -> (y: tile = v1) {{\n  {text}\n}}")
    acc = np.array([[np.nan, 1, -np.inf, np.inf], [2, np.nan, 0, -1]], np.float32)
    check(program, {"acc": acc, "b": np.array([0, np.nan, 1, 2], np.float32)})


@pytest.mark.parametrize("value", ["inf", "-inf", "-0.0", "1e-12", "-3.4028234663852886e+38"])
def test_literals(value):
    program = EpilogueProgram.parse(f"(acc: tile f32) -> (y: tile = v0) {{\n  v0 = max acc {value}\n}}")
    check(program, {"acc": np.array([[-1, 0, 1e-13]], np.float32)})


@pytest.mark.parametrize(
    "kinds", [(Kind.ROW, Kind.COL), (Kind.SCALAR, Kind.TILE), (Kind.COL, Kind.SCALAR), (Kind.ROW, Kind.ROW)]
)
@pytest.mark.parametrize("lead", [(1,), (7,), (2, 3), (2, 1, 3)], ids=str)
def test_kinds_broadcast(kinds, lead):
    b = Builder()
    p, q = (b.param(f"p{i}", kind) for i, kind in enumerate(kinds))
    b.output("y", b.add("add", b.add("mul", p, q), "acc"))
    program = b.build()
    check(program, random_feeds(program, lead, 5))


def test_mixed_floats_widen_and_halves_stay():
    program = EpilogueProgram.parse(
        "(acc: tile f32, h: col f16, g: tile f16) -> (y: tile = v1, z: tile = v3, s: row = v4) {\n"
        "  v0 = mul acc h\n  v1 = add v0 0.1\n  v2 = cast v1 to=f16\n  v3 = mul v2 0.1\n  v4 = sum g\n}"
    )
    feeds = random_feeds(program, (3,), 5)
    outputs = run_onnx(program, feeds)
    assert [outputs[n].dtype for n in outputs] == [np.float32, np.float16, np.float32]
    check(program, feeds, tolerance=2e-3)


@pytest.mark.parametrize("lead", [(1, 1), (3, 1), (1, 7), (3, 7)])
@pytest.mark.parametrize("size,ranges", [(2, ""), (6, ""), (10, ""), (10, "[0:4]"), (14, "[2:6, 8:14]")])
def test_shared_rows_periods_and_halves(lead, size, ranges):
    text = (
        "(acc: tile f32, cos: tile[position, period=P] f32, sin: tile[period=P] f32, b: tile[batch] f32, r: row[position] f32, "
        "s: row[batch] f32) -> (y: tile = v7[D:E] heads[D] halves, z: tile = v7 heads[D]) {\n"
        "  v0 = add acc b\n  v1 = mul v0 s\n  v2 = add v1 r\n  v3 = even v2\n  v4 = odd v2\n  v5 = mul v3 cos\n"
        "  v6 = sub v4 sin\n  v7 = interleave v5 v6\n}"
    )
    text = text.replace("P]", f"{size // 2}]").replace("D:E", f"{size}:{3 * size}").replace("[D]", f"[{size}]")
    program = EpilogueProgram.parse(text.replace("halves", f"halves{ranges}"))
    feeds = random_feeds(program, lead, 3 * size)
    check(program, feeds)
    assert_close(run_onnx(program, feeds, reference=True), run_onnx(program, feeds))


def test_a_period_needs_the_number_of_columns():
    program = EpilogueProgram.parse("(acc: tile f32, c: tile[period=2] f32) -> (y: tile = v0) {\n  v0 = mul acc c\n}")
    with pytest.raises(ShapeError, match="repeats every 2 columns"):
        emit_onnx(program, ["acc", "c"], ["y"], "t_")


def test_one_value_stored_in_many_ways():
    program = EpilogueProgram.parse(
        "(acc: tile f32, bias: col f32) -> (y: tile = v0, again: tile = v0, raw: tile = acc, left: tile = v0[0:4] heads[2], "
        "right: tile = v0[4:12], heads: tile = v0 heads[3], also: row = v1, sum: row = v1) {\n"
        "  v0 = add acc bias\n  v1 = sum v0\n}"
    )
    feeds = random_feeds(program, (2, 3), 12)
    check(program, feeds)
    acc, operands = split_acc(program, feeds)
    outputs = program.reference(acc, operands)
    assert outputs["left"].shape == (2, 2, 3, 2)
    assert outputs["heads"].shape == (2, 4, 3, 3)
    np.testing.assert_array_equal(outputs["left"][1, 1, 2], outputs["y"][1, 2, 2:4])


@pytest.mark.parametrize("opset", [18, 20, 23])
def test_opsets(opset):
    program = EpilogueProgram.parse(
        "(acc: tile f32) -> (y: tile = v3, mean: row = v4.0, var: row = v4.1) {\n"
        "  v0 = even acc\n  v1 = odd acc\n  v2 = mul v0 v1\n  v3 = interleave v2 v1\n  v4 = moments v3\n}"
    )
    check(program, random_feeds(program, (2, 3), 6), opset=opset)


def test_refuses_old_opsets_and_wrong_counts():
    program = EpilogueProgram.parse("(acc: tile f32) -> (y: tile = acc) {\n}")
    with pytest.raises(InvalidModel, match="need opset 18"):
        emit_onnx(program, ["x"], ["y"], "", opset=17)
    with pytest.raises(ShapeError, match="1 parameters and 1 outputs, the node 2 and 1"):
        emit_onnx(program, ["x", "z"], ["y"], "")


BOUNDED = ("tanh", "sigmoid", "erf", "sin", "cos")
UNARY = (*BOUNDED, "abs", "neg", "relu")


@st.composite
def programs(draw) -> EpilogueProgram:
    """Programs of bounded, smooth steps over all kinds, with pairwise steps, reductions and column ranges; for n = 8."""
    b = Builder()
    kinds = draw(st.lists(st.sampled_from([k for k in Kind if k is not Kind.HEAD]), max_size=4))
    # Each value's log2(width / n), None where it has no columns.
    levels = {"acc": 0} | {b.param(f"p{i}", k): 0 if k in (Kind.TILE, Kind.COL) else None for i, k in enumerate(kinds)}

    def add(op: str, *args: str | float) -> str:
        known = [levels[a] for a in args if levels.get(a) is not None]
        name = b.add(op, *args)
        levels[name] = known[0] + {"even": -1, "odd": -1, "interleave": 1}.get(op, 0) if known else None
        return name

    for _ in range(draw(st.integers(1, 10))):
        x = draw(st.sampled_from(list(levels)))
        y = draw(st.sampled_from([v for v in levels if None in (levels[v], levels[x]) or levels[v] == levels[x]]))
        form = draw(st.sampled_from(["unary", "literal", "mean", "product", "select", "pairwise"]))
        if form == "unary":
            add(draw(st.sampled_from(UNARY)), x)
        elif form == "literal":
            add(
                draw(st.sampled_from(["add", "sub", "min", "max"])),
                add("mul", x, 0.5),
                draw(st.floats(-2, 2, width=32)),
            )
        elif form == "mean":
            add("mul", 0.5, add(draw(st.sampled_from(["add", "sub"])), x, y))
        elif form == "product":
            add("mul", x, add(draw(st.sampled_from(BOUNDED)), y))
        elif form == "select":
            add("where", b.add("gt", "acc", 0.25), "acc", 0.0)
        elif levels[x] is not None and levels[x] > -2:
            even, odd = add("even", x), add("odd", x)
            if draw(st.booleans()):
                add("interleave", odd, even)
    tiles = [v for v in levels if b.kind(v) is Kind.TILE]
    for i, value in enumerate(draw(st.lists(st.sampled_from(tiles), min_size=1, max_size=3))):
        width = 8 >> -levels[value]
        start = draw(st.integers(0, width - 1))
        b.output(f"y{i}", value, draw(st.sampled_from([None, (start, draw(st.integers(start + 1, width)))])))
    for op in draw(st.lists(st.sampled_from(["sum", "sumsq", "mean", "rowmax"]), max_size=2, unique=True)):
        b.output(op, b.add(op, draw(st.sampled_from(tiles))))
    return b.build()


@settings(max_examples=80, deadline=None)
@given(programs())
def test_random_programs_print_and_parse(program):
    assert EpilogueProgram.parse(str(program)) == program
    assert Builder(program).build() == program


@settings(max_examples=60, deadline=None)
@given(programs(), st.sampled_from([(1,), (5,), (2, 3)]), st.integers(0, 99))
def test_random_programs_run(program, lead, seed):
    check(program, random_feeds(program, lead, 8, seed), tolerance=1e-5)
