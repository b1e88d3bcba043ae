"""Attention whose probabilities are rounded before they meet the values, as in quantised models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from coda_edge.passes import PIPELINE
from rewriting import Array, model, normal, rewrite

import coda_edge
from coda_edge import export
from coda_edge.attention import bands
from coda_edge.verify import ort_session

QUANTUM = 1 / 255
CONSTANTS: dict[str, Array] = {
    "split": np.array([0, 0, 2, 5]),
    "flat": np.array([0, 0, 10]),
    "half": np.float32(0.5),
    "s": np.float32(QUANTUM),
    "z": np.uint8(0),
    "si": np.float32(0.031),
    "zi": np.int8(-3),
    "st": np.float32(0.06),
    "zt": np.uint8(128),
    "zero": np.float32(0),
    "one": np.float32(1),
    "lowest": np.float32(-np.inf),
    "axes": np.array([1, 2]),
    "causal": np.triu(np.full((130, 130), -np.inf, np.float32), 1),
    "none": np.array([0]),
}
ROUND = "r = QuantizeLinear(p, s, z) c = DequantizeLinear(r, s, z)"
CASES = {
    "probabilities": ("", "a", ROUND),
    "guarded": ("n = Where(m4, zero, lowest) t = Add(a, n)", "t", f"i = IsNaN(p0) p = Where(i, zero, p0) {ROUND}"),
    "scores too": ("o = QuantizeLinear(a, st, zt) t = DequantizeLinear(o, st, zt)", "t", ROUND),
    "by two numbers": ("", "a", "r = QuantizeLinear(p, si, zi) c = DequantizeLinear(r, s, zi)"),
}


def _model(name: str) -> onnx.ModelProto:
    before, scores, after = CASES[name]
    p = "p0" if "p0" in after else "p"
    heads = " ".join(f"{n}r = Reshape({n}, split) {n}h = Transpose<perm = [0, 2, 1, 3]>({n}r)" for n in ("q", "k", "v"))
    return model(
        f"""
        g (float[B, S, 10] q, float[B, T, 10] k, float[B, T, 10] v, bool[B, T] mask) => (float[B, S, 10] y) {{
            {heads} kt = Transpose<perm = [0, 1, 3, 2]>(kh) m4 = Unsqueeze(mask, axes)
            a0 = MatMul(qh, kt) a = Mul(a0, half) {before} {p} = Softmax({scores}) {after}
            w = MatMul(c, vh) t2 = Transpose<perm = [0, 2, 1, 3]>(w) y = Reshape(t2, flat)
        }}
        """,
        CONSTANTS,
    )


def _feeds(batch: int, queries: int, keys: int) -> dict[str, Array]:
    mask = np.random.default_rng(3).random((batch, keys)) < 0.7
    mask[-1] = False
    named = {
        "q": normal(batch, queries, 10),
        "k": normal(batch, keys, 10, seed=1),
        "v": normal(batch, keys, 10, seed=2),
    }
    return named | {"mask": mask}


def _close(found: Array, expected: Array, quantum: float) -> None:
    """Equal but for roundings that fell otherwise: a few, and of one quantum of a value each."""
    apart = np.abs(found - expected)
    assert np.quantile(apart, 0.98) < 1e-5
    assert apart.max() < 3.5 * quantum


@pytest.mark.parametrize("name", CASES)
def test_is_one_attention(name: str, tmp_path: Path) -> None:
    m = _model(name)
    done = rewrite(m, PIPELINE)
    assert done.ops()["Attention"] == 1 and "Softmax" not in done.ops()
    assert "round" in done.node("Attention").attrs["probability"]
    quantum = QUANTUM if name != "by two numbers" else 0.031
    # Optimised, onnxruntime takes a softmax between two quantisations by a table of integers, and is a quantum off.
    reference, rewritten = ort_session(m, plain=True), ort_session(export.to_model(done.graph))
    coda_edge.optimize(m, verify=False).save(tmp_path / "m.coda")
    with coda_edge.Session(tmp_path / "m.coda") as session:
        for sizes in ((1, 1, 1), (3, 7, 7), (2, 3, 130), (2, 130, 5)):
            feeds = _feeds(*sizes)
            (expected,) = reference.run(None, feeds)
            _close(rewritten.run(None, feeds)[0], expected, quantum)
            _close(session.run(None, feeds)[0], expected, quantum)
            if name == "guarded":
                assert not expected[-1].any()


def test_causal_attention_is_rounded_over_all_keys(tmp_path: Path) -> None:
    m = model(
        """
        g (float[B, S, 10] q, float[B, S, 10] v) => (float[B, S, 10] y) {
            qr = Reshape(q, split) qh = Transpose<perm = [0, 2, 1, 3]>(qr) kt = Transpose<perm = [0, 2, 3, 1]>(qr)
            vr = Reshape(v, split) vh = Transpose<perm = [0, 2, 1, 3]>(vr)
            size = Shape<start = 1, end = 2>(q) rows = Concat<axis = 0>(size, size) two = Concat<axis = 0>(none, none)
            cut = Slice(causal, two, rows) a0 = MatMul(qh, kt) a = Add(a0, cut) p = Softmax(a)
            r = QuantizeLinear(p, s, z) c = DequantizeLinear(r, s, z)
            w = MatMul(c, vh) t2 = Transpose<perm = [0, 2, 1, 3]>(w) y = Reshape(t2, flat)
        }
        """,
        CONSTANTS,
    )
    done = rewrite(m, PIPELINE)
    assert len(bands(done.node("Attention"))) == 1
    reference = ort_session(m, plain=True)
    coda_edge.optimize(m, verify=False).save(tmp_path / "m.coda")
    with coda_edge.Session(tmp_path / "m.coda") as session:
        for length in (1, 9, 130):
            feeds = {"q": normal(2, length, 10), "v": normal(2, length, 10, seed=2)}
            _close(session.run(None, feeds)[0], reference.run(None, feeds)[0], QUANTUM)


@pytest.mark.parametrize(
    ("after", "why"),
    [
        ("c = Round(p)", ""),
        (
            "e = Add(p, one) c = Round(e)",
            "the probabilities are read by something else than one MatMul with the values",
        ),
        (f"{ROUND} d = Identity(c)", ""),
    ],
)
def test_what_makes_something_of_nothing_is_refused(after: str, why: str) -> None:
    CASES["one"] = ("", "a", after)
    done = rewrite(_model("one"), PIPELINE)
    del CASES["one"]
    assert done.ops()["Attention"] == (0 if why else 1)
    assert [r.reason for r in done.log.refusals if r.rule == "attention"] == ([why] if why else [])
