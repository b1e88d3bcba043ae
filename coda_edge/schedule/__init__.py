"""Schedules: how a template's loops are tiled for a target. Small dataclasses, which are also the tuner's search space."""

from .gemm import GemmSchedule, choose_gemm, gemm_candidates

__all__ = ["GemmSchedule", "choose_gemm", "gemm_candidates"]
