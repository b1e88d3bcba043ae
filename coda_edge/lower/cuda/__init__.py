"""Kernels for NVIDIA GPUs: fused GEMMs and attention on tensor cores, as CUDA C, as cubins.

``attention.py`` is the entry to attention, ``attention_tile.py`` writes its kernels. ``gemm.py`` is that to GEMMs: a kernel call from an epilogue program and a weight. ``gemm_tile.py`` writes the kernel (``main_loop.py``, ``tile_epilogue.py``), through the
same ``Body`` and the same evaluation of epilogue programs as on CPUs; ``device.py`` is what a thread of a GPU can do besides;
``build.py`` makes CUDA C and machine code of it.
"""

from __future__ import annotations

from .attention import lower_cuda_attention
from .build import CudaLibrary, cuda_source
from .device import CudaKernel, Launch
from .gemm import lower_cuda_gemm

__all__ = ["CudaKernel", "CudaLibrary", "Launch", "cuda_source", "lower_cuda_attention", "lower_cuda_gemm"]
