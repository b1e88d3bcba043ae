"""Which values are whole numbers within known limits: interval arithmetic over epilogue programs and bodies of maps.

``Interval`` says of each element, but NaN, that it lies between two limits, and whether it is a whole number. A quantised value is
``clip(round(x / s) + z)``, perhaps less z: the limits that Min and Max set are its own, however the model spells it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs

from .epilogue.program import Argument, EpilogueProgram
from .ir import ELEMENTWISE, VIEWS, Array, Tensor, constant_value, in_order

_MOVES = frozenset({*VIEWS, "Transpose", "Slice", "Gather", "GatherND", "GatherElements", "Expand", "Tile", "Identity"})
_DTYPES: dict[str, npt.DTypeLike] = {"i8": np.int8, "u8": np.uint8, "i32": np.int32, "i64": np.int64}


@dataclass(frozen=True)
class Interval:
    """``low ≤ x ≤ high``; ``whole``: x is an integer."""

    low: float = -math.inf
    high: float = math.inf
    whole: bool = False

    @property
    def finite(self) -> bool:
        """Whether it has both limits."""
        return math.isfinite(self.low) and math.isfinite(self.high)


ANY = Interval()
"""What is known of any number."""


def of_array(values: Array) -> Interval:
    """The narrowest interval of all elements."""
    if not values.size or values.dtype.kind not in "iuf" or not np.all(np.isfinite(values)):
        return ANY
    return Interval(float(values.min()), float(values.max()), bool(np.all(values == np.rint(values))))


def of_dtype(dtype: np.dtype[Any]) -> Interval:
    """What is known of any element of a tensor of ``dtype``."""
    if dtype.kind not in "iu":
        return ANY
    limits = np.iinfo(dtype)
    return Interval(float(limits.min), float(limits.max), True)


def of_program(program: EpilogueProgram) -> dict[str, Interval]:
    """The interval of each value of an epilogue program."""
    found = {p.name: of_dtype(np.dtype(_DTYPES[p.dtype])) if p.dtype in _DTYPES else ANY for p in program.params}

    dtypes = program.dtypes()

    def argument(value: Argument) -> Interval:
        return found[value] if isinstance(value, str) else Interval(value, value, value == round(value))

    for step in program.steps:
        args = [argument(a) if isinstance(a, str) or math.isfinite(a) else ANY for a in step.args]
        if step.op == "cast":
            to = str(step.attr("to"))
            result = _cast(args[0], np.dtype(_DTYPES.get(to, np.float32)))
        else:
            result = _wrapped(_RULES.get(step.op, _unknown)(args), _DTYPES.get(dtypes[step.names[0]]))
        found |= dict.fromkeys(step.names, result)
    return found


def of_body(body: gs.Graph) -> dict[int, Interval]:
    """The interval of each tensor of a body of elementwise operators and moves, by id; others are ``ANY``."""
    found: dict[int, Interval] = {}

    def known(tensor: Tensor) -> Interval:
        if id(tensor) not in found:
            value = constant_value(tensor)
            dtype = None if tensor.dtype is None else np.dtype(tensor.dtype)
            found[id(tensor)] = ANY if dtype is None else of_dtype(dtype) if value is None else of_array(value)
        return found[id(tensor)]

    for node in in_order(body):
        result = ANY
        if not node.domain and node.outputs:
            args = [known(t) for t in node.inputs if t.name or isinstance(t, gs.Constant)]
            if node.op == "Cast":
                result = _cast(args[0], np.dtype(onnx.helper.tensor_dtype_to_np_dtype(node.attrs["to"])))
            elif node.op in _MOVES:
                result = args[0]
            elif node.op == "Concat":
                result = _union(args)
            elif node.op in ELEMENTWISE:
                result = _wrapped(_RULES.get(ELEMENTWISE[node.op], _unknown)(args), node.outputs[0].dtype)
        found |= {id(t): result for t in node.outputs}
    return found


def _unknown(args: Sequence[Interval]) -> Interval:
    return ANY


def _wrapped(x: Interval, dtype: npt.DTypeLike | None) -> Interval:
    """``x`` as ``dtype`` holds it: whole numbers beyond an integer's limits come out as others."""
    limits = ANY if dtype is None else of_dtype(np.dtype(dtype))
    return limits if x.low < limits.low or x.high > limits.high else x


def _cast(x: Interval, dtype: np.dtype[Any]) -> Interval:
    if dtype.kind == "f":
        return x if x.whole and x.finite and max(-x.low, x.high) <= 256 else ANY
    limits = of_dtype(dtype)
    inside = x.whole and x.low >= limits.low and x.high <= limits.high
    return x if inside else limits


def _union(args: Sequence[Interval]) -> Interval:
    return Interval(min(a.low for a in args), max(a.high for a in args), all(a.whole for a in args))


def _sum(args: Sequence[Interval]) -> Interval:
    a, b = args
    return Interval(a.low + b.low, a.high + b.high, a.whole and b.whole)


def _difference(args: Sequence[Interval]) -> Interval:
    a, b = args
    return _sum([a, Interval(-b.high, -b.low, b.whole)])


def _product(args: Sequence[Interval]) -> Interval:
    a, b = args
    if not (a.finite and b.finite):
        return Interval(whole=a.whole and b.whole)
    ends = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    return Interval(min(ends), max(ends), a.whole and b.whole)


def _rounded(function: Callable[[float], float]) -> Callable[[Sequence[Interval]], Interval]:
    """A step of a monotone function whose results are whole."""

    def rule(args: Sequence[Interval]) -> Interval:
        low, high = (function(v) if math.isfinite(v) else v for v in (args[0].low, args[0].high))
        return Interval(float(low), float(high), True)

    return rule


_RULES: dict[str, Callable[[Sequence[Interval]], Interval]] = {
    "add": _sum,
    "sub": _difference,
    "mul": _product,
    "neg": lambda args: Interval(-args[0].high, -args[0].low, args[0].whole),
    "min": lambda args: Interval(min(a.low for a in args), min(a.high for a in args), all(a.whole for a in args)),
    "max": lambda args: Interval(max(a.low for a in args), max(a.high for a in args), all(a.whole for a in args)),
    "relu": lambda args: Interval(max(args[0].low, 0.0), max(args[0].high, 0.0), args[0].whole),
    "round": _rounded(round),
    "floor": _rounded(math.floor),
    "ceil": _rounded(math.ceil),
    "sign": lambda args: Interval(-1.0, 1.0, True),
    "where": lambda args: _union(args[1:]),
    "even": lambda args: args[0],
    "odd": lambda args: args[0],
    "interleave": _union,
}
"""What operators of epilogue programs make of intervals; any other may give any number."""
