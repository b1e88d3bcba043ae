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
    if case == "queries shared by the batch":
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


_POSITIONS = """at = Shape(q) sq = Gather(at, i2) tt = Shape(k) sk = Gather(tt, i2) past = Sub(sk, sq)
    kr = Range(i0, sk, i1) qr = Range(i0, sq, i1) qp = Add(qr, past) qu = Unsqueeze(qp, last)"""
_LOW = float(np.finfo(np.float32).min)
_NUMBERS: dict[str, Array] = {
    **{f"i{n}": np.asarray(n) for n in (0, 1, 2, 3)},
    **{f"a{n}": np.array([n]) for n in (0, 1, 2, 3)},
    "last": np.array([-1]),
    "one": np.asarray(1.0, np.float32),
    "low": np.asarray(_LOW, np.float32),
    "ninf": np.asarray(-np.inf, np.float32),
    "tenk": np.asarray(1e4, np.float32),
    "false": np.asarray(False),
    "true": np.asarray(True),
    "tril": np.tril(np.ones((1, 1, 32, 32), np.bool_)),
    "trilf": np.tril(np.ones((32, 32), np.float32)),
    "trilu8": np.tril(np.ones((1, 1, 32, 32), np.uint8)),
    "zero": np.asarray(0.0, np.float32),
}
# Spellings of causal masks: nodes that make ``m`` of the scores ``a``, and the band.
_CAUSAL = {
    "compared positions": f"{_POSITIONS} c = LessOrEqual(kr, qu) m = Where(c, a, ninf)",
    "turned round": f"{_POSITIONS} c = Greater(kr, qu) m = Where(c, low, a)",
    "negated": f"{_POSITIONS} n = GreaterOrEqual(qu, kr) c = Not(n) m = Where(c, low, a)",
    "less than the next": f"{_POSITIONS} qn = Add(qu, i1) c = Less(kr, qn) z = Where(c, zero, low) m = Add(a, z)",
    "difference": f"{_POSITIONS} d = Sub(qu, kr) c = GreaterOrEqual(d, i0) z = Where(c, zero, ninf) m = Add(a, z)",
    "multiplied": f"{_POSITIONS} c = LessOrEqual(kr, qu) f = Cast <to = 1> (c) r = Sub(one, f) z = Mul(r, low) m = Add(a, z)",
    "multiplied and subtracted": f"{_POSITIONS} c = LessOrEqual(kr, qu) f = Cast <to = 1> (c) w = Mul(a, f) r = Sub(one, f) z = Mul(tenk, r) m = Sub(w, z)",
    "or": f"{_POSITIONS} c = Greater(kr, qu) hide = Not(keep) h = Or(c, hide) m = Where(h, low, a)",
    "and": f"{_POSITIONS} c = LessOrEqual(kr, qu) h = And(keep, c) z = Where(h, zero, low) m = Add(a, z)",
    "nested": f"{_POSITIONS} c = LessOrEqual(kr, qu) z = Where(c, a, low) m = Where(keep, z, low)",
    "clipped": f"{_POSITIONS} c = LessOrEqual(kr, qu) z = Where(c, zero, ninf) x = Max(z, low) m = Add(a, x)",
}


@pytest.mark.parametrize("spelling", _CAUSAL)
def test_causal_masks_are_bands(spelling: str) -> None:
    inputs = f"{_IN}, bool[B, 1, 1, T] keep" if "keep" in _CAUSAL[spelling] else _IN
    m = model(
        f"g ({inputs}) => (float[B, S, 5, 8] y) {{ {_SWAP} a = MatMul(q, kt) {_CAUSAL[spelling]} p = Softmax(m) {_OUT} }}",
        _NUMBERS,
    )
    done = rewrite(m, [attention.PASS])
    node = done.node("Attention")
    assert node.attrs["bands"] == "..keys - queries"
    kinds = [p.kind for p in EpilogueProgram.parse(node.attrs["score"]).params]
    assert kinds == [Kind.TILE, Kind.TILE] + [Kind.COL] * ("keep" in inputs)
    feeds = {i.name: f for i, f in zip(done.graph.inputs, [*_FEEDS.values(), _padding()["keep"]], strict=False)}
    assert done.error(feeds) < 2e-6


_TABLES = {
    "table": ("tril", "a2", "a3", "m = Where(t, a, low)"),
    "table of floats": ("trilf", "a0", "a1", "r = Sub(one, t) z = Mul(r, low) m = Add(a, z)"),
    "table of bytes": ("trilu8", "a2", "a3", "b = Cast <to = 9> (t) m = Where(b, a, low)"),
}


@pytest.mark.parametrize("spelling", _TABLES)
def test_parts_of_triangular_tables_are_bands(spelling: str) -> None:
    table, first, second, body = _TABLES[spelling]
    m = model(
        f"""g (float[B, 5, S, 8] q, float[B, 5, P, 8] pk, float[B, 5, S, 8] nk, float[B, 5, P, 8] pv, float[B, 5, S, 8] nv)
            => (float[B, S, 5, 8] y) {{ k = Concat <axis = 2> (pk, nk) v = Concat <axis = 2> (pv, nv) {_SWAP} a = MatMul(q, kt)
            pt = Shape(pk) from = Slice(pt, a2, a3) tt = Shape(k) to = Slice(tt, a2, a3) rows = Slice({table}, from, to, {first})
            t = Slice(rows, a0, to, {second}) {body} p = Softmax(m) {_OUT} }}""",
        _NUMBERS,
    )
    done = rewrite(m, [attention.PASS])
    node = done.node("Attention")
    assert node.attrs["bands"] == "..keys - queries" and node.attrs["past"] == 1
    feeds = {n: normal(2, 5, 4 if n[0] == "p" else 3, 8, seed=i) for i, n in enumerate(("q", "pk", "nk", "pv", "nv"))}
    assert done.error(feeds) < 2e-6


_WINDOWS = {
    "window": ("c = LessOrEqual(kr, qu) e = Sub(qu, i3) w = Greater(kr, e) b = And(c, w)", "keys - queries - 2..keys - queries"),
    "distance": ("d = Sub(qu, kr) e = Abs(d) b = LessOrEqual(e, i3)", "keys - queries - 3..keys - queries + 3"),
    "too far": ("d = Sub(kr, qu) e = Abs(d) f = Greater(e, i2) b = Not(f)", "keys - queries - 2..keys - queries + 2"),
    "triangles": ("t = Trilu <upper = 0> (whole) b = Trilu(t)", "0..0"),
}  # fmt: skip


@pytest.mark.parametrize("spelling", _WINDOWS)
def test_windows_are_bands(spelling: str) -> None:
    body, band = _WINDOWS[spelling]
    whole = "s0 = Shape(a) s1 = Slice(s0, a2, a4) whole = Expand(true, s1)"
    m = model(
        f"""g ({_IN}) => (float[B, S, 5, 8] y) {{ {_SWAP} a = MatMul(q, kt) {_POSITIONS} {whole} {body}
            m = Where(b, a, low) p = Softmax(m) {_OUT} }}""",
        {**_NUMBERS, "a4": np.array([4])},
    )
    done = rewrite(m, [attention.PASS])
    assert done.node("Attention").attrs["bands"] == band
    assert done.error(_FEEDS) < 2e-6


def test_positions_that_are_data_are_compared_without_a_mask_in_memory() -> None:
    m = model(
        f"""g ({_IN}, int64[B, S] at) => (float[B, S, 5, 8] y) {{ {_SWAP} a = MatMul(q, kt)
            tt = Shape(k) sk = Gather(tt, i2) kr = Range(i0, sk, i1) w = Unsqueeze(at, ends)
            c = LessOrEqual(kr, w) m = Where(c, a, low) p = Softmax(m) {_OUT} }}""",
        {**_NUMBERS, "ends": np.array([1, 3])},
    )
    done = rewrite(m, [attention.PASS])
    node = done.node("Attention")
    assert "bands" not in node.attrs
    assert {p.kind for p in EpilogueProgram.parse(node.attrs["score"]).params[1:]} == {Kind.ROW, Kind.COL}
    assert built_error(m, {**_FEEDS, "at": np.array([[0, 3, 6], [-1, 2, 9]])}) < 2e-6


@pytest.mark.parametrize("returned", [True, False])
def test_past_rows_are_appended_by_the_attention(returned: bool) -> None:
    outputs = ", float[B, 2, U, 8] kn, float[B, 2, U, 8] vn" if returned else ""
    repeat = " ".join(f"{t}5 = Unsqueeze({t}n, a2) {t}e = Expand({t}5, group) {t} = Reshape({t}e, four)" for t in "kv")
    m = model(
        f"""g (float[B, 4, S, 8] q, float[B, 2, P, 8] pk, float[B, 2, P, 8] pv, float[B, 2, S, 8] k0, float[B, 2, S, 8] v0)
            => (float[B, S, 4, 8] y{outputs}) {{ kn = Concat <axis = 2> (pk, k0) vn = Concat <axis = 2> (pv, v0) {repeat}
            {_SWAP} a = MatMul(q, kt) {_CAUSAL["compared positions"]} p = Softmax(m) {_OUT} }}""",
        {**_NUMBERS, "group": np.array([1, 1, 2, 1, 1]), "four": np.array([0, 4, -1, 8])},
    )
    done = rewrite(m, [attention.PASS])
    node = done.node("Attention")
    assert node.attrs["past"] == 1 and node.attrs.get("present", 0) == returned
    assert "Concat" not in done.ops() and "Expand" not in done.ops()
    for past in (0, 5):
        feeds = {"q": normal(2, 4, 3, 8)}
        feeds |= {
            n: normal(2, 2, past if n[0] == "p" else 3, 8, seed=i) for i, n in enumerate(("pk", "pv", "k0", "v0"))
        }
        assert done.error(feeds) < 2e-6
        if returned:
            assert built_error(m, feeds) < 2e-6


def test_past_rows_of_heads_that_are_batch_entries_too() -> None:
    """BLOOM's products are of ``[B·H, S, D]``: past and new rows are joined as ``[B, H, S, D]`` before."""
    flat = " ".join(
        f"{t}n = Concat <axis = 2> (p{t}, {t}0) {t}z = Shape <start = 2> ({t}n) {t}to = Concat <axis = 0> (last, {t}z) {t} = Reshape({t}n, {t}to)"
        for t in "kv"
    )
    m = model(
        f"""g (float[B, 2, S, 8] q4, float[B, 2, P, 8] pk, float[B, 2, P, 8] pv, float[B, 2, S, 8] k0, float[B, 2, S, 8] v0)
            => (float[B, 2, S, 8] y, float[B, 2, U, 8] kn, float[B, 2, U, 8] vn) {{ {flat}
            qz = Shape <start = 2> (q4) qt = Concat <axis = 0> (last, qz) q = Reshape(q4, qt) kt = Transpose <perm = [0, 2, 1]> (k)
            s = MatMul(q, kt) p = Softmax(s) o = MatMul(p, v) ys = Shape(q4) y = Reshape(o, ys) }}""",
        _NUMBERS,
    )
    done = rewrite(m, [attention.PASS])
    assert done.node("Attention").attrs["present"] == 1 and "Concat" not in done.ops()
    for past in (0, 5):
        feeds = {
            n: normal(3, 2, past if n[0] == "p" else 4, 8, seed=i) for i, n in enumerate(("q4", "pk", "pv", "k0", "v0"))
        }
        assert done.error(feeds) < 2e-6


def test_a_sink_is_a_score_without_a_value() -> None:
    m = model(
        f"""g ({_IN}, float[1, 5, 1, 1] sink) => (float[B, S, 5, 8] y) {{ {_SWAP} a = MatMul(q, kt) s = Mul(a, half)
            at = Shape(q) lead = Slice(at, a0, a3) to = Concat <axis = 0> (lead, a1) column = Expand(sink, to)
            j = Concat <axis = -1> (s, column) top = ReduceMax(j, last) d = Sub(j, top) r = Softmax(d)
            p = Slice(r, a0, last, last) {_OUT} }}""",
        {**_NUMBERS, **_CONSTANTS},
    )
    done = rewrite(m, [attention.PASS])
    assert done.node("Attention").attrs["sink"] == 1
    assert "Concat" not in done.ops()
    feeds = {**_FEEDS, "sink": normal(1, 5, 1, 1, seed=5)}
    assert done.error(feeds) < 2e-6
    assert built_error(m, feeds) < 2e-6


def test_a_key_that_is_cut_off_in_place_of_a_sink_is_refused() -> None:
    m = model(
        """g (float[2, 3, 6, 8] q, float[2, 3, 6, 8] k, float[2, 3, 6, 8] v, float[2, 3, 6, 1] sink) => (float[2, 3, 6, 8] y) {
            t = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul(q, t) j = Concat <axis = -1> (s, sink)
            r = Softmax(j) p = Slice(r, one, seven, last) y = MatMul(p, v) }""",
        {"one": np.array([1]), "seven": np.array([7]), "last": np.array([-1])},
    )
    done = rewrite(m, [attention.PASS])
    assert "Attention" not in done.ops() and done.log.refusals
    feeds = {name: normal(2, 3, 6, 8, seed=i) for i, name in enumerate("qkv")}
    assert done.error({**feeds, "sink": normal(2, 3, 6, 1, seed=5)}) < 2e-6


_RANKS: dict[str, tuple[str, str, dict[str, tuple[int, ...]]]] = {
    "heads in the batch": (
        "float[2, S, 40] q, float[2, T, 40] k, float[2, T, 40] v",
        """qs = Reshape(q, split) qh = Transpose <perm = [0, 2, 1, 3]> (qs) q3 = Reshape(qh, three)
        ks = Reshape(k, split) kh = Transpose <perm = [0, 2, 1, 3]> (ks) k3 = Reshape(kh, three) kt = Transpose <perm = [0, 2, 1]> (k3)
        vs = Reshape(v, split) vh = Transpose <perm = [0, 2, 1, 3]> (vs) v3 = Reshape(vh, three)
        a = MatMul(q3, kt) p = Softmax(a) o = MatMul(p, v3) o4 = Reshape(o, heads) t = Transpose <perm = [0, 2, 1, 3]> (o4) y = Reshape(t, flat)""",
        {"q": (2, 3, 40), "k": (2, 7, 40), "v": (2, 7, 40)},
    ),
    "sequence first": (
        "float[S, B, 40] q, float[T, B, 40] k, float[T, B, 40] v",
        """qs = Reshape(q, joined) q3 = Transpose <perm = [1, 0, 2]> (qs) ks = Reshape(k, joined) kt = Transpose <perm = [1, 2, 0]> (ks)
        vs = Reshape(v, joined) v3 = Transpose <perm = [1, 0, 2]> (vs) a = MatMul(q3, kt) p = Softmax(a) o = MatMul(p, v3)
        t = Transpose <perm = [1, 0, 2]> (o) y = Reshape(t, wide)""",
        {"q": (3, 2, 40), "k": (7, 2, 40), "v": (7, 2, 40)},
    ),
    "one head": (
        "float[B, S, 40] q, float[B, T, 40] k, float[B, T, 40] v",
        "kt = Transpose <perm = [0, 2, 1]> (k) a = MatMul(q, kt) p = Softmax(a) y = MatMul(p, v)",
        {"q": (2, 3, 40), "k": (2, 7, 40), "v": (2, 7, 40)},
    ),
    "values from the left": (
        "float[B, S, 40] q, float[B, T, 40] k, float[B, T, 40] v",
        """kt = Transpose <perm = [0, 2, 1]> (k) vt = Transpose <perm = [0, 2, 1]> (v) a = MatMul(q, kt) p = Softmax(a)
        pt = Transpose <perm = [0, 2, 1]> (p) o = MatMul(vt, pt) y = Transpose <perm = [0, 2, 1]> (o)""",
        {"q": (2, 3, 40), "k": (2, 7, 40), "v": (2, 7, 40)},
    ),
    "windows": (
        "float[24, 5, 7, 8] q, float[24, 5, 7, 8] k, float[24, 5, 7, 8] v, float[6, 7, 7] bias, float[5, 7, 7] table",
        """kt = Transpose <perm = [0, 1, 3, 2]> (k) a = MatMul(q, kt) b = Add(a, table) w = Reshape(b, apart) m = Unsqueeze(bias, a1)
        n = Unsqueeze(m, a0) s = Add(w, n) j = Reshape(s, together) p = Softmax(j) o = MatMul(p, v) t = Transpose <perm = [0, 2, 1, 3]> (o)
        y = Reshape(t, flat)""",
        {"q": (24, 5, 7, 8), "k": (24, 5, 7, 8), "v": (24, 5, 7, 8), "bias": (6, 7, 7), "table": (5, 7, 7)},
    ),
    "groups of five dimensions": (
        "float[B, 2, 3, S, 8] q, float[B, 2, 1, T, 8] k, float[B, 2, 1, T, 8] v",
        """kt = Transpose <perm = [0, 1, 2, 4, 3]> (k) a = MatMul(q, kt) p = Softmax(a) o = MatMul(p, v)
        t = Transpose <perm = [0, 3, 1, 2, 4]> (o) y = Reshape(t, flat)""",
        {"q": (3, 2, 3, 5, 8), "k": (3, 2, 1, 7, 8), "v": (3, 2, 1, 7, 8)},
    ),
    "heads repeated by an index": (
        "float[B, 6, S, 8] q, float[B, 2, T, 8] k0, float[B, 2, T, 8] v0",
        """k = Gather <axis = 1> (k0, repeat) v = Gather <axis = 1> (v0, repeat) kt = Transpose <perm = [0, 1, 3, 2]> (k)
        a = MatMul(q, kt) p = Softmax(a) o = MatMul(p, v) t = Transpose <perm = [0, 2, 1, 3]> (o) y = Reshape(t, flat)""",
        {"q": (2, 6, 3, 8), "k0": (2, 2, 7, 8), "v0": (2, 2, 7, 8)},
    ),
    "learned queries": (
        "float[B, 5, T, 8] k, float[B, 5, T, 8] v",
        """kt = Transpose <perm = [0, 1, 3, 2]> (k) a = MatMul(probe, kt) p = Softmax(a) o = MatMul(p, v)
        t = Transpose <perm = [0, 2, 1, 3]> (o) y = Reshape(t, flat)""",
        {"k": (2, 5, 7, 8), "v": (2, 5, 7, 8)},
    ),
    "two products": (
        "float[B, 5, S, 8] q, float[B, 5, T, 8] k, float[B, 5, T, 8] v, float[B, 5, T, 8] r",
        """kt = Transpose <perm = [0, 1, 3, 2]> (k) rt = Transpose <perm = [0, 1, 3, 2]> (r) a = MatMul(q, kt) c = MatMul(q, rt)
        s = Add(a, c) d = Mul(s, half) p = Softmax(d) o = MatMul(p, v) t = Transpose <perm = [0, 2, 1, 3]> (o) y = Reshape(t, flat)""",
        {"q": (2, 5, 3, 8), "k": (2, 5, 7, 8), "v": (2, 5, 7, 8), "r": (2, 5, 7, 8)},
    ),
    "heads and keys weighted": (
        "float[B, 5, S, 8] q, float[B, 5, T, 8] k, float[B, 5, T, 8] v, float[5, 1, 1] head, float[B, 1, 1, T] key",
        """kt = Transpose <perm = [0, 1, 3, 2]> (k) a = MatMul(q, kt) r = Softmax(a) h = Mul(r, head) p = Mul(h, key)
        o = MatMul(p, v) t = Transpose <perm = [0, 2, 1, 3]> (o) y = Reshape(t, flat)""",
        {"q": (2, 5, 3, 8), "k": (2, 5, 7, 8), "v": (2, 5, 7, 8), "head": (5, 1, 1), "key": (2, 1, 1, 7)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", _RANKS)
def test_any_dimensions(case: str) -> None:
    inputs, body, shapes = _RANKS[case]
    constants: dict[str, Array] = {
        **_NUMBERS,
        "half": np.asarray(0.5, np.float32),
        "split": np.array([0, 0, 5, 8]),
        "three": np.array([10, -1, 8]),
        "joined": np.array([0, 10, 8]),
        "wide": np.array([0, 2, 40]),
        "heads": np.array([2, 5, -1, 8]),
        "flat": np.array([0, 0, -1]),
        "apart": np.array([4, 6, 5, 7, 7]),
        "together": np.array([24, 5, 7, 7]),
        "repeat": np.repeat(np.arange(2), 3),
        "probe": normal(1, 5, 3, 8, seed=9),
    }
    m = model(f"g ({inputs}) => (float[X, Y, Z] y) {{ {body} }}", constants)
    done = rewrite(m, [attention.PASS])
    assert done.ops()["Attention"] == 1, done.log.refusals
    assert done.ops()["Softmax"] == done.ops()["Expand"] == 0
    if case in ("heads in the batch", "sequence first"):
        assert "MatMul" not in done.ops() and done.node("Attention").inputs[0].shape[1] == 5
    feeds = {name: normal(*s, seed=i) for i, (name, s) in enumerate(shapes.items())}
    assert done.error(feeds) < 2e-6
    if case in ("windows", "learned queries"):
        assert built_error(m, feeds) < 2e-6
