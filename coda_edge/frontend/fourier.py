"""Fourier transforms as matrix products: of signals whose length is known.

Source: ONNX operators DFT (opsets 17 and 20) and STFT (opset 17).
"""

from __future__ import annotations

import math

import numpy as np

from .. import ir
from .builder import Builder
from .composite import composite

# A matrix of this many rows is dense: beyond, a transform is not worth one.
_LONGEST = 4096


def _matrix(length: int, real: bool, inverse: bool, onesided: bool) -> ir.Array:
    """float32 ``[length·(1|2), n·2]``: a transform's real and imaginary parts in turn, n of ``length`` frequencies.

    An inverse of a one-sided spectrum has ``length`` rows of ``length // 2 + 1`` pairs, and its columns are real.
    """
    kept = length // 2 + 1 if onesided else length
    rows, columns = (kept, length) if inverse and onesided else (length, kept)
    turns = np.outer(np.arange(rows), np.arange(columns)) % length
    angle = turns * ((2 if inverse else -2) * math.pi / length)
    cos, sin = np.cos(angle), np.sin(angle)
    if inverse:
        cos, sin = cos / length, sin / length
    if inverse and onesided:
        # The frequencies that are left out are the conjugates of those between the ends.
        twice = np.full((rows, 1), 2.0)
        twice[0] = 1
        if length % 2 == 0:
            twice[-1] = 1
        return np.stack([cos * twice, -sin * twice], 1).reshape(-1, columns).astype(np.float32)
    of_real = np.stack([cos, sin], 2)
    of_imaginary = np.stack([-sin, cos], 2)
    both = of_real[:, None] if real else np.stack([of_real, of_imaginary], 1)
    return both.reshape(-1, columns * 2).astype(np.float32)


def _transform(
    b: Builder, x: ir.Tensor, rank: int, axis: int, dims: tuple[int, int, int], inverse: bool, onesided: bool
) -> ir.Tensor:
    """``x`` of ``rank`` dimensions, the last the parts of a number, transformed along ``axis``. ``dims``: its size, the transform's, the parts."""
    have, length, parts = dims
    wanted = length // 2 + 1 if onesided and inverse else length
    order = [i for i in range(rank) if i not in (axis, rank - 1)] + [axis, rank - 1]
    y = b("Transpose", x, perm=order)
    if wanted < have:
        y = b("Slice", y, [0], [wanted], [rank - 2])
    elif wanted > have:
        y = b("Pad", y, [0] * (2 * rank - 2) + [wanted - have, 0])
    lead = [0] * (rank - 2)
    flat = b("Reshape", y, [*lead, wanted * parts])
    made = b("MatMul", flat, b.editor.constant("fourier", _matrix(length, parts == 1, inverse, onesided)))
    out = 1 if inverse and onesided else 2
    apart = b("Reshape", made, [*lead, -1, out])
    return b("Transpose", apart, perm=[order.index(i) for i in range(rank)])


@composite("DFT", domain="")
def _dft(b: Builder) -> ir.Tensor | None:
    dims, rank = ir.shape(b.node.inputs[0]), b.rank()
    axis = ir.scalar_value(b.node.inputs[2]) if b.input(2) is not None else b.attr("axis", -2)
    given = ir.scalar_value(b.node.inputs[1]) if b.input(1) is not None else None
    if axis is None or (b.input(1) is not None and given is None):
        return None
    axis = int(axis) % rank
    have, parts = dims[axis], dims[-1]
    inverse, onesided = bool(b.attr("inverse", 0)), bool(b.attr("onesided", 0))
    if not isinstance(have, int) or not isinstance(parts, int):
        return None
    length = int(given) if given is not None else 2 * (have - 1) if inverse and onesided else have
    if length > _LONGEST or (inverse and onesided and parts == 1):
        return None
    return _transform(b, b.node.inputs[0], rank, axis, (have, length, parts), inverse, onesided)


@composite("STFT", domain="")
def _stft(b: Builder) -> ir.Tensor | None:
    """Frames of the signal, each times the window, and their transforms."""
    signal, step = b.node.inputs[0], ir.scalar_value(b.node.inputs[1])
    window = b.input(2)
    given = ir.scalar_value(b.node.inputs[3]) if b.input(3) is not None else None
    width = ir.shape(window)[0] if window is not None else given
    dims = ir.shape(signal)
    parts = dims[2] if len(dims) > 2 else 1
    if step is None or width is None or not isinstance(parts, int) or int(width) > _LONGEST:
        return None
    length = int(given) if given is not None else int(width)
    if window is not None and int(width) != length:
        return None
    x = signal if len(dims) > 2 else b("Unsqueeze", signal, [2])
    with b.numbers(np.int64):
        last = b("Squeeze", b("Sub", b("Shape", x, start=1, end=2), length - 1), [0])
        starts = b("Range", 0, last, int(step))
        places = b("Add", b("Unsqueeze", starts, [1]), list(range(length)))
    frames = b("Gather", x, places, axis=1)
    if window is not None:
        frames = b("Mul", frames, b("Unsqueeze", window, [1]))
    return _transform(b, frames, 4, 2, (length, length, parts), False, bool(b.attr("onesided", 1)))
