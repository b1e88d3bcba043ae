"""Sizes and indices that a caller controls: every run gives onnxruntime's result or a typed error, with 1 and 2 threads.

A kernel trusts the plan's sizes, so what the plan assumes of them must be refused before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from graphs import load_fixture
from rewriting import model, normal, run

import coda_edge
from coda_edge.bundle import to_bytes
from coda_edge.errors import CodaError, DataError, ShapeError
from coda_edge.frontend import load, to_normal_form

Array = npt.NDArray[Any]
FAR = 2**62


def ints(*values: int, shape: tuple[int, ...] | None = None) -> Array:
    """int64 numbers."""
    array = np.array(values, np.int64)
    return array if shape is None else array.reshape(shape)


def sizes(*shapes: tuple[int, ...], names: str = "xzm") -> dict[str, Array]:
    """Normal numbers of some shapes, for inputs named by a letter each."""
    return {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(zip(names, shapes, strict=False))}


@dataclass(frozen=True)
class Case:
    """A model, feeds on which it equals onnxruntime, and feeds that it refuses, each with part of the message."""

    graph: str
    constants: dict[str, Array]
    runs: list[dict[str, Array]]
    refuses: list[tuple[dict[str, Array], str]] = field(default_factory=list)
    error: type[CodaError] = ShapeError


ATTENTION = (
    "(float[b,2,s,8] q, float[c,2,t,8] k, float[d,2,u,8] v, float[e,1,f,g] m) => (float[b,2,s,8] y) "
    "{ kt = Transpose <perm = [0, 1, 3, 2]> (k) d0 = MatMul(q, kt) a = Add(d0, m) "
    "p = Softmax <axis = -1> (a) y = MatMul(p, v) }"
)


def attention(q: tuple[int, int], k: tuple[int, int], v: tuple[int, int], m: tuple[int, int, int]) -> dict[str, Array]:
    """Feeds of ``ATTENTION``: (batch, length) of q, k and v, (batch, rows, columns) of the mask."""
    shapes = [(b, 2, n, 8) for b, n in (q, k, v)] + [(m[0], 1, *m[1:])]
    return sizes(*shapes, names="qkvm")


SLICE = "(float[b,s] x) => (float[b,k] y) { y = Slice(x, first, last, axis, step) }"
COUNT = "n = Shape <start = 0, end = 1> (z)"


def sliced(first: int, last: int, step: int = 1) -> dict[str, Array]:
    """The constants of ``SLICE``."""
    return {"first": ints(first), "last": ints(last), "axis": ints(1), "step": ints(step)}


CASES = {
    "slice: the last three": Case(
        SLICE, sliced(-3, FAR), [sizes((2, 5)), sizes((2, 3))], [(sizes((2, 2)), "s = 2 is below 3: axis 1 of 'x'")]
    ),
    "slice: all but two": Case(
        SLICE, sliced(2, FAR), [sizes((2, 5)), sizes((2, 2))], [(sizes((2, 1)), "s = 1 is below 2: axis 1 of 'x'")]
    ),
    "slice: the first four": Case(SLICE, sliced(0, 4), [sizes((2, 5)), sizes((2, 4))], [(sizes((2, 3)), "below 4")]),
    "slice: all but the last": Case(SLICE, sliced(0, -1), [sizes((2, 5)), sizes((2, 1))], [(sizes((2, 0)), "below 1")]),
    "slice: backwards": Case(SLICE, sliced(-1, -FAR, -1), [sizes((2, 5)), sizes((2, 1)), sizes((2, 0))]),
    "slice: backwards from a place": Case(SLICE, sliced(2, -FAR, -1), [sizes((2, 3))], [(sizes((2, 2)), "below 3")]),
    "slice: every other": Case(
        SLICE, sliced(1, FAR, 2), [sizes((2, 5)), sizes((2, 6)), sizes((2, 1))], [(sizes((2, 0)), "s = 0 is below 1")]
    ),
    "slice: as many as another has": Case(
        "(float[b,s] x, float[t] z) => (float[b,k] y) { n = Shape(z) y = Slice(x, first, n, axis) }",
        {"first": ints(0), "axis": ints(1)},
        [sizes((2, 5), (3,)), sizes((2, 5), (5,)), sizes((2, 5), (0,))],
        [(sizes((2, 5), (6,)), "t = 6 exceeds s = 5: axis 1 of 'x'")],
    ),
    "slice: what is more than another": Case(
        "(float[b,s] x, float[b,t] z) => (float[b,s] y) { n = Shape <start = 1> (x) m = Shape <start = 1> (z) "
        "first = Sub(m, n) tail = Slice(z, first, last, axis) y = Add(x, tail) }",
        {"last": ints(FAR), "axis": ints(1)},
        [sizes((2, 3), (2, 5)), sizes((2, 5), (2, 5))],
        [(sizes((2, 5), (2, 3)), "s = 5 exceeds t = 3: axis 1 of 'z'")],
    ),
    "positions: rows of a table": Case(
        "(int64[b,s] i) => (float[b,s,4] y) { shape = Shape(i) one = Constant <value_int = 1> () "
        "length = Gather(shape, one) zero = Constant <value_int = 0> () r = Range(zero, length, one) "
        "p = Gather(positions, r) e = Gather(words, i) y = Add(e, p) }",
        {"positions": normal(6, 4), "words": normal(9, 4, seed=1)},
        [{"i": np.full(shape, 3)} for shape in ((2, 6), (1, 1), (0, 6), (2, 0))],
        [({"i": np.full((2, 7), 3)}, "s = 7 exceeds 6: rows of 'positions' (node 'p")],
    ),
    "positions: a square of a mask": Case(
        "(float[b,s,4] x) => (float[b,s,s] y) { n = Shape <start = 1, end = 2> (x) rows = Slice(mask, first, n, first) "
        "square = Slice(rows, first, n, axis) xt = Transpose <perm = [0, 2, 1]> (x) d = MatMul(x, xt) y = Add(d, square) }",
        {"mask": normal(6, 6), "first": ints(0), "axis": ints(1)},
        [sizes((2, 6, 4)), sizes((2, 1, 4))],
        [(sizes((2, 7, 4)), "s = 7 exceeds 6")],
    ),
    "a slice of which only the length is used": Case(
        f"(float[s] z) => (float[k] y) {{ {COUNT} part = Slice(table, first, n) m = Shape(part) y = Expand(one, m) }}",
        {"table": normal(6), "first": ints(0), "one": normal(1)},
        [sizes((6,), names="z"), sizes((2,), names="z")],
        [(sizes((7,), names="z"), "s = 7 exceeds 6")],
    ),
    "pairs": Case(
        "(float[b,s] x) => (float[k,2] y) { y = Reshape(x, pairs) }",
        {"pairs": ints(-1, 2)},
        [sizes((2, 3)), sizes((0, 3)), sizes((3, 4))],
        [(sizes((3, 3)), "differs from 0: a Reshape of 'x'")],
    ),
    "largest two": Case(
        "(float[b,s] x) => (float[b,2] y, int64[b,2] i) { y, i = TopK <axis = 1> (x, two) }",
        {"two": ints(2)},
        [sizes((2, 5)), sizes((3, 2)), sizes((0, 2))],
        [(sizes((2, 1)), "s = 1 is below 2: the elements to choose from")],
    ),
    "midpoints": Case(
        "(float[b,s] x) => (float[b,s] y) { n = Shape <start = 1> (x) l = Squeeze(n) f = Cast <to = 1> (l) "
        "c = Range(half, f, one) y = Add(x, c) }",
        {"half": np.array(0.5, np.float32), "one": np.array(1, np.float32)},
        [sizes((2, 5)), sizes((2, 1)), sizes((2, 0))],
    ),
    "pixels": Case(
        "(float[b,h,w] x) => (float[b,12] y) { f = Reshape(x, flat) y = Add(f, each) }",
        {"flat": ints(0, -1), "each": normal(12)},
        [sizes((2, 3, 4)), sizes((1, 12, 1))],
        [(sizes((2, 3, 5)), "h*w = 15 exceeds 12"), (sizes((2, 2, 4)), "is below 12")],
    ),
    "windows": Case(
        "(float[b,s] x) => (float[b,w,4] y, float[b,s] z) { n = Shape <start = 1> (x) m = Div(n, four) l = Shape <end = 1> (x) "
        "h = Concat <axis = 0> (l, m, four) r = Reshape(x, h) y = Neg(r) f = Concat <axis = 0> (l, n) g = Reshape(y, f) z = Add(x, g) }",
        {"four": ints(4)},
        [sizes((2, 8)), sizes((1, 12)), sizes((3, 0))],
        [(sizes((2, 6)), "s % 4 = 2 differs from 0")],
    ),
    "split": Case(
        "(float[b,s] x) => (float[b,2] y, float[b,3] z) { y, z = Split <axis = 1> (x, parts) }",
        {"parts": ints(2, 3)},
        [sizes((2, 5)), sizes((0, 5))],
        [(sizes((2, 6)), "dimension 1 is 6, expected 5"), (sizes((2, 4)), "dimension 1 is 4, expected 5")],
    ),
    "range": Case(
        f"(float[t] z, float[s] x) => (int64[k] y) {{ {COUNT} m = Shape(x) axis = Constant <value_ints = [0]> () "
        "first = Squeeze(n, axis) last = Squeeze(m, axis) one = Constant <value_int = 1> () y = Range(first, last, one) }",
        {},
        [sizes((5,), (2,)), sizes((5,), (5,)), sizes((5,), (0,))],
        [(sizes((2,), (5,)), "t = 5 exceeds s = 2: the length of a range")],
    ),
    "pad: crop": Case(
        "(float[s] x) => (float[k] y) { y = Pad(x, by) }",
        {"by": ints(-1, -2)},
        [sizes((5,)), sizes((3,))],
        [(sizes((2,)), "s = 2 is below 3: padding of axis 0 of 'x'")],
    ),
    "pad: reflect": Case(
        '(float[s] x) => (float[k] y) { y = Pad <mode = "reflect"> (x, by) }',
        {"by": ints(3, 2)},
        [sizes((5,)), sizes((4,))],
        [(sizes((3,)), "s = 3 is below 4"), (sizes((0,)), "s = 0 is below 4")],
    ),
    "pad: edge": Case(
        '(float[s] x) => (float[k] y) { y = Pad <mode = "edge"> (x, by) }',
        {"by": ints(3, 2)},
        [sizes((5,)), sizes((1,))],
        [(sizes((0,)), "s = 0 is below 1")],
    ),
    "gather: rows": Case(
        "(int64[b,s] i) => (float[b,s,4] y) { y = Gather(table, i) }",
        {"table": normal(7, 4)},
        [{"i": ints(0, 6, -7, shape=(1, 3))}, {"i": ints(shape=(0, 3))}],
        [
            ({"i": ints(*bad, shape=(1, len(bad)))}, "out of range")
            for bad in ((0, 7), (-8, 0), (FAR, 0), (0, -(2**63)))
        ],
        DataError,
    ),
    "gather: columns": Case(
        "(float[b,s] x, int64[k] i) => (float[b,k] y) { y = Gather <axis = 1> (x, i) }",
        {},
        [sizes((3, 5)) | {"i": ints(4, -5)}, sizes((3, 5)) | {"i": ints()}],
        [(sizes((3, 5)) | {"i": ints(5)}, "out of range"), (sizes((3, 0)) | {"i": ints(0)}, "out of range")],
        DataError,
    ),
    "gather elements: places": Case(
        "(float[b,s] x, int64[c,k] i) => (float[c,k] y) { y = GatherElements <axis = 1> (x, i) }",
        {},
        [sizes((3, 5)) | {"i": ints(4, -5, 0, 1, shape=(2, 2))}],
        [(sizes((2, 2)) | {"i": ints(2, 0, 0, 1, shape=(2, 2))}, "out of range")],
        DataError,
    ),
    "gather elements: more rows than there are": Case(
        "(float[b,s] x, int64[c,k] i) => (float[c,k] y) { y = GatherElements <axis = 1> (x, i) }",
        {},
        [sizes((2, 5)) | {"i": ints(4, 3, shape=(2, 1))}],
        [(sizes((1, 5)) | {"i": ints(4, 3, shape=(2, 1))}, "c = 2 exceeds b = 1: rows of 'x'")],
    ),
    "gather nd: places": Case(
        "(float[b,s,4] x, int64[k,2] i) => (float[k,4] y) { y = GatherND(x, i) }",
        {},
        [sizes((3, 5, 4)) | {"i": ints(2, 4, -1, -5, shape=(2, 2))}],
        [(sizes((3, 5, 4)) | {"i": ints(*bad, shape=(1, 2))}, "out of range") for bad in ((3, 0), (0, 5), (0, -6))],
        DataError,
    ),
    "gather nd: batches": Case(
        "(float[b,s] x, int64[c,1] i) => (float[c] y) { y = GatherND <batch_dims = 1> (x, i) }",
        {},
        [sizes((3, 5)) | {"i": ints(4, 0, 1, shape=(3, 1))}],
        [(sizes((2, 5)) | {"i": ints(4, 0, 1, shape=(3, 1))}, "input 'i': dimension 0 is 3, expected b = 2")],
    ),
    "gather: the last of none": Case(
        "(float[b,s,8] x) => (float[b,5] y) { one = Constant <value_int = -1> () last = Gather <axis = 1> (x, one) "
        "y = MatMul(last, w) }",
        {"w": normal(8, 5)},
        [sizes((2, 3, 8)), sizes((0, 3, 8))],
        [(sizes((2, 0, 8)), "s = 0 is below 1: axis 1 of 'x'")],
    ),
    "broadcast: two names of one size": Case(
        "(float[b,s] x, float[c,s] z) => (float[b,s] y) { y = Add(x, z) }",
        {},
        [sizes((2, 3), (2, 3)), sizes((1, 3), (1, 3))],
        [
            (sizes((2, 3), (1, 3)), "input 'z': dimension 0 is 1, expected b = 2 (from input 'x')"),
            (sizes((1, 3), (2, 3)), "input 'z': dimension 0 is 2, expected b = 1 (from input 'x')"),
        ],
    ),
    "broadcast: a constant": Case(
        "(float[b,s] x) => (float[b,s] y) { y = Add(x, five) }",
        {"five": normal(5)},
        [sizes((2, 5)), sizes((0, 5))],
        [(sizes((2, 1)), "dimension 1 is 1, expected 5"), (sizes((2, 4)), "dimension 1 is 4, expected 5")],
    ),
    "expand": Case(
        "(float[b,s] x, float[c,t] z) => (float[c,t] y) { n = Shape(z) y = Expand(x, n) }",
        {},
        [sizes((2, 3), (2, 3))],
        [(sizes((1, 3), (2, 3)), "expected b = 1"), (sizes((2, 3), (2, 4)), "dimension 1 is 4, expected s = 3")],
    ),
    "squeeze": Case(
        "(float[b,s] x) => (float[s] y) { axis = Constant <value_ints = [0]> () q = Squeeze(x, axis) y = Relu(q) }",
        {},
        [sizes((1, 3))],
        [(sizes((2, 3)), "dimension 0 is 2, expected 1")],
    ),
    "concat": Case(
        "(float[b,s] x, float[c,t] z) => (float[b,k] y) { y = Concat <axis = 1> (x, z) }",
        {},
        [sizes((2, 3), (2, 4)), sizes((2, 0), (2, 4)), sizes((2, 3), (2, 0)), sizes((0, 3), (0, 2))],
        [(sizes((2, 3), (3, 4)), "input 'z': dimension 0 is 3, expected b = 2 (from input 'x')")],
    ),
    "matrix product": Case(
        "(float[b,s,d] x, float[c,e,t] z) => (float[b,s,t] y) { y = MatMul(x, z) }",
        {},
        [
            sizes((2, 5, 8), (2, 8, 3)),
            sizes((2, 5, 0), (2, 0, 3)),
            sizes((0, 5, 8), (0, 8, 3)),
            sizes((2, 0, 8), (2, 8, 3)),
            sizes((2, 5, 8), (2, 8, 0)),
        ],
        [
            (sizes((2, 5, 8), (2, 7, 3)), "input 'z': dimension 1 is 7, expected d = 8"),
            (sizes((2, 5, 8), (1, 8, 3)), "input 'z': dimension 0 is 1, expected b = 2"),
        ],
    ),
    "gemm with a residual": Case(
        "(float[b,s,8] x, float[c,t,5] z) => (float[b,s,5] y) { p = MatMul(x, w) a = Tanh(p) y = Add(a, z) }",
        {"w": normal(8, 5)},
        [sizes((2, 3, 8), (2, 3, 5)), sizes((0, 3, 8), (0, 3, 5)), sizes((2, 0, 8), (2, 0, 5))],
        [
            (sizes((2, 3, 8), (2, 2, 5)), "input 'z': dimension 1 is 2, expected s = 3"),
            (sizes((2, 3, 8), (1, 3, 5)), "input 'z': dimension 0 is 1, expected b = 2"),
        ],
    ),
    "normalised gemm": Case(
        "(float[b,s,8] x) => (float[b,s,5] y) { n = LayerNormalization <axis = -1> (x, g, h) y = MatMul(n, w) }",
        {"g": normal(8), "h": normal(8, seed=2), "w": normal(8, 5)},
        [sizes((2, 3, 8)), sizes((0, 3, 8)), sizes((2, 0, 8)), sizes((1, 1, 8))],
    ),
    "attention": Case(
        ATTENTION,
        {},
        [
            attention((2, 5), (2, 7), (2, 7), (2, 5, 7)),
            attention((0, 5), (0, 7), (0, 7), (0, 5, 7)),
            attention((2, 0), (2, 7), (2, 7), (2, 0, 7)),
            attention((2, 5), (2, 0), (2, 0), (2, 5, 0)),
        ],
        [
            (attention((2, 5), (2, 7), (2, 7), (1, 5, 7)), "input 'm': dimension 0 is 1, expected b = 2"),
            (attention((2, 5), (2, 7), (2, 7), (2, 1, 7)), "input 'm': dimension 2 is 1, expected s = 5"),
            (attention((2, 5), (2, 7), (2, 7), (2, 5, 6)), "input 'm': dimension 3 is 6, expected t = 7"),
            (attention((2, 5), (2, 7), (2, 6), (2, 5, 7)), "input 'v': dimension 2 is 6, expected t = 7"),
            (attention((2, 5), (1, 7), (1, 7), (2, 5, 7)), "input 'k': dimension 0 is 1, expected b = 2"),
        ],
    ),
    "softmax of nothing": Case(
        "(float[b,s] x) => (float[b,s] y) { y = Softmax <axis = -1> (x) }",
        {},
        [sizes((2, 5)), sizes((2, 0)), sizes((0, 4))],
    ),
    "greatest of none": Case(
        "(float[b,s,3] x) => (float[b,3] y) { axis = Constant <value_ints = [1]> () y = ReduceMax <keepdims = 0> (x, axis) }",
        {},
        [sizes((2, 5, 3)), sizes((0, 5, 3)), sizes((2, 0, 3))],
    ),
    "one-hot": Case(
        "(int64[b] i) => (float[b,4] y) { y = OneHot(i, depth, values) }",
        {"depth": ints(4), "values": np.array([0, 1], np.float32)},
        [{"i": ints(0, 3, -1, -4)}, {"i": ints(4, -5)}, {"i": ints()}],
    ),
    "tile of nothing": Case(
        "(float[a,b] x) => (float[c,d] y) { y = Tile(x, times) }",
        {"times": ints(2, 3)},
        [sizes((2, 3)), sizes((0, 3)), sizes((2, 0))],
    ),
}


def _sessions(proto: onnx.ModelProto) -> Iterator[coda_edge.Session]:
    data = to_bytes(coda_edge.optimize(proto, verify=False).bundle)
    for threads in (1, 2):
        with coda_edge.Session(data, threads=threads) as session:
            yield session


@pytest.mark.parametrize("name", CASES)
def test_every_size_is_right_or_refused(name: str) -> None:
    case = CASES[name]
    proto = model("g " + case.graph, case.constants)
    expected = [run(proto, feeds) for feeds in case.runs]
    for session in _sessions(proto):
        for feeds, message in case.refuses:
            with pytest.raises(case.error) as refusal:
                session.run(None, feeds)
            assert message in str(refusal.value)
        for feeds, right in zip(case.runs, expected, strict=True):
            for a, b in zip(session.run(None, feeds), right, strict=True):
                assert a.shape == b.shape and a.dtype == b.dtype
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_sequence_longer_than_the_position_table() -> None:
    """BERT with 64 positions, as one exporter writes it: the message names table and node, and the session goes on."""
    feeds = {
        name: np.ones((2, 65), np.int64) for name in (i.name for i in load(load_fixture("bert.sdpa.ts17")).graph.input)
    }
    proto = load_fixture("bert.sdpa.ts17")
    fitting = {name: value[:, :64] for name, value in feeds.items()}
    right = run(proto, fitting)
    for session in _sessions(proto):
        with pytest.raises(
            ShapeError, match=r"seq = 65 exceeds 64: rows of '.*position_embeddings.*' \(node '.*Gather"
        ):
            session.run(None, feeds)
        with pytest.raises(ShapeError, match=r"'attention_mask': dimension 0 is 1, expected batch = 2 \(from input"):
            session.run(None, fitting | {"attention_mask": np.ones((1, 64), np.int64)})
        for a, b in zip(session.run(None, fitting), right, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4 * float(np.abs(b).max()))


def test_sizes_that_can_never_be_are_refused() -> None:
    text = '(float[2] x) => (float[k] y) { y = Pad <mode = "reflect"> (x, by) }'
    with pytest.raises(ShapeError, match=r"Pad \(node 'y'\): 3 would have to be at most 2: padding of axis 0 of 'x'"):
        coda_edge.optimize(model("g " + text, {"by": ints(2, 0)}), verify=False)


def test_only_what_some_sizes_break_is_kept() -> None:
    """Bound sizes need no check, and neither does what the same bound says twice."""
    proto = load_fixture("bert.sdpa.ts17")
    shapes = {i.name: (1, 9) for i in load(proto).graph.input}
    assert coda_edge.optimize(proto, shapes=shapes, verify=False).bundle.best.plan.constraints == []
    assert len(coda_edge.optimize(proto, verify=False).bundle.best.plan.constraints) == 1


def test_a_constraint_outlives_its_node() -> None:
    case = CASES["a slice of which only the length is used"]
    form = to_normal_form(load(model("g " + case.graph, case.constants)))
    assert [n.op for n in form.graph.nodes if n.op == "Slice"] == []
    assert [str(c) for c in form.constraints] == ["s <= 6 (node 'part')"]
