"""Branches that data chooses between and that differ: merged decoders, with and without a cache, compute only the one taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from graphs import run, to_model, worst_error
from onnx import numpy_helper, parser

import coda_edge
from coda_edge.bundle import to_bytes
from coda_edge.frontend import load, normalize

Array = npt.NDArray[Any]
HEADS, DEPTH, WORDS = 2, 8, 20
WIDTH = HEADS * DEPTH


def _layer(cached: bool) -> str:
    """A decoder of one layer on tokens and the rows of a cache; without one, the rows are the tokens' own."""
    joined = (
        "k = Concat <axis = 2> (pk, kn) v = Concat <axis = 2> (pv, vn)"
        if cached
        else "k = Identity (kn) v = Identity (vn)"
    )
    return f"""() => (float[B, S, {WORDS}] out, float[B, {HEADS}, T, {DEPTH}] k, float[B, {HEADS}, T, {DEPTH}] v) {{
        x = Gather (table, ids)
        q0 = MatMul (x, wq) k0 = MatMul (x, wk) v0 = MatMul (x, wv)
        q1 = Reshape (q0, split) k1 = Reshape (k0, split) v1 = Reshape (v0, split)
        q = Transpose <perm = [0, 2, 1, 3]> (q1) kn = Transpose <perm = [0, 2, 1, 3]> (k1) vn = Transpose <perm = [0, 2, 1, 3]> (v1)
        {joined}
        kt = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul (q, kt) p = Softmax <axis = -1> (s)
        a = MatMul (p, v) at = Transpose <perm = [0, 2, 1, 3]> (a) am = Reshape (at, merge)
        o = MatMul (am, wo) h = Add (o, x) out = MatMul (h, head)
    }}"""


def _merged() -> onnx.ModelProto:
    """As exporters write it: one If of a bool input around all."""
    model = parser.parse_model(f"""<ir_version: 9, opset_import: ["": 18]> g
        (int64[B, S] ids, float[B, {HEADS}, P, {DEPTH}] pk, float[B, {HEADS}, P, {DEPTH}] pv, bool[1] use_cache_branch)
        => (float[B, S, {WORDS}] logits, float[B, {HEADS}, Q, {DEPTH}] present_k, float[B, {HEADS}, Q, {DEPTH}] present_v)
        <int64[4] split = {{0, 0, {HEADS}, {DEPTH}}}, int64[3] merge = {{0, 0, {WIDTH}}}> {{
            logits, present_k, present_v = If (use_cache_branch) <then_branch = t {_layer(True)}, else_branch = e {_layer(False)}>
        }}""")
    rng = np.random.default_rng(0)
    shapes = {
        "table": (WORDS, WIDTH),
        "wq": (WIDTH, WIDTH),
        "wk": (WIDTH, WIDTH),
        "wv": (WIDTH, WIDTH),
        "wo": (WIDTH, WIDTH),
    }
    for name, dims in {**shapes, "head": (WIDTH, WORDS)}.items():
        value = (rng.standard_normal(dims) / 4).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


def _feeds(batch: int, tokens: int, past: int, cached: bool) -> dict[str, Array]:
    rng = np.random.default_rng(batch + past)
    rows = [rng.standard_normal((batch, HEADS, past, DEPTH)).astype(np.float32) for _ in "kv"]
    ids = rng.integers(0, WORDS, (batch, tokens))
    return {"ids": ids, "pk": rows[0], "pv": rows[1], "use_cache_branch": np.asarray([cached])}


CASES = ((1, 1, 5, True), (3, 7, 0, False), (2, 4, 9, False), (3, 2, 7, True), (1, 3, 0, True))


def test_a_merged_decoder_in_normal_form() -> None:
    model = _merged()
    graph = normalize(load(model))
    assert not {n.op for n in graph.nodes} & {"If", "Where"}
    for case in CASES:
        feeds = _feeds(*case)
        assert worst_error(run(model, feeds), run(to_model(graph), feeds)) <= 1e-6, case


def test_a_merged_decoder_built() -> None:
    """It is verified, too: sizes that data decides are those of onnxruntime."""
    model = _merged()
    made = coda_edge.optimize(model)
    for case in CASES:
        feeds = _feeds(*case)
        assert worst_error(run(model, feeds), run(made.model, feeds)) <= 1e-6, case
    for threads in (1, 2):
        with coda_edge.Session(to_bytes(made.bundle), threads=threads) as session:
            for case in CASES:
                feeds = _feeds(*case)
                for ours, theirs in zip(session.run(None, feeds), run(model, feeds), strict=True):
                    assert ours.shape == theirs.shape
                    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)


def _cross_layer(cached: bool) -> str:
    """A layer that attends to its own tokens and to an encoder's states, both masked; with a cache, the encoder's keys come from it.

    The rows of the encoder's cache are none with a cache: only the first step's are kept.
    """
    mine = "k = Concat <axis = 2> (pk, kn)" if cached else "k = Identity (kn)"
    theirs = (
        f"c = Identity (pc) kept = Constant <value = float[0, {HEADS}, 1, {DEPTH}] {{}}> ()"
        if cached
        else "c0 = MatMul (states, wc) c1 = Reshape (c0, split) c = Transpose <perm = [0, 2, 1, 3]> (c1) kept = Identity (c)"
    )
    return f"""() => (float[B, S, {WORDS}] out, float[B, {HEADS}, T, {DEPTH}] k, float[R, {HEADS}, C, {DEPTH}] kept) {{
        x = Gather (table, ids)
        q0 = MatMul (x, wq) k0 = MatMul (x, wk)
        q1 = Reshape (q0, split) k1 = Reshape (k0, split)
        q = Transpose <perm = [0, 2, 1, 3]> (q1) kn = Transpose <perm = [0, 2, 1, 3]> (k1)
        {mine}
        hide0 = Mul (own_mask, low) hide = Unsqueeze (hide0, axes)
        kt = Transpose <perm = [0, 1, 3, 2]> (k) s0 = MatMul (q, kt) s = Add (s0, hide) p = Softmax <axis = -1> (s)
        a = MatMul (p, k) at = Transpose <perm = [0, 2, 1, 3]> (a) am = Reshape (at, merge) h = Add (am, x)
        {theirs}
        d0 = MatMul (h, wd) d1 = Reshape (d0, split) d = Transpose <perm = [0, 2, 1, 3]> (d1)
        hid0 = Mul (mask, low) hid = Unsqueeze (hid0, axes)
        ct = Transpose <perm = [0, 1, 3, 2]> (c) r0 = MatMul (d, ct) r = Add (r0, hid) u = Softmax <axis = -1> (r)
        e = MatMul (u, c) et = Transpose <perm = [0, 2, 1, 3]> (e) em = Reshape (et, merge) o = Add (em, h) out = MatMul (o, head)
    }}"""


def _merged_with_encoder(rows: str) -> onnx.ModelProto:
    """The encoder's cache has ``rows``; the masks have names of their own, which each branch needs to be other sizes."""
    model = parser.parse_model(f"""<ir_version: 9, opset_import: ["": 18]> g
        (float[B, E] mask, float[B, A] own_mask, int64[B, S] ids, float[B, E, {WIDTH}] states, float[B, {HEADS}, P, {DEPTH}] pk,
            float[B, {HEADS}, {rows}, {DEPTH}] pc, bool[1] use_cache_branch)
        => (float[B, S, {WORDS}] logits, float[B, {HEADS}, Q, {DEPTH}] present_k, float[R, {HEADS}, G, {DEPTH}] present_c)
        <int64[4] split = {{0, 0, {HEADS}, {DEPTH}}}, int64[3] merge = {{0, 0, {WIDTH}}}, float low = {{-9}}, int64[2] axes = {{1, 2}}> {{
            logits, present_k, present_c = If (use_cache_branch)
                <then_branch = t {_cross_layer(True)}, else_branch = e {_cross_layer(False)}>
        }}""")
    own = {"out": "logits", "k": "present_k", "kept": "present_c"}
    for branch in (attribute.g for attribute in model.graph.node[0].attribute):
        for names in (*(n.input for n in branch.node), *(n.output for n in branch.node)):
            names[:] = [own.get(name, name) for name in names]
        for value in branch.output:
            value.name = own[value.name]
    rng = np.random.default_rng(1)
    shapes = dict.fromkeys(("wq", "wk", "wc", "wd"), (WIDTH, WIDTH)) | {"table": (WORDS, WIDTH), "head": (WIDTH, WORDS)}
    for name, dims in shapes.items():
        value = (rng.standard_normal(dims) / 4).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


def _encoder_feeds(batch: int, tokens: int, past: int, states: int, cached: bool) -> dict[str, Array]:
    """Without a cache, one row of the encoder's cache, as callers do who must give something."""
    rng = np.random.default_rng(batch + past)
    own = past + tokens if cached else tokens
    rows = states if cached else 1
    return {
        "mask": rng.integers(0, 2, (batch, states)).astype(np.float32),
        "own_mask": rng.integers(0, 2, (batch, own)).astype(np.float32),
        "ids": rng.integers(0, WORDS, (batch, tokens)),
        "states": rng.standard_normal((batch, states, WIDTH)).astype(np.float32),
        "pk": rng.standard_normal((batch, HEADS, past, DEPTH)).astype(np.float32),
        "pc": rng.standard_normal((batch, HEADS, rows, DEPTH)).astype(np.float32),
        "use_cache_branch": np.asarray([cached]),
    }


ENCODER_CASES = ((1, 1, 5, 4, True), (3, 7, 1, 6, False), (2, 4, 9, 3, True), (3, 2, 0, 5, False), (1, 3, 0, 2, True))


@pytest.mark.parametrize("rows", ["F", "E"])
def test_sizes_that_one_branch_needs_to_be_equal(rows: str) -> None:
    """The dummy rows fed where there is no cache are one, also where the exporter declared the encoder's; with a cache they are as many or the run is refused.

    Results have the same names inside and outside, as exporters have them.
    """
    model = _merged_with_encoder(rows)
    made = coda_edge.optimize(model)
    assert not {n.op_type for n in made.model.graph.node} & {"If", "Where"}
    mask, cache = (made.model.graph.input[i].type.tensor_type.shape.dim for i in (0, 5))
    assert mask[1].dim_param == "E" and cache[2].dim_param not in ("", "E")
    with coda_edge.Session(to_bytes(made.bundle)) as session:
        for case in ENCODER_CASES:
            feeds = _encoder_feeds(*case)
            expected = run(model, feeds)
            assert worst_error(expected, run(made.model, feeds)) <= 1e-6, case
            for ours, theirs in zip(session.run(None, feeds), expected, strict=True):
                assert ours.shape == theirs.shape
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)
        for name, axis in (("pc", 2), ("own_mask", 1)):
            feeds = _encoder_feeds(2, 4, 9, 3, True)
            feeds[name] = np.delete(feeds[name], 0, axis)
            with pytest.raises(coda_edge.errors.ShapeError, match="two dimensions that must be equal"):
                session.run(None, feeds)


DRAWS = """(float[N, 6] x, bool c) => (float[N, 6] y) {
    y = If (c) <
        then_branch = t () => (float[N, 6] a) { n = Shape (x) r = RandomUniformLike <low = 0.0, high = 1e-9> (x) a = Add (x, r) },
        else_branch = e () => (float[N, 6] b) { b = Gather (x, j) }
    >
}"""


def test_a_branch_may_fail_or_draw_numbers() -> None:
    """The index of the branch not taken would be out of range of anything but what is empty."""
    text = DRAWS.replace("bool c)", "bool c, int64[N] j)")
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g {text}')
    graph = normalize(load(model))
    x = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    for taken, index in ((True, 99), (False, 3)):
        feeds = {"x": x, "c": np.asarray(taken), "j": np.full(5, index)}
        assert worst_error(run(model, feeds), run(to_model(graph), feeds)) <= 1e-6


def test_views_of_nothing_name_their_sizes() -> None:
    """Beside a batch of 0, a -1 in a Reshape would say nothing."""
    model = parser.parse_model("""<ir_version: 9, opset_import: ["": 18]> g
        (float[N, S] x, bool c) => (float[N, 1, T] y) <int64[3] wide = {0, 1, -1}> {
            y = If (c) <
                then_branch = t () => (float[N, 1, S] a) { r = Reshape (x, wide) a = Exp (r) },
                else_branch = e () => (float[N, 1, U] b) { d = Concat <axis = 1> (x, x) r = Reshape (d, wide) b = Neg (r) }
            >
        }""")
    graph = normalize(load(model))
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    for taken in (True, False):
        feeds = {"x": x, "c": np.asarray(taken)}
        (found,), (expected,) = run(to_model(graph), feeds), run(model, feeds)
        assert found.shape == expected.shape == (3, 1, 5 if taken else 10)
        assert worst_error([found], [expected]) <= 1e-6


def test_sizes_keep_their_names_where_sizes_choose_the_branch() -> None:
    """What a branch that is never taken reads is as long as the exporter says."""
    model = parser.parse_model("""<ir_version: 9, opset_import: ["": 18]> g
        (float[N, K] x, float[N, S] v, float[N, S] w) => (float[N, T] y) <int64 three = {3}, int64 at = {1}> {
            s = Shape (x) k = Gather (s, at) c = Equal (k, three)
            y = If (c) <then_branch = t () => (float[N, S] a) { a = Exp (v) }, else_branch = e () => (float[N, S] b) { b = Neg (w) }>
        }""")
    graph = normalize(load(model), {"x": ("N", 3)})
    assert [t.shape for t in graph.inputs] == [["N", 3], ["N", "S"], ["N", "S"]]
    x, v, w = (np.random.default_rng(i).standard_normal((2, n)).astype(np.float32) for i, n in enumerate((3, 5, 5)))
    feeds = {"x": x, "v": v, "w": w}
    assert worst_error(run(model, feeds), run(to_model(graph), feeds)) <= 1e-6
