"""Graph in, execution plan and kernels out. Importing this loads TVM."""

from __future__ import annotations

from . import fused, matmul, ops_create, ops_math, ops_movement, pointwise, reduction
from .planner import Lowered, lower
from .registry import KERNELS, POINTWISE, kernel, pointwise as pointwise_operator

__all__ = ["KERNELS", "POINTWISE", "Lowered", "kernel", "lower", "pointwise_operator"]
