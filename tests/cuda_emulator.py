"""Runs a call's CUDA C on the CPU: ``cuda_emulator.h`` in the place of the GPU's instructions. No CUDA compiler is needed."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.cuda_problem import Plan, Problem
from coda_edge.lower.cuda import CudaKernel, cuda_source
from coda_edge.lower.cuda.device import MATH
from coda_edge.lower.kernel import KernelCall
from coda_edge.schedule.cuda_gemm import CudaGemmSchedule, pack_weight

Array = npt.NDArray[Any]
_HEADER = Path(__file__).with_suffix(".h")
_GUARD = 512
"""Bytes before and after each buffer that no kernel may change; as floats they are NaN."""


class Emulator:
    """Kernels compiled for this machine."""

    def __init__(self, kernels: list[CudaKernel], edit: tuple[str, str] = ("", "")) -> None:
        """``edit``: a text of the kernels, and what to put in its place (to see whether a mistake is found)."""
        source = cuda_source(kernels, "sm_80")
        text = source[source.index('extern "C" __global__') :].replace(*edit) if edit[0] else source
        text = "\n".join((_HEADER.read_text(), *MATH.values(), text[text.index('extern "C" __global__') :]))
        for kernel in kernels:
            text += (
                f'\nextern "C" void run_{kernel.symbol}(const int *grid, int threads, void **args, int lazy) '
                f"{{ emulator::launch({kernel.symbol}, grid, threads, args, lazy); }}\n"
            )
        with tempfile.TemporaryDirectory() as folder:
            code, library = Path(folder, "k.cpp"), Path(folder, "k.so")
            code.write_text(text)
            flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-fno-sanitize=all"]
            flags += ["-fsanitize=alignment", "-fsanitize-trap=alignment"]
            subprocess.run([sys.executable, "-m", "ziglang", "c++", *flags, str(code), "-o", str(library)], check=True)
            self._library = ctypes.CDLL(str(library))

    def run(self, problem: Problem, call: KernelCall, schedule: CudaGemmSchedule, lazy: bool) -> dict[str, Array]:
        """The GEMM's outputs; as ``outputs``."""
        given = {"a": problem.a, "weight": pack_weight(schedule, problem.weight), **problem.operands}
        return self.outputs(Plan.of(call, problem.sizes()), given, problem.outputs(), lazy)

    def outputs(
        self, plan: Plan, operands: Mapping[str, Array], outputs: Mapping[str, Array], lazy: bool
    ) -> dict[str, Array]:
        """The call's outputs, with copies as early or, ``lazy``, as late as may be. Fails if a byte outside a buffer changes."""
        given = {**operands, **{f"out.{name}": array for name, array in outputs.items()}}
        guarded = {name: _Guarded.of(array) for name, array in given.items()}
        scratch = [_Guarded.of(np.full(b // 4, np.nan, np.float32)) for b in plan.buffers if isinstance(b, int)]
        spare = iter(scratch)
        buffers = [guarded[b] if isinstance(b, str) else next(spare) for b in plan.buffers]
        values = [ctypes.c_uint64(b.array.ctypes.data) for b in buffers] + [ctypes.c_int64(i) for i in plan.ints]
        args = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        for step in plan.steps:
            getattr(self._library, f"run_{step.symbol}")((ctypes.c_int * 3)(*step.grid), step.block, args, int(lazy))
        for buffer in (*guarded.values(), *scratch):
            buffer.check()
        return {name: guarded[f"out.{name}"].array for name in outputs}


@dataclass(frozen=True)
class _Guarded:
    """An array on a 256-byte boundary with guards on both sides."""

    raw: Array
    start: int
    array: Array

    @staticmethod
    def of(contents: Array) -> _Guarded:
        flat = np.ascontiguousarray(contents).reshape(-1)
        raw = np.full(flat.nbytes + 2 * _GUARD + 256, 0xFF, np.uint8)
        start = _GUARD + -(raw.ctypes.data + _GUARD) % 256
        raw[start : start + flat.nbytes] = flat.view(np.uint8)
        return _Guarded(raw, start, raw[start : start + flat.nbytes].view(flat.dtype).reshape(contents.shape))

    def check(self) -> None:
        stop = self.start + self.array.nbytes
        assert (self.raw[: self.start] == 0xFF).all() and (self.raw[stop:] == 0xFF).all()
