"""The GEMM schedule and how it is chosen for a weight's shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..targets.target import Target


@dataclass(frozen=True)
class GemmSchedule:
    """Tiling of ``[M, K] @ [K, N]``.

    A register tile is ``rows`` × ``vectors`` vectors of ``lanes`` float32; a weight panel is as wide as a tile. A work item is a
    panel for ``block`` rows, a multiple of ``rows``. Every ``unroll`` steps of the K loop, a share of the next panel is prefetched.
    """

    rows: int
    vectors: int
    lanes: int
    block: int = 128
    unroll: int = 16
    prefetch: bool = True
    grain: int = 1

    @property
    def width(self) -> int:
        """Columns of a panel."""
        return self.vectors * self.lanes

    @property
    def block_rows(self) -> int:
        """Rows of a work item: ``block`` rounded up to whole tiles."""
        return -(-self.block // self.rows) * self.rows


def gemm_candidates(target: Target, classes: int = 1) -> Iterator[GemmSchedule]:
    """Register tiles that ``target`` holds without spills: accumulators, a row of weights and a broadcast.

    Wider panels than four vectors would leave too few items. ``classes``: into how many classes the epilogue splits a
    panel's columns, each of which takes whole vectors.
    """
    for rows, vectors in target.tiles:
        if vectors % classes == 0:
            yield GemmSchedule(rows, vectors, target.lanes(4))
    if any(vectors % classes == 0 for _, vectors in target.tiles):
        return
    for vectors in range(1, 5):
        if vectors % classes:
            continue
        # Beyond 12 rows the addresses of A's rows no longer fit in the integer registers.
        rows = min((target.registers - vectors - 1) // vectors, 12)
        yield GemmSchedule(rows - rows % 4 if rows > 8 else rows, vectors, target.lanes(4))


def choose_gemm(target: Target, n: int, classes: int = 1) -> GemmSchedule:
    """The candidate with the fewest estimated cycles per row and K step for ``n`` columns."""

    def cycles(schedule: GemmSchedule) -> float:
        full, rest = divmod(n, schedule.width)
        tail = classes * -(-rest // (classes * schedule.lanes))
        total = full * _tile_cycles(schedule.rows, schedule.vectors) + (
            _tile_cycles(schedule.rows, tail) if rest else 0
        )
        return total * schedule.block_rows / schedule.block

    return min(gemm_candidates(target, classes), key=cycles)


def _tile_cycles(rows: int, vectors: int) -> float:
    """Cycles a row of one K step takes: two multiply-adds or two loads a cycle, and a little for each of the others."""
    multiplies, loads = rows * vectors, rows + vectors
    return (max(multiplies, loads, _IN_FLIGHT) / 2 + min(multiplies, loads) * _OVERLAP) / rows


_OVERLAP = 0.02
_IN_FLIGHT = 10
"""Independent multiply-adds that keep two units busy: a latency of four to five cycles."""
