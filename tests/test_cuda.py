"""Fused GEMMs for NVIDIA GPUs: layout, generated code emulated on the CPU, machine code for each architecture; on a GPU, numbers."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from cuda_emulator import Emulator

from benchmarks.cuda_driver import Device, DriverError, driver
from benchmarks.cuda_gemm import EPILOGUES, TOLERANCE, build, matrix, run
from benchmarks.cuda_problem import Problem, relative_error
from coda_edge import targets
from coda_edge.epilogue import library
from coda_edge.epilogue.program import EpilogueProgram
from coda_edge.errors import ShapeError, TargetError
from coda_edge.lower.cuda import CudaKernel, cuda_source, lower_cuda_gemm
from coda_edge.lower.kernel import KernelCall, KernelSource
from coda_edge.schedule.cuda_gemm import SCHEDULES, CudaGemmSchedule, choose_cuda_gemm, natural_columns, pack_weight
from coda_edge.symbolic import symbol
from coda_edge.targets.cuda import TARGETS, CudaTarget

A100 = TARGETS[0]
SHAPES = [(37, 100, 136), (130, 97, 65)]
"""Rows, columns and K: aligned for vectors but no tile's multiple; not aligned at all."""


def columns_for(name: str, n: int) -> int:
    multiple = {"norm_swiglu": 2, "rope": 2, "bias_heads": 32}.get(name, 1)
    return 192 if name == "qkv" else -(-n // multiple) * multiple


def kernels_of(call: KernelCall) -> list[CudaKernel]:
    return [k for k in (call.kernel, call.finish) if isinstance(k, CudaKernel)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.rows}x{s.columns}")
def test_schedule_divides(schedule: CudaGemmSchedule) -> None:
    rows, columns = schedule.fragments
    owned_rows, owned_columns = schedule.owned
    assert rows * 16 * schedule.warps[0] == schedule.rows
    assert columns * 8 * schedule.warps[1] == schedule.columns
    assert owned_rows * owned_columns * schedule.warps[2] == rows * columns
    assert columns % 2 == 0 and schedule.threads % 64 == 0
    assert schedule.shared(10**6) <= 99 << 10
    assert sorted(natural_columns(schedule)) == list(range(schedule.columns))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.rows}x{s.columns}")
def test_thread_has_consecutive_columns(schedule: CudaGemmSchedule) -> None:
    natural = natural_columns(schedule).reshape(-1, schedule.group, 4, 2)
    for group in range(natural.shape[0]):
        for thread in range(4):
            mine = natural[group, :, thread].ravel()
            np.testing.assert_array_equal(mine, mine[0] + np.arange(schedule.run))


def test_packed_weight_holds_every_element() -> None:
    schedule, (k, n) = SCHEDULES[2], (70, 101)
    weight = np.arange(1, k * n + 1).reshape(k, n) % 2003
    packed = pack_weight(schedule, weight).reshape(3, 2, schedule.columns, 8, 8)
    natural = natural_columns(schedule)
    for row, column in ((0, 0), (69, 100), (64, 47), (13, 95)):
        tile, at = divmod(column, schedule.columns)
        line = int(np.flatnonzero(natural == at)[0])
        chunk = row % 64 // 8 ^ line % 8
        assert packed[tile, row // 64, line, chunk, row % 8] == weight[row, column]
    assert np.count_nonzero(packed) == np.count_nonzero(weight)


@pytest.mark.parametrize(
    ("rows", "n", "multiprocessors", "tile"),
    [
        (1, 768, 132, (16, 32)),
        (128, 768, 132, (32, 32)),
        (128, 2304, 132, (64, 48)),
        (128, 3072, 132, (64, 64)),
        (4096, 3072, 132, (128, 128)),
        (128, 768, 16, (64, 64)),
    ],
)
def test_tile_grows_with_the_work(rows: int, n: int, multiprocessors: int, tile: tuple[int, int]) -> None:
    schedule = choose_cuda_gemm(rows, n, multiprocessors)
    assert (schedule.rows, schedule.columns) == tile


def test_columns_paired_twice_need_four_in_a_thread() -> None:
    assert choose_cuda_gemm(8, 768, 132, classes=4).run % 4 == 0


@pytest.mark.parametrize("name", EPILOGUES)
def test_emulated_epilogue(name: str) -> None:
    schedule = SCHEDULES[1]
    problem = Problem.random(EPILOGUES[name], 38, columns_for(name, 100), 70, batch=2)
    call = problem.lower(A100, schedule)
    outputs = Emulator(kernels_of(call)).run(problem, call, schedule, lazy=True)
    assert relative_error(outputs, problem.expected) <= 2e-5


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.rows}x{s.columns}")
def test_emulated_schedule(schedule: CudaGemmSchedule) -> None:
    problems = [Problem.random(EPILOGUES["bias_residual_moments"], m, n, k) for m, n, k in SHAPES]
    calls = [p.lower(A100, schedule) for p in problems]
    emulator = Emulator([k for call in calls for k in kernels_of(call)])
    for problem, call in zip(problems, calls, strict=True):
        for lazy in (False, True):
            assert relative_error(emulator.run(problem, call, schedule, lazy), problem.expected) <= 2e-5


@pytest.mark.parametrize(("mistake", "lazy"), [("coda_wait", True), ("coda_barrier", False)])
def test_emulator_finds_missing_synchronization(mistake: str, lazy: bool) -> None:
    schedule = CudaGemmSchedule(64, 48, (2, 1, 2), 3)
    problem = Problem.random(EPILOGUES["bias"], 64, 48, 512)
    call = problem.lower(A100, schedule)
    assert relative_error(Emulator(kernels_of(call)).run(problem, call, schedule, lazy), problem.expected) <= 2e-5
    broken = Emulator(kernels_of(call), (f"{mistake}(", "emulator::nothing("))
    error = relative_error(broken.run(problem, call, schedule, lazy), problem.expected)
    assert not error <= TOLERANCE


def test_statistics_keep_a_mean_far_from_zero() -> None:
    schedule = SCHEDULES[1]
    problem = Problem.random(library.bias_residual_moments.program, 20, 150, 32)
    problem.operands["residual"][:] += 1000
    call = problem.lower(A100, schedule)
    outputs = Emulator(kernels_of(call)).run(problem, call, schedule, lazy=False)
    np.testing.assert_allclose(outputs["var"], problem.expected["var"], rtol=1e-4)


def test_emulated_places_and_sums_of_exponentials() -> None:
    """Also beyond the last column, and where the largest is in several columns."""
    text = (
        "(acc: tile f32) -> (least: row = v0, place: row = v1, tie: row = v3, largest: row = v4.0, sum: row = v4.1) {\n"
        "  v0 = rowmin acc\n  v1 = argmax acc\n  v2 = min acc 0.2\n  v3 = argmax v2\n  v4 = expsum acc\n}"
    )
    schedule = SCHEDULES[1]
    problem = Problem.random(EpilogueProgram.parse(text), 20, 150, 32)
    call = problem.lower(A100, schedule)
    outputs = Emulator(kernels_of(call)).run(problem, call, schedule, lazy=True)
    assert np.array_equal(outputs["place"], problem.expected["place"])
    assert np.array_equal(outputs["tie"], problem.expected["tie"])
    for name in ("least", "largest", "sum"):
        np.testing.assert_allclose(outputs[name], problem.expected[name], rtol=1e-4)


@pytest.mark.parametrize(
    ("heads", "batch"), [("heads[16] halves", 3), ("heads[32] halves[0:16, 24:32]", 2), ("heads[8] halves[2:6]", 1)]
)
def test_emulated_rotation(heads: str, batch: int) -> None:
    """Operands that positions or batch entries share, of a period, and heads stored in halves, beside plain outputs of other ranges."""
    text = (
        "(acc: tile f32, s: row f32, cos: tile[position, period=8] f32, sin: tile[period=8] f32, t: row[batch] f32, b: tile[batch] f32) -> "
        "(q: tile = v9[0:64] heads[16] halves, k: tile = v7[64:96] heads[16], v: tile = v8[96:128] heads[16], w: tile = v8[3:30]) {\n"
        "  v0 = mul acc s\n  v1 = even v0\n  v2 = odd v0\n  v3 = mul v1 cos\n  v4 = mul v2 sin\n  v5 = sub v3 v4\n"
        "  v6 = add v3 v4\n  v7 = interleave v5 v6\n  v8 = add v0 b\n  v10 = mul v7 t\n  v9 = cast v10 to=f16\n}"
    )
    program = EpilogueProgram.parse(text.replace("heads[16] halves", heads, 1))
    schedule = SCHEDULES[1]
    problem = Problem.random(program, 14 * batch, 128, 40, batch=batch)
    call = problem.lower(A100, schedule)
    outputs = Emulator(kernels_of(call)).run(problem, call, schedule, lazy=True)
    assert (
        relative_error(
            {n: o for n, o in outputs.items() if n != "q"}, {n: e for n, e in problem.expected.items() if n != "q"}
        )
        <= 2e-5
    )
    assert relative_error(outputs, problem.expected) <= 1e-3


def test_launch_follows_the_rows() -> None:
    m = symbol("M")
    call = lower_cuda_gemm(
        A100, "g", EPILOGUES["bias"], "a", np.zeros((64, 100)), ["bias"], ["y"], m, schedule=SCHEDULES[3]
    )
    assert isinstance(call.kernel, CudaKernel)
    x, y, z = call.kernel.launch.grid
    assert (x, z) == (2, 1)
    assert [int(y.subs({m: rows})) for rows in (1, 64, 65)] == [1, 1, 2]
    assert call.ints == (m,)
    signature = cuda_source([call.kernel], "sm_80").split("__global__")[1].split("(")[2].split(")")[0]
    names = [word.split()[-1] for word in signature.split(",")]
    assert names == ["a_data", "w_data", "bias_data", "y_out_data", "rows"]


def test_operands_must_fit_the_program() -> None:
    with pytest.raises(ShapeError, match="1 operands and 1 outputs; 0 and 1 were given"):
        lower_cuda_gemm(A100, "g", EPILOGUES["bias"], "a", np.zeros((8, 8)), [], ["y"], 4)
    with pytest.raises(ShapeError, match="rows of a batch entry"):
        lower_cuda_gemm(A100, "g", EPILOGUES["bias_heads"], "a", np.zeros((8, 64)), ["bias"], ["y"], 4)


@pytest.fixture(scope="module")
def call() -> KernelCall:
    return Problem.random(EPILOGUES["bias_residual_moments"], 100, 100, 100).lower(A100)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc on the PATH")
@pytest.mark.parametrize("name", ["cuda-sm80", "cuda-sm87", "cuda-sm89", "cuda-sm90"])
def test_machine_code(name: str, call: KernelCall) -> None:
    target = targets.get(name)
    assert isinstance(target, CudaTarget)
    compiled = target.library(kernels_of(call))
    assert compiled.cubin[:4] == b"\x7fELF"
    assert set(compiled.resources) == {k.symbol for k in kernels_of(call)}
    for used in compiled.resources.values():
        assert used.spills == 0 and used.registers <= 255
    manifest = json.loads(compiled.manifest())
    assert manifest["arch"] == target.arch
    kernel = manifest["kernels"][call.kernel.symbol]
    assert kernel["grid"][0] == 4 and kernel["block"] == 128 and kernel["shared"] == 16384
    assert compiled.source.count("mma.sync") == 1


def test_without_a_compiler(call: KernelCall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr("coda_edge.lower.cuda.build.find_spec", lambda name: None)
    with pytest.raises(TargetError, match="put nvcc on the PATH"):
        A100.library(kernels_of(call))


def test_kernel_of_a_cpu_is_refused(call: KernelCall) -> None:
    with pytest.raises(TargetError, match="'plain' is written for CPUs"):
        A100.build([KernelSource("plain", call.kernel.make)])
    with pytest.raises(TargetError, match="no kernel to build"):
        A100.build([])


def test_no_gpu_is_native() -> None:
    assert not isinstance(targets.get(), CudaTarget)


def _why_not() -> str:
    try:
        driver()
    except DriverError as error:
        return str(error)
    if not shutil.which("nvcc") and not importlib.util.find_spec("cuda"):
        return "no CUDA compiler"
    return ""


@pytest.mark.gpu
@pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "runs")
def test_numbers_on_the_gpu(tmp_path: Path) -> None:
    device = Device()
    build(tmp_path, device.arch, list(matrix()))
    errors = {f"{r.case.name} {r.case.m}x{r.case.n}x{r.case.k}": r.error for r in run(tmp_path, device, timings=False)}
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}
