"""Attention for NVIDIA GPUs: generated code emulated on the CPU, machine code without spills; on a GPU, numbers."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from cuda_emulator import Emulator

from benchmarks.cuda_attention import MATRIX, SCALED, TIMED, TOLERANCE, Problem, build, run
from benchmarks.cuda_driver import Device, DriverError, driver
from benchmarks.cuda_problem import relative_error
from coda_edge import targets
from coda_edge.epilogue.program import EpilogueProgram
from coda_edge.errors import ShapeError
from coda_edge.lower.attention import AttentionSizes, Extras
from coda_edge.lower.cuda import CudaKernel, lower_cuda_attention
from coda_edge.lower.kernel import KernelCall
from coda_edge.schedule.cuda_attention import MOST_SHARED, SCHEDULES, CudaAttentionSchedule, choose_cuda_attention
from coda_edge.targets.cuda import TARGETS, CudaTarget

A100 = TARGETS[0]


def kernels_of(call: KernelCall) -> list[CudaKernel]:
    return [k for k in (call.kernel, call.finish) if isinstance(k, CudaKernel)]


def test_emulated() -> None:
    """Every kind of operand, band and size; in one library, since most of the time goes to compilers. Copies as late and as early as may be."""
    calls = [problem.lower(A100) for problem in MATRIX]
    emulator = Emulator([k for call in calls for k in kernels_of(call)])
    errors = {}
    for number, (problem, call) in enumerate(zip(MATRIX, calls, strict=True)):
        outputs = emulator.outputs(problem.plan(call), problem.given, problem.outputs(), lazy=number % 3 > 0)
        errors[problem.name] = relative_error(outputs, problem.expected)
    assert {name: error for name, error in errors.items() if not error <= 1e-3} == {}


def test_emulator_finds_missing_synchronization() -> None:
    problem = Problem("few", SCALED, 1, 1, 16, 130, 32, 32)
    schedule = CudaAttentionSchedule(1, 16)
    call = problem.lower(A100, schedule)
    whole, broken = (
        Emulator(kernels_of(call), edit).outputs(problem.plan(call), problem.given, problem.outputs(), lazy=True)
        for edit in (("", ""), ("coda_wait(", "emulator::nothing("))
    )
    assert relative_error(whole, problem.expected) <= 1e-3
    assert not relative_error(broken, problem.expected) <= TOLERANCE


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.rows}x{s.keys}")
def test_schedules_have_room_for_usual_heads(schedule: CudaAttentionSchedule) -> None:
    assert schedule.shared(64, 64) <= MOST_SHARED
    assert schedule.keys % 16 == 0


def test_blocks_fit_the_rows_and_the_heads() -> None:
    assert choose_cuda_attention(128, 64, 64) == CudaAttentionSchedule(4, 64)
    assert choose_cuda_attention(8, 64, 64) == CudaAttentionSchedule(1, 64)
    assert choose_cuda_attention(128, 256, 256).shared(256, 256) <= MOST_SHARED
    with pytest.raises(ShapeError, match="use the CPU target"):
        choose_cuda_attention(128, 1024, 1024)


def test_keys_are_divided_where_rows_are_few() -> None:
    call = Problem("few", SCALED, 1, 8, 1, 1000, 64, 64).lower(A100)
    assert isinstance(call.kernel, CudaKernel) and isinstance(call.finish, CudaKernel)
    few, many = ({"B": 1, "H": 8, "Q": q, "K": 1000, "P": 0} for q in (1, 5000))
    for sizes, parts, rows in ((few, 8, 8), (many, 1, 0)):
        found = [
            int(d.subs({s: sizes[s.name] for s in d.free_symbols}))
            for d in (call.kernel.launch.grid[2], call.finish.launch.grid[0])
        ]
        assert found == [parts, rows]


def test_rounded_probabilities_are_for_cpus() -> None:
    rounding = EpilogueProgram.parse("(acc: tile f32) -> (y: tile = v0) {\n  v0 = cast acc to=f16\n}")
    sizes = AttentionSizes(1, 1, 8, 8, 64, 64)
    with pytest.raises(ShapeError, match="use a CPU target"):
        lower_cuda_attention(
            A100,
            "a",
            EpilogueProgram.parse(SCALED),
            ("q", "k", "v"),
            [],
            "o",
            sizes,
            extras=Extras(probability=rounding),
        )


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc on the PATH")
@pytest.mark.parametrize("name", ["cuda-sm87", "cuda-sm90"])
def test_machine_code(name: str) -> None:
    target = targets.get(name)
    assert isinstance(target, CudaTarget)
    compiled = target.library(kernels_of(TIMED[0].lower(target)))
    assert compiled.cubin[:4] == b"\x7fELF"
    for used in compiled.resources.values():
        assert used.spills == 0


def _why_not() -> str:
    try:
        driver()
    except DriverError as error:
        return str(error)
    return "" if shutil.which("nvcc") or importlib.util.find_spec("cuda") else "no CUDA compiler"


@pytest.mark.gpu
@pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "runs")
def test_numbers_on_the_gpu(tmp_path: Path) -> None:
    device = Device()
    build(tmp_path, device.arch, MATRIX)
    errors = {case.problem.name: error for case, error, _ in run(tmp_path, device, timings=False)}
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}
