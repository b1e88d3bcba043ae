"""GridSample and AffineGrid: an image read at places that are computed, by gathers of its neighbouring elements.

Source: ONNX operators GridSample (opsets 16 to 22) and AffineGrid (opset 20).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import ir
from .builder import Builder
from .composite import composite

_INT64 = np.dtype(np.int64)
# Of Keys' cubic convolution, as ONNX has it.
_CUBIC = -0.75


@dataclass(frozen=True)
class _Tap:
    """An element along one axis: its float position, and the weight it has (None for 1)."""

    at: ir.Tensor
    weight: ir.Tensor | None


@composite("GridSample", domain="")
def _grid_sample(b: Builder) -> ir.Tensor | None:
    x, grid = b.node.inputs
    spatial = b.rank() - 2
    sizes = ir.shape(x)[2:]
    if not all(isinstance(d, int) for d in sizes) or np.dtype(b.dtype).kind != "f":
        return None
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(b.attr("mode", "linear"), b.attr("mode", "linear"))
    points = b("Reshape", grid, [0, -1, spatial])
    taps = []
    for axis, size in enumerate(int(d) for d in sizes):
        # The last coordinate of a place is that along the first axis.
        index = spatial - 1 - axis
        place = b("Squeeze", b("Slice", points, [index], [index + 1], [2]), [2])
        taps.append(_TAPS[mode](b, _element(b, place, size), size))
    flat = b("Transpose", b("Reshape", x, [0, 0, -1]), perm=[0, 2, 1])
    total: ir.Tensor | None = None
    for chosen in itertools.product(*taps):
        part = _picked(b, flat, chosen, [int(d) for d in sizes])
        total = part if total is None else b("Add", total, part)
    assert total is not None
    rows = b("Transpose", total, perm=[0, 2, 1])
    around = b("Shape", grid, start=1, end=1 + spatial)
    return b("Reshape", rows, b("Concat", b("Shape", x, start=0, end=2), around, axis=0))


def _element(b: Builder, place: ir.Tensor, size: int) -> ir.Tensor:
    """A coordinate of [−1, 1] as a position among ``size`` elements."""
    if b.attr("align_corners", 0):
        return b("Mul", b("Add", place, 1.0), (size - 1) / 2)
    return b("Sub", b("Mul", b("Add", place, 1.0), size / 2), 0.5)


def _inside(b: Builder, at: ir.Tensor, size: int) -> ir.Tensor:
    """``at`` brought back into the image as the padding mode has it; as it is for zeros."""
    mode = b.attr("padding_mode", "zeros")
    if mode == "border":
        return b("Min", b("Max", at, 0.0), float(size - 1))
    if mode != "reflection":
        return at
    low, high = (0.0, float(size - 1)) if b.attr("align_corners", 0) else (-0.5, size - 0.5)
    span = high - low
    if span == 0:
        return b("Mul", at, 0.0)
    # A triangle wave of period 2·span.
    over = b("Div", b("Abs", b("Sub", at, low)), span)
    rest = b("Sub", over, b("Mul", b("Floor", b("Mul", over, 0.5)), 2.0))
    back = b("Sub", b.tensor(1.0), b("Abs", b("Sub", rest, 1.0)))
    return b("Min", b("Max", b("Add", b("Mul", back, span), low), 0.0), float(size - 1))


def _nearest(b: Builder, at: ir.Tensor, size: int) -> list[_Tap]:
    return [_Tap(b("Round", _inside(b, at, size)), None)]


def _linear(b: Builder, at: ir.Tensor, size: int) -> list[_Tap]:
    at = _inside(b, at, size)
    low = b("Floor", at)
    rest = b("Sub", at, low)
    return [_Tap(low, b("Sub", b.tensor(1.0), rest)), _Tap(b("Add", low, 1.0), rest)]


def _cubic(b: Builder, at: ir.Tensor, size: int) -> list[_Tap]:
    low = b("Floor", at)
    rest = b("Sub", at, low)
    taps = []
    for step in (-1, 0, 1, 2):
        distance = b("Abs", b("Sub", rest, float(step)))
        place = _inside(b, b("Add", low, float(step)), size)
        near = ((_CUBIC + 2), -(_CUBIC + 3), 0.0, 1.0)
        far = (_CUBIC, -5 * _CUBIC, 8 * _CUBIC, -4 * _CUBIC)
        taps.append(_Tap(place, _polynomial(b, distance, near if step in (0, 1) else far)))
    return taps


def _polynomial(b: Builder, x: ir.Tensor, coefficients: Sequence[float]) -> ir.Tensor:
    total: ir.Tensor | float = coefficients[0]
    for c in coefficients[1:]:
        total = b("Add", b("Mul", x, total), c)
    return b.tensor(total)


_TAPS = {"nearest": _nearest, "linear": _linear, "cubic": _cubic}


def _picked(b: Builder, flat: ir.Tensor, taps: Sequence[_Tap], sizes: Sequence[int]) -> ir.Tensor:
    """The elements of ``flat [N, ∏sizes, C]`` at a tap of each axis, times their weights: ``[N, P, C]``."""
    place: ir.Tensor | None = None
    weight: ir.Tensor | None = None
    known: ir.Tensor | None = None
    for tap, size in zip(taps, sizes, strict=True):
        held = b("Min", b("Max", tap.at, 0.0), float(size - 1))
        index = b.cast(held, _INT64, b.dtype)
        with b.numbers(_INT64):
            place = index if place is None else b("Add", b("Mul", place, size), index)
        if b.attr("padding_mode", "zeros") == "zeros":
            there = b("Equal", held, tap.at)
            known = there if known is None else b("And", known, there)
        if tap.weight is not None:
            weight = tap.weight if weight is None else b("Mul", weight, tap.weight)
    assert place is not None
    rows = b("GatherND", flat, b("Unsqueeze", place, [2]), batch_dims=1)
    rows = rows if weight is None else b("Mul", rows, b("Unsqueeze", weight, [2]))
    return rows if known is None else b("Where", b("Unsqueeze", known, [2]), rows, 0.0)


@composite("AffineGrid", domain="")
def _affine_grid(b: Builder) -> ir.Tensor | None:
    """``[N, P, r + 1] · [N, r + 1, r]``, the P places a constant."""
    theta, given = b.node.inputs[0], ir.constant_value(b.node.inputs[1])
    if given is None:
        return None
    sizes = [int(d) for d in given.reshape(-1)[2:]]
    lines = []
    for size in sizes:
        steps = np.arange(size, dtype=np.float64)
        aligned = -1 + 2 * steps / max(size - 1, 1)
        lines.append(aligned if b.attr("align_corners", 0) else (2 * steps + 1) / size - 1)
    places = np.stack([*reversed(np.meshgrid(*lines, indexing="ij")), np.ones(sizes)], -1)
    base = b.editor.constant("places", places.reshape(-1, len(sizes) + 1).astype(b.dtype))
    moved = b("MatMul", base, b("Transpose", theta, perm=[0, 2, 1]))
    return b("Reshape", moved, [0, *sizes, len(sizes)])
