"""Einsum in MatMul, Mul, ReduceSum and movement.

Rule for two operands: an index of both is *batch* if the result has it, else *contracted*; an index of one alone that the result
lacks is summed before. Then ``x[batch, left, contracted] @ y[batch, contracted, right]`` is the result up to a transpose; with nothing
contracted it is a product of broadcast tensors. More operands are taken from the left, two at a time.

Source: the ONNX specification of Einsum, opset 12. Left alone: an index that repeats within a term (a diagonal), and reshapes
whose sizes numbers, 0 and -1 cannot say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from .. import ir
from ..symbolic import Dim, simplify
from .builder import Builder, decomposition
from .shape_rules import einsum_terms
from .sizes import reshape_target


@dataclass(frozen=True)
class _Term:
    """A tensor and the index of each of its axes."""

    tensor: ir.Tensor
    indices: str


class _Unspeakable(Exception):
    """A reshape that no constant target expresses."""


@decomposition("Einsum")
def _einsum(b: Builder) -> ir.Tensor | None:
    ranks = [b.rank(i) for i in range(len(b.node.inputs))]
    indices, result = einsum_terms(b.attr("equation", ""), ranks)
    if any(len(set(i)) < len(i) for i in (*indices, result)):
        return None
    terms = [_Term(t, i) for t, i in zip(b.node.inputs, indices, strict=True)]
    sizes = {c: d for term in terms for c, d in zip(term.indices, ir.shape(term.tensor), strict=True)}
    try:
        first, *rest = terms
        for k, other in enumerate(rest):
            later = "".join(t.indices for t in rest[k + 1 :])
            first = _product(b, first, other, result, result + later, sizes)
        return _ordered(b, _summed(b, first, result), result).tensor
    except _Unspeakable:
        return None


def _product(b: Builder, x: _Term, y: _Term, result: str, kept: str, sizes: Mapping[str, Dim]) -> _Term:
    """The product of two terms over the indices that ``kept`` lacks, its axes in the order of ``result`` where that is free."""
    x, y = _summed(b, x, y.indices + kept), _summed(b, y, x.indices + kept)
    shared = [c for c in x.indices if c in y.indices]
    contracted = "".join(c for c in shared if c not in kept)
    if not contracted:
        return _outer(b, x, y)
    # What the result has first are the rows, so that it needs no transpose.
    if _first(x, y, result) > _first(y, x, result):
        x, y = y, x
    batch = "".join(c for c in sorted(shared, key=(result + kept).find) if c in kept)
    left = "".join(c for c in x.indices if c not in shared)
    right = "".join(c for c in y.indices if c not in shared)
    rows = [*left] if not batch and left else [left]
    lead = ""
    if batch and len(left) > 1 and _target([*batch, left, right], [*batch, *left, *right], sizes) is None:
        # Rows of two dynamic sizes cannot be told apart again: all but the last stay axes that y is broadcast along.
        lead, left = left[:-1], left[-1]
        rows = [left]
    a = _grouped(b, _ordered(b, x, lead + batch + left + contracted), [*lead, *batch, *rows, contracted], sizes)
    w = _grouped(b, _ordered(b, y, batch + contracted + right), [*batch, contracted, right], sizes)
    out = _Term(b("MatMul", a, w), lead + batch + left + right)
    return _Term(_reshaped(b, out.tensor, [*lead, *batch, *rows, right], [*out.indices], sizes), out.indices)


def _first(x: _Term, y: _Term, result: str) -> int:
    own = [result.index(c) for c in x.indices if c not in y.indices and c in result]
    return min(own, default=len(result))


def _outer(b: Builder, x: _Term, y: _Term) -> _Term:
    """The product of two terms that share only what stays."""
    indices = x.indices + "".join(c for c in y.indices if c not in x.indices)
    factors = []
    for term in (x, y):
        ordered = _ordered(b, term, "".join(c for c in indices if c in term.indices))
        missing = [i for i, c in enumerate(indices) if c not in term.indices]
        factors.append(b("Unsqueeze", ordered.tensor, missing) if missing else ordered.tensor)
    return _Term(b("Mul", *factors), indices)


def _summed(b: Builder, term: _Term, kept: str) -> _Term:
    """``term`` summed over the indices that ``kept`` lacks."""
    axes = [i for i, c in enumerate(term.indices) if c not in kept]
    if not axes:
        return term
    left = "".join(c for c in term.indices if c in kept)
    return _Term(b("ReduceSum", term.tensor, axes, keepdims=0), left)


def _ordered(b: Builder, term: _Term, indices: str) -> _Term:
    if term.indices == indices:
        return term
    return _Term(b("Transpose", term.tensor, perm=[term.indices.index(c) for c in indices]), indices)


def _grouped(b: Builder, term: _Term, groups: Sequence[str], sizes: Mapping[str, Dim]) -> ir.Tensor:
    return _reshaped(b, term.tensor, [*term.indices], groups, sizes)


def _reshaped(
    b: Builder, tensor: ir.Tensor, have: Sequence[str], want: Sequence[str], sizes: Mapping[str, Dim]
) -> ir.Tensor:
    """``tensor``, each of whose axes is the indices of an item of ``have``, with axes as in ``want``; an empty item is an axis of 1."""
    if list(have) == list(want):
        return tensor
    target = _target(have, want, sizes)
    if target is None:
        raise _Unspeakable
    return b("Reshape", tensor, target)


def _target(have: Sequence[str], want: Sequence[str], sizes: Mapping[str, Dim]) -> list[int] | None:
    """The target of such a reshape; None if none expresses it."""
    before, after = (
        [sizes[g] if len(g) == 1 else simplify(prod(sizes[c] for c in g)) for g in groups] for groups in (have, want)
    )
    return reshape_target(before, after)
