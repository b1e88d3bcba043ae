"""Resize as gathers: each element is a sum of few neighbours along one axis after the other, each times a weight.

Along an axis whose sizes are numbers, neighbours and weights are read from what onnxruntime makes of the identity, which is
linear, whatever the mode; of many neighbours (antialiasing) a matrix product is left. Along a dynamic axis they are computed
when the model runs.

Source: ONNX operator Resize, opsets 13 to 19.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from .. import ir
from ..symbolic import Dim
from .builder import Builder, decomposition
from .shapes import MOST_FLOATS

# A resizing matrix is dense: beyond this length an axis is not worth one.
_LONGEST_AXIS = 2048
# Neighbours that are gathered one by one.
_MOST_TAPS = 4
_INT64 = np.dtype(np.int64)


@dataclass(frozen=True)
class _Axis:
    """How one axis is resized. ``scale`` is None if sizes were given; ``roi`` is the part that is cropped."""

    axis: int
    old: Dim
    new: Dim
    scale: float | None
    roi: tuple[float, float] | None


@dataclass(frozen=True)
class _Tap:
    """A neighbour of each new element: its index, int64 ``[new]``, and its weight, ``[new]`` (None for 1)."""

    index: ir.Tensor
    weight: ir.Tensor | None


@decomposition("Resize", "Upsample")
def _resize(b: Builder) -> ir.Tensor | None:
    if np.dtype(b.dtype) != np.float32:
        return None
    resized = _axes(b)
    if resized is None:
        return None
    cropped = b.attr("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    outside = b.attr("extrapolation_value", 0.0) if cropped else 0.0
    y: ir.Tensor = b.node.inputs[0]
    # Weights of what is inside sum to 1: what is outside is 0 of a tensor less the value there.
    y = b("Sub", y, outside) if outside else y
    for axis in resized:
        if isinstance(axis.old, int) and isinstance(axis.new, int):
            made = _by_numbers(b, y, axis, axis.old, axis.new)
        else:
            made = _by_sizes(b, y, axis)
        if made is None:
            return None
        y = made
    return b("Add", y, outside) if outside else y


def _axes(b: Builder) -> list[_Axis] | None:
    """The axes that change; None if data decides how."""
    before, after = ir.shape(b.node.inputs[0]), ir.shape(b.node.outputs[0])
    old_form = b.node.op == "Upsample"
    scales, roi = b.input(1 if old_form else 2), None if old_form else b.input(1)
    factors = None if scales is None else ir.constant_value(scales)
    part = None if roi is None else ir.constant_value(roi)
    if b.attr("coordinate_transformation_mode", "half_pixel") != "tf_crop_and_resize":
        part = None
    elif part is None or not part.size:
        return None
    axes = [i % b.rank() for i in b.attr("axes", None) or range(b.rank())]
    if scales is not None and factors is None and ir.shape(scales) != (0,):
        return None
    found = []
    for axis, (old, new) in enumerate(zip(before, after, strict=True)):
        place = axes.index(axis) if axis in axes else None
        scale = None if factors is None or not factors.size or place is None else float(factors[place])
        region = None if part is None or place is None else (float(part[place]), float(part[place + len(axes)]))
        if not ir.same_shape([old], [new]) or scale not in (None, 1.0) or region not in (None, (0.0, 1.0)):
            found.append(_Axis(axis, old, new, scale, region))
    return found


def _by_numbers(b: Builder, x: ir.Tensor, axis: _Axis, old: int, new: int) -> ir.Tensor | None:
    if max(old, new) > _LONGEST_AXIS:
        return _by_sizes(b, x, axis)
    matrix = _matrix(b, axis, old, new)
    count = int((matrix != 0).sum(0).max(initial=1))
    if count > _MOST_TAPS:
        order = [i for i in range(b.rank()) if i != axis.axis] + [axis.axis]
        y = b("MatMul", b("Transpose", x, perm=order), b.editor.constant("resize", matrix))
        return b("Transpose", y, perm=[order.index(i) for i in range(b.rank())])
    # The neighbours of an element in ascending order; of fewer the rest weigh 0.
    rows = np.sort(np.argsort(matrix == 0, axis=0, kind="stable")[:count], axis=0)
    weights = np.take_along_axis(matrix, rows, axis=0)
    plain = count == 1 and bool(np.all(weights == 1))
    taps = [
        _Tap(b.editor.constant("place", r.astype(np.int64)), None if plain else b.editor.constant("weight", w))
        for r, w in zip(rows, weights, strict=True)
    ]
    return _gathered(b, x, axis.axis, taps)


def _gathered(b: Builder, x: ir.Tensor, axis: int, taps: list[_Tap]) -> ir.Tensor:
    """The weighted sum of the neighbours along an axis."""
    total: ir.Tensor | None = None
    for tap in taps:
        part = b("Gather", x, tap.index, axis=axis)
        if tap.weight is not None:
            part = b("Mul", part, b("Reshape", tap.weight, [-1] + [1] * (b.rank() - 1 - axis)))
        total = part if total is None else b("Add", total, part)
    assert total is not None
    return total


def _matrix(b: Builder, axis: _Axis, old: int, new: int) -> ir.Array:
    """``[old, new]``: what Resize along an axis makes of each unit vector. It is linear, and axes are independent."""
    import onnxruntime

    dropped = ("axes", "keep_aspect_ratio_policy", "extrapolation_value")
    attrs = {k: v for k, v in b.node.attrs.items() if k not in dropped}
    if b.node.op == "Upsample":
        attrs |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    node = gs.Node(op="Resize", attrs=attrs)
    made = gs.exporters.onnx_exporter.OnnxExporter.export_node(node)
    by_scale = axis.scale is not None
    operand: Any = np.array([1, 1, 1, axis.scale], np.float32) if by_scale else np.array([1, 1, old, new], np.int64)
    start, end = axis.roi or (0.0, 1.0)
    roi = np.array([0, 0, 0, start, 1, 1, 1, end], np.float32)
    made.input.extend(["x", "r", "s"] if by_scale else ["x", "r", "", "s"])
    made.output.append("y")
    graph = onnx.helper.make_graph(
        [made],
        "resize",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 1, old, old])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 1, old, new])],
        [onnx.numpy_helper.from_array(operand, "s"), onnx.numpy_helper.from_array(roi, "r")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": np.eye(old, dtype=np.float32)[None, None]})
    result: ir.Array = np.ascontiguousarray(np.asarray(y)[0, 0])
    return result


def _by_sizes(b: Builder, x: ir.Tensor, axis: _Axis) -> ir.Tensor | None:
    """With neighbours that are computed from the sizes at run time."""
    mode = b.attr("mode", "nearest")
    if b.attr("antialias", 0) or b.attr("exclude_outside", 0) or axis.roi is not None:
        return None
    if isinstance(axis.new, int) and axis.new <= MOST_FLOATS:
        return None  # these positions would be taken for sizes
    old = b("Shape", b.node.inputs[0], start=axis.axis, end=axis.axis + 1)
    new = _new_size(b, axis, old)
    if new is None:
        return None
    last = b("Sub", b.cast(old, b.dtype, _INT64), 1.0)
    at = _source(b, axis, old, new)
    if at is None:
        return None
    return _gathered(b, x, axis.axis, _neighbours(b, mode, at, last))


def _new_size(b: Builder, axis: _Axis, old: ir.Tensor) -> ir.Tensor | None:
    """int64 ``[1]``."""
    if isinstance(axis.new, int):
        return b.tensor([axis.new])
    if axis.scale is not None:
        if float(axis.scale).is_integer():
            with b.numbers(_INT64):
                return b("Mul", old, int(axis.scale))
        return b.cast(b("Floor", b("Mul", b.cast(old, b.dtype, _INT64), axis.scale)), _INT64, b.dtype)
    sizes = b.input(3)
    if sizes is None:
        return None
    axes = [i % b.rank() for i in b.attr("axes", None) or range(b.rank())]
    place = axes.index(axis.axis)
    return b("Slice", sizes, [place], [place + 1], [0])


def _source(b: Builder, axis: _Axis, old: ir.Tensor, new: ir.Tensor) -> ir.Tensor | None:
    """Where each new element lies among the old ones, ``[new]``."""
    mode = b.attr("coordinate_transformation_mode", "asymmetric" if b.node.op == "Upsample" else "half_pixel")
    sizes = [b.cast(t, b.dtype, _INT64) for t in (old, new)]
    with b.numbers(_INT64):
        counted = b("Range", 0, b("Squeeze", new, [0]), 1)
    i = b.cast(counted, b.dtype, _INT64)
    ratio = b.tensor(1 / axis.scale) if axis.scale is not None else b("Div", sizes[0], sizes[1])
    centre = b("Sub", b("Mul", b("Add", i, 0.5), ratio), 0.5)
    if mode == "half_pixel":
        return centre
    if mode == "asymmetric":
        return b("Mul", i, ratio)
    if mode == "pytorch_half_pixel":
        return b("Where", b("Greater", sizes[1], 1.0), centre, 0.0)
    if mode == "align_corners":
        between = b("Max", b("Sub", sizes[1], 1.0), 1.0)
        return b("Mul", i, b("Div", b("Sub", sizes[0], 1.0), between))
    if mode == "half_pixel_symmetric":
        share = b("Div", b("Mul", sizes[1], ratio), sizes[0])
        return b("Add", centre, b("Mul", b("Mul", sizes[0], 0.5), b("Sub", b.tensor(1.0), share)))
    return None


def _neighbours(b: Builder, mode: str, at: ir.Tensor, last: ir.Tensor) -> list[_Tap]:
    def tap(place: ir.Tensor, weight: ir.Tensor | None) -> _Tap:
        return _Tap(b.cast(b("Min", b("Max", place, 0.0), last), _INT64, b.dtype), weight)

    if mode == "nearest":
        rounding = b.attr("nearest_mode", "floor" if b.node.op == "Upsample" else "round_prefer_floor")
        op, shift = {"floor": ("Floor", 0.0), "ceil": ("Ceil", 0.0)}.get(
            rounding, ("Floor", 0.5) if rounding == "round_prefer_ceil" else ("Ceil", -0.5)
        )
        return [tap(b(op, b("Add", at, shift) if shift else at), None)]
    at = b("Min", b("Max", at, 0.0), last) if mode == "linear" else at
    low = b("Floor", at)
    rest = b("Sub", at, low)
    if mode == "linear":
        return [tap(low, b("Sub", b.tensor(1.0), rest)), tap(b("Add", low, 1.0), rest)]
    return [
        tap(b("Add", low, float(step)), _cubic(b, rest, step, float(b.attr("cubic_coeff_a", -0.75))))
        for step in (-1, 0, 1, 2)
    ]


def _cubic(b: Builder, rest: ir.Tensor, step: int, a: float) -> ir.Tensor:
    """Keys' cubic convolution: the weight of the neighbour ``step`` behind the one before the place."""
    d = b("Abs", b("Sub", rest, float(step)))
    coefficients = (a + 2, -(a + 3), 0.0, 1.0) if step in (0, 1) else (a, -5 * a, 8 * a, -4 * a)
    total: ir.Tensor | float = coefficients[0]
    for c in coefficients[1:]:
        total = b("Add", b("Mul", d, total), c)
    return b.tensor(total)
