"""Bundles: the execution plan and the one file (``*.coda``) that holds it with its constants and kernels."""

from .plan import (
    Buffer,
    BufferKind,
    Bundle,
    Constraint,
    ExecutionPlan,
    Expr,
    ExprOp,
    ExprTable,
    Level,
    Move,
    PlanStep,
    Read,
    Relation,
    TensorInfo,
)
from .reader import from_bytes, read
from .writer import to_bytes, write

__all__ = [
    "Buffer",
    "BufferKind",
    "Bundle",
    "Constraint",
    "ExecutionPlan",
    "Expr",
    "ExprOp",
    "ExprTable",
    "Level",
    "Move",
    "PlanStep",
    "Read",
    "Relation",
    "TensorInfo",
    "from_bytes",
    "read",
    "to_bytes",
    "write",
]
