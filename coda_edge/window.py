"""What a convolution sees of a channels-last tensor: the window of each of its places, as ``coda`` nodes' ``window`` says it.

A window over ``[B, *spatial, C]`` makes rows ``[B, *out, ∏kernel·C]``: the places under each tap, taps in row-major order, each with all
its channels. Places beyond the tensor are zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import sympy

from .errors import ShapeError
from .symbolic import Dim, simplify


@dataclass(frozen=True)
class Window:
    """One number for each spatial axis: taps, their distance, that of windows, zeros before the tensor and after it."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def taps(self) -> int:
        """Places that a window has."""
        return math.prod(self.kernel)

    @property
    def padded(self) -> bool:
        """Whether a window may reach beyond the tensor."""
        return any((*self.before, *self.after))

    @property
    def reach(self) -> tuple[int, ...]:
        """From the first to the last place of a window along each axis, both included."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    def out(self, sizes: Sequence[Dim]) -> tuple[Dim, ...]:
        """How many windows there are along each axis of a tensor with these spatial sizes."""
        found: list[Dim] = []
        for size, reach, stride, before, after in zip(
            sizes, self.reach, self.strides, self.before, self.after, strict=True
        ):
            span = simplify(size + before + after - reach + stride)
            if isinstance(span, int):
                found.append(span // stride)
            else:
                found.append(span if stride == 1 else simplify(sympy.floor(span / stride)))
        return tuple(found)

    def __str__(self) -> str:
        return "; ".join(f"{f.name} {' '.join(map(str, getattr(self, f.name)))}" for f in fields(self))

    @classmethod
    def parse(cls, text: str) -> Window:
        """The window that ``str`` wrote. Raises ShapeError for any other text."""
        try:
            parts = {name: tuple(map(int, numbers)) for name, *numbers in (p.split() for p in text.split(";"))}
            window = cls(**parts)
        except (TypeError, ValueError) as e:
            raise _malformed(text) from e
        if len({len(part) for part in parts.values()}) > 1 or not window.kernel:
            raise _malformed(text)
        if min((*window.kernel, *window.strides, *window.dilations)) < 1 or min((*window.before, *window.after)) < 0:
            raise _malformed(text)
        return window


def _malformed(text: str) -> ShapeError:
    return ShapeError(
        f"'{text}' is no window: expected 'kernel 3 3; strides 1 1; dilations 1 1; before 1 1; after 1 1', with one "
        "number for each spatial axis; optimize the model again"
    )


def rows_shape(dims: Sequence[Dim], window: str | None) -> tuple[Dim, ...]:
    """``[…, K]``, the rows that a product makes of its left operand of shape ``dims``, which ``window``, if it has one, is over."""
    if window is None:
        return tuple(dims)
    batch, *sizes, channels = dims
    parsed = Window.parse(window)
    if len(sizes) != len(parsed.kernel):
        raise ShapeError(
            f"a window over {len(parsed.kernel)} spatial axes reads a tensor of {len(dims)} dimensions: expected "
            f"[batch, {len(parsed.kernel)} sizes, channels]; optimize the model again"
        )
    return (batch, *parsed.out(sizes), simplify(channels * parsed.taps))
