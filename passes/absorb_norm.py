"""A GEMM reads the raw tensor; what a norm, a gain or a scale did to it moves into the weights and the epilogue.

Rule: where the left operand of a constant-weight MatMul is affine in a raw tensor x,

    a = R · x · C + Σ rᵢ ⊗ cᵢ        (R, rᵢ: one number a row;  C, cᵢ: constants, one number a column)

then ``a @ W = R · (x @ (C W)) + Σ rᵢ ⊗ (cᵢ W)``: a row scale commutes with a right multiplication, a column scale folds
into the weights, a constant term into a bias, a rank-one term into a row times a vector. So x is read as it was stored.

LayerNorm's mean is such a term, with r = -mean(x)·R and c = C. It disappears: for *centred* weights, whose every
column of C W has its mean taken off, ``(x - mean(x)) @ (C W) = x @ centred(C W)`` exactly.

A column step is followed only on the way to a row factor: the bias or gain of the raw tensor itself stays in the epilogue
that produces it, where the row statistics are taken.

Conditions: the weights are a constant ``[K, N]``; x, the row factors and the result are floating point of one dtype. Folding is done in float64.
The centred form loses about log2(|mean| / std) bits of the dot product, no more than storing x in float32 has lost already.
Refused: half-precision x (|mean| ≫ std would cancel in the sum), and terms that depend on more than one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge.ir import (
    Array,
    GraphEditor,
    Tensor,
    column_value,
    constant_value,
    in_order,
    producer,
    remove_dead,
    same_shape,
    shape,
    sole_consumer,
)

from .base import Pass, PassLog

#: A product of row tensors ``[…, 1]``, each to the power 1 or -1. Empty: one.
Rows = tuple[tuple[Tensor, int], ...]


@dataclass(frozen=True)
class Term:
    """A rank-one term: row factors times a constant column vector ``[K]``."""

    rows: Rows
    column: Array


@dataclass(frozen=True)
class Affine:
    """``rows · raw · column + Σ terms``, raw being ``[…, K]`` and column ``[K]`` in float64."""

    raw: Tensor
    rows: Rows
    column: Array
    terms: tuple[Term, ...]
    trivial: bool = True

    def scaled(self, rows: Rows, column: Array | float) -> Affine:
        """This, times row factors and a column."""
        return Affine(
            self.raw,
            self.rows + rows,
            self.column * column,
            tuple(Term(t.rows + rows, t.column * column) for t in self.terms),
            False,
        )

    def plus(self, term: Term) -> Affine:
        """This, plus a term."""
        return replace(self, terms=(*self.terms, term), trivial=False)


def run(graph: gs.Graph, log: PassLog) -> int:
    """Applies the rule to every constant-weight MatMul whose left operand is affine and not raw already."""
    editor = GraphEditor(graph)
    count = 0
    for node in in_order(graph):
        weights = constant_value(node.inputs[1]) if node.op == "MatMul" else None
        if weights is None or weights.ndim != 2:
            continue
        if weights.dtype != np.float32:
            log.refuse(PASS.name, node, f"weights are {weights.dtype}: norms are absorbed in float32 only")
            continue
        affine = analyse(node.inputs[0])
        if affine.trivial:
            continue
        _rewrite(editor, node, weights.astype(np.float64), affine)
        count += 1
    if count:
        remove_dead(graph)
    return count


def analyse(tensor: Tensor) -> Affine:
    """The affine form of ``tensor`` in the rawest tensor that it can be followed to."""
    k = int(shape(tensor)[-1]) if isinstance(shape(tensor)[-1], int) else 0
    leaf = Affine(tensor, (), np.ones(k), ())
    node = producer(tensor)
    if node is None or node.op not in _RULES or not k or tensor.dtype != np.float32:
        return leaf
    a, b = node.inputs
    for x, other, swapped in ((a, b, False), (b, a, True)):
        if constant_value(x) is not None or not same_shape(shape(x), shape(tensor)):
            continue
        found = _RULES[node.op](x, other, swapped, k)
        if found is not None:
            return found
    return leaf


def _row(tensor: Tensor, like: Tensor) -> bool:
    dims = shape(tensor)
    return constant_value(tensor) is None and same_shape(dims, (*shape(like)[:-1], 1))


def _add(x: Tensor, other: Tensor, swapped: bool, k: int) -> Affine | None:
    column = column_value(other, k)
    if column is not None:
        inner = analyse(x)
        return None if inner.trivial else inner.plus(Term((), column.astype(np.float64)))
    return analyse(x).plus(Term(((other, 1),), np.ones(k))) if _row(other, x) else None


def _sub(x: Tensor, other: Tensor, swapped: bool, k: int) -> Affine | None:
    added = _add(x, other, swapped, k)
    if added is None:
        return None
    last = added.terms[-1]
    negated = replace(added, terms=(*added.terms[:-1], Term(last.rows, -last.column)))
    return negated.scaled((), -1.0) if swapped else negated


def _mul(x: Tensor, other: Tensor, swapped: bool, k: int) -> Affine | None:
    column = column_value(other, k)
    if column is not None:
        inner = analyse(x)
        return None if inner.trivial else inner.scaled((), column.astype(np.float64))
    return analyse(x).scaled(((other, 1),), 1.0) if _row(other, x) else None


def _div(x: Tensor, other: Tensor, swapped: bool, k: int) -> Affine | None:
    if swapped:
        return None
    column = column_value(other, k)
    if column is not None:
        inner = analyse(x)
        return None if inner.trivial else inner.scaled((), 1.0 / column.astype(np.float64))
    return analyse(x).scaled(((other, -1),), 1.0) if _row(other, x) else None


_RULES = {"Add": _add, "Sub": _sub, "Mul": _mul, "Div": _div}


def _rewrite(editor: GraphEditor, node: gs.Node, weights: Array, affine: Affine) -> None:
    out = node.outputs[0]
    dims = shape(out)
    folded = affine.column[:, None] * weights
    terms = list(affine.terms)
    mean = next((t for t in terms if _is_mean(t, affine)), None)
    if mean is not None:
        terms = [t for t in terms if t is not mean]
        folded = folded - folded.mean(axis=0, keepdims=True)
    bias = sum((t.column @ weights for t in terms if not t.rows), np.zeros(weights.shape[1]))
    base = node.name or out.name
    w = editor.constant(f"{node.inputs[1].name}.folded", folded.astype(np.float32))
    y = editor.apply("MatMul", [affine.raw, w], dims, f"{base}.raw")
    y = _times(editor, y, affine.rows, base)
    for term in (t for t in terms if t.rows):
        vector = editor.constant(f"{base}.term", (term.column @ weights).astype(np.float32))
        first, *others = _factors(editor, term.rows, base)
        outer = editor.apply("Mul", [first, vector], dims, f"{base}.outer")
        for factor in others:
            outer = editor.apply("Mul", [outer, factor], dims, f"{base}.outer")
        y = editor.apply("Add", [y, outer], dims, f"{base}.shifted")
    if np.any(bias) and not _join_bias(editor, out, bias):
        y = editor.apply("Add", [y, editor.constant(f"{base}.bias", bias.astype(np.float32))], dims, f"{base}.biased")
    editor.replace(out, y)


def _join_bias(editor: GraphEditor, out: gs.Variable, bias: Array) -> bool:
    """Adds ``bias`` to the constant that the only reader of ``out`` adds to it anyway, if that is so."""
    reader = sole_consumer(editor.graph, out)
    if reader is None or reader.op != "Add" or not same_shape(shape(reader.outputs[0]), shape(out)):
        return False
    other = next(t for t in (*reader.inputs, out) if t is not out or reader.inputs[0] is reader.inputs[1])
    column = column_value(other, len(bias))
    if column is None:
        return False
    joined = editor.constant(f"{other.name}.folded", (column.astype(np.float64) + bias).astype(np.float32))
    reader.inputs = [joined if t is other else t for t in reader.inputs]
    return True


def _is_mean(term: Term, affine: Affine) -> bool:
    """Whether ``term`` takes off the mean of the raw tensor: -mean(raw) · rows ⊗ column."""
    for tensor, power in term.rows:
        source = producer(tensor)
        if power != 1 or source is None or source.op != "RowMoments":
            continue
        if source.outputs[0] is tensor and source.inputs[0] is affine.raw:
            rest = [r for r in term.rows if r[0] is not tensor]
            return _same_rows(rest, affine.rows) and bool(np.array_equal(term.column, -affine.column))
    return False


def _same_rows(a: Sequence[tuple[Tensor, int]], b: Sequence[tuple[Tensor, int]]) -> bool:
    return sorted((id(t), p) for t, p in a) == sorted((id(t), p) for t, p in b)


def _factors(editor: GraphEditor, rows: Rows, base: str) -> list[Tensor]:
    """Row tensors to multiply by: an inverse is computed once a row, not once an element."""
    return [t if p == 1 else editor.apply("Reciprocal", [t], shape(t), f"{base}.inverse") for t, p in rows]


def _times(editor: GraphEditor, y: gs.Variable, rows: Rows, base: str) -> gs.Variable:
    for factor in _factors(editor, rows, base):
        y = editor.apply("Mul", [y, factor], shape(y), f"{base}.scaled")
    return y


PASS = Pass("absorb_norm", run)
