"""What a GEMM kernel is made for. See ``gemm.py``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..epilogue.ops import Group
from ..epilogue.program import EpilogueProgram, Kind
from ..epilogue.tir import Columns, depth
from ..schedule.gemm import GemmSchedule
from .statistics import Statistic, statistics
from .weights import PLAIN, WeightFormat


@dataclass(frozen=True)
class GemmShape:
    """What a GEMM kernel is generic over: everything but its number of rows."""

    program: EpilogueProgram
    n: int
    k: int
    schedule: GemmSchedule
    format: WeightFormat = PLAIN

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
    def scratch(self) -> int:
        """float32 of a thread's scratch: hoisted row values, and a panel that is converted."""
        return self.converted_at + (self.k * self.schedule.width if self.format.converts else 0)

    @property
    def converted_at(self) -> int:
        """Where in the scratch a converted panel begins."""
        return self.schedule.block_rows * len(self.hoisted)

    def orders(self) -> list[list[int]]:
        """The columns of each panel, in the order in which they lie."""
        starts = range(0, self.n, self.schedule.width)
        widths = [min(self.schedule.width, self.n - start) for start in starts]
        return [[s + c for c in self.columns(w).permutation()] for s, w in zip(starts, widths, strict=True)]

    def columns(self, width: int) -> Columns:
        """How the columns of a panel of ``width`` lie."""
        return Columns(width, depth(self.program), self.schedule.lanes)
