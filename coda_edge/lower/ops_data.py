"""Operators whose results are as long as their data says: a kernel counts, and once that is a size another one writes."""

from __future__ import annotations

import onnx_graphsurgeon as gs
from tvm import tirx

from .. import ir
from .emit import Emitter, Expr, int64
from .kernel import KernelCall, count_name
from .pointwise import attempt, product
from .registry import Context, constant, dtype_name, kernel, leaf


@kernel("NonZero")
def lower_non_zero(node: gs.Node, context: Context) -> list[KernelCall]:
    """NonZero: the places in row-major order, by one thread, that goes through the tensor once to count and once to write."""
    source, out = node.inputs[0], node.outputs[0]
    shape, dtype = ir.shape(source), dtype_name(source)
    columns = ir.shape(out)[1]

    def build(emit: Emitter, write: bool) -> KernelCall:
        name = out.name if write else count_name(out.name)
        x, result, first = leaf(source, emit, context), emit.buffer(name, "int64"), int64(0)
        with emit.items():
            found = emit.local(1, "int64")
            emit.store(found, first, first)
            with emit.loop(emit.size(product(shape))) as at:
                indices = emit.unravel(at, shape)
                value = emit.bind(x.at(indices))
                number = _read(found)
                with emit.when(value if dtype == "bool" else tirx.NE(value, constant(0, dtype))):
                    if write:
                        width = emit.size(columns)
                        with emit.when(number < width):
                            for row, index in enumerate(indices or [first]):
                                emit.store(result, int64(row) * width + number, index)
                    emit.store(found, first, number + int64(1))
            if not write:
                emit.store(result, first, _read(found))
        return emit.call("nonzero" if write else "count", 1, [name], flops=product(shape), source=(node.name,))

    return [attempt(lambda emit: build(emit, False), 1), attempt(lambda emit: build(emit, True), 1)]


def _read(buffer: tirx.Buffer) -> Expr:
    return tirx.BufferLoad(buffer, [int64(0)])
