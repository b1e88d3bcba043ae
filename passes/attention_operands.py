"""Queries, keys and values as an Attention takes them: unscaled, keys by rows, unrepeated, past and new rows apart."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge.frontend.sizes import SizeEmitter
from coda_edge.ir import GraphEditor, Tensor, constant_value, made_by, same_shape, scalar_value, shape
from coda_edge.symbolic import Dim, same

#: From [B,S,H,D] to [B,H,S,D] and back.
HEADS = (0, 2, 1, 3)


def unscaled(tensor: Tensor) -> tuple[Tensor, float]:
    """A tensor without its constant scales, and their product."""
    node = made_by(tensor, "Mul", "Div")
    if node is None:
        return tensor, 1.0
    x, c = node.inputs if scalar_value(node.inputs[1]) is not None else node.inputs[::-1]
    scale = scalar_value(c)
    if scale is None or (node.op == "Div" and c is not node.inputs[1]) or not same_shape(shape(x), shape(tensor)):
        return tensor, 1.0
    inner, rest = unscaled(x)
    return inner, rest * scale if node.op == "Mul" else rest / scale


def transposed(editor: GraphEditor, kt: Tensor) -> Tensor:
    """k ``[…,Sk,D]`` from kᵀ, through the Transpose that made it where there is one."""
    node = made_by(kt, "Transpose")
    rank = len(shape(kt))
    source, perm = (node.inputs[0], list(node.attrs["perm"])) if node is not None else (kt, list(range(rank)))
    perm[-2:] = perm[:-3:-1]
    if perm == sorted(perm):
        return source
    value = constant_value(source)
    if value is not None:
        return editor.constant(f"{kt.name}.k", np.ascontiguousarray(value.transpose(perm)))
    dims = [shape(source)[i] for i in perm]
    return editor.apply("Transpose", [source], dims, f"{kt.name}.k", perm=perm)


def shared(emitter: SizeEmitter, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B,H,S,D]`` without a repetition of heads that both have: ``[B,Hkv,S,D]``."""
    found = [_unrepeated(emitter, t) for t in (k, v)]
    if found[0] is not None and found[1] is not None and same(shape(found[0])[1], shape(found[1])[1]):
        return found[0], found[1]
    return k, v


def _unrepeated(emitter: SizeEmitter, tensor: Tensor) -> Tensor | None:
    """``tensor`` before each of its heads was repeated for its group; None if that is not how it was made."""
    gather = made_by(tensor, "Gather")
    if gather is not None:
        index = constant_value(gather.inputs[1])
        heads = shape(gather.inputs[0])[1] if len(shape(gather.inputs[0])) == 4 else None
        if index is None or index.ndim != 1 or gather.attrs.get("axis", 0) != 1 or not isinstance(heads, int):
            return None
        groups = index.size // heads if heads else 0
        return gather.inputs[0] if np.array_equal(index, np.repeat(np.arange(heads), groups)) else None
    join = made_by(tensor, "Concat")
    if join is not None:
        alike = int(join.attrs["axis"]) % 4 == 1 and all(t is join.inputs[0] for t in join.inputs)
        return join.inputs[0] if alike and same(shape(join.inputs[0])[1], 1) else None
    expand = made_by(tensor, "Expand")
    if expand is not None and len(shape(expand.inputs[0])) == 4:
        before, after = shape(expand.inputs[0]), shape(tensor)
        alike = same(before[1], 1) and same_shape((before[0], *before[2:]), (after[0], *after[2:]))
        return expand.inputs[0] if alike else None
    grouped = _grouped(tensor)
    return None if grouped is None else _squeezed(emitter, tensor, grouped)


def _grouped(tensor: Tensor) -> gs.Node | None:
    """The Expand of an axis of 1 behind the heads, merged into them, that made ``tensor``."""
    merge = made_by(tensor, "Reshape")
    expand = made_by(merge.inputs[0], "Expand") if merge is not None else None
    if merge is None or expand is None:
        return None
    before, after, out = shape(expand.inputs[0]), shape(expand.outputs[0]), shape(tensor)
    grouped = len(before) == len(after) == 5 and same(before[2], 1) and isinstance(after[2], int)
    if not grouped or not same_shape((*before[:2], *before[3:]), (*after[:2], *after[3:])):
        return None
    return expand if same_shape(out, (after[0], after[1] * after[2], *after[3:])) else None


def _squeezed(emitter: SizeEmitter, tensor: Tensor, expand: gs.Node) -> Tensor:
    """The Expand's input without its axis of 1, by the way it was made where that is shorter."""
    editor, source = emitter.editor, expand.inputs[0]
    batch, heads, _, length, depth = shape(source)
    split = made_by(source, "Unsqueeze", "Reshape")
    if split is not None and same_shape(shape(split.inputs[0]), (batch, heads, length, depth)):
        return split.inputs[0]
    order = made_by(source, "Transpose")
    split = made_by(order.inputs[0], "Reshape", "Unsqueeze") if order is not None else None
    if order is not None and split is not None and list(order.attrs["perm"]) in ([0, 2, 3, 1, 4], [0, 3, 2, 1, 4]):
        target = editor.constant(f"{tensor.name}.split", np.array([0, 0, heads, depth], np.int64))
        if same_shape(shape(split.inputs[0])[:2], (batch, length)):
            rows = editor.apply(
                "Reshape", [split.inputs[0], target], (batch, length, heads, depth), f"{tensor.name}.rows"
            )
            dims = (batch, heads, length, depth)
            return editor.apply("Transpose", [rows], dims, f"{tensor.name}.shared", perm=list(HEADS))
    axis = editor.constant(f"{tensor.name}.axis", np.array([2], np.int64))
    return editor.apply("Squeeze", [source, axis], (batch, heads, length, depth), f"{tensor.name}.shared")


def appended(tensor: Tensor) -> gs.Node | None:
    """The Concat of past and new rows ``[B,Hkv,P,D]``, ``[B,Hkv,N,D]`` that ``tensor`` is."""
    node = made_by(tensor, "Concat")
    if node is None or len(node.inputs) != 2 or len(shape(tensor)) != 4 or int(node.attrs["axis"]) % 4 != 2:
        return None
    dims: list[tuple[Dim, ...]] = [shape(t) for t in node.inputs]
    return node if all(same_shape((*d[:2], d[3]), (*dims[0][:2], dims[0][3])) for d in dims) else None
