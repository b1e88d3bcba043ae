"""Probabilities that weigh two tensors of values weigh both side by side.

Rule: for a softmax p, ``p @ v`` and ``p @ w`` are the columns of ``p @ [v | w]``. So it is one attention, whose scores never reach memory
(differential attention of two halves of the values, arXiv 2410.05258).

Conditions: v and w have the same dimensions but for the last one, which is a number; neither is made of the other's product (``p @ (p @ v)``);
nothing else reads p, or p behind a guard that turns NaN into 0. Refused: nothing else.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge.ir import (
    GraphEditor,
    Tensor,
    consumers,
    descendants,
    in_order,
    is_output,
    remove_nodes,
    same_shape,
    shape,
    sort,
)

from .base import Pass, PassLog


def run(graph: gs.Graph, log: PassLog) -> int:
    """Applies the rule to every softmax; returns how often."""
    editor = GraphEditor(graph)
    found = [n for n in in_order(graph) if n.op == "Softmax" and not n.domain]
    count = sum(_join(editor, _guarded(n.outputs[0])) for n in found)
    if count:
        sort(graph)
    return count


def _guarded(p: gs.Variable) -> gs.Variable:
    """``p`` behind the guard that reads it, if there is one."""
    users = consumers(p)
    where = next((u for u in users if u.op == "Where" and u.inputs[2] is p), None)
    guarded = where is not None and all(u is where or u.op == "IsNaN" for u in users)
    return where.outputs[0] if where is not None and guarded else p


def _join(editor: GraphEditor, p: gs.Variable) -> bool:
    products = consumers(p)
    if len(products) < 2 or is_output(editor.graph, p):
        return False
    if any(u.op != "MatMul" or u.domain or u.inputs[0] is not p or u.inputs[1] is p for u in products):
        return False
    values: list[Tensor] = [u.inputs[1] for u in products]
    dims = shape(values[0])
    if any(not same_shape(shape(v)[:-1], dims[:-1]) or not isinstance(shape(v)[-1], int) for v in values):
        return False
    if not all(same_shape(shape(u.outputs[0])[:-1], shape(products[0].outputs[0])[:-1]) for u in products):
        return False
    after = set[int]().union(*(descendants(u) for u in products))
    if any(id(n) in after for v in values for n in v.inputs):
        return False
    widths = [int(shape(v)[-1]) for v in values]
    ends = np.cumsum(widths)
    base = products[0].name or products[0].outputs[0].name
    side_by_side = editor.apply("Concat", values, (*dims[:-1], int(ends[-1])), f"{base}.values", axis=len(dims) - 1)
    out = shape(products[0].outputs[0])
    results = [u.outputs[0] for u in products]
    whole = editor.apply("MatMul", [p, side_by_side], (*out[:-1], int(ends[-1])), f"{base}.joined")
    for result, width, end in zip(results, widths, ends.tolist(), strict=True):
        bounds = [editor.constant(f"{base}.bound", np.array([v], np.int64)) for v in (end - width, end, len(out) - 1)]
        editor.replace(result, editor.apply("Slice", [whole, *bounds], (*out[:-1], width), f"{base}.part"))
    remove_nodes(editor.graph, products)
    return True


PASS = Pass("join_values", run)
