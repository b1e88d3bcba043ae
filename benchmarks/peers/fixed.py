"""A model with the sizes of given inputs, and what follows from them computed: what compilers that know no sizes need."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime

from . import Feeds


def fixed(model: Path, feeds: Feeds, folder: Path) -> onnx.ModelProto:
    """``model`` with inputs of the shapes of ``feeds``, constants folded by onnxruntime's basic optimisations."""
    loaded = onnx.load(model)
    for value in loaded.graph.input:
        dims = value.type.tensor_type.shape.dim
        for dim, size in zip(dims, feeds[value.name].shape, strict=True):
            dim.dim_value = size
    for output in loaded.graph.output:
        output.type.tensor_type.ClearField("shape")
    given, folded = folder / "fixed.onnx", folder / "folded.onnx"
    onnx.save(loaded, given)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folded)
    onnxruntime.InferenceSession(str(given), options, providers=["CPUExecutionProvider"])
    result = onnx.load(folded)
    given.unlink()
    folded.unlink()
    return result
