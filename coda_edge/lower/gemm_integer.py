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
    step = partial(_step, tile, panel, pieces)
    with left.runs() as (run, distance):
        origin: Index = 0
        if left.count > 1:
            origin = body.let(run * (left.run // WORD), "origin")
            starts = [body.let(start + distance, "run_start") for start in starts]

        def steps(first: Index, count: int) -> None:
            whole, single = divmod(count, schedule.unroll)
            with body.loop(0, whole, "word") as group:
                for i in range(schedule.unroll):
                    step(starts, origin, first + group * schedule.unroll + i)
            for i in range(single):
                step(starts, origin, index(first + whole * schedule.unroll + i))

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
            step(starts, origin, index(words), rest)


def _step(
    tile: Tile,
    panel: WeightPanel,
    pieces: Pieces,
    starts: Sequence[Expr],
    origin: Index,
    word: Expr,
    count: int = WORD,
) -> None:
    """Adds the products of one word of each row, of which ``count`` bytes are A's."""
    dot = DOTS[tile.shape.dot]
    weights = [_whole(tile.body.let(panel.words(origin + word, at, n), "w"), dot) for _, at, n in pieces]
    for i, start in enumerate(starts):
        a = tile.body.let(_word(tile, start + word * WORD, count), "a")
        for (piece, _, _), w in zip(pieces, weights, strict=True):
            acc = tile.acc[replace(piece, row=i)]
            tile.body.store(acc, 0, dot.accumulate(load(acc, 0, dot.lanes), a, w))


def _whole(words: Expr, dot: Dot) -> Expr:
    """Some columns' words in all lanes of an instruction; what the others hold is of no concern."""
    count = lanes(words)
    wide = shuffle([words] * -(-dot.lanes // count), range(dot.lanes)) if count > 1 else widen(words, dot.lanes)
    return tirx.reinterpret(f"int32x{dot.lanes}", wide)


def _word(tile: Tile, at: Expr, count: int) -> Expr:
    """``count`` bytes of A as an int32, the first in the lowest bits."""
    buffer = tile.kernel.left.buffer
    if count == WORD:
        return tirx.reinterpret("int32", load(buffer, at, WORD))
    value = tirx.const(0, "int32")
    for i in range(count):
        byte = load(buffer, at + i).astype("int32") & tirx.const(0xFF, "int32")
        value = value | (byte << tirx.const(8 * i, "int32"))
    return value
