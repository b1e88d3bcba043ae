"""Tensors of heads, ``[B, H, S, …]`` or ``[B, S, H, …]``: what operators do within a head, and heads stored in parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from coda_edge.epilogue.builder import Builder
from coda_edge.epilogue.program import EpilogueProgram
from coda_edge.ir import ELEMENTWISE, VIEWS, GraphEditor, constant_value, same_shape, shape

LEAD = 3
"""Axes before those of a head."""
SWAP = [0, 2, 1]
"""Order of these that puts H in the place of S."""

Labels = npt.NDArray[Any]
"""For each element of a head what it is: an object array of the shape of the axes behind the heads."""


def moved(node: gs.Node, arrays: Sequence[Labels | None]) -> Labels | None:
    """What ``node`` makes of heads if it only moves elements within them, whose labels are ``arrays`` (None: no heads)."""
    first, out = arrays[0], shape(node.outputs[0])
    if first is None or len(out) <= LEAD or not all(isinstance(d, int) for d in out[LEAD:]):
        return None
    dims = shape(node.inputs[0])
    if node.op == "Transpose":
        perm = [int(p) for p in node.attrs["perm"]]
        inner = [p - LEAD for p in perm[LEAD:]]
        return first.transpose(inner) if perm[:LEAD] in ([0, 1, 2], SWAP) else None
    if not same_shape(out[:LEAD], dims[:LEAD]):
        return None
    size = tuple(int(d) for d in out[LEAD:])
    if node.op in ("Reshape", "Unsqueeze", "Squeeze"):
        return first.reshape(size)
    if node.op == "Concat":
        axis = int(node.attrs["axis"]) % len(out) - LEAD
        known = [a for a in arrays if a is not None]
        return np.concatenate(known, axis) if axis >= 0 and len(known) == len(arrays) else None
    if node.op == "Gather":
        rows, axis = constant_value(node.inputs[1]), int(node.attrs.get("axis", 0)) % len(dims) - LEAD
        return np.take(first, rows, axis) if rows is not None and axis >= 0 else None
    whole = sliced(node, first[(None,) * LEAD], range(LEAD)) if node.op == "Slice" else None
    return whole[(0,) * LEAD] if whole is not None else None


def sliced(node: gs.Node, labels: Labels, fixed: Sequence[int]) -> Labels | None:
    """What the Slice ``node`` takes of ``labels``; None if that is not constant, or not all of the axes ``fixed``."""
    bounds = [constant_value(t) for t in node.inputs[1:]]
    if any(b is None for b in bounds):
        return None
    starts, ends, *rest = (b.reshape(-1).tolist() for b in bounds if b is not None)
    axes = rest[0] if rest else range(len(starts))
    steps = rest[1] if len(rest) > 1 else [1] * len(starts)
    index = [slice(None)] * labels.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if axis % labels.ndim in fixed or step < 1:
            return None
        index[axis % labels.ndim] = slice(start, end, step)
    return labels[tuple(index)]


def unite_single_heads(editor: GraphEditor, gemm: gs.Node) -> None:
    """One head of which only parts are stored is stored whole, and its parts are slices of it.

    With one head a Slice of it is a column range of the product, which growth has let the Gemm store.
    """
    program = EpilogueProgram.parse(gemm.attrs["epilogue"])
    n = int(gemm.inputs[1].shape[1])
    single = [
        (o, t)
        for o, t in zip(program.outputs, gemm.outputs, strict=True)
        if o.heads is not None and o.heads == program.output_width(o, n) and not o.halves
    ]
    for group in _related([t for _, t in single]):
        members = [(o, t) for o, t in single if any(t is g for g in group)]
        ranges = [o.columns or (0, n) for o, _ in members]
        start, end = min(a for a, _ in ranges), max(b for _, b in ranges)
        covered = {c for a, b in ranges for c in range(a, b)}
        if len(members) < 2 or len({o.value for o, _ in members}) > 1 or len(covered) < end - start:
            continue
        builder = Builder(program)
        whole = next((t for (_, t), r in zip(members, ranges, strict=True) if r == (start, end)), None)
        kept = whole
        if kept is None:
            like = members[0][1]
            kept = editor.variable(f"{like.name}.head", like.dtype, (*shape(like)[:LEAD], end - start))
            name = next(f"y{i}" for i in itertools.count() if f"y{i}" not in builder.outputs)
            builder.output(name, members[0][0].value, (start, end), end - start)
        outputs = [t for t in gemm.outputs if t is kept or not any(t is m for _, m in members)]
        for (output, tensor), (a, b) in zip(members, ranges, strict=True):
            if tensor is kept:
                continue
            builder.drop_output(output.name)
            bounds = [editor.constant(f"{tensor.name}.bound", np.array([v])) for v in (a - start, b - start, LEAD)]
            part = editor.apply("Slice", [kept, *bounds], shape(tensor), f"{tensor.name}.part")
            editor.replace(tensor, part)
        gemm.outputs = outputs if whole is not None else [*outputs, kept]
        program = builder.build()
        gemm.attrs["epilogue"] = str(program)


def _related(tensors: list[gs.Variable]) -> list[list[gs.Variable]]:
    """Groups of tensors that meet in an operator that joins or combines elements of heads."""
    reached: list[tuple[set[int], list[gs.Variable]]] = []
    for tensor in tensors:
        seen: set[int] = set()
        stack = list(tensor.outputs)
        while stack:
            node = stack.pop()
            if id(node) not in seen and not node.domain and (node.op in ELEMENTWISE or node.op in ("Concat", *VIEWS)):
                seen.add(id(node))
                stack += [u for t in node.outputs for u in t.outputs]
        met = [group for group in reached if group[0] & seen]
        reached = [group for group in reached if not any(group is m for m in met)]
        reached.append((seen.union(*(s for s, _ in met)), [t for _, g in met for t in g] + [tensor]))
    return [group for _, group in reached]
