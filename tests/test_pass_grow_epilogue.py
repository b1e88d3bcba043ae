"""A Gemm's epilogue takes the elementwise graph behind the product, statistics and layouts, and says what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from coda_edge.passes import absorb_norm, fuse_map, grow_epilogue, row_moments
from rewriting import Array, model, normal, rewrite

from coda_edge.epilogue.program import EpilogueProgram, Kind, Rows

_CONSTANTS: dict[str, Array] = {
    "w": normal(12, 24, seed=1),
    "b": normal(24, seed=2),
    "b3": normal(1, 1, 24, seed=2),
    "g": normal(24, seed=3),
    "half": np.float32(0.5),
    "one": np.float32(1),
    "root": np.float32(np.sqrt(2)),
    "last": np.array([-1]),
    "from8": np.array([8]),
    "to24": np.array([24]),
    "to8": np.array([8]),
    "from0": np.array([0]),
    "heads": np.array([0, 0, 4, 2]),
    "position": normal(1, 5, 24, seed=6),
}
_GELU = "d = Div(t, root) e = Erf(d) f = Add(e, one) i = Mul(half, f) y = Mul(t, i)"

_FUSED = {
    "bias": "p = MatMul(x, w) y = Add(p, b)",
    "bias first, three dimensions": "p = MatMul(x, w) y = Add(b3, p)",
    "gelu": f"p = MatMul(x, w) t = Add(p, b) {_GELU}",
    "residual": "p = MatMul(x, w) t = Add(p, b) y = Add(t, r)",
    "residual first": "p = MatMul(x, w) y = Sub(r, p)",
    "row scale": "p = MatMul(x, w) y = Mul(p, s)",
    "nothing": "y = MatMul(x, w)",
    "square": "p = MatMul(x, w) y = Mul(p, p)",
}
_IN = "float[B, S, 12] x, float[B, S, 24] r, float[B, S, 1] s"
_FEEDS = {"x": normal(2, 5, 12), "r": normal(2, 5, 24, seed=4), "s": normal(2, 5, 1, seed=5)}


@pytest.mark.parametrize("case", _FUSED)
def test_elementwise_graph_joins(case: str) -> None:
    done = rewrite(model(f"g ({_IN}) => (float[B, S, 24] y) {{ {_FUSED[case]} }}", _CONSTANTS), [grow_epilogue.PASS])
    assert done.ops() == {"Gemm": 1}
    assert done.error(_FEEDS) < 2e-6


def test_value_read_outside_is_an_output_too() -> None:
    m = model(
        f"g ({_IN}) => (float[B, S, 24] y, float[B, S, 24] t, float[B, 24, S] z) {{ p = MatMul(x, w) t = Add(p, b) {_GELU} z = Transpose <perm = [0, 2, 1]> (p) }}",
        _CONSTANTS,
    )
    done = rewrite(m, [grow_epilogue.PASS])
    assert done.ops() == {"Gemm": 1, "Transpose": 1}
    assert len(done.node("Gemm").outputs) == 3
    assert done.error(_FEEDS) < 2e-6


def test_statistics_are_row_outputs_and_the_norm_stays_behind() -> None:
    m = model(
        f"g ({_IN}) => (float[B, S, 24] y) {{ p = MatMul(x, w) t = Add(p, r) y = LayerNormalization(t, g, b) }}",
        _CONSTANTS,
    )
    done = rewrite(m, [row_moments.PASS, grow_epilogue.PASS])
    gemm = done.node("Gemm")
    assert [s.op for s in EpilogueProgram.parse(gemm.attrs["epilogue"]).steps] == ["add", "moments"]
    assert done.error(_FEEDS) < 2e-6


@pytest.mark.parametrize("reduction", ["ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceSumSquare"])
def test_row_reductions_join(reduction: str) -> None:
    m = model(
        f"g ({_IN}) => (float[B, S, 24] t, float[B, S, 1] y) {{ p = MatMul(x, w) t = Add(p, b) y = {reduction}(t, last) }}",
        _CONSTANTS,
    )
    done = rewrite(m, [grow_epilogue.PASS])
    assert done.ops() == {"Gemm": 1}
    assert done.error(_FEEDS) < 2e-6


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("kept", [0, 1])
def test_the_place_of_the_largest_logit_joins(op: str, kept: int) -> None:
    """Softly limited and of few distinct values, so that the first of equal ones counts; the logits are not stored."""
    out = "int64[B, S, 1] y" if kept else "int64[B, S] y"
    m = model(
        f"g (float[B, S, 12] x) => ({out}) {{ p = MatMul(x, w) t = Tanh(p) c = Mul(t, root) r = Round(c) "
        f"y = {op} <axis = -1, keepdims = {kept}> (r) }}",
        _CONSTANTS,
    )
    done = rewrite(m, [grow_epilogue.PASS])
    assert done.ops() == ({"Gemm": 1} if kept else {"Gemm": 1, "Squeeze": 1})
    assert len(done.node("Gemm").outputs) == 1
    assert done.error({"x": _FEEDS["x"]}) == 0.0


def test_the_last_of_equal_places_stays() -> None:
    m = model(
        "g (float[B, S, 12] x) => (int64[B, S, 1] y) { p = MatMul(x, w) y = ArgMax <axis = -1, select_last_index = 1> (p) }",
        _CONSTANTS,
    )
    done = rewrite(m, [grow_epilogue.PASS])
    assert done.ops() == {"Gemm": 1, "ArgMax": 1}
    assert done.error({"x": _FEEDS["x"]}) == 0.0


def test_the_logarithm_of_a_softmax_needs_no_sum_of_its_own() -> None:
    m = model(
        "g (float[B, S, 12] x) => (float[B, S, 24] y) { p = MatMul(x, w) t = Add(p, b) y = LogSoftmax(t) }", _CONSTANTS
    )
    done = rewrite(m, [grow_epilogue.PASS])
    steps = [s.op for s in EpilogueProgram.parse(done.node("Gemm").attrs["epilogue"]).steps]
    assert steps == ["add", "expsum"]
    assert "ReduceSum" not in done.ops() and "Exp" not in done.ops()
    assert done.error({"x": _FEEDS["x"]}) < 2e-6


def test_post_norm_residual_is_rebuilt_in_the_tile() -> None:
    """x → norm → (product with a square matrix) + norm: the norm's result is stored nowhere."""
    m = model(
        "g (float[B, S, 24] x) => (float[B, S, 24] y) { n = LayerNormalization(x, g, b) h = MatMul(n, v) y = Add(h, n) }",
        _CONSTANTS | {"v": normal(24, 24, seed=8)},
    )
    done = rewrite(m, [row_moments.PASS, absorb_norm.PASS, grow_epilogue.PASS])
    assert done.ops() == {"RowMoments": 1, "Gemm": 1}
    assert done.node("Gemm").inputs[0].name == "x"
    assert done.error({"x": normal(2, 5, 24)}) < 2e-6


def test_column_ranges_and_heads_are_stored_directly() -> None:
    m = model(
        """g (float[B, S, 12] x) => (float[B, 4, S, 2] h, float[B, S, 16] z) {
            p = MatMul(x, w) t = Add(p, b)
            a = Slice(t, from0, to8, last) s = Reshape(a, heads) h = Transpose <perm = [0, 2, 1, 3]> (s)
            z = Slice(t, from8, to24, last)
        }""",
        _CONSTANTS,
    )
    done = rewrite(m, [grow_epilogue.PASS])
    assert done.ops() == {"Gemm": 1}
    outputs = EpilogueProgram.parse(done.node("Gemm").attrs["epilogue"]).outputs
    assert [(o.columns, o.heads) for o in outputs] == [((0, 8), 2), ((8, 24), None)]
    assert done.error({"x": _FEEDS["x"]}) < 2e-6


def test_operand_that_depends_on_the_product_otherwise_is_refused() -> None:
    m = model(
        f"g ({_IN}) => (float[B, S, 24] y) {{ p = MatMul(x, w) c = CumSum(p, axis) y = Add(p, c) }}",
        _CONSTANTS | {"axis": np.array(1)},
    )
    done = rewrite(m, [grow_epilogue.PASS])
    assert done.ops() == {"Gemm": 1, "CumSum": 1, "Add": 1}
    assert "depends on the whole result" in done.log.refusals[0].reason
    assert done.error(_FEEDS) < 2e-6


@pytest.mark.parametrize("shape", [(1, 5, 24), (5, 24), (1, 5, 1), (2, 1, 24), (2, 1, 1)])
def test_operand_that_batch_entries_or_positions_share_joins(shape: tuple[int, ...]) -> None:
    m = model(
        "g (float[2, 5, 12] x) => (float[2, 5, 24] y) { p = MatMul(x, w) t = Mul(p, shared) y = Add(t, b) }",
        _CONSTANTS | {"shared": normal(*shape, seed=6)},
    )
    done = rewrite(m, [grow_epilogue.PASS])
    assert done.ops() == {"Gemm": 1}
    operand = EpilogueProgram.parse(done.node("Gemm").attrs["epilogue"]).params[1]
    assert (operand.kind is Kind.ROW) == (shape[-1] == 1)
    assert operand.rows is (Rows.BATCH if shape[0] == 2 else Rows.POSITION)
    assert done.error({"x": _FEEDS["x"]}) < 2e-6


def test_position_embedding_is_computed_once_for_all_batch_entries() -> None:
    m = model(
        "g (float[B, S, 12] x, float[1, S, 24] i) => (float[B, S, 24] y) { p = MatMul(x, w) e = Cos(i) y = Add(p, e) }",
        _CONSTANTS,
    )
    done = rewrite(m, [grow_epilogue.PASS])
    assert done.ops() == {"Gemm": 1, "Cos": 1}
    assert done.error({"x": _FEEDS["x"], "i": normal(1, 5, 24, seed=9)}) < 2e-6


def test_operand_that_broadcasts_over_other_rows_is_refused() -> None:
    m = model(
        "g (float[B, 3, 5, 12] x) => (float[B, 3, 5, 24] y) { p = MatMul(x, w) y = Add(p, position) }", _CONSTANTS
    )
    done = rewrite(m, [grow_epilogue.PASS])
    assert done.ops() == {"Gemm": 1, "Add": 1}
    assert "position" in done.log.refusals[0].reason
    assert done.error({"x": normal(2, 3, 5, 12)}) < 2e-6


def test_two_products_and_their_sum() -> None:
    m = model(
        f"g ({_IN}) => (float[B, S, 24] y) {{ p = MatMul(x, w) q = MatMul(x, u) t = Tanh(q) y = Add(p, t) }}",
        _CONSTANTS | {"u": normal(12, 24, seed=7)},
    )
    done = rewrite(m, [grow_epilogue.PASS])
    assert done.ops() == {"Gemm": 2}
    assert done.error(_FEEDS) < 2e-6


@pytest.mark.parametrize("kept", [True, False])
def test_heads_with_an_axis_of_one_are_stored_as_heads(kept: bool) -> None:
    """``[B, H, 1, S, D]``, as groups of queries want it, is a view of the heads that are stored."""
    end = "" if kept else "y = Squeeze(z, two)"
    out = "float[B, 4, 1, S, 2] z" if kept else "float[B, 4, S, 2] y"
    m = model(
        f"g (float[B, S, 12] x) => ({out}) {{ p = MatMul(x, w8) r = Reshape(p, grouped) z = Transpose <perm = [0, 2, 3, 1, 4]> (r) {end} }}",
        _CONSTANTS | {"w8": normal(12, 8, seed=9), "grouped": np.array([0, 0, 4, 1, 2]), "two": np.array([2])},
    )
    done = rewrite(m, [grow_epilogue.PASS])
    assert done.ops() == ({"Gemm": 1, "Unsqueeze": 1} if kept else {"Gemm": 1})
    assert done.error({"x": normal(3, 7, 12)}) < 2e-6


def test_a_single_head_is_stored_as_a_head_where_its_axis_moves() -> None:
    m = model(
        "g (float[B, S, 12] x) => (float[B, 1, S, 24] y) { p = MatMul(x, w) r = Reshape(p, single) y = Transpose <perm = [0, 2, 1, 3]> (r) }",
        _CONSTANTS | {"single": np.array([0, 0, 1, 24])},
    )
    done = rewrite(m, [grow_epilogue.PASS])
    assert done.ops() == {"Gemm": 1}
    assert done.error({"x": _FEEDS["x"]}) < 2e-6


def test_one_element_made_of_others_is_made_in_the_epilogue() -> None:
    """A scale from the largest magnitude, as dynamic quantisation has it: nothing small is a kernel."""
    m = model(
        """g (float[B, S, 12] x) => (float[B, S, 24] y, float[B, S, 12] z) {
            a = ReduceMax <keepdims = 0> (x) e = Abs(a) d = Div(e, root) s = Max(d, half)
            p = MatMul(x, w) y = Mul(p, s) z = Div(x, s)
        }""",
        _CONSTANTS,
    )
    done = rewrite(m, [grow_epilogue.PASS, fuse_map.PASS])
    assert done.ops()["Gemm"] == done.ops()["Map"] == 1
    assert set(done.ops()) <= {"Gemm", "Map", "ReduceMax", "Squeeze", "Reshape"}
    assert done.error({"x": _FEEDS["x"]}) < 2e-6


def test_ranges_of_a_range_are_ranges() -> None:
    m = model(
        """g (float[B, S, 12] x) => (float[B, S, 8] y, float[B, S, 8] z) {
            p = MatMul(x, w) t = Add(p, b) a = Slice(t, from8, to24, last) y = Slice(a, from8, to24, last) z = Slice(a, from0, to8, last) }""",
        _CONSTANTS,
    )
    done = rewrite(m, [grow_epilogue.PASS])
    assert done.ops() == {"Gemm": 1}
    outputs = EpilogueProgram.parse(done.node("Gemm").attrs["epilogue"]).outputs
    assert {o.columns for o in outputs} == {(8, 16), (16, 24)}
    assert done.error({"x": _FEEDS["x"]}) < 2e-6


def test_weights_of_integers_are_refused() -> None:
    weights = np.arange(60).reshape(12, 5).astype(np.int32)
    m = model("g (int32[B, 12] x) => (int32[B, 5] y) { y = MatMul(x, w) }", {"w": weights})
    done = rewrite(m, [grow_epilogue.PASS])
    assert done.ops() == {"MatMul": 1}
    assert "int32" in done.log.refusals[0].reason
