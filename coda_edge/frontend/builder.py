"""Writes operators into a graph with little ceremony: what decompositions are written with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from .. import ir
from ..errors import InvalidModel

Operand: TypeAlias = "gs.Variable | gs.Constant | float | Sequence[int] | None"


class Builder:
    """Adds nodes beside ``node``. Called as ``b("Mul", x, 0.5)``, it gives the output of the new node.

    A number becomes a scalar constant of ``dtype`` (that of the node's first input), a list of ints an int64 vector,
    None an omitted input. Shapes are left to ``infer``.
    """

    def __init__(self, editor: ir.GraphEditor, node: gs.Node) -> None:
        self.editor = editor
        self.node = node
        self.dtype: Any = node.inputs[0].dtype if node.inputs else np.float32

    def __call__(self, op: str, *operands: Operand, **attrs: Any) -> gs.Variable:
        base = f"{self.node.outputs[0].name}.{op}"
        out = gs.Variable(self.editor.names.fresh(base))
        self.editor.node(op, [self.tensor(o) for o in operands], [out], base, **attrs)
        return out

    def tensor(self, operand: Operand) -> ir.Tensor:
        """The tensor that an operand stands for."""
        if operand is None:
            return gs.Variable.empty()
        if isinstance(operand, gs.Variable | gs.Constant):
            return operand
        base = f"{self.node.outputs[0].name}.const"
        value = np.asarray(operand, self.dtype) if np.ndim(operand) == 0 else np.asarray(operand, np.int64)
        return self.editor.constant(base, value)

    @contextmanager
    def numbers(self, dtype: Any) -> Iterator[None]:
        """Within this, numbers become constants of ``dtype``."""
        outer, self.dtype = self.dtype, np.dtype(dtype)
        try:
            yield
        finally:
            self.dtype = outer

    def input(self, index: int) -> ir.Tensor | None:
        """An input of the node, None if it is not given."""
        tensors = self.node.inputs
        return tensors[index] if index < len(tensors) and tensors[index].name else None

    def attr(self, name: str, default: Any) -> Any:
        """An attribute of the node."""
        return self.node.attrs.get(name, default)

    def required(self, name: str) -> Any:
        """An attribute that the operator cannot do without. Raises InvalidModel if the node lacks it."""
        if name not in self.node.attrs:
            where = f"{self.node.op} (node '{self.node.name or self.node.outputs[0].name}')"
            raise InvalidModel(f"{where} lacks its attribute '{name}': export the model again")
        return self.node.attrs[name]

    def rank(self, index: int = 0) -> int:
        """The number of dimensions of an input."""
        return len(ir.shape(self.node.inputs[index]))

    def cast(self, x: ir.Tensor, dtype: Any, known: Any = None) -> ir.Tensor:
        """``x`` in ``dtype``; ``known`` is its present dtype where ``x`` does not tell yet."""
        have = known if known is not None else x.dtype
        if have is not None and np.dtype(have) == np.dtype(dtype):
            return x
        return self("Cast", x, to=int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))))


#: Writes a node as other nodes and gives its outputs, in order; None leaves the node as it is.
Decomposition: TypeAlias = Callable[[Builder], "Sequence[ir.Tensor] | ir.Tensor | None"]
TABLE: dict[tuple[str, str], list[Decomposition]] = {}


def decomposition(*ops: str, domain: str = "") -> Callable[[Decomposition], Decomposition]:
    """Registers a way to write ``ops`` more simply; of several, the first that applies is taken."""

    def register(function: Decomposition) -> Decomposition:
        for op in ops:
            TABLE.setdefault((domain, op), []).append(function)
        return function

    return register


def decompose(graph: gs.Graph) -> int:
    """Applies the table to every node, until none applies; returns how many nodes it rewrote.

    Variables that this adds have no dtype or shape yet: ``infer`` gives them.
    """
    editor = ir.GraphEditor(graph)
    done = []
    for node in list(graph.nodes):
        rules = TABLE.get((node.domain or "", node.op), ())
        if any(isinstance(t, gs.Variable) and t.name and t.shape is None for t in node.inputs):
            continue
        found = next((f for rule in rules if (f := rule(Builder(editor, node))) is not None), None)
        if found is None:
            continue
        outputs = list(node.outputs)
        news = [found] if isinstance(found, gs.Variable | gs.Constant) else list(found)
        node.inputs.clear()
        node.outputs.clear()
        done.append(node)
        for old, new in zip(outputs, news, strict=False):
            if old.name:
                take_over(editor, old, new)
    ir.remove_nodes(graph, done)
    return len(done)


def take_over(editor: ir.GraphEditor, old: gs.Variable, new: ir.Tensor) -> None:
    """Puts ``new`` in the place of ``old``, which nothing computes any more; the name ``old`` is kept where it can be."""
    source = ir.producer(new)
    made_here = source is not None and isinstance(new, gs.Variable) and new.shape is None and not new.outputs
    if source is not None and made_here and not ir.is_output(editor.graph, new):
        source.outputs = [old if t is new else t for t in source.outputs]
        return
    editor.replace(old, new)
