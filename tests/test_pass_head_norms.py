"""Norms of heads, in every spelling, join the Gemm that makes the heads: five kernels a layer with QK-norm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from coda_edge.passes import PIPELINE
from rewriting import Array, model, normal, rewrite

from coda_edge import Session, optimize
from coda_edge.epilogue.program import EpilogueProgram, Kind
from coda_edge.ir import producer

_H, _G, _D, _K = 4, 2, 16, 24


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


_CONSTANTS: dict[str, Array] = {
    "wq": normal(_K, _H * _D, seed=1),
    "wk": normal(_K, _G * _D, seed=2),
    "wv": normal(_K, _G * _D, seed=3),
    "bq": normal(_H * _D, seed=4),
    "gq": normal(_D, seed=5),
    "gk": normal(_D, seed=6),
    "to_h": ints(0, 0, _H, _D),
    "to_g": ints(0, 0, _G, _D),
    "to_g1": ints(0, 0, 1, _D),
    "grouped": ints(0, _G, 1, 0, _D),
    "joined": ints(0, _H, -1, _D),
    "twice": ints(1, 1, _H // _G, 1, 1),
    "out": ints(0, 0, _H * _D),
    "two": np.float32(2),
    "eps": np.float32(1e-6),
    "tiny": np.float32(1e-12),
    "quarter": np.float32(0.25),
    "one": np.float32(1),
    "last": ints(-1),
    "half": ints(_D // 2),
    "zero": ints(0),
    "end": ints(99),
    "m1": ints(1),
}


def rms(x: str, gain: str, y: str) -> str:
    return (
        f"{y}s = Pow({x}, two) {y}m = ReduceMean <keepdims = 1> ({y}s, last) {y}e = Add({y}m, eps) {y}q = Sqrt({y}e) "
        f"{y}r = Div(one, {y}q) {y}n = Mul({x}, {y}r) {y} = Mul({gain}, {y}n)"
    )


def rope(x: str, y: str) -> str:
    return (
        f"{y}l = Slice({x}, zero, half, last) {y}h = Slice({x}, half, end, last) {y}g = Neg({y}h) "
        f"{y}c = Concat <axis = -1> ({y}g, {y}l) {y}a = Mul({x}, cos) {y}b = Mul({y}c, sin) {y} = Add({y}a, {y}b)"
    )


_ATTENTION = (
    "kt = Transpose <perm = [0, 1, 3, 2]> (kk) s = MatMul(qq, kt) z = Mul(s, quarter) p = Softmax(z) o = MatMul(p, vv) "
    "w = Transpose <perm = [0, 2, 1, 3]> (o) y = Reshape(w, out)"
)
_REPEAT = "k5 = Unsqueeze(kf, i2) kx = Tile(k5, twice) kk = Reshape(kx, joined) v5 = Unsqueeze(vt, i2) vx = Tile(v5, twice) vv = Reshape(vx, joined)"


def layer(between: str) -> str:
    """Queries and keys of ``between`` (from ``qh`` and ``kh``, ``[B, S, heads, D]``, to ``qq`` and ``kf``, ``[B, heads, S, D]``)."""
    return (
        f"g (float[B, S, {_K}] x, float[B, S, {_D}] cs, float[B, S, {_D}] sn) => (float[B, S, {_H * _D}] y) {{ "
        "q0 = MatMul(x, wq) q1 = Add(q0, bq) qh = Reshape(q1, to_h) k0 = MatMul(x, wk) kh = Reshape(k0, to_g) v0 = MatMul(x, wv) "
        f"vh = Reshape(v0, to_g) vt = Transpose <perm = [0, 2, 1, 3]> (vh) cos = Unsqueeze(cs, m1) sin = Unsqueeze(sn, m1) {between} "
        f"{_REPEAT} {_ATTENTION} }}"
    )


_MOVED = "qt = Transpose <perm = [0, 2, 1, 3]> (qn) kt0 = Transpose <perm = [0, 2, 1, 3]> (kn)"
_CONSTANTS["i2"] = ints(2)
_LAYERS = {
    "a norm, then a rotation": f"{rms('qh', 'gq', 'qn')} {rms('kh', 'gk', 'kn')} {_MOVED} {rope('qt', 'qq')} {rope('kt0', 'kf')}",
    "a rotation, then a norm": (
        "qt = Transpose <perm = [0, 2, 1, 3]> (qh) kt0 = Transpose <perm = [0, 2, 1, 3]> (kh) "
        f"{rope('qt', 'qr')} {rope('kt0', 'kr')} {rms('qr', 'gq', 'qq')} {rms('kr', 'gk', 'kf')}"
    ),
    "a norm alone": f"{rms('qh', 'gq', 'qn')} {rms('kh', 'gk', 'kn')} {_MOVED} qq = Identity(qt) kf = Identity(kt0)",
    "means taken off": (
        "qn = LayerNormalization <axis = -1, epsilon = 1e-5> (qh, gq) kn = LayerNormalization <axis = -1, epsilon = 1e-5> (kh, gk, gq) "
        f"{_MOVED} {rope('qt', 'qq')} {rope('kt0', 'kf')}"
    ),
    "unit vectors": (
        "ql = ReduceL2 <keepdims = 1> (qh, last) qm = Max(ql, tiny) qn = Div(qh, qm) "
        "kl = ReduceL2 <keepdims = 1> (kh, last) km = Max(kl, tiny) kn = Div(kh, km) "
        f"{_MOVED} qq = Identity(qt) kf = Identity(kt0)"
    ),
}


def feeds(batch: int, length: int) -> dict[str, Array]:
    angles = normal(batch, length, _D, seed=9)
    return {"x": normal(batch, length, _K), "cs": np.cos(angles), "sn": np.sin(angles)}


@pytest.mark.parametrize("case", _LAYERS)
def test_queries_keys_and_values_are_one_product(case: str) -> None:
    done = rewrite(model(layer(_LAYERS[case]), _CONSTANTS), PIPELINE)
    assert done.ops()["Gemm"] == done.ops()["Attention"] == 1
    assert set(done.ops()) <= {"Gemm", "Attention", "Map"}
    maps = [n for n in done.graph.nodes if n.op == "Map"]  # parts of the cosines and sines
    assert all(producer(t) is None for n in maps for t in n.inputs)
    program = EpilogueProgram.parse(done.node("Gemm").attrs["epilogue"])
    assert program.head == _D and Kind.HEAD in program.kinds().values()
    for batch, length in ((1, 1), (3, 1), (2, 7)):
        assert done.error(feeds(batch, length)) < 2e-6


def test_the_kernels_of_a_layer(tmp_path: Path) -> None:
    m = model(layer(_LAYERS["a norm, then a rotation"]), _CONSTANTS)
    optimize(m).save(tmp_path / "layer.coda")
    session = Session(tmp_path / "layer.coda")
    done = rewrite(m, [])
    for batch, length in ((1, 1), (2, 3), (3, 37)):
        given = feeds(batch, length)
        (expected,) = done.outputs(given)
        (found,) = session.run(None, given)
        assert np.abs(found - expected).max() < 2e-6 * np.abs(expected).max()


def test_a_mean_over_a_part_of_a_head_stays_outside() -> None:
    part = (
        "qp = Slice(qh, zero, half, last) qs = ReduceMean <keepdims = 1> (qp, last) qn = Sub(qh, qs) kn = Identity(kh)"
    )
    done = rewrite(model(layer(f"{part} {_MOVED} qq = Identity(qt) kf = Identity(kt0)"), _CONSTANTS), PIPELINE)
    assert done.ops()["Map"] >= 1
    assert done.error(feeds(2, 5)) < 2e-6


def test_columns_that_nothing_pairs_stay_as_they_are() -> None:
    done = rewrite(model(layer(_LAYERS["a norm alone"]), _CONSTANTS), PIPELINE)
    program = EpilogueProgram.parse(done.node("Gemm").attrs["epilogue"])
    assert not {"even", "odd", "interleave"} & {step.op for step in program.steps}
    assert not any(o.halves for o in program.outputs)


def test_a_norm_over_rows_that_are_too_wide_stays_outside() -> None:
    wide = 520
    text = f"g (float[B, S, 8] x) => (float[B, S, 1, {wide}] y) {{ p = MatMul(x, w) h = Reshape(p, one_head) {rms('h', 'gain', 'y')} }}"
    constants = {"w": normal(8, wide), "one_head": ints(0, 0, 1, wide), "gain": normal(wide, seed=1)}
    done = rewrite(model(text, {**_CONSTANTS, **constants}), PIPELINE)
    assert EpilogueProgram.parse(done.node("Gemm").attrs["epilogue"]).head == 0
    assert done.error({"x": normal(2, 3, 8)}) < 2e-6
