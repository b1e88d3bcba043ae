"""The main loop of a GEMM of whole numbers: bytes of A by bytes of W, summed in int32. See ``gemm.py``.

A step is four or eight of K, which lie in one word of A and, for each column, in one word of a panel; the target's ``Dot`` adds their products to
the accumulators. What is left over of K is a word of fewer bytes of A and zeros. The sums are exact, and the epilogue begins with them.

Where an operation takes two rows by two columns, accumulators are such squares, of which the rows are made behind the loop; the last one of an
odd number of rows is its own neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
"""Steps of K in the words of every target."""


def multiply_words(tile: Tile, pieces: Pieces, prefetch: Callable[[Expr, Expr, int], None]) -> None:
    """The products of a tile of ``pieces``, to its accumulators.

    ``prefetch`` asks for a share, of so many steps, of the panel behind the one that starts at an element.
    """
    body, left, schedule, place = tile.body, tile.kernel.left, tile.kernel.schedule, tile.place
    panel = tile.kernel.weight.panel(body, tile.panel, schedule.width, tile.columns.width)
    sure = place.sure
    starts = [*(left.starts(tile.rows[:sure], True) if sure else ()), *left.starts(tile.rows[sure:], False)]
    dot = DOTS[tile.shape.dot]
    words, rest = divmod(left.run, dot.word)
    sums = _Squares(tile, pieces) if dot.rows > 1 else _Rows(tile, pieces)
    with left.runs() as (run, distance):
        origin: Index = 0
        if left.count > 1:
            origin = body.let(run * words, "origin")
            starts = [body.let(start + distance, "run_start") for start in starts]
        step = partial(sums.step, panel, origin)

        def steps(first: Index, count: int) -> None:
            whole, single = divmod(count, schedule.unroll)
            with body.loop(0, whole, "word") as group:
                _steps(tile, step, starts, first + group * schedule.unroll, schedule.unroll)
            _steps(tile, step, starts, index(first + whole * schedule.unroll), single)

        per_block = max(schedule.unroll, schedule.stride // dot.word)
        blocks, single = divmod(words, per_block)
        if blocks and schedule.prefetch:
            number = place.number * left.count + run
            with body.loop(0, blocks, "k_block") as block:
                prefetch(panel.start, number * blocks + block, per_block * dot.word)
                steps(block * per_block, per_block)
            steps(blocks * per_block, single)
        else:
            steps(0, words)
        if rest:
            at = words * dot.word
            step(index(words), [body.let(_partial_word(tile, start + at, rest), "a") for start in starts], 0)
    sums.finish()


def _steps(
    tile: Tile, step: Callable[[Expr, Sequence[Expr], int], None], starts: Sequence[Expr], first: Expr, count: int
) -> None:
    """``count`` steps from the word ``first`` on; the words of A are loaded as many at a time as the operation wants."""
    body, buffer, dot = tile.body, tile.kernel.left.buffer, DOTS[tile.shape.dot]
    together, word = dot.together, f"int{8 * dot.word}"
    whole = count - count % together
    for at, size in [*((at, together) for at in range(0, whole, together)), *((at, 1) for at in range(whole, count))]:
        begin, dtype = (first + at) * dot.word, word if size == 1 else f"{word}x{size}"
        loaded = [
            body.let(tirx.reinterpret(dtype, load(buffer, start + begin, size * dot.word)), "a") for start in starts
        ]
        for i in range(size):
            step(first + (at + i), loaded, i)


@dataclass
class _Rows:
    """Sums of a row and the columns of a vector."""

    tile: Tile
    pieces: Pieces

    def step(self, panel: WeightPanel, origin: Index, word: Expr, left: Sequence[Expr], which: int) -> None:
        """Adds the products of one word of each row: of those that ``left`` has the one called ``which``."""
        tile, dot = self.tile, DOTS[self.tile.shape.dot]
        weights = [_whole(tile.body.let(panel.words(origin + word, at, n), "w"), dot) for _, at, n in self.pieces]
        for i, several in enumerate(left):
            a = shuffle([several], [which])
            for (piece, _, _), w in zip(self.pieces, weights, strict=True):
                acc = tile.acc[replace(piece, row=i)]
                tile.body.store(acc, 0, dot.accumulate(load(acc, 0, dot.lanes), a, w))

    def finish(self) -> None:
        """The sums are where they are wanted."""


class _Squares:
    """Sums of two rows and two columns: of rows 2i and 2i + 1, and of columns 2j and 2j + 1 of a vector."""

    def __init__(self, tile: Tile, pieces: Pieces) -> None:
        self.tile, self.pieces = tile, pieces
        self.columns = [(at + j, min(2, n - j)) for _, at, n in pieces for j in range(0, n, 2)]
        self.rows = range(0, len(tile.rows), 2)
        self.sums = {(i, at): tile.body.alloc(4, "int32", "square") for i in self.rows for at, _ in self.columns}
        for square in self.sums.values():
            tile.body.store(square, 0, widen(tirx.const(0, "int32"), 4))

    def step(self, panel: WeightPanel, origin: Index, word: Expr, left: Sequence[Expr], which: int) -> None:
        """As ``_Rows.step``."""
        body, dot = self.tile.body, DOTS[self.tile.shape.dot]
        wide = lanes(left[0])
        pairs = [
            body.let(shuffle([left[i], left[min(i + 1, len(left) - 1)]], [which, wide + which]), "pair")
            for i in self.rows
        ]
        for at, n in self.columns:
            w = body.let(widen(panel.words(origin + word, at, n), 2), "w")
            for i, pair in zip(self.rows, pairs, strict=True):
                square = self.sums[i, at]
                body.store(square, 0, dot.accumulate(load(square, 0, 4), pair, w))

    def finish(self) -> None:
        """The rows of the squares, to the tile's accumulators."""
        body, tile = self.tile.body, self.tile
        for i in range(len(tile.rows)):
            first = 2 * (i % 2)
            for piece, at, n in self.pieces:
                squares = [load(self.sums[i - i % 2, at + j], 0, 4) for j in range(0, n, 2)]
                order = [4 * j + first + c for j in (0, len(squares) - 1) for c in range(2)]
                body.store(tile.acc[replace(piece, row=i)], 0, shuffle(squares, order))


def _whole(words: Expr, dot: Dot) -> Expr:
    """Some columns' words in all lanes of an instruction; what the others hold is of no concern."""
    count = lanes(words)
    wide = shuffle([words] * -(-dot.lanes // count), range(dot.lanes)) if count > 1 else widen(words, dot.lanes)
    return tirx.reinterpret(f"int32x{dot.lanes}", wide)


def _partial_word(tile: Tile, at: Expr, count: int) -> Expr:
    """``count`` bytes of A as one word, the first in the lowest bits."""
    word = f"int{8 * DOTS[tile.shape.dot].word}"
    value = tirx.const(0, word)
    for i in range(count):
        byte = load(tile.kernel.left.buffer, at + i).astype(word) & tirx.const(0xFF, word)
        value = value | (byte << tirx.const(8 * i, word))
    return value
