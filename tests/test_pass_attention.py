"""softmax(q·kᵀ + …)·v is found in every spelling, and refused with a reason where it is not an attention."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from coda_edge.passes import attention
from rewriting import Array, model, normal, rewrite, run

import coda_edge
from coda_edge.bundle import to_bytes
from coda_edge.epilogue.program import EpilogueProgram, Kind

_IN = "float[B, 5, S, 8] q, float[B, 5, T, 8] k, float[B, 5, T, 8] v"
_FEEDS = {"q": normal(2, 5, 3, 8), "k": normal(2, 5, 7, 8, seed=1), "v": normal(2, 5, 7, 8, seed=2)}
_SWAP = "kt = Transpose <perm = [0, 1, 3, 2]> (k)"
_OUT = "o = MatMul(p, v) y = Transpose <perm = [0, 2, 1, 3]> (o)"
_CONSTANTS: dict[str, Array] = {
    "half": np.asarray(0.5, np.float32),
    "two": np.asarray(2.0, np.float32),
    "zero": np.asarray(0.0, np.float32),
    "low": np.asarray(-np.inf, np.float32),
}


def built_error(m: onnx.ModelProto, feeds: Mapping[str, Array]) -> float:
    """Worst |difference| of the kernels built for ``m`` to onnxruntime, over the largest |output|; NaN must be where it is."""
    worst = 0.0
    with coda_edge.Session(to_bytes(coda_edge.optimize(m, verify=False).bundle)) as session:
        for got, expected in zip(session.run(None, feeds), run(m, feeds), strict=True):
            np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
            assert got.shape == expected.shape
            scale = float(np.nanmax(np.abs(expected), initial=0.0)) or 1.0
            worst = max(worst, float(np.nanmax(np.abs(got - expected), initial=0.0)) / scale)
    return worst


def _padding() -> dict[str, Array]:
    keep = np.ones((2, 1, 1, 7), np.bool_)
    keep[0, ..., :3] = keep[1, ..., 5:] = False
    return {"keep": keep, "mask": np.where(keep, 0, np.finfo(np.float32).min).astype(np.float32)}


_SPELLINGS = {
    "eager": (_IN, f"{_SWAP} a = MatMul(q, kt) s = Mul(a, half) p = Softmax(s) {_OUT}"),
    "scaled by Div": (_IN, f"{_SWAP} a = MatMul(q, kt) s = Div(a, two) p = Softmax <axis = 3> (s) {_OUT}"),
    "scale on q and k": (
        _IN,
        f"qs = Mul(q, half) ks = Mul(half, k) kt = Transpose <perm = [0, 1, 3, 2]> (ks) a = MatMul(qs, kt) p = Softmax(a) {_OUT}",
    ),
    "scale behind the transpose": (
        _IN,
        f"{_SWAP} kh = Mul(kt, half) qs = Mul(q, half) a = MatMul(qs, kh) p = Softmax(a) {_OUT}",
    ),
    "additive mask": (
        f"{_IN}, float[B, 1, 1, T] mask",
        f"{_SWAP} a = MatMul(q, kt) s = Mul(a, half) m = Add(s, mask) p = Softmax(m) {_OUT}",
    ),
    "where": (
        f"{_IN}, bool[B, 1, 1, T] keep",
        f"{_SWAP} a = MatMul(q, kt) s = Where(keep, a, low) p = Softmax(s) {_OUT}",
    ),
    "softcap": (_IN, f"{_SWAP} a = MatMul(q, kt) d = Div(a, two) t = Tanh(d) s = Mul(t, two) p = Softmax(s) {_OUT}"),
    "guarded": (
        f"{_IN}, bool[B, 1, 1, T] keep",
        f"""{_SWAP} a = MatMul(q, kt) s = Where(keep, a, low) r = Softmax(s) n = IsNaN(r) p = Where(n, zero, r) {_OUT}""",
    ),
    "keys from a projection": (
        "float[B, 5, S, 8] q, float[B, T, 5, 8] k0, float[B, 5, T, 8] v",
        f"kt = Transpose <perm = [0, 2, 3, 1]> (k0) a = MatMul(q, kt) p = Softmax(a) {_OUT}",
    ),
}


@pytest.mark.parametrize("spelling", _SPELLINGS)
def test_attention_is_one_node(spelling: str) -> None:
    inputs, body = _SPELLINGS[spelling]
    done = rewrite(model(f"g ({inputs}) => (float[B, S, 5, 8] y) {{ {body} }}", _CONSTANTS), [attention.PASS])
    assert done.log.rewrites["attention"] == 1, done.log.refusals
    assert done.ops()["MatMul"] == done.ops()["Softmax"] == 0
    feeds = {**_FEEDS, **_padding(), "k0": normal(2, 7, 5, 8, seed=1)}
    assert done.error({i.name: feeds[i.name] for i in done.graph.inputs}) < 2e-6


def test_score_program_says_what_happens_to_the_scores() -> None:
    inputs, body = _SPELLINGS["additive mask"]
    done = rewrite(model(f"g ({inputs}) => (float[B, S, 5, 8] y) {{ {body} }}", _CONSTANTS), [attention.PASS])
    program = EpilogueProgram.parse(done.node("Attention").attrs["score"])
    assert [s.op for s in program.steps] == ["mul", "add"]
    assert [p.kind for p in program.params] == [Kind.TILE, Kind.COL]


def test_heads_are_merged_by_the_attention() -> None:
    body = f"{_SWAP} a = MatMul(q, kt) p = Softmax(a) o = MatMul(p, v) t = Transpose <perm = [0, 2, 1, 3]> (o) y = Reshape(t, flat)"
    m = model(f"g ({_IN}) => (float[B, S, 40] y) {{ {body} }}", {"flat": np.array([0, 0, -1])})
    done = rewrite(m, [attention.PASS])
    assert done.ops() == {"Attention": 1}
    assert done.error(_FEEDS) < 2e-6


def test_fully_masked_rows_stay_what_the_graph_makes_of_them() -> None:
    inputs, body = _SPELLINGS["guarded"]
    done = rewrite(model(f"g ({inputs}) => (float[B, S, 5, 8] y) {{ {body} }}", _CONSTANTS), [attention.PASS])
    assert done.node("Attention").attrs["guard"] == 1
    assert done.error({**_FEEDS, "keep": np.zeros((2, 1, 1, 7), np.bool_)}) == 0.0


@pytest.mark.parametrize("expanded", ["Unsqueeze", "Reshape"])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_shared_keys_and_values_are_not_repeated(expanded: str, groups: int) -> None:
    split = {"Unsqueeze": "Unsqueeze({0}, two)", "Reshape": "Reshape({0}, five)"}[expanded]
    repeat = " ".join(
        f"{t}5 = {split.format(t + '0')} {t}e = Expand({t}5, group) {t} = Reshape({t}e, four)" for t in ("k", "v")
    )
    m = model(
        f"""g (float[B, {2 * groups}, S, 8] q, float[B, 2, T, 8] k0, float[B, 2, T, 8] v0) => (float[B, S, {2 * groups}, 8] y) {{
            {repeat} {_SWAP} a = MatMul(q, kt) p = Softmax(a) {_OUT} }}""",
        {
            "two": np.array([2]),
            "five": np.array([0, 0, 1, -1, 8]),
            "group": np.array([1, 1, groups, 1, 1]),
            "four": np.array([0, 2 * groups, -1, 8]),
        },
    )
    done = rewrite(m, [attention.PASS])
    assert done.ops()["Attention"] == 1
    assert done.ops()["Expand"] == 0
    feeds = {"q": normal(3, 2 * groups, 5, 8), "k0": normal(3, 2, 7, 8, seed=1), "v0": normal(3, 2, 7, 8, seed=2)}
    assert done.error(feeds) < 2e-6
    with coda_edge.Session(to_bytes(coda_edge.optimize(m, verify=False).bundle)) as session:
        (expected,) = run(m, feeds)
        np.testing.assert_allclose(session.run(None, feeds)[0], expected, atol=2e-6)


@pytest.mark.parametrize(
    ("body", "output", "reason"),
    [
        (f"{_SWAP} a = MatMul(q, kt) p = Softmax(a) o = MatMul(p, v) y = Identity(p)", "float[B, 5, S, T] y", "read"),
        (f"{_SWAP} a = MatMul(q, kt) p = Softmax(a) o = MatMul(p, v) y = Add(o, o) z = Tanh(a)", "float[B, 5, S, 8] y, float[B, 5, S, T] z", "scores"),
        (f"{_SWAP} a = MatMul(q, kt) p = Softmax <axis = 1> (a) y = MatMul(p, v)", "float[B, 5, S, 8] y", "last axis"),
        ("p = Softmax(q) y = Tanh(p)", "float[B, 5, S, 8] y", "read"),
    ],
)  # fmt: skip
def test_other_softmaxes_are_refused_with_a_reason(body: str, output: str, reason: str) -> None:
    done = rewrite(model(f"g ({_IN}) => ({output}) {{ {body} }}"), [attention.PASS])
    assert done.log.rewrites["attention"] == 0
    assert reason in done.log.refusals[0].reason
    assert done.error(_FEEDS) < 1e-6


_BROADCAST = {
    "keys shared": ((2, 4, 3, 8), (2, 1, 5, 8), (2, 4, 5, 8), False),
    "values shared": ((2, 4, 3, 8), (2, 4, 5, 8), (2, 1, 5, 8), False),
    "queries shared by the batch": ((4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8), True),
    "values shared by the batch": ((4, 4, 3, 8), (4, 4, 2, 8), (4, 2, 8), True),
    "keys and values shared by the batch": ((4, 4, 3, 8), (1, 4, 2, 8), (4, 2, 8), True),
    "one head of keys and values": ((2, 4, 3, 8), (2, 1, 5, 8), (2, 1, 5, 8), True),
}


@pytest.mark.parametrize("case", _BROADCAST)
def test_operands_that_broadcast(case: str) -> None:
    q, k, v, fused = _BROADCAST[case]
    inputs = ", ".join(f"float{list(s)} {n}" for n, s in (("q", q), ("k", k), ("v", v)))
    m = model(f"g ({inputs}) => (float[B, 4, 3, 8] y) {{ {_SWAP} a = MatMul(q, kt) p = Softmax(a) y = MatMul(p, v) }}")
    done = rewrite(m, [attention.PASS])
    assert ("Attention" in done.ops()) == fused and bool(done.log.refusals) != fused
    feeds = {"q": normal(*q), "k": normal(*k, seed=1), "v": normal(*v, seed=2)}
    assert done.error(feeds) < 1e-6
    if fused:
        assert built_error(m, feeds) < 1e-6


def test_guarded_probabilities_that_are_returned_are_refused() -> None:
    m = model(
        f"""g ({_IN}) => (float[B, S, 5, 8] y, float[B, 5, S, T] r) {{ {_SWAP} a = MatMul(q, kt) r = Softmax(a)
            n = IsNaN(r) p = Where(n, zero, r) {_OUT} }}""",
        _CONSTANTS,
    )
    done = rewrite(m, [attention.PASS])
    assert "Attention" not in done.ops()
    assert "output" in done.log.refusals[0].reason
    assert done.error(_FEEDS) < 1e-6
