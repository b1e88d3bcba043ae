"""Attention of few queries over many keys, in parts: heads that share keys, past rows, sinks, bands, masks; against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import test_attention as plain
import test_attention_bands as banded
from kernel_harness import VECTOR_TARGETS

from coda_edge import targets
from coda_edge.epilogue.program import EpilogueProgram
from coda_edge.lower.attention import AttentionSizes, lower_attention
from coda_edge.lower.attention_few import PART
from coda_edge.schedule import AttentionSchedule, attention_space, choose_attention
from coda_edge.symbolic import evaluate, symbol

each_target = pytest.mark.parametrize("target", VECTOR_TARGETS, ids=lambda t: t.name)


@each_target
def test_parts(target: targets.Target) -> None:
    """One part, a second one of a single key, and several of which the last is shorter."""
    for sizes in ((1, 3, 1, PART), (2, 1, 3, PART + 1), (1, 2, 2, 5 * PART - 7)):
        plain.check(target, plain.PLAIN, sizes, 32, 36)


def test_masks_across_parts() -> None:
    """A query that sees nothing in its first parts, one that sees nothing at all, and one with a score that is not a number."""
    keys = 3 * PART
    mask = np.zeros((1, 1, 3, keys), np.float32)
    mask[..., 0, : keys - 5] = -np.inf
    mask[..., 1, :] = -np.inf
    mask[..., 2, 2 * PART + 3] = np.nan
    shapes = ((1, 1, plain.SQ, plain.SK),)
    for guard in (False, True):
        got = plain.check(
            VECTOR_TARGETS[0], plain.MASKED["tile"], (1, 2, 3, keys), 16, 16, {"mask": mask}, shapes, guard
        )
        np.testing.assert_array_equal(got[0, 1:], 0 if guard else np.nan)


@pytest.mark.parametrize("kind", ["all", "left", "right", "none"])
def test_shared_keys_past_and_sink(kind: str) -> None:
    for b, new, past in ((2, 1, 2 * PART), (1, 3, PART + 30)):
        banded.check(banded.masked(banded.LOWEST), (banded.CAUSAL,), (b, new, past + new), kind, past=past, sink=True)


@pytest.mark.parametrize("low", [-np.inf, banded.LOWEST])
def test_windows_across_parts(low: float) -> None:
    for kind in ("all", "left"):
        banded.check(banded.masked(low), (banded.WINDOW,), (2, 2, 2 * PART + 9), kind, guard=low == -np.inf)


def test_items_and_workspace() -> None:
    """Few queries: an item for each head with keys and part of them. Others: for each head and block of queries, and no workspace."""
    queries, keys = symbol("Sq"), symbol("Sk")
    target = VECTOR_TARGETS[0]
    program = EpilogueProgram.parse("(acc: tile f32) -> (s: tile = v0) {\n  v0 = mul acc 0.5\n}")
    sizes = AttentionSizes(2, 12, queries, keys, 32, 32, group=3)
    call = lower_attention(target, "a", program, ("q", "k", "v"), [], "out", sizes)
    size = call.buffers[-1].size  # type: ignore[union-attr]  # a workspace
    for sq, sk, items, bytes_ in (
        (1, 4 * PART, 2 * 4 * 4, 4 * 24 * 4 * 34),
        (3, PART, 2 * 4, 0),
        (100, PART, 2 * 12 * -(-100 // choose_attention(target, 32).queries), 0),
    ):
        given = {"Sq": sq, "Sk": sk}
        assert (evaluate(call.items, given), evaluate(size, given)) == (items, bytes_)


@pytest.mark.parametrize("name", ["x86-64-v2", "x86-64-v3", "x86-64-v4", "arm64-linux-a76", "riscv64-linux"])
def test_space(name: str) -> None:
    target = targets.get(name)
    space = attention_space(target, 64, 64)
    assert space[0] == choose_attention(target, 64)
    assert 5 < len(space) == len(set(space)) < 40
    for schedule in space:
        assert schedule.queries % schedule.value_rows == 0 and schedule.queries % schedule.lanes == 0


def test_schedules_of_the_space() -> None:
    target = VECTOR_TARGETS[-1]
    for schedule in {(s.key_rows, s.value_vectors): s for s in attention_space(target, 40, 40)}.values():
        assert isinstance(schedule, AttentionSchedule)
        plain.check(target, plain.PLAIN, (1, 1, 70, 90), 40, 40, schedule=schedule)
