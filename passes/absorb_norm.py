"""A GEMM reads the raw tensor; what a norm, a gain or a scale did to it moves into the weights and the epilogue.

Rule: where the left operand of a constant-weight MatMul is affine in a raw tensor x,

    a = R · x · C + Σ rᵢ ⊗ cᵢ        (R, rᵢ: one number a row;  C, cᵢ: constants, one number a column)

then ``a @ W = R · (x @ (C W)) + Σ rᵢ ⊗ (cᵢ W)``: a row scale commutes with a right multiplication, a column scale folds
into the weights, a constant term into a bias, a rank-one term into a row times a vector (into a bias before R, where r is R). So x is read as it was stored.

LayerNorm's mean is such a term, with r = -mean(x)·R and c = C. It disappears: for *centred* weights, whose every
column of C W has its mean taken off, ``(x - mean(x)) @ (C W) = x @ centred(C W)`` exactly.

A column step is followed only on the way to a row factor: the bias or gain of the raw tensor itself stays in the epilogue
that produces it, where the row statistics are taken.

Conditions: the weights are a constant ``[K, N]``; x, the row factors and the result are float32. Folding is done in float64.

Accuracy: what the rank-one terms take off is part of the dot product as long as that is summed. Let ρ be the largest term, for LayerNorm
|mean| / std, in units of a's root mean square. The K roundings of partial sums, which are a random walk of up to ρ·√K/2 times a
product that returns to where it began, err by about ``ρ · 2⁻²⁴ · √(K / 18)`` of the result's largest value (the mean of t(1 - t) on [0, 1] is 1/6, a rounding's
deviation 1/√3 of its largest). ``BOUND`` is the most that is taken: ρ ≤ 36 at K = 384, ρ ≤ 11 at K = 4096. It is measured (``PassLog.measure``); beyond it
the product reads ``x - mean(x)``, which is made before it: the weights stay centred, so that the mean's own rounding cancels too. Without a
measurement ρ is taken to be small, and the log says so.
Refused: weights of other types; beyond the bound, a shift that is no mean; a norm that was measured to be faster as a kernel of its own
(``PassLog.absorbs``, which is asked once for all products that read it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge.ir import (
    Array,
    GraphEditor,
    Tensor,
    column_value,
    constant_value,
    consumers,
    in_order,
    producer,
    remove_dead,
    same_shape,
    shape,
    sole_consumer,
)
from coda_edge.symbolic import Dim, same
from coda_edge.weights import factored

from .base import Pass, PassLog

#: The largest error of a product, as a share of its largest value, that folding a shift into the weights may cause.
BOUND = 1e-5

#: A product of row tensors ``[…, 1]``, which may have one number for several rows, each to the power 1 or -1. Empty: one.
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

    def added_before(self, term: Term) -> int | None:
        """The row factor before which ``term`` is a column added to the product, if all factors from there on multiply it."""
        own, all_rows = ([(id(t), p) for t, p in rows] for rows in (term.rows, self.rows))
        first = len(all_rows) - len(own)
        return first if first >= 0 and own == all_rows[first:] else None

    def plus(self, term: Term) -> Affine:
        """This, plus a term."""
        return replace(self, terms=(*self.terms, term), trivial=False)


@dataclass(frozen=True)
class _Product:
    """A MatMul whose left operand is ``affine``."""

    node: gs.Node
    weights: Array
    affine: Affine

    @property
    def shifts(self) -> list[Term]:
        """The terms that take something of the input off its rows, or add it."""
        return [t for t in self.affine.terms if self.affine.added_before(t) is None]

    @property
    def bound(self) -> float:
        """The largest shift in units of the left operand's root mean square that float32 bears."""
        return BOUND / (2.0**-24 * math.sqrt(len(self.affine.column) / 18))


def run(graph: gs.Graph, log: PassLog) -> int:
    """Applies the rule to every constant-weight MatMul whose left operand is affine and not raw already."""
    editor = GraphEditor(graph)
    products = _wanted(_products(graph, log), log)
    shifts = _largest_shifts(graph, log, products)
    centred = _Centred(editor)
    count = 0
    for product in products:
        node = product.node
        affine = analyse(node.inputs[0])  # again: what it reads may have been rewritten
        mean = next((t for t in affine.terms if _is_mean(t, affine)), None)
        shift = shifts.get(id(node), 0.0)
        if shift > product.bound:
            reason = (
                f"rows are up to {shift:.0f} standard deviations off zero in the made-up inputs: in float32, a GEMM over "
                f"{len(affine.column)} columns takes off {product.bound:.0f} at most"
            )
            if mean is None:
                log.refuse(PASS.name, producer(node.inputs[0]) or node, reason)
                continue
            affine = replace(affine, raw=centred.of(affine.raw, log, reason))
        _rewrite(editor, node, product.weights.astype(np.float64), affine, mean)
        count += 1
    if count:
        remove_dead(graph)
    return count


class _Centred:
    """Tensors less the means of their rows, each made once."""

    def __init__(self, editor: GraphEditor) -> None:
        self._editor = editor
        self._made: dict[int, gs.Variable] = {}

    def of(self, raw: Tensor, log: PassLog, reason: str) -> gs.Variable:
        """``raw - mean(raw)``, whose node stands on its own for ``reason``."""
        if id(raw) not in self._made:
            moments = next(r for r in consumers(raw) if r.op == "RowMoments")
            made = self._editor.apply("Sub", [raw, moments.outputs[0]], shape(raw), f"{raw.name}.centred")
            log.refuse(PASS.name, made.inputs[0], reason)
            self._made[id(raw)] = made
        return self._made[id(raw)]


def _products(graph: gs.Graph, log: PassLog) -> list[_Product]:
    found = []
    for node in in_order(graph):
        weights = constant_value(node.inputs[1]) if node.op == "MatMul" else None
        if weights is None or weights.ndim != 2:
            continue
        if weights.dtype != np.float32:
            log.refuse(PASS.name, node, f"weights are {weights.dtype}: norms are absorbed in float32 only")
            continue
        affine = analyse(node.inputs[0])
        if not affine.trivial:
            found.append(_Product(node, weights, affine))
    return found


def _wanted(products: Sequence[_Product], log: PassLog) -> list[_Product]:
    """The products that are to do the norms that they read."""
    if log.absorbs is None:
        return list(products)
    widths: dict[int, int] = {}
    for p in products:
        read = id(p.node.inputs[0])
        widths[read] = widths.get(read, 0) + p.weights.shape[1]
    wanted = []
    for p in products:
        k, n = len(p.affine.column), widths[id(p.node.inputs[0])]
        if not p.affine.rows or log.absorbs(k, n, bool(p.shifts)):
            wanted.append(p)
        else:
            reason = f"ahead of {n} columns, this norm over {k} was measured to be faster as a kernel of its own"
            log.refuse(PASS.name, producer(p.node.inputs[0]) or p.node, reason)
    return wanted


def _largest_shifts(graph: gs.Graph, log: PassLog, products: Sequence[_Product]) -> dict[int, float]:
    """The largest shift of a row that each product would have to take off, by its node; nothing of those without one."""
    shifted = [p for p in products if p.shifts]
    if not shifted:
        return {}
    if log.measure is None:
        log.notes.append(
            f"{len(shifted)} GEMMs take rows' means off in their weights, which was not measured to be accurate: verification does that"
        )
        return {}
    tensors = {t.name: t for p in shifted for t in (p.node.inputs[0], *(r for s in p.shifts for r, _ in s.rows))}
    largest = {id(p.node): 0.0 for p in shifted}
    for values in log.measure(graph, list(tensors.values())):
        case = dict(zip(tensors, values, strict=True))
        for p in shifted:
            shift = max(_shift(case, term) for term in p.shifts)
            scale = _root_mean_square(case[p.node.inputs[0].name])
            largest[id(p.node)] = max(largest[id(p.node)], shift / scale if scale else 0.0)
    return largest


def _shift(case: Mapping[str, Array], term: Term) -> float:
    """The largest finite entry of the term's rows, times the root mean square of its column."""
    with np.errstate(all="ignore"):
        rows = np.abs(math.prod(case[t.name].astype(np.float64) ** p for t, p in term.rows))
    return float(rows.max(initial=0.0, where=np.isfinite(rows))) * _root_mean_square(term.column)


def _root_mean_square(values: Array) -> float:
    wide = values[np.isfinite(values)].astype(np.float64)
    return float(np.sqrt(np.mean(wide * wide))) if wide.size else 0.0


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
    """Whether ``tensor`` has one number for each row of ``like``, or for some rows together."""
    dims, whole = shape(tensor), (*shape(like)[:-1], 1)
    if constant_value(tensor) is not None or len(dims) > len(whole):
        return False
    return all(same(d, w) or same(d, 1) for d, w in zip(dims, whole[len(whole) - len(dims) :], strict=True))


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


def _rewrite(editor: GraphEditor, node: gs.Node, weights: Array, affine: Affine, mean: Term | None) -> None:
    """Lets ``node`` read the raw tensor. The term ``mean`` is taken off by centred weights."""
    out = node.outputs[0]
    dims = shape(out)
    folded, offset = affine.column[:, None] * weights, None
    terms = [t for t in affine.terms if t is not mean]
    if mean is not None:
        offset = folded.mean(axis=0)
        folded = folded - offset
    bias = sum((t.column @ weights for t in terms if not t.rows), np.zeros(weights.shape[1]))
    base = node.name or out.name
    name, values = f"{node.inputs[1].name}.folded", folded.astype(np.float32)
    w = factored(editor, name, values, node.inputs[1], affine.column, offset)
    y = editor.apply("MatMul", [affine.raw, w], dims, f"{base}.raw")
    for i, factor in enumerate(_factors(editor, affine.rows, base)):
        early = [t.column @ weights for t in terms if t.rows and affine.added_before(t) == i]
        if early:
            column = editor.constant(f"{base}.term", np.sum(early, axis=0).astype(np.float32))
            y = editor.apply("Add", [y, column], dims, f"{base}.shifted")
        y = editor.apply("Mul", [y, factor], dims, f"{base}.scaled")
    for term in (t for t in terms if affine.added_before(t) is None):
        vector = editor.constant(f"{base}.term", (term.column @ weights).astype(np.float32))
        first, *others = _factors(editor, term.rows, base)
        for other in others:
            first = editor.apply("Mul", [first, other], _broadcast(shape(first), shape(other)), f"{base}.shift")
        outer = editor.apply(
            "Mul", [first, vector], _broadcast(shape(first), (*(1 for _ in dims[1:]), dims[-1])), f"{base}.outer"
        )
        y = editor.apply("Add", [y, outer], dims, f"{base}.shifted")
    if np.any(bias) and not _join_bias(editor, out, bias):
        y = editor.apply("Add", [y, editor.constant(f"{base}.bias", bias.astype(np.float32))], dims, f"{base}.biased")
    editor.replace(out, y)


def _broadcast(a: Sequence[Dim], b: Sequence[Dim]) -> tuple[Dim, ...]:
    """The shape of two tensors of rows together."""
    rank = max(len(a), len(b))
    first, second = ((*(1 for _ in range(rank - len(dims))), *dims) for dims in (a, b))
    return tuple(q if same(p, 1) else p for p, q in zip(first, second, strict=True))


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


PASS = Pass("absorb_norm", run)
