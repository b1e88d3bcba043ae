"""A GEMM of few rows against numpy in float64: every weight format, epilogues with statistics, panels of several widths."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from kernel_harness import VECTOR_TARGETS, Library, run

from coda_edge import targets
from coda_edge.epilogue import library
from coda_edge.epilogue.program import EpilogueProgram
from coda_edge.lower.gemm import lower_gemm
from coda_edge.schedule import GemmSchedule
from coda_edge.symbolic import symbol
from coda_edge.weights import Blocks, Weight

ROWS = (1, 2, 3, 4, 5)
K, N = 107, 139
"""Not whole words, groups or panels; enough panels for several at a time."""
BIAS = EpilogueProgram.parse("(acc: tile f32, bias: col f32) -> (y: tile = v0) {\n  v0 = add acc bias\n}")
RANGES = {"int4": (-8, 8), "uint4": (0, 16), "int8": (-128, 128), "uint8": (0, 256)}


def whole(dtype: str, group: int, zero: bool = False, scale: bool = False, offset: bool = False) -> Weight:
    """Whole numbers ``[K, N]`` with a factor, and perhaps a zero point, for each ``group`` of rows and column."""
    rng = np.random.default_rng(group + zero)
    numbers = rng.integers(*RANGES[dtype], (K, N)).astype(getattr(ml_dtypes, dtype, dtype))
    groups = (-(-K // group), N)
    return Weight(
        numbers,
        rng.uniform(0.5, 2, K).astype(np.float32) if scale else None,
        rng.standard_normal(N).astype(np.float32) if offset else None,
        Blocks(rng.uniform(0.01, 0.1, groups).astype(np.float32), (group, 1)),
        Blocks(rng.integers(0, 15, groups).astype(np.float32), (group, 1)) if zero else None,
    )


def real(dtype: np.typing.DTypeLike, scale: bool = False) -> Weight:
    rng = np.random.default_rng(K)
    rows = rng.uniform(0.5, 2, K).astype(np.float32) if scale else None
    columns = rng.standard_normal(N).astype(np.float32) if scale else None
    return Weight(rng.standard_normal((K, N)).astype(dtype), rows, columns)


FORMATS = {
    "float32": real(np.float32),
    "bfloat16 with gains and shifts": real(ml_dtypes.bfloat16, scale=True),
    "4 bits, blocks of 32": whole("int4", 32),
    "4 bits, all there is": whole("uint4", 16, zero=True, scale=True, offset=True),
    "4 bits, columns": whole("int4", K),
    "4 bits, blocks across words": whole("int4", 12),
    "8 bits, blocks": whole("int8", 32),
    "8 bits, columns, zero points": whole("uint8", K, zero=True),
}


def check(
    target: targets.Target, program: EpilogueProgram, weight: Weight, schedule: GemmSchedule | None = None
) -> None:
    names = [p.name for p in program.params[1:]], [o.name for o in program.outputs]
    call = lower_gemm(target, "gemm", program, "a", weight, *names, symbol("M"), schedule=schedule)
    built = Library(target.build([call.kernel, *([call.finish] if call.finish else [])]))
    rng = np.random.default_rng(1)
    for m in ROWS:
        a = rng.standard_normal((m, K)).astype(np.float32)
        kinds = {p.name: (m, N) if p.kind.value == "tile" else (N,) for p in program.params[1:]}
        operands = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in kinds.items()}
        value = weight.value().astype(np.float64)
        expected = program.reference(a @ value, operands)
        outputs = {name: np.zeros(e.shape, np.float32) for name, e in expected.items()}
        got = run(target, call, {"a": a, **operands, **outputs}, {"M": m}, chunk=3, library=built)
        largest = float((np.abs(a) @ np.abs(value)).max()) + 4
        for name, e in expected.items():
            np.testing.assert_allclose(got[name], e, rtol=0, atol=4e-7 * largest, err_msg=f"{name} of {m} rows")


each_target = pytest.mark.parametrize("target", VECTOR_TARGETS, ids=lambda t: t.name)


@pytest.mark.parametrize(
    "target,name",
    [(t, f) for i, t in enumerate(VECTOR_TARGETS) for f in list(FORMATS)[:: 1 + 2 * i]],
    ids=lambda v: getattr(v, "name", v),
)
def test_formats(target: targets.Target, name: str) -> None:
    check(target, BIAS, FORMATS[name])


@each_target
def test_statistics_and_residual(target: targets.Target) -> None:
    check(target, library.bias_residual_moments.program, FORMATS["float32"])


def test_blocks_of_fewer_rows() -> None:
    target = VECTOR_TARGETS[0]
    check(target, BIAS, FORMATS["float32"], GemmSchedule(2, 2, target.lanes(4), block=2, panels=2))
