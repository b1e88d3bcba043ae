"""The operators an epilogue step may use: one row each, and everything about an operator is in its row.

A row gives arity, typing rule, numpy meaning, ONNX spelling in basic operators, cost, and of functions of floats the kernels'
spelling. From it come what passes take into an epilogue, the shapes and kernels of the ONNX operator on its own, and its place in an
optimized model: a new operator is a row. The spelling of arithmetic, comparisons and reductions depends on dtypes and panels and is keyed
by the same names in ``tir.py`` and ``lower/statistics.py``. Composite functions (GELU, SiLU, …) are not operators: they are Python functions in ``math.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"


class Group(str, Enum):
    """How an operator's result lies on the tile."""

    POINTWISE = "pointwise"
    PAIRWISE = "pairwise"
    REDUCE = "reduce"
    HEADS = "heads"


class Rule(str, Enum):
    """What dtypes an operator takes and gives. Mixed floats widen; floats and integers never mix silently."""

    NUMERIC = "numeric"
    """Floats or integers, all alike; the result is of their dtype."""
    FLOAT = "float"
    """Floats; the result is of their dtype."""
    COMPARE = "compare"
    """Floats or integers, all alike; the result is bool."""
    LOGIC = "logic"
    """bool; the result is bool."""
    PREDICATE = "predicate"
    """Floats; the result is bool."""
    SELECT = "select"
    """bool, then two of any one dtype; the result is of theirs."""
    CAST = "cast"
    """Anything; the result is of the dtype that attribute ``to`` names."""
    ANY = "any"
    """Anything, all alike; the result is of that dtype."""
    PLACE = "place"
    """Floats; the result is i64: which column."""
    STATISTIC = "statistic"
    """Floats; the result is f32, whatever the operand: statistics of narrow floats are kept wide."""


class NodeEmitter(Protocol):
    """What an operator's ONNX spelling writes to (implemented in ``onnx.py``)."""

    def node(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Appends a node; returns the name of its output."""

    def ints(self, values: list[int]) -> str:
        """The name of an int64 vector constant."""


OnnxSpelling: TypeAlias = "str | Callable[[NodeEmitter, list[str]], tuple[str, ...]]"


@dataclass(frozen=True)
class Operator:
    """One operator. ``numpy`` takes as many arrays as ``arity`` and returns one array, or ``results`` of them.

    ``onnx`` is an operator type, or a function that appends nodes and returns the names of the results. ``kernel`` gives a
    function of floats as an expression: it is called with the functions of ``lower/intrinsics.py`` (the module) and the operands, vectors
    or scalars of float32. ``flops`` counts per element of the widest operand.
    """

    name: str
    arity: int
    rule: Rule
    numpy: Callable[..., Any]
    onnx: OnnxSpelling
    flops: int = 1
    kernel: Callable[..., Any] | None = None
    group: Group = Group.POINTWISE
    results: int = 1
    commutes: bool = False


_erf = np.frompyfunc(math.erf, 1, 1)


def _numpy_erf(x: Array) -> Array:
    return np.asarray(_erf(np.asarray(x, np.float64))).astype(np.asarray(x).dtype)


def _numpy_sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def _numpy_interleave(even: Array, odd: Array) -> Array:
    return np.stack([even, odd], -1).reshape(*even.shape[:-1], 2 * even.shape[-1])


def _numpy_moments(x: Array) -> tuple[Array, Array]:
    mean = x.mean(-1, keepdims=True)
    return mean, np.square(x - mean).mean(-1, keepdims=True)


def _numpy_argmax(x: Array) -> Array:
    return np.asarray(x.argmax(-1)[..., None])


def _numpy_expsum(x: Array) -> tuple[Array, Array]:
    largest = x.max(-1, keepdims=True)
    return largest, np.exp(x - largest).sum(-1, keepdims=True)


def _onnx_rsqrt(emit: NodeEmitter, args: list[str]) -> tuple[str, ...]:
    return (emit.node("Reciprocal", emit.node("Sqrt", args[0])),)


def _onnx_every_second(start: int) -> Callable[[NodeEmitter, list[str]], tuple[str, ...]]:
    def spell(emit: NodeEmitter, args: list[str]) -> tuple[str, ...]:
        end = emit.ints([np.iinfo(np.int64).max])
        return (emit.node("Slice", args[0], emit.ints([start]), end, emit.ints([-1]), emit.ints([2])),)

    return spell


def _onnx_interleave(emit: NodeEmitter, args: list[str]) -> tuple[str, ...]:
    last = emit.ints([-1])
    pair = emit.node("Concat", *(emit.node("Unsqueeze", a, last) for a in args), axis=-1)
    shape = emit.node("Concat", emit.node("Shape", args[0], end=-1), last, axis=0)
    return (emit.node("Reshape", pair, shape),)


def _onnx_reduce(op_type: str) -> Callable[[NodeEmitter, list[str]], tuple[str, ...]]:
    def spell(emit: NodeEmitter, args: list[str]) -> tuple[str, ...]:
        return (emit.node(op_type, args[0], emit.ints([-1]), keepdims=1),)

    return spell


def _onnx_sumsq(emit: NodeEmitter, args: list[str]) -> tuple[str, ...]:
    return _onnx_reduce("ReduceSum")(emit, [emit.node("Mul", args[0], args[0])])


def _onnx_moments(emit: NodeEmitter, args: list[str]) -> tuple[str, ...]:
    mean = emit.node("ReduceMean", args[0], emit.ints([-1]), keepdims=1)
    centred = emit.node("Sub", args[0], mean)
    return mean, emit.node("ReduceMean", emit.node("Mul", centred, centred), emit.ints([-1]), keepdims=1)


def _onnx_argmax(emit: NodeEmitter, args: list[str]) -> tuple[str, ...]:
    return (emit.node("ArgMax", args[0], axis=-1, keepdims=1),)


def _onnx_expsum(emit: NodeEmitter, args: list[str]) -> tuple[str, ...]:
    (largest,) = _onnx_reduce("ReduceMax")(emit, args)
    terms = emit.node("Exp", emit.node("Sub", args[0], largest))
    return largest, *_onnx_reduce("ReduceSum")(emit, [terms])


_N, _F, _C, _L = Rule.NUMERIC, Rule.FLOAT, Rule.COMPARE, Rule.LOGIC
_PAIR, _REDUCE = Group.PAIRWISE, Group.REDUCE

OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator("add", 2, _N, np.add, "Add", commutes=True),
        Operator("sub", 2, _N, np.subtract, "Sub"),
        Operator("mul", 2, _N, np.multiply, "Mul", commutes=True),
        Operator("div", 2, _F, np.divide, "Div", 4, lambda t, a, b: a / b),
        Operator("neg", 1, _N, np.negative, "Neg"),
        Operator("abs", 1, _N, np.abs, "Abs"),
        Operator("min", 2, _N, np.minimum, "Min", commutes=True),
        Operator("max", 2, _N, np.maximum, "Max", commutes=True),
        Operator("exp", 1, _F, np.exp, "Exp", 10, lambda t, x: t.exp(x)),
        Operator("log", 1, _F, np.log, "Log", 12, lambda t, x: t.log(x)),
        Operator("sqrt", 1, _F, np.sqrt, "Sqrt", 4, lambda t, x: t.sqrt(x)),
        Operator("rsqrt", 1, _F, lambda x: 1 / np.sqrt(x), _onnx_rsqrt, 8, lambda t, x: t.rsqrt(x)),
        Operator("reciprocal", 1, _F, lambda x: 1 / x, "Reciprocal", 4, lambda t, x: t.f32(1) / x),
        Operator("erf", 1, _F, _numpy_erf, "Erf", 16, lambda t, x: t.erf(x)),
        Operator("tanh", 1, _F, np.tanh, "Tanh", 16, lambda t, x: t.tanh(x)),
        Operator("sigmoid", 1, _F, _numpy_sigmoid, "Sigmoid", 14, lambda t, x: t.sigmoid(x)),
        Operator("relu", 1, _F, lambda x: np.maximum(x, 0), "Relu", 1, lambda t, x: t.relu(x)),
        Operator("pow", 2, _F, np.power, "Pow", 24, lambda t, a, b: t.power(a, b)),
        Operator("floor", 1, _F, np.floor, "Floor", 1, lambda t, x: t.floor(x)),
        Operator("ceil", 1, _F, np.ceil, "Ceil", 1, lambda t, x: t.ceil(x)),
        Operator("round", 1, _F, np.rint, "Round", 1, lambda t, x: t.round_even(x)),
        Operator("sign", 1, _N, np.sign, "Sign"),
        Operator("sin", 1, _F, np.sin, "Sin", 14, lambda t, x: t.sin(x)),
        Operator("cos", 1, _F, np.cos, "Cos", 14, lambda t, x: t.cos(x)),
        Operator("eq", 2, _C, np.equal, "Equal", commutes=True),
        Operator("lt", 2, _C, np.less, "Less"),
        Operator("le", 2, _C, np.less_equal, "LessOrEqual"),
        Operator("gt", 2, _C, np.greater, "Greater"),
        Operator("ge", 2, _C, np.greater_equal, "GreaterOrEqual"),
        Operator("and", 2, _L, np.logical_and, "And", commutes=True),
        Operator("or", 2, _L, np.logical_or, "Or", commutes=True),
        Operator("not", 1, _L, np.logical_not, "Not"),
        Operator("where", 3, Rule.SELECT, np.where, "Where"),
        Operator("isnan", 1, Rule.PREDICATE, np.isnan, "IsNaN"),
        Operator("cast", 1, Rule.CAST, lambda x: x, "Cast"),
        Operator("even", 1, Rule.ANY, lambda x: x[..., 0::2], _onnx_every_second(0), 0, group=_PAIR),
        Operator("odd", 1, Rule.ANY, lambda x: x[..., 1::2], _onnx_every_second(1), 0, group=_PAIR),
        Operator("interleave", 2, Rule.ANY, _numpy_interleave, _onnx_interleave, 0, group=_PAIR),
        Operator(
            "sum", 1, Rule.STATISTIC, lambda x: x.sum(-1, keepdims=True), _onnx_reduce("ReduceSum"), 1, group=_REDUCE
        ),
        Operator(
            "sumsq", 1, Rule.STATISTIC, lambda x: np.square(x).sum(-1, keepdims=True), _onnx_sumsq, 2, group=_REDUCE
        ),
        Operator(
            "rowmax", 1, Rule.STATISTIC, lambda x: x.max(-1, keepdims=True), _onnx_reduce("ReduceMax"), 1, group=_REDUCE
        ),
        Operator(
            "mean", 1, Rule.STATISTIC, lambda x: x.mean(-1, keepdims=True), _onnx_reduce("ReduceMean"), 1, group=_REDUCE
        ),
        Operator(
            "rowmin", 1, Rule.STATISTIC, lambda x: x.min(-1, keepdims=True), _onnx_reduce("ReduceMin"), 1, group=_REDUCE
        ),
        # Given a tile as [.., heads, columns of a head].
        Operator(
            "headsum",
            1,
            Rule.STATISTIC,
            lambda x: x.sum(-1, keepdims=True),
            _onnx_reduce("ReduceSum"),
            1,
            group=Group.HEADS,
        ),
        Operator("argmax", 1, Rule.PLACE, _numpy_argmax, _onnx_argmax, 2, group=_REDUCE),
        Operator("expsum", 1, Rule.STATISTIC, _numpy_expsum, _onnx_expsum, 12, group=_REDUCE, results=2),
        Operator("moments", 1, Rule.STATISTIC, _numpy_moments, _onnx_moments, 4, group=_REDUCE, results=2),
    )
}
