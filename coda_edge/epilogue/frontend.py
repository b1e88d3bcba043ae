"""``@epilogue``: an epilogue program written as a plain Python function over the accumulator.

::

    @epilogue
    def bias_gelu(acc: Tile, bias: Col) -> Value:
        return gelu(acc + bias)

The function runs once, on values that record what is done to them. An annotation says what kind an operand is: ``Tile``,
``Row``, ``Col``, ``Scalar``; parameters of Python types (``eps: float = 1e-5``) are fixed when the program is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeAlias, get_type_hints

import numpy as np

from ..errors import ShapeError
from .builder import Builder
from .ops import Array
from .program import Argument, Attribute, EpilogueProgram, Kind, Param, Rows


class Value:
    """A value of an epilogue under construction; combine values with Python's operators and the functions of ``math``."""

    def __init__(self, builder: Builder, name: str) -> None:
        self._builder = builder
        self.name = name

    @property
    def kind(self) -> Kind:
        """What the value varies over."""
        return self._builder.kind(self.name)

    @property
    def dtype(self) -> str:
        """The value's dtype, as a program spells it."""
        return self._builder.dtype(self.name)

    def __add__(self, other: Operand) -> Value:
        return apply("add", self, other)

    def __radd__(self, other: Operand) -> Value:
        return apply("add", other, self)

    def __sub__(self, other: Operand) -> Value:
        return apply("sub", self, other)

    def __rsub__(self, other: Operand) -> Value:
        return apply("sub", other, self)

    def __mul__(self, other: Operand) -> Value:
        return apply("mul", self, other)

    def __rmul__(self, other: Operand) -> Value:
        return apply("mul", other, self)

    def __truediv__(self, other: Operand) -> Value:
        return apply("div", self, other)

    def __rtruediv__(self, other: Operand) -> Value:
        return apply("div", other, self)

    def __pow__(self, exponent: Operand) -> Value:
        square = not isinstance(exponent, Value) and exponent == 2
        return apply("mul", self, self) if square else apply("pow", self, exponent)

    def __rpow__(self, base: Operand) -> Value:
        return apply("pow", base, self)

    def __neg__(self) -> Value:
        return apply("neg", self)

    def __abs__(self) -> Value:
        return apply("abs", self)

    def __lt__(self, other: Operand) -> Value:
        return apply("lt", self, other)

    def __le__(self, other: Operand) -> Value:
        return apply("le", self, other)

    def __gt__(self, other: Operand) -> Value:
        return apply("gt", self, other)

    def __ge__(self, other: Operand) -> Value:
        return apply("ge", self, other)

    def __and__(self, other: Value) -> Value:
        return apply("and", self, other)

    def __or__(self, other: Value) -> Value:
        return apply("or", self, other)

    def __invert__(self) -> Value:
        return apply("not", self)

    def __eq__(self, other: object) -> bool:
        raise ShapeError(f"epilogue value '{self.name}' is compared by ==, which yields no value: use equal(a, b)")

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        raise ShapeError(f"epilogue value '{self.name}' has no truth value while the program is made: use where(…)")


Operand: TypeAlias = "Value | float"

Tile = Annotated[Value, Kind.TILE]
"""A whole tensor of the output's shape, M×N."""
Row = Annotated[Value, Kind.ROW]
"""One value a row, [M, 1]."""
Col = Annotated[Value, Kind.COL]
"""One value a column, [N]."""
Scalar = Annotated[Value, Kind.SCALAR]
"""One value, known at run time."""


class Moments(NamedTuple):
    """Row outputs: mean and biased variance over each whole row."""

    mean: Value
    var: Value


@dataclass(frozen=True, eq=False)
class Stored:
    """A value with the way it is stored: a range of columns, heads of some columns each, their pairs in halves."""

    value: Value
    columns: tuple[int, int] | None = None
    heads: int | None = None
    halves: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Period:
    """Annotates a tile operand of ``columns`` columns that repeats over its value's width."""

    columns: int


def apply(op: str, *args: Operand, **attrs: Attribute) -> Value:
    """The value of one step; ``args`` are values of one epilogue, and numbers."""
    builder, names = _arguments(op, args)
    return Value(builder, builder.add(op, *names, **attrs))


def apply_moments(x: Value) -> Moments:
    """The two values of a ``moments`` step."""
    builder, names = _arguments("moments", (x,))
    stem = builder.add("moments", *names)
    return Moments(Value(builder, f"{stem}.0"), Value(builder, f"{stem}.1"))


def _arguments(op: str, args: tuple[Operand, ...]) -> tuple[Builder, list[Argument]]:
    builders = {id(a._builder): a._builder for a in args if isinstance(a, Value)}
    if len(builders) != 1:
        found = "values of different epilogues" if builders else f"{args}, none of them an epilogue value"
        raise ShapeError(f"{op} is applied to {found}: operands come from one function decorated with @epilogue")
    names: list[Argument] = []
    for arg in args:
        if not isinstance(arg, (Value, int, float, np.number)):
            raise ShapeError(f"{op} is applied to a {type(arg).__name__}: an operand is an epilogue value or a number")
        names.append(arg.name if isinstance(arg, Value) else float(arg))
    return next(iter(builders.values())), names


class Epilogue:
    """A function over tile values, and the program it makes. Call it inside another epilogue to compose the two."""

    def __init__(self, function: Callable[..., Any], statics: Mapping[str, Any] | None = None) -> None:
        self._function = function
        self._statics = dict(statics or {})
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    @cached_property
    def program(self) -> EpilogueProgram:
        """The program: parameters in the function's order; outputs ``y``, ``y0, y1, …`` of a tuple, or a dict's keys."""
        return _trace(self._function, self._statics)

    def specialize(self, **statics: Any) -> Epilogue:
        """The same epilogue with other values for its Python-typed parameters."""
        known = {
            name for name, hint in _hints(self._function).items() if hint is not None and not isinstance(hint, Kind)
        }
        unknown = sorted(set(statics) - known)
        if unknown:
            raise ShapeError(f"epilogue {self.__name__} has no fixed parameter '{unknown[0]}'; it has {sorted(known)}")
        return Epilogue(self._function, {**self._statics, **statics})

    def reference(
        self, acc: Array, operands: Mapping[str, Any] | None = None, rows_per_batch: int | None = None
    ) -> dict[str, Array]:
        """The program's outputs in float64; see ``EpilogueProgram.reference``."""
        return self.program.reference(acc, operands, rows_per_batch)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **{**self._statics, **kwargs})

    def __repr__(self) -> str:
        return f"<epilogue {self.__name__}>"


def epilogue(function: Callable[..., Any]) -> Epilogue:
    """Makes an epilogue of ``function(acc, operands…)``, which returns a value, a tuple, or a dict of named values."""
    return Epilogue(function)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """For each parameter: its Kind, its Python type, or None if it has no annotation."""
    hints = get_type_hints(function, include_extras=True)
    kinds = {name: _operand_kind(hints.get(name)) for name in inspect.signature(function).parameters}
    return {name: kind or hints.get(name) for name, kind in kinds.items()}


def _operand_kind(hint: Any) -> Kind | None:
    return next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Kind)), None)


def _operand(name: str, kind: Kind, hint: Any) -> Param:
    """The operand that an annotation describes: kind, dtype, which rows it has, period."""
    marks = getattr(hint, "__metadata__", ())
    dtype = next((m for m in marks if isinstance(m, str) and not isinstance(m, (Kind, Rows))), "f32")
    rows = next((m for m in marks if isinstance(m, Rows)), Rows.ALL)
    period = next((m.columns for m in marks if isinstance(m, Period)), None)
    return Param(name, kind, dtype, rows, period)


def _trace(function: Callable[..., Any], statics: Mapping[str, Any]) -> EpilogueProgram:
    where = f"epilogue {function.__name__}"
    parameters = inspect.signature(function).parameters
    kinds = _hints(function)
    hints = get_type_hints(function, include_extras=True)
    if not parameters:
        raise ShapeError(f"{where} has no parameter: the first is the accumulator")
    first = next(iter(parameters))
    kinds[first] = kinds[first] or Kind.TILE
    if kinds[first] is not Kind.TILE:
        raise ShapeError(f"{where}: the first parameter '{first}' is the accumulator and must be a Tile")
    builder = Builder(params=())
    arguments: dict[str, Any] = {}
    for name, parameter in parameters.items():
        kind = kinds[name]
        if isinstance(kind, Kind):
            arguments[name] = Value(builder, builder.declare(_operand(name, kind, hints.get(name))))
        elif kind is None:
            raise ShapeError(f"{where}: annotate '{name}' as Tile, Row, Col or Scalar, or with a Python type")
        elif name in statics or parameter.default is not parameter.empty:
            arguments[name] = statics.get(name, parameter.default)
        else:
            raise ShapeError(f"{where}: '{name}' has no default: give it, {function.__name__}.specialize({name}=…)")
    for name, result in _named_results(where, function(**arguments)).items():
        store = result if isinstance(result, Stored) else Stored(result)
        if not isinstance(store.value, Value) or store.value._builder is not builder:
            raise ShapeError(f"{where}: result '{name}' is {store.value!r}, not a value computed from its operands")
        builder.output(name, store.value.name, store.columns, store.heads, store.halves)
    return builder.build()


def _named_results(where: str, result: Any) -> dict[str, Any]:
    if isinstance(result, dict):
        return result
    if isinstance(result, Moments):
        return result._asdict()
    if isinstance(result, (tuple, list)):
        return {f"y{i}": r for i, r in enumerate(result)}
    if result is None:
        raise ShapeError(f"{where} returns nothing: return a value, a tuple or a dict of values")
    return {"y": result}
