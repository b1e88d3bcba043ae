"""Attention's bands, past rows, sinks and shared operands, against numpy in float64."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from kernel_harness import VECTOR_TARGETS, Library, run

from coda_edge.attention import KEYS, QUERIES, Band
from coda_edge.epilogue.program import EpilogueProgram
from coda_edge.errors import ShapeError
from coda_edge.lower.attention import AttentionSizes, Extras, ScoreOperand, lower_attention
from coda_edge.lower.attention_program import bound, specialized
from coda_edge.lower.kernel import KernelCall
from coda_edge.symbolic import symbol

B, SQ, SK, P = (symbol(s) for s in ("B", "Sq", "Sk", "P"))
TARGET = VECTOR_TARGETS[0]
LOWEST = float(np.finfo(np.float32).min)
HEADS, GROUP, DEPTH, COLUMNS = 4, 2, 16, 20
CAUSAL = Band(None, KEYS - QUERIES)
WINDOW = Band(KEYS - QUERIES - 20, KEYS - QUERIES)
AROUND = Band(-9, 9)


def masked(low: float, second: bool = False) -> EpilogueProgram:
    """Scores with 0 or ``low`` added, by a band (or two) and a mask of keys."""
    bands = "band0: tile bool, " + ("band1: tile bool, " if second else "")
    both = "  v1 = and band0 band1\n  v2 = and v1 live\n" if second else "  v2 = and band0 live\n"
    return EpilogueProgram.parse(
        f"(acc: tile f32, {bands}live: col bool) -> (s: tile = v4) {{\n  v0 = mul acc 0.3\n{both}"
        f"  v3 = where v2 0.0 {low!r}\n  v4 = add v0 v3\n}}"
    )


@cache
def built(
    program: EpilogueProgram, bands: tuple[Band, ...], guard: bool, past: bool, sink: bool, shared: tuple[str, ...] = ()
) -> tuple[KernelCall, Library]:
    sizes = AttentionSizes(B, HEADS, SQ, SK, DEPTH, COLUMNS, GROUP, P if past else 0, shared)
    extras = Extras(
        ("past_k", "past_v") if past else None,
        ("present_k", "present_v") if past else None,
        ScoreOperand("sink", (1, HEADS, 1, 1)) if sink else None,
        tuple(b.at(SQ, SK) for b in bands),
    )
    operand = [ScoreOperand("live", (B, 1, 1, SK))] if len(program.params) > 1 + len(bands) else []
    call = lower_attention(TARGET, "a", program, ("q", "k", "v"), operand, "out", sizes, guard, extras=extras)
    return call, Library(TARGET.build([call.kernel, *([call.finish] if call.finish else [])]))


def live(kind: str, b: int, sk: int) -> np.ndarray:
    """Which keys there are: all, padded on a side, with holes, or none in one batch entry."""
    keep = np.ones((b, 1, 1, sk), bool)
    if kind == "left":
        keep[0, ..., : sk // 2] = False
    elif kind == "right":
        keep[-1, ..., sk - sk // 3 :] = False
    elif kind == "holes":
        keep[..., 1::3] = False
    elif kind == "none":
        keep[0] = False
    return keep


def check(
    program: EpilogueProgram,
    bands: tuple[Band, ...],
    sizes: tuple[int, int, int],
    kind: str = "all",
    guard: bool = False,
    past: int | None = None,
    sink: bool = False,
    shared: tuple[str, ...] = (),
    atol: float = 5e-6,
) -> np.ndarray:
    """Runs attention at ``sizes`` (B, Sq, Sk), compares it with float64 and returns it."""
    b, sq, sk = sizes
    rng = np.random.default_rng(sq + sk)
    shapes = {"q": (HEADS, sq, DEPTH), "k": (HEADS // GROUP, sk, DEPTH), "v": (HEADS // GROUP, sk, COLUMNS)}
    q, k, v = (rng.standard_normal((1 if n in shared else b, *s)).astype(np.float32) for n, s in shapes.items())
    given: dict[str, np.ndarray] = {"live": live(kind, b, sk)} if len(program.params) > 1 + len(bands) else {}
    if sink:
        given["sink"] = np.array([0.5, -np.inf, 3.0, -2.0], np.float32).reshape(1, HEADS, 1, 1)
    tensors = {"q": q, "k": k, "v": v, **given, "out": np.zeros((b, sq, HEADS * COLUMNS), np.float32)}
    if past is not None:
        for name, whole in (("k", k), ("v", v)):
            tensors[f"past_{name}"], tensors[name] = whole[:, :, :past], whole[:, :, past:]
            tensors[f"present_{name}"] = np.full_like(whole, np.nan)
    call, library = built(program, bands, guard, past is not None, sink, shared)
    found = run(TARGET, call, tensors, {"B": b, "Sq": sq, "Sk": sk, "P": past or 0}, chunk=3, library=library)
    if past is not None:
        np.testing.assert_array_equal(found["present_k"], k)
        np.testing.assert_array_equal(found["present_v"], v)
    expected = reference(program, bands, q, k, v, given, guard)
    np.testing.assert_allclose(found["out"], np.broadcast_to(expected, found["out"].shape), rtol=2e-5, atol=atol)
    return found["out"]


def reference(
    program: EpilogueProgram,
    bands: tuple[Band, ...],
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    given: dict[str, np.ndarray],
    guard: bool,
) -> np.ndarray:
    k, v = (np.repeat(t.astype(np.float64), GROUP, 1) for t in (k, v))
    scores = q.astype(np.float64) @ k.transpose(0, 1, 3, 2)
    sq, sk = scores.shape[2:]
    apart = np.arange(sk)[None] - np.arange(sq)[:, None]
    whole: dict[str, np.ndarray] = {}
    for i, band in enumerate(b.at(sq, sk) for b in bands):
        inside = np.ones((sq, sk), bool)
        inside &= True if band.first is None else apart >= int(band.first)
        inside &= True if band.last is None else apart <= int(band.last)
        whole[f"band{i}"] = np.broadcast_to(inside, scores.shape)
    if "live" in given:
        scores = np.broadcast_to(scores, np.broadcast_shapes(scores.shape, given["live"].shape))
        whole = {n: np.broadcast_to(t, scores.shape) for n, t in whole.items()}
        whole["live"] = np.broadcast_to(given["live"], scores.shape)
    tiles = EpilogueProgram.parse(str(program).replace(": col", ": tile"))
    (scores,) = tiles.reference(scores, whole).values()
    # As float32 adds them, so that rows without any key are those of the graph.
    scores = np.where(scores < LOWEST / 2, np.maximum(np.asarray(scores, np.float32), -np.inf), scores)
    if "sink" in given:
        scores = np.concatenate([scores, np.broadcast_to(given["sink"], (*scores.shape[:3], 1))], -1)
    with np.errstate(all="ignore"):
        p = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
        p = (p / p.sum(-1, keepdims=True))[..., :sk]
    out = (np.where(np.isnan(p), 0, p) if guard else p) @ v
    return out.transpose(0, 2, 1, 3).reshape(out.shape[0], sq, HEADS * COLUMNS)


SIZES = ((3, 1, 1), (2, 7, 7), (1, 130, 130), (2, 50, 201), (3, 1, 130), (1, 130, 7))


@pytest.mark.parametrize(
    ("band", "low"),
    [
        (CAUSAL, -np.inf),
        (CAUSAL, LOWEST),
        (CAUSAL, -1e4),
        (WINDOW, LOWEST),
        (AROUND, -np.inf),
        (Band(3, None), LOWEST),
    ],
    ids=str,
)
def test_bands(band: Band, low: float) -> None:
    for sizes in SIZES:
        for kind in ("all", "left", "holes", "none"):
            # Where every key of a row is hidden by -1e4, float32 rounds the scores to 1e-3.
            atol = 3e-3 if low == -1e4 else 5e-6
            check(masked(low), (band,), sizes, kind, guard=low == -np.inf, atol=atol)


def test_rows_without_keys_in_the_band_are_what_the_graph_defines() -> None:
    """More queries than keys: the first see nothing. They average all keys if what hides is finite, and are NaN if it is not."""
    plain = EpilogueProgram.parse(
        "(acc: tile f32, band0: tile bool) -> (s: tile = v0) {\n  v0 = where band0 acc " + repr(LOWEST) + "\n}"
    )
    check(plain, (CAUSAL,), (1, 60, 11))
    hidden = EpilogueProgram.parse(
        "(acc: tile f32, band0: tile bool) -> (s: tile = v0) {\n  v0 = where band0 acc -inf\n}"
    )
    assert np.isnan(check(hidden, (CAUSAL,), (1, 60, 11))).any(-1).sum() == 49
    assert not check(hidden, (CAUSAL,), (1, 60, 11), guard=True)[0, :49].any()


def test_two_bands() -> None:
    for sizes in SIZES:
        for kind in ("all", "left"):
            check(masked(LOWEST, second=True), (CAUSAL, AROUND), sizes, kind)


@pytest.mark.parametrize("past", [0, 5, 100])
def test_past_rows(past: int) -> None:
    for b, new in ((3, 1), (2, 7), (1, 130), (2, 0)):
        for kind in ("all", "left", "none"):
            check(masked(LOWEST), (CAUSAL,), (b, new, past + new), kind, past=past)


def test_sinks() -> None:
    plain = EpilogueProgram.parse("(acc: tile f32) -> (s: tile = v0) {\n  v0 = mul acc 0.3\n}")
    for sizes in SIZES:
        check(plain, (), sizes, sink=True)
        check(masked(-np.inf), (WINDOW,), sizes, "left", sink=True, guard=True)


@pytest.mark.parametrize("shared", [("q",), ("k", "v"), ("v",)])
def test_batch_entries_that_share(shared: tuple[str, ...]) -> None:
    for sizes in ((3, 7, 9), (2, 50, 130)):
        check(masked(LOWEST), (CAUSAL,), sizes, "left", shared=shared)


def test_operands_that_take_turns() -> None:
    program = EpilogueProgram.parse("(acc: tile f32, bias: tile f32) -> (s: tile = v0) {\n  v0 = add acc bias\n}")
    sizes = AttentionSizes(B, 1, SQ, SK, DEPTH, DEPTH)
    operand = ScoreOperand("bias", (3, 1, SQ, SK), repeated=True)
    call = lower_attention(TARGET, "a", program, ("q", "k", "v"), [operand], "out", sizes)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((6, 1, 10, DEPTH)).astype(np.float32) for _ in range(3))
    bias = rng.standard_normal((3, 1, 10, 10)).astype(np.float32)
    tensors = {"q": q, "k": k, "v": v, "bias": bias, "out": np.zeros((6, 10, DEPTH), np.float32)}
    got = run(TARGET, call, tensors, {"B": 6, "Sq": 10, "Sk": 10})["out"]
    scores = q.astype(np.float64) @ k.transpose(0, 1, 3, 2) + np.concatenate([bias, bias])
    p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(got, (p @ v)[:, 0], rtol=2e-5, atol=5e-6)


def test_what_is_known_of_a_program() -> None:
    program = masked(LOWEST)
    assert [s.op for s in (specialized(program, {"band0": True}) or program).steps] == ["mul", "where", "add"]
    assert bound(program, {"band0": False}) < -1e38
    assert bound(masked(-np.inf), {"band0": False}) == -np.inf
    assert bound(program, {}) > 0
    counted = EpilogueProgram.parse(
        "(acc: tile f32, band0: tile bool) -> (s: tile = v0) {\n  v0 = where band0 0.0 acc\n}"
    )
    assert specialized(counted, {"band0": True}) is None


def test_bands_that_do_not_fit_are_errors() -> None:
    sizes = AttentionSizes(B, 1, SQ, SK, 8, 8)
    program = EpilogueProgram.parse(
        "(acc: tile f32, band0: col bool) -> (s: tile = v0) {\n  v0 = where band0 acc 0.0\n}"
    )
    with pytest.raises(ShapeError, match="bool tile"):
        lower_attention(TARGET, "a", program, ("q", "k", "v"), [], "out", sizes, extras=Extras(bands=(AROUND,)))
    with pytest.raises(ShapeError, match="0 were given and 2 bands"):
        lower_attention(TARGET, "a", program, ("q", "k", "v"), [], "out", sizes, extras=Extras(bands=(AROUND, CAUSAL)))


def test_band_text() -> None:
    for band in (CAUSAL, WINDOW, AROUND, Band(3, None), Band(None, -2)):
        assert Band.parse(str(band)) == band
    assert Band(None, P).of_node(SQ, P + SQ) == CAUSAL
    assert Band(P - 3, SK).of_node(SQ, SK) is None
