"""Fused GEMMs on a GPU: right, and how fast against cuBLAS's bare GEMM.

``python -m benchmarks.cuda_gemm build DIR --arch sm_90`` compiles (TVM and nvcc, no GPU); ``python -m benchmarks.cuda_gemm run DIR``
checks and times where the GPU is (numpy, sympy and the driver, no TVM). Inputs fit in the second-level cache and are used again
at each launch, for both sides.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from coda_edge.epilogue import library
from coda_edge.epilogue.program import EpilogueProgram, Kind, Step
from coda_edge.schedule.cuda_gemm import SCHEDULES, CudaGemmSchedule

from .cuda_driver import Cublas, Device, DriverError
from .cuda_problem import Case, Plan, Problem, read, relative_error, save

TOLERANCE = 3e-3
"""Relative L2 error against float64."""

_SHAPES = ((128, 768, 768), (128, 3072, 768), (128, 768, 3072), (512, 768, 768), (512, 3072, 768), (4096, 3072, 768))
_ODD = ((1, 5, 3), (7, 24, 24), (37, 100, 136), (130, 99, 72), (129, 97, 65), (200, 1152, 384), (1, 768, 768))


def halves(program: EpilogueProgram) -> EpilogueProgram:
    """The program with half-precision tile and column operands and tile outputs."""
    narrow = (Kind.TILE, Kind.COL)
    params = [replace(p, dtype="f16") if p.kind in narrow else p for p in program.params[1:]]
    tiles = [o for o in program.outputs if o.kind is Kind.TILE]
    casts = [Step(f"half_{o.name}", "cast", (o.value,), (("to", "f16"),)) for o in tiles]
    outputs = (replace(o, value=f"half_{o.name}") if o in tiles else o for o in program.outputs)
    return EpilogueProgram((program.params[0], *params), (*program.steps, *casts), tuple(outputs))


EPILOGUES: dict[str, EpilogueProgram] = {
    "bias": halves(library.bias.program),
    "bias_gelu": halves(library.bias_gelu.program),
    "bias_residual": halves(library.bias_residual.program),
    "norm_bias": halves(library.norm_bias.program),
    "norm_bias_gelu": halves(library.norm_bias_gelu.program),
    "bias_residual_moments": halves(library.bias_residual_moments.program),
    "bias_heads": halves(library.bias_heads.specialize(heads=32).program),
    "norm_swiglu": halves(library.norm_swiglu.program),
    "rope": halves(library.rope.program),
    "float_output": library.bias_gelu_tanh.program,
    "qkv": halves(
        EpilogueProgram.parse(
            "(acc: tile f32, bias: col f32) -> (q: tile = v0[0:64] heads[32], k: tile = v0[64:128] heads[32], "
            "v: tile = v0[128:192] heads[32]) {\n  v0 = add acc bias\n}\n"
        )
    ),
}
"""Epilogues to check, each a kind of step or of output more."""
_MULTIPLES = {"norm_swiglu": 2, "rope": 2, "bias_heads": 32}
"""What the columns of an epilogue's GEMM must be a multiple of."""


@dataclass(frozen=True)
class Request:
    """A case before it is compiled; ``schedule`` None: the one that is chosen for the shape."""

    epilogue: str
    m: int
    n: int
    k: int
    schedule: CudaGemmSchedule | None = None


def matrix() -> Iterator[Request]:
    """Every epilogue at sizes that its columns allow, and every schedule."""
    for name in EPILOGUES:
        for m, n, k in _ODD:
            multiple = _MULTIPLES.get(name, 1)
            yield Request(name, m, 192 if name == "qkv" else -(-n // multiple) * multiple, k)
    for schedule in SCHEDULES:
        yield Request("bias_residual_moments", 150, 200, 328, schedule)
        yield Request("norm_bias_gelu", 70, 131, 77, schedule)


def timed() -> Iterator[Request]:
    """The shapes of a BERT-base layer, with the chosen schedule and with each of the others that could be."""
    for m, n, k in _SHAPES:
        yield Request("bias_gelu", m, n, k)
        for schedule in SCHEDULES:
            if schedule.rows < 2 * m:
                yield Request("bias_gelu", m, n, k, schedule)
        yield Request("bias_residual_moments", m, n, k)


def build(folder: Path, arch: str, requests: list[Request]) -> list[Case]:
    """Compiles the requests into ``folder``; returns its cases."""
    from coda_edge import targets
    from coda_edge.lower.cuda import CudaKernel
    from coda_edge.targets.cuda import CudaTarget

    target = targets.get(f"cuda-{arch.replace('_', '')}")
    assert isinstance(target, CudaTarget)
    prepared = []
    for r in requests:
        batch = 2 if r.m % 2 == 0 else 1
        problem = Problem.random(EPILOGUES[r.epilogue], r.m, r.n, r.k, batch)
        call = problem.lower(target, r.schedule, fixed=True)
        prepared.append((r, batch, problem, call))
    kernels = [k for *_, call in prepared for k in (call.kernel, call.finish) if isinstance(k, CudaKernel)]
    compiled = target.library(kernels)
    cases = []
    for r, batch, problem, call in prepared:
        used = compiled.resources[call.kernel.symbol]
        schedule = r.schedule or chosen(target.multiprocessors, r)
        name = f"{r.epilogue} {schedule.rows}x{schedule.columns}{'' if r.schedule else '*'}"
        plan = Plan.of(call, problem.sizes())
        cases.append(
            Case(name, str(problem.program), r.m, r.n, r.k, batch, schedule, plan, used.registers, used.spills)
        )
    save(folder, cases, compiled)
    return cases


def chosen(multiprocessors: int, request: Request) -> CudaGemmSchedule:
    """The schedule that lowering picks for the request."""
    from coda_edge.epilogue.tir import depth
    from coda_edge.schedule.cuda_gemm import choose_cuda_gemm

    classes = 1 << depth(EPILOGUES[request.epilogue])
    return choose_cuda_gemm(request.m, request.n, multiprocessors, classes)


@dataclass(frozen=True)
class Result:
    """A case's largest relative error of three runs with poisoned outputs, and its time."""

    case: Case
    error: float
    microseconds: float | None


def run(folder: Path, device: Device, timings: bool) -> Iterator[Result]:
    """Runs the cases of ``folder``."""
    module = device.module((folder / "kernels.cubin").read_bytes())
    for case in read(folder):
        problem = case.problem()
        expected, empty = problem.expected, problem.outputs()
        outputs = {name: device.upload(array) for name, array in empty.items()}
        given = {"a": problem.a, "weight": case.packed(problem), **problem.operands}
        addresses = {name: device.upload(array) for name, array in given.items()}
        addresses |= {f"out.{name}": address for name, address in outputs.items()}
        buffers = [
            device.upload(np.full(b // 4, np.nan, np.float32)) if isinstance(b, int) else addresses[b]
            for b in case.plan.buffers
        ]
        launches = [
            device.launcher(
                device.function(module, s.symbol, s.shared), s.grid, s.block, s.shared, buffers, case.plan.ints
            )
            for s in case.plan.steps
        ]

        def call(launches: list = launches) -> None:  # type: ignore[type-arg]
            for launch in launches:
                launch()

        errors = []
        for _ in range(3):
            for name, address in outputs.items():
                device.refill(address, empty[name])
            call()
            device.synchronize()
            actual = {name: device.download(address, empty[name]) for name, address in outputs.items()}
            errors.append(relative_error(actual, expected))
        yield Result(case, float(np.max(errors)), device.microseconds(call) if timings else None)


def report(folder: Path) -> int:
    """Checks ``folder/matrix`` and times ``folder/timed``; returns how many cases are wrong."""
    device = Device()
    print(device.name, device.arch)
    wrong = 0
    worst: dict[str, float] = {}
    for result in run(folder / "matrix", device, timings=False):
        case = result.case
        good = result.error <= TOLERANCE
        wrong += not good
        name = case.name.split()[0]
        worst[name] = float(np.maximum(worst.get(name, 0.0), result.error))
        if not good:
            print(f"WRONG {case.name} {case.m}x{case.n}x{case.k} error {result.error:.1e}")
    for name, error in worst.items():
        print(f"{name:24} worst relative L2 error {error:.1e}")
    rows = []
    try:
        cublas = Cublas(device)
    except DriverError as error:
        print(error)
        cublas = None
    bare: dict[tuple[int, int, int], float] = {}
    for result in run(folder / "timed", device, timings=True):
        case = result.case
        shape = (case.m, case.n, case.k)
        if cublas is not None and shape not in bare:
            rng = np.random.default_rng(1)
            sizes = ((case.m, case.k), (case.n, case.k), (case.m, case.n))
            a, w, c = (device.upload(rng.standard_normal(s).astype(np.float16)) for s in sizes)
            bare[shape] = device.microseconds(cublas.gemm(*shape, a, w, c))
            print(f"{case.m}x{case.n}x{case.k}: cuBLAS bare {bare[shape]:.2f} us")
        wrong += not result.error <= TOLERANCE
        ratio = result.microseconds / bare[shape] if result.microseconds and shape in bare else math.nan
        print(
            f"  {result.microseconds:7.2f} us  {ratio:4.2f} x  error {result.error:.1e}  "
            f"{case.registers} registers, {case.spills} spilled  {case.name}"
        )
        rows.append({"name": case.name, "shape": shape, "us": result.microseconds, "cublas_us": bare.get(shape)})
    (folder / "results.json").write_text(json.dumps({"device": device.name, "rows": rows}, indent=1))
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("build", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="sm_90")
    options = parser.parse_args(arguments)
    if options.what == "run":
        return min(report(options.folder), 125)
    for name, requests in (("matrix", matrix()), ("timed", timed())):
        cases = build(options.folder / name, options.arch, list(requests))
        spilled = [c.name for c in cases if c.spills]
        print(f"{name}: {len(cases)} cases for {options.arch}; spilling: {', '.join(spilled) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
