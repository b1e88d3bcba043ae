"""Pooling, written in operators that kernels exist for.

| operator | becomes |
|---|---|
| MaxPool, AveragePool, LpPool | Pad, a Slice for each tap, and their maximum or sum: elementwise, so it fuses with what follows |
| … along an axis with one window | the axis reduced |

Sources: ONNX operators of these names, opsets 18 to 22.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import ir
from ..symbolic import Dim
from ..window import Window
from .builder import Builder, decomposition
from .convolution import same_pads, target, window_of
from .sizes import TO_END

# Each tap is an operand of an elementwise chain; windows of more go axis by axis.
_MOST_TAPS = 32
_REDUCE = {"Add": "ReduceSum", "Max": "ReduceMax"}


@dataclass(frozen=True)
class _Pool:
    """What a pool does along the spatial axes of ``sizes``.

    ``extra``: elements behind the padding, where a last window reaches beyond it. ``pads``: of all axes, those of batch and channels
    too, in front and then behind, where a dynamic size decides them; ``window`` then has the others only.
    """

    sizes: tuple[Dim, ...]
    window: Window
    extra: tuple[int, ...]
    pads: ir.Tensor | None = None

    @property
    def padded(self) -> bool:
        """Whether a window may reach beyond what there is."""
        return self.window.padded or any(self.extra) or self.pads is not None


@decomposition("MaxPool", "AveragePool", "LpPool")
def _pooled(b: Builder) -> ir.Tensor | None:
    pool = _pool(b) if len(b.node.outputs) == 1 else None
    if pool is None:
        return None
    x, op = b.node.inputs[0], b.node.op
    if op == "MaxPool":
        kind = np.dtype(b.dtype)
        return _taps(b, x, pool, -np.inf if kind.kind == "f" else np.iinfo(kind).min, "Max")
    if op == "AveragePool":
        return b("Div", _taps(b, x, pool, 0.0, "Add"), _count(b, pool))
    p = float(b.attr("p", 2))
    if p == 2:
        return b("Sqrt", _taps(b, b("Mul", x, x), pool, 0.0, "Add"))
    total = _taps(b, b("Pow", b("Abs", x), p), pool, 0.0, "Add")
    return total if p == 1 else b("Pow", total, 1 / p)


def _pool(b: Builder) -> _Pool | None:
    """None where a dynamic size decides padding in a way that is not written out here."""
    kernel = tuple(b.attr("kernel_shape", None) or [])
    sizes = ir.shape(b.node.inputs[0])[2:]
    none = (0,) * len(kernel)
    window = window_of(b, kernel)
    if window is None:
        found = same_pads(b, kernel)
        if found is None:
            return None
        known = [tuple(n if isinstance(n, int) else 0 for n in side) for side in found]
        strides, dilations = (tuple(b.attr(n, None) or [1] * len(kernel)) for n in ("strides", "dilations"))
        pads = target(b, [0, 0, *found[0], 0, 0, *found[1]])
        return _Pool(sizes, Window(kernel, strides, dilations, *known), none, pads)
    if not b.attr("ceil_mode", 0) or b.attr("auto_pad", "NOTSET") in ("SAME_UPPER", "SAME_LOWER"):
        return _Pool(sizes, window, none)
    extra = list(none)
    for axis, dim in enumerate(sizes):
        stride, reach, before, after = (
            values[axis] for values in (window.strides, window.reach, window.before, window.after)
        )
        if stride == 1:
            continue
        if not isinstance(dim, int):
            # Then no window starts in the padding at the end, and this much makes one more where elements are left.
            if stride + after > reach:
                return None
            extra[axis] = stride - 1
            continue
        padded = dim + before + after
        last = -(-(padded - reach) // stride)
        # A window that would start in the padding at the end is none.
        last -= last * stride >= dim + before
        extra[axis] = max(last * stride + reach - padded, 0)
    return _Pool(sizes, window, tuple(extra))


def _taps(b: Builder, y: ir.Tensor, pool: _Pool, fill: float, op: str) -> ir.Tensor:
    """``op`` over each window of ``y``; one axis after the other where a window has many elements."""
    window = pool.window
    alone = [axis for axis in range(len(window.kernel)) if _windows(pool, axis) == 1 and window.dilations[axis] == 1]
    if alone and pool.pads is None:
        ends = [window.kernel[axis] - window.before[axis] for axis in alone]
        y = b(_REDUCE[op], b("Slice", y, [0] * len(alone), ends, [2 + axis for axis in alone]), [2 + a for a in alone])
        if len(alone) == len(window.kernel):
            return y
        pool = _without(pool, alone)
        window = pool.window
    if pool.padded:
        y = _padded(b, y, pool, fill)
    count = len(window.kernel)
    axes = [[axis] for axis in range(count)] if window.taps > _MOST_TAPS else [list(range(count))]
    for group in axes:
        total: ir.Tensor | None = None
        for tap in itertools.product(*(_inside(pool, axis) for axis in group)):
            starts = [t * window.dilations[axis] for t, axis in zip(tap, group, strict=True)]
            left = [(window.kernel[a] - 1 - t) * window.dilations[a] for t, a in zip(tap, group, strict=True)]
            ends = [-e if e else TO_END for e in left]
            part = b("Slice", y, starts, ends, [2 + axis for axis in group], [window.strides[axis] for axis in group])
            total = part if total is None else b(op, total, part)
        assert total is not None
        y = total
    return y


def _windows(pool: _Pool, axis: int) -> int | None:
    """How many there are along a static axis."""
    size, window = pool.sizes[axis], pool.window
    if not isinstance(size, int):
        return None
    padded = size + window.before[axis] + window.after[axis] + pool.extra[axis]
    return (padded - window.reach[axis]) // window.strides[axis] + 1


def _inside(pool: _Pool, axis: int) -> list[int]:
    """The taps that are not in the padding of every window."""
    count, size, window = _windows(pool, axis), pool.sizes[axis], pool.window
    taps = range(window.kernel[axis])
    if count is None:
        return list(taps)
    first = [t * window.dilations[axis] - window.before[axis] for t in taps]
    last = (count - 1) * window.strides[axis]
    return [t for t in taps if any(0 <= first[t] + at < size for at in range(0, last + 1, window.strides[axis]))]


def _without(pool: _Pool, done: Sequence[int]) -> _Pool:
    """``pool`` where axes ``done`` have one element each."""

    def at(values: Sequence[Any], one: int) -> tuple[Any, ...]:
        return tuple(one if axis in done else value for axis, value in enumerate(values))

    w = pool.window
    window = Window(at(w.kernel, 1), at(w.strides, 1), at(w.dilations, 1), at(w.before, 0), at(w.after, 0))
    return _Pool(at(pool.sizes, 1), window, at(pool.extra, 0))


def _padded(b: Builder, y: ir.Tensor, pool: _Pool, fill: float) -> ir.Tensor:
    after = [a + e for a, e in zip(pool.window.after, pool.extra, strict=True)]
    pads = [0, 0, *pool.window.before, 0, 0, *after] if pool.pads is None else pool.pads
    return b("Pad", y, pads, b.editor.constant("fill", np.asarray(fill, b.dtype)))


def _count(b: Builder, pool: _Pool) -> ir.Tensor | float:
    """How many elements each window averages."""
    window, whole = pool.window, bool(b.attr("count_include_pad", 0))
    if not any(pool.extra) and (whole or not pool.padded):
        return float(window.taps)
    count = len(window.kernel)
    one = b.editor.constant("one", np.ones([1] * (count + 2), b.dtype))
    ones: ir.Tensor = b("Expand", one, b("Concat", [1, 1], b("Shape", b.node.inputs[0], start=2), axis=0))
    if whole:
        none = (0,) * count
        ones = _padded(b, ones, replace(pool, extra=none), 1.0)
        sizes = tuple(s + x + y for s, x, y in zip(pool.sizes, window.before, window.after, strict=True))
        pool = replace(pool, sizes=sizes, window=replace(window, before=none, after=none))
    return _taps(b, ones, pool, 0.0, "Add")
