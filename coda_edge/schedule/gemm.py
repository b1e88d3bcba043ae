"""The GEMM schedule, the space of schedules for a weight's shape, and which one is chosen untuned. Needs nothing of TVM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..targets.target import Target


@dataclass(frozen=True)
class GemmSchedule:
    """Tiling of ``[M, K] @ [K, N]`` for every M; each field gives right results with any other.

    - ``rows`` × ``vectors`` vectors of ``lanes`` float32: a register tile. A panel of weights is as wide as a tile.
    - ``block``: rows of a work item at most, rounded up to whole tiles; rows are spread evenly over as few items as can be.
    - ``tail``: rows that are left over make a tile of the next multiple of ``tail`` rows; ``rows``: of a whole tile.
    - ``panels``: panels of an item. ``rows_outer``: an item goes over its rows outside and its panels inside, not the other way round.
    - ``rows_first``: items that follow each other, which a thread does, share their panels and not their rows.
    - ``k_block``: K steps after which accumulators wait in scratch, while all tiles of the item's panels go over the same part of K;
      0: they stay in registers for all of K.
    - ``pack``: the item's rows of A are copied to scratch first, those of a tile side by side.
    - ``prefetch``: each item asks for the next panel ahead, a share of it every ``stride`` K steps. ``far``: with the hint for the last
      cache and not for the second-level one.
    - ``unroll``: K steps that are written out in a row.
    - ``grain``: items that a thread takes at a time, at least.
    """

    rows: int
    vectors: int
    lanes: int
    block: int = 128
    tail: int = 2
    panels: int = 1
    rows_outer: bool = False
    rows_first: bool = False
    k_block: int = 0
    pack: bool = False
    prefetch: bool = True
    far: bool = False
    stride: int = 16
    unroll: int = 1
    grain: int = 1

    @property
    def width(self) -> int:
        """Columns of a panel."""
        return self.vectors * self.lanes

    @property
    def block_rows(self) -> int:
        """Rows of a work item at most: ``block`` rounded up to whole tiles."""
        return -(-self.block // self.rows) * self.rows

    @property
    def tails(self) -> tuple[int, ...]:
        """The heights of tiles for what is left over, each more than the one before: the last takes ``rows - 1`` rows."""
        step = min(max(self.tail, 1), self.rows)
        return tuple(min(height, self.rows) for height in range(step, self.rows - 1 + step, step))


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


def gemm_space(target: Target, n: int, k: int, classes: int = 1) -> Sequence[GemmSchedule]:
    """The schedules worth measuring for weights ``[k, n]``, tens of them, the untuned choice first.

    ``classes``: as in ``gemm_candidates``. Every register tile as it is, then the untuned choice with one thing different.
    """
    chosen = choose_gemm(target, n, k, classes)
    found = [chosen, *(_suited(tile, target, n, k) for tile in gemm_candidates(target, classes))]
    found += [replace(chosen, unroll=unroll) for unroll in (1, 2, 4)]
    found += [replace(chosen, block=block) for block in (64, 128, 192, 384)]
    found += [replace(chosen, tail=tail) for tail in (1, 2, chosen.rows)]
    found += [replace(chosen, prefetch=not chosen.prefetch), replace(chosen, far=not chosen.far)]
    found += [replace(chosen, stride=steps) for steps in (8, 12, 16, 32)]
    found += [replace(chosen, rows_first=True), replace(chosen, rows_first=True, block=48), replace(chosen, pack=True)]
    if n > 2 * chosen.width:
        found += [replace(chosen, panels=2, k_block=0)]
        found += [replace(chosen, panels=4, k_block=0, rows_outer=True, prefetch=False, block=b) for b in (48, 192)]
    for size in (256, 384, 512, 768):
        if size <= k // 2:
            found += [replace(chosen, k_block=size, panels=panels, block=128) for panels in (2, 4)]
    return tuple(dict.fromkeys(found))


def choose_gemm(target: Target, n: int, k: int, classes: int = 1) -> GemmSchedule:
    """The untuned schedule for weights ``[k, n]``: the tile with the fewest estimated cycles per row and K step.

    Of tiles whose estimates differ by less than 1 % the first one is taken.
    """

    def cycles(schedule: GemmSchedule) -> float:
        full, rest = divmod(n, schedule.width)
        tail = classes * -(-rest // (classes * schedule.lanes))
        return full * _tile_cycles(schedule.rows, schedule.vectors) + (_tile_cycles(schedule.rows, tail) if rest else 0)

    tiles = list(gemm_candidates(target, classes))
    least = min(map(cycles, tiles))
    return _suited(next(tile for tile in tiles if cycles(tile) <= 1.01 * least), target, n, k)


def _suited(tile: GemmSchedule, target: Target, n: int, k: int) -> GemmSchedule:
    """Everything but the tile.

    A block's rows of A are to stay in the second-level cache while panels pass by. Where K is so long that they would not, they are
    gone over in parts, each for several panels: as many as leave enough items for some threads.
    """
    tile = replace(
        tile, unroll=4 if target.vector * target.registers >= _LARGE else 1, stride=target.stride or tile.stride
    )
    if tile.width >= _WIDE_PANEL:
        tile = replace(tile, far=True, stride=12)
    if k < _LONG:
        return replace(tile, block=192 if k <= _SHORT else 128)
    size = -(-k // round(k / _PART) // tile.stride) * tile.stride
    panels = max(1, min(4, n // tile.width // 4))
    return replace(tile, block=128, k_block=size, panels=panels)


def _tile_cycles(rows: int, vectors: int) -> float:
    """Cycles a row of one K step takes: two multiply-adds or two loads a cycle, and a little for each of the others."""
    multiplies, loads = rows * vectors, rows + vectors
    return (max(multiplies, loads, _IN_FLIGHT) / 2 + min(multiplies, loads) * _OVERLAP) / rows


_OVERLAP = 0.02
_IN_FLIGHT = 10
"""Independent multiply-adds that keep two units busy: a latency of four to five cycles."""
_LARGE = 512
"""Bytes of all vector registers from which on the K loop gains by being written out: measured on x86-64, by LLVM's models on 64-bit Arm."""
_WIDE_PANEL = 48
"""Columns of a panel from which on it is asked for in shares of fewer steps and with the hint for the last cache. On an Ice Lake server, by 8
steps, 32 rows gain 10 to 20 % by both where weights come from memory and 6 % where they come from the last cache; 128 rows up to 3 %, and nothing.
On Zen 5 12 steps, whose shares are complete before the panel ends, are better than 8: whole models of 32 rows by 16 and 8 % on one and two
threads, of 128 rows by 1 (MiniLM) to 5 % (BERT-base)."""
_SHORT, _LONG = 768, 2048
"""K up to which a block may have more rows, and K from which on it is gone over in parts of about ``_PART`` steps."""
_PART = 384
