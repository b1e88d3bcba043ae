"""The scales of quantised operands apply behind their product, which is then a sum of whole numbers.

1. Both operands are quantised. Rule: ``(s·a) ∘ (t·w) = (s·t)·(a ∘ w)`` for ∘ any of MatMul, Gemm and Conv, where both operands are results of DequantizeLinear,
perhaps behind operators that only move elements; s is one number, and t is one too or, for constant w, has one for each column (for
Conv: filter). a and w are left as DequantizeLinear with scale 1. Gemm's factor of the product is a scale too; a bias is added behind. The scale of
two run-time operands stands behind the movement of their product, too.

float32 adds whole numbers exactly up to 2²⁴, so the sum does not depend on its order: integer kernels, onnxruntime's among them, and
ours agree to the last bit where they would else round apart, and be a quantum apart after the next quantisation.

2. Constant weights alone are: ``a @ ((w - z)·t) = (a @ (w - z))·t``, t having one number for each column. A weight is then read as the
whole number that is stored, and the factor meets the sums in the epilogue, once instead of K times. Each product of the model's sum rounds
``(w - z)·t`` first, by at most 2⁻²⁴ of it; here the sum is rounded once more instead.

Refused: scales that are computed, blocked, or vary along what is summed over; a bias with a factor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from .. import ir
from ..weights import FactoredConstant
from .builder import Builder, decomposition
from .quanta import MOVES, is_constant, moved_on

_MOVES = (*MOVES, "Slice", "Expand")


@dataclass(frozen=True)
class _Product:
    """``column``: the axis of the right operand, of some rank, that makes the result's columns (-1: none); ``behind``: how many axes follow
    these.
    """

    column: Callable[[gs.Node, int], int]
    behind: Callable[[int], int]


_PRODUCTS = {
    "MatMul": _Product(lambda node, rank: rank - 1 if rank > 1 else -1, lambda rank: 0),
    "Gemm": _Product(lambda node, rank: 0 if node.attrs.get("transB", 0) else 1, lambda rank: 0),
    "Conv": _Product(lambda node, rank: 0, lambda rank: rank - 2),
}


@dataclass(frozen=True)
class _Scaled:
    """``scale · tensor``. Several numbers go along ``axis`` of a constant; ``rank`` is known of constants."""

    scale: ir.Array
    tensor: ir.Tensor
    rank: int | None
    axis: int


def defer_scales(graph: gs.Graph) -> int:
    """Applies the rule to every product; returns how many it changed. Shapes need not be known."""
    editor = ir.GraphEditor(graph)
    found = [n for n in graph.nodes if not n.domain and n.op in _PRODUCTS]
    count = sum(_defer(editor, node, _PRODUCTS[node.op]) for node in found)
    ir.remove_dead(graph)
    return count


@decomposition("MatMul")
def _behind_product(b: Builder) -> ir.Tensor | None:
    """The second rule."""
    w = b.node.inputs[1]
    if not isinstance(w, FactoredConstant) or w.weight.quantum is None or w.weight.stored.ndim != 2:
        return None
    quantum = w.weight.quantum
    k, n = w.weight.stored.shape
    if quantum.sizes[0] < k:
        return None
    weight = replace(w.weight, quantum=None)
    whole = FactoredConstant(b.editor.names.fresh(f"{w.name}.whole"), weight.value(), weight)
    factor = quantum.spread((1, n))[0] if quantum.numbers.size > 1 else quantum.numbers.reshape(())
    column = b.editor.constant(f"{w.name}.factor", np.array(factor))
    return b("Mul", b("MatMul", b.node.inputs[0], whole), column)


def _defer(editor: ir.GraphEditor, node: gs.Node, product: _Product) -> bool:
    bias = node.inputs[2] if len(node.inputs) > 2 and node.inputs[2].name else None
    left, right = (_unscaled(editor, t) for t in node.inputs[:2])
    if left is None or right is None or left.scale.ndim:
        return False
    if bias is not None and float(node.attrs.get("beta", 1.0)) != 1.0:
        return False
    if right.scale.ndim and (right.rank is None or right.axis != product.column(node, right.rank)):
        return False
    if right.rank is None and node.op == "Conv":
        return False
    column = [-1] + [1] * (0 if right.rank is None else product.behind(right.rank))
    factor = left.scale * right.scale * np.float32(node.attrs.pop("alpha", 1.0))
    tail = node
    if bias is None and not factor.ndim and not is_constant(node.inputs[1]):
        # Heads are merged first: what stands between a product and that would keep it from being one with an attention.
        tail = [node, *moved_on(editor.graph, node.outputs[0])][-1]
    node.inputs = [left.tensor, right.tensor]
    out = tail.outputs[0]
    products, scaled = (gs.Variable(editor.names.fresh(f"{out.name}.{n}")) for n in ("whole", "scaled"))
    tail.outputs = [products]
    scale = editor.constant(f"{out.name}.scale", factor.reshape(column) if factor.ndim else factor)
    editor.node("Mul", [products, scale], [out if bias is None else scaled], f"{out.name}.scaled")
    if bias is not None:
        if len(column) > 1:
            turned = gs.Variable(editor.names.fresh(f"{out.name}.bias"))
            target = editor.constant(f"{out.name}.column", np.array(column, np.int64))
            editor.node("Reshape", [bias, target], [turned], f"{out.name}.bias")
            bias = turned
        editor.node("Add", [scaled, bias], [out], f"{out.name}.biased")
    return True


def _unscaled(editor: ir.GraphEditor, tensor: ir.Tensor) -> _Scaled | None:
    """``tensor`` without its scale, if it is a DequantizeLinear's result or moves one."""
    moves = []
    while (move := ir.made_by(tensor, *_MOVES)) is not None and len(ir.consumers(tensor)) == 1:
        moves.append(move)
        tensor = move.inputs[0]
    node = ir.made_by(tensor, "DequantizeLinear")
    scale = None if node is None else ir.constant_value(node.inputs[1])
    if node is None or scale is None or scale.dtype != np.float32 or node.attrs.get("block_size", 0):
        return None
    x, *rest = node.inputs
    turns = ir.constant_value(x) is not None and all(m.op == "Transpose" and "perm" in m.attrs for m in moves)
    rank = len(ir.shape(x)) if turns else None
    axis = 0
    if scale.size == 1:
        scale = scale.reshape(())
    elif rank is None or scale.ndim != 1:
        return None
    else:
        axis = int(node.attrs.get("axis", 1)) % rank
        for move in reversed(moves):
            axis = list(move.attrs["perm"]).index(axis)
    one = editor.constant(f"{rest[0].name}.one", np.ones(ir.shape(rest[0]), np.float32))
    whole = _again(editor, node, [x, one, *rest[1:]])
    for move in reversed(moves):
        whole = _again(editor, move, [whole, *move.inputs[1:]])
    return _Scaled(scale, whole, rank, axis)


def _again(editor: ir.GraphEditor, node: gs.Node, inputs: list[ir.Tensor]) -> gs.Variable:
    """The result of ``node`` on other inputs."""
    out = gs.Variable(editor.names.fresh(f"{node.outputs[0].name}.whole"))
    editor.node(node.op, inputs, [out], node.name, **node.attrs)
    return out
