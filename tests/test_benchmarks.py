"""The benchmarks' own parts: what stands in their tables, packing to 4 bits, and peers that fail."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks import measure, networks, prepare, table, trial
from benchmarks.measure import Engine, Kernel, Measured, level
from benchmarks.peers import Call, Feeds, peers
from benchmarks.roofs import Roofs, fma_peak
from coda_edge.verify import ort_session

_KERNELS = (
    Kernel("layer.0.gemm", "k0", "", 3e6, 2.5e6, 400_000_000, 2_000_000),
    Kernel("layer.0.attention", "k1", "", 1e6, 1e6, 20_000_000, 1_000_000),
    Kernel("layer.1.gemm", "k0", "", 2e6, 1.9e6, 400_000_000, 2_000_000),
)


def _measured(*others: Engine, threads: int = 1) -> Measured:
    ours = Engine("coda-edge", ms=8.2, best_ms=8.0, ratio=1.0, error=1e-6)
    return Measured("M", threads, 5, Roofs(threads, 1.25e11, 1.25e10, 1e11), [ours, *others], _KERNELS)


def test_shares_of_the_roofs_follow_from_the_whole_run() -> None:
    m = _measured()
    assert (m.flops, m.bytes) == (820_000_000, 5_000_000)
    assert m.of_peak == pytest.approx(0.8)
    assert m.best_of_peak == pytest.approx(0.82)
    assert m.of_memory == pytest.approx(5e6 / 8.2e-3 / 1.25e10)


def test_the_best_engine_is_one_that_answers_right() -> None:
    quick = Engine("mnn", ms=4.0, ratio=0.5, error=1.2)
    slow = Engine("openvino", ms=9.0, ratio=1.1, error=1e-6)
    gone = Engine("iree", reason="the package iree is not installed")
    m = _measured(quick, Engine("onnxruntime", ms=10.0, ratio=1.2, error=1e-6), slow, gone)
    best = m.best()
    assert best is not None and best.name == "openvino"
    only = m.best(("onnxruntime", "mnn"))
    assert only is not None and only.name == "onnxruntime"
    assert m.best(("iree",)) is None


def test_kernels_alike_are_one_group_and_the_longest_comes_first() -> None:
    assert table.groups(_KERNELS) == [
        table.Group("layer.0.gemm", 2, 5e6, 3.8e6, 800_000_000, 4_000_000),
        table.Group("layer.0.attention", 1, 1e6, 1e6, 20_000_000, 1_000_000),
    ]
    maps = [Kernel("map", "map_0a", "a.Mul, a.Add", 1e3, 1e3, 10, 40), Kernel("map", "map_1b", "", 1e2, 1e2, 10, 40)]
    assert [g.name for g in table.groups(maps)] == ["map a.Add", "map"]


def test_the_table_in_markdown_holds_ratios_bars_and_reasons() -> None:
    others = (Engine("onnxruntime", ms=10.0, ratio=1.22, error=1e-6), Engine("mnn", ms=4.0, ratio=0.5, error=1.2))
    lines = table.markdown({"minilm_128": [_measured(*others, Engine("iree", reason="it hangs"))]}).splitlines()
    assert lines[0].startswith("| model | threads | ours, ms | onnxruntime, × | mnn, × | iree, × | wanted, × |")
    assert lines[2] == "| M | 1 | 8.20 | 1.22 | (0.50) | – | 1.10 ✓ | 1e-06 | 80% (82%) | 5% |"
    assert lines[4:] == ["- M, mnn: its answer is wrong by 1 of the largest value", "- M, iree: it hangs"]
    assert "1.10 ✗" in table.markdown({"minilm_128": [_measured(Engine("mnn", ms=9, ratio=1.09, error=0.0))]})


def test_results_are_plain_values() -> None:
    stored = json.loads(json.dumps(_measured(Engine("tvm", ms=1.0, ratio=2.0, error=0.0)).to_json()))
    assert stored["roofs"] == {"threads": 1, "flops": 1.25e11, "memory": 1.25e10, "cache": 1e11}
    assert [e["name"] for e in stored["engines"]] == ["coda-edge", "tvm"]
    assert stored["kernels"][1]["flops"] == 20_000_000


def test_a_small_model_is_measured_in_turn_and_compared(tmp_path: Path) -> None:
    import coda_edge

    model, feeds = _product(tmp_path), {"x": np.linspace(-1, 1, 3 * 16, dtype=np.float32).reshape(3, 16)}
    bundle = tmp_path / "model.coda"
    coda_edge.optimize(model, verify=False).save(bundle)
    known = peers()
    expected = measure.reference(model, feeds)
    m = measure.measure(
        "product",
        bundle,
        model,
        feeds,
        expected,
        {"onnxruntime": (known["onnxruntime"], tmp_path)},
        {"mnn": "not here"},
        threads=1,
        seconds=0.0,
        rounds=1,
    )
    assert [(e.name, e.reason) for e in m.engines] == [("coda-edge", ""), ("onnxruntime", ""), ("mnn", "not here")]
    assert all(e.error < 1e-6 and e.best_ms <= e.ms for e in m.engines[:2])
    assert m.flops >= 2 * 3 * 16 * 8
    assert all(0 < k.best_ns <= k.ns for k in m.kernels)
    assert m.roofs.threads == 1 and min(m.roofs.flops, m.roofs.memory, m.roofs.cache) > 1e8


def test_four_bits_are_what_onnxruntime_takes_them_for(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((5, 64), np.float32)
    weight[2, 32:] = 0
    packed, scales = networks.blocks_of_4_bits(weight, 32)
    assert packed.shape == (5, 2, 16) and scales.shape == (10,)
    node = helper.make_node(
        "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", K=64, N=5, bits=4, block_size=32
    )
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [64, 5])],
        [numpy_helper.from_array(packed, "w"), numpy_helper.from_array(scales, "s")],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = ort_session(model.SerializeToString(), 1)
    (found,) = session.run(None, {"x": np.eye(64, dtype=np.float32)})
    # Half a step, but where the largest number of a block is clipped from 8 steps to 7.
    step = np.repeat(np.abs(scales.reshape(5, 2)), 32, axis=1)
    assert (np.abs(found.T - weight) <= step + 1e-6).all()
    assert np.mean(np.abs(found.T - weight) <= step / 2 + 1e-6) > 0.9
    assert (found.T[2, 32:] == 0).all()


def test_random_weights_are_the_same_each_time_and_keep_activations_in_size() -> None:
    shapes = {"norm.weight": (64,), "norm.bias": (64,), "dense.weight": (64, 256)}
    first, second = networks.Random(shapes), networks.Random(shapes)
    assert list(first) == list(shapes) and len(first) == 3
    assert all(np.array_equal(first[n], second[n]) for n in shapes)
    assert abs(first["norm.weight"].mean() - 1) < 0.01 and abs(first["norm.bias"].mean()) < 0.01
    assert np.linalg.norm(first["dense.weight"], axis=1) == pytest.approx(np.ones(64), abs=0.2)


class _Broken:
    name = "broken"

    def __init__(self, missing: str) -> None:
        self.missing = missing

    def available(self) -> str:
        return self.missing

    def prepare(self, model: Path, feeds: Feeds, folder: Path) -> None:
        raise AssertionError("another process does it")

    def load(self, model: Path, feeds: Feeds, folder: Path, threads: int) -> Call:
        raise AssertionError("another process does it")


def test_a_peer_that_is_absent_is_not_tried(tmp_path: Path) -> None:
    assert trial.tried(_Broken("it is not here"), tmp_path / "m.onnx", {}, tmp_path / "p") == "it is not here"
    # The verdict is kept.
    assert trial.tried(_Broken("changed"), tmp_path / "m.onnx", {}, tmp_path / "p") == "it is not here"


def test_what_a_peer_says_in_its_process_is_the_reason(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    reason = trial.tried(peers()["onnxruntime"], tmp_path / "bad.onnx", {}, tmp_path / "bad")
    assert reason.startswith("InvalidModel: onnxruntime does not load the model")
    feeds = {"x": np.ones((3, 16), np.float32)}
    assert trial.tried(peers()["onnxruntime"], _product(tmp_path), feeds, tmp_path / "good") == ""


def test_a_model_that_is_not_built_costs_a_line(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    arguments = [str(tmp_path / "bad.onnx"), "--prepare", f"--work={tmp_path}", "--peers=onnxruntime"]
    ((name, reason),) = prepare.prepare_apart({"bad": arguments})
    assert name == "bad" and "bad.onnx" in reason


def test_the_peak_is_that_of_a_machine() -> None:
    assert 1e8 < fma_peak(1, tries=1) < 1e13


def test_the_peak_is_measured_with_what_the_kernels_may_use() -> None:
    assert [level(f"x86-64-{name}") for name in ("v2", "v3-vnni", "v4-vnni")] == ["x86-64-v2", "x86-64-v3", "x86-64-v4"]
    assert level("arm64-linux") == "native"


def test_a_roofline_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.roofline import draw

    draw(_measured(Engine("mnn", ms=9, ratio=1.1, error=0.0), Engine("tvm", reason="no")), tmp_path / "m.1")
    assert (tmp_path / "m.1.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "m.1.svg").read_text()
    assert text.lstrip().startswith("<?xml") and "</svg>" in text


def _product(folder: Path) -> Path:
    weight = np.random.default_rng(0).standard_normal((16, 8), np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 8])],
        [numpy_helper.from_array(weight, "w")],
    )
    path = folder / "product.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path
