"""NVIDIA GPUs from Ampere on. Compiling for them needs a CUDA compiler and no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import TargetError
from .target import Target

if TYPE_CHECKING:
    from ..lower.cuda import CudaLibrary
    from ..lower.kernel import KernelSource

FEATURE = "cuda"
"""No CPU has it, so no CUDA target is native."""


@dataclass(frozen=True)
class CudaTarget(Target):
    """A GPU. ``arch``: the architecture as nvcc names it; ``multiprocessors``: how many schedules count on."""

    arch: str = "sm_80"
    multiprocessors: int = 108

    def library(self, kernels: Sequence[KernelSource]) -> CudaLibrary:
        """The kernels as a cubin with its launch manifest. Raises TargetError for a CPU's kernel or without a CUDA compiler."""
        from ..lower.cuda import CudaKernel
        from ..lower.cuda.build import build_cuda

        chosen = [kernel for kernel in kernels if isinstance(kernel, CudaKernel)]
        if len(chosen) < len(kernels):
            other = next(kernel.symbol for kernel in kernels if not isinstance(kernel, CudaKernel))
            raise TargetError(
                f"kernel '{other}' is written for CPUs: {self.name} runs fused GEMMs (coda_edge.lower.cuda), not whole "
                "models yet; name a CPU target for those"
            )
        return build_cuda(chosen, self.arch)

    def build(self, kernels: Sequence[KernelSource], progress: Callable[[float], None] | None = None) -> bytes:
        """The kernels as a cubin; see ``library``."""
        cubin = self.library(kernels).cubin
        if progress is not None:
            progress(1.0)
        return cubin


def _gpu(version: int, description: str, multiprocessors: int) -> CudaTarget:
    arch = f"sm_{version}"
    return CudaTarget(
        name=f"cuda-sm{version}",
        description=description,
        tvm={"kind": "cuda", "arch": arch},
        triple="nvptx64-nvidia-cuda",
        features=(FEATURE,),
        vector=16,
        registers=255,
        arch=arch,
        multiprocessors=multiprocessors,
    )


TARGETS = (
    _gpu(80, "Ampere: A100, A30", 108),
    _gpu(87, "Ampere: Jetson Orin", 16),
    _gpu(89, "Ada: RTX 40, L4, L40", 58),
    _gpu(90, "Hopper: H100, H200", 132),
)
