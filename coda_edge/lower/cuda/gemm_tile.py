"""The two kernels of a tensor-core GEMM: of one tile a block, and of the rows' statistics if the epilogue has any."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

from tvm import tirx

from ...epilogue.program import EpilogueProgram
from ...epilogue.tir import STORAGE, Columns, depth, level
from ...schedule.cuda_gemm import CudaGemmSchedule
from ..body import Buffer, Expr, external, load
from ..statistics import Panels, Statistic, statistics
from .device import DeviceBody, int64, quotient
from .main_loop import MainLoop
from .tile_epilogue import TileEpilogue, scaled

MERGE_THREADS = 32
_AT_ONCE = 128
"""Partial results of a row up to which all are read before the first is used: otherwise each waits for memory by itself."""


@dataclass(frozen=True)
class CudaGemmShape:
    """What a GEMM kernel is generic over: everything but its number of rows."""

    program: EpilogueProgram
    n: int
    k: int
    schedule: CudaGemmSchedule

    @cached_property
    def statistics(self) -> tuple[Statistic, ...]:
        """The reduce steps."""
        return statistics(self.program)

    @cached_property
    def partials(self) -> int:
        """float32 that a row and strip leave for ``GemmKernel.merge``."""
        return sum(s.rule.partials for s in self.statistics)

    @property
    def strip(self) -> int:
        """Columns whose statistics four threads of a warp make together."""
        return 8 * self.schedule.owned[1]

    @property
    def strips(self) -> int:
        """Strips of a row, the last of what is left."""
        return -(-self.n // self.strip)

    @cached_property
    def columns(self) -> Columns:
        """How a thread's columns lie."""
        return Columns(2 * self.schedule.owned[1], depth(self.program), 1)


class GemmKernel:
    """The writing of one kernel. Both kernels of a GEMM have the same parameters."""

    def __init__(self, shape: CudaGemmShape) -> None:
        self.shape = shape
        self.schedule = shape.schedule
        self.body = DeviceBody()
        program, dtypes = shape.program, shape.program.dtypes()
        self.a, self.w = external("a", "float16"), external("w", "float16")
        self.operands = {p.name: external(p.name, STORAGE[p.dtype]) for p in program.params[1:]}
        self.outputs = {o.name: external(f"{o.name}_out", STORAGE[dtypes[o.value]]) for o in program.outputs}
        self.partials = external("partials")
        self.rows, self.rows_per_batch = tirx.Var("rows", "int64"), tirx.Var("rows_per_batch", "int64")
        buffers = [self.a, self.w, *self.operands.values(), *self.outputs.values()]
        buffers += [self.partials] if shape.statistics else []
        batches = [self.rows_per_batch] if program.batched else []
        self.params = [*buffers, self.rows, *batches]

    def main(self, symbol: str) -> tirx.PrimFunc:
        """The kernel of which a block does one tile."""
        body, schedule = self.body, self.schedule
        panels = -(-self.shape.n // schedule.columns)
        panel = body.thread("blockIdx.x", panels)
        block = body.thread("blockIdx.y", quotient(self.rows + (schedule.rows - 1), schedule.rows).astype("int32"))
        thread = body.thread("threadIdx.x", schedule.threads)
        accumulators = MainLoop(self, panel, block, thread).write()
        TileEpilogue(self, panel, block, thread, accumulators).write()
        return body.device_function(symbol, self.params, follows=True)

    def merge(self, symbol: str) -> tirx.PrimFunc:
        """The kernel that makes whole rows' statistics of the strips', a row a thread."""
        body, shape = self.body, self.shape
        block = body.thread("blockIdx.x", quotient(self.rows + (MERGE_THREADS - 1), MERGE_THREADS).astype("int32"))
        row = body.let(int64(block) * MERGE_THREADS + int64(body.thread("threadIdx.x", MERGE_THREADS)), "row")
        with body.when(row < self.rows):
            kept = {slot: self._kept(slot, row) for slot in range(shape.partials if shape.strips <= _AT_ONCE else 0)}
            for statistic in shape.statistics:
                reads = [
                    partial(self._read_partial, slot=statistic.slot + i, row=row, kept=kept)
                    for i in range(statistic.rule.partials)
                ]
                wide = level(shape.program, statistic.operand)
                panels = Panels(shape.strips, scaled(shape.strip, wide), scaled(shape.n, wide))
                merged = dict(zip(statistic.results, statistic.rule.merge(body, reads, panels, 1), strict=True))
                for output in shape.program.outputs:
                    if output.value in merged:
                        body.store(self.outputs[output.name], row, merged[output.value])
        return body.device_function(symbol, self.params)

    def partial_at(self, slot: int, strip: Expr, row: Expr) -> Expr:
        """Where a row's partial result lies: ``[slot, strip, row]``."""
        return (int64(strip) + slot * self.shape.strips) * self.rows + row

    def _kept(self, slot: int, row: Expr) -> Buffer:
        """A row's partial results of a slot, in registers."""
        buffer = self.body.alloc(self.shape.strips, name="kept")
        with self.body.repeat(self.shape.strips, unroll=True, name="strip") as strip:
            self.body.store(buffer, strip, load(self.partials, self.partial_at(slot, strip, row)))
        return buffer

    def _read_partial(self, strip: Expr, slot: int, row: Expr, kept: dict[int, Buffer]) -> Expr:
        if slot in kept:
            return load(kept[slot], strip)
        return load(self.partials, self.partial_at(slot, strip, row))
