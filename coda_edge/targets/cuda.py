"""NVIDIA GPUs from Ampere on. Compiling for them needs a CUDA compiler and no GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import TargetError
from .target import GPU, Target

if TYPE_CHECKING:
    from ..lower.cuda import CudaLibrary
    from ..lower.kernel import KernelSource


@dataclass(frozen=True)
class CudaTarget(Target):
    """GPUs. ``arch``: the oldest architecture, as nvcc names it; ``multiprocessors``: how many schedules count on.

    ``others``: further architectures that a library holds machine code for. For those after the last one there is PTX, which the driver
    compiles.
    """

    arch: str = "sm_80"
    multiprocessors: int = 108
    others: tuple[str, ...] = ()

    def library(self, kernels: Sequence[KernelSource]) -> CudaLibrary:
        """The kernels as a cubin with its launch manifest. Raises TargetError for a CPU's kernel or without a CUDA compiler."""
        from ..lower.cuda import CudaKernel
        from ..lower.cuda.build import build_cuda

        chosen = [kernel for kernel in kernels if isinstance(kernel, CudaKernel)]
        if len(chosen) < len(kernels):
            other = next(kernel.symbol for kernel in kernels if not isinstance(kernel, CudaKernel))
            raise TargetError(f"kernel '{other}' is written for CPUs: lower the graph for {self.name}")
        return build_cuda(chosen, self.arch)

    def build(self, kernels: Sequence[KernelSource], progress: Callable[[float], None] | None = None) -> bytes:
        """The kernels as a fat binary: machine code for each architecture, and PTX. Raises TargetError without nvcc."""
        from ..lower.cuda.build import fat_binary

        binary = fat_binary(kernels, (self.arch, *self.others))
        if progress is not None:
            progress(1.0)
        return binary


def present() -> str:
    """The target for the first GPU of this machine; "" if there is none, or no driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return ""
    for value, attribute in ((major, 75), (minor, 76)):
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    name = f"cuda-sm{major.value}{minor.value}"
    return name if any(t.name == name for t in TARGETS) else "cuda"


def _gpu(
    version: int, description: str, multiprocessors: int, name: str = "", others: tuple[str, ...] = ()
) -> CudaTarget:
    arch = f"sm_{version}"
    return CudaTarget(
        name=name or f"cuda-sm{version}",
        description=description,
        tvm={"kind": "cuda", "arch": arch},
        triple="nvptx64-nvidia-cuda",
        features=(GPU,),
        vector=4,
        registers=255,
        arch=arch,
        multiprocessors=multiprocessors,
        others=others,
    )


TARGETS = (
    _gpu(80, "GPUs from Ampere on: machine code for sm_80, sm_87 and sm_90, and PTX", 108, "cuda", ("sm_87", "sm_90")),
    _gpu(80, "Ampere: A100, A30", 108),
    _gpu(87, "Ampere: Jetson Orin", 16),
    _gpu(89, "Ada: RTX 40, L4, L40", 58),
    _gpu(90, "Hopper: H100, H200", 132),
)
