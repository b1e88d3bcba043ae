"""The GEMM template against numpy in float64: sizes, epilogues of every kind, output layouts, schedules."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from kernel_harness import VECTOR_TARGETS, Library, run

from coda_edge import targets
from coda_edge.epilogue import library
from coda_edge.epilogue.builder import Builder
from coda_edge.epilogue.program import EpilogueProgram, Kind, Rows
from coda_edge.errors import ShapeError
from coda_edge.lower.gemm import lower_gemm
from coda_edge.lower.kernel import KernelCall
from coda_edge.schedule import GemmSchedule, choose_gemm, gemm_candidates
from coda_edge.symbolic import symbol

ROWS = (1, 2, 3, 7, 130)
STORED = {"f32": np.float32, "bool": np.bool_, "i32": np.int32, "i64": np.int64, "f16": np.float16}


def weight(n: int, k: int) -> np.ndarray:
    return np.random.default_rng(n * 7919 + k).standard_normal((k, n)).astype(np.float32)


@cache
def built(
    target: targets.Target, program: EpilogueProgram, n: int, k: int, schedule: GemmSchedule | None
) -> tuple[KernelCall, Library]:
    """The call, whose operands and outputs have the names that the program gives them, and its library."""
    names = [p.name for p in program.params[1:]], [o.name for o in program.outputs]
    rows, batch = symbol("M"), symbol("S")
    call = lower_gemm(target, "gemm", program, "input", weight(n, k), *names, rows, batch, schedule)
    return call, Library(target.build([call.kernel, *([call.finish] if call.finish else [])]))


def check(
    target: targets.Target,
    program: EpilogueProgram,
    m: int,
    n: int,
    k: int,
    schedule: GemmSchedule | None = None,
    rows_per_batch: int = 1,
    offset: float = 0.0,
    tolerance: float = 3e-6,
) -> None:
    """Runs ``program`` on random data and compares every output with the reference, relative to the output's scale."""
    rng = np.random.default_rng(m * 31 + n + k)
    a = rng.standard_normal((m, k)).astype(np.float32)
    operands = {}
    for param in program.params[1:]:
        width = program.operand_width(param, n) if param.kind in (Kind.TILE, Kind.COL) else 1
        count = {Rows.ALL: m, Rows.POSITION: rows_per_batch, Rows.BATCH: m // rows_per_batch}[param.rows]
        shape = {Kind.TILE: (count, width), Kind.ROW: (count, 1), Kind.COL: (width,), Kind.SCALAR: ()}[param.kind]
        values = rng.standard_normal(shape) + offset
        values = np.abs(values) + 0.1 if param.name in ("var", "rstd") else values
        operands[param.name] = np.asarray(values > 0 if param.dtype == "bool" else values).astype(STORED[param.dtype])
    expected = program.reference(a.astype(np.float64) @ weight(n, k).astype(np.float64), operands, rows_per_batch)
    dtypes = program.dtypes()
    outputs = {o.name: np.zeros(expected[o.name].shape, STORED[dtypes[o.value]]) for o in program.outputs}
    call, lib = built(target, program, n, k, schedule)
    got = run(target, call, {"input": a, **operands, **outputs}, {"M": m, "S": rows_per_batch}, chunk=3, library=lib)
    for name, value in got.items():
        error = np.abs(value.astype(np.float64) - expected[name])
        scale = max(1.0, float(np.abs(expected[name]).max(initial=0)))
        assert error.max(initial=0) <= tolerance * scale, (name, m, n, k, error.max(), scale)


each_target = pytest.mark.parametrize("target", VECTOR_TARGETS, ids=lambda t: t.name)


@each_target
@pytest.mark.parametrize("n", [1, 5, 16, 24, 64, 100, 384, 1152])
@pytest.mark.parametrize("k", [1, 3, 64, 384])
def test_sizes(target: targets.Target, n: int, k: int) -> None:
    for m in ROWS:
        check(target, library.bias_residual_moments.program, m, n, k, offset=3.0)


PROGRAMS = {
    "elementwise": "(acc: tile f32) -> (y: tile = v1) {\n  v0 = tanh acc\n  v1 = mul v0 0.5\n}",
    "scalar": "(acc: tile f32, s: scalar f32, b: col f32) -> (y: tile = v1) {\n  v0 = mul acc s\n  v1 = add v0 b\n}",
    "row and column of row steps": (
        "(acc: tile f32, mean: row f32, var: row f32, g: col f32) -> (y: tile = v5) {\n"
        "  v0 = add var 1e-12\n  v1 = rsqrt v0\n  v2 = sub acc mean\n  v3 = mul v2 v1\n  v4 = mul v3 g\n  v5 = mul v4 v0\n}"
    ),
    "all statistics": (
        "(acc: tile f32, b: col f32) -> "
        "(s: row = v1, q: row = v2, m: row = v3, a: row = v4, mean: row = v5.0, var: row = v5.1) {\n"
        "  v0 = add acc b\n  v1 = sum v0\n  v2 = sumsq v0\n  v3 = rowmax v0\n  v4 = mean v0\n  v5 = moments v0\n}"
    ),
    "statistics of half the columns": (
        "(acc: tile f32) -> (y: tile = v2, s: row = v3) {\n  v0 = even acc\n  v1 = odd acc\n  v2 = mul v0 v1\n  v3 = sum v2\n}"
    ),
    "two tiles": "(acc: tile f32, r: tile f32) -> (x: tile = v0, y: tile = v1) {\n  v0 = add acc r\n  v1 = relu v0\n}",
    "pairs with operands of both widths": (
        "(acc: tile f32, r: tile f32, b: col f32, h: tile f32, c: col f32) -> (y: tile = v7, z: tile = v8) {\n"
        "  v0 = add acc r\n  v1 = add v0 b\n  v2 = even v1\n  v3 = odd v1\n  v4 = mul v2 h\n  v5 = add v4 c\n"
        "  v6 = mul v3 v5\n  v7 = interleave v6 v5\n  v8 = sub v6 h\n}"
    ),
    "pairs of pairs": (
        "(acc: tile f32, r: tile f32) -> (y: tile = v3, z: tile = v5) {\n"
        "  v0 = odd acc\n  v1 = even v0\n  v2 = odd v0\n  v3 = sub v1 v2\n  v4 = interleave v2 v1\n  v5 = interleave v4 r\n}"
    ),
    "bool mask": "(acc: tile f32, m: tile bool) -> (y: tile = v0) {\n  v0 = where m acc -1.0\n}",
    "bool output": "(acc: tile f32, b: col f32) -> (y: tile = v0) {\n  v0 = gt acc b\n}",
    "half storage": "(acc: tile f32, r: tile f16) -> (y: tile = v1) {\n  v0 = add acc r\n  v1 = cast v0 to=f16\n}",
    "integer": (
        "(acc: tile f32, r: tile i32) -> (y: tile = v2) {\n"
        "  v0 = mul acc 3.0\n  v1 = cast v0 to=i32\n  v2 = add v1 r\n}"
    ),
    "rotate": (
        "(acc: tile f32, cos: tile f32, sin: tile f32) -> (y: tile = v8) {\n"
        "  v0 = even acc\n  v1 = odd acc\n  v2 = mul v0 cos\n  v3 = mul v1 sin\n  v4 = sub v2 v3\n"
        "  v5 = mul v0 sin\n  v6 = mul v1 cos\n  v7 = add v5 v6\n  v8 = interleave v4 v7\n}"
    ),
}


@each_target
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(target: targets.Target, name: str) -> None:
    program = EpilogueProgram.parse(PROGRAMS[name])
    loose = {"half storage": 5e-4, "integer": 0.2}.get(name, 3e-6)
    for m, n in ((1, 4), (7, 24), (13, 52), (130, 132), (7, 300)):
        check(target, program, m, n, 20, tolerance=loose)


@each_target
def test_library(target: targets.Target) -> None:
    for name in (
        "bias_gelu",
        "bias_gelu_tanh",
        "bias_silu",
        "bias_relu",
        "norm_bias",
        "norm_bias_gelu",
        "swiglu",
        "geglu",
    ):
        program = getattr(library, name).program
        for m, n in ((3, 22), (9, 128)):
            check(target, program, m, n, 33)


@each_target
@pytest.mark.parametrize("heads,size", [(12, 32), (2, 64), (3, 20), (2, 7), (1, 16), (4, 80)])
def test_heads(target: targets.Target, heads: int, size: int) -> None:
    width = heads * size
    text = str(qkv_program(width, size))
    program = EpilogueProgram.parse(text)
    for batch, sequence in ((1, 1), (1, 7), (3, 5), (2, 65), (5, 1), (3, 43)):
        check(target, program, batch * sequence, 3 * width, 16, rows_per_batch=sequence)


SHARED = (
    "(acc: tile f32, cos: tile[position, period=P] f32, sin: tile[period=P] f32, bias: tile[batch] f32, r: row[position] f32, "
    "s: row[batch] f32, t: row[position] f32) -> (y: tile = v10[A:B] heads[D] halves, z: tile = v10, u: tile = v10 heads[D]) {\n"
    "  v0 = add acc bias\n  v1 = add v0 r\n  v2 = exp s\n  v3 = mul v1 v2\n  v4 = even v3\n  v5 = odd v3\n  v6 = mul v4 cos\n"
    "  v7 = mul v5 sin\n  v8 = sub v6 v7\n  v9 = interleave v8 v7\n  v10 = mul v9 t\n}"
)


@each_target
@pytest.mark.parametrize(
    "heads,size,ranges", [(4, 16, ""), (1, 64, ""), (3, 20, ""), (7, 2, ""), (3, 20, "[0:8]"), (2, 32, "[0:16, 24:32]")]
)
def test_rotated_heads(target: targets.Target, heads: int, size: int, ranges: str) -> None:
    """Operands that positions or batch entries share, of any period, and heads stored in halves."""
    end = (heads + 1) * size
    text = SHARED.replace("P]", f"{size // 2}]").replace("A:B", f"{size}:{end}").replace("[D]", f"[{size}]")
    program = EpilogueProgram.parse(text.replace("halves", f"halves{ranges}"))
    for batch, sequence in ((1, 1), (3, 1), (3, 7), (1, 133), (3, 43)):
        check(target, program, batch * sequence, end, 9, rows_per_batch=sequence)


@each_target
def test_queries_and_keys_rotated_beside_values(target: targets.Target) -> None:
    """A joint program: each output in its own range, classes of columns for all."""
    text = (
        "(acc: tile f32, s: row f32, cos: tile[position, period=8] f32, sin: tile[position, period=8] f32, b: col f32) -> "
        "(q: tile = v7[0:64] heads[16] halves, k: tile = v7[64:96] heads[16], v: tile = v8[96:128] heads[16], w: tile = v8[3:30]) {\n"
        "  v0 = mul acc s\n  v1 = even v0\n  v2 = odd v0\n  v3 = mul v1 cos\n  v4 = mul v2 sin\n  v5 = sub v3 v4\n"
        "  v6 = add v3 v4\n  v7 = interleave v5 v6\n  v8 = add v0 b\n}"
    )
    for batch, sequence in ((1, 1), (3, 7)):
        check(target, EpilogueProgram.parse(text), batch * sequence, 128, 9, rows_per_batch=sequence)


@each_target
def test_halves_without_pairs(target: targets.Target) -> None:
    text = "(acc: tile f32, c: tile[batch, period=3] f32) -> (y: tile = v0 heads[6] halves, z: tile = v1 heads[4] halves) {\n"
    program = EpilogueProgram.parse(text + "  v0 = mul acc c\n  v1 = interleave v0 acc\n}")
    for batch, sequence in ((1, 7), (3, 5)):
        for n in (6, 36, 48):
            check(target, program, batch * sequence, n, 7, rows_per_batch=sequence)


@each_target
@pytest.mark.parametrize("n", [2, 10, 24, 100, 384])
def test_what_logits_are_reduced_to(target: targets.Target, n: int) -> None:
    """Places, the first of equal ones (values are cut off, so that many are), also of every second column."""
    text = (
        "(acc: tile f32) -> (least: row = v1, place: row = v2, tie: row = v4, even: row = v6, largest: row = v7.0, sum: row = v7.1) {\n"
        "  v1 = rowmin acc\n  v2 = argmax acc\n  v3 = min acc 0.2\n  v4 = argmax v3\n  v5 = odd v3\n  v6 = argmax v5\n"
        "  v7 = expsum acc\n}"
    )
    for m in (1, 7, 37):
        check(target, EpilogueProgram.parse(text), m, n, 9, tolerance=1e-5)


@each_target
def test_exponentials_of_rows_that_are_far_below_or_cut_out(target: targets.Target) -> None:
    """A mask of -inf over whole panels, and values at which an exponential overflows."""
    text = (
        "(acc: tile f32, b: col f32) -> (largest: row = v1.0, sum: row = v1.1) {\n  v0 = add acc b\n  v1 = expsum v0\n}"
    )
    n, k = 200, 5
    call, lib = built(target, EpilogueProgram.parse(text), n, k, None)
    for low, shift in ((0, 0.0), (150, 300.0), (199, -300.0)):
        b = np.where(np.arange(n) < low, -np.inf, shift).astype(np.float32)
        a = np.random.default_rng(low).standard_normal((3, k)).astype(np.float32)
        outputs = {"largest": np.zeros((3, 1), np.float32), "sum": np.zeros((3, 1), np.float32)}
        got = run(target, call, {"input": a, "b": b, **outputs}, {"M": 3, "S": 1}, chunk=3, library=lib)
        acc = a.astype(np.float64) @ weight(n, k) + b
        largest = acc.max(-1, keepdims=True)
        assert np.abs(got["largest"] - largest).max() < 1e-4
        assert np.abs(got["sum"] / np.exp(acc - largest).sum(-1, keepdims=True) - 1).max() < 1e-4


def qkv_program(width: int, size: int) -> EpilogueProgram:
    """Bias, a scale for q, and q, k and v as attention reads them."""
    b = Builder()
    v0 = b.add("add", "acc", b.param("b", Kind.COL))
    b.output("q", b.add("mul", v0, 0.125), columns=(0, width), heads=size)
    b.output("k", v0, columns=(width, 2 * width), heads=size)
    b.output("v", v0, columns=(2 * width, 3 * width), heads=size)
    return b.build()


@each_target
def test_column_ranges(target: targets.Target) -> None:
    for cuts in ((0, 5, 100), (0, 48, 144), (0, 96, 97), (3, 30, 31)):
        b = Builder()
        v0 = b.add("add", "acc", b.param("r", Kind.TILE))
        for i, columns in enumerate(itertools.pairwise(cuts)):
            b.output(f"y{i}", v0, columns=columns)
        # Tiles of one, two and three vectors: the cuts fall on the edges of panels, within them, and into the last one.
        for vectors in (1, 2, 3):
            check(target, b.build(), 5, cuts[-1], 8, GemmSchedule(4, vectors, target.lanes(4)))


@each_target
def test_every_candidate_schedule(target: targets.Target) -> None:
    for schedule in gemm_candidates(target):
        for m in (1, schedule.rows, schedule.block_rows + 1, 2 * schedule.block_rows - 1):
            check(target, library.bias_residual_moments.program, m, 100, 40, schedule)
    small = GemmSchedule(2, 2, target.lanes(4), block=3, unroll=4, prefetch=False)
    check(target, library.norm_bias.program, 11, 70, 9, small)


@each_target
def test_no_rows(target: targets.Target) -> None:
    check(target, library.bias.program, 0, 16, 8)


@each_target
def test_moments_far_from_zero(target: targets.Target) -> None:
    """A row whose mean is 1e4 standard deviations: sum and sum of squares would lose the variance altogether."""
    program = EpilogueProgram.parse(
        "(acc: tile f32, r: tile f32) -> (mean: row = v1.0, var: row = v1.1) {\n  v0 = add acc r\n  v1 = moments v0\n}"
    )
    n, m = 300, 5
    rng = np.random.default_rng(0)
    r = (1e4 + rng.standard_normal((m, n))).astype(np.float32)
    call, lib = built(target, program, n, 4, None)
    zeros = np.zeros(m, np.float32)
    got = run(
        target,
        call,
        {"input": np.zeros((m, 4), np.float32), "r": r, "mean": zeros, "var": zeros},
        {"M": m},
        library=lib,
    )
    np.testing.assert_allclose(got["mean"], r.astype(np.float64).mean(1), rtol=1e-6)
    np.testing.assert_allclose(got["var"], r.astype(np.float64).var(1), rtol=1e-3)


def test_equal_kernels_share_a_symbol() -> None:
    target = VECTOR_TARGETS[0]
    program = library.bias.program
    calls = [lower_gemm(target, n, program, "input", weight(32, 8), ["b"], ["y"], symbol("M")) for n in ("one", "two")]
    other = lower_gemm(target, "three", program, "input", weight(48, 8), ["b"], ["y"], symbol("M"))
    assert calls[0].kernel.symbol == calls[1].kernel.symbol != other.kernel.symbol


def test_what_does_not_fit_is_an_error() -> None:
    target = VECTOR_TARGETS[0]
    with pytest.raises(ShapeError, match="1 operands and 1 outputs; 0 and 1"):
        lower_gemm(target, "g", library.bias.program, "input", weight(32, 8), [], ["y"], symbol("M"))
    with pytest.raises(ShapeError, match="rows of a batch"):
        lower_gemm(target, "g", qkv_program(16, 16), "input", weight(48, 8), ["b"], ["q", "k", "v"], symbol("M"))
    with pytest.raises(ShapeError, match="do not divide"):
        lower_gemm(target, "g", library.swiglu.program, "input", weight(33, 8), [], ["y"], symbol("M"))


def test_schedules_waste_little() -> None:
    for target in VECTOR_TARGETS:
        for n in (384, 768, 1152, 1536, 3072):
            schedule = choose_gemm(target, n, 768)
            assert schedule.width <= n and -(-n // schedule.width) * schedule.width <= 1.05 * n
