"""Transposes that cancel through elementwise operators, reductions, and operators that cut, join and pad.

``T₂(f(T₁(a), T₁(b), c))`` is ``f(a, b, T₂(c))`` where T₂ undoes T₁ and ``f`` is any tree of elementwise operators with
constants ``c``, of reductions that keep their axes (a norm over channels that come first is
one over channels that come last, never the other way; pooling is either), and of Slice, Concat, Pad, and Gather, which resizes. It
happens only if every leaf that is no constant cancels, or has its elements in one order either way (``[n, channels, 1, 1]``), so it never
adds a transpose that takes a kernel.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from .. import ir
from ..symbolic import Dim, same
from .builder import Builder, decomposition

# Operators between two transposes: a norm, an activation and a residual or two.
_MOST_NODES = 64
_REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")
_MOVING = ("Slice", "Concat", "Pad", "Gather")
# Which input of an operator says the axes that it works on.
_AXES = {**dict.fromkeys(_REDUCTIONS, 1), "Slice": 3}


@decomposition("Transpose")
def _cancelled(b: Builder) -> ir.Tensor | None:
    x = b.node.inputs[0]
    perm = list(b.attr("perm", None) or range(b.rank())[::-1])
    source = ir.producer(x)
    undone = [perm.index(axis) for axis in range(len(perm))]
    if source is None or not _turns(source, undone, ir.shape(x)):
        return None
    tree = _tree(source, undone)
    if tree is None:
        return None
    made: dict[str, ir.Tensor] = {}
    for node in tree:
        data = len(_data(node))
        operands = [*(_operand(b, t, made, perm) for t in node.inputs[:data]), *node.inputs[data:]]
        attrs = dict(node.attrs)
        if node.op in _AXES:
            at = _AXES[node.op]
            axes = ir.constant_value(node.inputs[at])
            assert axes is not None
            turned = [perm.index(a % len(perm)) for a in axes.tolist()]
            operands[at] = b.tensor(sorted(turned) if node.op in _REDUCTIONS else turned)
        elif node.op in ("Concat", "Gather"):
            attrs["axis"] = perm.index(int(attrs.get("axis", 0)) % len(perm))
        elif node.op == "Pad":
            pads = ir.constant_value(node.inputs[1])
            assert pads is not None
            operands[1] = b.tensor([int(side[a]) for side in pads.reshape(2, -1) for a in perm])
        made[node.outputs[0].name] = b(node.op, *operands, **attrs)
    return made[x.name]


def _tree(root: gs.Node, undone: list[int]) -> list[gs.Node] | None:
    """The nodes under ``root`` in order of evaluation; None if no leaf is transposed by ``undone``, or one is nothing that the rule has."""
    order: list[gs.Node] = []
    inside: set[int] = set()
    refused: set[int] = set()
    perm = [undone.index(axis) for axis in range(len(undone))]

    def visit(node: gs.Node, depth: int) -> int | None:
        """How many transposed leaves are under ``node`` that no node before has; None, and ``order`` as it was, if it can't be in the tree."""
        if id(node) in inside:
            return 0
        if id(node) in refused or len(order) + depth >= _MOST_NODES:
            return None
        before = len(order)
        found = leaves(node, depth)
        if found is None:
            inside.difference_update(map(id, order[before:]))
            del order[before:]
            refused.add(id(node))
            return None
        order.append(node)
        inside.add(id(node))
        return found

    def leaves(node: gs.Node, depth: int) -> int | None:
        if len(node.outputs) != 1 or node.domain:
            return None
        count = 0
        for tensor in _data(node):
            if isinstance(tensor, gs.Constant):
                continue
            if tensor.shape is None or len(tensor.shape) != len(undone):
                return None
            if _is_transposed(tensor, undone):
                count += 1
                continue
            source, found = ir.producer(tensor), None
            if source is not None and source.op != "Transpose" and _turns(source, undone, ir.shape(root.outputs[0])):
                found = visit(source, depth + 1)
            if found is None and not _is_view(tensor, perm):
                return None
            # What is a view may stay, and so does all that it is made of.
            count += found or 0
        return count

    return order if visit(root, 0) else None


def _is_transposed(tensor: ir.Tensor, perm: list[int]) -> bool:
    source = ir.producer(tensor)
    if source is None or source.op != "Transpose" or source.domain:
        return False
    return list(source.attrs.get("perm", ())) == perm


def _is_view(tensor: ir.Tensor, perm: list[int]) -> bool:
    """Whether a Transpose by ``perm`` moves axes of 1 only."""
    dims = ir.shape(tensor)
    moved = [axis for axis in perm if not same(dims[axis], 1)]
    return moved == sorted(moved)


def _data(node: gs.Node) -> list[ir.Tensor]:
    """The inputs that are transposed."""
    alone = node.op in _AXES or node.op in ("Pad", "Gather")
    return list(node.inputs[:1] if alone else node.inputs)


def _turns(node: gs.Node, undone: list[int], result: tuple[Dim, ...]) -> bool:
    """Whether ``node`` does the same along other axes. Reduced axes must be known and stay as 1.

    The last one may be among them only if it stays last, or if they are 1 in the ``result`` too: pooling, which is no norm of rows.
    """
    if node.op in ir.ELEMENTWISE:
        return True
    if node.op in _MOVING:
        return node.op == "Concat" or _is_static(node)
    kept = node.op in _REDUCTIONS and node.attrs.get("keepdims", 1) and len(node.inputs) == 2
    axes = ir.constant_value(node.inputs[1]) if kept else None
    if axes is None:
        return False
    last = len(undone) - 1
    return last not in axes or last in [undone[a] for a in axes.tolist()] or all(same(result[a], 1) for a in axes)


def _is_static(node: gs.Node) -> bool:
    """Whether a Slice says which axes it cuts, a Pad by how much it pads each axis, or a Gather takes places along one axis, of no table."""
    if node.op == "Gather":
        return not isinstance(node.inputs[0], gs.Constant) and len(ir.shape(node.inputs[1])) == 1
    if node.op == "Slice":
        return len(node.inputs) > 3 and ir.constant_value(node.inputs[3]) is not None
    pads = ir.constant_value(node.inputs[1])
    return pads is not None and pads.size == 2 * len(ir.shape(node.inputs[0])) and len(node.inputs) < 4


def _operand(b: Builder, tensor: ir.Tensor, made: dict[str, ir.Tensor], perm: list[int]) -> ir.Tensor:
    """``tensor`` in the order that the cancelled transpose gives."""
    if tensor.name in made:
        return made[tensor.name]
    value = ir.constant_value(tensor)
    if value is None and not _is_transposed(tensor, [perm.index(axis) for axis in range(len(perm))]):
        return b("Transpose", tensor, perm=perm)
    if value is None:
        (source,) = tensor.inputs
        kept: ir.Tensor = source.inputs[0]
        return kept
    if value.size == 1:
        return tensor
    full = value.reshape([1] * (len(perm) - value.ndim) + list(value.shape))
    return b.editor.constant(f"{tensor.name}.turned", np.ascontiguousarray(full.transpose(perm)))
