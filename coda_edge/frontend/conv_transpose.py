"""Transposed convolutions as convolutions of their phases.

An element ``i`` meets tap ``t`` at place ``i·stride + t·dilation`` of the result before it is cropped. So a place ``q·stride + r`` is
made of the elements ``q − k`` under the taps with ``t·dilation = k·stride + r``: for each *phase* ``r`` a plain convolution at the size of the
input, whose results take turns. All phases are one convolution with a filter for each where they have about as many taps,
which are then read once; otherwise each is its own. The bias goes with the filters.

Source: ONNX operator ConvTranspose, opsets 1 to 22.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .. import ir
from .builder import Builder, decomposition
from .sizes import TO_END

# The most that taps of zeros may add to the work before each phase becomes a convolution of its own.
_WASTE = 1.5


@dataclass(frozen=True)
class _Axis:
    """One spatial axis. ``before``, ``after``: what is cut off; ``extra``: places behind the last tap."""

    kernel: int
    stride: int
    dilation: int
    before: int
    after: int
    extra: int

    @property
    def first(self) -> int:
        """The ``q`` of the first place that is kept."""
        return self.before // self.stride

    @property
    def longer(self) -> int:
        """How many more values of ``q`` there are than elements."""
        return (self.extra + (self.kernel - 1) * self.dilation - self.after) // self.stride - self.first

    @property
    def crop(self) -> tuple[int, int]:
        """Places of the first and last ``q`` that are cut off."""
        last = (self.extra + (self.kernel - 1) * self.dilation - self.after) % self.stride
        return self.before % self.stride, self.stride - 1 - last

    def taps(self, phase: int) -> dict[int, int]:
        """The taps of a phase by their ``k``, which go up evenly."""
        steps = {t * self.dilation // self.stride: t for t in range(self.kernel) if self._phase(t) == phase}
        return dict(sorted(steps.items()))

    def _phase(self, tap: int) -> int:
        return tap * self.dilation % self.stride

    @property
    def most(self) -> int:
        """Taps of a phase that has all."""
        return (self.kernel - 1) * self.dilation // self.stride + 1


@dataclass(frozen=True)
class _Conv:
    """A convolution along one axis: for each of its phases the tap at each place of its kernel, or None for zeros."""

    taps: tuple[tuple[int | None, ...], ...]
    dilation: int
    before: int
    after: int


def _joint(axis: _Axis) -> _Conv:
    """All phases at once: a window of ``most`` elements, the last of which is ``q`` itself."""
    if axis.stride == 1:
        return _alone(axis, 0)
    of = [axis.taps(phase) for phase in range(axis.stride)]
    rows = tuple(tuple(taps.get(k) for k in reversed(range(axis.most))) for taps in of)
    return _Conv(rows, 1, axis.most - 1 - axis.first, axis.longer + axis.first)


def _alone(axis: _Axis, phase: int) -> _Conv:
    """One phase with the taps that it has; a zero if it has none."""
    taps: Mapping[int, int | None] = axis.taps(phase) or {0: None}
    steps = list(taps)
    apart = steps[1] - steps[0] if len(steps) > 1 else 1
    row = tuple(taps[k] for k in reversed(steps))
    return _Conv((row,), apart, steps[-1] - axis.first, axis.longer + axis.first - steps[0])


@decomposition("ConvTranspose")
def _conv_transpose(b: Builder) -> ir.Tensor | None:
    channels, filters, *kernel = ir.shape(b.node.inputs[1])
    if not all(isinstance(d, int) for d in (channels, filters, *kernel)):
        return None
    axes = _axes(b, [int(k) for k in kernel])
    if axes is None:
        return None
    joint = [_joint(axis) for axis in axes]
    work = math.prod(len(c.taps) * len(c.taps[0]) / a.kernel for c, a in zip(joint, axes, strict=True))
    strides = [axis.stride for axis in axes]
    if work <= _WASTE:
        y = _convolved(b, joint)
    else:
        alone = [[_alone(axis, phase) for phase in range(axis.stride)] for axis in axes]
        parts = [b("Unsqueeze", _convolved(b, choice), [len(axes) + 1]) for choice in itertools.product(*alone)]
        y = b("Concat", *parts, axis=len(axes) + 1)
    if math.prod(strides) > 1:
        y = _interleaved(b, y, strides)
    y = _cropped(b, y, [axis.crop for axis in axes])
    return b("Transpose", y, perm=[0, b.rank() - 1, *range(1, b.rank() - 1)])


def _axes(b: Builder, kernel: Sequence[int]) -> list[_Axis] | None:
    """None where what is cut off depends on a dynamic size."""
    count = len(kernel)
    strides = list(b.attr("strides", None) or [1] * count)
    dilations = list(b.attr("dilations", None) or [1] * count)
    extra = list(b.attr("output_padding", None) or [0] * count)
    pads = _pads(b, strides, [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)], extra)
    if pads is None:
        return None
    parts = zip(kernel, strides, dilations, pads[:count], pads[count:], extra, strict=True)
    return [_Axis(*part) for part in parts]


def _pads(b: Builder, strides: list[int], reach: list[int], extra: list[int]) -> list[int] | None:
    """What is cut off at both ends of each axis; None where that depends on a dynamic size."""
    count, auto = len(strides), b.attr("auto_pad", "NOTSET")
    wanted = b.attr("output_shape", None)
    if wanted is None and auto not in ("SAME_UPPER", "SAME_LOWER"):
        return list(b.attr("pads", None) or [0] * (2 * count)) if auto == "NOTSET" else [0] * (2 * count)
    totals = []
    for axis, dim in enumerate(ir.shape(b.node.inputs[0])[2:]):
        if wanted is None:
            totals.append(max(reach[axis] + 1 + extra[axis] - strides[axis], 0))
        elif isinstance(dim, int):
            size = strides[axis] * (dim - 1) + extra[axis] + reach[axis] + 1
            totals.append(size - wanted[-count:][axis])
        else:
            return None
    less, more = [t // 2 for t in totals], [t - t // 2 for t in totals]
    return [*less, *more] if auto == "SAME_UPPER" else [*more, *less]


def _convolved(b: Builder, convs: Sequence[_Conv]) -> ir.Tensor:
    """``[batch, *q, ∏phases·filters]``, the phases before the filters."""
    group, phases = b.attr("group", 1), math.prod(len(c.taps) for c in convs)
    x, count = b.node.inputs[0], len(convs)
    cut = [i for i, c in enumerate(convs) if c.before < 0 or c.after < 0]
    if cut:
        starts, ends = [max(0, -convs[i].before) for i in cut], [min(0, convs[i].after) or TO_END for i in cut]
        x = b("Slice", x, starts, ends, [2 + i for i in cut])
    operands = [x, _filters(b, convs)]
    bias = b.input(2)
    if bias is not None:
        grouped = b("Reshape", bias, [group, 1, -1])
        operands.append(b("Reshape", b("Tile", grouped, [1, phases, 1]) if phases > 1 else grouped, [-1]))
    before, after = [max(0, c.before) for c in convs], [max(0, c.after) for c in convs]
    y = b(
        "Conv",
        *operands,
        group=group,
        dilations=[c.dilation for c in convs],
        kernel_shape=[len(c.taps[0]) for c in convs],
        pads=[*before, *after],
    )
    last = b("Transpose", y, perm=[0, *range(2, count + 2), 1])
    if group == 1 or phases == 1:
        return last
    filters = int(ir.shape(b.node.inputs[1])[1])
    split = b("Reshape", last, [0] * (count + 1) + [group, phases, filters])
    turned = b("Transpose", split, perm=[*range(count + 1), count + 2, count + 1, count + 3])
    return b("Reshape", turned, [0] * (count + 1) + [phases * group * filters])


def _filters(b: Builder, convs: Sequence[_Conv]) -> ir.Tensor:
    """The weight ``[C, O/g, *kernel]`` as that of a convolution: ``[g·phases·O/g, C/g, *taps]``."""
    weight, group = b.node.inputs[1], b.attr("group", 1)
    channels, filters = (int(d) for d in ir.shape(weight)[:2])
    for i, conv in enumerate(convs):
        axis, size = 2 + i, int(ir.shape(b.node.inputs[1])[2 + i])
        flat = [tap for row in conv.taps for tap in row]
        if None in flat:
            zero = b.editor.constant("zero", np.zeros((), b.dtype))
            weight = b("Pad", weight, [0, 1], zero, [axis])
        weight = b("Gather", weight, [size if tap is None else tap for tap in flat], axis=axis)
    count = len(convs)
    pairs = itertools.chain(*((len(c.taps), len(c.taps[0])) for c in convs))
    split = b("Reshape", weight, [group, channels // group, filters, *pairs])
    order = [0, *(3 + 2 * i for i in range(count)), 2, 1, *(4 + 2 * i for i in range(count))]
    turned = b("Transpose", split, perm=order)
    phases = math.prod(len(c.taps) for c in convs)
    return b("Reshape", turned, [group * phases * filters, channels // group, *(len(c.taps[0]) for c in convs)])


def _interleaved(b: Builder, y: ir.Tensor, strides: Sequence[int]) -> ir.Tensor:
    """``[batch, *q, ∏phases·filters]`` (or phases and filters apart) as ``[batch, *(q·phase), filters]``."""
    count, wide = len(strides), [i for i, s in enumerate(strides) if s > 1]
    filters = int(ir.shape(b.node.inputs[1])[1]) * b.attr("group", 1)
    sizes = [b("Shape", y, start=1 + i, end=2 + i) for i in range(count)]
    split = b("Reshape", y, [0] * (count + 1) + [strides[i] for i in wide] + [filters])
    order = [0]
    for i in range(count):
        order += [1 + i, count + 1 + wide.index(i)] if i in wide else [1 + i]
    order.append(count + 1 + len(wide))
    turned = split if order == sorted(order) else b("Transpose", split, perm=order)
    with b.numbers(np.int64):
        grown = [b("Mul", size, s) if s > 1 else size for size, s in zip(sizes, strides, strict=True)]
    return b("Reshape", turned, b("Concat", [0], *grown, [filters], axis=0))


def _cropped(b: Builder, y: ir.Tensor, crops: Sequence[tuple[int, int]]) -> ir.Tensor:
    cut = [i for i, crop in enumerate(crops) if any(crop)]
    if not cut:
        return y
    starts, ends = [crops[i][0] for i in cut], [-crops[i][1] or TO_END for i in cut]
    return b("Slice", y, starts, ends, [1 + i for i in cut])
