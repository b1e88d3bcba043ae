"""The text form of an epilogue program: written on ONNX nodes, read by people and by ``parse_program``.

::

    program = "(" params ")" "->" "(" outputs ")" "{" steps "}"
    param   = NAME ":" kind ["[" ("position" | "batch" | "period=" INT), ... "]"] dtype
    output  = NAME ":" kind "=" value ["[" INT ":" INT "]"] ["heads" "[" INT "]" ["halves" ["[" INT ":" INT, ... "]"]]]
    step    = NAME "=" op operand... [NAME "=" attribute]...          one a line
    operand = value | float, as Python's repr writes it
"""

from __future__ import annotations

import re

from ..errors import ShapeError
from .program import Argument, Attribute, EpilogueProgram, Kind, Output, Param, Rows, Step

_PROGRAM = re.compile(r"\s*\((?P<params>[^)]*)\)\s*->\s*\((?P<outputs>[^)]*)\)\s*\{(?P<steps>[^}]*)\}\s*")
_PARAM = re.compile(r"(\w+): (\w+)(?:\[(?:(position|batch)(?:, )?)?(?:period=(\d+))?\])? (\w+)")
_OUTPUT = re.compile(
    r"(\w+): (\w+) = ([\w.]+)(?:\[(\d+):(\d+)\])?(?: heads\[(\d+)\](?:( halves)(?:\[([\d:, ]+)\])?)?)?"
)
_STEP = re.compile(r"(\w+) = (\w+)((?: [^\s=]+)*?)((?: \w+=\S+)*)")


def format_program(program: EpilogueProgram) -> str:
    """``program`` as text."""
    params = ", ".join(_format_param(p) for p in program.params)
    outputs = ", ".join(_format_output(o) for o in program.outputs)
    steps = "".join(f"  {_format_step(s)}\n" for s in program.steps)
    return f"({params}) -> ({outputs}) {{\n{steps}}}"


def parse_program(text: str) -> EpilogueProgram:
    """The program that ``text`` spells. Raises ShapeError naming the piece that cannot be read."""
    match = _PROGRAM.fullmatch(text)
    if match is None:
        raise ShapeError(f"not an epilogue program, expected '(params) -> (outputs) {{ steps }}': {text[:80]!r}")
    params = tuple(_parse_param(p) for p in _split(match["params"], r",(?![^\[]*\])"))
    outputs = tuple(_parse_output(o) for o in _split(match["outputs"], r",(?![^\[]*\])"))
    return EpilogueProgram(params, tuple(_parse_step(s) for s in _split(match["steps"], "\n")), outputs)


def _format_param(param: Param) -> str:
    shared = [param.rows.value] if param.rows is not Rows.ALL else []
    shared += [f"period={param.period}"] if param.period is not None else []
    return f"{param.name}: {param.kind.value}{'[' + ', '.join(shared) + ']' if shared else ''} {param.dtype}"


def _format_output(output: Output) -> str:
    columns = f"[{output.columns[0]}:{output.columns[1]}]" if output.columns else ""
    heads = f" heads[{output.heads}]" if output.heads is not None else ""
    ranges = ", ".join(f"{start}:{end}" for start, end in output.halves)
    halves = "" if not ranges else " halves" if output.halves == ((0, output.heads),) else f" halves[{ranges}]"
    return f"{output.name}: {output.kind.value} = {output.value}{columns}{heads}{halves}"


def _format_step(step: Step) -> str:
    args = (a if isinstance(a, str) else repr(a) for a in step.args)
    return " ".join([step.result, "=", step.op, *args, *(f"{name}={value}" for name, value in step.attrs)])


def _split(text: str, separator: str) -> list[str]:
    return [" ".join(piece.split()) for piece in re.split(separator, text) if piece.strip()]


def _match(pattern: re.Pattern[str], text: str, what: str, form: str) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise ShapeError(f"cannot read epilogue {what} {text!r}: expected '{form}'")
    return match


def _kind(text: str, what: str) -> Kind:
    try:
        return Kind(text)
    except ValueError:
        raise ShapeError(f"{what} has unknown kind '{text}': use one of {', '.join(k.value for k in Kind)}") from None


def _parse_param(text: str) -> Param:
    match = _match(_PARAM, text, "parameter", "name: kind[position, period=P] dtype")
    name, kind, rows, period, dtype = match.groups()
    shared = Rows(rows) if rows else Rows.ALL
    return Param(name, _kind(kind, f"parameter '{name}'"), dtype, shared, int(period) if period else None)


def _parse_output(text: str) -> Output:
    match = _match(_OUTPUT, text, "output", "name: kind = value[c0:c1] heads[D] halves[a:b, c:d]")
    name, kind, value, start, end, heads, halves, ranges = match.groups()
    columns = (int(start), int(end)) if start else None
    parts = ((int(a), int(b)) for a, b in re.findall(r"(\d+):(\d+)", ranges or f"0:{heads}"))
    return Output(
        name,
        _kind(kind, f"output '{name}'"),
        value,
        columns,
        int(heads) if heads else None,
        tuple(parts) if halves else (),
    )


def _parse_step(text: str) -> Step:
    result, op, args, attrs = _match(_STEP, text, "step", "name = op operand…").groups()
    pairs = (a.split("=", 1) for a in attrs.split())
    return Step(result, op, tuple(_argument(a) for a in args.split()), tuple((n, _attribute(v)) for n, v in pairs))


def _argument(text: str) -> Argument:
    try:
        return float(text)
    except ValueError:
        return text


def _attribute(text: str) -> Attribute:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
