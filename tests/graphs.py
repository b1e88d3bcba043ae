"""Graphs to test on: real exports as small fixtures, and single-operator models.

A fixture is an exported model without its weights: each large initializer keeps its mean and deviation and is refilled
with normal numbers when the fixture is loaded, the same ones every time. Small and integer constants are verbatim.
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
from onnx import helper, numpy_helper

from coda_edge import export, ir
from coda_edge.inputs import Feeds, Padding, generate_inputs, input_specs

FIXTURES = Path(__file__).parent / "fixtures"
_LARGE = 64
# Deviation of initializers that are one number throughout (biases, gains): so that they count in a test.
_JITTER = 0.1


def fixture_names(prefix: str = "") -> list[str]:
    """The names of all fixtures that begin with ``prefix``."""
    return sorted(p.name.removesuffix(".onnx.xz") for p in FIXTURES.glob(f"{prefix}*.onnx.xz"))


def pack_fixture(model: onnx.ModelProto) -> bytes:
    """``model`` as the content of a fixture file."""
    small = onnx.ModelProto()
    small.CopyFrom(model)
    del small.metadata_props[:], small.graph.metadata_props[:], small.graph.value_info[:]
    small.doc_string = small.graph.doc_string = ""
    for node in small.graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
    for value in (*small.graph.input, *small.graph.output):
        del value.metadata_props[:]
    for tensor in small.graph.initializer:
        del tensor.metadata_props[:]
        array = numpy_helper.to_array(tensor)
        if array.dtype != np.float32 or array.size <= _LARGE or not np.isfinite(array).all():
            continue
        deviation = float(array.std()) or _JITTER
        name, dims = tensor.name, list(array.shape)
        tensor.Clear()
        tensor.name, tensor.data_type = name, onnx.TensorProto.FLOAT
        tensor.dims.extend(dims)
        tensor.doc_string = f"{float(array.mean())!r} {deviation!r}"
    return lzma.compress(small.SerializeToString(deterministic=True), preset=9 | lzma.PRESET_EXTREME)


def load_fixture(name: str) -> onnx.ModelProto:
    """The fixture ``name`` with weights; the caller may change it."""
    model = onnx.ModelProto()
    model.CopyFrom(_filled(name))
    return model


@cache
def _filled(name: str) -> onnx.ModelProto:
    model = onnx.load_model_from_string(lzma.decompress((FIXTURES / f"{name}.onnx.xz").read_bytes()))
    for tensor in model.graph.initializer:
        if not tensor.doc_string:
            continue
        mean, deviation = map(float, tensor.doc_string.split())
        rng = np.random.default_rng(zlib.crc32(tensor.name.encode()))
        array = mean + deviation * rng.standard_normal(tuple(tensor.dims), np.float32)
        tensor.CopyFrom(numpy_helper.from_array(array.astype(np.float32), tensor.name))
    return model


def random_inputs(model: onnx.ModelProto, sizes: Mapping[str, int], seed: int = 0, padding: Padding = "none") -> Feeds:
    """Valid feeds for ``model``: ids within its tables, masks of 0 and 1 with ``padding``, normal floats."""
    return generate_inputs(input_specs(model), sizes, seed, padding)


def sizes_for(model: onnx.ModelProto, batch: int, length: int, past: int = 0) -> dict[str, int]:
    """A value for every symbol of a normalised model's inputs.

    The first axis is the batch, another axis of an input named for the past is ``past`` long, any other ``length``.
    """
    sizes: dict[str, int] = {}
    for spec in input_specs(model):
        for axis, dim in enumerate(spec.shape):
            if not isinstance(dim, int) and dim.is_Symbol:
                other = past if spec.name.startswith("past") else length
                sizes.setdefault(dim.name, batch if axis == 0 else other)
    return sizes


def run(model: onnx.ModelProto, feeds: Feeds) -> list[npt.NDArray[Any]]:
    """The outputs of ``model`` by onnxruntime, one thread, without its optimiser."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def to_model(graph: gs.Graph) -> onnx.ModelProto:
    """A graph as an ONNX model: as it stands, or if it has coda nodes with their functions."""
    if any(node.domain == ir.DOMAIN for node in graph.nodes):
        return export.to_model(graph)
    model = gs.export_onnx(graph)
    model.ir_version = helper.find_min_ir_version_for(model.opset_import, ignore_unknown=True)
    return model


def one_node(
    op: str,
    inputs: Mapping[str, npt.NDArray[Any]],
    outputs: int = 1,
    opset: int = 18,
    constants: Sequence[str] = (),
    dims: Mapping[str, Sequence[int | str]] | None = None,
    **attrs: Any,
) -> onnx.ModelProto:
    """A model of one node that reads ``inputs`` in order (None: left out), those in ``constants`` as initializers.

    ``dims`` gives inputs symbolic dimensions; otherwise they have those of the arrays.
    """
    names = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, [n if not n.startswith("_") else "" for n in inputs], names, **attrs)
    given = {n: v for n, v in inputs.items() if not n.startswith("_")}
    values = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), (dims or {}).get(n, v.shape))
        for n, v in given.items()
        if n not in constants
    ]
    graph = helper.make_graph(
        [node],
        op,
        values,
        [helper.make_empty_tensor_value_info(n) for n in names],
        [numpy_helper.from_array(given[n], n) for n in constants],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = helper.find_min_ir_version_for(model.opset_import, ignore_unknown=True)
    model = onnx.shape_inference.infer_shapes(model)
    for output in model.graph.output:
        if not output.type.tensor_type.HasField("shape"):
            # Where onnx infers nothing, the output has the dtype and rank of the first input.
            like = values[0].type.tensor_type
            unknown = [None] * len(like.shape.dim)
            output.CopyFrom(helper.make_tensor_value_info(output.name, like.elem_type, unknown))
    return model


def worst_error(expected: Sequence[npt.NDArray[Any]], got: Sequence[npt.NDArray[Any]]) -> float:
    """The largest difference of any output, relative to that output's largest value; NaNs must be in the same places."""
    worst = 0.0
    for a, b in zip(expected, got, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{a.dtype}{a.shape} became {b.dtype}{b.shape}"
        if a.dtype.kind != "f":
            np.testing.assert_array_equal(a, b)
            continue
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_array_equal(np.isinf(a), np.isinf(b))
        finite = np.isfinite(a)
        scale = np.abs(a, where=finite, out=np.zeros_like(a)).max(initial=0) or 1.0
        worst = max(worst, float(np.abs(a[finite] - b[finite]).max(initial=0) / scale))
    return worst


def node_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[tuple[str, int, Sequence[int | str]]],
    outputs: Sequence[tuple[str, int, Sequence[int | str]]],
    constants: Mapping[str, np.ndarray] | None = None,
) -> onnx.ModelProto:
    """A model of opset 20 of ``nodes``; an input or output is its name, type and shape, a constant its array by name."""
    tensors = [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    infos = ([helper.make_tensor_value_info(*value) for value in side] for side in (inputs, outputs))
    return helper.make_model(
        helper.make_graph(list(nodes), "g", *infos, tensors), opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    )
