"""Row statistics of a tile: from a panel's columns to partial results, and from all panels' to the whole row's.

Partial results are float32. Moments are kept as each panel's mean and centred sum of squares and merged by Chan, Golub and LeVeque
(Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979), so that a mean far from zero costs no accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx

from ..epilogue.ops import Group
from ..epilogue.program import EpilogueProgram
from .body import Body, Expr, f32, index, lanes, load, ramp, shuffle, widen
from .intrinsics import exp, is_nan, maximum, minimum

Combine = Callable[[Expr, Expr], Expr]
Read = Callable[[Expr], Expr]
"""A panel's partial result, a vector over rows, by the panel's number."""
Progression = tuple[int, int]
"""The columns of a piece in the panel: the first, and from each to the next."""
NOWHERE = 3e38
"""A column behind all others."""


@dataclass(frozen=True)
class Panels:
    """``count`` panels of ``width`` columns, the last one of what is left of ``total``."""

    count: int
    width: int
    total: int

    @property
    def last(self) -> int:
        """Columns of the last panel."""
        return self.total - (self.count - 1) * self.width


@dataclass(frozen=True)
class Rule:
    """``panel(body, pieces, columns)`` gives the ``partials`` of a row's pieces; ``merge(body, reads, panels, lanes)`` the results."""

    partials: int
    panel: Callable[[Body, Sequence[Expr], Sequence[Progression]], list[Expr]]
    merge: Callable[[Body, Sequence[Read], Panels, int], list[Expr]]


@dataclass(frozen=True)
class Statistic:
    """A reduce step: the tile it reduces, the names of its results, how it is done, and its first slot among the partials."""

    operand: str
    results: tuple[str, ...]
    rule: Rule
    slot: int


def statistics(program: EpilogueProgram) -> tuple[Statistic, ...]:
    """The reduce steps of ``program``."""
    found: list[Statistic] = []
    slot = 0
    for step in program.steps:
        if step.operator.group is Group.REDUCE:
            rule = RULES[step.op]
            found.append(Statistic(str(step.args[0]), step.names, rule, slot))
            slot += rule.partials
    return tuple(found)


def combine_lanes(body: Body, pieces: Sequence[Expr], combine: Combine) -> Expr:
    """All lanes of all pieces combined into a scalar, pairwise."""
    by_size: dict[int, list[Expr]] = {}
    for piece in pieces:
        by_size.setdefault(lanes(piece), []).append(piece)
    scalars = []
    for same in by_size.values():
        value = _tree(body, same, combine)
        while (count := lanes(value)) > 1:
            half = count // 2
            if count % 2:
                scalars.append(shuffle([value], [count - 1]))
            low, high = shuffle([value], list(range(half))), shuffle([value], list(range(half, 2 * half)))
            value = body.let(combine(low, high), "half")
        scalars.append(value)
    return _tree(body, scalars, combine)


def _tree(body: Body, values: Sequence[Expr], combine: Combine) -> Expr:
    values = list(values)
    while len(values) > 1:
        paired = [body.let(combine(a, b), "pair") for a, b in zip(values[::2], values[1::2], strict=False)]
        values = paired + values[2 * len(paired) :]
    return values[0]


def _add(a: Expr, b: Expr) -> Expr:
    return a + b


def _square(body: Body, pieces: Sequence[Expr]) -> list[Expr]:
    return [body.let(p * p, "square") for p in pieces]


def _fold(body: Body, panels: Panels, count: int, combine: Combine, term: Callable[[Expr, int], Expr]) -> Expr:
    """The terms of all panels combined: ``term(panel, columns of the panel)``."""
    total = body.alloc(count, name="total")
    body.store(total, 0, term(index(panels.count - 1), panels.last))
    with body.loop(0, panels.count - 1, "panel") as panel:
        body.store(total, 0, combine(load(total, 0, count), term(panel, panels.width)))
    return body.let(load(total, 0, count), "total")


def _merged(combine: Combine, mean: bool = False) -> Callable[[Body, Sequence[Read], Panels, int], list[Expr]]:
    def merge(body: Body, reads: Sequence[Read], panels: Panels, count: int) -> list[Expr]:
        total = _fold(body, panels, count, combine, lambda panel, _: reads[0](panel))
        return [total * f32(1 / panels.total) if mean else total]

    return merge


def _panel_moments(body: Body, pieces: Sequence[Expr], columns: Sequence[Progression]) -> list[Expr]:
    width = sum(lanes(piece) for piece in pieces)
    mean = body.let(combine_lanes(body, pieces, _add) * f32(1 / width), "mean")
    centred = [body.let(p - widen(mean, lanes(p)), "centred") for p in pieces]
    return [mean, combine_lanes(body, _square(body, centred), _add)]


def _merge_moments(body: Body, reads: Sequence[Read], panels: Panels, count: int) -> list[Expr]:
    means, squares = reads
    total = _fold(body, panels, count, _add, lambda panel, width: means(panel) * f32(width))
    mean = body.let(total * f32(1 / panels.total), "mean")

    def spread(panel: Expr, width: int) -> Expr:
        away = body.let(means(panel) - mean, "away")
        return squares(panel) + away * away * f32(width)

    return [mean, _fold(body, panels, count, _add, spread) * f32(1 / panels.total)]


def _panel_place(body: Body, pieces: Sequence[Expr], columns: Sequence[Progression]) -> list[Expr]:
    largest = combine_lanes(body, pieces, maximum)
    places = []
    for piece, (start, step) in zip(pieces, columns, strict=True):
        count = lanes(piece)
        here = ramp(start, count, step).astype(_vector("float32", count))
        places.append(body.let(where_largest(piece, widen(largest, count), here), "place"))
    return [largest, combine_lanes(body, places, smaller)]


def _merge_place(body: Body, reads: Sequence[Read], panels: Panels, count: int) -> list[Expr]:
    values, places = reads
    largest = _fold(body, panels, count, maximum, lambda panel, _: values(panel))

    def place(panel: Expr, _: int) -> Expr:
        first = body.let((panel * panels.width).astype("float32"), "first")
        return where_largest(body.let(values(panel), "value"), largest, places(panel) + widen(first, count))

    return [_fold(body, panels, count, smaller, place).astype(_vector("int64", count))]


def where_largest(value: Expr, largest: Expr, place: Expr) -> Expr:
    """``place`` where ``value`` is the largest, or NaN, which is larger still; behind all others elsewhere."""
    return tirx.Select(tirx.Or(value.equal(largest), is_nan(value)), place, widen(f32(NOWHERE), lanes(value)))


def smaller(a: Expr, b: Expr) -> Expr:
    """The smaller of two numbers that are not NaN."""
    return tirx.Select(a < b, a, b)


def _vector(dtype: str, count: int) -> str:
    return dtype if count == 1 else f"{dtype}x{count}"


def _panel_expsum(body: Body, pieces: Sequence[Expr], columns: Sequence[Progression]) -> list[Expr]:
    largest = combine_lanes(body, pieces, maximum)
    shift = body.let(finite(largest), "shift")
    terms = [body.let(exp(p - widen(shift, lanes(p))), "term") for p in pieces]
    return [largest, combine_lanes(body, terms, _add)]


def _merge_expsum(body: Body, reads: Sequence[Read], panels: Panels, count: int) -> list[Expr]:
    values, sums = reads
    largest = _fold(body, panels, count, maximum, lambda panel, _: values(panel))
    shift = body.let(finite(largest), "shift")
    total = _fold(
        body, panels, count, _add, lambda panel, _: sums(panel) * exp(body.let(values(panel) - shift, "below"))
    )
    return [largest, total]


def finite(largest: Expr) -> Expr:
    """What is taken off before exponentials: of a panel that is -inf throughout, nothing."""
    count = lanes(largest)
    return tirx.Select(largest.equal(widen(f32(-math.inf), count)), widen(f32(0), count), largest)


RULES: dict[str, Rule] = {
    "sum": Rule(1, lambda body, pieces, _: [combine_lanes(body, pieces, _add)], _merged(_add)),
    "mean": Rule(1, lambda body, pieces, _: [combine_lanes(body, pieces, _add)], _merged(_add, mean=True)),
    "sumsq": Rule(1, lambda body, pieces, _: [combine_lanes(body, _square(body, pieces), _add)], _merged(_add)),
    "rowmax": Rule(1, lambda body, pieces, _: [combine_lanes(body, pieces, maximum)], _merged(maximum)),
    "rowmin": Rule(1, lambda body, pieces, _: [combine_lanes(body, pieces, minimum)], _merged(minimum)),
    "argmax": Rule(2, _panel_place, _merge_place),
    "expsum": Rule(2, _panel_expsum, _merge_expsum),
    "moments": Rule(2, _panel_moments, _merge_moments),
}
"""Every reduce operator."""
