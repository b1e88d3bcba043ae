"""What is known of a score program where a query is within or outside of a band of keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ..epilogue.builder import Builder
from ..epilogue.program import EpilogueProgram, Param, Step

_Known: TypeAlias = "str | float | bool"
#: No score that softmax tells from its neighbours is larger; a mask that adds less than its negative hides.
_LARGEST = 1e30
_MOST = 3.4028234663852886e38
#: Beyond this distance below the largest score of a query the exponential is 0.
_NOTHING = 104.0


def specialized(program: EpilogueProgram, known: Mapping[str, bool]) -> EpilogueProgram | None:
    """``program`` with bool parameters known; None if that leaves something which a program cannot say."""
    builder = Builder(params=program.params)
    dtypes = program.dtypes()
    values: dict[str, _Known] = {p.name: known.get(p.name, p.name) for p in program.params}
    for step in program.steps:
        args = [values[a] if isinstance(a, str) else a for a in step.args]
        found = _decided(step, args)
        alike = isinstance(found, float) or dtypes.get(str(found), "") == dtypes[step.result]
        if found is not None and (isinstance(found, bool) or alike):
            values[step.result] = found
        elif any(isinstance(a, bool) for a in args):
            return None
        else:
            values[step.result] = builder.add(step.op, *args, **dict(step.attrs))
            dtypes[str(values[step.result])] = dtypes[step.result]
    output = program.outputs[0]
    scores = values[output.value]
    if not isinstance(scores, str):
        return None
    builder.output(output.name, scores)
    return builder.build(drop_unused_params=True)


def _decided(step: Step, args: list[_Known]) -> _Known | None:
    """The result of a step, if what is known of its operands decides it."""
    flags = [a for a in args if isinstance(a, bool)]
    others = [a for a in args if not isinstance(a, bool)]
    if step.op in ("and", "or") and flags:
        strong = step.op == "or"
        if strong in flags:
            return strong
        return others[0] if others else not strong
    if step.op == "not" and flags:
        return not flags[0]
    if step.op == "where" and isinstance(args[0], bool):
        return args[1] if args[0] else args[2]
    if step.op == "cast" and flags and step.attr("to") != "bool":
        return float(flags[0])
    if step.op == "add" and 0.0 in others and not flags:
        return next((a for a in others if a != 0.0), 0.0)
    if step.op == "sub" and not flags and args[1] == 0.0:
        return args[0]
    return None


def hidden(program: EpilogueProgram, bands: Sequence[Param]) -> dict[int, float]:
    """The bands that hide the keys outside: by number, the largest score that such a key may have."""
    limits = {i: bound(program, {p.name: False}) for i, p in enumerate(bands)}
    return {i: limit for i, limit in limits.items() if limit <= -1e4}


def threshold(hiding: Mapping[int, float]) -> float:
    """A query with a larger score than this gives nothing to the keys that ``hiding`` hides; -inf if none does ever."""
    limit = max(hiding.values(), default=-math.inf)
    return limit if math.isinf(limit) else limit + _NOTHING


def bound(program: EpilogueProgram, known: Mapping[str, bool]) -> float:
    """A number that no score exceeds where the bool parameters are as ``known``; infinity if none is found.

    Scores and float operands are taken to be at most 1e30 themselves.
    """
    kinds = program.dtypes()
    uppers: dict[str, float | bool | None] = {
        p.name: known.get(p.name) if p.dtype == "bool" else _LARGEST for p in program.params
    }
    for step in program.steps:
        args = [uppers[a] if isinstance(a, str) else a for a in step.args]
        uppers[step.result] = _truth(step, args) if kinds[step.result] == "bool" else _upper(step, args)
    found = uppers[program.outputs[0].value]
    if found is None:
        return math.inf
    return float(found) if found >= -_MOST else -math.inf


def _truth(step: Step, args: list[float | bool | None]) -> bool | None:
    flags = [a if isinstance(a, bool) else None for a in args]
    if step.op == "not":
        return None if flags[0] is None else not flags[0]
    if step.op in ("and", "or"):
        strong = step.op == "or"
        return strong if strong in flags else None if None in flags else not strong
    return None


def _upper(step: Step, args: list[float | bool | None]) -> float:
    if step.op == "where":
        condition, *branches = args
        chosen = branches if condition is None else [branches[0 if condition else 1]]
        return max(math.inf if b is None else float(b) for b in chosen)
    numbers = [math.inf if a is None else float(a) for a in args]
    if step.op == "add":
        low = -math.inf in numbers
        return -math.inf if low else sum(numbers)
    if step.op == "mul" and any(isinstance(a, float) for a in step.args):
        scale = next(float(a) for a in step.args if isinstance(a, float))
        other = next((n for n, a in zip(numbers, step.args, strict=True) if isinstance(a, str)), math.inf)
        return scale * other if scale > 0 else math.inf
    if step.op == "min":
        return min(numbers)
    return max(numbers) if step.op in ("max", "cast") else math.inf
