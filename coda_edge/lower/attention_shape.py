"""What shapes an attention kernel: everything but sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from ..epilogue.program import EpilogueProgram, Kind, Param
from ..schedule.attention import AttentionSchedule
from .attention_program import hidden, specialized, threshold

LOWEST = -3.4028234663852886e38
"""No finite float32 is lower."""
_FLOATS = ("f32", "f16", "bf16", "bool")
"""Dtypes whose values float32 has."""


@dataclass(frozen=True)
class AttentionShape:
    """What an attention kernel is generic over: everything but the numbers of heads, queries and keys.

    ``program`` is over the transposed tile (keys × queries), ``varies``: whether each operand varies over the keys; ``group``: how many
    heads share their keys and values. ``bands``: whether each has a first and a last diagonal. ``shared``: which of q, k and v have one
    batch entry; ``repeated``: whether the batch entries of each operand, and last of the sink, take turns. ``probability``: what becomes of a
    probability before it meets the values.
    """

    program: EpilogueProgram
    depth: int
    columns: int
    guard: bool
    schedule: AttentionSchedule
    varies: tuple[bool, ...]
    group: int = 1
    bands: tuple[tuple[bool, bool], ...] = ()
    past: bool = False
    present: bool = False
    sink: bool = False
    shared: tuple[str, ...] = ()
    repeated: tuple[bool, ...] = ()
    probability: EpilogueProgram | None = None

    @property
    def band_params(self) -> tuple[Param, ...]:
        """The parameters that say whether a key is in each band."""
        return self.program.params[1 : 1 + len(self.bands)]

    @property
    def params(self) -> tuple[Param, ...]:
        """The parameters that are operands."""
        return self.program.params[1 + len(self.bands) :]

    @cached_property
    def within(self) -> EpilogueProgram | None:
        """The program for tiles wholly within all bands, if it is another."""
        return specialized(self.program, {p.name: True for p in self.band_params}) if self.bands else None

    @cached_property
    def hiding(self) -> dict[int, float]:
        """The bands that hide the keys outside: by number, the largest score that such a key may have."""
        return hidden(self.program, self.band_params)

    @property
    def threshold(self) -> float:
        """A query with a larger score than this gives nothing to the hidden keys; -inf if none does ever."""
        return threshold(self.hiding)

    @property
    def few(self) -> int:
        """Up to how many queries are done one by one; none if a row of keys is not whole vectors or probabilities are rounded."""
        whole = self.depth % self.schedule.lanes == 0 and self.schedule.lanes > 1
        return min(3, self.schedule.queries // self.group) if whole and self.probability is None else 0

    @property
    def divisible(self) -> bool:
        """Whether the keys of few queries may be divided: not if a part cannot know that another one hides its keys."""
        windows = any(first for i, (first, _) in enumerate(self.bands) if i in self.hiding)
        return not windows or math.isinf(self.threshold)

    @cached_property
    def per_query(self) -> tuple[str, ...]:
        """Operands with one value a query: read once an item."""
        return tuple(p.name for p in self.params if p.kind is Kind.COL)

    @cached_property
    def packed(self) -> tuple[str, ...]:
        """Operands with a value for each score that are turned in squares, block by block, so that vectors of queries lie together."""
        squares = self.schedule.lanes > 1
        params = zip(self.params, self.varies, strict=True)
        return tuple(p.name for p, v in params if squares and v and p.kind is Kind.TILE and p.dtype in _FLOATS)

    @cached_property
    def layout(self) -> dict[str, int]:
        """Where each array lies in the thread's scratch, in float32; ``end`` is its size."""
        s = self.schedule
        sizes = {
            "q": self.depth * s.queries,
            "p": max((s.keys + s.key_rows - 1) * s.queries, s.keys + s.lanes),
            "max": s.queries,
            "new_max": s.queries,
            "sum": s.queries,
            "correction": s.queries,
            "operands": len(self.per_query) * s.queries,
            "out": s.queries * self.columns,
            "tiles": len(self.packed) * s.keys * s.queries,
        }
        starts, at = {}, 0
        for name, size in sizes.items():
            starts[name] = at
            at += size
        return {**starts, "end": at}

    @property
    def scratch(self) -> int:
        """float32 of scratch."""
        return self.layout["end"]


def transposed(program: EpilogueProgram) -> EpilogueProgram:
    """The program over the transposed tile: what varied over rows varies over columns."""
    swap = {Kind.ROW: Kind.COL, Kind.COL: Kind.ROW}
    params = tuple(replace(p, kind=swap.get(p.kind, p.kind)) for p in program.params)
    return EpilogueProgram(params, program.steps, program.outputs)
