"""A pass that breaks a graph, or changes what it computes, is named; what stands on its own has its reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import coda_edge.passes as passes
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from click.testing import CliRunner
from coda_edge.passes import Pass, PassLog, run_pipeline
from coda_edge.passes.check import check
from graphs import load_fixture, random_inputs, run, sizes_for, worst_error
from onnx.reference import ReferenceEvaluator
from rewriting import model, normal

from coda_edge import export, frontend, ir
from coda_edge.cli import main
from coda_edge.errors import VerificationError
from coda_edge.why import unfused


def _model() -> onnx.ModelProto:
    return model(
        "g (float[B, 6] x) => (float[B, 4] y) { n = LayerNormalization (x, g1) h = MatMul(n, w) y = Tanh(h) }",
        {"g1": normal(6, seed=1), "w": normal(6, 4, seed=2)},
    )


def _graph() -> gs.Graph:
    graph = frontend.normalize(frontend.load(_model()))
    run_pipeline(graph)
    frontend.infer(graph)
    return graph


def _unlink(graph: gs.Graph) -> None:
    next(n for n in graph.nodes if n.op == "RowMoments").outputs.clear()


def _tie(graph: gs.Graph) -> None:
    gemm = next(n for n in graph.nodes if n.op == "Gemm")
    gemm.inputs[0] = gemm.outputs[0]


def _drop_operand(graph: gs.Graph) -> None:
    next(n for n in graph.nodes if n.op == "Gemm").inputs.pop()


def _forget_shape(graph: gs.Graph) -> None:
    next(n for n in graph.nodes if n.op == "RowMoments").outputs[0].shape = None


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (_unlink, "which nothing computes"),
        (_tie, "depends on its own result"),
        (_drop_operand, "an epilogue of"),
        (_forget_shape, "no dtype or shape"),
    ],
)
def test_a_broken_graph_is_refused(damage: Callable[[gs.Graph], None], found: str) -> None:
    graph = _graph()
    check(graph, "pass good")
    damage(graph)
    with pytest.raises(VerificationError, match=f"pass bad breaks node .*{found}"):
        check(graph, "pass bad")


def _double_the_gain(graph: gs.Graph, log: PassLog) -> int:
    constants = [t for n in graph.nodes for t in n.inputs if isinstance(t, gs.Constant) and t.values.size == 6]
    constants[0].values = constants[0].values * np.float32(2)
    return 1


@pytest.mark.parametrize(("verify", "named"), [("each", "pass double"), ("once", "the bundle for")])
def test_a_pass_that_changes_results_is_named(
    verify: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(_model(), path)
    wrong = (Pass("double", _double_the_gain), *passes.PIPELINE)
    monkeypatch.setattr(passes, "PIPELINE", wrong)
    monkeypatch.setattr("coda_edge.driver.PIPELINE", wrong)
    done = CliRunner().invoke(main, ["optimize", str(path), "--verify", verify])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"VerificationError: {named}")


def test_why_has_a_line_for_each_kernel_that_is_left(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(load_fixture("bert.sdpa.ts17"), path)
    done = CliRunner().invoke(main, ["inspect", "--why", str(path), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["gemm"], found["attention"]) == (8, 2)
    shown = CliRunner().invoke(main, ["inspect", "--why", str(path)]).stdout.splitlines()
    assert len(shown) == 1 + len(found["unfused"]) + len(found["notes"])
    assert all(u["reason"] in line for u, line in zip(found["unfused"], shown[1:], strict=False))
    reasons = {u["reason"] for u in found["unfused"]}
    assert any("before any GEMM" in r for r in reasons)
    assert any("depends on the whole result of the product" in r for r in reasons)

    refused = CliRunner().invoke(main, ["inspect", "--why", str(tmp_path / "m.coda")])
    assert refused.exit_code == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    {
        "no step": ("y = CumSum(p, one)", "CumSum of 'p' is no step"),
        "heads": (
            "r = Reshape(p, heads) s = Round(r) d = Sub(r, s) q = Mul(d, gates) y = Tanh(q)",
            r"works on 'p' as \[2, 2, 2, 1\]",
        ),
        "attention": ("r = Transpose <perm = [1, 0, 2]> (p) y = MatMul(r, p)", "no constant matrix"),
        "rows": ("m = ReduceMean(p, last) d = Sub(p, m) y = Tanh(d)", "depends on the whole result of the product"),
        "inputs": ("q = Sin(x) k = Transpose <perm = [1, 0, 2]> (q) y = Mul(k, k)", "before any GEMM"),
    }.values(),
)
def test_reasons(text: str, reason: str) -> None:
    m = model(
        f"g (float[2, 2, 8] x) => (float[A, C, D] y) {{ p = MatMul(x, w) {text} }}",
        {
            "w": normal(8, 2),
            "heads": np.array([0, 0, 2, 1]),
            "one": np.array(1),
            "gates": normal(2, 1),
            "last": np.array([-1]),
        },
    )
    m.graph.output[0].type.tensor_type.ClearField("shape")
    graph = frontend.normalize(frontend.load(m))
    log = run_pipeline(graph)
    found = [u.reason for u in unfused(graph, log)]
    assert found and any(re.search(reason, r) for r in found), found


@pytest.mark.parametrize("name", ["bert.sdpa.ts17", "gpt2.sdpa.dyn20", "llama.sdpa.ts17"])
def test_the_optimized_model_is_equal_in_onnxruntime_and_in_the_reference(name: str) -> None:
    m = load_fixture(name)
    graph = frontend.normalize(frontend.load(m))
    run_pipeline(graph)
    frontend.infer(graph)
    optimized = export.to_model(graph)
    onnx.checker.check_model(optimized, full_check=True)
    feeds = random_inputs(m, sizes_for(m, 2, 5), padding="left")
    expected = run(m, feeds)
    assert worst_error(expected, run(optimized, feeds)) < 1e-5
    found = [np.asarray(v) for v in ReferenceEvaluator(optimized).run(None, feeds)]
    assert worst_error(expected, found) < 1e-5


def test_every_tensor_of_a_rewritten_export_is_typed() -> None:
    graph = frontend.normalize(frontend.load(load_fixture("gpt2.sdpa.dyn20")))
    run_pipeline(graph)
    assert all(ir.shape(o) is not None for n in graph.nodes for o in n.outputs)
