"""Inputs made up for a model: token ids within its tables, masks with padding, positions, normal floats.

``optimize`` verifies on them, and ``bench`` times on them when the user gives none. The bound of an integer input is
found by following it through the graph to the tables that it indexes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from .dtypes import is_float, numpy_dtype
from .errors import ShapeError
from .symbolic import Dim, evaluate, parse_dim

if TYPE_CHECKING:
    import onnx
    import onnx_graphsurgeon as gs

Padding = Literal["none", "left", "right", "holes"]
Feeds = dict[str, npt.NDArray[Any]]

# An id no table bounds: 0 and 1 are within anything.
_SAFE_BOUND = 2
_MASKED_SCORE = -1e4
_LARGE = 1024


@dataclass(frozen=True)
class InputSpec:
    """One input. ``bounds``: sizes of the axes that its values index, so that each value must be below all of them."""

    name: str
    dtype: str  # a numpy dtype name
    shape: tuple[Dim, ...]
    bounds: tuple[Dim, ...] = field(default=())


def input_specs(model: onnx.ModelProto) -> list[InputSpec]:
    """The inputs of ``model`` that a caller feeds (initializers excluded), with the bounds of its integer inputs."""
    from onnx import helper

    initialized = {i.name for i in model.graph.initializer}
    bounds = _index_bounds(model)
    specs = []
    for value in model.graph.input:
        if value.name in initialized:
            continue
        tensor = value.type.tensor_type
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
        shape = tuple(
            parse_dim(d.dim_value if d.HasField("dim_value") else d.dim_param or f"{value.name}_{axis}")
            for axis, d in enumerate(tensor.shape.dim)
        )
        specs.append(InputSpec(value.name, dtype, shape, tuple(bounds.get(value.name, ()))))
    return specs


def bound_specs(model: onnx.ModelProto, graph: gs.Graph) -> list[InputSpec]:
    """As ``input_specs``, with the sizes that the inputs have in ``graph``: pinned ones pinned, equal ones under one name."""
    from . import ir

    sizes = {t.name: ir.shape(t) for t in graph.inputs}
    return [replace(spec, shape=sizes.get(spec.name, spec.shape)) for spec in input_specs(model)]


def default_sizes(specs: Sequence[InputSpec], batch: int = 1, length: int = 128) -> dict[str, int]:
    """A value for every symbol: ``batch`` for those that lead an input (or say batch), ``length`` for all others.

    Where a model has inputs named for the *past* (a KV cache), a size that only masks have is the past's length plus
    the new tokens', as exporters of decoders mean it.
    """
    sizes: dict[str, int] = {}
    elsewhere: set[str] = set()
    for spec in specs:
        for axis, dim in enumerate(spec.shape):
            for s in () if isinstance(dim, int) else dim.free_symbols:
                leads = axis == 0 and len(spec.shape) > 1 and dim == s
                sizes.setdefault(s.name, batch if leads or "batch" in s.name.lower() else length)
                if leads or not _is_mask(spec):
                    elsewhere.add(s.name)
    if any("past" in spec.name.lower() for spec in specs):
        sizes |= {name: 2 * length for name in sizes if name not in elsewhere}
    return sizes


def bind_sizes(specs: Sequence[InputSpec], shapes: Mapping[str, Sequence[int | str]]) -> dict[str, int]:
    """The symbols' values that make each input of ``shapes`` have the numbers given there; names in a shape stay open.

    Raises ShapeError for an unknown input, another rank, or numbers that contradict the model or each other.
    """
    by_name = {spec.name: spec for spec in specs}
    sizes: dict[str, int] = {}
    for name, given in shapes.items():
        if name not in by_name:
            raise ShapeError(f"no input is called '{name}'; the inputs are {', '.join(by_name)}")
        dims = by_name[name].shape
        if len(dims) != len(given):
            raise ShapeError(f"input '{name}' has {len(dims)} dimensions, its shape was given with {len(given)}")
        for axis, (dim, number) in enumerate(zip(dims, given, strict=True)):
            if isinstance(number, str):
                continue
            if not isinstance(dim, int) and dim.is_Symbol:
                expected = sizes.setdefault(dim.name, number)
            else:
                known = isinstance(dim, int) or all(s.name in sizes for s in dim.free_symbols)
                expected = evaluate(dim, sizes) if known else number
            if expected != number:
                it_is = f"{dim}" if isinstance(dim, int) else f"{dim} = {expected}"
                raise ShapeError(f"input '{name}': dimension {axis} was given as {number}, but it is {it_is}")
    return sizes


def generate_inputs(
    model: onnx.ModelProto | Sequence[InputSpec],
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    padding: Padding = "none",
) -> Feeds:
    """One array for each input of ``model``, the same for the same arguments.

    Integer inputs are random ids below the bound of the tables they index; those whose name says *mask* are 1 for real
    and 0 for padded positions of the last axis; those that say *position* count up along it; floats are standard
    normal. ``sizes`` gives the symbols' values, ``default_sizes`` those it leaves out. ``padding``: where rows are
    padded, *holes* meaning anywhere; at least one position of each row stays real.

    Raises ShapeError if a dtype is neither numeric nor bool.
    """
    specs = list(model) if isinstance(model, Sequence) else input_specs(model)
    values = {**default_sizes(specs), **(sizes or {})}
    rng = np.random.default_rng(seed)
    shapes = {s.name: tuple(evaluate(d, values) for d in s.shape) for s in specs}
    longest = max((shapes[s.name][-1] for s in specs if _is_mask(s) and shapes[s.name]), default=0)
    masks: dict[tuple[int, int], npt.NDArray[np.bool_]] = {}
    feeds: Feeds = {}
    for spec in specs:
        shape = shapes[spec.name]
        if _is_mask(spec) and shape:
            key = (shape[0] if len(shape) > 1 else 1, shape[-1])
            if key not in masks:
                masks[key] = _real_positions(*key, padding, rng)
            feeds[spec.name] = _mask(spec.dtype, shape, masks[key])
        else:
            feeds[spec.name] = np.asarray(_values(spec, shape, values, longest, rng))
    return feeds


def _is_mask(spec: InputSpec) -> bool:
    return "mask" in spec.name.lower()


def _real_positions(rows: int, length: int, padding: Padding, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Bool ``[rows, length]``, true where a position is real; every row keeps one, and one row at least is padded."""
    real = np.ones((rows, length), np.bool_)
    if padding == "none" or length < 2:
        return real
    for row in range(rows):
        count = int(rng.integers(1 if row == rows - 1 else 0, length))
        where = {
            "left": np.arange(count),
            "right": np.arange(length - count, length),
            "holes": rng.permutation(length)[:count],
        }[padding]
        real[row, where] = False
    return real


def _mask(dtype: str, shape: tuple[int, ...], real: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """``real`` over the last axis of ``shape``: 1 and 0, or for floats of rank ≥ 3, which are added to scores, 0 and -1e4."""
    keep = real.reshape(shape[:1] + (1,) * (len(shape) - 2) + shape[-1:]) if len(shape) > 1 else real[0]
    if is_float(dtype) and len(shape) > 2:
        keep = np.where(keep, 0.0, _MASKED_SCORE)
    return np.ascontiguousarray(np.broadcast_to(keep, shape).astype(numpy_dtype(dtype)))


def _values(
    spec: InputSpec, shape: tuple[int, ...], sizes: Mapping[str, int], longest: int, rng: np.random.Generator
) -> npt.NDArray[Any]:
    if is_float(spec.dtype):
        return rng.standard_normal(shape, np.float32).astype(numpy_dtype(spec.dtype))
    kind = np.dtype(spec.dtype).kind
    if kind == "b":
        return rng.random(shape) < 0.5
    if kind not in "iu":
        raise ShapeError(
            f"input '{spec.name}' is of type {spec.dtype}: values can only be made up for numbers and bool"
        )
    known = [b for b in spec.bounds if isinstance(b, int) or all(s.name in sizes for s in b.free_symbols)]
    bound = min((evaluate(b, sizes) for b in known), default=None)
    if "position" in spec.name.lower() and shape:
        # After a past, positions go on from its end, which the mask's length tells.
        start = max(longest - shape[-1], 0)
        positions = np.broadcast_to(np.arange(start, start + shape[-1]), shape)
        return (positions if bound is None else positions % max(bound, 1)).astype(spec.dtype)
    top = _SAFE_BOUND if bound is None else max(min(bound, int(np.iinfo(spec.dtype).max)), 1)
    return rng.integers(0, top, shape).astype(spec.dtype)


# Operators whose output holds values of their first input (Where: of the last two), in another arrangement.
_CARRIES = {
    **dict.fromkeys(
        ("Cast", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Expand", "Transpose", "Tile"), (0,)
    ),
    "Split": (0,),
    "Where": (1, 2),
    "Concat": (0, 1),
}


def _index_bounds(model: onnx.ModelProto) -> dict[str, list[Dim]]:
    """For each graph input, the sizes of the axes that its values index by Gather."""
    shapes, nodes = _shapes_without_weights(model)
    origins: dict[str, set[str]] = {i.name: {i.name} for i in model.graph.input}
    bounds: dict[str, list[Dim]] = {}
    for node in nodes:
        for position in _CARRIES.get(node.op_type, ()):
            if position < len(node.input):
                for output in node.output:
                    origins.setdefault(output, set()).update(origins.get(node.input[position], ()))
        if node.op_type == "Gather" and node.input[0] in shapes:
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            for origin in origins.get(node.input[1], ()):
                bounds.setdefault(origin, []).append(shapes[node.input[0]][axis])
    return bounds


def _shapes_without_weights(model: onnx.ModelProto) -> tuple[dict[str, tuple[Dim, ...]], list[onnx.NodeProto]]:
    """Every known shape, and the nodes with local functions inlined.

    Weights become inputs first: shape inference copies the model, and only small constants matter to it.
    """
    import onnx
    from onnx import helper, inliner, shape_inference

    graph = model.graph
    large = [i for i in graph.initializer if int(np.prod(i.dims)) > _LARGE]
    weights = [helper.make_tensor_value_info(i.name, i.data_type, list(i.dims)) for i in large]
    names = {i.name for i in large}
    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    light.graph.name = graph.name or "graph"
    light.graph.node.extend(graph.node)
    light.graph.input.extend([i for i in graph.input if i.name not in names] + weights)
    light.graph.output.extend(graph.output)
    light.graph.value_info.extend(graph.value_info)
    light.graph.initializer.extend(i for i in graph.initializer if i.name not in names)
    if light.functions:
        light = inliner.inline_local_functions(light)
    inferred = shape_inference.infer_shapes(light, data_prop=True).graph
    shapes: dict[str, tuple[Dim, ...]] = {i.name: tuple(i.dims) for i in graph.initializer}
    for value in (*inferred.input, *inferred.value_info):
        dims = value.type.tensor_type.shape.dim
        if value.type.tensor_type.HasField("shape"):
            shapes[value.name] = tuple(
                parse_dim(d.dim_value if d.HasField("dim_value") else d.dim_param or f"{value.name}_{axis}")
                for axis, d in enumerate(dims)
            )
    return shapes, list(inferred.node)
