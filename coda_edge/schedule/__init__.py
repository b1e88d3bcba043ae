"""Schedules: how a template's loops are tiled for a target. Small dataclasses, which are also the tuner's search space."""

from .attention import AttentionSchedule, choose_attention
from .gemm import GemmSchedule, choose_gemm, gemm_candidates

__all__ = ["AttentionSchedule", "GemmSchedule", "choose_attention", "choose_gemm", "gemm_candidates"]
