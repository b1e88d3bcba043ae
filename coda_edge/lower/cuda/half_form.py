"""Tensor cores multiply halves: which tensors of a graph are stored in half precision for them, and only for them.

Rule: what a product or an attention reads (A, q, k, v, past keys and values) is float16, everything else stays as it is: residual streams,
statistics, scores' operands, inputs and outputs of the model. A tensor that both kinds of reader want is stored twice, by the kernel
that makes it: a Gemm gets one output more, a Map as well; of anything else a Cast is made. Views between are doubled.

A Gemm whose weights do not survive rounding to half precision, and an attention whose probabilities are rounded, stay in float32, as scalar code.
A window in front of a product becomes a node again, which stores its rows.

The graph is left as it is: other targets' kernels are made of it too.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ... import ir
from ...attention import Operands
from ...epilogue.builder import Builder
from ...epilogue.program import EpilogueProgram
from ...targets import Target
from ...targets.cuda import CudaTarget
from ...window import rows_shape
from ..integer_form import copied

_ROUNDING = 5e-4
"""The relative L2 error up to which weights may be rounded: a half's own is below 3e-4."""
_HALF = int(onnx.TensorProto.FLOAT16)


def half_form(graph: gs.Graph, target: Target) -> gs.Graph:
    """``graph`` with what tensor cores read in float16; itself if ``target`` is no GPU."""
    if not isinstance(target, CudaTarget):
        return graph
    graph = copied(graph)
    form = _HalfForm(graph)
    for node in list(graph.nodes):
        if node.domain == ir.DOMAIN and node.op == "Gemm" and "window" in node.attrs:
            form.unfold(node)
    fitting = [n for n in graph.nodes if on_tensor_cores(n)]
    for node in fitting:
        if node.op == "Attention":
            form.outputs_in_half(node)
    for node in fitting:
        positions = [0]
        if node.op == "Attention":
            positions = [0, 1, 2, *((3, 4) if node.attrs.get("past", 0) else ())]
        for i in positions:
            node.inputs[i] = form.half(node.inputs[i])
    ir.remove_dead(graph)
    for node in fitting:
        if node.op == "Gemm":
            _drop_unread(graph, node)
    ir.sort(graph)
    return graph


def on_tensor_cores(node: gs.Node) -> bool:
    """Whether a node is a product or an attention that tensor cores do."""
    if node.domain != ir.DOMAIN:
        return False
    if node.op == "Attention":
        return bool("probability" not in node.attrs and Operands.of(node).q.dtype == np.float32)
    if node.op != "Gemm" or node.inputs[0].dtype != np.float32:
        return False
    # Sums over a head are between threads here: such a product is done as scalars.
    return not EpilogueProgram.parse(node.attrs["epilogue"]).head and _rounds(node.inputs[1])


def _rounds(weight: ir.Tensor) -> bool:
    value = ir.constant_value(weight)
    if value is None or value.dtype != np.float32:
        return False
    with np.errstate(over="ignore"):
        error = np.linalg.norm(value.astype(np.float16).astype(np.float32) - value)
    return bool(error <= _ROUNDING * np.linalg.norm(value))


class _HalfForm:
    """A graph while tensors in half precision are added to it."""

    def __init__(self, graph: gs.Graph) -> None:
        self.editor = ir.GraphEditor(graph)
        self.halves: dict[int, ir.Tensor] = {}

    def unfold(self, node: gs.Node) -> None:
        """Puts the window of a Gemm into a node of its own."""
        x, window = node.inputs[0], node.attrs["window"]
        rows = self.editor.variable(f"{node.name}.rows", np.float32, rows_shape(ir.shape(x), window))
        self.editor.node("Window", [x], [rows], f"{node.name}.window", domain=ir.DOMAIN, window=window)
        node.inputs[0] = rows
        node.attrs = {name: value for name, value in node.attrs.items() if name != "window"}

    def outputs_in_half(self, node: gs.Node) -> None:
        """Has an attention give halves, from which its float32 outputs are made."""
        for i, old in enumerate(list(node.outputs)):
            half = self.editor.variable(f"{old.name}.half", np.float16, ir.shape(old))
            node.outputs[i] = half
            self.editor.node("Cast", [half], [old], f"{old.name}.float32", to=int(onnx.TensorProto.FLOAT))
            self.halves[id(old)] = half

    def half(self, tensor: ir.Tensor) -> ir.Tensor:
        """``tensor`` in float16."""
        if tensor.dtype == np.float16:
            return tensor
        if id(tensor) not in self.halves:
            self.halves[id(tensor)] = self._made(tensor)
        return self.halves[id(tensor)]

    def _made(self, tensor: ir.Tensor) -> ir.Tensor:
        if isinstance(tensor, gs.Constant):
            return self.editor.constant(f"{tensor.name}.half", np.asarray(tensor.values).astype(np.float16))
        view = ir.made_by(tensor, *ir.VIEWS)
        source = ir.producer(tensor)
        half = self.editor.variable(f"{tensor.name}.half", np.float16, ir.shape(tensor))
        if view is not None:
            self.editor.node(
                view.op, [self.half(view.inputs[0]), *view.inputs[1:]], [half], f"{view.name}.half", **view.attrs
            )
        elif source is not None and source.domain == ir.DOMAIN and source.op == "Map":
            _add_to_body(source, source.outputs.index(tensor), half)
        elif source is not None and (on_tensor_cores(source) or _is_half_gemm(source)):
            _add_to_program(source, source.outputs.index(tensor), half)
        else:
            self.editor.node("Cast", [tensor], [half], half.name, to=_HALF)
        return half


def _is_half_gemm(node: gs.Node) -> bool:
    return bool(node.domain == ir.DOMAIN and node.op == "Gemm" and node.inputs[0].dtype == np.float16)


def _add_to_body(node: gs.Node, at: int, half: gs.Variable) -> None:
    """Has a Map give its output number ``at`` in float16 as well."""
    body = copied(node.attrs["body"])
    inner = body.outputs[at]
    out = gs.Variable(half.name, dtype=np.float16, shape=inner.shape)
    editor = ir.GraphEditor(body)
    editor.node("Cast", [inner], [out], half.name, to=_HALF)
    body.outputs = [*body.outputs, out]
    node.attrs = {**node.attrs, "body": body}
    node.outputs.append(half)


def _add_to_program(node: gs.Node, at: int, half: gs.Variable) -> None:
    """Has a Gemm give its output number ``at`` in float16 as well."""
    program = EpilogueProgram.parse(node.attrs["epilogue"])
    given = program.outputs[at]
    builder = Builder(program)
    taken = {o.name for o in program.outputs}
    name = next(n for n in (f"{given.name}_half{i or ''}" for i in range(len(taken) + 1)) if n not in taken)
    builder.output_like(replace(given, name=name), builder.add("cast", given.value, to="f16"))
    node.attrs = {**node.attrs, "epilogue": str(builder.build())}
    node.outputs.append(half)


def _drop_unread(graph: gs.Graph, node: gs.Node) -> None:
    """Takes the outputs off a Gemm that nobody reads."""
    program = EpilogueProgram.parse(node.attrs["epilogue"])
    read = [bool(ir.consumers(t)) or ir.is_output(graph, t) for t in node.outputs]
    if all(read) or not any(read):
        return
    builder = Builder(program)
    for output, wanted in zip(program.outputs, read, strict=True):
        if not wanted:
            builder.drop_output(output.name)
    node.attrs = {**node.attrs, "epilogue": str(builder.build())}
    node.outputs = [t for t, wanted in zip(node.outputs, read, strict=True) if wanted]
