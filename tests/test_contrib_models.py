"""Models that onnxruntime has optimised already come out as the originals do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
import onnxruntime
import pytest
from coda_edge.passes import run_pipeline
from contrib_nodes import normal
from graphs import load_fixture, one_node, random_inputs, run, sizes_for, worst_error

from coda_edge import export
from coda_edge.errors import UnsupportedOperator
from coda_edge.frontend import load, normalize

BATCH, LENGTH = 3, 7


def _saved(model: onnx.ModelProto, level: onnxruntime.GraphOptimizationLevel, path: Path) -> onnx.ModelProto:
    """``model`` as onnxruntime's session optimises it."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(path)


def _fused(model: onnx.ModelProto) -> gs.Graph:
    graph = normalize(load(model))
    run_pipeline(graph, lambda done: None)
    return graph


def _ops(graph: gs.Graph) -> Counter[str]:
    return Counter(n.op for n in graph.nodes)


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("bert.eager.ts17", onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL),
        ("gpt2.sdpa.dyn20", onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED),
        ("llama.sdpa.ts17", onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED),
    ],
)
def test_as_a_session_saves_it(name: str, level: onnxruntime.GraphOptimizationLevel, tmp_path: Path) -> None:
    original = load_fixture(name)
    optimised = _saved(original, level, tmp_path / "optimised.onnx")
    assert any(n.domain == "com.microsoft" for n in optimised.graph.node)
    graph = _fused(optimised)
    assert _ops(graph) == _ops(_fused(original))
    feeds = random_inputs(optimised, sizes_for(load(original), BATCH, LENGTH), padding="left")
    assert worst_error(run(optimised, feeds), run(export.to_model(graph), feeds)) <= 1e-5


def test_as_the_transformer_optimiser_saves_it(tmp_path: Path) -> None:
    """Its Attention, EmbedLayerNormalization and SkipLayerNormalization, and the lengths that they make of the mask."""
    optimizer = pytest.importorskip("onnxruntime.transformers.optimizer")
    source, target = tmp_path / "model.onnx", tmp_path / "optimised.onnx"
    original = load_fixture("bert.eager.ts17")
    onnx.save(original, source)
    optimizer.optimize_model(str(source), "bert", num_heads=4, hidden_size=64, opt_level=0).save_model_to_file(target)
    optimised = onnx.load(target)
    counts = Counter(n.op_type for n in optimised.graph.node)
    assert counts["Attention"] == 2 and counts["EmbedLayerNormalization"] == 1
    graph = _fused(optimised)
    assert (_ops(graph)["Attention"], _ops(graph)["Gemm"]) == (2, 8)
    sizes = sizes_for(load(optimised), BATCH, LENGTH)
    feeds = random_inputs(optimised, sizes, padding="right")
    assert worst_error(run(optimised, feeds), run(export.to_model(graph), feeds)) <= 1e-5


def test_layouts_of_one_machine_are_refused(tmp_path: Path) -> None:
    model = one_node("Conv", {"x": normal(1, 8, 9, 9), "w": normal(8, 8, 3, 3)}, constants=("w",), pads=[1, 1, 1, 1])
    optimised = _saved(model, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL, tmp_path / "optimised.onnx")
    if all(n.domain != "com.microsoft.nchwc" for n in optimised.graph.node):
        pytest.skip("onnxruntime keeps the layout on this CPU")
    with pytest.raises(UnsupportedOperator, match=r"nchwc.*basic or extended"):
        normalize(load(optimised))
