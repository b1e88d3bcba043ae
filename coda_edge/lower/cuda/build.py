"""From device functions to CUDA C (by TVM) and on to a cubin (by nvcc, or by NVRTC if there is no nvcc). No GPU is needed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import tvm
from tvm import tirx

from ...errors import TargetError
from ...symbolic import format_dim
from ..body import Expr
from ..kernel import KernelSource
from .device import CudaKernel, Launch

FLAGS = ("-std=c++17", "-prec-div=false", "-prec-sqrt=false", "-ftz=true")
"""Division and square root within 2 ulp and no float32 subnormals: float accumulators of halves feel neither."""


@dataclass(frozen=True)
class Resources:
    """What the assembler gave a kernel: registers a thread, bytes spilled to memory."""

    registers: int
    spills: int


@dataclass(frozen=True)
class CudaLibrary:
    """A cubin of several kernels for one architecture, with each kernel's launch (and resources, if nvcc made it)."""

    arch: str
    cubin: bytes
    source: str
    launches: dict[str, Launch]
    resources: dict[str, Resources]

    def manifest(self) -> str:
        """The launches as JSON: for each symbol ``grid`` (three sizes or expressions), ``block``, ``shared``."""
        kernels = {
            symbol: {**asdict(launch), "grid": [format_dim(d) for d in launch.grid]}
            for symbol, launch in self.launches.items()
        }
        return json.dumps({"arch": self.arch, "kernels": kernels}, indent=1)


def build_cuda(kernels: Sequence[CudaKernel], arch: str) -> CudaLibrary:
    """The kernels, each distinct symbol once, compiled for ``arch`` (``sm_80``). Raises TargetError if that is impossible here."""
    unique = {kernel.symbol: kernel for kernel in kernels}
    if not unique:
        raise TargetError("there is no kernel to build: give at least one")
    source = cuda_source(list(unique.values()), arch)
    cubin, log = _compile(source, arch)
    return CudaLibrary(arch, cubin, source, {s: k.launch for s, k in unique.items()}, _resources(log))


def fat_binary(kernels: Sequence[KernelSource], archs: Sequence[str]) -> bytes:
    """The kernels as machine code for each of ``archs`` and as PTX for what comes after the last one, in one file for the driver.

    Raises TargetError without nvcc, or for a kernel that is written for CPUs.
    """
    unique: dict[str, CudaKernel] = {}
    for kernel in kernels:
        if not isinstance(kernel, CudaKernel):
            raise TargetError(f"kernel '{kernel.symbol}' is written for CPUs: lower the graph for a GPU")
        unique[kernel.symbol] = kernel
    if not unique:
        raise TargetError("there is no kernel to build: give at least one")
    if not shutil.which("nvcc"):
        raise TargetError(
            f"no CUDA compiler for {', '.join(archs)}: put nvcc on the PATH (CUDA toolkit 12 or later); a GPU is not needed"
        )
    real = [f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in archs]
    last = f"-gencode=arch=compute_{archs[-1][3:]},code=compute_{archs[-1][3:]}"
    source = cuda_source(list(unique.values()), archs[0])
    return _nvcc(source, ", ".join(archs), ["-fatbin", *real, last])[0]


def cuda_source(kernels: Sequence[CudaKernel], arch: str) -> str:
    """CUDA C of all kernels in one translation unit."""
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    module = tvm.IRModule({k.symbol: k.func.with_attr("target", target) for k in kernels})
    with target:
        return str(_CODEGEN(tirx.transform.LowerIntrin()(module), target).inspect_source()) + _OVERLAPS


_OVERLAPS = """
#if __CUDA_ARCH__ >= 900
extern "C" { __device__ int coda_overlaps = 1; }
#endif
"""
"""Tells the runtime that these kernels wait for those before them by themselves, and so may start early.

Only in code for architectures whose kernels do: ``coda_follow`` is empty below 9.0, also where a newer GPU runs that code from its PTX.
"""


_CODEGEN: Expr = tvm.get_global_func("target.build.cuda")


def _compile(source: str, arch: str) -> tuple[bytes, str]:
    if shutil.which("nvcc"):
        return _nvcc(source, arch, ["-cubin", f"-gencode=arch=compute_{arch[3:]},code={arch}", "-Xptxas", "-v"])
    if find_spec("cuda") and find_spec("cuda.bindings"):
        return _nvrtc(source, arch), ""
    raise TargetError(
        f"no CUDA compiler for {arch}: put nvcc on the PATH (CUDA toolkit 12 or later), or "
        "`pip install cuda-bindings nvidia-cuda-nvrtc`; a GPU is not needed"
    )


def _nvcc(source: str, arch: str, options: Sequence[str]) -> tuple[bytes, str]:
    with tempfile.TemporaryDirectory() as folder:
        text, cubin = Path(folder, "kernels.cu"), Path(folder, "kernels.out")
        text.write_text(source)
        command = ["nvcc", *options, "-O3", *FLAGS, str(text), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise TargetError(f"nvcc does not compile kernels for {arch}: {done.stderr.strip()[-2000:]}")
        return cubin.read_bytes(), done.stderr


def _nvrtc(source: str, arch: str) -> bytes:
    from tvm.support.nvcc import compile_cuda

    try:
        return bytes(compile_cuda(source, target_format="cubin", arch=arch, options=list(FLAGS), compiler="nvrtc"))
    except RuntimeError as error:
        raise TargetError(f"NVRTC does not compile kernels for {arch}: {str(error)[-2000:]}") from error


def _resources(log: str) -> dict[str, Resources]:
    """Read from ``ptxas -v``: a line with the entry's name, then one of spills, then one of registers."""
    found = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        log,
        re.DOTALL,
    )
    return {name: Resources(int(used), int(stores) + int(loads)) for name, stores, loads, used in found}
