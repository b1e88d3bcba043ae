"""What a GEMM kernel is made for. See ``gemm.py``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..epilogue.ops import Group
from ..epilogue.program import EpilogueProgram, Kind
from ..epilogue.tir import Columns, depth
from ..schedule.gemm import GemmSchedule
from .gemm_rows import WindowShape
from .statistics import Statistic, statistics
from .weights import PLAIN, WeightFormat


@dataclass(frozen=True)
class GemmShape:
    """What a GEMM kernel is generic over: everything but its number of rows.

    ``dot``: the operation of ``dot.DOTS`` that products of whole numbers are made of; "": they are of float32. ``zero``: what A holds in place of 0.
    """

    program: EpilogueProgram
    n: int
    k: int
    schedule: GemmSchedule
    format: WeightFormat = PLAIN
    window: WindowShape | None = None
    dot: str = ""
    zero: int = 0

    @property
    def accumulator(self) -> str:
        """The dtype of sums of products."""
        return "int32" if self.dot else "float32"

    @property
    def itemsize(self) -> int:
        """Bytes of an element of A."""
        return 1 if self.dot else 4

    @cached_property
    def panels(self) -> int:
        """Weight panels, the narrower last one included."""
        return -(-self.n // self.schedule.width)

    @cached_property
    def statistics(self) -> tuple[Statistic, ...]:
        """The reduce steps."""
        return statistics(self.program)

    @cached_property
    def partials(self) -> int:
        """float32 that a row and panel leave for ``Kernel.merge``."""
        return sum(s.rule.partials for s in self.statistics)

    @cached_property
    def hoisted(self) -> tuple[str, ...]:
        """Row values that are computed once a block of rows: those that a step of another kind reads."""
        kinds = self.program.kinds()
        rowwise = [
            s for s in self.program.steps if kinds[s.names[0]] is Kind.ROW and s.operator.group is not Group.REDUCE
        ]
        read = {a for s in self.program.steps if s not in rowwise for a in s.args}
        return tuple(s.result for s in rowwise if s.result in read)

    @property
    def waits(self) -> bool:
        """Whether the epilogue waits for all panels of an item: it reads sums over heads."""
        return self.program.head > 0

    @property
    def groups(self) -> int:
        """Groups of panels: an item does one of them."""
        return -(-self.panels // self.schedule.panels)

    @property
    def rows_first(self) -> bool:
        """Whether items that follow each other share panels; windows are copied too seldom for that."""
        return self.schedule.rows_first and self.window is None

    @property
    def parts(self) -> int:
        """Parts of K that are gone over one after the other; the taps of a window stay together."""
        blocked = self.schedule.k_block and self.window is None and not self.dot
        return -(-self.k // self.schedule.k_block) if blocked else 1

    @property
    def part_size(self) -> int:
        """Steps of a part of K, the last one excepted."""
        return self.schedule.k_block if self.parts > 1 else self.k

    @property
    def rows_outer(self) -> bool:
        """Whether tiles of the same rows follow each other: not where a panel is made ready for all rows, or K comes in parts."""
        return self.schedule.rows_outer and not self.format.converts and self.parts == 1 and not self.waits

    @property
    def packs(self) -> bool:
        """Whether rows of A are copied to scratch tile by tile."""
        return self.schedule.pack and self.window is None and not self.dot

    @property
    def scratch(self) -> int:
        """float32 of a thread's scratch before the lines of windows: hoisted row values, a converted panel, accumulators, packed rows."""
        return self.packed_at + (self.schedule.block_rows * self.k if self.packs else 0)

    @property
    def converted_at(self) -> int:
        """Where in the scratch a converted panel begins."""
        return self.schedule.block_rows * len(self.hoisted)

    @property
    def waiting_at(self) -> int:
        """Where in the scratch accumulators wait for the next part of K."""
        return self.converted_at + (self.part_size * self.schedule.width if self.format.converts else 0)

    @property
    def packed_at(self) -> int:
        """Where in the scratch packed rows begin."""
        waiting = self.schedule.block_rows * self.schedule.width * self.schedule.panels
        return self.waiting_at + (waiting if self.parts > 1 or self.waits else 0)

    def orders(self) -> list[list[int]]:
        """The columns of each panel, in the order in which they lie."""
        starts = range(0, self.n, self.schedule.width)
        widths = [min(self.schedule.width, self.n - start) for start in starts]
        return [[s + c for c in self.columns(w).permutation()] for s, w in zip(starts, widths, strict=True)]

    def columns(self, width: int) -> Columns:
        """How the columns of a panel of ``width`` lie."""
        return Columns(width, depth(self.program), self.schedule.lanes)
