"""The main loop of the tensor-core GEMM: a pipeline of copies, and matrix instructions.

The K tiles of A and W pass through ``stages`` buffers of shared memory, rows of 128 bytes in chunks of 16, chunk c of row r at
c ^ (r mod 8). Fragments of the next step are read while the tensor cores do this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm import tirx

from ...schedule.cuda_gemm import TILE_K, CudaGemmSchedule
from ..body import Buffer, Expr, f32
from .device import DeviceBody, address, element, int32, int64, quotient, remainder

if TYPE_CHECKING:
    from .gemm_tile import GemmKernel

_ROW = 2 * TILE_K
"""Bytes of a row of a K tile in shared memory."""
_CHUNK = 8
"""Halves of a 16-byte chunk."""
_UNROLL = 512
"""Matrix instructions of a warp up to which the K loop is unrolled: what a tile needs besides them counts when it has few."""


@dataclass(frozen=True)
class Warp:
    """Which lane of which warp a thread is, along M, N and K of the block's tile."""

    lane: Expr
    m: Expr
    n: Expr
    k: Expr

    @staticmethod
    def of(body: DeviceBody, schedule: CudaGemmSchedule, thread: Expr) -> Warp:
        """The place of ``thread``."""
        m, n, k = schedule.warps
        warp = body.let(quotient(thread, 32), "warp")
        plane = body.let(remainder(warp, m * n), "plane")
        return Warp(
            body.let(remainder(thread, 32), "lane"),
            body.let(quotient(plane, n), "warp_m"),
            body.let(remainder(plane, n), "warp_n"),
            body.let(quotient(warp, m * n), "warp_k") if k > 1 else int32(0),
        )


@dataclass(frozen=True)
class _Chunk:
    """16 bytes that a thread copies for each K tile: its number in the tile, and where the first one begins in the tensor."""

    number: Expr
    source: Expr
    present: Expr | bool


class MainLoop:
    """The accumulators of a block's tile: a thread's share is four floats a fragment."""

    def __init__(self, kernel: GemmKernel, panel: Expr, block: Expr, thread: Expr) -> None:
        self.kernel = kernel
        self.body = kernel.body
        self.schedule = schedule = kernel.schedule
        self.k = kernel.shape.k
        self.panel, self.block, self.thread = panel, block, thread
        self.warp = Warp.of(self.body, schedule, thread)
        self.tiles = -(-self.k // TILE_K)
        self.stages = min(self.tiles, schedule.stages)
        self.ahead = self.tiles if self.tiles <= schedule.stages else schedule.stages - 1
        self.steps = TILE_K // 16 // schedule.warps[2]
        self.stage_bytes = (schedule.rows + schedule.columns) * _ROW

    def write(self) -> Buffer:
        """Writes the loop and, if warps divide K, the sum of their parts."""
        body, (rows, columns) = self.body, self.schedule.fragments
        self.shared = body.shared(self.schedule.shared(self.k))
        self.acc = body.alloc(rows * columns * 4, name="acc")
        self.fragments_a = body.alloc(2 * rows * 4, "uint32", "fragments_a")
        self.fragments_b = body.alloc(2 * columns * 2, "uint32", "fragments_b")
        self._prepare()
        # Weights are there before the run: their copies start while the kernels before this one still work.
        for tile in range(self.ahead):
            self._copy_weights(int32(tile))
        body.do("coda_follow")
        for tile in range(self.ahead):
            self._copy_rows(int32(tile))
            body.do("coda_commit")
        body.do("coda_precede")
        for i in range(rows * columns * 4):
            body.store(self.acc, i, f32(0))
        self._arrived()
        self._read(int32(0), 0, 0)
        # Fragment buffers alternate step by step; with one step a tile, two tiles make a round.
        tiles_a_round = 1 if self.steps > 1 else 2
        rounds = (self.tiles - 1) // tiles_a_round
        instructions = self.tiles * self.steps * rows * columns
        with body.repeat(rounds, instructions <= _UNROLL, "round") as i:
            for j in range(tiles_a_round):
                self._tile(body.let(i * tiles_a_round + j, "tile"), j, last=False)
        for tile in range(rounds * tiles_a_round, self.tiles):
            self._tile(int32(tile), tile - rounds * tiles_a_round, last=tile == self.tiles - 1)
        if self.schedule.warps[2] > 1:
            self._add_parts()
        return self.acc

    def _arrived(self) -> None:
        """Waits for the oldest copies under way, of all threads."""
        self.body.do("coda_wait", self.ahead - 1)
        self.body.do("coda_barrier")

    def _tile(self, tile: Expr, place: int, last: bool) -> None:
        body = self.body
        if self.tiles > self.schedule.stages and not last:
            with body.when(tile + self.ahead < self.tiles):
                self._copy_rows(tile + self.ahead)
                self._copy_weights(tile + self.ahead)
        body.do("coda_commit")
        for step in range(self.steps):
            parity = (place * self.steps + step) % 2
            if step + 1 < self.steps:
                self._read(tile, step + 1, 1 - parity)
            elif not last:
                self._arrived()
                self._read(tile + 1, 0, 1 - parity)
            self._multiply(parity)

    def _stage(self, tile: Expr) -> Expr:
        return self.body.let(remainder(tile, self.stages) * self.stage_bytes, "stage")

    def _chunks(self, rows: int, source: Callable[[Expr], Expr]) -> list[_Chunk]:
        """This thread's chunks of a tile of ``rows`` rows; ``source``: where one begins in the tensor, by its number."""
        threads, total = self.schedule.threads, rows * TILE_K // _CHUNK
        chunks = []
        for start in range(0, total, threads):
            present = True if start + threads <= total else self.thread < total - start
            chunk = self.body.let(self.thread + start, "chunk")
            chunks.append(_Chunk(chunk, self.body.let(source(chunk), "source"), present))
        return chunks

    def _prepare(self) -> None:
        """What does not change along K: a thread's chunks, and where its fragments lie in a stage."""
        body, schedule, warp, k = self.body, self.schedule, self.warp, self.k
        rows, columns = schedule.fragments
        first_row = int64(self.block) * schedule.rows

        def source_a(chunk: Expr) -> Expr:
            # Rows beyond the last repeat it: what they make is not stored.
            row = tirx.min(first_row + int64(quotient(chunk, _CHUNK)), self.kernel.rows - 1)
            return row * k + int64(self.column * _CHUNK)

        self.column = body.let(remainder(self.thread, _CHUNK), "column")
        self.chunks_a = self._chunks(schedule.rows, source_a)
        start_w = int64(self.panel) * (self.tiles * schedule.columns * TILE_K)
        self.chunks_w = self._chunks(schedule.columns, lambda chunk: start_w + int64(chunk * _CHUNK))
        swizzled = self.column ^ remainder(quotient(self.thread, _CHUNK), 8)
        self.place_a = body.let(quotient(self.thread, _CHUNK) * _ROW + swizzled * 16, "place_a")
        lane = warp.lane
        row_a = warp.m * (rows * 16) + remainder(lane, 16)
        row_b = warp.n * (columns * 8) + remainder(lane, 8) + quotient(lane, 16) * 8 + schedule.rows
        self.lane_a, self.lane_b = [], []
        for step in range(self.steps):
            first = (warp.k + step * schedule.warps[2]) * 2
            chunk_a = (first + quotient(lane, 16)) ^ remainder(lane, 8)
            chunk_b = (first + remainder(quotient(lane, 8), 2)) ^ remainder(lane, 8)
            self.lane_a.append(body.let(row_a * _ROW + chunk_a * 16, "lane_a"))
            self.lane_b.append(body.let(row_b * _ROW + chunk_b * 16, "lane_b"))

    def _copy_rows(self, tile: Expr) -> None:
        """Starts the copies of a K tile of A."""
        body, stage = self.body, self._stage(tile)
        for i, chunk in enumerate(self.chunks_a):
            with body.when(chunk.present):
                to = stage + self.place_a + i * self.schedule.threads * 16
                self._copy_a(address(self.shared, to), chunk.source, tile)

    def _copy_weights(self, tile: Expr) -> None:
        """Starts the copies of a K tile of W."""
        body, stage = self.body, self._stage(tile)
        for chunk in self.chunks_w:
            with body.when(chunk.present):
                to = stage + self.schedule.rows * _ROW + chunk.number * 16
                source = chunk.source + int64(tile * (self.schedule.columns * TILE_K))
                body.do("coda_copy", address(self.shared, to), address(self.kernel.w, source), 16)

    def _copy_a(self, to: Expr, source: Expr, tile: Expr) -> None:
        """A chunk of A; beyond the last column, zeros."""
        body, k = self.body, self.k
        if k % TILE_K == 0:
            body.do("coda_copy", to, address(self.kernel.a, source + int64(tile * TILE_K)), 16)
            return
        first = body.let(tile * TILE_K + self.column * _CHUNK, "first")
        inside = tirx.Select(first < k, int64(tile * TILE_K), int64(self.column * -_CHUNK))
        left = tirx.max(int32(0), tirx.min(int32(_CHUNK), k - first))
        if k % _CHUNK == 0:
            body.do("coda_copy", to, address(self.kernel.a, source + inside), left * 2)
        else:
            body.do("coda_gather", to, address(self.kernel.a, source + inside), left)

    def _read(self, tile: Expr, step: int, parity: int) -> None:
        """Reads the fragments of a step, 16 of K, into one of the two fragment buffers."""
        stage, (rows, columns) = self._stage(tile), self.schedule.fragments
        for i in range(rows):
            at = stage + self.lane_a[step] + i * 16 * _ROW
            self._load_matrices(self.fragments_a, (parity * rows + i) * 4, at)
        for j in range(0, columns, 2):
            at = stage + self.lane_b[step] + j * 8 * _ROW
            self._load_matrices(self.fragments_b, (parity * columns + j) * 2, at)

    def _load_matrices(self, fragments: Buffer, start: int, at: Expr) -> None:
        self.body.do("coda_ldmatrix", *(element(fragments, start + e) for e in range(4)), address(self.shared, at))

    def _multiply(self, parity: int) -> None:
        rows, columns = self.schedule.fragments
        for i in range(rows):
            for j in range(columns):
                d = [element(self.acc, (i * columns + j) * 4 + e) for e in range(4)]
                a = [element(self.fragments_a, (parity * rows + i) * 4 + e) for e in range(4)]
                b = [element(self.fragments_b, (parity * columns + j) * 2 + e) for e in range(2)]
                self.body.do("coda_mma", *d, *a, *b)

    def _add_parts(self) -> None:
        """Leaves each of the warps that divide K with the whole sum of its own fragments, in the first accumulators."""
        body, warp = self.body, self.warp
        m, n, parts = self.schedule.warps
        rows, columns = self.schedule.fragments
        owned = rows * columns // parts
        lane = body.let((warp.m * n + warp.n) * (owned * 32) + warp.lane, "lane_in_part")

        def at(part: Expr | int, owner: Expr | int, fragment: int) -> Expr:
            return address(self.shared, ((part * parts + owner) * (m * n * owned * 32) + lane + fragment * 32) * 16)

        body.do("coda_barrier")
        for i in range(rows * columns):
            body.do("coda_put", at(warp.k, i // owned, i % owned), *(element(self.acc, i * 4 + e) for e in range(4)))
        body.do("coda_barrier")
        for i in range(owned):
            for e in range(4):
                body.store(self.acc, i * 4 + e, f32(0))
            for part in range(parts):
                body.do("coda_take", at(int32(part), warp.k, i), *(element(self.acc, i * 4 + e) for e in range(4)))
