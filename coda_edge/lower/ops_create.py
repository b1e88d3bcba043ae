"""Operators that make elements from sizes, positions and scalars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import tirx

from .emit import Expr, dtype_of, int64
from .ops_math import convert
from .registry import Application, View, constant, pointwise


def _scalar(view: View) -> Expr:
    return view.at([int64(0)] * len(view.shape))


@pointwise("Shape")
def shape_(op: Application) -> View:
    """Shape, with start and end: the sizes themselves."""
    dims = op.view(0).shape
    start, end = op.attribute("start", 0), op.attribute("end", len(dims))
    picked = dims[slice(start, end)]

    def at(indices: Sequence[Expr]) -> Expr:
        result = op.emit.size(picked[-1])
        for i, dim in enumerate(picked[:-1]):
            result = tirx.Select(indices[0].equal(int64(i)), op.emit.size(dim), result)
        return result

    return op.result(at)


@pointwise("ConstantOfShape")
def constant_of_shape(op: Application) -> View:
    """ConstantOfShape: float32 zero unless ``value`` says otherwise."""
    value: Any = op.attribute("value", None)
    data = np.zeros(1, np.float32) if value is None else np.asarray(getattr(value, "values", value))
    literal = constant(data.flat[0].item(), op.dtype)
    return op.result(lambda _: literal)


@pointwise("Range")
def range_(op: Application) -> View:
    """Range: start + i·delta in the dtype of the inputs."""
    start, delta = _scalar(op.view(0)), _scalar(op.view(2))
    return op.result(lambda idx: start + convert(idx[0], op.dtype) * delta)


@pointwise("EyeLike")
def eye_like(op: Application) -> View:
    """EyeLike: ones on the k-th diagonal."""
    k = int64(int(op.attribute("k", 0)))
    one, zero = constant(1, op.dtype), constant(0, op.dtype)
    return op.result(lambda idx: tirx.Select((idx[1] - idx[0]).equal(k), one, zero))


@pointwise("OneHot")
def one_hot(op: Application) -> View:
    """OneHot: negative indices count from the end; an index out of range gives a row of off values."""
    places, values = op.view(0), op.view(2)
    axis = int(op.attribute("axis", -1)) % len(op.shape)

    def at(indices: Sequence[Expr]) -> Expr:
        place = places.at([*indices[:axis], *indices[axis + 1 :]])
        place = place if dtype_of(place) == "int64" else tirx.Cast("int64", place)
        place = tirx.Select(place < int64(0), place + op.emit.size(op.shape[axis]), place)
        return tirx.Select(place.equal(indices[axis]), values.at([int64(1)]), values.at([int64(0)]))

    return op.result(at)
