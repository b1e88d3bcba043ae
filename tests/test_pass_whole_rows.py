"""What is done to all rows but a few is done to all, and those few are chosen: rotations that leave class tokens alone."""

from __future__ import annotations

import numpy as np
import pytest
from coda_edge.passes import PIPELINE, whole_rows
from rewriting import Array, model, normal, rewrite

from coda_edge.ir import producer

_D, _N = 6, 2


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


_CONSTANTS: dict[str, Array] = {
    "n": ints(_N),
    "minus": ints(-_N),
    "zero": ints(0),
    "end": ints(1 << 40),
    "axis": ints(2),
    "last": ints(3),
    "half": ints(_D // 2),
    "one": ints(1),
    "w": normal(8, 3 * _D, seed=1),
    "wk": normal(8, 3 * _D, seed=2),
    "wv": normal(8, 3 * _D, seed=3),
    "split": ints(0, 0, 3, _D),
    "merge": ints(0, 0, 3 * _D),
    "gain": normal(_D, seed=2),
}


def rotated(t: str = "") -> str:
    """``r`` of ``m``; names begin with ``t``."""
    return (
        f"{t}l = Slice({t}m, zero, half, last) {t}h = Slice({t}m, half, end, last) {t}g = Neg({t}h) "
        f"{t}c = Concat <axis = -1> ({t}g, {t}l) {t}a = Mul({t}m, cos) {t}b = Mul({t}c, sin) {t}r = Add({t}a, {t}b)"
    )


def first(x: str = "x", y: str = "y", t: str = "") -> str:
    """The first rows of ``x``, and the others rotated."""
    parts = f"{t}p = Slice({x}, zero, n, axis) {t}m = Slice({x}, n, end, axis)"
    return f"{parts} {rotated(t)} {y} = Concat <axis = 2> ({t}p, {t}r)"


_FIRST = first()
_LAST = f"p = Slice(x, minus, end, axis) m = Slice(x, zero, minus, axis) {rotated()} y = Concat <axis = 2> (r, p)"


def graph(body: str, rows: str, others: str) -> str:
    return f"g (float[B, 3, {rows}, {_D}] x, float[{others}, {_D}] cos, float[{others}, {_D}] sin) => (float[B, 3, {rows}, {_D}] y) {{ {body} }}"


def feeds(batch: int, rows: int) -> dict[str, Array]:
    return {"x": normal(batch, 3, rows, _D), "cos": normal(rows - _N, _D, seed=4), "sin": normal(rows - _N, _D, seed=5)}


@pytest.mark.parametrize("sizes", [("7", "5"), ("S", "T")], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("body", [_FIRST, _LAST], ids=["first", "last"])
def test_rows_left_alone_are_chosen(body: str, sizes: tuple[str, str]) -> None:
    done = rewrite(model(graph(body, *sizes), _CONSTANTS), [whole_rows.PASS])
    assert done.log.rewrites["whole_rows"] == 1 and done.ops()["Where"] == 1
    for batch in (1, 3):
        assert done.error(feeds(batch, 7)) == 0.0


def test_operands_of_one_row_stay() -> None:
    body = "p = Slice(x, zero, n, axis) m = Slice(x, n, end, axis) r = Mul(m, gain) y = Concat <axis = 2> (p, r)"
    text = f"g (float[B, 3, 7, {_D}] x) => (float[B, 3, 7, {_D}] y) {{ {body} }}"
    done = rewrite(model(text, _CONSTANTS), [whole_rows.PASS])
    assert done.ops() == {"Mul": 1, "Where": 1}
    assert done.error({"x": normal(2, 3, 7, _D)}) == 0.0


@pytest.mark.parametrize(
    "body",
    [
        _FIRST.replace("a = Mul(m, cos)", "t = ReduceMean <keepdims = 1> (m, axis) a = Mul(t, cos)"),
        _FIRST.replace("p = Slice(x, zero, n, axis)", "p = Slice(x, one, last, axis)"),
        _FIRST.replace("m = Slice(x, n, end, axis)", "m0 = Slice(x, one, end, axis) m = Slice(m0, one, end, axis)"),
    ],
    ids=["rows that meet", "other rows", "rows behind others"],
)
def test_what_is_no_such_thing_stays(body: str) -> None:
    done = rewrite(model(graph(body, "7", "5"), _CONSTANTS), [whole_rows.PASS])
    assert done.error(feeds(2, 7)) == 0.0
    if "m0" not in body:
        assert done.log.rewrites["whole_rows"] == 0 and "Where" not in done.ops()


@pytest.mark.parametrize(
    ("rest", "outputs"),
    [("m = Slice(x, n, end, axis) r = Neg(m)", f", float[B, 3, 5, {_D}] r"), ("r = Slice(x, n, end, axis)", "")],
    ids=["returned", "nothing is done"],
)
def test_rows_that_are_returned_or_only_cut_stay(rest: str, outputs: str) -> None:
    text = f"g (float[B, 3, 7, {_D}] x) => (float[B, 3, 7, {_D}] y{outputs}) {{ p = Slice(x, zero, n, axis) {rest} y = Concat <axis = 2> (p, r) }}"
    done = rewrite(model(text, _CONSTANTS), [whole_rows.PASS])
    assert done.log.rewrites["whole_rows"] == 0
    assert done.error({"x": normal(2, 3, 7, _D)}) == 0.0


def test_a_rotation_of_all_but_class_tokens_is_an_epilogue() -> None:
    body = (
        "f = MatMul(z, w) fs = Reshape(f, split) qt = Transpose <perm = [0, 2, 1, 3]> (fs) e = MatMul(z, wk) es = Reshape(e, split) "
        f"kt = Transpose <perm = [0, 2, 1, 3]> (es) d = MatMul(z, wv) ds = Reshape(d, split) v = Transpose <perm = [0, 2, 1, 3]> (ds) {first('qt', 'q')} "
        f"{first('kt', 'kq', 'k')} j = Transpose <perm = [0, 1, 3, 2]> (kq) s = MatMul(q, j) u = Softmax(s) o = MatMul(u, v) "
        "w0 = Transpose <perm = [0, 2, 1, 3]> (o) y = Reshape(w0, merge)"
    )
    text = f"g (float[B, 7, 8] z, float[5, {_D}] cos, float[5, {_D}] sin) => (float[B, 7, {3 * _D}] y) {{ {body} }}"
    done = rewrite(model(text, _CONSTANTS), PIPELINE)
    assert done.ops()["Gemm"] == done.ops()["Attention"] == 1
    assert all(producer(t) is None for n in done.graph.nodes if n.op == "Map" for t in n.inputs)
    given = feeds(3, 7)
    assert done.error({"z": normal(3, 7, 8), "cos": given["cos"], "sin": given["sin"]}) < 2e-6
