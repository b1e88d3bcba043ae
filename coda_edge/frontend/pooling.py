"""Pooling, written in operators that kernels exist for.

| operator | becomes |
|---|---|
| MaxPool, AveragePool, LpPool | Pad, a Slice for each tap, and their maximum or sum: elementwise, so it fuses with what follows |
| … along an axis with one window | the axis reduced |

Sources: ONNX operators of these names, opsets 18 to 22.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import ir
from ..symbolic import Dim
from .builder import Builder, decomposition
from .sizes import TO_END

# Each tap is an operand of an elementwise chain; windows of more go axis by axis.
_MOST_TAPS = 32
_REDUCE = {"Add": "ReduceSum", "Max": "ReduceMax"}


@dataclass(frozen=True)
class _Window:
    """What a pool does along each spatial axis of ``sizes``. ``extra``: behind the padding, where a last window reaches beyond it."""

    sizes: tuple[Dim, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    extra: tuple[int, ...]


@decomposition("MaxPool", "AveragePool", "LpPool")
def _pool(b: Builder) -> ir.Tensor | None:
    window = _window(b) if len(b.node.outputs) == 1 else None
    if window is None:
        return None
    x, op = b.node.inputs[0], b.node.op
    if op == "MaxPool":
        kind = np.dtype(b.dtype)
        return _taps(b, x, window, -np.inf if kind.kind == "f" else np.iinfo(kind).min, "Max")
    if op == "AveragePool":
        return b("Div", _taps(b, x, window, 0.0, "Add"), _count(b, window))
    p = float(b.attr("p", 2))
    if p == 2:
        return b("Sqrt", _taps(b, b("Mul", x, x), window, 0.0, "Add"))
    total = _taps(b, b("Pow", b("Abs", x), p), window, 0.0, "Add")
    return total if p == 1 else b("Pow", total, 1 / p)


def _window(b: Builder) -> _Window | None:
    """None where its padding depends on a dynamic size."""
    kernel = tuple(b.attr("kernel_shape", None) or [])
    count = len(kernel)
    strides = tuple(b.attr("strides", None) or [1] * count)
    dilations = tuple(b.attr("dilations", None) or [1] * count)
    pads = list(b.attr("pads", None) or [0] * (2 * count))
    auto, ceiling = b.attr("auto_pad", "NOTSET"), b.attr("ceil_mode", 0)
    extra = [0] * count
    for axis, dim in enumerate(ir.shape(b.node.inputs[0])[2:]):
        stride, reach = strides[axis], dilations[axis] * (kernel[axis] - 1) + 1
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            if not isinstance(dim, int) and stride != 1:
                return None
            total = max((-(-dim // stride) - 1) * stride + reach - dim, 0) if isinstance(dim, int) else reach - 1
            less, more = total // 2, total - total // 2
            pads[axis], pads[axis + count] = (less, more) if auto == "SAME_UPPER" else (more, less)
        elif ceiling and stride != 1:
            if not isinstance(dim, int):
                # Then no window starts in the padding at the end, and this much makes one more where elements are left.
                if stride + pads[axis + count] > reach:
                    return None
                extra[axis] = stride - 1
                continue
            padded = dim + pads[axis] + pads[axis + count]
            last = -(-(padded - reach) // stride)
            # A window that would start in the padding at the end is none.
            last -= last * stride >= dim + pads[axis]
            extra[axis] = max(last * stride + reach - padded, 0)
    sizes = tuple(ir.shape(b.node.inputs[0])[2:])
    return _Window(sizes, kernel, strides, dilations, tuple(pads[:count]), tuple(pads[count:]), tuple(extra))


def _taps(b: Builder, y: ir.Tensor, window: _Window, fill: float, op: str) -> ir.Tensor:
    """``op`` over each window of ``y``; one axis after the other where a window has many elements."""
    alone = [axis for axis in range(len(window.kernel)) if _windows(window, axis) == 1 and window.dilations[axis] == 1]
    if alone:
        ends = [window.kernel[axis] - window.before[axis] for axis in alone]
        y = b(_REDUCE[op], b("Slice", y, [0] * len(alone), ends, [2 + axis for axis in alone]), [2 + a for a in alone])
        if len(alone) == len(window.kernel):
            return y
        window = _without(window, alone)
    after = [a + e for a, e in zip(window.after, window.extra, strict=True)]
    if any((*window.before, *after)):
        y = _padded(b, y, window.before, after, fill)
    count = len(window.kernel)
    axes = [[axis] for axis in range(count)] if math.prod(window.kernel) > _MOST_TAPS else [list(range(count))]
    for group in axes:
        total: ir.Tensor | None = None
        for tap in itertools.product(*(_inside(window, axis) for axis in group)):
            starts = [t * window.dilations[axis] for t, axis in zip(tap, group, strict=True)]
            left = [(window.kernel[a] - 1 - t) * window.dilations[a] for t, a in zip(tap, group, strict=True)]
            ends = [-e if e else TO_END for e in left]
            part = b("Slice", y, starts, ends, [2 + axis for axis in group], [window.strides[axis] for axis in group])
            total = part if total is None else b(op, total, part)
        assert total is not None
        y = total
    return y


def _windows(window: _Window, axis: int) -> int | None:
    """How many there are along a static axis."""
    size, reach = window.sizes[axis], window.dilations[axis] * (window.kernel[axis] - 1) + 1
    if not isinstance(size, int):
        return None
    return (size + window.before[axis] + window.after[axis] + window.extra[axis] - reach) // window.strides[axis] + 1


def _inside(window: _Window, axis: int) -> list[int]:
    """The taps that are not in the padding of every window."""
    count, size = _windows(window, axis), window.sizes[axis]
    taps = range(window.kernel[axis])
    if count is None:
        return list(taps)
    first = [t * window.dilations[axis] - window.before[axis] for t in taps]
    last = (count - 1) * window.strides[axis]
    return [t for t in taps if any(0 <= first[t] + at < size for at in range(0, last + 1, window.strides[axis]))]


def _without(window: _Window, done: Sequence[int]) -> _Window:
    """``window`` where axes ``done`` have one element each."""

    def at(values: tuple[Any, ...], one: int) -> tuple[Any, ...]:
        return tuple(one if axis in done else value for axis, value in enumerate(values))

    return _Window(
        at(window.sizes, 1),
        at(window.kernel, 1),
        at(window.strides, 1),
        at(window.dilations, 1),
        at(window.before, 0),
        at(window.after, 0),
        at(window.extra, 0),
    )


def _padded(b: Builder, y: ir.Tensor, before: Sequence[int], after: Sequence[int], fill: float) -> ir.Tensor:
    return b("Pad", y, [0, 0, *before, 0, 0, *after], b.editor.constant("fill", np.asarray(fill, b.dtype)))


def _count(b: Builder, window: _Window) -> ir.Tensor | float:
    """How many elements each window averages."""
    whole = bool(b.attr("count_include_pad", 0))
    if not any(window.extra) and (whole or not any((*window.before, *window.after))):
        return float(math.prod(window.kernel))
    count = len(window.kernel)
    one = b.editor.constant("one", np.ones([1] * (count + 2), b.dtype))
    ones: ir.Tensor = b("Expand", one, b("Concat", [1, 1], b("Shape", b.node.inputs[0], start=2), axis=0))
    if whole:
        ones = _padded(b, ones, window.before, window.after, 1.0)
        none = (0,) * count
        sizes = tuple(s + x + y for s, x, y in zip(window.sizes, window.before, window.after, strict=True))
        window = replace(window, sizes=sizes, before=none, after=none)
    return _taps(b, ones, window, 0.0, "Add")
