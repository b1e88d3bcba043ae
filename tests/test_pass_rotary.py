"""Rotary embeddings in every spelling join the Gemm whose heads they rotate; what cannot says why."""

from __future__ import annotations

import numpy as np
import pytest
from coda_edge.passes import PIPELINE, grow_epilogue, merge_projections, rotary
from rewriting import Array, Rewritten, model, normal, rewrite

from coda_edge.epilogue.program import EpilogueProgram, Rows

_PASSES = [grow_epilogue.PASS, rotary.PASS]
_HEADS, _D = 3, 8


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


_CONSTANTS: dict[str, Array] = {
    "w": normal(12, _HEADS * _D, seed=1),
    "b": normal(_HEADS * _D, seed=5),
    "table": normal(40, _D, seed=6),
    "halftable": normal(40, _D // 2, seed=7),
    "split": ints(0, 0, _HEADS, _D),
    "split1": ints(0, 0, 1, _D),
    "split2": ints(0, 0, 2, _D),
    "to_pairs": ints(0, 0, _HEADS, _D // 2, 2),
    "to_rows": ints(0, 0, 0, 2, _D // 2),
    "to_head": ints(0, 0, 0, _D),
    "to_heads": ints(0, 0, _HEADS, _D),
    **{f"i{n}": ints(n) for n in (0, 1, 2, 3, 4, 6, 8)},
    "last": ints(-1),
    "end": ints(np.iinfo(np.int64).max),
    "one": np.float32(0.5),
    "zero": ints(0)[0],
    "uno": ints(1)[0],
}
_HEADS_OF = "p = MatMul(x, w) a = Add(p, b) r = Reshape(a, split) t = Transpose <perm = [0, 2, 1, 3]> (r)"
_HALVES = (
    "l = Slice(t, i0, i4, last) h = Slice(t, i4, i8, last) n = Neg(h) c = Concat <axis = -1> (n, l) "
    "m = Mul(t, cos) s = Mul(c, sin) y = Add(m, s)"
)
_SPLIT_HALVES = (
    "l = Slice(t, i0, i4, last) h = Slice(t, i4, i8, last) lc = Mul(l, cos) hs = Mul(h, sin) u = Sub(lc, hs) "
    "ls = Mul(sin, l) hc = Mul(h, cos) v = Add(ls, hc) y = Concat <axis = -1> (u, v)"
)
_NEIGHBOURS = (
    "l = Slice(t, i0, end, last, i2) h = Slice(t, i1, end, last, i2) lc = Mul(l, cos) hs = Mul(h, sin) u = Sub(lc, hs) "
    "ls = Mul(l, sin) hc = Mul(h, cos) v = Add(ls, hc) u1 = Unsqueeze(u, last) v1 = Unsqueeze(v, last) "
    "z = Concat <axis = -1> (u1, v1) y = Reshape(z, to_head)"
)
_ROTATED_NEIGHBOURS = (
    "l = Slice(t, i0, end, last, i2) h = Slice(t, i1, end, last, i2) n = Neg(h) n1 = Unsqueeze(n, last) l1 = Unsqueeze(l, last) "
    "z = Concat <axis = -1> (n1, l1) c = Reshape(z, to_head) m = Mul(t, cos) s = Mul(c, sin) y = Add(m, s)"
)
_STACKED = (
    "q = Reshape(t, to_rows) l = Gather <axis = 3> (q, zero) h = Gather <axis = 3> (q, uno) lc = Mul(l, cos) hs = Mul(h, sin) "
    "u = Sub(lc, hs) ls = Mul(l, sin) hc = Mul(h, cos) v = Add(ls, hc) u1 = Unsqueeze(u, i3) v1 = Unsqueeze(v, i3) "
    "z = Concat <axis = 3> (u1, v1) y = Reshape(z, to_head)"
)
_SHARED = (
    "c0 = Unsqueeze(cs, i1) s0 = Unsqueeze(sn, i1) cos = Concat <axis = -1> (c0, c0) sin = Concat <axis = -1> (s0, s0)"
)
_WHOLE = "cos = Unsqueeze(cs, i1) sin = Unsqueeze(sn, i1)"

_SPELLINGS = {
    "halves by concatenation": (f"{_SHARED} {_HALVES}", _D // 2, 2),
    "halves of two tables": (f"{_WHOLE} {_HALVES}", _D, 4),
    "halves apart": (f"{_WHOLE} {_SPLIT_HALVES}", _D // 2, 2),
    "neighbours apart": (f"{_WHOLE} {_NEIGHBOURS}", _D // 2, 2),
    "neighbours by rotation": (f"{_WHOLE} {_ROTATED_NEIGHBOURS}", _D, 4),
    "halves stacked": (f"{_WHOLE} {_STACKED}", _D // 2, 2),
}
_SIZES = [(1, 1), (3, 1), (1, 7), (3, 7)]


def graph(body: str, width: int, shared: bool, out: str = f"float[B, {_HEADS}, S, {_D}] y") -> str:
    batch = 1 if shared else "B"
    return (
        f"g (float[B, S, 12] x, float[{batch}, S, {width}] cs, float[{batch}, S, {width}] sn) => ({out}) {{ {body} }}"
    )


def feeds(batch: int, length: int, width: int, shared: bool) -> dict[str, Array]:
    angles = normal(1 if shared else batch, length, width, seed=9)
    return {"x": normal(batch, length, 12), "cs": np.cos(angles), "sn": np.sin(angles)}


def check(done: Rewritten, width: int, shared: bool) -> None:
    for batch, length in _SIZES:
        assert done.error(feeds(batch, length, width, shared)) < 2e-6, (batch, length)


def program(done: Rewritten) -> EpilogueProgram:
    return EpilogueProgram.parse(done.node("Gemm").attrs["epilogue"])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("case", _SPELLINGS)
def test_every_spelling_is_an_epilogue(case: str, shared: bool) -> None:
    body, width, operands = _SPELLINGS[case]
    done = rewrite(model(graph(f"{_HEADS_OF} {body}", width, shared), _CONSTANTS), _PASSES)
    assert done.ops()["Gemm"] == 1 and not {"Mul", "Add", "Reshape", "Transpose"} & set(done.ops())
    p = program(done)
    tiles = [q for q in p.params if q.period]
    assert [(q.rows, q.period) for q in tiles] == [(Rows.POSITION if shared else Rows.ALL, _D // 2)] * operands
    (output,) = p.outputs
    assert output.heads == _D and bool(output.halves) == ("halves" in case)
    check(done, width, shared)


@pytest.mark.parametrize("shared", [True, False])
def test_rotation_before_the_heads_are_moved(shared: bool) -> None:
    split = "cos = Unsqueeze(cs, i2) sin = Unsqueeze(sn, i2) p = MatMul(x, w) t = Reshape(p, split)"
    moved = f"{split} {_HALVES.replace('y = ', 'k = ')} y = Transpose <perm = [0, 2, 1, 3]> (k)"
    done = rewrite(model(graph(moved, _D, shared), _CONSTANTS), _PASSES)
    assert done.ops()["Gemm"] == 1 and not {"Mul", "Add", "Reshape", "Transpose"} & set(done.ops())
    check(done, _D, shared)
    kept = rewrite(
        model(graph(f"{split} {_HALVES}", _D, shared, f"float[B, S, {_HEADS}, {_D}] y"), _CONSTANTS), _PASSES
    )
    assert kept.ops()["Gemm"] == kept.ops()["Transpose"] == 1 and "Mul" not in kept.ops()
    check(kept, _D, shared)


def test_pairs_as_an_axis_of_their_own() -> None:
    """Complex numbers: ``[B, S, H, D/2, 2]`` times cosines ``[B, S, 1, D/2, 1]``."""
    body = """p = MatMul(x, w) q = Reshape(p, to_pairs) c2 = Unsqueeze(cs, i2) cos = Unsqueeze(c2, last) s2 = Unsqueeze(sn, i2)
        sin = Unsqueeze(s2, last) l = Slice(q, i0, i1, last) h = Slice(q, i1, i2, last) lc = Mul(l, cos) hs = Mul(h, sin)
        u = Sub(lc, hs) ls = Mul(l, sin) hc = Mul(h, cos) v = Add(ls, hc) z = Concat <axis = -1> (u, v)
        k = Reshape(z, to_heads) y = Transpose <perm = [0, 2, 1, 3]> (k)"""
    done = rewrite(model(graph(body, _D // 2, False), _CONSTANTS), _PASSES)
    assert done.ops()["Gemm"] == 1 and not {"Mul", "Reshape", "Transpose"} & set(done.ops())
    assert not program(done).outputs[0].halves
    check(done, _D // 2, False)


def test_neighbours_in_a_part_of_the_head() -> None:
    """The first six of eight columns are rotated: a mask chooses, and operands are as wide as all pairs."""
    body = """cos = Unsqueeze(cs, i1) sin = Unsqueeze(sn, i1) f = Slice(t, i0, i6, last) rest = Slice(t, i6, i8, last)
        l = Slice(f, i0, end, last, i2) h = Slice(f, i1, end, last, i2) lc = Mul(l, cos) hs = Mul(h, sin) u = Sub(lc, hs)
        ls = Mul(l, sin) hc = Mul(h, cos) v = Add(ls, hc) u1 = Unsqueeze(u, last) v1 = Unsqueeze(v, last)
        z = Concat <axis = -1> (u1, v1) k = Reshape(z, to_part) y = Concat <axis = -1> (k, rest)"""
    m = model(graph(f"{_HEADS_OF} {body}", 3, True), _CONSTANTS | {"to_part": ints(0, 0, 0, 6)})
    done = rewrite(m, _PASSES)
    assert done.ops()["Gemm"] == 1 and "Mul" not in done.ops()
    assert {q.period for q in program(done).params} == {None, 4}
    check(done, 3, True)


_ROTATE = "{n}n = Neg({n}h) {n}c = Concat <axis = -1> ({n}n, {n}l) {n}m = Mul({n}f, {cos}) {n}s = Mul({n}c, {sin}) {n}k = Add({n}m, {n}s)"


def part(name: str, start: int, end: int, cos: str = "cos", sin: str = "sin") -> str:
    """The rotation ``{name}k`` of halves of the columns from ``start`` to ``end`` of t."""
    middle = (start + end) // 2
    bounds = {"f": (start, end), "l": (start, middle), "h": (middle, end)}
    cut = " ".join(f"{name}{x} = Slice(t, i{a}, i{b}, last)" for x, (a, b) in bounds.items())
    return f"{cut} {_ROTATE.format(n=name, cos=cos, sin=sin)}"


_REST = "rest = Slice(t, i{}, i{}, last) y = Concat <axis = -1> ({})"
_IN_PARTS = {
    "first part": (f"{part('a', 0, 4)} {_REST.format(4, 8, 'ak, rest')}", "[0:4]"),
    "last part": (f"{part('a', 4, 8)} {_REST.format(0, 4, 'rest, ak')}", "[4:8]"),
    "both axes of an image": (
        f"{part('a', 0, 4)} {part('b', 4, 8, 'sin', 'cos')} y = Concat <axis = -1> (ak, bk)",
        "[0:4, 4:8]",
    ),
    "from pairs to halves": (
        "pairs = Reshape(t, to_pairs4) across = Transpose <perm = [0, 1, 2, 4, 3]> (pairs) q = Reshape(across, to_head) "
        "f = Concat <axis = -1> (cos, cos) g = Concat <axis = -1> (sin, sin) l = Slice(q, i0, i4, last) h = Slice(q, i4, i8, last) "
        "n = Neg(h) c = Concat <axis = -1> (n, l) m = Mul(q, f) s = Mul(c, g) y = Add(m, s)",
        "",
    ),
}


@pytest.mark.parametrize("case", _IN_PARTS)
def test_pairs_lie_in_parts_of_the_head(case: str) -> None:
    body, stored = _IN_PARTS[case]
    m = model(graph(f"{_HEADS_OF} {_WHOLE} {body}", 4, True), _CONSTANTS | {"to_pairs4": ints(0, 0, 0, 4, 2)})
    done = rewrite(m, _PASSES)
    assert done.ops()["Gemm"] == 1 and "Mul" not in done.ops()
    assert f"heads[{_D}] halves{stored}" in str(program(done))
    check(done, 4, True)


def test_heads_of_a_packed_product_whose_halves_are_ranges_of_it() -> None:
    """One head of keys between queries and values: its halves could be taken from the product, but it is read whole too."""
    body = f"""p = MatMul(x, w) k = Slice(p, i8, i16, last) r = Reshape(k, split1) t = Transpose <perm = [0, 2, 1, 3]> (r)
        q = Slice(p, i0, i8, last) {_WHOLE} {_HALVES}"""
    out = f"float[B, 1, S, {_D}] y, float[B, S, 8] q"
    done = rewrite(model(graph(body, _D, True, out), _CONSTANTS | {"i16": ints(16)}), PIPELINE)
    assert done.ops() == {"Gemm": 1, "Map": 2}, "halves of cosines and of sines"
    assert "halves" in str(program(done))
    check(done, _D, True)


def test_pairs_that_lie_otherwise_are_refused() -> None:
    """Column 0 with 3 and 1 with 2."""
    body = """l = Slice(t, i0, i2, last) h = Slice(t, i2, i4, last) rest = Slice(t, i4, i8, last) back = Gather <axis = 3> (h, swap)
        u = Mul(l, back) v = Gather <axis = 3> (u, swap) y = Concat <axis = -1> (u, v, rest)"""
    m = model(graph(f"{_HEADS_OF} {body}", 4, True), _CONSTANTS | {"swap": ints(1, 0)})
    done = rewrite(m, _PASSES)
    assert "neighbours or as halves" in done.log.refusals[-1].reason
    check(done, 4, True)


def test_operands_from_tables_that_positions_index() -> None:
    body = f"{_HEADS_OF} cs = Gather(table, i) sn = Gather(half, i) cos = Unsqueeze(cs, i1) sin = Unsqueeze(sn, i1) {_HALVES}"
    twice = np.concatenate([_CONSTANTS["halftable"]] * 2, -1)
    m = model(
        f"g (float[B, S, 12] x, int64[B, S] i) => (float[B, {_HEADS}, S, {_D}] y) {{ {body} }}",
        _CONSTANTS | {"half": twice},
    )
    done = rewrite(m, _PASSES)
    assert done.ops() == {"Gemm": 1, "Gather": 3}, "equal halves of a table are one look-up"
    for batch, length in _SIZES:
        positions = np.random.default_rng(0).integers(0, 40, (batch, length))
        assert done.error({"x": normal(batch, length, 12), "i": positions}) < 2e-6


def test_constant_operands() -> None:
    angles = normal(1, 1, 5, _D, seed=8)
    m = model(
        f"g (float[B, 5, 12] x) => (float[B, {_HEADS}, 5, {_D}] y) {{ {_HEADS_OF} {_HALVES} }}",
        _CONSTANTS | {"cos": np.cos(angles), "sin": np.sin(angles)},
    )
    done = rewrite(m, _PASSES)
    assert done.ops() == {"Gemm": 1}
    assert done.error({"x": normal(3, 5, 12)}) < 2e-6


def test_scales_and_columns_join_too() -> None:
    body = f"{_SHARED} {_HALVES.replace('y = ', 'k = ')} g = Mul(k, gain) y = Mul(g, one)"
    m = model(graph(f"{_HEADS_OF} {body}", _D // 2, True), _CONSTANTS | {"gain": normal(_D, seed=11)})
    done = rewrite(m, _PASSES)
    assert done.ops()["Gemm"] == 1 and "Mul" not in done.ops()
    check(done, _D // 2, True)


def test_heads_that_are_read_unrotated_too() -> None:
    out = f"float[B, {_HEADS}, S, {_D}] y, float[B, {_HEADS}, S, {_D}] t"
    done = rewrite(model(graph(f"{_HEADS_OF} {_SHARED} {_HALVES}", _D // 2, True, out), _CONSTANTS), _PASSES)
    assert len(program(done).outputs) == 2
    check(done, _D // 2, True)


def test_a_half_that_is_read_elsewhere_is_refused() -> None:
    out = f"float[B, {_HEADS}, S, {_D}] y, float[B, {_HEADS}, S, {_D // 2}] l"
    done = rewrite(model(graph(f"{_HEADS_OF} {_SHARED} {_HALVES}", _D // 2, True, out), _CONSTANTS), _PASSES)
    assert "a part of the heads is read elsewhere (tensor 'l')" in done.log.refusals[-1].reason
    check(done, _D // 2, True)


def test_an_operand_that_differs_from_head_to_head_is_refused() -> None:
    body = f"{_HEADS_OF} {_HALVES}"
    m = model(
        f"g (float[B, S, 12] x, float[1, {_HEADS}, S, {_D}] cos, float[1, 1, S, {_D}] sin) => (float[B, {_HEADS}, S, {_D}] y) {{ {body} }}",
        _CONSTANTS,
    )
    done = rewrite(m, _PASSES)
    assert "differs from head to head" in done.log.refusals[-1].reason
    found = {"cos": normal(1, _HEADS, 7, _D), "sin": normal(1, 1, 7, _D)}
    assert done.error({"x": normal(3, 7, 12), **found}) < 2e-6


def test_more_than_pairs_are_refused() -> None:
    body = """cos = Unsqueeze(cs, i1) sin = Unsqueeze(sn, i1) f = Slice(t, i1, i8, last) e = Slice(t, i0, i1, last)
        c = Concat <axis = -1> (f, e) m = Mul(t, cos) s = Mul(c, sin) y = Add(m, s)"""
    done = rewrite(model(graph(f"{_HEADS_OF} {body}", _D, True), _CONSTANTS), _PASSES)
    assert "depend on each other, expected pairs" in done.log.refusals[-1].reason
    check(done, _D, True)


def test_norms_of_heads_are_left_alone() -> None:
    body = f"{_HEADS_OF} q = Mul(t, t) m = ReduceMean(q, last) y = Div(t, m)"
    done = rewrite(model(graph(body, _D, True), _CONSTANTS), _PASSES)
    assert done.ops()["Gemm"] == 1 and not [r for r in done.log.refusals if r.rule == "rotary"]
    check(done, _D, True)


def attention(q: str, k: str, v: str, apart: bool) -> str:
    """q and k rotated, in one of two spellings, and v as it is."""
    halves = "{n}l = Slice({n}t, i0, i4, last) {n}h = Slice({n}t, i4, i8, last) "
    joint = "{n}n = Neg({n}h) {n}c = Concat <axis = -1> ({n}n, {n}l) {n}m = Mul({n}t, cos) {n}s = Mul({n}c, sin) {n} = Add({n}m, {n}s) "
    both = (
        "{n}lc = Mul({n}l, c0) {n}hs = Mul({n}h, s0) {n}u = Sub({n}lc, {n}hs) {n}ls = Mul({n}l, s0) {n}hc = Mul({n}h, c0) "
        "{n}w = Add({n}ls, {n}hc) {n} = Concat <axis = -1> ({n}u, {n}w) "
    )
    rotate = "".join((halves + (both if apart else joint)).format(n=n) for n in "qk")
    return f"{q} {k} {v} {_SHARED} {rotate}"


_HEADS_MOVED = "{n}r = Reshape({n}p, {split}) {t} = Transpose <perm = [0, 2, 1, 3]> ({n}r)"


@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_queries_keys_and_values_are_one_gemm(keys: int, joined: bool, apart: bool) -> None:
    split = {"q": "split", "k": f"split{keys}", "v": f"split{keys}"}
    moved = {n: _HEADS_MOVED.format(n=n, split=split[n], t=f"{n}t" if n != "v" else "v") for n in "qkv"}
    start = np.cumsum([0, _HEADS * _D, keys * _D, keys * _D])
    constants = _CONSTANTS | {f"i{n}": ints(int(n)) for n in start}
    constants |= {
        "packed": normal(12, int(start[3]), seed=4),
        "wk": normal(12, keys * _D, seed=2),
        "wv": normal(12, keys * _D, seed=3),
    }
    if joined:
        parts = [
            f"{n}p = Slice(p, i{a}, i{b}, last) {moved[n]}" for n, a, b in zip("qkv", start[:3], start[1:], strict=True)
        ]
        parts[0] = f"p = MatMul(x, packed) {parts[0]}"
    else:
        parts = [f"{n}p = MatMul(x, {w}) {moved[n]}" for n, w in (("q", "w"), ("k", "wk"), ("v", "wv"))]
    out = f"float[B, {_HEADS}, S, {_D}] q, float[B, {keys}, S, {_D}] k, float[B, {keys}, S, {_D}] v"
    m = model(graph(attention(*parts, apart), _D // 2, True, out), constants)
    done = rewrite(m, [*_PASSES, merge_projections.PASS])
    assert done.ops()["Gemm"] == 1 and not {"Mul", "Slice", "Reshape"} & set(done.ops())
    p = program(done)
    assert len([q for q in p.params if q.period]) == 2, "q and k share cosines and sines"
    stored = sorted((p.output_width(o, int(start[3])), o.heads, bool(o.halves)) for o in p.outputs)
    assert stored == [(keys * _D, _D, False), (keys * _D, _D, True), (_HEADS * _D, _D, True)]
    check(done, _D // 2, True)


def test_the_same_columns_stored_twice_are_refused() -> None:
    """The heads and, beside them, the plain row: the columns cannot be in two orders."""
    body = f"{_HEADS_OF} {_SHARED} {_HALVES} z = Tanh(a)"
    m = model(graph(body, _D // 2, True, f"float[B, {_HEADS}, S, {_D}] y, float[B, S, {_HEADS * _D}] z"), _CONSTANTS)
    done = rewrite(m, _PASSES)
    assert "also stored another way" in done.log.refusals[-1].reason
    check(done, _D // 2, True)


def test_residual_before_the_rotation_is_refused() -> None:
    body = f"p = MatMul(x, w) a = Add(p, residual) r = Reshape(a, split) t = Transpose <perm = [0, 2, 1, 3]> (r) {_SHARED} {_HALVES}"
    text = graph(body, _D // 2, True).replace(
        "float[B, S, 12] x", f"float[B, S, 12] x, float[B, S, {_HEADS * _D}] residual"
    )
    done = rewrite(model(text, _CONSTANTS), _PASSES)
    assert "reads a whole tensor" in done.log.refusals[-1].reason
    assert done.error(feeds(3, 7, _D // 2, True) | {"residual": normal(3, 7, _HEADS * _D)}) < 2e-6


def test_it_runs_between_growth_and_merging() -> None:
    names = [p.name for p in PIPELINE]
    assert names.index("grow_epilogue") < names.index("rotary") < names.index("merge_projections")
