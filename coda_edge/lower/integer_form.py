"""Products of whole numbers in integers, on targets that have an operation for them (``dot.py``).

A graph computes quantised values as float32. Rule: a ``coda.Gemm`` is done in bytes if

1. what it reads comes of a Map or a Gemm (views between), all whole numbers within 256 neighbouring ones, as ``ranges`` knows from how they are
   made (a window's zeros among them); each is stored as a byte, ``x - low`` apart from where the target's bytes begin;
2. its weights are whole numbers from -128 to 127, as they are stored: factors follow in the epilogue;
3. no sum can leave int32, and a window's runs are whole words.

Its epilogue begins with int32 sums, to which the shift times the sums of W's columns is added, and then is the one that there was. So the result
is what float32 sums give where these are exact, and nearer to the truth where they are not. A tensor that others read too is stored as float32 as well.

The graph is left as it is: other targets' kernels are made of it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from .. import ir
from ..epilogue.builder import Builder
from ..epilogue.program import Argument, EpilogueProgram, Kind, Param
from ..ranges import ANY, Interval, of_array, of_body, of_program
from ..targets import Target, get
from ..weights import FactoredConstant
from ..window import Window
from .dot import DOTS, Dot
from .gemm_integer import WORD

_BYTES = 255
"""The largest distance of two numbers that a byte tells apart."""
_WEIGHTS = Interval(-128.0, 127.0, True)
_SUM = 2**31 - 1
_SPELLED = {"uint8": "u8", "int8": "i8"}
_NARROWEST = 4
"""Columns from which on it pays."""


@dataclass
class _Operand:
    """A float32 tensor of whole numbers from ``low`` to ``high``, and the products that read it behind the ``views``."""

    tensor: gs.Variable
    low: int
    high: int
    readers: list[tuple[gs.Node, list[gs.Node]]]

    def shift(self, dot: Dot) -> int:
        """What is added to a number to make its byte."""
        return dot.low - self.low


def suited(targets: Sequence[Target], graph: gs.Graph) -> tuple[Target, ...]:
    """``targets``, but for each whose ``dot`` no kernel of ``graph`` has a use for its ``base``; each once."""
    chosen = (t if not t.base or _operands(graph) else get(t.base) for t in targets)
    return tuple({t.name: t for t in chosen}.values())


def integer_form(graph: gs.Graph, target: Target) -> gs.Graph:
    """``graph`` with its products of whole numbers in integers; itself if there is none or ``target`` has no operation for them."""
    if not target.dot or not _operands(graph):
        return graph
    graph, dot = copied(graph), DOTS[target.dot]
    editor = ir.GraphEditor(graph)
    for operand in _operands(graph):
        stored = _stored(editor, operand, dot)
        for gemm, views in operand.readers:
            tensor = stored
            for view in reversed(views):
                dims = ir.shape(view.outputs[0])
                out = editor.variable(f"{view.outputs[0].name}.bytes", dot.dtype, dims)
                editor.node(view.op, [tensor, *view.inputs[1:]], [out], f"{view.name}.bytes", **view.attrs)
                tensor = out
            _in_integers(editor, gemm, tensor, operand.shift(dot))
    ir.remove_dead(graph)
    ir.sort(graph)
    return graph


def _operands(graph: gs.Graph) -> list[_Operand]:
    """The tensors that are stored as bytes."""
    found: dict[int, _Operand] = {}
    ranges: dict[int, dict[int, Interval]] = {}
    for node in graph.nodes:
        if node.op != "Gemm" or node.domain != ir.DOMAIN or not _has_bytes(node.inputs[1]):
            continue
        tensor, views = node.inputs[0], list[gs.Node]()
        while (view := ir.made_by(tensor, *ir.VIEWS)) is not None:
            views.append(view)
            tensor = view.inputs[0]
        source = ir.producer(tensor)
        if source is None or source.domain != ir.DOMAIN or tensor.dtype != np.float32:
            continue
        known = ranges.setdefault(id(source), _results(source)).get(id(tensor), ANY)
        if not known.whole or not known.finite:
            continue
        low, high = int(known.low), int(known.high)
        if "window" in node.attrs:
            low, high = min(low, 0), max(high, 0)
        if high - low <= _BYTES and _fits(node):
            operand = found.setdefault(id(tensor), _Operand(tensor, low, high, []))
            joined = min(operand.low, low), max(operand.high, high)
            if joined[1] - joined[0] <= _BYTES:
                operand.low, operand.high = joined
                operand.readers.append((node, views))
    return list(found.values())


def _has_bytes(tensor: ir.Tensor) -> bool:
    """Whether a constant matrix is of whole numbers that are bytes."""
    if not isinstance(tensor, gs.Constant) or tensor.shape[1] < _NARROWEST:
        return False
    if isinstance(tensor, FactoredConstant):
        if not tensor.weight.plain:
            return False
        if tensor.weight.is_whole and np.dtype(tensor.weight.stored.dtype) == np.int8:
            return True
    known = of_array(np.asarray(tensor.values))
    return known.whole and known.low >= _WEIGHTS.low and known.high <= _WEIGHTS.high


def _fits(node: gs.Node) -> bool:
    """Whether the sums are of 32 bits, and words whole."""
    if EpilogueProgram.parse(node.attrs["epilogue"]).head:
        return False
    k = int(node.inputs[1].shape[0])
    if k * 128 * _BYTES > _SUM:
        return False
    if "window" not in node.attrs:
        return True
    return k // Window.parse(node.attrs["window"]).taps % WORD == 0


def _results(node: gs.Node) -> dict[int, Interval]:
    """What is known of each result of a node, by id."""
    if node.op == "Map":
        body: gs.Graph = node.attrs["body"]
        known = of_body(body)
        return {id(out): known.get(id(t), ANY) for out, t in zip(node.outputs, body.outputs, strict=True)}
    if node.op == "Gemm":
        program = EpilogueProgram.parse(node.attrs["epilogue"])
        values = of_program(program)
        return {id(out): values[o.value] for out, o in zip(node.outputs, program.outputs, strict=True)}
    return {}


def _stored(editor: ir.GraphEditor, operand: _Operand, dot: Dot) -> gs.Variable:
    """The operand as bytes: a result of its producer, in place of the float32 one if only products read that."""
    node, tensor = ir.producer(operand.tensor), operand.tensor
    assert node is not None
    # Until its readers read bytes they are among the consumers.
    taken = {id(n) for gemm, views in operand.readers for n in (gemm, *views)}
    others = any(id(u) not in taken or _reads_elsewhere(u, operand) for u in ir.consumers(tensor))
    keeps = others or ir.is_output(editor.graph, tensor) or not _ends_alone(editor.graph, operand)
    stored = editor.variable(f"{tensor.name}.bytes", dot.dtype, ir.shape(tensor))
    at = next(i for i, out in enumerate(node.outputs) if out is tensor)
    shift = operand.shift(dot)
    if node.op == "Map":
        body = copied(node.attrs["body"])
        value = _bytes_in_body(body, body.outputs[at], stored.name, shift, dot)
        body.outputs = [*body.outputs, value] if keeps else [*body.outputs[:at], value, *body.outputs[at + 1 :]]
        ir.remove_dead(body)
        node.attrs["body"] = body
    else:
        node.attrs["epilogue"] = str(_with_bytes(EpilogueProgram.parse(node.attrs["epilogue"]), at, shift, dot, keeps))
    if keeps:
        node.outputs.append(stored)
    else:
        node.outputs[at] = stored
    return stored


def _reads_elsewhere(node: gs.Node, operand: _Operand) -> bool:
    """Whether a reader reads the tensor as anything but the left operand of its product."""
    return any(t is operand.tensor for t in node.inputs[1:])


def _ends_alone(graph: gs.Graph, operand: _Operand) -> bool:
    """Whether only products read what the views between make."""
    gemms = {id(gemm) for gemm, _ in operand.readers}
    views = {id(v) for _, views in operand.readers for v in views}
    made = [v.outputs[0] for _, views in operand.readers for v in views]
    return all(
        not ir.is_output(graph, t) and all(id(u) in gemms | views and t is u.inputs[0] for u in ir.consumers(t))
        for t in made
    )


def _bytes_in_body(body: gs.Graph, tensor: gs.Variable, name: str, shift: int, dot: Dot) -> gs.Variable:
    """``tensor + shift`` as bytes called ``name``: where a Sub takes off just that, what it takes it off."""
    editor = ir.GraphEditor(body)
    dims, taken = ir.shape(tensor), ir.made_by(tensor, "Sub")
    if (
        taken is not None
        and ir.scalar_value(taken.inputs[1]) == shift
        and ir.same_shape(ir.shape(taken.inputs[0]), dims)
    ):
        tensor = taken.inputs[0]
    elif shift:
        addend = editor.constant(f"{tensor.name}.shift", np.array(shift, np.float32))
        tensor = editor.apply("Add", [tensor, addend], dims, f"{tensor.name}.shifted")
    out = gs.Variable(name, dtype=dot.dtype)
    ir.set_shape(out, dims)
    to = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dot.dtype))
    editor.node("Cast", [tensor], [out], name, to=int(to))
    return out


def _with_bytes(program: EpilogueProgram, at: int, shift: int, dot: Dot, keeps: bool) -> EpilogueProgram:
    """``program`` with its output number ``at`` as bytes, in its place or, if it ``keeps`` that, behind all."""
    given = program.outputs[at]
    value, rest = _before(program, given.value, shift)
    output = replace(given, name=f"{given.name}_bytes" if keeps else given.name, value=value)
    outputs = list(program.outputs)
    outputs[len(outputs) if keeps else at : len(outputs) if keeps else at + 1] = [output]
    builder = Builder(EpilogueProgram(program.params, program.steps, tuple(outputs)))
    value = builder.outputs[output.name].value
    if rest:
        value = builder.add("add", value, float(rest))
    builder.output_like(output, builder.add("cast", value, to=_SPELLED[dot.dtype]))
    return builder.build()


def _before(program: EpilogueProgram, value: str, shift: int) -> tuple[str, int]:
    """A value and a number that add up to ``value + shift``: where a step takes off just that, what it takes it off."""
    step = next((s for s in program.steps if s.result == value), None)
    signs = {"add": -1, "sub": 1}
    if step is not None and step.op in signs and isinstance(step.args[0], str) and not isinstance(step.args[1], str):
        taken = signs[step.op] * step.args[1]
        if taken == shift:
            return step.args[0], 0
    return value, shift


def _in_integers(editor: ir.GraphEditor, gemm: gs.Node, tensor: gs.Variable, shift: int) -> None:
    """Makes ``gemm`` one of the bytes ``tensor``, each ``shift`` more than the number that it stands for."""
    weights = np.asarray(gemm.inputs[1].values).astype(np.int8)
    program = EpilogueProgram.parse(gemm.attrs["epilogue"])
    acc, *params = program.params
    builder = Builder(params=[replace(acc, dtype="i32"), *params])
    operands = list(gemm.inputs[2:])
    total: str = acc.name
    if shift:
        total = builder.add("sub", total, builder.param("shifts", Kind.COL, "i32"))
        sums = shift * weights.sum(0, dtype=np.int64)
        operands.append(editor.constant(f"{gemm.name}.shifts", sums.astype(np.int32)))
    program, whole = _with_whole_sums(program)
    bindings: dict[str, Argument] = {p.name: p.name for p in params}
    bindings |= {acc.name: builder.add("cast", total, to="f32"), whole: total}
    values = builder.inline(program, bindings)
    for output in program.outputs:
        builder.output_like(output, values[output.name])
    matrix = editor.constant(f"{gemm.inputs[1].name}.bytes", weights)
    gemm.inputs = [tensor, matrix, *operands]
    gemm.attrs = {**gemm.attrs, "epilogue": str(builder.build()), "zero": shift}


def _with_whole_sums(program: EpilogueProgram) -> tuple[EpilogueProgram, str]:
    """``program`` with a parameter, whose name is the other result, in place of what it casts from the accumulator to int32."""
    acc = program.params[0]
    whole = next(name for name in (f"{acc.name}_{i}" for i in count()) if name not in program.kinds())
    casts = {s.result for s in program.steps if (s.op, s.args, s.attrs) == ("cast", (acc.name,), (("to", "i32"),))}
    steps = (
        replace(s, args=tuple(whole if a in casts else a for a in s.args))
        for s in program.steps
        if s.result not in casts
    )
    outputs = tuple(replace(o, value=whole) if o.value in casts else o for o in program.outputs)
    return EpilogueProgram((*program.params, Param(whole, Kind.TILE, "i32")), tuple(steps), outputs), whole


def copied(graph: gs.Graph) -> gs.Graph:
    """The same nodes over tensors of their own; constants share their values."""
    copies: dict[int, ir.Tensor] = {}

    def copy(tensor: ir.Tensor) -> ir.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = _copied_tensor(tensor)
        return copies[id(tensor)]

    nodes = ir.copy_nodes(graph.nodes, copy)
    inputs, outputs = ([copy(t) for t in tensors] for tensors in (graph.inputs, graph.outputs))
    return gs.Graph(
        nodes,
        inputs,
        outputs,
        name=graph.name,
        doc_string=graph.doc_string,
        opset=graph.opset,
        import_domains=graph.import_domains,
    )


def _copied_tensor(tensor: ir.Tensor) -> ir.Tensor:
    if isinstance(tensor, FactoredConstant):
        return FactoredConstant(tensor.name, tensor.values, tensor.weight)
    if isinstance(tensor, gs.Constant):
        return gs.Constant(tensor.name, tensor.values)
    return gs.Variable(tensor.name, dtype=tensor.dtype, shape=tensor.shape)
