"""Graph rewrites, by algebra and not by name. One file, one rule; each docstring states its rule, conditions and refusals."""

from __future__ import annotations

from collections.abc import Callable

import onnx_graphsurgeon as gs

from . import (
    absorb_norm,
    absorb_window,
    attention,
    choose_rows,
    fuse_map,
    grow_epilogue,
    join_values,
    merge_gates,
    merge_projections,
    rotary,
    row_moments,
    sink_reshape,
    split_columns,
    whole_rows,
)
from .base import Absorbs, Measure, Pass, PassLog, Refusal
from .check import check

__all__ = ["PIPELINE", "Absorbs", "Measure", "Pass", "PassLog", "Refusal", "run_pipeline"]

#: The passes in the order in which they run on a graph in normal form.
PIPELINE: tuple[Pass, ...] = (
    choose_rows.PASS,
    whole_rows.PASS,
    join_values.PASS,
    sink_reshape.PASS,
    row_moments.PASS,
    attention.PASS,
    sink_reshape.PASS,  # the head merges that attention leaves
    split_columns.PASS,
    absorb_norm.PASS,
    grow_epilogue.PASS,
    rotary.PASS,
    merge_gates.PASS,
    merge_projections.PASS,
    absorb_window.PASS,
    fuse_map.PASS,
)


def run_pipeline(
    graph: gs.Graph,
    after_each: Callable[[Pass], None] | None = None,
    measure: Measure | None = None,
    absorbs: Absorbs | None = None,
) -> PassLog:
    """Runs all passes on ``graph`` in place and returns their log. Raises VerificationError, naming the pass, if one leaves a broken graph.

    ``after_each`` is called after every pass, with it. ``measure`` gives passes the numbers that their accuracy depends on, ``absorbs`` says
    which norms the GEMMs behind them do; without it, all.
    """
    log = PassLog(measure=measure, absorbs=absorbs)
    for node in graph.nodes:
        # The log tells nodes apart by their names.
        node.name = node.name or node.outputs[0].name
    for p in PIPELINE:
        log.rewrites[p.name] = log.rewrites.get(p.name, 0) + p.run(graph, log)
        check(graph, f"pass {p.name}")
        if after_each is not None:
            after_each(p)
    return log
