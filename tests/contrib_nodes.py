"""Models of one node of onnxruntime's own domain, and whether what the frontend makes of it gives what onnxruntime computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from graphs import run, to_model
from onnx import helper, numpy_helper

from coda_edge.frontend import load, normalize

Array = npt.NDArray[Any]


def normal(*shape: int, seed: int = 0) -> Array:
    """Normal float32 numbers from a seed."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def contrib_node(
    op: str,
    inputs: Sequence[Any],
    outputs: Sequence[str] = ("y",),
    attrs: Mapping[str, Any] | None = None,
    constants: Sequence[int] = (),
    dims: Mapping[int, Sequence[int | str]] | None = None,
    types: Sequence[Any] = (),
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A model of one ``com.microsoft`` node and its feeds.

    ``inputs`` in order, None for one left out; those in ``constants`` become initializers, the others have the symbolic ``dims`` if
    given. ``types``: dtypes of the outputs, float32 otherwise.
    """
    arrays = [None if x is None else np.asarray(x) for x in inputs]
    names = ["" if x is None else f"x{i}" for i, x in enumerate(arrays)]
    given = [(i, n, x) for i, (n, x) in enumerate(zip(names, arrays, strict=True)) if x is not None]
    tensors = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), (dims or {}).get(i, x.shape))
        for i, n, x in given
        if i not in constants
    ]
    kinds = [np.dtype(t) for t in types] + [np.dtype(np.float32)] * (len(outputs) - len(types))
    results = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(t), None)
        for n, t in zip(outputs, kinds, strict=True)
        if n
    ]
    graph = helper.make_graph(
        [helper.make_node(op, names, outputs, domain="com.microsoft", **(attrs or {}))],
        op,
        tensors,
        results,
        [numpy_helper.from_array(x, n) for i, n, x in given if i in constants],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return model, {n: x for i, n, x in given if i not in constants}


def both(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> tuple[list[Array], list[Array]]:
    """What onnxruntime computes for ``model``, and for its normal form, which has ONNX's own operators and windows only."""
    made = to_model(normalize(load(model)))
    assert all(n.domain == "" or (n.domain == "coda" and n.op_type.startswith("Window")) for n in made.graph.node)
    return run(model, feeds), run(made, feeds)
