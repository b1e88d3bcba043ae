"""Operators that write elements at computed places of a copy of their first input, in order: of two at one place the later stays."""

from __future__ import annotations

from collections.abc import Callable

import onnx_graphsurgeon as gs
from tvm import tirx

from .. import ir
from ..errors import UnsupportedOperator
from ..symbolic import product
from .emit import Emitter, Expr, int64
from .kernel import KernelCall
from .ops_math import maximum, minimum
from .pointwise import attempt, lower_copy
from .registry import Context, dtype_name, kernel, leaf

_REDUCTIONS: dict[str, Callable[[Expr, Expr], Expr]] = {
    "none": lambda old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "max": maximum,
    "min": minimum,
}


def _place(emit: Emitter, index: Expr, size: Expr) -> Expr:
    """An index that may count from the end; one out of range ends the kernel with an error."""
    index = emit.bind(tirx.Cast("int64", index))
    emit.require(tirx.all(index >= int64(0) - size, index < size))
    return emit.bind(tirx.Select(index < int64(0), index + size, index))


def _copied(node: gs.Node, context: Context) -> KernelCall:
    return lower_copy(node.inputs[0], node.outputs[0].name, context)


def _reduction(node: gs.Node) -> Callable[[Expr, Expr], Expr]:
    name = node.attrs.get("reduction", "none")
    if name not in _REDUCTIONS:
        raise UnsupportedOperator(node.op, node.name, f"reduction '{name}' is none of {', '.join(_REDUCTIONS)}")
    return _REDUCTIONS[name]


@kernel("ScatterND")
def lower_scatter_nd(node: gs.Node, context: Context) -> list[KernelCall]:
    """ScatterND: slices of the updates go where the index tuples say; one thread writes them in order."""
    data, where, updates = (ir.shape(t) for t in node.inputs)
    out, combine, depth = node.outputs[0], _reduction(node), where[-1]
    if not isinstance(depth, int):
        raise UnsupportedOperator(node.op, node.name, "the length of an index must be static")
    inner = product(data[depth:])

    def build(emit: Emitter) -> KernelCall:
        places, values = (leaf(t, emit, context) for t in node.inputs[1:])
        result = emit.buffer(out.name, dtype_name(out))
        with emit.items(), emit.loop(emit.size(product(where[:-1]))) as row:
            lead = emit.unravel(row, where[:-1])
            tuple_ = [_place(emit, places.at([*lead, int64(j)]), emit.size(data[j])) for j in range(depth)]
            start = emit.bind(emit.ravel(tuple_, data[:depth]) * emit.size(inner))
            with emit.loop(emit.size(inner)) as at:
                new = values.at([*lead, *emit.unravel(at, data[depth:])])
                old = tirx.BufferLoad(result, [start + at])
                emit.store(result, start + at, combine(old, new))
        return emit.call("scatternd", 1, [out.name], flops=product(updates), source=(node.name,))

    return [_copied(node, context), attempt(build, 1)]


@kernel("ScatterElements", "Scatter")
def lower_scatter_elements(node: gs.Node, context: Context) -> list[KernelCall]:
    """ScatterElements: each update goes to its own place but along one axis; one thread writes them in order."""
    data, where = ir.shape(node.inputs[0]), ir.shape(node.inputs[1])
    out, combine = node.outputs[0], _reduction(node)
    axis = int(node.attrs.get("axis", 0)) % len(data)

    def build(emit: Emitter) -> KernelCall:
        places, values = (leaf(t, emit, context) for t in node.inputs[1:])
        result = emit.buffer(out.name, dtype_name(out))
        with emit.items(), emit.loop(emit.size(product(where))) as number:
            here = emit.unravel(number, where)
            along = _place(emit, places.at(here), emit.size(data[axis]))
            at = emit.bind(emit.ravel([*here[:axis], along, *here[axis + 1 :]], data))
            emit.store(result, at, combine(tirx.BufferLoad(result, [at]), values.at(here)))
        return emit.call("scatterelements", 1, [out.name], flops=product(where), source=(node.name,))

    return [_copied(node, context), attempt(build, 1)]
