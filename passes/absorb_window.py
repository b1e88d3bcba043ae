"""A Window that products read is done by their kernels: its rows are never stored.

Rule: a Gemm whose left operand is ``Window(x)`` becomes a Gemm of x with that window. It runs behind every pass that compares the left
operands of products, so that these see one tensor of rows.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from coda_edge.ir import DOMAIN, made_by, remove_dead

from .base import Pass, PassLog


def run(graph: gs.Graph, log: PassLog) -> int:
    """Absorbs every Window that a Gemm reads; returns how many Gemms have one."""
    count = 0
    for node in graph.nodes:
        window = made_by(node.inputs[0], "Window") if node.op == "Gemm" and node.domain == DOMAIN else None
        if window is None or window.domain != DOMAIN:
            continue
        node.inputs[0] = window.inputs[0]
        node.attrs["window"] = window.attrs["window"]
        count += 1
    if count:
        remove_dead(graph)
    return count


PASS = Pass("absorb_window", run)
