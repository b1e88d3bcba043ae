"""Sums over the columns of a head, as steps of an epilogue program."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge.epilogue.builder import Builder
from coda_edge.ir import DOMAIN, reduces_rows

from .heads import Labels

#: What a sum over a head depends on, as an array of labels: on no column more than on others, so that it pairs none.
WHOLE_HEAD: Labels = np.array([frozenset()], object)

_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2")


def is_head_sum(node: gs.Node) -> bool:
    """Whether ``node`` makes sums over the last axis, which it keeps as 1."""
    if node.domain:
        return bool(node.op == "RowMoments" and node.domain == DOMAIN)
    return any(reduces_rows(node, op) for op in _REDUCTIONS)


def head_sums(builder: Builder, node: gs.Node, value: str, size: int) -> list[str]:
    """The results of ``node``, which sums ``value`` over heads of ``size`` columns: values of kind ``head``."""

    def total(of: str) -> str:
        return builder.add("headsum", of, heads=size)

    def mean(of: str) -> str:
        return builder.add("mul", total(of), 1 / size)

    def square(of: str) -> str:
        return builder.add("mul", of, of)

    if node.op == "RowMoments":
        middle = mean(value)
        return [middle, mean(square(builder.add("sub", value, middle)))]
    if node.op == "ReduceL2":
        return [builder.add("sqrt", total(square(value)))]
    if node.op == "ReduceSumSquare":
        return [total(square(value))]
    return [mean(value) if node.op == "ReduceMean" else total(value)]
