"""Programs: text, checks, widths, and building them."""

from __future__ import annotations

import numpy as np
import pytest

from coda_edge.epilogue.builder import Builder, append
from coda_edge.epilogue.program import EpilogueProgram, Kind, Output, Param, Step, StepKind
from coda_edge.errors import ShapeError

RESIDUAL = """\
(acc: tile f32, bias: col f32, residual: tile f32) -> (y: tile = v1, mean: row = v2.0, var: row = v2.1) {
  v0 = add acc bias
  v1 = add v0 residual
  v2 = moments v1
}"""


def program(steps: str, outputs: str = "y: tile = v0", params: str = "acc: tile f32") -> EpilogueProgram:
    return EpilogueProgram.parse(f"({params}) -> ({outputs}) {{\n{steps}\n}}")


def test_text_is_what_the_parts_spell():
    parsed = EpilogueProgram.parse(RESIDUAL)
    assert parsed == EpilogueProgram(
        (Param("acc", Kind.TILE), Param("bias", Kind.COL), Param("residual", Kind.TILE)),
        (Step("v0", "add", ("acc", "bias")), Step("v1", "add", ("v0", "residual")), Step("v2", "moments", ("v1",))),
        (Output("y", Kind.TILE, "v1"), Output("mean", Kind.ROW, "v2.0"), Output("var", Kind.ROW, "v2.1")),
    )
    assert str(parsed) == RESIDUAL


@pytest.mark.parametrize(
    "text",
    [
        "(acc: tile f32) -> (y: tile = acc) {\n}",
        "(acc: tile f16) -> (q: tile = acc[0:64] heads[32], k: tile = acc[64:128], v: tile = acc heads[8]) {\n}",
        "(acc: tile f32, cos: tile[position, period=8] f32, s: tile[period=4] f16, r: row[batch] f32) -> "
        "(q: tile = acc[0:64] heads[32] halves) {\n}",
        "(acc: tile f32) -> (q: tile = acc[0:64] heads[32] halves[0:8, 16:32], k: tile = acc heads[8] halves[4:8]) {\n}",
        "(acc: tile f32) -> (y: tile = v1) {\n  v0 = max acc -inf\n  v1 = cast v0 to=f16\n}",
        "(acc: tile f32) -> (y: tile = v0) {\n  v0 = mul acc 1e-05\n}",
    ],
)
def test_text_round_trip(text):
    assert str(EpilogueProgram.parse(text)) == text


def test_text_may_be_spaced_freely():
    assert EpilogueProgram.parse(RESIDUAL.replace("  ", "\t").replace("{", "\n{\n")) == EpilogueProgram.parse(RESIDUAL)


def test_literals_are_kept_to_the_bit():
    for value in (0.1, -0.0, 1 / 3, 3.4028234663852886e38, 5e-324):
        (step,) = EpilogueProgram.parse(str(program(f"v0 = mul acc {value!r}"))).steps
        assert np.float64(step.args[1]).tobytes() == np.float64(value).tobytes()


def test_kinds_and_dtypes():
    p = program(
        "v0 = mul row col\nv1 = rsqrt row\nv2 = add scale 1.0\nv3 = gt acc half\nv4 = where v3 half acc\nv5 = cast v4 to=f16\n"
        "v6 = add v5 half\nv7 = sum v6\nv8 = mul v0 v2\nv9 = add v8 v1\nv10 = add col 1.0",
        "y: tile = v9, z: tile = v5, s: row = v7",
        "acc: tile f32, row: row f32, col: col f32, scale: scalar f32, half: tile f16",
    )
    kinds, dtypes = p.kinds(), p.dtypes()
    assert [kinds[v].value for v in ("v0", "v1", "v2", "v7", "v9", "v10")] == [
        "tile",
        "row",
        "scalar",
        "row",
        "tile",
        "col",
    ]
    assert [dtypes[v] for v in ("v3", "v4", "v5", "v6", "v7")] == ["bool", "f32", "f16", "f16", "f32"]
    assert p.operand_dtype(p.steps[3]) == "f32"
    assert p.operand_dtype(p.steps[7]) == "f32"


def test_the_five_kinds_of_step():
    p = program(
        "v0 = exp acc\nv1 = add v0 bias\nv2 = mul v1 gate\nv3 = even v2\nv4 = sumsq v3",
        "y: tile = v3, s: row = v4",
        "acc: tile f32, bias: col f32, gate: tile f32",
    )
    assert [p.step_kind(s) for s in p.steps] == [
        StepKind.ELEMENTWISE,
        StepKind.VECTOR,
        StepKind.TILE,
        StepKind.PAIRWISE,
        StepKind.REDUCE,
    ]


def test_widths_follow_pairwise_steps_both_ways():
    p = program(
        "v0 = even acc\nv1 = mul v0 cos\nv2 = add v1 half_bias\nv3 = interleave v2 v2\nv4 = add v3 bias\nv5 = even v0",
        "y: tile = v4, z: tile = v5",
        "acc: tile f32, cos: tile f32, half_bias: col f32, bias: col f32",
    )
    assert {v: p.width(v, 12) for v in ("cos", "half_bias", "bias", "v3", "v5")} == {
        "cos": 6,
        "half_bias": 6,
        "bias": 12,
        "v3": 12,
        "v5": 3,
    }
    with pytest.raises(ShapeError, match="'v5' takes every 4th column: 6 columns"):
        p.check(6)


@pytest.mark.parametrize(
    ("steps", "outputs", "params", "message"),
    [
        ("v0 = add acc nope", "y: tile = v0", "acc: tile f32", "no value 'nope'"),
        ("v0 = gelu acc", "y: tile = v0", "acc: tile f32", "unknown operator 'gelu'"),
        ("v0 = add acc", "y: tile = v0", "acc: tile f32", "takes 2 operands, not 1"),
        ("v0 = sum acc\nv1 = mul acc v0", "y: tile = v1", "acc: tile f32", "reduced over the whole row"),
        ("v0 = moments acc", "y: row = v0", "acc: tile f32", "no value 'v0'"),
        ("v0 = sum b", "y: row = v0", "acc: tile f32, b: col f32", "sum reduces a tile"),
        ("v0 = even r", "y: tile = v0", "acc: tile f32, r: row f32", "pairs columns"),
        ("v0 = even acc\nv1 = add v0 acc", "y: tile = v1", "acc: tile f32", "combines values of N/2 and N columns"),
        ("v0 = add acc i", "y: tile = v0", "acc: tile f32, i: tile i32", "cast first"),
        ("v0 = exp i", "y: tile = v0", "acc: tile f32, i: tile i32", "takes float operands"),
        ("v0 = add i 0.5", "y: tile = v0", "acc: tile f32, i: tile i32", "do not fit the dtype i32"),
        ("v0 = where acc acc acc", "y: tile = v0", "acc: tile f32", "chooses by a bool"),
        ("v0 = cast acc to=f7", "y: tile = v0", "acc: tile f32", "unknown dtype f7"),
        ("v0 = cast acc", "y: tile = v0", "acc: tile f32", "cast has one attribute"),
        ("v0 = add acc nan", "y: tile = v0", "acc: tile f32", "not NaN"),
        ("v0 = neg acc\nv0 = neg acc", "y: tile = v0", "acc: tile f32", "'v0' twice"),
        ("inf = neg acc", "y: tile = inf", "acc: tile f32", "'inf' cannot name"),
        ("v0 = neg r", "y: row = v0", "acc: tile f32, r: row f32", "must be the result of a reduce"),
        ("v0 = neg acc", "y: row = v0", "acc: tile f32", "declared row and 'v0' is a tile"),
        ("v0 = neg acc", "y: tile = v0[4:2]", "acc: tile f32", "not a range"),
        ("v0 = sum acc", "y: row = v0 heads[2]", "acc: tile f32", "only tile outputs"),
        ("v0 = neg acc", "", "acc: tile f32", "must have an output"),
        ("v0 = neg acc", "y: tile = v0", "acc: col f32", "must be a tile"),
        ("v0 = neg acc", "y: tile = v0", "acc: plane f32", "unknown kind 'plane'"),
        ("v0 = neg acc", "y: tile = v0", "acc: tile f99", "unknown dtype f99"),
        ("v0 = neg acc", "y: tile = v0", "acc: tile[position] f32", "only tile and row operands share rows"),
        ("v0 = neg acc", "y: tile = v0", "acc: tile f32, c: col[batch] f32", "only tile and row operands share rows"),
        ("v0 = neg acc", "y: tile = v0", "acc: tile f32, r: row[period=2] f32", "only tile operands have a period"),
        ("v0 = neg acc", "y: tile = v0", "acc: tile f32, r: tile[period=0] f32", "a period of 0 columns"),
        ("v0 = neg acc", "y: tile = v0", "acc: tile f32, r: tile[rows] f32", "cannot read epilogue parameter"),
        ("v0 = neg acc", "y: tile = v0 heads[3] halves", "acc: tile f32", "an even number of columns"),
        ("v0 = neg acc", "y: tile = v0[1:5] heads[4] halves", "acc: tile f32", "from an even column"),
        ("v0 = neg acc", "y: tile = v0 heads[8] halves[0:3]", "acc: tile f32", "an even number of columns"),
        ("v0 = neg acc", "y: tile = v0 heads[8] halves[4:10]", "acc: tile f32", "an even number of columns"),
        ("v0 = neg acc", "y: tile = v0 heads[8] halves[0:4, 2:6]", "acc: tile f32", "an even number of columns"),
        ("v0 == neg", "y: tile = v0", "acc: tile f32", "cannot read epilogue step 'v0 == neg'"),
    ],
)
def test_errors_say_what_is_wrong(steps, outputs, params, message):
    with pytest.raises(ShapeError, match=message):
        program(steps, outputs, params)


def test_not_a_program():
    with pytest.raises(ShapeError, match="not an epilogue program"):
        EpilogueProgram.parse("y = acc + bias")


@pytest.mark.parametrize(
    ("output", "message"), [("y: tile = v0[4:9]", "of 8 columns"), ("y: tile = v0 heads[3]", "no multiple of heads")]
)
def test_column_ranges_are_checked_against_the_width(output, message):
    p = program("v0 = neg acc", output)
    p.check(9)
    with pytest.raises(ShapeError, match=message):
        p.check(8)


def test_a_period_divides_the_width():
    p = program("v0 = even acc\nv1 = mul v0 c", "y: tile = v1", "acc: tile f32, c: tile[period=4] f32")
    assert p.operand_width(p.params[1], 16) == 4
    with pytest.raises(ShapeError, match="6 columns are no multiple of its period 4"):
        p.check(12)


def test_halves_need_pairs_to_the_last_column():
    p = program("v0 = neg acc", "y: tile = v0[0:4] heads[2] halves")
    p.check(6)
    with pytest.raises(ShapeError, match="5 columns, which are not pairs"):
        p.check(5)


def test_builder_makes_each_step_once_and_drops_the_dead():
    b = Builder()
    bias = b.param("bias", Kind.COL)
    b.add("exp", "acc")
    first = b.add("add", "acc", bias)
    assert b.add("add", bias, "acc") == first
    assert b.add("sub", bias, "acc") != b.add("sub", "acc", bias)
    assert b.add("mul", first, 0.0) != b.add("mul", first, -0.0)
    b.output("y", b.add("mul", first, first))
    assert (
        str(b.build()) == "(acc: tile f32, bias: col f32) -> (y: tile = v1) {\n  v0 = add acc bias\n  v1 = mul v0 v0\n}"
    )


def test_builder_goes_on_from_a_program():
    b = Builder(EpilogueProgram.parse(RESIDUAL))
    y = b.outputs["y"].value
    b.output("y", b.add("relu", y))
    b.drop_output("mean")
    assert str(b.build()) == (
        "(acc: tile f32, bias: col f32, residual: tile f32) -> (y: tile = v3, var: row = v2.1) {\n"
        "  v0 = add acc bias\n  v1 = add v0 residual\n  v2 = moments v1\n  v3 = relu v1\n}"
    )


def test_builder_names_do_not_collide():
    b = Builder()
    v0, again = b.param("v0", Kind.COL), b.param("v0", Kind.COL)
    b.output("y", b.add("add", b.add("add", "acc", v0), again))
    built = b.build()
    assert [p.name for p in built.params] == ["acc", "v0", "v0_1"]
    assert [s.result for s in built.steps] == ["v1", "v2"]


def test_builder_drops_unused_operands_on_request():
    b = Builder(program("v0 = neg acc", params="acc: tile f32, unused: col f32"))
    assert len(b.build().params) == 2
    assert len(b.build(drop_unused_params=True).params) == 1


def test_builder_refuses_a_step_that_does_not_fit():
    b = Builder()
    total = b.add("sum", "acc")
    with pytest.raises(ShapeError, match="reduced over the whole row"):
        b.add("div", "acc", total)


def test_append_goes_on_from_an_output():
    scale = program("v0 = mul acc bias", "z: tile = v0", "acc: tile f32, bias: col f32")
    joined = append(EpilogueProgram.parse(RESIDUAL), scale, "y")
    assert [p.name for p in joined.params] == ["acc", "bias", "residual", "bias_1"]
    acc, bias, residual = np.arange(6.0).reshape(2, 3), np.array([1.0, 2, 3]), np.ones((2, 3))
    outputs = joined.reference(acc, {"bias": bias, "residual": residual, "bias_1": -bias})
    np.testing.assert_array_equal(outputs["z"], (acc + bias + residual) * -bias)
    np.testing.assert_array_equal(outputs["mean"], (acc + bias + residual).mean(1, keepdims=True))


def test_append_needs_a_whole_tile():
    with pytest.raises(ShapeError, match="not a whole tile"):
        append(EpilogueProgram.parse(RESIDUAL), program("v0 = neg acc"), "mean")


def test_rename_renames_everything_at_once():
    p = EpilogueProgram.parse(RESIDUAL).rename({"bias": "b", "v1": "v2", "v2": "v1"}, {"mean": "mu"})
    assert str(p) == (
        "(acc: tile f32, b: col f32, residual: tile f32) -> (y: tile = v2, mu: row = v1.0, var: row = v1.1) {\n"
        "  v0 = add acc b\n  v2 = add v0 residual\n  v1 = moments v2\n}"
    )


def test_key_identifies_the_text():
    p = EpilogueProgram.parse(RESIDUAL)
    assert p.key() == EpilogueProgram.parse(str(p)).key()
    assert p.key() != p.rename({"bias": "b"}).key()
    assert len(p.key()) == 8


def test_flops_and_uses():
    p = EpilogueProgram.parse(RESIDUAL)
    assert p.flops(10) == 10 * (1 + 1 + 4)
    assert p.uses() == {"acc": 1, "bias": 1, "residual": 1, "v0": 1, "v1": 2, "v2.0": 1, "v2.1": 1}


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ({"bias": np.ones(3)}, "'residual' .* is not given"),
        ({"bias": np.ones(4), "residual": np.ones((2, 3))}, "'bias' .* has shape"),
        ({"bias": np.ones(3), "residual": np.ones((2, 3)), "extra": 1.0}, "no operand 'extra'"),
    ],
)
def test_reference_checks_its_operands(operands, message):
    with pytest.raises(ShapeError, match=message):
        EpilogueProgram.parse(RESIDUAL).reference(np.ones((2, 3)), operands)


def test_reference_takes_rows_without_their_last_axis():
    p = program("v0 = mul acc r", params="acc: tile f32, r: row f32")
    y = p.reference(np.ones((2, 3)), {"r": np.array([2.0, 3.0])})["y"]
    np.testing.assert_array_equal(y, [[2, 2, 2], [3, 3, 3]])


def test_reference_of_shared_rows_and_periods():
    """Two batch entries of three positions, written out by hand, in both forms of the accumulator."""
    p = program(
        "v0 = add acc p\nv1 = add v0 b\nv2 = add v1 r",
        "y: tile = v2 heads[4] halves",
        "acc: tile f32, p: tile[position, period=2] f32, b: row[batch] f32, r: row[position] f32",
    )
    operands = {"p": np.array([[1, 2], [3, 4], [5, 6]]), "b": np.array([100, 200]), "r": np.array([10, 20, 30])}
    rows = [[111, 112], [123, 124], [135, 136], [211, 212], [223, 224], [235, 236]]
    expected = np.array([[a, a, b, b] for a, b in rows], float).reshape(2, 1, 3, 4)
    for acc, rows_per_batch in ((np.zeros((2, 3, 4)), None), (np.zeros((6, 4)), 3)):
        np.testing.assert_array_equal(p.reference(acc, operands, rows_per_batch)["y"], expected)
    with pytest.raises(ShapeError, match=r"'p' \(position\) has 3 rows, expected 2"):
        p.reference(np.zeros((6, 4)), operands, 2)
    with pytest.raises(ShapeError, match="give a 3-D accumulator or rows_per_batch"):
        p.reference(np.zeros((6, 4)), operands)


def test_reference_rounds_narrow_floats():
    half = program("v0 = cast acc to=f16").reference(np.array([[1 / 3]]))["y"]
    assert half == np.float16(1 / 3)
    brain = program("v0 = cast acc to=bf16").reference(
        np.array([[1 / 3, 1 + 2.0**-8, 1 + 3 * 2.0**-8, np.inf, np.nan]])
    )["y"]
    np.testing.assert_array_equal(brain, [[0.333984375, 1.0, 1 + 2.0**-6, np.inf, np.nan]])
