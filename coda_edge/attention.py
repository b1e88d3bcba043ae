"""What a ``coda.Attention`` node says: its operands by role, and the bands of keys that its queries see.

Inputs, in order: q ``[B|1, H, Sq, D]``, k ``[B|1, Hkv, Sk, D]``, v ``[B|1, Hkv, Sk, Dv]``; with attribute ``past`` the rows that go
before those of k and v, alike but for their number; with ``sink`` a score ``[B|1, H|1, Sq|1, 1]`` of a key without a value; the operands of the
score program. Attribute ``probability``: the program, if there is one, of what becomes of a probability before it meets the values. Outputs: ``[B, Sq, H·Dv]``, and with ``present`` all rows of k and of v. Sk below is the number of all keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_graphsurgeon as gs
import sympy

from .ir import Tensor, same_shape, shape
from .symbolic import Dim, format_dim, parse_dim, simplify, symbol

QUERIES, KEYS = symbol("queries"), symbol("keys")
_BETWEEN, _AND = "..", "; "


@dataclass(frozen=True)
class Band:
    """The keys j of query i with ``first ≤ j - i ≤ last``; None is no bound. Bounds are in sizes, on a node in ``queries`` and ``keys``."""

    first: Dim | None
    last: Dim | None

    @classmethod
    def parse(cls, text: str) -> Band:
        """The band that ``str`` wrote."""
        first, last = text.split(_BETWEEN)
        return cls(parse_dim(first) if first else None, parse_dim(last) if last else None)

    def __str__(self) -> str:
        return _BETWEEN.join("" if d is None else str(format_dim(d)) for d in (self.first, self.last))

    def at(self, queries: Dim, keys: Dim) -> Band:
        """The band with ``queries`` and ``keys`` put in."""
        sizes = {QUERIES: queries, KEYS: keys}
        return Band(
            *(d if d is None or isinstance(d, int) else simplify(d.xreplace(sizes)) for d in (self.first, self.last))
        )

    def of_node(self, queries: Dim, keys: Dim) -> Band | None:
        """The band, in a graph's sizes, as a node says it; None if that needs other sizes than those of the scores."""
        bounds = [None if d is None else _in_scores(d, queries, keys) for d in (self.first, self.last)]
        if any(b is None and d is not None for b, d in zip(bounds, (self.first, self.last), strict=True)):
            return None
        return Band(*bounds)


def _in_scores(dim: Dim, queries: Dim, keys: Dim) -> Dim | None:
    for a, b in ((0, 0), (1, -1), (0, -1), (1, 0), (-1, 1), (0, 1), (-1, 0)):
        rest = simplify(sympy.sympify(dim) - a * keys - b * queries)
        if isinstance(rest, int):
            return simplify(sympy.sympify(rest) + a * KEYS + b * QUERIES)
    return None


@dataclass(frozen=True)
class Operands:
    """The inputs of a node by role."""

    q: Tensor
    k: Tensor
    v: Tensor
    past: tuple[Tensor, Tensor] | None
    sink: Tensor | None
    scores: tuple[Tensor, ...]

    @classmethod
    def of(cls, node: gs.Node) -> Operands:
        """Those of ``node``."""
        q, k, v, *rest = node.inputs
        past = (rest[0], rest[1]) if node.attrs.get("past", 0) else None
        rest = rest[2:] if past else rest
        sink = rest[0] if node.attrs.get("sink", 0) else None
        return cls(q, k, v, past, sink, tuple(rest[1:] if sink is not None else rest))

    @property
    def batch(self) -> Dim:
        """B."""
        firsts = [shape(t)[0] for t in (self.q, self.k, self.v)]
        return next((d for d in firsts if d != 1), 1)

    @property
    def keys(self) -> Dim:
        """Sk, past keys included."""
        new = shape(self.k)[2]
        return new if self.past is None else simplify(shape(self.past[0])[2] + new)

    def repeated(self, operand: Tensor) -> bool:
        """Whether an operand of the scores has fewer batch entries than they, more than one, and they take turns."""
        dims = shape(operand)
        return len(dims) == 4 and dims[0] != 1 and not same_shape(dims[:1], [self.batch])


def bands(node: gs.Node) -> tuple[Band, ...]:
    """The bands of a node; the first parameters behind the accumulator of its score program say whether a key is in each."""
    text = str(node.attrs.get("bands", ""))
    return tuple(map(Band.parse, text.split(_AND))) if text else ()


def bands_text(found: tuple[Band, ...]) -> str:
    """The attribute that ``bands`` reads."""
    return _AND.join(map(str, found))
