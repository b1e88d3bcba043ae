"""Random graphs, whatever passes make of them and whichever of their tensors are returned, give what float64 gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from coda_edge.passes import run_pipeline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_graph import INPUTS, Graph
from rewriting import Array, normal, run

import coda_edge
from coda_edge import export, frontend
from coda_edge.bundle import to_bytes

_SETTINGS = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
_SIZES = ((2, 3), (1, 1), (3, 17))


def _feeds(batch: int, length: int) -> dict[str, Array]:
    sizes = {"B": batch, "S": length}
    return {n: normal(*(sizes.get(str(d), d) for d in dims)) for n, dims in INPUTS.items()}


def _grown(data: st.DataObject, operations: int) -> Graph:
    graph = Graph(data.draw)
    while len(graph.steps) < operations:
        graph.grow()
    return graph


def _assert_close(found: Sequence[Array], expected: Sequence[Array]) -> None:
    for ours, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-4 * np.abs(reference).max(initial=1.0))


@given(data=st.data(), operations=st.integers(1, 24))
@settings(_SETTINGS, max_examples=60)
def test_rewritten_graphs(data: st.DataObject, operations: int) -> None:
    graph = _grown(data, operations)
    outputs = graph.returned()
    rewritten = frontend.normalize(frontend.load(graph.model(outputs)), None)
    run_pipeline(rewritten)
    frontend.infer(rewritten)
    model = export.to_model(rewritten)
    for sizes in _SIZES:
        feeds = _feeds(*sizes)
        _assert_close(run(model, feeds), graph.evaluate(feeds, outputs))


@given(data=st.data(), operations=st.integers(4, 20))
@settings(_SETTINGS, max_examples=8)
def test_built_kernels(data: st.DataObject, operations: int) -> None:
    graph = _grown(data, operations)
    outputs = graph.returned()
    optimized = coda_edge.optimize(graph.model(outputs), verify=False)
    with coda_edge.Session(to_bytes(optimized.bundle), threads=2) as session:
        for sizes in _SIZES:
            feeds = _feeds(*sizes)
            _assert_close(session.run(None, feeds), graph.evaluate(feeds, outputs))
