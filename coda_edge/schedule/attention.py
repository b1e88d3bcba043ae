"""The attention schedule, the space of schedules for a head's sizes, and which one is chosen untuned. Needs nothing of TVM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

from ..targets.target import Target


@dataclass(frozen=True)
class AttentionSchedule:
    """Tiling of ``softmax(q kᵀ) v`` for one head.

    A work item is ``queries`` rows of q. It goes over the keys in blocks of ``keys``. A score tile is ``key_rows`` keys ×
    ``query_vectors`` vectors of ``lanes`` queries; a value tile is ``value_rows`` queries × ``value_vectors`` vectors of
    columns of v. ``queries`` is a multiple of ``value_rows`` and of ``lanes``.
    """

    lanes: int
    queries: int
    keys: int
    key_rows: int
    query_vectors: int
    value_rows: int
    value_vectors: int
    grain: int = 1


def choose_attention(target: Target, columns: int = 0) -> AttentionSchedule:
    """Tiles that ``target`` holds in registers, blocks whose scores and keys stay in the first-level cache.

    ``columns``: of v. Where four vectors are no more than these, wide value tiles go over v in whole rows.
    """
    lanes = target.lanes(4)
    if target.registers >= 32 and target.vector == 16:
        return AttentionSchedule(lanes, 48, 96, 8, 3, 12, 2)
    if target.registers >= 32:
        return AttentionSchedule(lanes, 64, 64, 6, 4, *((4, 4) if columns >= 4 * lanes else (8, 2)))
    return AttentionSchedule(lanes, 48, 96, 6, 2, 6, 2)


def attention_space(target: Target, depth: int, columns: int) -> Sequence[AttentionSchedule]:
    """The schedules worth measuring for q and k of ``depth`` and v of ``columns`` columns, the untuned choice first.

    Every pair of a score tile and a value tile that ``target`` holds without spills, then the untuned choice with other blocks. Scratch
    stays within the second-level cache.
    """
    chosen = choose_attention(target, columns)
    lanes, many = chosen.lanes, target.registers >= 32
    scores = ((8, 3), (6, 4), (12, 2)) if many else ((6, 2), (4, 3))
    values = ((12, 2), (8, 2), (8, 3), (6, 4), (4, 4)) if many else ((6, 2), (4, 3), (4, 2))
    found = [chosen]
    for key_rows, query_vectors in scores:
        for rows, vectors in values:
            step = lcm(query_vectors * lanes, rows)
            queries = step * max(1, round(chosen.queries / step))
            if (vectors - 1) * lanes < columns and queries <= 2 * chosen.queries:
                found.append(AttentionSchedule(lanes, queries, chosen.keys, key_rows, query_vectors, rows, vectors))
    found += [replace(chosen, keys=keys) for keys in (32, 48, 64, 96, 128, 192)]
    found.append(replace(chosen, queries=2 * chosen.queries))
    return tuple(s for s in dict.fromkeys(found) if _scratch(s, depth, columns) <= target.l2)


def _scratch(schedule: AttentionSchedule, depth: int, columns: int) -> int:
    """Bytes of an item's queries, scores and results."""
    return 4 * schedule.queries * (depth + schedule.keys + columns)
