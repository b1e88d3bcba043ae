"""Bands of keys: bool tensors over queries i and keys j that say ``first ≤ j - i ≤ last``, whatever made them.

Found are comparisons of counted positions (Range, CumSum of ones, tables of positions, with any offset), and constant tables of two
values whose diagonals are equal throughout, sliced or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs
import sympy

from coda_edge.attention import Band
from coda_edge.frontend import SymbolicInfo
from coda_edge.frontend.indexing import Formula, formulas
from coda_edge.ir import VIEWS, Array, Tensor, constant_value, made_by, producer, same_shape, shape
from coda_edge.symbolic import Dim, nonnegative, simplify

_MOST_ELEMENTS = 1 << 25
_COMPARISONS = frozenset({"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"})
_MIRRORED = {
    "Equal": "Equal",
    "Less": "Greater",
    "LessOrEqual": "GreaterOrEqual",
    "Greater": "Less",
    "GreaterOrEqual": "LessOrEqual",
}


@dataclass(frozen=True)
class Table:
    """A tensor that is ``inside`` in a band and ``outside`` elsewhere."""

    band: Band
    inside: float
    outside: float


@dataclass
class Bands:
    """Looks for bands in a graph."""

    graph: gs.Graph
    info: SymbolicInfo
    _formulas: dict[str, Formula] = field(default_factory=dict)
    _tables: dict[int, Table | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._formulas = formulas(self.graph, self.info)

    def compared(self, tensor: Tensor, queries: Dim, keys: Dim) -> tuple[Band, bool] | None:
        """The band that a comparison of positions is, over tensors ``[…, queries, keys]``, and whether it is true there."""
        node = made_by(tensor, *_COMPARISONS)
        dims = shape(tensor)
        if node is None or node.domain or len(dims) < 2:
            return None
        op, (a, b) = node.op, node.inputs
        if made_by(b, "Abs") is not None:
            op, a, b = _MIRRORED[op], b, a
        distance = made_by(a, "Abs")
        if distance is None:
            ascending = self._apart(a, b, dims)
            return None if ascending is None else (trimmed(_band(op, *ascending), queries, keys), True)
        # |x| ≤ most is x ≤ most and x ≥ -most; |x| > most is its opposite.
        apart, most = self._apart(distance.inputs[0], None, dims), self._formula(b)
        if apart is None or most is None or most.terms() != ({}, most.value) or op == "Equal":
            return None
        limit = simplify(most.value - (op in ("Less", "GreaterOrEqual")))
        sides = [
            _band(o, apart[0], simplify(apart[1] + shift))
            for o, shift in (("LessOrEqual", -limit), ("GreaterOrEqual", limit))
        ]
        first, last = (next((d for d in ds if d is not None), None) for ds in zip(*map(_bounds, sides), strict=True))
        return trimmed(Band(first, last), queries, keys), op in ("Less", "LessOrEqual")

    def _apart(self, a: Tensor, b: Tensor | None, dims: tuple[Dim, ...]) -> tuple[bool, Dim] | None:
        """``a - b`` as ``±(j - i) + rest``: whether it is plus, and the rest."""
        left, right = self._formula(a), Formula(0, ()) if b is None else self._formula(b)
        if left is None or right is None:
            return None
        difference = sympy.sympify(left.aligned(dims).value) - sympy.sympify(right.aligned(dims).value)
        terms = Formula(simplify(difference), dims).terms()
        i, j = len(dims) - 2, len(dims) - 1
        if terms is None or terms[0] not in ({j: 1, i: -1}, {j: -1, i: 1}):
            return None
        return terms[0][j] == 1, terms[1]

    def _formula(self, tensor: Tensor) -> Formula | None:
        return Formula.of(tensor) if isinstance(tensor, gs.Constant) else self._formulas.get(tensor.name)

    def table(self, tensor: Tensor, queries: Dim, keys: Dim) -> Table | None:
        """The two-valued table that a constant is, or a slice of one."""
        source, row, column = self._part(tensor)
        value = constant_value(source)
        if value is None or value.ndim < 2 or not 0 < value.size <= _MOST_ELEMENTS:
            return None
        if id(source) not in self._tables:
            self._tables[id(source)] = _as_table(value)
        found = self._tables[id(source)]
        if found is None:
            return None
        shift = simplify(sympy.sympify(row) - sympy.sympify(column))
        moved = Band(*(None if d is None else simplify(d + shift) for d in (found.band.first, found.band.last)))
        return Table(trimmed(moved, queries, keys), found.inside, found.outside)

    def _part(self, tensor: Tensor) -> tuple[Tensor, Dim, Dim]:
        """What ``tensor`` is a part of, from which row and column on."""
        row: Dim = 0
        column: Dim = 0
        while True:
            node = producer(tensor)
            if node is None or node.domain:
                return tensor, row, column
            dims = shape(node.outputs[0])
            if node.op in VIEWS and same_shape(_squeezed(shape(node.inputs[0])), _squeezed(dims)):
                tensor = node.inputs[0]
                continue
            found = self._starts(node) if node.op == "Slice" else None
            if found is None:
                return tensor, row, column
            rank = len(dims)
            if any(axis % rank < rank - 2 and dims[axis] != 1 for axis in found):
                return tensor, row, column
            row = simplify(row + found.get(rank - 2, 0))
            column = simplify(column + found.get(rank - 1, 0))
            tensor = node.inputs[0]

    def _starts(self, node: gs.Node) -> dict[int, Dim] | None:
        """Where a Slice with steps of 1 begins on each of its axes."""
        given = [self._value(t) for t in node.inputs[1:]]
        rank = len(shape(node.inputs[0]))
        if any(v is None for v in given) or (len(given) > 3 and any(s != 1 for s in given[3] or ())):
            return None
        starts, axes = given[0] or [], (given[2] if len(given) > 2 else None) or list(range(rank))
        found: dict[int, Dim] = {}
        for start, axis in zip(starts, axes, strict=False):
            if not isinstance(axis, int) or not nonnegative(start):
                return None
            found[axis % rank] = start
        return found

    def _value(self, tensor: Tensor) -> list[Dim] | None:
        value = constant_value(tensor)
        if value is not None:
            return [int(v) for v in value.reshape(-1)]
        known = self.info.values.get(tensor.name)
        return None if known is None else list(known.reshape(-1))


def _bounds(band: Band) -> tuple[Dim | None, Dim | None]:
    return band.first, band.last


def _squeezed(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    lead = next((i for i, d in enumerate(dims[:-2]) if d != 1), max(len(dims) - 2, 0))
    return dims[lead:]


def _band(op: str, ascending: bool, rest: Dim) -> Band:
    """Where ``±(j - i) + rest`` compares to 0 as ``op`` says."""
    if op == "Equal":
        place = simplify(-rest if ascending else rest)
        return Band(place, place)
    # As ±(j - i) + rest ≤ bound or ≥ bound.
    bound = {"Less": -1, "LessOrEqual": 0, "Greater": 1, "GreaterOrEqual": 0}[op]
    below = op in ("Less", "LessOrEqual")
    place = simplify(bound - rest if ascending else rest - bound)
    return Band(None, place) if below == ascending else Band(place, None)


def trimmed(band: Band, queries: Dim, keys: Dim) -> Band:
    """The band without bounds that hold for every query and key."""
    first, last = band.first, band.last
    if first is not None and nonnegative(simplify(1 - sympy.sympify(queries) - sympy.sympify(first))):
        first = None
    if last is not None and nonnegative(simplify(sympy.sympify(last) + 1 - sympy.sympify(keys))):
        last = None
    return Band(first, last)


def _as_table(value: Array) -> Table | None:
    """The band that the one matrix in ``value`` is, of two values."""
    if int(np.prod(value.shape[:-2])) != 1 or value.dtype.kind not in "fbiu":
        return None
    matrix = value.reshape(value.shape[-2:])
    first = matrix.reshape(-1)[0]
    same = matrix == first
    other = matrix[~same]
    if not other.size or (other != other[0]).any():
        return None
    for inside, values in ((same, (first, other[0])), (~same, (other[0], first))):
        band = _matrix_band(inside)
        if band is not None:
            return Table(band, float(values[0]), float(values[1]))
    return None


def _matrix_band(inside: Array) -> Band | None:
    rows, columns = inside.shape
    diagonals = np.concatenate([inside[:0:-1, 0], inside[0]])  # j - i from 1 - rows to columns - 1
    places = np.flatnonzero(diagonals)
    if not places.size or places[-1] - places[0] + 1 != places.size:
        return None
    first, last = int(places[0]) - rows + 1, int(places[-1]) - rows + 1
    wanted = np.triu(np.tril(np.ones((rows, columns), bool), last), first)
    if not np.array_equal(inside, wanted):
        return None
    return Band(None if first == 1 - rows else first, None if last == columns - 1 else last)
