"""The tensor-core GEMM kernel: a pipeline of copies, matrix instructions, and the epilogue on a thread's registers.

A block has one tile of the result. Its K tiles of A and W pass through ``stages`` buffers of shared memory, rows of 128 bytes in
chunks of 16, chunk c of row r at c ^ (r mod 8). Fragments of the next step are read while the tensor cores do this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import tvm
from tvm import tirx

from ...epilogue.program import EpilogueProgram, Kind, Output
from ...epilogue.tir import STORAGE, Columns, Evaluator, Place, as_stored, depth, level
from ...schedule.cuda_gemm import TILE_K, CudaGemmSchedule
from ..body import Buffer, Expr, external, f32, load
from ..intrinsics import maximum
from ..statistics import Panels, Statistic, statistics
from .device import DeviceBody, address, element, int32, int64, quotient, remainder

MERGE_THREADS = 128
_ROW = 2 * TILE_K
"""Bytes of a row of a K tile in shared memory."""
_CHUNK = 8
"""Halves of a 16-byte chunk."""


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
        heads = [self.rows_per_batch] if any(o.heads for o in program.outputs) else []
        self.params = [*buffers, self.rows, *heads]

    def main(self, symbol: str) -> tirx.PrimFunc:
        """The kernel of which a block does one tile."""
        body, schedule = self.body, self.schedule
        panels = -(-self.shape.n // schedule.columns)
        panel = body.thread("blockIdx.x", panels)
        block = body.thread("blockIdx.y", quotient(self.rows + (schedule.rows - 1), schedule.rows).astype("int32"))
        thread = body.thread("threadIdx.x", schedule.threads)
        accumulators = MainLoop(self, panel, block, thread).write()
        TileEpilogue(self, panel, block, thread, accumulators).write()
        return body.device_function(symbol, self.params)

    def merge(self, symbol: str) -> tirx.PrimFunc:
        """The kernel that makes whole rows' statistics of the strips', a row a thread."""
        body, shape = self.body, self.shape
        block = body.thread("blockIdx.x", quotient(self.rows + (MERGE_THREADS - 1), MERGE_THREADS).astype("int32"))
        row = body.let(int64(block) * MERGE_THREADS + int64(body.thread("threadIdx.x", MERGE_THREADS)), "row")
        with body.when(row < self.rows):
            for statistic in shape.statistics:
                reads = [
                    partial(self._read_partial, slot=statistic.slot + i, row=row)
                    for i in range(statistic.rule.partials)
                ]
                wide = level(shape.program, statistic.operand)
                panels = Panels(shape.strips, _scaled(shape.strip, wide), _scaled(shape.n, wide))
                merged = dict(zip(statistic.results, statistic.rule.merge(body, reads, panels, 1), strict=True))
                for output in shape.program.outputs:
                    if output.value in merged:
                        body.store(self.outputs[output.name], row, merged[output.value])
        return body.device_function(symbol, self.params)

    def partial_at(self, slot: int, strip: Expr, row: Expr) -> Expr:
        """Where a row's partial result lies: ``[slot, strip, row]``."""
        return (int64(strip) + slot * self.shape.strips) * self.rows + row

    def _read_partial(self, strip: Expr, slot: int, row: Expr) -> Expr:
        return load(self.partials, self.partial_at(slot, strip, row))


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
        m, n, _ = schedule.warps
        warp = body.let(quotient(thread, 32), "warp")
        plane = body.let(remainder(warp, m * n), "plane")
        return Warp(
            body.let(remainder(thread, 32), "lane"),
            body.let(quotient(plane, n), "warp_m"),
            body.let(remainder(plane, n), "warp_n"),
            body.let(quotient(warp, m * n), "warp_k"),
        )


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
        for tile in range(self.ahead):
            self._copy(int32(tile))
            body.do("coda_commit")
        for i in range(rows * columns * 4):
            body.store(self.acc, i, f32(0))
        self._arrived()
        self._read(int32(0), 0, 0)
        # Fragment buffers alternate step by step; with one step a tile, two tiles make a round.
        tiles_a_round = 1 if self.steps > 1 else 2
        rounds = (self.tiles - 1) // tiles_a_round
        instructions = self.tiles * self.steps * rows * columns
        with body.repeat(0, rounds, instructions <= self.schedule.unroll, "round") as i:
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
                self._copy(tile + self.ahead)
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

    def _copy(self, tile: Expr) -> None:
        """Starts the copies of a K tile."""
        stage = self._stage(tile)
        self._each_chunk(self.schedule.rows, partial(self._copy_a, stage, tile))
        self._each_chunk(self.schedule.columns, partial(self._copy_w, stage, tile))

    def _each_chunk(self, rows: int, copy: Callable[[Expr], None]) -> None:
        """``copy`` of each of this thread's chunks of ``rows`` rows."""
        threads, chunks = self.schedule.threads, rows * TILE_K // _CHUNK
        for start in range(0, chunks, threads):
            with self.body.when(True if start + threads <= chunks else self.thread < chunks - start):
                copy(self.body.let(self.thread + start, "chunk"))

    def _copy_a(self, stage: Expr, tile: Expr, chunk: Expr) -> None:
        body, k = self.body, self.k
        row, column = quotient(chunk, _CHUNK), body.let(remainder(chunk, _CHUNK), "column")
        to = address(self.shared, stage + row * _ROW + (column ^ remainder(row, 8)) * 16)
        # Rows beyond the last repeat it: what they make is not stored.
        source = tirx.min(int64(self.block) * self.schedule.rows + int64(row), self.kernel.rows - 1)
        first = body.let(tile * TILE_K + column * _CHUNK, "first")
        if k % _CHUNK == 0:
            inside = k % TILE_K == 0
            at = first if inside else tirx.Select(first < k, first, int32(0))
            count = int32(16) if inside else tirx.Select(first < k, int32(16), int32(0))
            body.do("coda_copy", to, address(self.kernel.a, source * k + int64(at)), count)
        else:
            count = tirx.max(int32(0), tirx.min(int32(_CHUNK), k - first))
            at = tirx.Select(first < k, first, int32(0))
            body.do("coda_gather", to, address(self.kernel.a, source * k + int64(at)), count)

    def _copy_w(self, stage: Expr, tile: Expr, chunk: Expr) -> None:
        start = (int64(self.panel) * self.tiles + int64(tile)) * (self.schedule.columns * TILE_K)
        to = address(self.shared, stage + self.schedule.rows * _ROW + chunk * 16)
        self.body.do("coda_copy", to, address(self.kernel.w, start + int64(chunk * _CHUNK)), 16)

    def _read(self, tile: Expr, step: int, parity: int) -> None:
        """Reads the fragments of a step, 16 of K, into one of the two fragment buffers."""
        body, warp, (rows, columns) = self.body, self.warp, self.schedule.fragments
        stage, lane = self._stage(tile), warp.lane
        first = body.let((warp.k + step * self.schedule.warps[2]) * 2, "first")
        for i in range(rows):
            row = warp.m * (rows * 16) + remainder(lane, 16) + i * 16
            at = stage + row * _ROW + ((first + quotient(lane, 16)) ^ remainder(lane, 8)) * 16
            self._load_matrices(self.fragments_a, (parity * rows + i) * 4, at)
        for j in range(0, columns, 2):
            row = warp.n * (columns * 8) + remainder(lane, 8) + quotient(lane, 16) * 8 + (j * 8 + self.schedule.rows)
            at = stage + row * _ROW + ((first + remainder(quotient(lane, 8), 2)) ^ remainder(lane, 8)) * 16
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


class TileEpilogue:
    """What a thread does with its accumulators: the program, piece by piece, each piece one column of one row.

    A thread has ``run`` consecutive columns in every group of ``4 · run``, in each of its rows.
    """

    def __init__(self, kernel: GemmKernel, panel: Expr, block: Expr, thread: Expr, acc: Buffer) -> None:
        self.kernel = kernel
        self.shape = kernel.shape
        self.body = body = kernel.body
        self.acc = acc
        schedule = kernel.schedule
        self.run = schedule.run
        self.owned = schedule.owned
        rows, columns = schedule.fragments
        warp = Warp.of(body, schedule, thread)
        first = warp.k * (rows * columns // schedule.warps[2])
        self.lane = warp.lane
        self.row = body.let(
            int64(block) * schedule.rows
            + int64(warp.m * (rows * 16) + quotient(first, columns) * 16 + quotient(warp.lane, 4)),
            "row",
        )
        self.strip = body.let(
            quotient(
                panel * schedule.columns + warp.n * (columns * 8) + remainder(first, columns) * 8, self.shape.strip
            ),
            "strip",
        )
        self.unit = body.let(self.strip * (self.shape.strip // self.run) + remainder(warp.lane, 4), "unit")
        self.rows = [body.let(self.row + (i // 2 * 16 + i % 2 * 8), "row") for i in range(2 * self.owned[0])]
        self.clamped = [body.let(tirx.min(row, kernel.rows - 1), "clamped") for row in self.rows]
        self.chunks: dict[tuple[str, int, int], Buffer] = {}

    def write(self) -> None:
        """All rows' outputs and statistics."""
        values = Evaluator(self.shape.program, self.body, self._leaf, self.shape.columns)
        tiles = [o for o in self.shape.program.outputs if o.kind is Kind.TILE]
        for i, row in enumerate(self.rows):
            staged = [(o, self._stage(o, values, i)) for o in tiles]
            with self.body.when(row < self.kernel.rows):
                for output, buffers in staged:
                    self._store(output, buffers, row)
            for statistic in self.shape.statistics:
                self._reduce(statistic, values, i)

    def _pieces(self, value: str, values: Evaluator, row: int) -> list[Expr]:
        """A row's values in the order of columns."""
        places = _places(self.shape.columns, level(self.shape.program, value))
        return [values.value(value, Place(row, *place)) for place in places]

    def _stage(self, output: Output, values: Evaluator, row: int) -> list[Buffer]:
        """An output's runs of a row, ready to be stored."""
        dtype = self.shape.program.dtypes()[output.value]
        pieces = self._pieces(output.value, values, row)
        count = _scaled(self.run, level(self.shape.program, output.value))
        buffers = []
        for start in range(0, len(pieces), count):
            buffer = self.body.alloc(count, STORAGE[dtype], "staged")
            for i, piece in enumerate(pieces[start : start + count]):
                self.body.store(buffer, i, as_stored(piece, dtype))
            buffers.append(buffer)
        return buffers

    def _store(self, output: Output, buffers: list[Buffer], row: Expr) -> None:
        body, program = self.body, self.shape.program
        wide = level(program, output.value)
        total = program.width(output.value, self.shape.n)
        begin, end = output.columns or (0, total)
        target = self.kernel.outputs[output.name]
        run = _scaled(self.run, wide)
        vector = _vector(run, target, begin, end - begin, output.heads or 0)
        bounded = output.columns is not None or self.shape.n % self.kernel.schedule.columns != 0
        for group, buffer in enumerate(buffers):
            for offset in range(0, run, vector):
                column = self._column(wide, group) + (offset - begin)
                inside = tirx.And(column >= 0, column < end - begin) if bounded else True
                with body.when(inside):
                    body.store(target, self._place(output, row, column, end - begin), load(buffer, offset, vector))

    def _place(self, output: Output, row: Expr, column: Expr, width: int) -> Expr:
        """Where an element of an output lies."""
        if not output.heads:
            return row * width + int64(column)
        count = self.kernel.rows_per_batch
        batch = self.body.let(tirx.truncdiv(row, count), "batch")
        head = int64(quotient(column, output.heads))
        at = (batch * (width // output.heads) + head) * count + (row - batch * count)
        return at * output.heads + int64(remainder(column, output.heads))

    def _column(self, wide: int, group: int) -> Expr:
        """The first column of a group's run, of a value at level ``wide``."""
        return (self.unit + group * 4) * _scaled(self.run, wide)

    def _leaf(self, name: str, place: Place) -> Expr | None:
        program = self.shape.program
        if name == program.params[0].name:
            j = _natural(self.shape.columns, 0, place)
            group, x = divmod(j, self.run)
            fragment = place.row // 2 * self.owned[1] + group * (self.run // 2) + x // 2
            return load(self.acc, fragment * 4 + place.row % 2 * 2 + x % 2)
        if name not in self.kernel.operands:
            return None
        kind, operand = program.param(name).kind, self.kernel.operands[name]
        if kind is Kind.SCALAR:
            return load(operand, 0)
        if kind is Kind.ROW:
            return load(operand, self.clamped[place.row])
        wide = level(program, name)
        group, x = divmod(_natural(self.shape.columns, wide, place), _scaled(self.run, wide))
        return load(self._chunk(name, wide, place.row if kind is Kind.TILE else 0, group), x)

    def _chunk(self, name: str, wide: int, row: int, group: int) -> Buffer:
        """A run of a tile or column operand, read in vectors; columns beyond the last repeat it."""
        key = (name, row, group)
        if key not in self.chunks:
            program, body, operand = self.shape.program, self.body, self.kernel.operands[name]
            width, run = program.width(name, self.shape.n), _scaled(self.run, wide)
            vector = _vector(run, operand, width)
            start = self.clamped[row] * width if program.param(name).kind is Kind.TILE else int64(0)
            buffer = body.alloc(run, STORAGE[program.param(name).dtype], name)
            for offset in range(0, run, vector):
                column = self._column(wide, group) + offset
                if self.shape.n % self.kernel.schedule.columns:
                    column = tirx.min(column, int32(width - vector))
                body.store(buffer, offset, load(operand, start + int64(column), vector))
            self.chunks[key] = buffer
        return self.chunks[key]

    def _reduce(self, statistic: Statistic, values: Evaluator, i: int) -> None:
        body, shape, row = self.body, self.shape, self.rows[i]
        wide = level(shape.program, statistic.operand)
        run = _scaled(self.run, wide)
        pieces = [piece.astype("float32") for piece in self._pieces(statistic.operand, values, i)]
        total, whole = _scaled(shape.n, wide), _scaled(shape.strip, wide)
        inside: list[Expr | bool] = [True] * len(pieces)
        count: Expr = f32(whole)
        if total % whole:
            inside = [self._column(wide, j // run) + j % run < total for j in range(len(pieces))]
            left = tirx.max(int32(1), tirx.min(int32(whole), total - self.strip * whole))
            count = body.let(left.astype("float32"), "count")
        reduced = _Strip(body, pieces, inside, count)
        name = next(step.op for step in shape.program.steps if step.names == statistic.results)
        results = STRIP_RULES[name](reduced)
        # A strip wholly beyond the last column has no place among the partial results.
        stored = tirx.And(row < self.kernel.rows, remainder(self.lane, 4).equal(int32(0)))
        if shape.n % self.kernel.schedule.columns:
            stored = tirx.And(stored, self.strip < shape.strips)
        with body.when(stored):
            for slot, result in enumerate(results, statistic.slot):
                body.store(self.kernel.partials, self.kernel.partial_at(slot, self.strip, row), result)


class _Strip:
    """A row's columns of a strip, of which four threads each have some; ``inside`` says which are there at all."""

    def __init__(self, body: DeviceBody, pieces: list[Expr], inside: list[Expr | bool], count: Expr) -> None:
        self.body = body
        self.pieces = pieces
        self.inside = inside
        self.count = count

    def fold(self, combine: Callable[[Expr, Expr], Expr], neutral: float, term: Callable[[Expr], Expr]) -> Expr:
        """The terms of all columns combined, known to all four threads."""
        terms = [
            term(piece) if inside is True else tirx.Select(inside, term(piece), f32(neutral))
            for piece, inside in zip(self.pieces, self.inside, strict=True)
        ]
        total = terms[0]
        for piece in terms[1:]:
            total = self.body.let(combine(total, piece), "fold")
        for mask in (1, 2):
            other = self.body.let(self.body.call("coda_exchange", "float32", total, mask), "other")
            total = self.body.let(combine(total, other), "fold")
        return total

    def sum(self, term: Callable[[Expr], Expr] = lambda x: x) -> Expr:
        """The sum of the terms."""
        return self.fold(lambda a, b: a + b, 0.0, term)

    def moments(self) -> list[Expr]:
        """Mean and centred sum of squares."""
        mean = self.body.let(self.sum() / self.count, "mean")
        return [mean, self.sum(lambda x: (x - mean) * (x - mean))]


STRIP_RULES: dict[str, Callable[[_Strip], list[Expr]]] = {
    "sum": lambda strip: [strip.sum()],
    "mean": lambda strip: [strip.sum()],
    "sumsq": lambda strip: [strip.sum(lambda x: x * x)],
    "rowmax": lambda strip: [strip.fold(maximum, -math.inf, lambda x: x)],
    "moments": _Strip.moments,
}
"""Partial results of every reduce operator, as ``statistics.RULES`` merges them."""


def _places(columns: Columns, wide: int) -> list[tuple[int, int]]:
    """Class and part of each of a thread's columns, of a value at level ``wide``."""
    order = [
        (_natural(columns, wide, Place(0, c, p)), (c, p)) for c in range(columns.classes(wide)) for p in _parts(columns)
    ]
    return [place for _, place in sorted(order)]


def _natural(columns: Columns, wide: int, place: Place) -> int:
    """Which of a thread's columns a piece is, of a value at level ``wide``."""
    scaled = Columns(_scaled(columns.width, wide), columns.depth + wide, columns.vector)
    return scaled.permutation()[place.cls * len(columns.parts) + place.part]


def _parts(columns: Columns) -> range:
    return range(len(columns.parts))


def _vector(run: int, buffer: Buffer, *multiples: int) -> int:
    """Elements that can be moved at once: 16 bytes at most, aligned wherever a run starts if ``multiples`` are multiples of them."""
    size = tvm.DataType(str(buffer.dtype)).itemsize
    return math.gcd(run, 16 // size, *multiples)


def _scaled(width: int, wide: int) -> int:
    return width << wide if wide >= 0 else width >> -wide
