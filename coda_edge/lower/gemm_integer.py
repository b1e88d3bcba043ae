"""The main loop of a GEMM of whole numbers: bytes of A by bytes of W, summed in int32. See ``gemm.py``.

A step is four of K, which lie in one word of A and, for each column, in one word of a panel; the target's ``Dot`` adds their products to the
accumulators. What is left over of K is a word of fewer bytes of A and zeros. The sums are exact, and the epilogue begins with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from tvm import tirx

from ..epilogue.tir import Place
from .body import Expr, Index, index, lanes, load, shuffle, widen
from .dot import DOTS, Dot
from .weights import WeightPanel

if TYPE_CHECKING:
    from .gemm_tile import Tile

Pieces: TypeAlias = "Sequence[tuple[Place, int, int]]"
"""The vectors of a row of a panel: place, offset in the panel, lanes."""

WORD = 4
"""Steps of K in a word."""


def multiply_words(tile: Tile, pieces: Pieces, prefetch: Callable[[Expr, Expr, int], None]) -> None:
    """The products of a tile of ``pieces``, to its accumulators.

    ``prefetch`` asks for a share, of so many steps, of the panel behind the one that starts at an element.
    """
    body, left, schedule, place = tile.body, tile.kernel.left, tile.kernel.schedule, tile.place
    panel = tile.kernel.weight.panel(body, tile.panel, schedule.width, tile.columns.width)
    sure = place.sure
    starts = [*(left.starts(tile.rows[:sure], True) if sure else ()), *left.starts(tile.rows[sure:], False)]
    words, rest = divmod(left.run, WORD)
    with left.runs() as (run, distance):
        origin: Index = 0
        if left.count > 1:
            origin = body.let(run * (left.run // WORD), "origin")
            starts = [body.let(start + distance, "run_start") for start in starts]
        step = partial(_step, tile, panel, pieces, origin)

        def steps(first: Index, count: int) -> None:
            whole, single = divmod(count, schedule.unroll)
            with body.loop(0, whole, "word") as group:
                _steps(tile, step, starts, first + group * schedule.unroll, schedule.unroll)
            _steps(tile, step, starts, index(first + whole * schedule.unroll), single)

        per_block = max(schedule.unroll, schedule.stride // WORD)
        blocks, single = divmod(words, per_block)
        if blocks and schedule.prefetch:
            number = place.number * left.count + run
            with body.loop(0, blocks, "k_block") as block:
                prefetch(panel.start, number * blocks + block, per_block * WORD)
                steps(block * per_block, per_block)
            steps(blocks * per_block, single)
        else:
            steps(0, words)
        if rest:
            at = words * WORD
            step(index(words), [body.let(_partial_word(tile, start + at, rest), "a") for start in starts])


def _steps(
    tile: Tile, step: Callable[[Expr, Sequence[Expr]], None], starts: Sequence[Expr], first: Expr, count: int
) -> None:
    """``count`` steps from the word ``first`` on; the words of A are loaded as many at a time as the operation wants."""
    body, buffer, together = tile.body, tile.kernel.left.buffer, DOTS[tile.shape.dot].together
    whole = count - count % together
    for at, size in [*((at, together) for at in range(0, whole, together)), *((at, 1) for at in range(whole, count))]:
        begin, dtype = (first + at) * WORD, "int32" if size == 1 else f"int32x{size}"
        loaded = [body.let(tirx.reinterpret(dtype, load(buffer, start + begin, size * WORD)), "a") for start in starts]
        for i in range(size):
            step(first + (at + i), [shuffle([a], [i]) for a in loaded])


def _step(tile: Tile, panel: WeightPanel, pieces: Pieces, origin: Index, word: Expr, left: Sequence[Expr]) -> None:
    """Adds the products of one word of each row, which ``left`` has."""
    dot = DOTS[tile.shape.dot]
    weights = [_whole(tile.body.let(panel.words(origin + word, at, n), "w"), dot) for _, at, n in pieces]
    for i, a in enumerate(left):
        for (piece, _, _), w in zip(pieces, weights, strict=True):
            acc = tile.acc[replace(piece, row=i)]
            tile.body.store(acc, 0, dot.accumulate(load(acc, 0, dot.lanes), a, w))


def _whole(words: Expr, dot: Dot) -> Expr:
    """Some columns' words in all lanes of an instruction; what the others hold is of no concern."""
    count = lanes(words)
    wide = shuffle([words] * -(-dot.lanes // count), range(dot.lanes)) if count > 1 else widen(words, dot.lanes)
    return tirx.reinterpret(f"int32x{dot.lanes}", wide)


def _partial_word(tile: Tile, at: Expr, count: int) -> Expr:
    """``count`` bytes of A as an int32, the first in the lowest bits."""
    value = tirx.const(0, "int32")
    for i in range(count):
        byte = load(tile.kernel.left.buffer, at + i).astype("int32") & tirx.const(0xFF, "int32")
        value = value | (byte << tirx.const(8 * i, "int32"))
    return value
