"""Operators that put elements elsewhere, by those whose places are expressions of indices.

| operator | becomes |
|---|---|
| DepthToSpace, SpaceToDepth | Reshape, Transpose, Reshape |
| ReverseSequence, TensorScatter | a GatherND by places that the lengths, or the write indices, give |
| CenterCropPad | a Pad, of negative amounts where it crops |
| Hardmax | the places that equal ArgMax's |

Source: the ONNX operator specifications, opsets 11 to 24.
"""

from __future__ import annotations

import numpy as np

from .. import ir
from .builder import Builder, Operand
from .composite import composite
from .decompose import counting

_INT64 = np.dtype(np.int64)


def _dims(b: Builder, x: ir.Tensor, *dims: int | tuple[int, int, int]) -> Operand:
    """A Reshape target: numbers, and ``(axis, times, over)`` for an axis of ``x`` times and over a number."""
    parts: list[Operand] = []
    with b.numbers(_INT64):
        for dim in dims:
            if isinstance(dim, int):
                parts.append([dim])
                continue
            axis, times, over = dim
            size = b("Shape", x, start=axis, end=axis + 1)
            size = size if times == 1 else b("Mul", size, [times])
            parts.append(size if over == 1 else b("Div", size, [over]))
    return b("Concat", *parts, axis=0)


@composite("DepthToSpace", domain="")
def _depth_to_space(b: Builder) -> ir.Tensor:
    x, size = b.node.inputs[0], b.required("blocksize")
    area = size * size
    channels = (1, 1, area)
    if b.attr("mode", "DCR") == "DCR":
        split, order = (size, size, channels), [0, 3, 4, 1, 5, 2]
    else:
        split, order = (channels, size, size), [0, 1, 4, 2, 5, 3]
    apart = b("Reshape", x, _dims(b, x, (0, 1, 1), *split, (2, 1, 1), (3, 1, 1)))
    together = _dims(b, x, (0, 1, 1), channels, (2, size, 1), (3, size, 1))
    return b("Reshape", b("Transpose", apart, perm=order), together)


@composite("SpaceToDepth", domain="")
def _space_to_depth(b: Builder) -> ir.Tensor:
    x, size = b.node.inputs[0], b.required("blocksize")
    apart = b("Reshape", x, _dims(b, x, (0, 1, 1), (1, 1, 1), (2, 1, size), size, (3, 1, size), size))
    together = _dims(b, x, (0, 1, 1), (1, size * size, 1), (2, 1, size), (3, 1, size))
    order = [0, 3, 5, 1, 2, 4] if b.attr("mode", "DCR") == "DCR" else [0, 1, 3, 5, 2, 4]
    return b("Reshape", b("Transpose", apart, perm=order), together)


@composite("ReverseSequence", domain="")
def _reverse_sequence(b: Builder) -> ir.Tensor:
    x, lengths = b.node.inputs
    first = [b.attr("batch_axis", 1), b.attr("time_axis", 0)]
    order = first + [i for i in range(b.rank()) if i not in first]
    with b.numbers(_INT64):
        place = b("Unsqueeze", counting(b, x, first[1]), [0])
        end = b("Unsqueeze", lengths, [1])
        turned = b("Sub", b("Sub", end, 1), place)
        index = b("Where", b("Less", place, end), turned, place)
    rows = b("GatherND", b("Transpose", x, perm=order), b("Unsqueeze", index, [2]), batch_dims=1)
    return b("Transpose", rows, perm=[order.index(i) for i in range(b.rank())])


@composite("TensorScatter", domain="")
def _tensor_scatter(b: Builder) -> ir.Tensor:
    """An element of the cache is one of the update where that is written, else what it was."""
    past, update, starts = b.node.inputs[0], b.node.inputs[1], b.input(2)
    rank = b.rank()
    axis = b.attr("axis", -2) % rank
    order = [0, axis, *(i for i in range(1, rank) if i != axis)]
    back = [order.index(i) for i in range(rank)]
    with b.numbers(_INT64):
        count = b("Shape", update, start=axis, end=axis + 1)
        place = b("Unsqueeze", counting(b, past, axis), [0])
        offset = place if starts is None else b("Sub", place, b("Unsqueeze", b.cast(starts, _INT64), [1]))
        if b.attr("mode", "linear") == "circular":
            length = b("Shape", past, start=axis, end=axis + 1)
            offset = b("Mod", offset, length)
        written = b("And", b("GreaterOrEqual", offset, 0), b("Less", offset, count))
        index = b("Min", b("Max", offset, 0), b("Sub", count, 1))
        if starts is None:
            index = b("Expand", index, b("Concat", b("Shape", past, start=0, end=1), [1], axis=0))
    new = b("GatherND", b("Transpose", update, perm=order), b("Unsqueeze", index, [2]), batch_dims=1)
    where = b("Unsqueeze", written, list(range(2, rank)))
    return b("Transpose", b("Where", where, new, b("Transpose", past, perm=order)), perm=back)


@composite("CenterCropPad", domain="")
def _center_crop_pad(b: Builder) -> ir.Tensor | None:
    target = ir.constant_value(b.node.inputs[1])
    if target is None:
        return None
    dims, rank = ir.shape(b.node.inputs[0]), b.rank()
    before, after = [0] * rank, [0] * rank
    for axis, size in zip(b.attr("axes", None) or range(rank), target.reshape(-1).tolist(), strict=True):
        dim = dims[axis]
        if not isinstance(dim, int):
            return None
        missing = size - dim
        # Of an odd number the second half is the larger one.
        before[axis] = missing // 2 if missing >= 0 else -(-missing // 2)
        after[axis] = missing - before[axis]
    return b("Pad", b.node.inputs[0], [*before, *after])


@composite("Hardmax", domain="")
def _hardmax(b: Builder) -> ir.Tensor:
    x, axis = b.node.inputs[0], b.attr("axis", -1) % b.rank()
    largest = b("ArgMax", x, axis=axis, keepdims=1)
    with b.numbers(_INT64):
        places = counting(b, x, axis)
    places = b("Unsqueeze", places, list(range(1, b.rank() - axis))) if axis < b.rank() - 1 else places
    return b.cast(b("Equal", places, largest), b.dtype, np.bool_)
