"""The tensor-core attention's schedule, and how it is chosen. Needs nothing of TVM."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ShapeError

MOST_SHARED = 99 << 10
"""The least shared memory that a block has on sm_80 to sm_90."""
ROW = 64
"""Halves of a row of a tile in shared memory."""


@dataclass(frozen=True)
class CudaAttentionSchedule:
    """A block has ``warps`` × 16 rows of q, of all heads that share their keys, and goes over the keys in blocks of ``keys``.

    ``stages`` blocks of keys and values are in shared memory at a time.
    """

    warps: int
    keys: int
    stages: int = 2

    @property
    def rows(self) -> int:
        """Rows of q of a block."""
        return 16 * self.warps

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    def shared(self, depth: int, columns: int) -> int:
        """Bytes of shared memory for q and k of ``depth`` and v of ``columns``."""
        wide, tall = (-(-n // ROW) * ROW * 2 for n in (depth, columns))
        return self.rows * wide + self.stages * self.keys * (wide + tall)


SCHEDULES = tuple(CudaAttentionSchedule(warps, keys) for warps in (4, 2, 1) for keys in (64, 32, 16))
"""From the most rows and keys to the fewest."""


def choose_cuda_attention(rows: int, depth: int, columns: int) -> CudaAttentionSchedule:
    """The largest blocks that have shared memory enough and no warp without rows.

    ``rows``: of q, of the heads that share their keys. Raises ShapeError where a head is too wide for any.
    """
    fitting = [s for s in SCHEDULES if s.shared(depth, columns) <= MOST_SHARED]
    if not fitting:
        raise ShapeError(
            f"attention with {depth} columns of keys and {columns} of values a head needs more shared memory than a block "
            f"has ({MOST_SHARED} bytes): use the CPU target for this model"
        )
    return next((s for s in fitting if s.rows < rows + 16), fitting[-1])
