"""Models in which data decides sizes: equal to onnxruntime for data of any size, in few phases; what cannot be is refused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from rewriting import model, run

import coda_edge
from coda_edge.bundle import to_bytes
from coda_edge.errors import CodaError, ShapeError

Array = npt.NDArray[np.generic]
RNG = np.random.default_rng(0)


def floats(*dims: int) -> Array:
    return RNG.standard_normal(dims).astype(np.float32)


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


@dataclass(frozen=True)
class Case:
    """A graph, its constants, what it is run on, and how many phases its plan has."""

    text: str
    constants: dict[str, Array]
    runs: list[dict[str, Array]]
    phases: int = 2
    refused: tuple[dict[str, Array], str] | None = None


SHAPES = [(2, 3), (5, 7), (5, 7), (0, 4), (1, 1)]
NUMBERS = {"zero": np.int64(0), "one": np.int64(1), "first": ints(0), "axis": ints(1), "lead": ints(0)}

CASES = {
    "places of what is not zero": Case(
        "(float[a,b] x) => (int64[2,k] y) { y = NonZero(x) }",
        {},
        [{"x": np.where(RNG.random(s) > 0.5, floats(*s), 0).astype(np.float32)} for s in SHAPES],
    ),
    "places in bools of three dimensions, and none": Case(
        "(float[a,b,2] x) => (int64[3,k] y) { m = Greater(x, half) y = NonZero(m) }",
        {"half": np.float32(0.5)},
        [{"x": floats(*s, 2)} for s in SHAPES] + [{"x": np.zeros((4, 4, 2), np.float32)}],
    ),
    "what is masked, changed and put together again": Case(
        "(float[a,b] x) => (float[k,c] y, float[k] z) { m = Less(x, nil) i = NonZero(m) j = Transpose(i) g = GatherND(x, j)"
        " z = Exp(g) u = Unsqueeze(z, axis) y = MatMul(u, w) }",
        {"nil": np.float32(0), "w": floats(1, 5), "axis": ints(1)},
        [{"x": floats(*s)} for s in SHAPES],
    ),
    "lengths from durations, spread over frames": Case(
        "(float[1,t] d, float[1,t,6] x) => (float[1,n,6] y) { c = Ceil(d) w = Cast <to = 7> (c) s = ReduceSum <keepdims = 0> (w)"
        " r = Range(zero, s, one) e = CumSum(w, one) u = Unsqueeze(r, axis) v = Less(u, e) p = Cast <to = 1> (v)"
        " b = Slice(p, first, end, axis) a = Sub(p, b) q = Unsqueeze(p, lead) y = MatMul(q, x) }",
        NUMBERS | {"end": ints(2**62)},
        [{"d": np.abs(floats(1, t)) * 3, "x": floats(1, t, 6)} for t in (4, 9, 1, 4)],
    ),
    "a size in several places is read once": Case(
        "(float[a] x) => (int64[n] y, float[n,3] z, float[m] w) { c = Cast <to = 7> (x) s = ReduceMax <keepdims = 0> (c)"
        " y = Range(zero, s, one) v = Reshape(s, first_dim) k = Concat <axis = 0> (v, three) z = Expand(fill, k)"
        " t = Add(s, one) g = Cast <to = 1> (t) h = Cast <to = 7> (g) o = Range(zero, h, one) w = Cast <to = 1> (o) }",
        NUMBERS | {"first_dim": ints(-1), "three": ints(3), "fill": floats(1, 3)},
        [{"x": np.array(v, np.float32)} for v in ([2.5, 7.1], [0.0], [3.0, 3.0, 1.0])],
    ),
    "rows selected by a mask that sizes determine, in the shape of all": Case(
        "(float[a,b] x) => (float[a,1,b] y) { s = Shape <end = 1> (x) m = Expand(true, s) i = NonZero(m) j = Reshape(i, first_dim)"
        " r = Gather(x, j) h = Shape(x) e = Expand(r, h) y = Unsqueeze(e, axis) }",
        NUMBERS | {"true": np.array([True]), "first_dim": ints(-1)},
        [{"x": floats(*s)} for s in SHAPES],
    ),
    "quotients of sizes are no whole numbers": Case(
        "(float[a,b] x) => (float[a,b] y) { s = Shape <end = 1> (x) f = Cast <to = 1> (s) q = Div(three, f) t = Div(f, four)"
        " u = Mul(x, q) y = Add(u, t) }",
        {"three": np.float32(3), "four": np.float32(4)},
        [{"x": floats(*s)} for s in SHAPES],
        phases=1,
    ),
    "a slice as long as an input says": Case(
        "(float[b,s] x, int64[1] n) => (float[b,k] y) { y = Slice(x, first, n, axis) }",
        NUMBERS,
        [{"x": floats(2, 6), "n": ints(n)} for n in (3, 6, 0, 9)],
        refused=({"x": floats(2, 6), "n": ints(-1)}, "size 'n' is -1, expected 0 or more"),
    ),
    "a slice from where an input says": Case(
        "(float[b,s] x, int64[1] n) => (float[b,k] y) { t = Slice(x, n, end, axis) y = Tanh(t) }",
        NUMBERS | {"end": ints(2**62)},
        [{"x": floats(2, 6), "n": ints(n)} for n in (3, 6, 0, 9)],
    ),
    "the last ones": Case(
        "(float[b,s] x, int64[1] n) => (float[b,k] y) { m = Neg(n) y = Slice(x, m, end, axis) }",
        NUMBERS | {"end": ints(2**62)},
        [{"x": floats(2, 6), "n": ints(n)} for n in (3, 6, 9)],
    ),
    "a window": Case(
        "(float[b,s] x, int32[2] n) => (float[b,k] y) { i = Cast <to = 7> (n) p = Slice(i, lead, axis) q = Slice(i, axis, two)"
        " t = Exp(x) y = Slice(t, p, q, axis) }",
        NUMBERS | {"two": ints(2)},
        [{"x": floats(2, 6), "n": np.array(n, np.int32)} for n in ((1, 3), (0, 6), (4, 2), (5, 99))],
    ),
    "padding": Case(
        "(float[b,s] x, int64[2] n) => (float[b,k] y) { n0 = Slice(n, lead, axis) n1 = Slice(n, axis, two)"
        " p = Concat <axis = 0> (none, n0, none, n1) t = Exp(x) y = Pad(t, p) }",
        NUMBERS | {"two": ints(2), "none": ints(0)},
        [{"x": floats(2, 6), "n": ints(*n)} for n in ((1, 3), (0, 0), (4, 2))],
    ),
    "repeats": Case(
        "(float[b,s] x, int64[2] n) => (float[c,k] y) { t = Exp(x) y = Tile(t, n) }",
        {},
        [{"x": floats(2, 3), "n": ints(*n)} for n in ((1, 3), (2, 2), (0, 2))],
    ),
    "the best few": Case(
        "(float[b,s] x, int64[1] n) => (float[b,k] y, int64[b,k] i) { y, i = TopK(x, n) }",
        {},
        [{"x": floats(2, 9), "n": ints(n)} for n in (3, 1, 9)],
    ),
    "a new shape": Case(
        "(float[b,12] x, int64[2] n) => (float[p,q,r] y) { s = Concat <axis = 0> (n, rest) t = Exp(x) y = Reshape(t, s) }",
        {"rest": ints(-1)},
        [{"x": floats(2, 12), "n": ints(*n)} for n in ((4, 3), (1, 24), (2, 12))],
        refused=({"x": floats(2, 12), "n": ints(5, 2)}, "a Reshape of"),
    ),
    "two sizes that must be one": Case(
        "(int64 n, float[a] x) => (float[a] y) { r = Range(zero, n, one) f = Cast <to = 1> (r) y = Add(x, f) }",
        NUMBERS,
        [{"x": floats(n), "n": np.array(n)} for n in (3, 5, 0)],
        refused=({"x": floats(4), "n": np.array(3)}, "two dimensions that must be equal"),
    ),
    "places of places": Case(
        "(float[a] x) => (int64[2,m] z) { m = Greater(x, nil) y = NonZero(m) h = Slice(y, half, end, axis) c = Cast <to = 1> (h)"
        " e = Sin(c) g = Greater(e, nil) z = NonZero(g) }",
        {"nil": np.float32(0), "half": ints(1), "end": ints(2**62), "axis": ints(1)},
        [{"x": floats(n)} for n in (30, 31, 6)],
        phases=3,
    ),
    "compression": Case(
        "(float[a,b] x, bool[b] c) => (float[a,k] y) { t = Exp(x) y = Compress <axis = 1> (t, c) }",
        {},
        [{"x": floats(*s), "c": RNG.random(s[1]) > 0.5} for s in SHAPES],
    ),
    "compression of all elements": Case(
        "(float[a,b] x, bool[n] c) => (float[k] y) { y = Compress(x, c) }",
        {},
        [{"x": floats(3, 4), "c": RNG.random(n) > 0.5} for n in (12, 7)],
    ),
    "a range of floats": Case(
        "(float n) => (float[k] y) { y = Range(from, n, by) }",
        {"from": np.float32(0.5), "by": np.float32(0.75)},
        [{"n": np.array(n, np.float32)} for n in (3.0, 0.1, 0.5, 10.3)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_onnxruntime(name: str) -> None:
    case = CASES[name]
    proto = model("g " + case.text, case.constants)
    bundle = coda_edge.optimize(proto, verify=False).bundle
    assert len({r.step for r in bundle.best.plan.reads}) == case.phases - 1
    for threads in (1, 2):
        with coda_edge.Session(to_bytes(bundle), threads=threads) as session:
            for feeds in case.runs:
                for found, right in zip(session.run(None, feeds), run(proto, feeds), strict=True):
                    assert found.shape == right.shape and found.dtype == right.dtype
                    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)
            if case.refused is not None:
                feeds, message = case.refused
                with pytest.raises(ShapeError) as refusal:
                    session.run(None, feeds)
                assert message in str(refusal.value)


REFUSED: dict[str, tuple[str, dict[str, Array], str]] = {
    "what is unique": ("(float[a] x) => (float[k] y) { y = Unique(x) }", {}, "Unique"),
    "a long target": (
        "(float[a] x, int64[9] n) => (float[b,c,d,e,f,g,h,i,j] y) { y = Reshape(x, n) }",
        {},
        "is no dimension of an input",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_element_decides_is_refused(name: str) -> None:
    text, constants, message = REFUSED[name]
    with pytest.raises(CodaError) as refusal:
        coda_edge.optimize(model("g " + text, constants), verify=False)
    assert message in str(refusal.value)


@pytest.mark.parametrize("text", ["e = Expand(x, n) y = Neg(e)", "e = Expand(minus, n) y = Mul(x, e)"])
def test_one_repeated_as_an_input_says_is_refused(text: str) -> None:
    """Of two sizes that a run knows, the plan takes them to be equal, and does not answer where 1 is repeated."""
    proto = model(f"g (float[b,s] x, int64[2] n) => (float[p,q] y) {{ {text} }}", {"minus": np.float32(-1)})
    session = coda_edge.Session(to_bytes(coda_edge.optimize(proto, verify=False).bundle))
    x = floats(1, 3)
    np.testing.assert_array_equal(session.run(None, {"x": x, "n": ints(1, 3)})[0], -x)
    with pytest.raises(ShapeError, match="n_0 = 4 exceeds b = 1: two dimensions that must be equal"):
        session.run(None, {"x": x, "n": ints(4, 3)})
