"""Graph nodes as problems that schedules are chosen for: the key under which a database keeps them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_graphsurgeon as gs

from ..attention import Operands, bands
from ..epilogue.program import EpilogueProgram
from ..ir import DOMAIN, Tensor, shape
from ..schedule.problem import Problem, epilogue_class, format_class, rows_bucket
from ..targets.target import Target
from ..weights import weight_of
from ..window import rows_shape
from .dot import DOTS
from .pointwise import product
from .weights import BYTES, WeightFormat


def gemm_problem(node: gs.Node, target: Target) -> Problem:
    """The problem of a ``coda.Gemm``."""
    a, weight = node.inputs[:2]
    k, n = shape(weight)
    window = node.attrs.get("window")
    words = [epilogue_class(EpilogueProgram.parse(node.attrs["epilogue"])), "window" if window else ""]
    return Problem(
        target.measured_as,
        "gemm",
        (int(n), int(k)),
        "+".join(filter(None, words)),
        format_class(_format(weight, target)),
        rows_bucket(product(rows_shape(shape(a), window)[:-1])),
    )


def _format(weight: gs.Constant, target: Target) -> WeightFormat:
    if target.dot and weight.dtype == np.int8:
        return WeightFormat(BYTES[DOTS[target.dot].word])
    return WeightFormat.of(weight_of(weight))


def attention_problem(node: gs.Node, target: Target) -> Problem:
    """The problem of a ``coda.Attention``; its rows are the queries of a head."""
    given = Operands.of(node)
    _, heads, queries, depth = shape(given.q)
    _, kv_heads, _, columns = shape(given.v)
    words = {
        f"group{int(heads) // int(kv_heads)}": int(heads) != int(kv_heads),
        "masked": any(_varies(t) for t in given.scores),
        "banded": bool(bands(node)),
        "past": given.past is not None,
        "rounded": "probability" in node.attrs,
    }
    return Problem(
        target.measured_as,
        "attention",
        (int(depth), int(columns)),
        "+".join(word for word, present in words.items() if present),
        rows=rows_bucket(queries),
    )


def _varies(tensor: Tensor) -> bool:
    """Whether a score operand has a number for each query and key."""
    return len(shape(tensor)) > 1 and all(d != 1 for d in shape(tensor)[-2:])


_PROBLEMS: dict[str, Callable[[gs.Node, Target], Problem]] = {"Gemm": gemm_problem, "Attention": attention_problem}


def problem_of(node: gs.Node, target: Target) -> Problem | None:
    """The problem of a node whose kernel has a schedule to choose; None for any other node."""
    rule = _PROBLEMS.get(node.op) if node.domain == DOMAIN else None
    return rule(node, target) if rule is not None else None
