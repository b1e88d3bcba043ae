"""Sums over the heads of a product's rows: kernels, reference and ONNX form against numpy in float64."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import test_gemv
from epilogues import random_feeds, run_onnx, split_acc
from kernel_harness import VECTOR_TARGETS, Library, run
from rewriting import normal
from test_gemm import check

from coda_edge import targets
from coda_edge.epilogue.program import EpilogueProgram, Kind
from coda_edge.errors import ShapeError
from coda_edge.lower.gemm import lower_gemm
from coda_edge.schedule import choose_gemm
from coda_edge.symbolic import symbol

each_target = pytest.mark.parametrize("target", VECTOR_TARGETS, ids=lambda t: t.name)
PLAIN = targets.get("x86-64-v3")


def rms(head: int, columns: str = "") -> str:
    return (
        f"(acc: tile f32, g: col f32) -> (y: tile = v6{columns} heads[{head}]) {{\n  v0 = mul acc acc\n  v1 = headsum v0 heads={head}\n"
        f"  v2 = mul v1 {1 / head!r}\n  v3 = add v2 1e-06\n  v4 = rsqrt v3\n  v5 = mul acc v4\n  v6 = mul v5 g\n}}"
    )


def layer(head: int) -> str:
    return (
        f"(acc: tile f32, b: col f32, r: row f32) -> (y: tile = v8) {{\n  v0 = add acc b\n  v1 = headsum v0 heads={head}\n"
        f"  v2 = mul v1 {1 / head!r}\n  v3 = sub v0 v2\n  v4 = mul v3 v3\n  v5 = headsum v4 heads={head}\n"
        f"  v6 = add v5 r\n  v7 = sqrt v6\n  v8 = div v3 v7\n}}"
    )


def rotated(head: int) -> str:
    """Queries and keys, normalised and rotated, beside values that are neither."""
    return (
        f"(acc: tile f32, g: col f32, cos: tile[position, period={head // 2}] f32, sin: tile[position, period={head // 2}] f32) -> "
        f"(q: tile = v17[0:{2 * head}] heads[{head}] halves, k: tile = v17[{2 * head}:{3 * head}] heads[{head}] halves, "
        f"v: tile = acc[{3 * head}:{4 * head}] heads[{head}]) {{\n"
        f"  v0 = mul acc acc\n  v1 = headsum v0 heads={head}\n  v2 = mul v1 {1 / head!r}\n  v3 = add v2 1e-06\n  v4 = rsqrt v3\n"
        "  v5 = mul acc g\n  v6 = even v5\n  v7 = odd v5\n  v8 = mul v6 v4\n  v9 = mul v7 v4\n"
        "  v10 = mul v8 cos\n  v11 = mul v9 sin\n  v12 = sub v10 v11\n  v13 = mul v8 sin\n  v14 = mul v9 cos\n"
        "  v15 = add v13 v14\n  v16 = mul v15 1.0\n  v17 = interleave v12 v16\n}"
    )


@pytest.mark.parametrize(("head", "n"), [(24, 72), (80, 160), (5, 35), (192, 192)])
def test_a_norm_by_heads(head: int, n: int) -> None:
    for rows, batch in ((1, 1), (3, 3), (6, 2), (131, 131)):
        check(PLAIN, EpilogueProgram.parse(rms(head)), rows, n, 65, rows_per_batch=batch)


@pytest.mark.parametrize(("head", "n"), [(16, 80), (96, 192)])
def test_a_sum_of_what_another_sum_has_made(head: int, n: int) -> None:
    for rows in (1, 2, 4, 130):
        check(PLAIN, EpilogueProgram.parse(layer(head)), rows, n, 33, offset=3.0)


@each_target
@pytest.mark.parametrize("head", [16, 96])
def test_rotations_of_normalised_heads_beside_values(target: targets.Target, head: int) -> None:
    for rows, batch in ((1, 1), (4, 2), (7, 7), (130, 65)):
        check(target, EpilogueProgram.parse(rotated(head)), rows, 4 * head, 40, rows_per_batch=batch)


@pytest.mark.parametrize(
    "fields",
    [
        {"k_block": 16},
        {"pack": True},
        {"rows_outer": True, "panels": 2},
        {"panels": 3, "rows_first": True},
        {"block": 8},
    ],
    ids=str,
)
def test_every_schedule_gives_the_same(fields: dict[str, int]) -> None:
    schedule = replace(choose_gemm(PLAIN, 128, 50, 2), **fields)
    for rows in (1, 5, 37):
        check(PLAIN, EpilogueProgram.parse(rotated(32)), rows, 128, 50, schedule, rows_per_batch=rows)


@pytest.mark.parametrize("text", [rms(8, "[8:24]"), layer(8).replace("v8)", "v8 heads[8])"), rotated(6)])
@pytest.mark.parametrize("reference", [False, True])
def test_the_onnx_form_means_the_same(text: str, reference: bool) -> None:
    program = EpilogueProgram.parse(text)
    feeds = random_feeds(program, (2, 5), 24, seed=3)
    if "r" in feeds:
        feeds["r"] = np.abs(feeds["r"])
    acc, operands = split_acc(program, feeds)
    expected = program.reference(acc, operands)
    for name, value in run_onnx(program, feeds, reference=reference).items():
        assert np.abs(value - expected[name]).max() < 1e-5


def test_a_program_is_its_text() -> None:
    program = EpilogueProgram.parse(rotated(64))
    assert program.head == 64 and program.kinds()["v4"] is Kind.HEAD
    assert EpilogueProgram.parse(str(program)) == program


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (rms(8).replace("headsum v0 heads=8", "headsum v0"), "headsum heads=COLUMNS"),
        (rms(8).replace("headsum v0 heads=8", "headsum v0 heads=0"), "no number of columns"),
        (rms(8).replace("g: col", "g: head"), "never operands"),
        (layer(8).replace("headsum v4 heads=8", "headsum v4 heads=4"), "heads of one size"),
        (
            "(acc: tile f32) -> (y: tile = v2) {\n  v0 = even acc\n  v1 = headsum v0 heads=8\n  v2 = mul v0 v1\n}",
            "as wide as the accumulator",
        ),
        (
            "(acc: tile f32) -> (y: tile = v2) {\n  v0 = headsum acc heads=7\n  v1 = even acc\n  v2 = mul v1 v0\n}",
            "heads of 7 columns are not halved",
        ),
    ],
)
def test_what_is_no_program(text: str, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        EpilogueProgram.parse(text)


def test_columns_that_are_no_whole_heads() -> None:
    with pytest.raises(ShapeError, match="no multiple of heads of 16"):
        EpilogueProgram.parse(rms(16)).check(40)


@pytest.mark.parametrize(
    ("kind", "group", "full"), [("bfloat16", 0, True), ("uint4", 16, True), ("int4", 12, False), ("int8", 107, False)]
)
def test_sums_of_products_with_narrow_weights(
    kind: str, group: int, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_gemv, "N", 140)
    made = test_gemv.whole(kind, group, full, full, full) if group else test_gemv.real(ml_dtypes.bfloat16, scale=full)
    program, (k, n) = EpilogueProgram.parse(layer(28).replace("v8)", "v8 heads[28])")), made.stored.shape
    call = lower_gemm(PLAIN, "gemm", program, "a", made, ["b", "r"], ["y"], symbol("M"), symbol("M"))
    library = Library(PLAIN.build([call.kernel]))
    for rows in (1, 2, 4, 5, 29):
        a, b, r = (normal(*dims, seed=rows) for dims in ((rows, k), (n,), (rows, 1)))
        operands = {"b": b, "r": np.abs(r) + np.float32(0.1)}
        expected = program.reference(a @ made.value().astype(np.float64), operands, rows)["y"]
        given = {"a": a, **operands, "y": np.zeros(expected.shape, np.float32)}
        got = run(PLAIN, call, given, {"M": rows}, chunk=3, library=library)["y"]
        assert np.abs(got - expected).max() <= 5e-6 * max(1.0, np.abs(expected).max())
