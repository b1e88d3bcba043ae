"""Operators that move elements: each is a map from the indices of the output to those of an input. Nothing is stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import sympy
from tvm import tirx

from ..errors import UnsupportedOperator
from ..symbolic import Dim, same, simplify
from .emit import Expr, as_int, dtype_of, int64
from .registry import Application, View, broadcast, constant, elements, pointwise

_FAR = 1 << 31  # exporters write the end of an axis as a number at least this large


@pointwise("Reshape", "Squeeze", "Unsqueeze", "Flatten")
def reshape(op: Application) -> View:
    """Reshape and its kin: the same elements in the same order."""
    return reshaped(op.view(0), op)


def reshaped(source: View, op: Application) -> View:
    """``source`` in the shape of the output of ``op``; only axes that do not line up cost a division."""
    groups = _groups(source.shape, op.shape)

    def at(indices: Sequence[Expr]) -> Expr:
        result = [int64(0)] * len(source.shape)
        for inside, outside in groups:
            linear = op.emit.ravel([indices[i] for i in outside], [op.shape[i] for i in outside])
            for axis, index in zip(inside, op.emit.unravel(linear, [source.shape[i] for i in inside]), strict=True):
                result[axis] = index
        return source.at(result)

    return op.result(at)


def _groups(source: Sequence[Dim], target: Sequence[Dim]) -> list[tuple[list[int], list[int]]]:
    """Runs of source and target axes, of equal numbers of elements and as short as they can be told apart."""
    left = [i for i, dim in enumerate(source) if dim != 1]
    right = [i for i, dim in enumerate(target) if dim != 1]
    groups: list[tuple[list[int], list[int]]] = []
    while left or right:
        inside, outside = left[:1], right[:1]
        left, right = left[1:], right[1:]
        while True:
            a, b = (sympy.Mul(*(d[i] for i in axes)) for d, axes in ((source, inside), (target, outside)))
            if same(a, b) or not (left or right):
                break
            if left and (_smaller(a, b) or not right):
                inside.append(left.pop(0))
            else:
                outside.append(right.pop(0))
        groups.append((inside, outside))
    return groups


def _smaller(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Whether ``a`` is behind ``b``: a proper factor of it, as far as can be told."""
    ratio = sympy.cancel(b / a) if a != 0 else sympy.Integer(0)
    return bool(ratio > 1) if ratio.is_number else bool(sympy.fraction(ratio)[1].is_number)


@pointwise("Transpose")
def transpose(op: Application) -> View:
    """Transpose: by default the axes in reverse order."""
    source = op.view(0)
    rank = len(source.shape)
    perm = list(op.attribute("perm", range(rank)[::-1]))
    place = [perm.index(axis) for axis in range(rank)]
    return op.result(lambda idx: source.at([idx[i] for i in place]))


@pointwise("Expand")
def expand(op: Application) -> View:
    """Expand: broadcasting by itself."""
    source = op.view(0)
    return op.result(lambda idx: source.at(broadcast(idx, source.shape)))


@pointwise("Tile")
def tile(op: Application) -> View:
    """Tile: each axis repeats."""
    source = op.view(0)

    def at(indices: Sequence[Expr]) -> Expr:
        return source.at([_wrapped(op, i, a, b) for i, a, b in zip(indices, source.shape, op.shape, strict=True)])

    return op.result(at)


def _wrapped(op: Application, index: Expr, dim: Dim, out: Dim) -> Expr:
    if same(dim, out):
        return index
    return int64(0) if dim == 1 else op.emit.divmod(index, op.emit.size(dim))[1]


@pointwise("Slice")
def slice_(op: Application) -> View:
    """Slice: constant axes and steps; starts may be computed when the kernel runs."""
    source = op.view(0)
    count = op.view(1).shape[0]
    if not isinstance(count, int):
        raise UnsupportedOperator("Slice", op.node.name, "the number of axes must be static")
    axes = op.constants(3, range(count))
    steps = op.constants(4, [1] * count)

    def at(indices: Sequence[Expr]) -> Expr:
        moved = list(indices)
        for position, (axis, step) in enumerate(zip(axes, steps, strict=True)):
            axis %= len(source.shape)
            if step == 1 and same(source.shape[axis], op.shape[axis]):
                continue
            start = _start(op, op.view(1).at([int64(position)]), op.emit.size(source.shape[axis]), step)
            moved[axis] = start + indices[axis] * int64(step)
        return source.at(moved)

    return op.result(at)


def _start(op: Application, start: Expr, size: Expr, step: int) -> Expr:
    """A Slice start as an index: negative counts from the end, then clamped to the axis."""
    known, extent = as_int(start), as_int(size)
    if known is not None and extent is not None:
        at = known + extent if known < 0 else known
        return int64(min(max(at, 0), extent - 1 if step < 0 else extent))
    if known is not None and known >= _FAR:
        return size - int64(1) if step < 0 else size
    start = tirx.Cast("int64", start)
    last = size - int64(1) if step < 0 else size
    positive = tirx.Select(start < int64(0), start + size, start)
    return op.emit.bind(tirx.max(tirx.min(positive, last), int64(0)))


@pointwise("Concat")
def concat(op: Application) -> View:
    """Concat: which input an element comes from is decided once for a run of the axis, not for each element."""
    pieces = [v for v in op.inputs if v is not None and v.shape[int(op.attribute("axis", 0))] != 0]
    axis = int(op.attribute("axis", 0)) % len(op.shape)
    ends: list[Dim] = []
    for piece in pieces:
        ends.append(simplify((ends[-1] if ends else 0) + piece.shape[axis]))
    run = math.gcd(*(p.shape[axis] for p in pieces)) if all(isinstance(p.shape[axis], int) for p in pieces) else 1

    def at(indices: Sequence[Expr]) -> Expr:
        index = indices[axis]
        place, unit = index, 1
        if run > 1 and op.emit.varies(index):
            place, unit = op.emit.divmod(index, int64(run))[0], run

        def inside(k: int) -> Expr:
            start = ends[k - 1] if k else 0
            return pieces[k].at([*indices[:axis], index - op.emit.size(start), *indices[axis + 1 :]])

        def choose(k: int) -> Expr:
            if k == len(pieces) - 1:
                return inside(k)
            end = ends[k]
            limit = int64(end // unit) if isinstance(end, int) else op.emit.size(end)
            return op.emit.branch(place < limit, lambda: inside(k), lambda: choose(k + 1), op.dtype)

        return choose(0)

    return op.result(at)


@pointwise("Pad")
def pad(op: Application) -> View:
    """Pad by amounts that may be negative, and computed when the kernel runs: constant, edge, reflect and wrap."""
    source, rank = op.view(0), len(op.shape)
    mode = op.attribute("mode", "constant")
    axes = [a % rank for a in op.constants(3, range(rank))]
    amounts = [e if dtype_of(e) == "int64" else tirx.Cast("int64", e) for e in elements(op.view(1))]
    before = dict(zip(axes, amounts[: len(axes)], strict=True))
    filler = op.optional(2)

    def at(indices: Sequence[Expr]) -> Expr:
        moved = [i - before[axis] if axis in before else i for axis, i in enumerate(indices)]
        if mode != "constant":
            return source.at([_FOLD[mode](i, op.emit.size(d)) for i, d in zip(moved, source.shape, strict=True)])
        checks = [
            check
            for axis, (i, dim, out) in enumerate(zip(moved, source.shape, op.shape, strict=True))
            if axis in before and not (same(dim, out) and as_int(before[axis]) == 0)
            for check in (i >= int64(0), i < op.emit.size(dim))
        ]
        fill = filler.at([int64(0)] * len(filler.shape)) if filler is not None else constant(0, op.dtype)
        if not checks:
            return source.at(moved)
        return op.emit.branch(tirx.all(*checks), lambda: source.at(moved), lambda: fill, op.dtype)

    return op.result(at)


def _reflect(index: Expr, size: Expr) -> Expr:
    low = tirx.Select(index < int64(0), int64(0) - index, index)
    return tirx.Select(low >= size, int64(2) * size - int64(2) - low, low)


_FOLD: dict[str, Callable[[Expr, Expr], Expr]] = {
    "edge": lambda i, n: tirx.max(tirx.min(i, n - int64(1)), int64(0)),
    "reflect": _reflect,
    "wrap": lambda i, n: tirx.Select(i < int64(0), i + n, tirx.Select(i >= n, i - n, i)),
}


@pointwise("Gather")
def gather(op: Application) -> View:
    """Gather: indices may be negative; one out of range ends the kernel with an error."""
    data, places = op.view(0), op.view(1)
    axis = int(op.attribute("axis", 0)) % len(data.shape)
    rank = len(places.shape)

    def at(indices: Sequence[Expr]) -> Expr:
        place = checked(op, places.at(indices[axis : axis + rank]), data.shape[axis])
        return data.at([*indices[:axis], place, *indices[axis + rank :]])

    return op.result(at)


def checked(op: Application, index: Expr, dim: Dim) -> Expr:
    """An index that the model gave, made non-negative and required to be in range."""
    size = op.emit.size(dim)
    index = index if dtype_of(index) == "int64" else tirx.Cast("int64", index)
    known = as_int(index)
    if known is not None:
        index = int64(known) if known >= 0 else size + index
        if isinstance(dim, int) and 0 <= (known if known >= 0 else known + dim) < dim:
            return index
    else:
        index = op.emit.bind(tirx.Select(index < int64(0), index + size, index))
    op.emit.require(tirx.all(index >= int64(0), index < size))
    return index


@pointwise("GatherElements")
def gather_elements(op: Application) -> View:
    """GatherElements: an index for each output element."""
    data, places = op.view(0), op.view(1)
    axis = int(op.attribute("axis", 0)) % len(data.shape)

    def at(indices: Sequence[Expr]) -> Expr:
        moved = list(indices)
        moved[axis] = checked(op, places.at(indices), data.shape[axis])
        return data.at(moved)

    return op.result(at)


@pointwise("GatherND")
def gather_nd(op: Application) -> View:
    """GatherND: the last axis of the indices, of static length, holds a place in ``data`` after the batch axes."""
    data, places = op.view(0), op.view(1)
    batch = int(op.attribute("batch_dims", 0))
    depth = places.shape[-1]
    if not isinstance(depth, int):
        raise UnsupportedOperator("GatherND", op.node.name, "the last dimension of the indices must be static")
    rank = len(places.shape) - 1

    def at(indices: Sequence[Expr]) -> Expr:
        tuple_ = [checked(op, places.at([*indices[:rank], int64(k)]), data.shape[batch + k]) for k in range(depth)]
        return data.at([*indices[:batch], *tuple_, *indices[rank:]])

    return op.result(at)


@pointwise("Trilu")
def trilu(op: Application) -> View:
    """Trilu: the upper (or lower) triangle, shifted by the scalar ``k``."""
    source, upper = op.view(0), op.attribute("upper", 1)
    shift = op.optional(1)

    def at(indices: Sequence[Expr]) -> Expr:
        k = shift.at([int64(0)] * len(shift.shape)) if shift is not None else int64(0)
        above = indices[-1] - indices[-2]
        keep = above >= k if upper else above <= k
        return tirx.Select(keep, source.at(indices), constant(0, op.dtype))

    return op.result(at)
