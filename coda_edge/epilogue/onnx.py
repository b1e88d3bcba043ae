"""An epilogue program as ONNX nodes in basic operators (opset 18 or later), for function bodies that run anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from ..errors import InvalidModel, ShapeError
from .ops import Group
from .program import Argument, EpilogueProgram, Kind, Output, Param, Step

MIN_OPSET = 18
"""Since this opset reductions take their axes as an input."""

ONNX_DTYPES: dict[str, int] = {
    "f16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
    "f32": TensorProto.FLOAT,
    "i8": TensorProto.INT8,
    "u8": TensorProto.UINT8,
    "i32": TensorProto.INT32,
    "i64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}
"""The ONNX element type of each dtype that a program may name."""


def emit_onnx(
    program: EpilogueProgram,
    inputs: Sequence[str],
    outputs: Sequence[str],
    prefix: str,
    opset: int = MIN_OPSET,
    columns: int | None = None,
    before: Sequence[NodeProto] = (),
) -> list[NodeProto]:
    """Nodes that compute ``program`` from tensors ``inputs`` (in the order of its parameters) into ``outputs``.

    Tiles are ``[…, N]`` of any rank (3 where rows are batched), rows ``[…, 1]``, columns ``[N]``, scalars 0-D, each of
    its parameter's dtype; ``position`` operands are ``[1, S, …]`` or ``[S, …]`` and ``batch`` operands ``[B, 1, …]``. ``columns`` N
    must be given if an operand has a period. ``before``: nodes that make some of the inputs; the result begins with them, and an output
    that is one of their results is made by them under its own name. Names in between begin with ``prefix``. Raises InvalidModel for an opset before 18.
    """
    if opset < MIN_OPSET:
        raise InvalidModel(f"epilogue bodies need opset {MIN_OPSET} or later, the model has {opset}: convert it first")
    if len(inputs) != len(program.params) or len(outputs) != len(program.outputs):
        raise ShapeError(
            f"the epilogue has {len(program.params)} parameters and {len(program.outputs)} outputs, "
            f"the node {len(inputs)} and {len(outputs)}"
        )
    emitter = Emitter(prefix, before)
    dtypes = program.dtypes()
    names = {p.name: name for p, name in zip(program.params, inputs, strict=True)}
    for param in program.params:
        if param.period:
            names[param.name] = _repeat(emitter, program, param, names[param.name], columns)
    for step in program.steps:
        names.update(_emit_step(emitter, program, step, names, dtypes, columns))
    stored = [_emit_output(emitter, program, output, names[output.value], columns) for output in program.outputs]
    emitter.name_results(stored, outputs)
    return emitter.nodes


class Emitter:
    """A list of nodes under construction, which goes on from ``before``; makes each constant and each cast once."""

    def __init__(self, prefix: str, before: Sequence[NodeProto] = ()) -> None:
        self.nodes = list(before)
        self._prefix = prefix
        self._memo: dict[tuple[Any, ...], str] = {}

    def node(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Appends a node of one output, whose name is returned."""
        name = f"{self._prefix}{op_type.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [name], **attributes))
        return name

    def ints(self, values: list[int]) -> str:
        """The name of an int64 vector constant."""
        return self._constant("ints", *values, tensor=numpy_helper.from_array(np.array(values, np.int64)))

    def literal(self, value: float, dtype: str) -> str:
        """The name of a 0-D constant of a program's dtype."""
        tensor = helper.make_tensor("", ONNX_DTYPES[dtype], [], [_exact(value, dtype)])
        return self._constant(dtype, repr(value), tensor=tensor)

    def cast(self, name: str, dtype: str) -> str:
        """``name`` converted to a program's dtype."""
        key = ("cast", name, dtype)
        if key not in self._memo:
            self._memo[key] = self.node("Cast", name, to=ONNX_DTYPES[dtype])
        return self._memo[key]

    def name_results(self, values: Sequence[str], names: Sequence[str]) -> None:
        """Makes each of ``values`` available under its name: by renaming it, or by a copy where it is not ours or has one."""
        ours = {name for node in self.nodes for name in node.output}
        renamed: dict[str, str] = {}
        for value, name in zip(values, names, strict=True):
            if value in ours and value not in renamed:
                renamed[value] = name
            else:
                self.nodes.append(helper.make_node("Identity", [value], [name]))
        for node in self.nodes:
            for field in (node.input, node.output):
                for i, old in enumerate(field):
                    field[i] = renamed.get(old, old)

    def _constant(self, *key: Any, tensor: onnx.TensorProto) -> str:
        if key not in self._memo:
            self._memo[key] = self.node("Constant", value=tensor)
        return self._memo[key]


def _emit_step(
    emitter: Emitter,
    program: EpilogueProgram,
    step: Step,
    names: dict[str, str],
    dtypes: dict[str, str],
    columns: int | None,
) -> dict[str, str]:
    common = program.operand_dtype(step)
    if program.head:
        names = {**names, **_fitted(emitter, program, step, names, columns)}

    def operand(position: int, arg: Argument) -> str:
        if isinstance(arg, float):
            return emitter.literal(arg, common)
        selects = step.op == "where" and position == 0
        return names[arg] if selects or dtypes[arg] == common else emitter.cast(names[arg], common)

    args = [operand(i, a) for i, a in enumerate(step.args)]
    spelling = step.operator.onnx
    if step.op == "cast":
        results: tuple[str, ...] = (emitter.cast(args[0], str(step.attr("to"))),)
    elif isinstance(spelling, str):
        results = (emitter.node(spelling, *args),)
    else:
        results = spelling(emitter, args)
    return dict(zip(step.names, results, strict=True))


def _fitted(
    emitter: Emitter, program: EpilogueProgram, step: Step, names: dict[str, str], columns: int | None
) -> dict[str, str]:
    """The operands of ``step`` that have to lie otherwise: a value of kind head is ``[B, S, heads, 1]``."""
    if columns is None:
        raise ShapeError(f"{step.op} is of heads of {program.head} columns: give the number of columns")
    kinds, heads = program.kinds(), columns // program.head
    values = [a for a in step.args if isinstance(a, str)]
    if step.operator.group is Group.HEADS:
        return {a: emitter.node("Reshape", names[a], emitter.ints([0, 0, heads, program.head])) for a in values}
    result = kinds[step.names[0]]
    if result is Kind.HEAD:
        return {a: emitter.node("Unsqueeze", names[a], emitter.ints([-1])) for a in values if kinds[a] is Kind.ROW}
    if result is not Kind.TILE:
        return {}
    wide = next(program.width(v, columns) for v in (*step.names, *values) if kinds[v] in (Kind.TILE, Kind.COL))
    fitted = {}
    for a in (v for v in values if kinds[v] is Kind.HEAD):
        repeated = emitter.node("Expand", names[a], emitter.ints([1, 1, 1, wide // heads]))
        fitted[a] = emitter.node("Reshape", repeated, emitter.ints([0, 0, wide]))
    return fitted


def _repeat(emitter: Emitter, program: EpilogueProgram, param: Param, operand: str, columns: int | None) -> str:
    """A periodic operand in the width of its value."""
    if columns is None or param.period is None:
        raise ShapeError(f"operand '{param.name}' repeats every {param.period} columns: give the number of columns")
    count = program.width(param.name, columns) // param.period
    if count == 1:
        return operand
    apart = emitter.node("Unsqueeze", operand, emitter.ints([-2]))
    shape = emitter.node("Concat", emitter.node("Shape", operand, end=-1), emitter.ints([-1]), axis=0)
    return emitter.node("Reshape", emitter.node("Expand", apart, emitter.ints([count, 1])), shape)


def _emit_output(emitter: Emitter, program: EpilogueProgram, output: Output, value: str, columns: int | None) -> str:
    if output.columns:
        start, end = output.columns
        value = emitter.node("Slice", value, emitter.ints([start]), emitter.ints([end]), emitter.ints([-1]))
    if output.heads:
        known = columns is not None or output.columns is not None
        # Of no rows at all, a -1 would tell nothing.
        count = program.output_width(output, columns or 0) // output.heads if known else -1
        if output.halves == ((0, output.heads),):
            pairs = emitter.node("Reshape", value, emitter.ints([0, 0, count, output.heads // 2, 2]))
            apart = emitter.node("Transpose", pairs, perm=[0, 2, 1, 4, 3])
            return emitter.node("Reshape", apart, emitter.ints([0, 0, 0, output.heads]))
        split = emitter.node("Reshape", value, emitter.ints([0, 0, count, output.heads]))
        value = emitter.node("Transpose", split, perm=[0, 2, 1, 3])
        if output.halves:
            value = emitter.node("Gather", value, emitter.ints(output.order), axis=-1)
    return value


def _exact(value: float, dtype: str) -> Any:
    return value if dtype in ("f16", "bf16", "f32") else int(value)
