"""Where a norm ahead of a GEMM is done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NormForm:
    """``absorbed``: the GEMM reads the raw tensor, and its weights and epilogue do the norm; otherwise a kernel of its own does."""

    absorbed: bool = True
