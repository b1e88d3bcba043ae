"""An epilogue program: what a GEMM does to its output tile before it stores it.

SSA over values of five kinds: ``tile`` (M×N), ``row`` (M, written [M, 1]), ``col`` (N), ``scalar``, and ``head`` (a number for each row and head,
which only ``headsum`` makes: ``v2 = headsum v1 heads=64`` sums v1 over every 64 columns of a row). Combining kinds
broadcasts, so row∘col is a tile, and so is head∘col. The first parameter is the accumulator. The text form is what an ONNX node carries::

    (acc: tile f32, bias: col f32, residual: tile f32) -> (y: tile = v1, mean: row = v2.0, var: row = v2.1) {
      v0 = add acc bias
      v1 = add v0 residual
      v2 = moments v1
    }

``str`` and ``EpilogueProgram.parse`` are exact inverses. Passes grow programs with ``builder.Builder``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from ..errors import ShapeError
from .ops import OPERATORS, Array, Group, Operator, Rule

Attribute: TypeAlias = "str | int | float"
Argument: TypeAlias = "str | float"

ValueType: TypeAlias = "tuple[Kind, str]"
"""Kind and dtype of a value."""

FLOATS = ("f16", "bf16", "f32")
"""Float dtypes, narrowest first."""
INTEGERS = ("i8", "u8", "i32", "i64")
DTYPES = (*FLOATS, *INTEGERS, "bool")


class Kind(str, Enum):
    """What a value varies over."""

    TILE = "tile"
    ROW = "row"
    COL = "col"
    SCALAR = "scalar"
    HEAD = "head"


class StepKind(str, Enum):
    """The kinds of step."""

    ELEMENTWISE = "elementwise"
    VECTOR = "vector"
    TILE = "tile"
    PAIRWISE = "pairwise"
    REDUCE = "reduce"
    HEADS = "heads"


class Rows(str, Enum):
    """Which row of an operand belongs to row m of the tile, where a batch entry has S rows."""

    ALL = "all"
    """Row m: one for each row of the tile."""
    POSITION = "position"
    """Row m % S: all batch entries share them."""
    BATCH = "batch"
    """Row m // S: all rows of a batch entry share it."""


@dataclass(frozen=True)
class Param:
    """A named operand. ``dtype`` is how it is stored; it is read as a value of that dtype and widens when combined.

    ``rows`` says which rows a tile or row operand has. A tile with a ``period`` P has P columns: the value's column j is
    the operand's column j % P.
    """

    name: str
    kind: Kind
    dtype: str = "f32"
    rows: Rows = Rows.ALL
    period: int | None = None


@dataclass(frozen=True)
class Step:
    """``result = op(args)``. An argument is the name of a value or a literal. ``attrs`` is sorted by name.

    A step of several results (``moments``) is referred to as ``result.0``, ``result.1``, ….
    """

    result: str
    op: str
    args: tuple[Argument, ...]
    attrs: tuple[tuple[str, Attribute], ...] = ()

    @property
    def operator(self) -> Operator:
        """The operator's row in the table."""
        return OPERATORS[self.op]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the step's results."""
        count = self.operator.results
        return (self.result,) if count == 1 else tuple(f"{self.result}.{i}" for i in range(count))

    def attr(self, name: str) -> Attribute:
        """An attribute's value."""
        return dict(self.attrs)[name]


@dataclass(frozen=True)
class Output:
    """A stored value: a tile, or a row that a reduce step gives.

    ``columns`` ``(c0, c1)`` stores only that range of a tile's columns. ``heads`` D stores ``[B, S, H·D]`` as
    ``[B, H, S, D]``. Each of the ascending ranges ``halves`` (a, b) of a head's columns is stored with its pairs apart: columns
    a + 2j and a + 2j + 1 as a + j and (a + b)/2 + j.
    """

    name: str
    kind: Kind
    value: str
    columns: tuple[int, int] | None = None
    heads: int | None = None
    halves: tuple[tuple[int, int], ...] = ()

    @property
    def order(self) -> list[int]:
        """Which column of a head's value is stored at each of its columns."""
        order = list(range(self.heads or 0))
        for start, end in self.halves:
            order[start:end] = [*range(start, end, 2), *range(start + 1, end, 2)]
        return order


@dataclass(frozen=True)
class EpilogueProgram:
    """Parameters, steps in order of evaluation, and outputs. Construction checks it; see ``check``."""

    params: tuple[Param, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]

    def __post_init__(self) -> None:
        self.check()

    def check(self, n: int | None = None) -> None:
        """Raises ShapeError unless names, kinds, dtypes and widths agree; with ``n`` columns, also the ranges."""
        self._check_params()
        _ = self._types
        self._check_outputs()
        _ = self._levels
        self._check_heads()
        if n is not None:
            self._check_columns(n)

    def kinds(self) -> dict[str, Kind]:
        """The kind of every value by name."""
        return {name: kind for name, (kind, _) in self._types.items()}

    def dtypes(self) -> dict[str, str]:
        """The dtype of every value by name."""
        return {name: dtype for name, (_, dtype) in self._types.items()}

    def operand_dtype(self, step: Step) -> str:
        """The dtype that ``step``'s operands and literals are converted to before it works (of ``where``: its branches)."""
        return _operand_dtype(step, self.dtypes())

    def step_kind(self, step: Step) -> StepKind:
        """Which kind ``step`` is, by its operator and its operands."""
        if step.operator.group is Group.REDUCE:
            return StepKind.REDUCE
        if step.operator.group is Group.HEADS:
            return StepKind.HEADS
        if step.operator.group is Group.PAIRWISE:
            return StepKind.PAIRWISE
        names = [a for a in step.args if isinstance(a, str)]
        tensors = {p.name for p in self.params[1:] if p.kind is Kind.TILE}
        if tensors.intersection(names):
            return StepKind.TILE
        kinds = self.kinds()
        return (
            StepKind.VECTOR if any(kinds[a] in (Kind.ROW, Kind.COL, Kind.HEAD) for a in names) else StepKind.ELEMENTWISE
        )

    def width(self, value: str, n: int) -> int:
        """Columns of a tile or column value, where the accumulator has ``n``. Raises ShapeError if it would be odd."""
        level = self._levels[value]
        if level >= 0:
            return n << level
        if n % (1 << -level):
            raise ShapeError(f"epilogue value '{value}' takes every {1 << -level}th column: {n} columns do not divide")
        return n >> -level

    def output_width(self, output: Output, n: int) -> int:
        """Columns stored by a tile output."""
        return output.columns[1] - output.columns[0] if output.columns else self.width(output.value, n)

    def operand_width(self, param: Param, n: int) -> int:
        """Columns that a tile or column operand is stored with."""
        return param.period or self.width(param.name, n)

    @cached_property
    def head(self) -> int:
        """Columns of the accumulator that a value of kind ``head`` is for; 0 if there is none."""
        return next((int(s.attr("heads")) for s in self.steps if s.operator.group is Group.HEADS), 0)

    @property
    def batched(self) -> bool:
        """Whether it matters which batch entry a row belongs to."""
        return any(o.heads for o in self.outputs) or any(p.rows is not Rows.ALL for p in self.params)

    def param(self, name: str) -> Param:
        """The parameter called ``name``."""
        return next(p for p in self.params if p.name == name)

    def output(self, name: str) -> Output:
        """The output called ``name``."""
        return next(o for o in self.outputs if o.name == name)

    def uses(self) -> dict[str, int]:
        """How often each value is read, by steps and by outputs."""
        count = dict.fromkeys(self._types, 0)
        for step in self.steps:
            for arg in step.args:
                if isinstance(arg, str):
                    count[arg] += 1
        for output in self.outputs:
            count[output.value] += 1
        return count

    def flops(self, n: int) -> int:
        """Arithmetic per row of ``n`` accumulator columns; values that are not tiles are not counted."""
        kinds = self.kinds()
        total = 0
        for step in self.steps:
            wide = [a for a in (*step.args, *step.names) if isinstance(a, str) and kinds[a] is Kind.TILE]
            total += step.operator.flops * max((self.width(a, n) for a in wide), default=0)
        return total

    def rename(self, values: Mapping[str, str], outputs: Mapping[str, str] | None = None) -> EpilogueProgram:
        """The same program with parameters and step results renamed by ``values``, outputs by ``outputs``."""

        def new(name: str) -> str:
            base, dot, index = name.partition(".")
            return values.get(base, base) + dot + index

        steps = (
            replace(s, result=new(s.result), args=tuple(new(a) if isinstance(a, str) else a for a in s.args))
            for s in self.steps
        )
        return EpilogueProgram(
            tuple(replace(p, name=new(p.name)) for p in self.params),
            tuple(steps),
            tuple(replace(o, name=(outputs or {}).get(o.name, o.name), value=new(o.value)) for o in self.outputs),
        )

    def reference(
        self,
        acc: Array,
        operands: Mapping[str, Any] | None = None,
        rows_per_batch: int | None = None,
        dtype: Any = np.float64,
    ) -> dict[str, Array]:
        """What the program means: its outputs, computed by numpy with floats in ``dtype``. See ``reference.py``."""
        from .reference import evaluate

        return evaluate(self, acc, operands or {}, rows_per_batch, np.dtype(dtype))

    def key(self) -> str:
        """Eight hex digits that identify the program's text."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:8]

    def __str__(self) -> str:
        from .text import format_program

        return format_program(self)

    @staticmethod
    def parse(text: str) -> EpilogueProgram:
        """The program that ``text`` spells. Raises ShapeError naming the line that cannot be read."""
        from .text import parse_program

        return parse_program(text)

    def _check_params(self) -> None:
        if not self.params or self.params[0].kind is not Kind.TILE:
            raise ShapeError("an epilogue's first parameter is the accumulator and must be a tile")
        names = [p.name for p in self.params] + [s.result for s in self.steps]
        _unique(names, "value")
        _unique([o.name for o in self.outputs], "output")
        for name in (*names, *(o.name for o in self.outputs)):
            if not name.isidentifier() or not name.isascii() or _is_number(name):
                raise ShapeError(f"'{name}' cannot name an epilogue value: use a word of letters, digits and _")
        for param in self.params:
            if param.kind is Kind.HEAD:
                raise ShapeError(f"parameter '{param.name}': values of kind head are sums of the tile, never operands")
            if param.dtype not in DTYPES:
                raise ShapeError(
                    f"parameter '{param.name}' has unknown dtype {param.dtype}: use one of {', '.join(DTYPES)}"
                )
            plain = param is self.params[0] or param.kind not in (Kind.TILE, Kind.ROW)
            if (plain and param.rows is not Rows.ALL) or (param.period and (plain or param.kind is Kind.ROW)):
                raise ShapeError(
                    f"parameter '{param.name}': only tile and row operands share rows, only tile operands have a period"
                )
            if param.period is not None and param.period < 1:
                raise ShapeError(f"parameter '{param.name}': a period of {param.period} columns")

    @cached_property
    def _types(self) -> dict[str, ValueType]:
        """Kind and dtype of every value, in order of definition."""
        types = {p.name: (p.kind, p.dtype) for p in self.params}
        reduced: set[str] = set()
        for step in self.steps:
            result = step_type(step, types, reduced)
            types.update(dict.fromkeys(step.names, result))
            if step.operator.group is Group.REDUCE:
                reduced.update(step.names)
        return types

    def _check_outputs(self) -> None:
        if not self.outputs:
            raise ShapeError("an epilogue must have an output")
        reduced = {name for s in self.steps if s.operator.group is Group.REDUCE for name in s.names}
        for output in self.outputs:
            where = f"epilogue output '{output.name}'"
            if output.value not in self._types:
                raise ShapeError(f"{where}: there is no value '{output.value}'; there are {', '.join(self._types)}")
            kind = self._types[output.value][0]
            if output.kind is not kind or kind not in (Kind.TILE, Kind.ROW):
                raise ShapeError(
                    f"{where} is declared {output.kind.value} and '{output.value}' is a {kind.value} value"
                )
            if kind is Kind.ROW and output.value not in reduced:
                raise ShapeError(f"{where}: a row output must be the result of a reduce step")
            if kind is Kind.ROW and (output.columns or output.heads):
                raise ShapeError(f"{where}: only tile outputs have columns or heads")
            if output.columns and not 0 <= output.columns[0] < output.columns[1]:
                raise ShapeError(f"{where}: columns {output.columns} are not a range")
            if output.heads is not None and output.heads < 1:
                raise ShapeError(f"{where}: heads of {output.heads} columns")
            start = output.columns[0] if output.columns else 0
            bounds = [0, *(b for part in output.halves for b in part), output.heads or 0]
            if output.halves and (bounds != sorted(bounds) or any(b % 2 for b in bounds) or start % 2):
                raise ShapeError(f"{where}: halves are of heads of an even number of columns, from an even column on")

    @cached_property
    def _levels(self) -> dict[str, int]:
        """log2 of each tile and column value's width over the accumulator's; free columns are as wide as it."""
        wide = [name for name, (kind, _) in self._types.items() if kind in (Kind.TILE, Kind.COL)]
        levels = {self.params[0].name: 0}
        while len(levels) < len(wide):
            before = len(levels)
            for step in (*self.steps, *reversed(self.steps)):
                _unify(step, levels, wide)
            if len(levels) == before:
                levels[next(name for name in wide if name not in levels)] = 0
        for step in self.steps:
            _unify(step, levels, wide)
        return levels

    def _check_heads(self) -> None:
        sizes = {int(s.attr("heads")) for s in self.steps if s.operator.group is Group.HEADS}
        if len(sizes) > 1:
            raise ShapeError(f"an epilogue has heads of one size, found {sorted(sizes)}")
        for step in self.steps:
            if step.operator.group is Group.HEADS and self._levels[str(step.args[0])] != 0:
                raise ShapeError(f"epilogue step '{step.result}': {step.op} is of a value as wide as the accumulator")
        narrowest = min(self._levels.values())
        if self.head % (1 << -min(0, narrowest)):
            raise ShapeError(f"heads of {self.head} columns are not halved {-narrowest} times")

    def _check_columns(self, n: int) -> None:
        if self.head and n % self.head:
            raise ShapeError(f"{n} columns are no multiple of heads of {self.head}")
        for value in self._levels:
            self.width(value, n)
        for param in self.params:
            if param.period and self.width(param.name, n) % param.period:
                raise ShapeError(
                    f"epilogue operand '{param.name}': {self.width(param.name, n)} columns are no multiple of "
                    f"its period {param.period}"
                )
        for output in self.outputs:
            if output.kind is Kind.ROW:
                continue
            where = f"epilogue output '{output.name}'"
            width = self.width(output.value, n)
            if output.columns and output.columns[1] > width:
                raise ShapeError(f"{where}: columns {output.columns} of a value of {width} columns")
            if output.heads and self.output_width(output, n) % output.heads:
                raise ShapeError(
                    f"{where}: {self.output_width(output, n)} columns are no multiple of heads[{output.heads}]"
                )
            if output.halves and width % 2:
                raise ShapeError(f"{where}: halves of a value of {width} columns, which are not pairs")


def step_type(step: Step, types: Mapping[str, ValueType], reduced: Collection[str]) -> ValueType:
    """Kind and dtype of ``step``'s results, among values of ``types`` of which ``reduced`` are known only after the last tile.

    Raises ShapeError for an unknown operator or value, a wrong number of operands, and kinds or dtypes that do not fit.
    """
    where = f"epilogue step '{step.result}'"
    operator = OPERATORS.get(step.op)
    if operator is None:
        raise ShapeError(f"{where}: unknown operator '{step.op}'; there are {', '.join(OPERATORS)}")
    if len(step.args) != operator.arity:
        raise ShapeError(f"{where}: {step.op} takes {operator.arity} operands, not {len(step.args)}")
    for arg in step.args:
        if isinstance(arg, str):
            _check_operand(where, arg, types, reduced)
        elif not isinstance(arg, float) or math.isnan(arg):
            raise ShapeError(f"{where}: a literal must be a float and not NaN, found {arg!r}")
    return _result_kind(where, step, types), _result_dtype(where, step, types)


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _unique(names: Sequence[str], what: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ShapeError(f"an epilogue defines {what} '{twice[0]}' twice")


def _check_operand(where: str, arg: str, types: Mapping[str, ValueType], reduced: Collection[str]) -> None:
    if arg not in types:
        raise ShapeError(f"{where}: there is no value '{arg}'; there are {', '.join(types)}")
    if arg in reduced:
        raise ShapeError(
            f"{where}: '{arg}' is reduced over the whole row, which is known only after the last tile: "
            "make it an output and use it in the next kernel"
        )


def _result_kind(where: str, step: Step, types: Mapping[str, ValueType]) -> Kind:
    kinds = [types[a][0] for a in step.args if isinstance(a, str)]
    if step.operator.group is Group.REDUCE:
        if kinds != [Kind.TILE]:
            raise ShapeError(f"{where}: {step.op} reduces a tile, not {_describe(step, types)}")
        return Kind.ROW
    if step.operator.group is Group.HEADS:
        if kinds != [Kind.TILE]:
            raise ShapeError(f"{where}: {step.op} sums a tile, not {_describe(step, types)}")
        return Kind.HEAD
    if step.operator.group is Group.PAIRWISE:
        if len(kinds) != len(step.args) or len(set(kinds)) != 1 or kinds[0] not in (Kind.TILE, Kind.COL):
            raise ShapeError(
                f"{where}: {step.op} pairs columns of tiles or of column values, not {_describe(step, types)}"
            )
        return kinds[0]
    if Kind.TILE in kinds or (Kind.COL in kinds and {Kind.ROW, Kind.HEAD} & set(kinds)):
        return Kind.TILE
    if Kind.HEAD in kinds:
        return Kind.HEAD
    return next((k for k in kinds if k is not Kind.SCALAR), Kind.SCALAR)


def _describe(step: Step, types: Mapping[str, ValueType]) -> str:
    return ", ".join(f"'{a}' ({types[a][0].value} {types[a][1]})" if isinstance(a, str) else repr(a) for a in step.args)


def _result_dtype(where: str, step: Step, types: Mapping[str, ValueType]) -> str:
    rule = step.operator.rule
    expected = ("to",) if rule is Rule.CAST else ("heads",) if step.operator.group is Group.HEADS else ()
    if tuple(name for name, _ in step.attrs) != expected:
        raise ShapeError(
            f"{where}: cast has one attribute, to=DTYPE, headsum heads=COLUMNS; other operators have none, "
            f"found {dict(step.attrs)}"
        )
    if step.operator.group is Group.HEADS and not (isinstance(step.attr("heads"), int) and int(step.attr("heads")) > 0):
        raise ShapeError(f"{where}: heads={step.attr('heads')} is no number of columns")
    if rule is Rule.CAST and step.attr("to") not in DTYPES:
        raise ShapeError(f"{where}: cast to unknown dtype {step.attr('to')}: use one of {', '.join(DTYPES)}")
    if rule is Rule.SELECT and (not isinstance(step.args[0], str) or types[step.args[0]][1] != "bool"):
        raise ShapeError(f"{where}: where chooses by a bool value, not by {_describe(step, types)}")
    common = _operand_dtype(step, {name: dtype for name, (_, dtype) in types.items()})
    if common not in _OPERANDS.get(rule, DTYPES):
        raise ShapeError(
            f"{where}: {step.op} takes {rule.value} operands of one dtype, not {_describe(step, types)}: cast first"
        )
    literals = [a for a in step.args if isinstance(a, float)]
    if common not in FLOATS and not all(a.is_integer() for a in literals):
        raise ShapeError(f"{where}: literals {literals} do not fit the dtype {common} of the other operands")
    if rule is Rule.CAST:
        return str(step.attr("to"))
    return {Rule.COMPARE: "bool", Rule.PREDICATE: "bool", Rule.STATISTIC: "f32", Rule.PLACE: "i64"}.get(rule, common)


_OPERANDS = {
    Rule.FLOAT: FLOATS,
    Rule.PREDICATE: FLOATS,
    Rule.STATISTIC: FLOATS,
    Rule.PLACE: FLOATS,
    Rule.NUMERIC: (*FLOATS, *INTEGERS),
    Rule.LOGIC: ("bool",),
}


def _operand_dtype(step: Step, dtypes: Mapping[str, str]) -> str:
    """The dtype of ``step``'s operands (of ``where``'s branches), '' if they do not mix."""
    args = step.args[1:] if step.operator.rule is Rule.SELECT else step.args
    unique = {dtypes[a] for a in args if isinstance(a, str)}
    if not unique:
        return "f32"
    if len(unique) == 1 and step.operator.rule is not Rule.STATISTIC:
        return unique.pop()
    return "f32" if unique <= set(FLOATS) else ""


def _unify(step: Step, levels: dict[str, int], wide: Sequence[str]) -> None:
    """Spreads known widths through one step, both ways."""
    shift = {"even": -1, "odd": -1, "interleave": 1}.get(step.op, 0)
    args = [a for a in step.args if isinstance(a, str) and a in wide]
    results = [r for r in step.names if r in wide]
    known = [levels[a] for a in args if a in levels] + [levels[r] - shift for r in results if r in levels]
    if not known:
        return
    for name, level in (*((a, known[0]) for a in args), *((r, known[0] + shift) for r in results)):
        if levels.setdefault(name, level) != level:
            raise ShapeError(
                f"epilogue step '{step.result}': {step.op} combines values of {_ratio(known[0])} and "
                f"{_ratio(levels[name] - (shift if name in results else 0))} columns"
            )


def _ratio(level: int) -> str:
    return {0: "N", 1: "2N", -1: "N/2"}.get(level, f"N·2^{level}")
