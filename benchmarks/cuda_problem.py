"""GEMMs with operands and what they should give; a compiled one can be written to a folder and read where there is no TVM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from coda_edge.epilogue.program import EpilogueProgram, Kind, Rows
from coda_edge.schedule.cuda_gemm import CudaGemmSchedule, pack_weight
from coda_edge.symbolic import evaluate, symbol

if TYPE_CHECKING:
    from coda_edge.lower.cuda import CudaLibrary
    from coda_edge.lower.kernel import KernelCall
    from coda_edge.targets.cuda import CudaTarget

Array = npt.NDArray[Any]
_NUMPY = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "i64": np.int64, "i8": np.int8, "bool": np.uint8}


@dataclass(frozen=True)
class Problem:
    """A GEMM with its operands: f16 ``a`` and ``weight``, both normal, the weight's scaled by 1/√K."""

    program: EpilogueProgram
    a: Array
    weight: Array
    operands: dict[str, Array]
    rows_per_batch: int | None

    @staticmethod
    def random(program: EpilogueProgram, m: int, n: int, k: int, batch: int = 1, seed: int = 0) -> Problem:
        """Normal operands; positive rows, as variances are."""
        rng = np.random.default_rng(seed)
        a = rng.standard_normal((m, k)).astype(np.float16)
        weight = (rng.standard_normal((k, n)) / np.sqrt(k)).astype(np.float16)
        operands = {}
        for p in program.params[1:]:
            width = program.operand_width(p, n) if p.kind in (Kind.TILE, Kind.COL) else 1
            rows = {Rows.ALL: m, Rows.POSITION: m // batch, Rows.BATCH: batch}[p.rows]
            shape = {Kind.TILE: (rows, width), Kind.ROW: (rows, 1), Kind.COL: (width,), Kind.SCALAR: ()}[p.kind]
            value = rng.standard_normal(shape)
            operands[p.name] = np.asarray(np.abs(value) + 0.1 if p.kind is Kind.ROW else value, _NUMPY[p.dtype])
        return Problem(program, a, weight, operands, m // batch if program.batched else None)

    def lower(self, target: CudaTarget, schedule: CudaGemmSchedule | None = None, fixed: bool = False) -> KernelCall:
        """The call, for a symbolic number of rows unless it is ``fixed``."""
        from coda_edge.lower.cuda import lower_cuda_gemm

        return lower_cuda_gemm(
            target,
            "gemm",
            self.program,
            "a",
            self.weight,
            list(self.operands),
            [f"out.{o.name}" for o in self.program.outputs],
            self.a.shape[0] if fixed else symbol("M"),
            symbol("S") if self.rows_per_batch else None,
            schedule,
        )

    def sizes(self) -> dict[str, int]:
        """The symbols' values."""
        return {"M": self.a.shape[0], "S": self.rows_per_batch or 0}

    @cached_property
    def expected(self) -> dict[str, Array]:
        """The outputs in float64."""
        acc = self.a.astype(np.float64) @ self.weight.astype(np.float64)
        return self.program.reference(acc, self.operands, self.rows_per_batch)

    def outputs(self) -> dict[str, Array]:
        """Outputs as they are stored, full of NaN."""
        dtypes = self.program.dtypes()
        stored = {o.name: _NUMPY[dtypes[o.value]] for o in self.program.outputs}
        return {name: np.full(want.shape, np.nan, stored[name]) for name, want in self.expected.items()}


def relative_error(actual: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
    """The largest relative L2 error of any output; NaN if an element is."""
    return float(
        np.max([np.linalg.norm(actual[n].astype(np.float64) - e) / np.linalg.norm(e) for n, e in expected.items()])
    )


@dataclass(frozen=True)
class Step:
    """One kernel of a call at fixed sizes."""

    symbol: str
    grid: tuple[int, int, int]
    block: int
    shared: int


@dataclass(frozen=True)
class Plan:
    """A call at fixed sizes. ``buffers``: ``a``, ``weight``, an operand, ``out.`` an output, or a number: a workspace's bytes."""

    steps: tuple[Step, ...]
    buffers: tuple[str | int, ...]
    ints: tuple[int, ...]

    @staticmethod
    def of(call: KernelCall, sizes: Mapping[str, int]) -> Plan:
        """The call with its sizes filled in."""
        from coda_edge.lower.cuda import CudaKernel
        from coda_edge.lower.kernel import Packed, Workspace

        buffers: list[str | int] = []
        for buffer in call.buffers:
            if isinstance(buffer, Packed):
                buffers.append("weight")
            else:
                buffers.append(evaluate(buffer.size, sizes) if isinstance(buffer, Workspace) else buffer)
        kernels = [k for k in (call.kernel, call.finish) if isinstance(k, CudaKernel)]
        steps = []
        for kernel in kernels:
            x, y, z = (evaluate(d, sizes) for d in kernel.launch.grid)
            if x * y * z == 0:
                continue
            steps.append(Step(kernel.symbol, (x, y, z), kernel.launch.block, kernel.launch.shared))
        return Plan(tuple(steps), tuple(buffers), tuple(evaluate(i, sizes) for i in call.ints))


@dataclass(frozen=True)
class Case:
    """What to compute, how, and what was compiled for it."""

    name: str
    program: str
    m: int
    n: int
    k: int
    batch: int
    schedule: CudaGemmSchedule
    plan: Plan
    registers: int
    spills: int

    def problem(self, seed: int = 0) -> Problem:
        """The problem with random operands."""
        return _problem(self.program, self.m, self.n, self.k, self.batch, seed)

    def packed(self, problem: Problem) -> Array:
        """The problem's weight as the kernel reads it."""
        return pack_weight(self.schedule, problem.weight)


@lru_cache(maxsize=1)
def _problem(program: str, m: int, n: int, k: int, batch: int, seed: int) -> Problem:
    return Problem.random(EpilogueProgram.parse(program), m, n, k, batch, seed)


def save(folder: Path, cases: list[Case], library: CudaLibrary) -> None:
    """Writes ``cases.json`` and ``kernels.cubin``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernels.cubin").write_bytes(library.cubin)
    (folder / "cases.json").write_text(json.dumps([asdict(c) for c in cases], indent=1))


def read(folder: Path) -> list[Case]:
    """The cases that ``save`` wrote."""
    found = []
    for entry in json.loads((folder / "cases.json").read_text()):
        steps = tuple(Step(**{**s, "grid": tuple(s["grid"])}) for s in entry["plan"]["steps"])
        plan = Plan(steps, tuple(entry["plan"]["buffers"]), tuple(entry["plan"]["ints"]))
        schedule = CudaGemmSchedule(**{**entry["schedule"], "warps": tuple(entry["schedule"]["warps"])})
        found.append(Case(**{**entry, "plan": plan, "schedule": schedule}))
    return found
