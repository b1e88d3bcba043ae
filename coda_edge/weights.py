"""Constant weights in the narrowest form that gives their float32 values back exactly.

A half-precision model's weights become float32 in normal form, and passes fold gains and means into them. What is stored stays half:

    value[k, n] = scale[k] · stored[k, n] - offset[n]

with a norm's gain as the scale, and what centres the columns as the offset; kernels compute the value as they read. A float32 weight whose
every number happens to be half's (a half checkpoint, exported in float32) is stored like one: nothing is lost by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_graphsurgeon as gs

from .ir import Array, GraphEditor, Tensor, constant_value

#: Elements below which a constant stays as it is.
SMALLEST = 1024
# Looked at before all of an array is: most float32 weights are told apart by these.
_SAMPLE = 256
_BLOCK = 1 << 20
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix ``[K, N]``: ``stored`` in float32, float16 or bfloat16, ``scale`` ``[K]`` and ``offset`` ``[N]`` in float32, if there are any."""

    stored: Array
    scale: Array | None = None
    offset: Array | None = None

    def columns(self, order: Sequence[int]) -> Weight:
        """Some of the columns, in that order."""
        offset = None if self.offset is None else self.offset[order]
        return Weight(np.ascontiguousarray(self.stored[:, order]), self.scale, offset)


class FactoredConstant(gs.Constant):  # type: ignore[misc]  # graphsurgeon is untyped
    """A float32 constant of which ``weight`` is what is to be stored."""

    def __init__(self, name: str, values: Array, weight: Weight) -> None:
        super().__init__(name, values)
        self.weight = weight


def narrowest(values: Array) -> Array:
    """``values`` in bfloat16 or float16 if they are float32, not few, and exact in it; else as they are."""
    if values.dtype != np.float32 or values.size < SMALLEST:
        return values
    flat = np.ascontiguousarray(values).reshape(-1)
    for dtype in (_BFLOAT16, np.dtype(np.float16)):
        blocks = [slice(0, _SAMPLE), *(slice(at, at + _BLOCK) for at in range(0, flat.size, _BLOCK))]
        if all(_exact(flat[block], dtype) for block in blocks):
            return values.astype(dtype)
    return values


def weight_of(tensor: gs.Constant) -> Weight:
    """How a constant matrix is stored."""
    return tensor.weight if isinstance(tensor, FactoredConstant) else Weight(narrowest(np.asarray(tensor.values)))


def factored(
    editor: GraphEditor, name: str, values: Array, source: Tensor, scale: Array, offset: Array | None
) -> gs.Constant:
    """A constant of ``values`` ``[K, N]``, which are those of ``source`` times ``scale`` ``[K]``, less ``offset`` ``[N]`` (None: 0)."""
    weight = weight_of(source)
    made = editor.constant(name, values)
    if weight.stored.dtype == np.float32 or weight.scale is not None or weight.offset is not None:
        return made
    column = None if offset is None else offset.astype(np.float32)
    return FactoredConstant(made.name, made.values, Weight(weight.stored, scale.astype(np.float32), column))


def choose_columns(
    editor: GraphEditor, name: str, sources: Sequence[Tensor], order: Sequence[int] | Array | None = None
) -> gs.Constant:
    """The columns numbered ``order`` (None: all) of constant matrices ``sources`` ``[K, …]`` side by side, as one constant."""
    values = np.concatenate([constant_value(s) for s in sources], axis=1)
    weights = [s.weight for s in sources if isinstance(s, FactoredConstant)]
    made = editor.constant(name, values if order is None else values[:, list(order)])
    if len(weights) < len(sources) or not all(_alike(weights[0], w) for w in weights):
        return made
    offsets = [w.offset for w in weights if w.offset is not None]
    joined = Weight(
        np.concatenate([w.stored for w in weights], axis=1),
        weights[0].scale,
        np.concatenate(offsets) if offsets else None,
    )
    return FactoredConstant(made.name, made.values, joined if order is None else joined.columns(list(order)))


def _alike(a: Weight, b: Weight) -> bool:
    return (
        a.stored.dtype == b.stored.dtype
        and (a.offset is None) == (b.offset is None)
        and (a.scale is b.scale or (a.scale is not None and b.scale is not None and np.array_equal(a.scale, b.scale)))
    )


def _exact(values: Array, dtype: np.dtype[np.generic]) -> bool:
    if dtype == _BFLOAT16:
        return not np.any(values.view(np.uint32) & 0xFFFF)
    if np.any(values.view(np.uint32) & 0x1FFF):
        # float16's subnormals have fewer bits still; nothing of more is exact.
        return False
    with np.errstate(over="ignore"):
        return np.array_equal(values.astype(dtype).astype(np.float32), values)
