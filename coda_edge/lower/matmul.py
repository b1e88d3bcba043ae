"""MatMul of two run-time tensors, and Conv: plain register-tiled kernels for what no template takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs
from tvm import tirx

from .. import ir
from ..errors import UnsupportedOperator
from ..symbolic import Dim, simplify
from .emit import Emitter, Expr, int64, register
from .kernel import KernelCall, Packed
from .ops_math import convert
from .pointwise import attempt, ceil_div, product, rows_of
from .registry import Context, View, broadcast, constant, dtype_name, kernel, leaf

_ROWS = 4  # rows of a register tile
_VECTORS = 2  # vectors across a register tile


@kernel("MatMul")
def lower_matmul(node: gs.Node, context: Context) -> list[KernelCall]:
    """MatMul with numpy's rules: 1-D operands, broadcast batch dimensions; integers too, float16 accumulated in float32."""
    left, right, out = node.inputs[0], node.inputs[1], node.outputs[0]
    a_shape, b_shape = ir.shape(left), ir.shape(right)
    a_dims: tuple[Dim, ...] = (1, *a_shape) if len(a_shape) == 1 else a_shape
    b_dims: tuple[Dim, ...] = (*b_shape, 1) if len(b_shape) == 1 else b_shape
    m, k, n = a_dims[-2], a_dims[-1], b_dims[-1]
    batch = ir.shape(out)[: max(len(a_dims), len(b_dims)) - 2]
    rows = 1 if m == 1 else _ROWS

    def build(emit: Emitter) -> KernelCall:
        a = _matrix(leaf(left, emit, context), a_dims, 0)
        b = _matrix(leaf(right, emit, context), b_dims, len(b_dims) - 1)
        result, dtype = emit.buffer(out.name, dtype_name(out)), dtype_name(out)
        wide = register(dtype)
        tiles = ceil_div(m, rows)
        with emit.items() as item:
            *at, tile = emit.unravel(item, [*batch, tiles])
            first = emit.bind(tile * int64(rows))
            last = emit.size(m) - int64(1)
            places = [emit.bind(tirx.min(first + int64(r), last)) if rows > 1 else first for r in range(rows)]
            number = emit.ravel(at, batch)

            def columns(column: Expr, lane: Expr, width: int) -> None:
                sums = [emit.local(width, wide) for _ in range(rows)]
                for total in sums:
                    emit.store(total, lane, constant(0, wide))
                with emit.loop(emit.size(k)) as depth:
                    y = convert(b.at([*broadcast(at, b.shape[:-2]), depth, column]), wide)
                    for total, place in zip(sums, places, strict=True):
                        x = convert(a.at([*broadcast(at, a.shape[:-2]), place, depth]), wide)
                        emit.store(total, lane, tirx.BufferLoad(total, [lane]) + x * y)
                for r, total in enumerate(sums):
                    row = number * emit.size(m) + first + int64(r)
                    value = convert(tirx.BufferLoad(total, [lane]), dtype)
                    with emit.when(first + int64(r) <= last):
                        emit.store(result, row * emit.size(n) + column, value)

            emit.span(emit.size(n), columns)
        return emit.call(
            "matmul",
            rows_of([*batch, tiles], n),
            [out.name],
            flops=2 * product([*batch, m, n, k]),
            source=(node.name,),
        )

    return [attempt(build, context.lanes * _VECTORS)]


def _matrix(view: View, dims: Sequence[Dim], extra: int) -> View:
    """``view`` with an axis of 1 put in at ``extra`` if ``dims`` has it."""
    if len(view.shape) == len(dims):
        return view
    return View(tuple(dims), view.dtype, lambda idx: view.at([*idx[:extra], *idx[extra + 1 :]]))


@kernel("Conv")
def lower_conv(node: gs.Node, context: Context) -> list[KernelCall]:
    """Conv over 1 or 2 spatial axes (any number), grouped, strided, dilated, padded.

    Lanes are output channels: the weights are packed as ``[input channel · window, output channel]`` if they are constant. Where each
    channel is by itself, they are places along the last axis.
    """
    source, weights, out = node.inputs[0], node.inputs[1], node.outputs[0]
    x_dims, w_dims, y_dims = ir.shape(source), ir.shape(weights), ir.shape(out)
    spatial = len(x_dims) - 2
    window = [_static(node, d) for d in w_dims[2:]]
    channels, depth = _static(node, w_dims[0]), _static(node, w_dims[1])
    groups = int(node.attrs.get("group", 1))
    strides = [int(s) for s in node.attrs.get("strides", [1] * spatial)]
    dilations = [int(d) for d in node.attrs.get("dilations", [1] * spatial)]
    before = _padding(node, x_dims[2:], y_dims[2:], window, strides, dilations)
    per_group = channels // groups
    row = y_dims[-1]

    def build(emit: Emitter) -> KernelCall:
        x, dtype = leaf(source, emit, context), dtype_name(out)
        w = _weights(weights, emit, context)
        bias = leaf(node.inputs[2], emit, context) if len(node.inputs) > 2 and node.inputs[2].name else None
        result = emit.buffer(out.name, dtype)
        tiles = ceil_div(row, _ROWS)
        lead = [y_dims[0], groups, *y_dims[2:-1], tiles]
        with emit.items() as item:
            image, group, *outer, tile = emit.unravel(item, lead)
            first = emit.bind(tile * int64(_ROWS))
            places = [emit.bind(tirx.min(first + int64(r), emit.size(row) - int64(1))) for r in range(_ROWS)]

            def over_channels(channel: Expr, lane: Expr, width: int) -> None:
                here = group * int64(per_group) + channel
                sums = [emit.local(width, dtype) for _ in range(_ROWS)]
                for total in sums:
                    emit.store(total, lane, bias.at([here]) if bias is not None else constant(0, dtype))
                with emit.loop(int64(math.prod(window))) as flat:
                    tap = emit.unravel(flat, window)
                    # What a row reads and whether it is padding depends on the tap alone: both stay out of the loop over channels.
                    taken = [
                        [
                            at * int64(s) + t * int64(d) - int64(p)
                            for at, t, s, d, p in zip([*outer, place], tap, strides, dilations, before, strict=True)
                        ]
                        for place in places
                    ]
                    held = [_held(at, emit) for at in taken]
                    with emit.loop(int64(depth)) as c:
                        weight = emit.bind(w.at([here, c, *tap]))
                        for total, (inside, at) in zip(sums, held, strict=True):
                            value = x.at([image, group * int64(depth) + c, *at])
                            if inside is not None:
                                value = emit.bind(tirx.Select(tirx.NE(inside, int64(0)), value, constant(0, x.dtype)))
                            emit.store(total, lane, tirx.BufferLoad(total, [lane]) + value * weight)
                for r, total in enumerate(sums):
                    with emit.when(first + int64(r) < emit.size(row)):
                        index = emit.ravel([image, here, *outer, first + int64(r)], y_dims)
                        emit.store(result, index, tirx.BufferLoad(total, [lane]))

            emit.span(int64(per_group), over_channels)
        return emit.call(
            "conv",
            product(lead),
            [out.name],
            flops=2 * product([*y_dims, depth, *window]),
            source=(node.name,),
        )

    def build_depthwise(emit: Emitter) -> KernelCall:
        x, dtype = leaf(source, emit, context), dtype_name(out)
        w = _weights(weights, emit, context)
        bias = leaf(node.inputs[2], emit, context) if len(node.inputs) > 2 and node.inputs[2].name else None
        result = emit.buffer(out.name, dtype)
        lead = y_dims[:-1]
        *outer_sizes, size = (emit.size(d) for d in x_dims[2:])
        stride, reach = int64(strides[-1]), int64((window[-1] - 1) * dilations[-1])
        with emit.items() as item:
            image, channel, *outer = emit.unravel(item, lead)

            def over_row(position: Expr, lane: Expr, width: int) -> None:
                total = emit.local(width, dtype)
                emit.store(total, lane, bias.at([channel]) if bias is not None else constant(0, dtype))
                first = emit.bind((position - lane) * stride - int64(before[-1]))
                whole = tirx.all(first >= int64(0), first + int64(width - 1) * stride + reach < size)

                def add(clamped: bool) -> None:
                    with emit.loop(int64(math.prod(window))) as flat:
                        *tap, last = emit.unravel(flat, window)
                        taken = [
                            emit.bind(at * int64(s) + t * int64(d) - int64(p))
                            for at, t, s, d, p in zip(outer, tap, strides, dilations, before, strict=False)
                        ]
                        at = first + lane * stride + last * int64(dilations[-1])
                        held = tirx.max(tirx.min(at, size - int64(1)), int64(0)) if clamped else at
                        inside = [c for i, n in zip(taken, outer_sizes, strict=True) for c in (i >= int64(0), i < n)]
                        with emit.when(tirx.all(*inside) if inside else tirx.const(True, "bool")):
                            value = x.at([image, channel, *taken, held])
                            if clamped:
                                value = tirx.Select(tirx.all(at >= int64(0), at < size), value, constant(0, dtype))
                            weight = w.at([channel, int64(0), *tap, last])
                            emit.store(total, lane, tirx.BufferLoad(total, [lane]) + value * weight)

                with emit.when(whole):
                    add(clamped=False)
                with emit.when(tirx.Not(whole)):
                    add(clamped=True)
                emit.store(
                    result, emit.ravel([image, channel, *outer, position], y_dims), tirx.BufferLoad(total, [lane])
                )

            emit.span(emit.size(row), over_row)
        flops = 2 * product([*y_dims, *window])
        return emit.call("depthwise", product(lead), [out.name], flops=flops, source=(node.name,))

    def _held(taken: list[Expr], emit: Emitter) -> tuple[Expr | None, list[Expr]]:
        """Whether a place is within the input, as 0 or 1, and the nearest place that is; None if all are."""
        sizes = [emit.size(d) for d in x_dims[2:]]
        if not any(before) and not _overhangs(x_dims[2:], y_dims[2:], window, strides, dilations):
            return None, [emit.bind(i) for i in taken]
        inside = tirx.all(*(c for i, n in zip(taken, sizes, strict=True) for c in (i >= int64(0), i < n)))
        held = [tirx.max(tirx.min(i, n - int64(1)), int64(0)) for i, n in zip(taken, sizes, strict=True)]
        return emit.bind(tirx.Cast("int64", inside)), [emit.bind(i) for i in held]

    return [attempt(build_depthwise if depth == 1 and per_group == 1 else build, context.lanes)]


def _weights(tensor: ir.Tensor, emit: Emitter, context: Context) -> View:
    """The weights by ``[output channel, input channel, window…]``, with output channels next to each other in memory."""
    if not isinstance(tensor, gs.Constant):
        return leaf(tensor, emit, context)
    data = np.moveaxis(np.asarray(tensor.values), 0, -1)
    packed = Packed(f"{tensor.name}.packed", np.ascontiguousarray(data))
    dtype = dtype_name(tensor)
    return View(
        ir.shape(tensor), dtype, lambda idx: emit.load(packed, dtype, emit.ravel([*idx[1:], idx[0]], data.shape))
    )


def _static(node: gs.Node, dim: Dim) -> int:
    if not isinstance(dim, int):
        raise UnsupportedOperator(node.op, node.name, f"its weights have a symbolic size {dim}: bind it with --shape")
    return dim


def _reach(window: Sequence[int], dilations: Sequence[int]) -> list[int]:
    return [(w - 1) * d + 1 for w, d in zip(window, dilations, strict=True)]


def _padding(
    node: gs.Node,
    x: Sequence[Dim],
    y: Sequence[Dim],
    window: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> list[int]:
    """What is put before each spatial axis."""
    mode = node.attrs.get("auto_pad", "NOTSET")
    if mode in ("NOTSET", "VALID"):
        pads = node.attrs.get("pads") if mode == "NOTSET" else None
        return [int(p) for p in pads[: len(window)]] if pads else [0] * len(window)
    totals = [
        simplify((o - 1) * s + r - i) for i, o, r, s in zip(x, y, _reach(window, dilations), strides, strict=True)
    ]
    return [
        max(0, _static(node, t)) // 2 if mode == "SAME_UPPER" else (max(0, _static(node, t)) + 1) // 2 for t in totals
    ]


def _overhangs(
    x: Sequence[Dim], y: Sequence[Dim], window: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> bool:
    """Whether, with no padding before, the last window may end beyond the input."""
    for i, o, r, s in zip(x, y, _reach(window, dilations), strides, strict=True):
        if not isinstance(i, int) or not isinstance(o, int) or (o - 1) * s + r > i:
            return True
    return False
