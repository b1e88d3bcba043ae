"""The tensor-core GEMM's schedule, how it is chosen, and the layout of weights that goes with it. Needs nothing of TVM."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

TILE_K = 64
"""Halves of K in a tile: 128 bytes, a row of shared memory."""


@dataclass(frozen=True)
class CudaGemmSchedule:
    """Tiling of ``[M, K] @ [K, N]`` in halves.

    A block computes ``rows`` × ``columns`` with ``warps`` (M, N, K): its warps divide the tile along M and N, and each K tile
    along K, whose parts are added up through shared memory. ``stages`` K tiles are in shared memory at a time. It is meant for
    shapes of which it makes at least ``busy`` blocks for each multiprocessor.
    """

    rows: int
    columns: int
    warps: tuple[int, int, int]
    stages: int
    busy: float = 0.0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * math.prod(self.warps)

    @property
    def fragments(self) -> tuple[int, int]:
        """A warp's accumulators: fragments of 16 rows, times fragments of 8 columns."""
        return self.rows // self.warps[0] // 16, self.columns // self.warps[1] // 8

    @property
    def owned(self) -> tuple[int, int]:
        """The fragments, rows × columns, of which a warp finishes the sum and does the epilogue."""
        rows, columns = self.fragments
        count = rows * columns // self.warps[2]
        return max(1, count // columns), min(columns, count)

    @property
    def group(self) -> int:
        """Fragments side by side of which a thread has consecutive columns, two of each."""
        return math.gcd(self.owned[1], 4)

    @property
    def run(self) -> int:
        """Consecutive columns of a thread."""
        return 2 * self.group

    def shared(self, k: int) -> int:
        """Bytes of shared memory for K = ``k``."""
        stages = min(-(-k // TILE_K), self.stages) * (self.rows + self.columns) * TILE_K * 2
        partial = self.rows * self.columns * 4 * self.warps[2] if self.warps[2] > 1 else 0
        return max(stages, partial)


SCHEDULES = (
    CudaGemmSchedule(16, 32, (1, 1, 4), 12),
    CudaGemmSchedule(32, 32, (1, 1, 4), 12),
    CudaGemmSchedule(64, 48, (2, 1, 2), 6, busy=0.7),
    CudaGemmSchedule(64, 64, (2, 2, 1), 4, busy=0.7),
    CudaGemmSchedule(128, 128, (2, 2, 1), 3, busy=4.0),
)
"""From the smallest tile to the largest; each needs at most 99 KB of shared memory, the least that a block has on sm_80–sm_90."""


def choose_cuda_gemm(rows: int, n: int, multiprocessors: int, classes: int = 1) -> CudaGemmSchedule:
    """The largest tile that ``rows`` × ``n`` keeps busy, and of which they fill more than half.

    ``classes``: into how many classes the epilogue splits columns; a thread's consecutive columns must divide into them.
    """
    fitting = [s for s in SCHEDULES if s.run % classes == 0]
    busy = [s for s in fitting if _blocks(s, rows, n) >= s.busy * multiprocessors and s.rows < 2 * rows]
    return busy[-1] if busy else fitting[0]


def _blocks(schedule: CudaGemmSchedule, rows: int, n: int) -> int:
    return -(-rows // schedule.rows) * -(-n // schedule.columns)


def pack_weight(schedule: CudaGemmSchedule, weight: npt.NDArray[Any]) -> npt.NDArray[np.float16]:
    """W ``[K, N]`` as ``[N / columns, K / 64, columns, 64]`` float16, flat, padded with zeros.

    Of each row's eight 16-byte chunks, chunk c lies at c ^ (row mod 8), so that reads of a column of chunks meet no bank twice.
    """
    k, n = weight.shape
    tiles, tiles_k = -(-n // schedule.columns), -(-k // TILE_K)
    padded = np.zeros((tiles * schedule.columns, tiles_k * TILE_K), np.float16)
    padded[:n, :k] = weight.T
    tiled = padded.reshape(tiles, schedule.columns, tiles_k, 8, 8)[:, natural_columns(schedule)]
    chunks = np.arange(8) ^ (np.arange(schedule.columns)[:, None] % 8)
    swizzled = np.take_along_axis(tiled.transpose(0, 2, 1, 3, 4), chunks[None, None, :, :, None], 3)
    return np.ascontiguousarray(swizzled).ravel()


def natural_columns(schedule: CudaGemmSchedule) -> npt.NDArray[np.intp]:
    """The column of a block's tile that each row of its packed weights holds.

    Of a product of 8 columns, thread t of four has columns 2t and 2t + 1. So that it has ``run`` consecutive ones of a group of
    ``group`` products, the weights' columns are dealt out in pairs.
    """
    group, packed = schedule.group, np.arange(schedule.columns)
    start = packed // (8 * group) * (8 * group)
    product, column = packed // 8 % group, packed % 8
    return start + column // 2 * schedule.run + product * 2 + column % 2
