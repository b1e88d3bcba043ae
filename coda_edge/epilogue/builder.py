"""Growing an epilogue program step by step: what passes and the ``@epilogue`` decorator write with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..errors import ShapeError
from .ops import Group
from .program import Argument, Attribute, EpilogueProgram, Kind, Output, Param, Rows, Step, ValueType, step_type


class Builder:
    """A program under construction. Equal steps are made once; steps that no output needs are left out by ``build``.

    >>> b = Builder()
    >>> v = b.add("add", "acc", b.param("bias", Kind.COL))
    >>> b.output("y", v)
    >>> b.build()
    """

    def __init__(
        self, program: EpilogueProgram | None = None, params: Iterable[Param] = (Param("acc", Kind.TILE),)
    ) -> None:
        """A builder that goes on from ``program``, or one that has only ``params``, the accumulator first."""
        self._params: dict[str, Param] = {}
        self._steps: dict[str, Step] = {}
        self._memo: dict[str, str] = {}
        self._outputs: dict[str, Output] = {}
        self._types: dict[str, ValueType] = {}
        self._reduced: set[str] = set()
        for param in params if program is None else program.params:
            self.declare(param)
        if program is None:
            return
        values = self._copy_steps(program, {p.name: p.name for p in program.params})
        for output in program.outputs:
            self._outputs[output.name] = replace(output, value=str(values[output.value]))

    @property
    def params(self) -> tuple[Param, ...]:
        """The parameters so far, the accumulator first."""
        return tuple(self._params.values())

    @property
    def outputs(self) -> dict[str, Output]:
        """The outputs so far, by name (a copy)."""
        return dict(self._outputs)

    def param(self, name: str, kind: Kind, dtype: str = "f32", rows: Rows = Rows.ALL, period: int | None = None) -> str:
        """Declares an operand and returns its name, which gets a number appended if it is taken."""
        return self.declare(Param(name, kind, dtype, rows, period))

    def declare(self, param: Param) -> str:
        """Declares an operand like ``param`` and returns its name, which gets a number appended if it is taken."""
        name = self._fresh(param.name)
        self._params[name] = replace(param, name=name)
        self._types[name] = (param.kind, param.dtype)
        return name

    def add(self, op: str, *args: Argument, **attrs: Attribute) -> str:
        """Appends a step, unless there is an equal one; returns the name of its result.

        Of a step of several results that is the stem: they are ``f"{name}.0"``, ``f"{name}.1"``. Raises ShapeError where
        kinds or dtypes do not fit.
        """
        operands = tuple(a if isinstance(a, str) else float(a) for a in args)
        step = Step(self._fresh(f"v{len(self._steps)}"), op, operands, tuple(sorted(attrs.items())))
        result = step_type(step, self._types, self._reduced)
        spelled = [a if isinstance(a, str) else repr(a) for a in operands]
        if step.operator.commutes:
            spelled.sort()
        key = " ".join([op, *spelled, *(f"{k}={v}" for k, v in step.attrs)])
        if key not in self._memo:
            self._memo[key] = step.result
            self._steps[step.result] = step
            self._types.update(dict.fromkeys(step.names, result))
            if step.operator.group is Group.REDUCE:
                self._reduced.update(step.names)
        return self._memo[key]

    def kind(self, value: str) -> Kind:
        """The kind of a value."""
        return self._types[value][0]

    def dtype(self, value: str) -> str:
        """The dtype of a value."""
        return self._types[value][1]

    def output(
        self,
        name: str,
        value: str,
        columns: tuple[int, int] | None = None,
        heads: int | None = None,
        halves: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Declares an output, or replaces the one of that name in its place."""
        if value not in self._types:
            raise ShapeError(
                f"epilogue output '{name}': there is no value '{value}'; there are {', '.join(self._types)}"
            )
        self._outputs[name] = Output(name, self.kind(value), value, columns, heads, halves)

    def output_like(self, output: Output, value: str) -> None:
        """Declares ``value`` as an output that is named and stored as ``output`` is."""
        self.output(output.name, value, output.columns, output.heads, output.halves)

    def drop_output(self, name: str) -> None:
        """Removes an output."""
        del self._outputs[name]

    def inline(self, program: EpilogueProgram, bindings: Mapping[str, Argument]) -> dict[str, str]:
        """Appends the steps of ``program`` with its parameters bound to values or literals; returns its outputs' values."""
        missing = [p.name for p in program.params if p.name not in bindings]
        if missing:
            raise ShapeError(f"inlined epilogue needs a value for '{missing[0]}'")
        values = self._copy_steps(program, {p.name: bindings[p.name] for p in program.params})
        return {o.name: str(values[o.value]) for o in program.outputs}

    def build(self, drop_unused_params: bool = False) -> EpilogueProgram:
        """The checked program: steps that outputs need, numbered in order. Raises ShapeError as ``check`` does."""
        needed = [o.value for o in self._outputs.values()]
        kept: list[Step] = []
        for step in reversed(self._steps.values()):
            if any(name in needed for name in step.names):
                kept.append(step)
                needed += [a for a in step.args if isinstance(a, str)]
        kept.reverse()
        first = next(iter(self._params))
        params = (p for p in self._params.values() if not drop_unused_params or p.name == first or p.name in needed)
        program = EpilogueProgram(tuple(params), tuple(kept), tuple(self._outputs.values()))
        taken = {p.name for p in program.params}
        numbers = (f"v{i}" for i in range(len(kept) + len(taken)))
        names = dict(zip((s.result for s in kept), (n for n in numbers if n not in taken), strict=False))
        return program.rename(names)

    def _copy_steps(self, program: EpilogueProgram, values: dict[str, Argument]) -> dict[str, Argument]:
        values = dict(values)
        for step in program.steps:
            args = (values[a] if isinstance(a, str) else a for a in step.args)
            stem = self.add(step.op, *args, **dict(step.attrs))
            new = replace(step, result=stem)
            values.update(zip(step.names, new.names, strict=True))
        return values

    def _fresh(self, name: str) -> str:
        taken = {*self._params, *self._steps}
        unique, count = name, 1
        while unique in taken:
            unique, count = f"{name}_{count}", count + 1
        return unique


def append(first: EpilogueProgram, second: EpilogueProgram, at: str) -> EpilogueProgram:
    """``second`` after ``first``: its accumulator is the value of ``first``'s output ``at``, which its outputs replace.

    Parameters of ``second`` follow those of ``first``; names that are taken get a number.
    """
    joint = first.output(at)
    if joint.kind is not Kind.TILE or joint.columns or joint.heads:
        raise ShapeError(f"cannot go on from output '{at}': it is not a whole tile in row-major layout")
    builder = Builder(first)
    bindings: dict[str, Argument] = {second.params[0].name: builder.outputs[at].value}
    for param in second.params[1:]:
        bindings[param.name] = builder.declare(param)
    values = builder.inline(second, bindings)
    builder.drop_output(at)
    for output in second.outputs:
        if output.name in builder.outputs:
            raise ShapeError(f"both epilogues have an output '{output.name}': rename one")
        builder.output_like(output, values[output.name])
    return builder.build()
