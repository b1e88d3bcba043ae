"""Algebra of attention scores: what stands between q·kᵀ and the softmax, as a term that is simplified while it is made.

Rules, for conditions c, d and terms x, y; "number" is a constant:

1. an operator of numbers is a number; adding 0, multiplying by 1, choosing by a known condition change nothing;
2. ``f(c ? a : b, n…)`` of numbers is ``c ? f(a, n…) : f(b, n…)``; ``f(c ? x : y, c ? z : w)`` is ``c ? f(x, z) : f(y, w)``;
3. ``c ? (d ? x : y) : y`` is ``c ∧ d ? x : y``; ``¬c ? x : y`` is ``c ? y : x``; ``c ? true : false`` is c; of a band and its opposite, that
   one is the condition outside of which there is a number, the smaller one of two;
4. bands of keys: one ∧ another is their intersection; one without a first or last diagonal negated is a band; ``¬(¬c ∧ ¬d)`` for c ∨ d;
   as a number it is ``c ? 1 : 0``, and ``x · (c ? 1 : 0)`` is ``c ? x : 0`` (scores are finite);

so that however a causal mask is spelled, its condition stands in the term once, as a band.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import TypeAlias

import numpy as np
import sympy

from coda_edge.attention import Band
from coda_edge.epilogue.ops import OPERATORS, Rule
from coda_edge.epilogue.program import Kind
from coda_edge.ir import Tensor
from coda_edge.symbolic import Dim, simplify

_NUMPY = {"f32": np.float32, "i64": np.int64, "i32": np.int32, "bool": np.bool_, "u8": np.uint8, "i8": np.int8}


class Term:
    """A value over the score tile. ``dtype`` is as programs spell it."""

    dtype: str

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of the operands in it."""
        return frozenset[Kind]().union(*(a.kinds for a in self.parts))

    @cached_property
    def banded(self) -> bool:
        """Whether a band is in it."""
        return any(a.banded for a in self.parts)

    @cached_property
    def scores(self) -> bool:
        """Whether the product is in it."""
        return any(a.scores for a in self.parts)

    @cached_property
    def size(self) -> int:
        """How many steps it has."""
        return sum(a.size for a in self.parts)

    @property
    def parts(self) -> tuple[Term, ...]:
        """What it is made of."""
        return ()


@dataclass(frozen=True)
class Number(Term):
    """A constant."""

    value: float
    dtype: str


@dataclass(frozen=True, eq=False)
class Product(Term):
    """q·kᵀ."""

    dtype: str
    scores = True


@dataclass(frozen=True, eq=False)
class Operand(Term):
    """A tensor that is read: ``dims`` are its batch, heads, queries and keys, each whole or 1, or fewer batch entries in turns."""

    tensor: Tensor
    dims: tuple[Dim, ...]
    kind: Kind
    dtype: str

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        return frozenset({self.kind})


@dataclass(frozen=True)
class Within(Term):
    """Whether a key is in a band of its query."""

    band: Band
    dtype = "bool"
    banded = True


@dataclass(frozen=True)
class Step(Term):
    """An operator. ``to``: the dtype of a cast."""

    op: str
    args: tuple[Term, ...]
    to: str = ""
    dtype: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        rule = OPERATORS[self.op].rule
        tests = rule in (Rule.COMPARE, Rule.PREDICATE)
        dtype = self.to if rule is Rule.CAST else "bool" if tests else self.args[-1].dtype
        object.__setattr__(self, "dtype", dtype)

    @property
    def parts(self) -> tuple[Term, ...]:
        return self.args

    @cached_property
    def size(self) -> int:
        return 1 + sum(a.size for a in self.args)


TRUE, FALSE = Number(1.0, "bool"), Number(0.0, "bool")
_Args: TypeAlias = "tuple[Term, ...]"


def make(op: str, *args: Term, to: str = "") -> Term:
    """The term of an operator, in its simplest form."""
    for rule in _RULES:
        found = rule(op, args, to)
        if found is not None:
            return found
    return Step(op, args, to)


def _is(term: Term, op: str) -> bool:
    return isinstance(term, Step) and term.op == op


def _number(term: Term, value: float) -> bool:
    return isinstance(term, Number) and term.value == value


def _folded(op: str, args: _Args, to: str) -> Term | None:
    if op == "where" or not all(isinstance(a, Number) and a.dtype in _NUMPY for a in args):
        return None
    values = [_NUMPY[a.dtype](a.value) for a in args if isinstance(a, Number)]
    with np.errstate(all="ignore"):
        result = OPERATORS[op].numpy(*values)
    dtype = Step(op, args, to).dtype
    if dtype == "bool":
        return TRUE if result else FALSE
    if dtype not in _NUMPY or (not np.isfinite(result) and (np.isnan(result) or dtype != "f32")):
        return None
    return Number(float(_NUMPY[dtype](result)), dtype)


def _neutral(op: str, args: _Args, to: str) -> Term | None:
    if op == "cast" and args[0].dtype == to:
        return args[0]
    if op in ("add", "mul"):
        for x, y in (args, args[::-1]):
            if _number(y, 0.0 if op == "add" else 1.0):
                return x
    if (op == "sub" and _number(args[1], 0.0)) or (op == "div" and _number(args[1], 1.0)):
        return args[0]
    if op in ("and", "or"):
        for x, y in (args, args[::-1]):
            if isinstance(y, Number):
                return x if bool(y.value) == (op == "and") else y
    return None


def _choice(op: str, args: _Args, to: str) -> Term | None:
    if op != "where":
        return None
    condition, x, y = args
    if isinstance(condition, Number):
        return x if condition.value else y
    if x == y:
        return x
    if _is(condition, "not"):
        return make("where", condition.parts[0], y, x)
    if isinstance(condition, Within) and isinstance(x, Number) and (not isinstance(y, Number) or x.value < y.value):
        opposite = make("not", condition)
        if isinstance(opposite, Within):
            return make("where", opposite, y, x)
    for branch, other, test, join in (
        (x, y, condition, "or"),
        (y, x, condition, "and"),
    ):
        if isinstance(branch, Number) and branch.dtype == "bool":
            positive = bool(branch.value) == (join == "or")
            test = test if positive else make("not", test)
            return make(join if positive else {"or": "and", "and": "or"}[join], test, other)
    if _is(x, "where") and x.parts[2] == y:
        return make("where", make("and", condition, x.parts[0]), x.parts[1], y)
    if _is(y, "where") and y.parts[1] == x:
        return make("where", make("or", condition, y.parts[0]), x, y.parts[2])
    return None


def _negated(op: str, args: _Args, to: str) -> Term | None:
    if op != "not":
        return None
    (x,) = args
    if _is(x, "not"):
        return x.parts[0]
    if isinstance(x, Within):
        first, last = x.band.first, x.band.last
        if first is None and last is not None:
            return Within(Band(simplify(last + 1), None))
        if last is None and first is not None:
            return Within(Band(None, simplify(first - 1)))
    return None


def _joined(op: str, args: _Args, to: str) -> Term | None:
    if op == "or" and any(a.banded for a in args):
        return make("not", make("and", *(make("not", a) for a in args)))
    if op != "and":
        return None
    flat = [t for a in args for t in (a.parts if _is(a, "and") else (a,))]
    bands = [t for t in flat if isinstance(t, Within)]
    if len(bands) < 2 and not (bands and len(flat) > 2):
        return None
    both: Within = bands[0]
    rest: list[Term] = []
    for t in bands[1:]:
        joint = _intersection(both.band, t.band)
        if joint is None:
            rest.append(t)
        else:
            both = Within(joint)
    rest += [x for x in flat if not isinstance(x, Within)]
    return Step("and", (both, reduce(lambda x, y: make("and", x, y), rest))) if rest else both


def _intersection(a: Band, b: Band) -> Band | None:
    """None if it is not known which bound is nearer."""
    bounds: list[Dim | None] = []
    for x, y, pick in ((a.first, b.first, sympy.Max), (a.last, b.last, sympy.Min)):
        if x is None or y is None:
            bounds.append(y if x is None else x)
            continue
        nearer = pick(x, y)
        if nearer not in (x, y):
            return None
        bounds.append(simplify(nearer))
    return Band(*bounds)


def _distributed(op: str, args: _Args, to: str) -> Term | None:
    choices = [a for a in args if _is(a, "where")]
    if op == "where" or not choices or not all(_is(a, "where") or isinstance(a, Number) for a in args):
        return None
    condition = choices[0].parts[0]
    branches = [[a, a] if isinstance(a, Number) else _branches(a, condition) for a in args]
    if any(not b for b in branches):
        return None
    if len(choices) == 1 and not all(isinstance(p, Number) for p in choices[0].parts[1:]):
        return None
    results = [make(op, *(b[i] for b in branches), to=to) for i in (0, 1)]
    if len(choices) == 1 and not all(isinstance(r, Number) for r in results):
        return None
    return make("where", condition, *results)


def _branches(choice: Term, condition: Term) -> list[Term]:
    """What a choice is where ``condition`` holds and where not; nothing if it is by another condition."""
    mine, x, y = choice.parts
    if mine == condition:
        return [x, y]
    return [y, x] if isinstance(mine, Within) and make("not", mine) == condition else []


def _masked(op: str, args: _Args, to: str) -> Term | None:
    if op == "cast" and args[0].dtype == "bool" and args[0].banded:
        return make("where", args[0], Number(1.0, to), Number(0.0, to))
    if op != "mul":
        return None
    for x, y in (args, args[::-1]):
        if _is(y, "where") and y.banded and all(isinstance(p, Number) and p.value in (0.0, 1.0) for p in y.parts[1:]):
            return make("where", y.parts[0], *(x if _number(p, 1.0) else p for p in y.parts[1:]))
    return None


_RULES: tuple[Callable[[str, _Args, str], Term | None], ...] = (
    _folded,
    _neutral,
    _choice,
    _negated,
    _joined,
    _distributed,
    _masked,
)
