"""Graph in, execution plan and kernels out. Importing this loads TVM."""

from __future__ import annotations

from . import (
    attention_node,
    fused,
    grouped_node,
    matmul,
    ops_create,
    ops_data,
    ops_math,
    ops_movement,
    ops_random,
    ops_recurrent,
    ops_scatter,
    pointwise,
    reduction,
)
from .integer_form import suited
from .planner import Lowered, lower
from .registry import KERNELS, POINTWISE

__all__ = ["KERNELS", "POINTWISE", "Lowered", "lower", "suited"]

# Imported for the operators that they register.
_RULES = (
    attention_node,
    fused,
    grouped_node,
    matmul,
    ops_create,
    ops_data,
    ops_math,
    ops_movement,
    ops_random,
    ops_recurrent,
    ops_scatter,
    pointwise,
    reduction,
)
