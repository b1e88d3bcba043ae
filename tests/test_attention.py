"""The attention template against numpy in float64: sizes, masks of every kind, rows without keys, NaN."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from kernel_harness import VECTOR_TARGETS, Library, run

from coda_edge import targets
from coda_edge.epilogue.program import EpilogueProgram, Kind
from coda_edge.errors import ShapeError
from coda_edge.lower.attention import AttentionSizes, ScoreOperand, lower_attention
from coda_edge.lower.kernel import KernelCall
from coda_edge.schedule import AttentionSchedule
from coda_edge.symbolic import symbol

B, H, SQ, SK = (symbol(s) for s in ("B", "H", "Sq", "Sk"))
LOWEST = float(np.finfo(np.float32).min)
PLAIN = EpilogueProgram.parse("(acc: tile f32) -> (s: tile = v0) {\n  v0 = mul acc 0.25\n}")
MASKED = {
    kind: EpilogueProgram.parse(
        f"(acc: tile f32, mask: {kind} f32) -> (s: tile = v1) {{\n  v0 = mul acc 0.25\n  v1 = add v0 mask\n}}"
    )
    for kind in ("col", "row", "tile")
}
SHAPES: dict[str, tuple[object, ...]] = {"col": (B, 1, 1, SK), "row": (1, H, SQ, 1), "tile": (B, 1, SQ, SK)}
each_target = pytest.mark.parametrize("target", VECTOR_TARGETS, ids=lambda t: t.name)


@cache
def built(
    target: targets.Target,
    program: EpilogueProgram,
    depth: int,
    columns: int,
    shapes: tuple[tuple[object, ...], ...] = (),
    guard: bool = False,
    schedule: AttentionSchedule | None = None,
) -> tuple[KernelCall, Library]:
    operands = [ScoreOperand(p.name, s) for p, s in zip(program.params[1:], shapes, strict=True)]  # type: ignore[arg-type]
    sizes = AttentionSizes(B, H, SQ, SK, depth, columns)
    call = lower_attention(target, "attention", program, ("q", "k", "v"), operands, "out", sizes, guard, schedule)
    return call, Library(target.build([call.kernel, *([call.finish] if call.finish else [])]))


def reference(
    program: EpilogueProgram, q: np.ndarray, k: np.ndarray, v: np.ndarray, operands: dict[str, np.ndarray], guard: bool
) -> np.ndarray:
    scores = q.astype(np.float64) @ k.astype(np.float64).transpose(0, 1, 3, 2)
    scalars = {p.name for p in program.params if p.kind is Kind.SCALAR}
    whole = {n: o.reshape(()) if n in scalars else np.broadcast_to(o, scores.shape) for n, o in operands.items()}
    tiles = EpilogueProgram.parse(str(program).replace(": col", ": tile").replace(": row", ": tile"))
    (scores,) = tiles.reference(scores, whole).values()
    with np.errstate(all="ignore"):
        p = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
        p = p / p.sum(-1, keepdims=True)
    p = np.where(np.isnan(p), 0, p) if guard else p
    out = p @ v.astype(np.float64)
    return out.transpose(0, 2, 1, 3).reshape(out.shape[0], out.shape[2], out.shape[1] * out.shape[3])


def check(
    target: targets.Target,
    program: EpilogueProgram,
    sizes: tuple[int, int, int, int],
    depth: int,
    columns: int,
    operands: dict[str, np.ndarray] | None = None,
    shapes: tuple[tuple[object, ...], ...] = (),
    guard: bool = False,
    schedule: AttentionSchedule | None = None,
    scale: float = 1.0,
) -> np.ndarray:
    """Runs attention at ``sizes`` (B, H, Sq, Sk), compares it with the reference and returns it."""
    b, h, sq, sk = sizes
    rng = np.random.default_rng(sum(sizes) + depth)
    q = (scale * rng.standard_normal((b, h, sq, depth))).astype(np.float32)
    k, v = (rng.standard_normal((b, h, sk, d)).astype(np.float32) for d in (depth, columns))
    operands = operands or {}
    call, library = built(target, program, depth, columns, shapes, guard, schedule)
    tensors = {"q": q, "k": k, "v": v, **operands, "out": np.zeros((b, sq, h * columns), np.float32)}
    named = {"B": b, "H": h, "Sq": sq, "Sk": sk}
    got = run(target, call, tensors, named, chunk=2, library=library)["out"]
    # A score's rounding error is relative to the score, and a probability's is as large as that.
    expected = reference(program, q, k, v, operands, guard)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=5e-6 * max(1.0, scale))
    return got


@each_target
@pytest.mark.parametrize("depth,columns", [(32, 32), (64, 64), (16, 16), (20, 20), (80, 80), (8, 40), (5, 3), (1, 1)])
def test_sizes(target: targets.Target, depth: int, columns: int) -> None:
    for sizes in ((1, 1, 1, 1), (2, 3, 7, 7), (1, 2, 1, 300), (1, 1, 65, 17), (1, 1, 100, 129), (2, 1, 33, 260)):
        check(target, PLAIN, sizes, depth, columns)


@each_target
def test_large_scores(target: targets.Target) -> None:
    check(target, PLAIN, (1, 2, 50, 400), 32, 32, scale=40.0)


@each_target
@pytest.mark.parametrize("kind", MASKED)
def test_additive_masks(target: targets.Target, kind: str) -> None:
    for b, h, sq, sk in ((2, 3, 7, 7), (3, 2, 50, 140), (1, 1, 1, 1)):
        given = {"B": b, "H": h, "Sq": sq, "Sk": sk}
        shape = [d if isinstance(d, int) else given[d.name] for d in SHAPES[kind]]  # type: ignore[attr-defined]
        mask = np.random.default_rng(b).standard_normal(shape).astype(np.float32)
        check(target, MASKED[kind], (b, h, sq, sk), 16, 16, {"mask": mask}, (SHAPES[kind],))
    for shape in ((1, 1, 1, 1), (1, H, 1, 1), (B, H, 1, 1)):
        concrete = [d if isinstance(d, int) else {"B": 2, "H": 3}[d.name] for d in shape]
        mask = np.random.default_rng(1).standard_normal(concrete).astype(np.float32)
        check(target, MASKED[kind], (2, 3, 9, 11), 16, 16, {"mask": mask}, (shape,))


@each_target
def test_padding(target: targets.Target) -> None:
    """Keys hidden by the lowest finite float contribute nothing at all; rows in which all are hidden average all keys."""
    for sk in (7, 130, 300):
        mask = np.zeros((4, 1, 1, sk), np.float32)
        mask[0, ..., sk // 2 :] = LOWEST
        mask[1, ..., : sk // 2] = LOWEST
        mask[2, ..., ::2] = LOWEST
        mask[3] = LOWEST
        check(target, MASKED["col"], (4, 2, sk, sk), 32, 32, {"mask": mask}, (SHAPES["col"],))


@each_target
@pytest.mark.parametrize("guard", [True, False])
def test_rows_without_keys(target: targets.Target, guard: bool) -> None:
    """Masks of -inf: a row that sees no key is NaN, or 0 with the guard; one that sees its first key late is exact."""
    sq, sk = 40, 300
    mask = np.zeros((1, 1, sq, sk), np.float32)
    mask[..., 3, :] = -np.inf
    mask[..., 4, :290] = -np.inf
    mask[..., 5, 1:] = -np.inf
    got = check(target, MASKED["tile"], (1, 2, sq, sk), 16, 16, {"mask": mask}, ((1, 1, SQ, SK),), guard)
    assert np.isnan(got).any() != guard
    np.testing.assert_array_equal(got[0, 3], 0 if guard else np.nan)


@each_target
def test_causal_and_bool(target: targets.Target) -> None:
    program = EpilogueProgram.parse(
        "(acc: tile f32, seen: tile bool, live: col bool, bias: row f32, s: scalar f32) -> (y: tile = v5) {\n"
        "  v0 = mul acc s\n  v1 = and seen live\n  v2 = where v1 v0 -inf\n  v3 = tanh bias\n  v4 = mul v3 v3\n  v5 = add v2 v4\n}"
    )
    b, h, sq, sk = 2, 2, 37, 45
    seen = np.tril(np.ones((sq, sk), bool), sk - sq)[None, None]
    live = np.ones((b, 1, 1, sk), bool)
    live[0, ..., 3:9] = False
    bias = np.random.default_rng(0).standard_normal((1, h, sq, 1)).astype(np.float32)
    operands = {"seen": seen, "live": live, "bias": bias, "s": np.full((1, 1, 1, 1), 0.3, np.float32)}
    shapes = ((1, 1, SQ, SK), (B, 1, 1, SK), (1, H, SQ, 1), (1, 1, 1, 1))
    check(target, program, (b, h, sq, sk), 20, 24, operands, shapes)


@each_target
def test_nothing(target: targets.Target) -> None:
    check(target, PLAIN, (1, 2, 0, 5), 16, 16)
    call, library = built(target, PLAIN, 16, 16)
    empty = np.zeros((1, 2, 0, 16), np.float32)
    tensors = {"q": np.ones((1, 2, 3, 16), np.float32), "k": empty, "v": empty, "out": np.ones((1, 3, 32), np.float32)}
    got = run(target, call, tensors, {"B": 1, "H": 2, "Sq": 3, "Sk": 0}, library=library)["out"]
    np.testing.assert_array_equal(got, 0)


@each_target
def test_schedules(target: targets.Target) -> None:
    lanes = target.lanes(4)
    for schedule in (
        AttentionSchedule(lanes, 2 * lanes, 5, 3, 1, 4, 1),
        AttentionSchedule(lanes, 4 * lanes, 40, 2, 3, 8, 3),
    ):
        for sizes in ((1, 2, 1, 1), (1, 1, 70, 90)):
            check(target, PLAIN, sizes, 24, 28, schedule=schedule)


def test_nan_scores_stay() -> None:
    target = VECTOR_TARGETS[0]
    mask = np.zeros((1, 1, 9, 200), np.float32)
    mask[..., 2, 150] = np.nan
    mask[..., 3, 5] = np.inf
    for guard in (False, True):
        got = check(target, MASKED["tile"], (1, 1, 9, 200), 16, 16, {"mask": mask}, ((1, 1, SQ, SK),), guard)
        np.testing.assert_array_equal(got[0, 2:4], 0 if guard else np.nan)


def test_what_does_not_fit_is_an_error() -> None:
    target = VECTOR_TARGETS[0]
    sizes = AttentionSizes(B, H, SQ, SK, 16, 16)
    pairs = EpilogueProgram.parse("(acc: tile f32) -> (y: tile = v0) {\n  v0 = even acc\n}")
    with pytest.raises(ShapeError, match="across columns"):
        lower_attention(target, "a", pairs, ("q", "k", "v"), [], "out", sizes)
    with pytest.raises(ShapeError, match="axis 2 must be 1"):
        operand = ScoreOperand("mask", (B, 1, SQ, SK))
        lower_attention(target, "a", MASKED["col"], ("q", "k", "v"), [operand], "out", sizes)
    with pytest.raises(ShapeError, match="1 operands; 0 were given"):
        lower_attention(target, "a", MASKED["col"], ("q", "k", "v"), [], "out", sizes)
