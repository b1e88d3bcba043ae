"""Epilogue programs in TIR: the operators' spelling, and evaluation of a program piece by piece on a register tile.

The pieces of a tile are vectors. Where a program pairs columns (``even``, ``odd``, ``interleave``) the columns of a panel lie in
*classes*: all even columns first, then all odd ones, each half again so if the program pairs twice. Pairing then moves
nothing: it only says which class of which operand a piece is. ``Columns`` knows where the columns lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from tvm import tirx

from ..lower import intrinsics
from ..lower.body import Body, Expr, f32, lanes, shuffle, widen
from .ops import OPERATORS, Group, Rule
from .program import Argument, EpilogueProgram, Kind, Step

STORAGE = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "uint16",
    "i8": "int8",
    "u8": "uint8",
    "i32": "int32",
    "i64": "int64",
    "bool": "uint8",
}
"""How a value of each dtype is stored. In registers bool is TIR's, and bfloat16 a float32 that has its precision."""

Spelling = Callable[..., Expr]


def _compute(function: Spelling) -> Spelling:
    """``function``, which is for float32, for any float: computed in float32 and rounded back."""

    def spell(*args: Expr) -> Expr:
        dtype = args[0].ty.dtype
        if dtype.startswith("float32"):
            return function(*args)
        return function(*(a.astype(dtype.__class__("float32").with_lanes(lanes(a))) for a in args)).astype(dtype)

    return spell


def _extreme(floats: Spelling, integers: Spelling) -> Spelling:
    def spell(a: Expr, b: Expr) -> Expr:
        return _compute(floats)(a, b) if a.ty.dtype.is_float else integers(a, b)

    return spell


def _sign(x: Expr) -> Expr:
    if x.ty.dtype.is_float:
        return _compute(intrinsics.sign)(x)
    one, zero = x * 0 + 1, x * 0
    return tirx.Select(x > zero, one, tirx.Select(x < zero, zero - one, zero))


SPELLINGS: dict[str, Spelling] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda x: x * -1 if not x.ty.dtype.is_float else _compute(lambda v: v * f32(-1))(x),
    "abs": lambda x: _compute(intrinsics.absolute)(x) if x.ty.dtype.is_float else tirx.max(x, x * -1),
    "min": _extreme(intrinsics.minimum, tirx.min),
    "max": _extreme(intrinsics.maximum, tirx.max),
    "sign": _sign,
    "eq": lambda a, b: a.equal(b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "and": tirx.And,
    "or": tirx.Or,
    "not": tirx.Not,
    "where": tirx.Select,
    "isnan": lambda x: intrinsics.is_nan(x.astype(x.ty.dtype.__class__("float32").with_lanes(lanes(x)))),
    **{op.name: _compute(partial(op.kernel, intrinsics)) for op in OPERATORS.values() if op.kernel is not None},
}
"""Every pointwise operator of ``ops.OPERATORS`` but ``cast``, on operands of one dtype and as many lanes."""


@dataclass(frozen=True)
class Columns:
    """Where the ``width`` accumulator columns of a panel lie: ``2**depth`` classes, each of the same ``parts``.

    ``parts`` are (offset in the class, lanes). Values of another level have more or fewer classes of the same parts.
    """

    width: int
    depth: int
    vector: int

    @cached_property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Whole vectors, and one of the lanes that are left."""
        size = self.width >> self.depth
        return tuple((at, min(self.vector, size - at)) for at in range(0, size, self.vector))

    def classes(self, level: int = 0) -> int:
        """Classes of a value at ``level`` (log2 of its width over the accumulator's)."""
        return 1 << (self.depth + level)

    def progression(self, cls: int, part: int, level: int = 0) -> tuple[int, int]:
        """The natural columns of a part of a class of a value at ``level``: the first, and from each to the next."""
        count = self.classes(level)
        return self.parts[part][0] * count + _residue(cls, self.depth + level), count

    def permutation(self) -> list[int]:
        """The natural column at each place of the panel."""
        count = self.classes()
        return [at * count + _residue(c, self.depth) for c in range(count) for at in range(self.width >> self.depth)]

    def natural(self, pieces: Sequence[Expr]) -> Expr:
        """The vector of consecutive columns that the same part of every class makes up."""
        count, size = len(pieces), lanes(pieces[0])
        depth = count.bit_length() - 1
        place = {_residue(c, depth): c for c in range(count)}
        return shuffle(pieces, [place[i % count] * size + i // count for i in range(count * size)])

    def piece(self, vector: Expr, cls: int, level: int) -> Expr:
        """Class ``cls`` of consecutive columns: the inverse of ``natural``."""
        count = self.classes(level)
        start = _residue(cls, self.depth + level)
        return shuffle([vector], list(range(start, lanes(vector), count)))


def _residue(cls: int, depth: int) -> int:
    """The natural column, modulo the number of classes, of class ``cls``: its bits in reverse."""
    return int(f"{cls:0{depth}b}"[::-1], 2) if depth else 0


def depth(program: EpilogueProgram) -> int:
    """How many times columns must be told apart: as often as the program halves them, or its stores split pairs."""
    kinds = program.kinds()
    wide = [name for name, kind in kinds.items() if kind in (Kind.TILE, Kind.COL)]
    halves = [1 - level(program, o.value) for o in program.outputs if o.halves]
    return max(0, *(-level(program, name) for name in wide), *halves)


def level(program: EpilogueProgram, value: str) -> int:
    """log2 of the width of a tile or column value over the accumulator's."""
    wide = 1 << 20
    return int(math.log2(program.width(value, wide))) - 20


@dataclass(frozen=True)
class Place:
    """A piece of a tile: which row, which class of columns, which part of it. Columns ignore the row, rows the rest."""

    row: int = 0
    cls: int = 0
    part: int = 0


Leaf = Callable[[str, Place], "Expr | None"]


class Evaluator:
    """Values of a program at places of a tile, each written to ``body`` once.

    ``leaf(name, place)`` gives a parameter's piece as it is stored (or of any other value that it has; None: it has not).
    ``native``: by operator, how the device computes it on float32, in place of the portable spelling. Reduce steps are for the
    template to do, on the pieces of their operand.
    """

    def __init__(
        self,
        program: EpilogueProgram,
        body: Body,
        leaf: Leaf,
        columns: Columns | None = None,
        native: Mapping[str, Spelling] | None = None,
    ) -> None:
        self._program = program
        self._body = body
        self._leaf = leaf
        self._columns = columns
        self._native = native or {}
        self._spellings = {**SPELLINGS, **{op: _compute(function) for op, function in self._native.items()}}
        self._kinds = program.kinds()
        self._dtypes = program.dtypes()
        self._steps = {name: step for step in program.steps for name in step.names}
        self._memo: dict[tuple[str, Place], Expr] = {}

    def fork(self) -> Evaluator:
        """An evaluator that knows what this one has written, for use in an inner block."""
        other = Evaluator(self._program, self._body, self._leaf, self._columns, self._native)
        other._memo = dict(self._memo)
        return other

    def value(self, name: str, place: Place) -> Expr:
        """The piece of value ``name`` at ``place``: a vector for tiles and columns, a scalar otherwise."""
        kind = self._kinds[name]
        if kind in (Kind.ROW, Kind.SCALAR):
            place = Place(row=place.row if kind is Kind.ROW else 0)
        elif kind is Kind.HEAD:
            # All classes of a part are columns of the same heads.
            place = replace(place, cls=0)
        elif kind is Kind.COL:
            place = replace(place, row=0)
        key = (name, place)
        if key not in self._memo:
            self._memo[key] = self._body.let(self._compute(name, place), name.replace(".", "_"))
        return self._memo[key]

    def _compute(self, name: str, place: Place) -> Expr:
        given = self._leaf(name, place)
        if given is not None:
            return as_value(given, self._dtypes[name])
        step = self._steps[name]
        if step.operator.group is Group.PAIRWISE:
            return self._pairwise(step, place)
        if step.op == "cast":
            return cast(self._argument(step.args[0], place), str(step.attr("to")))
        args = [self._argument(a, place) for a in step.args]
        common = self._program.operand_dtype(step)
        first = 1 if step.operator.rule is Rule.SELECT else 0
        args[first:] = [cast(a, common) for a in args[first:]]
        count = max(lanes(a) for a in args)
        return self._spellings[step.op](*(widen(a, count) for a in args))

    def _argument(self, argument: Argument, place: Place) -> Expr:
        return self.value(argument, place) if isinstance(argument, str) else f32(argument)

    def _pairwise(self, step: Step, place: Place) -> Expr:
        assert self._columns is not None, "a program that pairs columns is evaluated with columns"
        names = [str(a) for a in step.args]
        half = self._columns.classes(level(self._program, names[0]))
        if step.op == "interleave":
            return self.value(names[place.cls // half], replace(place, cls=place.cls % half))
        return self.value(names[0], replace(place, cls=place.cls + (half // 2 if step.op == "odd" else 0)))


def as_value(stored: Expr, dtype: str) -> Expr:
    """A stored piece as a value of ``dtype``."""
    if dtype == "bool" and not stored.ty.dtype.is_bool:
        return tirx.NE(stored, widen(tirx.const(0, "uint8"), lanes(stored)))
    return intrinsics.widen_bfloat16(stored) if dtype == "bf16" else stored


def as_stored(value: Expr, dtype: str) -> Expr:
    """A value of ``dtype`` as it is stored."""
    if dtype == "bf16":
        return intrinsics.narrow_bfloat16(value)
    return value.astype(_typed("uint8", value)) if dtype == "bool" else value


def cast(value: Expr, to: str) -> Expr:
    """``value`` as ``to``: towards zero from floats to integers; to bool, whether it is not zero."""
    if to == "bf16":
        return intrinsics.widen_bfloat16(intrinsics.narrow_bfloat16(value.astype(_typed("float32", value))))
    dtype = _typed("bool" if to == "bool" else STORAGE[to], value)
    if value.ty.dtype == dtype:
        return value
    if to == "bool":
        return tirx.NE(value, tirx.const(0, value.ty.dtype))
    return value.astype(dtype)


def _typed(dtype: str, like: Expr) -> str:
    return dtype if lanes(like) == 1 else f"{dtype}x{lanes(like)}"
