"""Where the columns of a GEMM's tile output go: plain rows, a range of columns, attention heads. See ``gemm_tile.py``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tvm import tirx

from ..epilogue.program import Output
from .body import Body, Expr, index


def scaled(width: int, level: int) -> int:
    """``width`` columns of the accumulator, of a value at ``level``."""
    return width << level if level >= 0 else width >> -level


@dataclass(frozen=True)
class Segment:
    """Lanes ``order`` of a stored vector, which go to ``at`` from the row's start, if ``inside`` the output's columns."""

    order: range
    at: Expr
    inside: Expr | bool


@dataclass
class Layout:
    """The layout of ``output`` on one tile. ``prepare`` writes the addresses, in the block in which they are used.

    ``width``: the value's columns in a panel, ``total``: in all panels. ``spans``: of each stored vector, the first column (an
    expression) and how many, from ``offsets`` in the panel on. ``rows``: the tile's, ``batches``: their batch entries and positions.
    """

    body: Body
    output: Output
    panel: Expr
    width: int
    total: int
    spans: list[tuple[Expr, int]]
    offsets: list[int]
    tile_rows: list[Expr]
    batches: list[tuple[Expr, Expr]]
    rows_per_batch: Expr
    rows: list[Expr] = field(default_factory=list)
    segments: list[list[Segment]] = field(default_factory=list)

    @property
    def range(self) -> tuple[int, int]:
        """The output's columns."""
        return self.output.columns or (0, self.total)

    def reached(self) -> Expr | bool:
        """Whether the panel has columns of the output's range."""
        begin, end = self.range
        after = True if begin < self.width else self.panel >= index(begin // self.width)
        last_panel = (self.total - 1) // self.width * self.width
        before = True if end > last_panel else self.panel < index(-(-end // self.width))
        if after is True or before is True:
            return before if after is True else after
        return tirx.And(after, before)

    def prepare(self) -> None:
        """Writes the rows' and segments' addresses."""
        begin, end = self.range
        size = self.output.heads
        if size:
            batch_size = self.body.let(self.rows_per_batch * (end - begin), "batch_size")
            starts = [batch * batch_size + position * size for batch, position in self.batches]
        else:
            starts = [row * (end - begin) for row in self.tile_rows]
        self.rows = [self.body.let(start, "row_start") for start in starts]
        # Bounds of the range that fall within a panel; the end of the last one bounds nothing.
        cuts = [b for b in (begin, end) if b % self.width and b != self.total]
        for (first, count), offset in zip(self.spans, self.offsets, strict=True):
            halved = (b for part in self.output.halves for b in part)
            bounds = [*cuts, size, begin, *halved] if size else cuts
            length = math.gcd(count, *bounds, self.width, offset) if bounds else count
            runs = (self._segments(first, at, length, bool(cuts)) for at in range(0, count, length))
            self.segments.append([segment for run in runs for segment in run])

    def _segments(self, first: Expr, offset: int, length: int, cut: bool) -> list[Segment]:
        """The segments of ``length`` columns from the vector's lane ``offset`` on: one, or one for each half of a head."""
        body, size, stop = self.body, self.output.heads, offset + length
        begin, end = self.range
        column = body.let(first + (offset - begin), "column")
        inside = tirx.And(column >= index(0), column < index(end - begin)) if cut else True
        if not size:
            return [Segment(range(offset, stop), column, inside)]
        head = body.let(tirx.floordiv(column, index(size)), "head")
        start = body.let(head * (self.rows_per_batch * size), "head_start")
        within = body.let(column - head * size, "within")
        if not self.output.halves:
            return [Segment(range(offset, stop), body.let(start + within, "at"), inside)]
        segments = []
        plain: Expr | bool = inside
        for low, high in self.output.halves:
            here: Expr | bool = inside
            if (low, high) != (0, size):
                part = body.let(tirx.And(within >= index(low), within < index(high)), "part")
                here = part if inside is True else tirx.And(inside, part)
                plain = tirx.Not(part) if plain is True else tirx.And(plain, tirx.Not(part))
            even = body.let(start + tirx.floordiv(within + low, index(2)), "at")
            segments += [
                Segment(range(offset, stop, 2), even, here),
                Segment(range(offset + 1, stop, 2), even + (high - low) // 2, here),
            ]
        if self.output.halves != ((0, size),):
            segments.append(Segment(range(offset, stop), body.let(start + within, "at"), plain))
        return segments
