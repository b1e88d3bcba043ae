"""How many copies of a model's weights there are while it is optimized."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from onnx_graphsurgeon.ir.tensor import LazyValues
from rewriting import model, normal

from coda_edge import frontend
from coda_edge.accounting import outline
from coda_edge.driver import optimize
from coda_edge.targets.target import Target

_WIDTH = 1500
_BYTES = 2 * 4 * _WIDTH * _WIDTH


def _two_products() -> onnx.ModelProto:
    weights = {name: normal(_WIDTH, _WIDTH, seed=seed) for seed, name in enumerate(("w", "v"))}
    return model(
        f"g (float[N, {_WIDTH}] x) => (float[N, {_WIDTH}] y) {{ p = MatMul(x, w) r = Relu(p) y = MatMul(r, v) }}",
        weights,
    )


def test_there_are_never_more_than_the_graphs_weights_and_the_bundles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(_two_products(), path)
    monkeypatch.setattr(Target, "build", lambda *_: b"")
    optimize(path, verify=False)
    tracemalloc.start()
    optimized = optimize(path, verify=False)
    gc.collect()
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert optimized.bundle.constants.nbytes >= _BYTES
    assert 2 * _BYTES < held < 2.1 * _BYTES
    # What is packed counts twice here: the section that it is moved to is reserved whole, and filled one by one.
    assert peak < 3.3 * _BYTES


def test_a_graph_in_normal_form_keeps_nothing_of_its_model() -> None:
    loaded = frontend.load(_two_products())
    graph = frontend.normalize(loaded)
    constants = [t for t in graph.tensors().values() if isinstance(t, gs.Constant)]
    assert constants and not any(isinstance(t._values, LazyValues) for t in constants)
    assert isinstance(graph.import_domains, list)


def test_weights_come_back_as_they_were_and_stand_for_inputs_meanwhile() -> None:
    m = _two_products()
    loaded = frontend.load(m)
    assert [i.name for i in loaded.graph.input] == ["x"]
    assert {i.name: i.raw_data for i in loaded.graph.initializer} == {i.name: i.raw_data for i in m.graph.initializer}
    slim = frontend.without_weights(loaded)
    assert [i.name for i in slim.graph.input] == ["x", "w", "v"] and not slim.graph.initializer
    assert slim.ByteSize() < 1000 and len(loaded.graph.initializer) == 2


def test_an_outline_has_the_sizes_of_weights_and_zeros_for_them() -> None:
    graph = outline(frontend.load(_two_products()))
    w = graph.tensors()["w"]
    assert w.values.shape == (_WIDTH, _WIDTH) and w.values.dtype == np.float32 and not w.values.any()
    assert [n.op for n in graph.nodes] == ["MatMul", "Relu", "MatMul"]
