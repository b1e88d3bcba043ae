"""Sizes as tensors: shape operands become constants where 0, −1 and numbers can say them, else one canonical form.

The canonical form reads each symbol from the graph input that has it, or from the element that decides it, so the shape
arithmetic that an exporter wrote goes away, whatever it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import sympy

from .. import ir
from ..errors import ShapeError
from ..symbolic import Dim, product, same, simplify, symbol
from .shapes import SymbolicInfo, Values

TO_END = 2**63 - 1


class SizeEmitter:
    """Computes sizes in the graph: int64 tensors of given ints and expressions."""

    def __init__(self, graph: gs.Graph, info: SymbolicInfo) -> None:
        self.editor = ir.GraphEditor(graph)
        self._data: dict[sympy.Symbol, tuple[gs.Variable, int]] = {}
        self._made: dict[tuple[str, ...], gs.Variable] = {}
        self._sources: dict[sympy.Symbol, tuple[gs.Variable, int]] = {}
        for tensor in [*graph.inputs, *(t for n in ir.in_order(graph) for t in n.outputs)]:
            if isinstance(tensor, gs.Variable) and tensor.name and tensor.shape is not None:
                for axis, dim in enumerate(ir.shape(tensor)):
                    if isinstance(dim, sympy.Symbol):
                        self._sources.setdefault(dim, (tensor, axis))
        tensors = graph.tensors()
        for name, source in info.data.items():
            if source.tensor not in tensors:
                continue
            if source.element is None:
                self._sources[symbol(name)] = (tensors[source.tensor], 1)
            else:
                self._data[symbol(name)] = (tensors[source.tensor], source.element)

    def vector(self, dims: Sequence[Dim]) -> ir.Tensor:
        """int64 ``[len(dims)]``. Raises ShapeError if no tensor has one of the symbols as a dimension."""
        if all(isinstance(d, int) for d in dims):
            return self.editor.constant("size", np.asarray(dims, np.int64))
        key = tuple(map(str, dims))
        if key not in self._made:
            parts = self._runs(list(dims))
            self._made[key] = parts[0] if len(parts) == 1 else self._node("Concat", parts, len(dims), axis=0)
        return self._made[key]

    def scalar(self, dim: Dim) -> ir.Tensor:
        """int64 ``[]``."""
        if isinstance(dim, int):
            return self.editor.constant("size", np.asarray(dim, np.int64))
        key = ("scalar", str(dim))
        if key not in self._made:
            axis = self.editor.constant("size", np.zeros(1, np.int64))
            self._made[key] = self.editor.apply("Squeeze", [self.vector([dim]), axis], (), "size")
        return self._made[key]

    def _runs(self, dims: list[Dim]) -> list[ir.Tensor]:
        """One tensor for each run of numbers, each run of neighbouring axes of one tensor, and each expression."""
        parts: list[ir.Tensor] = []
        while dims:
            count = 1
            if isinstance(dims[0], int):
                while count < len(dims) and isinstance(dims[count], int):
                    count += 1
                parts.append(self.vector(dims[:count]))
            elif dims[0] in self._data:
                parts.append(self._element(*self._data[dims[0]]))
            elif isinstance(dims[0], sympy.Symbol):
                tensor, axis = self._source(dims[0])
                have = ir.shape(tensor)
                while count < len(dims) and axis + count < len(have) and dims[count] == have[axis + count]:
                    count += 1
                parts.append(self._node("Shape", [tensor], count, start=axis, end=axis + count))
            else:
                parts.append(self._expression(dims[0]))
            dims = dims[count:]
        return parts

    def _element(self, tensor: gs.Variable, element: int) -> ir.Tensor:
        """An element of an integer tensor, int64 ``[1]``."""
        count = int(np.prod([int(d) for d in ir.shape(tensor)], dtype=np.int64))
        part = self._node("Reshape", [tensor, self.editor.constant("size", np.asarray([count], np.int64))], count)
        part.dtype = tensor.dtype
        if count > 1:
            bounds = [self.editor.constant("size", np.asarray([i], np.int64)) for i in (element, element + 1, 0)]
            part = self._node("Slice", [part, *bounds], 1)
            part.dtype = tensor.dtype
        if np.dtype(tensor.dtype) != np.int64:
            part = self._node("Cast", [part], 1, to=int(onnx.TensorProto.INT64))
        return part

    def _source(self, size: sympy.Symbol) -> tuple[gs.Variable, int]:
        if size not in self._sources:
            raise ShapeError(f"size '{size}' is no tensor's dimension, so it cannot be computed at run time")
        return self._sources[size]

    def _expression(self, dim: sympy.Expr) -> ir.Tensor:
        """A size that is arithmetic on other sizes, int64 ``[1]``."""
        if isinstance(dim, sympy.floor | sympy.ceiling):
            numerator, denominator = map(simplify, sympy.fraction(sympy.together(dim.args[0])))
            if isinstance(dim, sympy.ceiling):
                numerator = simplify(numerator + denominator - 1)
            return self._node("Div", [self.vector([numerator]), self.vector([denominator])], 1)
        operators = {sympy.Add: "Add", sympy.Mul: "Mul", sympy.Max: "Max", sympy.Min: "Min", sympy.Mod: "Mod"}
        numerator, denominator = sympy.fraction(sympy.together(dim))
        if denominator != 1:
            return self._node("Div", [self.vector([simplify(numerator)]), self.vector([simplify(denominator)])], 1)
        if isinstance(dim, sympy.Pow):
            terms: Sequence[Any] = [dim.base] * int(dim.exp)
            op = "Mul"
        elif type(dim) in operators:
            terms, op = dim.args, operators[type(dim)]
        else:
            raise ShapeError(f"size '{dim}' is not arithmetic that can be computed at run time")
        result = self.vector([simplify(terms[0])])
        for term in terms[1:]:
            result = self._node(op, [result, self.vector([simplify(term)])], 1)
        return result

    def _node(self, op: str, inputs: Sequence[ir.Tensor], length: int, **attrs: Any) -> gs.Variable:
        out = self.editor.variable("size", np.dtype(np.int64), (length,))
        self.editor.node(op, inputs, [out], "size", **attrs)
        return out


def reshape_target(dims: Sequence[Dim], out: Sequence[Dim]) -> list[int] | None:
    """What turns a tensor of shape ``dims`` into ``out`` as a Reshape target of numbers, 0 and −1; None if nothing does.

    A size that is cut down to another may be 0, beside which −1 says nothing.
    """
    target = []
    for axis, dim in enumerate(out):
        if isinstance(dim, int):
            if dim == 0:
                return None
            target.append(dim)
        else:
            target.append(0 if axis < len(dims) and same(dims[axis], dim) else -1)
    cut = any(not isinstance(d, int) and d.has(sympy.Min) for d, t in zip(out, target, strict=True) if t != -1)
    return target if target.count(-1) <= (0 if cut else 1) else None


def expand_target(dims: Sequence[Dim], out: Sequence[Dim]) -> list[Dim]:
    """An Expand target from ``dims`` to ``out``: 1 wherever nothing is repeated."""
    padded = [1] * (len(out) - len(dims)) + list(dims)
    return [
        1 if i >= len(out) - len(dims) and same(d, o) else o for i, (d, o) in enumerate(zip(padded, out, strict=True))
    ]


def simplify_targets(graph: gs.Graph) -> int:
    """Makes the targets of Reshape and Expand constants where they can be; returns how many."""
    editor = ir.GraphEditor(graph)
    count = 0
    for node in graph.nodes:
        if node.domain or node.op not in ("Reshape", "Expand"):
            continue
        dims, out = ir.shape(node.inputs[0]), ir.shape(node.outputs[0])
        if node.attrs.get("allowzero", 0) and not same(product(dims), product(out)):
            continue  # sizes that need only be equal if there are elements at all
        target: Sequence[Dim] | None = reshape_target(dims, out) if node.op == "Reshape" else expand_target(dims, out)
        if target is None or not all(isinstance(d, int) for d in target):
            continue
        have = ir.constant_value(node.inputs[1])
        if have is None or have.tolist() != list(target) or node.attrs.get("allowzero", 0):
            node.inputs[1] = editor.constant(f"{node.outputs[0].name}.target", np.asarray(target, np.int64))
            node.attrs.pop("allowzero", None)
            count += 1
    return count


def emit_sizes(graph: gs.Graph, info: SymbolicInfo) -> None:
    """Gives every tensor that shapes determine, where data operators read it, its canonical computation."""
    emitter = SizeEmitter(graph, info)
    nodes = list(graph.nodes)
    for node in nodes:
        if node.outputs and all(t.name in info.values for t in node.outputs):
            continue
        for index, tensor in enumerate(node.inputs):
            if node.op == "Reshape" and index == 1 and _is_vague(node):
                node.inputs[index] = emitter.vector(ir.shape(node.outputs[0]))
                node.attrs["allowzero"] = 1
                continue
            value = info.values.get(tensor.name) if isinstance(tensor, gs.Variable) else None
            if value is not None and value.ndim <= 1 and np.dtype(tensor.dtype) == np.int64 and _integers(value):
                if node.op == "Expand" and index == 1:
                    dims = expand_target(ir.shape(node.inputs[0]), ir.shape(node.outputs[0]))
                    node.inputs[index] = emitter.vector(dims)
                elif value.ndim:
                    node.inputs[index] = emitter.vector(list(value))
                else:
                    node.inputs[index] = emitter.scalar(value.item())


def _is_vague(node: gs.Node) -> bool:
    """Whether a Reshape's constant target leaves a size open that its input's number of elements, which may be 0, does not tell."""
    target = ir.constant_value(node.inputs[1])
    dims, out = ir.shape(node.inputs[0]), ir.shape(node.outputs[0])
    return target is not None and -1 in target and reshape_target(dims, out) is None


def _integers(value: Values) -> bool:
    return all(isinstance(v, int) or (isinstance(v, sympy.Expr) and v.is_integer) for v in value.flat)


def simplify_bounds(graph: gs.Graph, info: SymbolicInfo) -> int:
    """Makes symbolic bounds of Slice constants where they are counted from the end; returns how many."""
    editor = ir.GraphEditor(graph)
    count = 0
    for node in graph.nodes:
        if node.op != "Slice" or node.domain:
            continue
        dims = ir.shape(node.inputs[0])
        axes = ir.constant_value(node.inputs[3]) if len(node.inputs) > 3 else np.arange(len(dims))
        for index in (1, 2):
            value = info.values.get(node.inputs[index].name)
            if axes is None or value is None or isinstance(node.inputs[index], gs.Constant):
                continue
            bounds = [_from_end(bound, dims[axis], index == 2) for bound, axis in zip(value, axes, strict=False)]
            if all(bound is not None for bound in bounds):
                name = f"{node.outputs[0].name}.bound"
                node.inputs[index] = editor.constant(name, np.asarray(bounds, np.int64))
                count += 1
    return count


def _from_end(bound: Dim, dim: Dim, is_end: bool) -> int | None:
    """A bound as a number: as it is, or counted from the end of its axis."""
    if isinstance(bound, int):
        return bound
    behind = simplify(dim - bound)
    if not isinstance(behind, int) or behind < 0:
        return None
    if behind == 0:
        return TO_END if is_end else None
    return -behind
