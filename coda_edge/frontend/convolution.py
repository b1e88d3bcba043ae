"""Convolutions as matrix products over channels-last rows, so that their epilogues grow as any GEMM's do.

``Conv(x, W)`` with constant weights and one group is ``T⁻¹(rows(T(x)) · Wᵀ + bias)``, T moving channels last. The
transposes are cancelled by ``transposes`` and by the movement algebra, or fused into the kernel that gathers the rows.
Of three ways to gather, the first that applies is taken:

1. A 1×1 kernel: the rows are there already.
2. Patches (kernel equals stride, no padding, no dilation): a Reshape, cut to whole patches.
3. Any other window: a ``coda.Window``, which the product's kernel does as it goes.

What is not float32 keeps its own kernel in the third case. Padding that depends on a dynamic size becomes a Pad in front.

Source: ONNX operator Conv, opsets 1 to 22.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from .. import ir
from ..symbolic import Dim
from ..weights import arranged
from ..window import Window
from .builder import Builder, decomposition
from .sizes import TO_END


@dataclass(frozen=True)
class _Rows:
    """The rows that the weights multiply, ``[batch, *out, K]``, or ``[batch, ∏grid, K]`` where ``grid`` is given.

    ``taps_first``: K runs over the window's taps before the channels.
    """

    rows: ir.Tensor
    taps_first: bool
    grid: list[Dim | ir.Tensor] | None = None


@decomposition("Conv")
def _same_of_dynamic_size(b: Builder) -> ir.Tensor | None:
    """``auto_pad`` SAME at a stride, of a dynamic size: a Pad in front of a plain Conv."""
    kernel = ir.shape(b.node.inputs[1])[2:]
    if not all(isinstance(k, int) for k in kernel) or window_of(b, tuple(int(k) for k in kernel)) is not None:
        return None
    found = same_pads(b, tuple(int(k) for k in kernel))
    if found is None:
        return None
    before, after = found
    x = b("Pad", b.node.inputs[0], target(b, [*before, *after]), 0.0, list(range(2, b.rank())))
    attributes = {name: b.attr(name, None) or [1] * len(kernel) for name in ("strides", "dilations")}
    return b("Conv", x, *b.node.inputs[1:], **attributes, group=b.attr("group", 1))


@decomposition("Conv")
def _conv(b: Builder) -> ir.Tensor | None:
    weight = ir.constant_value(b.node.inputs[1])
    if weight is None or b.attr("group", 1) != 1 or np.dtype(b.dtype).kind != "f":
        return None
    window = window_of(b, weight.shape[2:])
    gathered = None if window is None else _rows(b, window)
    if gathered is None:
        return None
    order = (*range(2, weight.ndim), 1, 0) if gathered.taps_first else (*range(1, weight.ndim), 0)
    name, source = f"{b.node.inputs[1].name}.matrix", b.node.inputs[1]
    matrix = arranged(b.editor, name, source, lambda w: w.transpose(order).reshape(-1, weight.shape[0]))
    y = b("MatMul", gathered.rows, matrix)
    bias = b.input(2)
    y = y if bias is None else b("Add", y, bias)
    y = y if gathered.grid is None else b("Reshape", y, target(b, [0, *gathered.grid, weight.shape[0]]))
    return b("Transpose", y, perm=[0, b.rank() - 1, *range(1, b.rank() - 1)])


def window_of(b: Builder, kernel: tuple[int, ...]) -> Window | None:
    """The window of a Conv or a pool; None where its padding depends on a dynamic size."""
    count = len(kernel)
    strides = tuple(b.attr("strides", None) or [1] * count)
    dilations = tuple(b.attr("dilations", None) or [1] * count)
    auto = b.attr("auto_pad", "NOTSET")
    if auto in ("NOTSET", "VALID"):
        pads = b.attr("pads", None) if auto == "NOTSET" else None
        pads = pads or [0] * (2 * count)
        return Window(kernel, strides, dilations, tuple(pads[:count]), tuple(pads[count:]))
    sizes = zip(ir.shape(b.node.inputs[0])[2:], kernel, strides, strict=True)
    if any(not isinstance(dim, int) and size > 1 and stride > 1 for dim, size, stride in sizes):
        return None
    found = same_pads(b, kernel)
    if found is None:
        return None
    before, after = (tuple(n for n in pads if isinstance(n, int)) for pads in found)
    return Window(kernel, strides, dilations, before, after)


def same_pads(b: Builder, kernel: tuple[int, ...]) -> tuple[list[Dim | ir.Tensor], list[Dim | ir.Tensor]] | None:
    """What ``auto_pad`` SAME puts before and after each spatial axis: of n elements, ``(⌈n/stride⌉ - 1)·stride + reach - n`` in all.

    Numbers, or int64 ``[1]`` tensors where a dynamic size decides. None where such a size leads to less than nothing, as where a window of several
    elements does not reach as far as the stride.
    """
    count = len(kernel)
    less: list[Dim | ir.Tensor] = []
    more: list[Dim | ir.Tensor] = []
    strides, dilations = (b.attr(name, None) or [1] * count for name in ("strides", "dilations"))
    dims = ir.shape(b.node.inputs[0])[2:]
    for axis, (dim, taps, stride, dilation) in enumerate(zip(dims, kernel, strides, dilations, strict=True), 2):
        reach = dilation * (taps - 1) + 1
        if isinstance(dim, int) or stride == 1 or reach == 1:
            total = max((-(-dim // stride) - 1) * stride + reach - dim, 0) if isinstance(dim, int) else reach - 1
            less.append(total // 2)
            more.append(total - total // 2)
            continue
        if reach < stride:
            return None
        size = b("Shape", b.node.inputs[0], start=axis, end=axis + 1)
        steps = _int64(b, "Div", _int64(b, "Add", size, stride - 1), stride)
        computed = b("Sub", _int64(b, "Add", _int64(b, "Mul", steps, stride), reach - stride), size)
        half = _int64(b, "Div", computed, 2)
        less.append(half)
        more.append(b("Sub", computed, half))
    return (less, more) if b.attr("auto_pad", "") == "SAME_UPPER" else (more, less)


def _rows(b: Builder, window: Window) -> _Rows | None:
    """What the weights multiply; None if no kernel gathers it."""
    one = all(k == 1 for k in window.kernel)
    if one and not window.padded:
        return _Rows(_strided(b, _channels_last(b, b.node.inputs[0]), window.strides), True)
    whole = window.kernel == window.strides and all(d == 1 for d in window.dilations)
    if whole and not window.padded:
        return _patches(b, window)
    x = b.node.inputs[0]
    if np.dtype(b.dtype) != np.float32 or isinstance(x, gs.Constant) or min(*window.before, *window.after) < 0:
        return None
    return _Rows(b("Window", _channels_last(b, x), domain=ir.DOMAIN, window=str(window)), True)


def _channels_last(b: Builder, x: ir.Tensor) -> ir.Tensor:
    return b("Transpose", x, perm=[0, *range(2, b.rank()), 1])


def _strided(b: Builder, x: ir.Tensor, strides: tuple[int, ...]) -> ir.Tensor:
    if all(s == 1 for s in strides):
        return x
    axes = list(range(1, len(strides) + 1))
    return b("Slice", x, [0] * len(axes), [TO_END] * len(axes), axes, list(strides))


def _patches(b: Builder, window: Window) -> _Rows:
    """``[batch, channels, *(n·k)]`` as ``[batch, ∏n, channels·∏k]``."""
    x, channels = b.node.inputs[0], int(b.node.inputs[1].shape[1])
    count = len(window.kernel)
    grid: list[Dim | ir.Tensor] = []
    for axis, (dim, size) in enumerate(zip(ir.shape(x)[2:], window.kernel, strict=True), 2):
        if isinstance(dim, int):
            x = x if dim % size == 0 else b("Slice", x, [0], [dim // size * size], [axis])
            grid.append(dim // size)
            continue
        cells = _int64(b, "Div", b("Shape", b.node.inputs[0], start=axis, end=axis + 1), size)
        x = b("Slice", x, [0], _int64(b, "Mul", cells, size), [axis])
        grid.append(cells)
    split = b("Reshape", x, target(b, [0, 0, *itertools.chain(*zip(grid, window.kernel, strict=True))]))
    order = [0, *(2 + 2 * i for i in range(count)), 1, *(3 + 2 * i for i in range(count))]
    turned = b("Transpose", split, perm=order)
    return _Rows(b("Reshape", turned, [0, -1, channels * window.taps]), False, grid)


def _int64(b: Builder, op: str, x: ir.Tensor, number: int) -> ir.Tensor:
    return b(op, x, b.editor.constant(f"{b.node.outputs[0].name}.size", np.array([number], np.int64)))


def target(b: Builder, dims: list[Dim | ir.Tensor]) -> ir.Tensor:
    """A Reshape target, or pads, of numbers and of int64 ``[1]`` tensors."""
    if all(isinstance(d, int) for d in dims):
        return b.tensor([d for d in dims if isinstance(d, int)])
    return b("Concat", *([d] if isinstance(d, int) else d for d in dims), axis=0)
