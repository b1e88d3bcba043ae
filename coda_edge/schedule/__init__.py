"""Schedules: how a template's loops are tiled for a target. Small dataclasses, which are also the tuner's search space.

Heuristics choose them (``gemm.py``, ``attention.py``) unless a database of measurements knows better (``database.py``).
"""

from .attention import AttentionSchedule, attention_space, choose_attention
from .database import AnySchedule, Database, Record, Schedules, default_path, fixed
from .gemm import GemmSchedule, choose_gemm, gemm_candidates, gemm_space
from .norm import NormForm
from .problem import Problem, epilogue_class, format_class, norm_problem, rows_bucket

__all__ = [
    "AnySchedule",
    "AttentionSchedule",
    "Database",
    "GemmSchedule",
    "NormForm",
    "Problem",
    "Record",
    "Schedules",
    "attention_space",
    "choose_attention",
    "choose_gemm",
    "default_path",
    "epilogue_class",
    "fixed",
    "format_class",
    "gemm_candidates",
    "gemm_space",
    "norm_problem",
    "rows_bucket",
]
