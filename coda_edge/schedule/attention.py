"""The attention schedule."""

from __future__ import annotations

from dataclasses import dataclass

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


def choose_attention(target: Target) -> AttentionSchedule:
    """Tiles that ``target`` holds in registers, blocks whose scores and keys stay in the first-level cache."""
    if target.registers >= 32 and target.vector == 16:
        return AttentionSchedule(target.lanes(4), 48, 96, 8, 3, 12, 2)
    if target.registers >= 32:
        return AttentionSchedule(target.lanes(4), 64, 64, 6, 4, 8, 2)
    return AttentionSchedule(target.lanes(4), 48, 96, 6, 2, 6, 2)
