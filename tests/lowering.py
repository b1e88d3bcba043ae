"""Lowers a small ONNX model and runs its kernels through ctypes, step by step, as the runtime does."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
from onnx import helper

from coda_edge.bundle.plan import BufferKind
from coda_edge.lower import Lowered, lower
from coda_edge.symbolic import parse_dim
from coda_edge.targets import Target, get

Array = npt.NDArray[Any]


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[Any, Sequence[int | str]]],
    outputs: Sequence[str],
    constants: Mapping[str, Array] | None = None,
    opset: int = 20,
) -> onnx.ModelProto:
    """A model of basic operators. ``inputs``: dtype and shape by name."""
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(np.dtype(d)), s)
        for n, (d, s) in inputs.items()
    ]
    results = [helper.make_empty_tensor_value_info(o) for o in outputs]
    initializers = [onnx.numpy_helper.from_array(v, n) for n, v in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "test", infos, results, initializers)
    return onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    )


class Compiled:
    """A lowered graph with its kernels loaded."""

    def __init__(self, graph: gs.Graph, target: Target | None = None) -> None:
        target = target or get()
        self.lowered: Lowered = lower(graph, target)
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name, "kernels.so")
        path.write_bytes(target.build(self.lowered.kernels))
        self._library = ctypes.CDLL(str(path))

    def run(self, feeds: Mapping[str, Array], chunk: int = 3) -> dict[str, Array]:
        """The outputs by name; the items of a step are done in chunks of ``chunk``. Raises IndexError if a kernel fails."""
        plan = self.lowered.plan
        sizes: dict[str, int] = {}
        for info in plan.inputs:
            for axis, entry in enumerate(info.dims):
                e = plan.exprs.entries[entry]
                if e.op.name == "SYMBOL":
                    sizes.setdefault(plan.exprs.symbols[e.a], feeds[info.name].shape[axis])
        values = plan.exprs.evaluate(sizes)
        inputs = [np.ascontiguousarray(feeds[i.name]) for i in plan.inputs]
        outputs = [np.empty([values[d] for d in i.dims], i.dtype) for i in plan.outputs]
        memory: list[Array] = []
        for b in plan.buffers:
            if b.kind == BufferKind.INPUT:
                memory.append(inputs[b.index])
            elif b.kind == BufferKind.OUTPUT:
                memory.append(outputs[b.index])
            elif b.kind == BufferKind.CONSTANT:
                memory.append(self.lowered.constants[b.index : b.index + values[b.size]])
            else:
                memory.append(np.full(values[b.size], 0xAB, np.uint8))
            assert memory[-1].nbytes == values[b.size]
        for step in plan.steps:
            scratch = np.full(values[step.scratch] + 64, 0xCD, np.uint8)
            addresses = [memory[b].ctypes.data for b in step.buffers] + [scratch.ctypes.data]
            ints, items = [values[i] for i in step.ints], values[step.items]
            ranges = [(i, min(i + chunk, items)) for i in range(0, items, chunk)]
            for begin, end in ranges:
                self._call(plan.kernels[step.kernel], addresses, [*ints, begin, end], step.source)
            if step.finish >= 0 and items:
                self._call(plan.kernels[step.finish], addresses, [*ints, 0, items], step.source)
        return {i.name: o for i, o in zip(plan.outputs, outputs, strict=True)}

    def _call(self, symbol: str, addresses: list[int], ints: list[int], source: str) -> None:
        buffers = (ctypes.c_uint64 * len(addresses))(*addresses)
        sizes = (ctypes.c_int64 * len(ints))(*ints)
        code = getattr(self._library, symbol)(buffers, sizes)
        if code:
            raise IndexError(f"kernel of {source} returned {code}")


def compile_model(proto: onnx.ModelProto, target: Target | None = None) -> Compiled:
    """Lowers ``proto`` as it stands, with no pass and no normalisation."""
    graph = gs.import_onnx(proto)
    for t in graph.inputs:
        t.shape = [d if isinstance(d, int) else str(parse_dim(d)) for d in t.shape]
    return Compiled(graph, target)


def reference(proto: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """What onnxruntime gives."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def assert_same(found: Array, expected: Array, tolerance: float = 2e-6) -> None:
    """Equal dtypes and shapes; integers and bools exactly, floats to ``tolerance`` of the largest finite magnitude."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if found.dtype.kind != "f":
        np.testing.assert_array_equal(found, expected)
        return
    finite = np.abs(expected[np.isfinite(expected)])
    scale = float(finite.max()) if finite.size else 1.0
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * max(scale, 1e-30))
