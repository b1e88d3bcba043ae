"""The attention kernel for GPUs: a block's rows of q, blocks of keys, and the merge of divided keys. See ``attention.py``.

Tiles in shared memory are rows of 128 bytes, 64 columns of q, k or v; chunk c of row r, of 16 bytes, lies at c ^ (r mod 8). A thread
has two rows of a product's 16, eight apart, and two neighbouring columns of each of its eight (PTX ISA, mma.m16n8k16).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial, reduce

from tvm import tirx

from ...epilogue.program import EpilogueProgram, Param
from ...epilogue.tir import STORAGE, Evaluator, Place, cast
from ...schedule.cuda_attention import ROW, CudaAttentionSchedule
from ..attention_program import hidden, threshold
from ..attention_shape import LOWEST
from ..body import Buffer, Expr, external, f32, load
from .device import NATIVE, DeviceBody, address, element, int32, int64, quotient, remainder

_CHUNK = 8
"""Halves of 16 bytes."""
_LINE = 2 * ROW
"""Bytes of a row of a tile."""
_SIDES = ("first", "last")
_UNROLL = 4
"""Chunks of a tile that a thread copies one after another without a loop, at most."""
_MANY = 1 << 30
"""Blocks along an axis of the grid, as far as the kernel knows."""


@dataclass(frozen=True)
class CudaAttentionShape:
    """What an attention kernel is generic over: everything but sizes. Fields as those of ``AttentionShape``; ``program`` is over [queries, keys]."""

    program: EpilogueProgram
    depth: int
    columns: int
    guard: bool
    schedule: CudaAttentionSchedule
    varies: tuple[bool, ...]
    group: int = 1
    bands: tuple[tuple[bool, bool], ...] = ()
    past: bool = False
    present: bool = False
    sink: bool = False
    shared: tuple[str, ...] = ()
    repeated: tuple[bool, ...] = ()

    @property
    def band_params(self) -> tuple[Param, ...]:
        """The parameters that say whether a key is in each band."""
        return self.program.params[1 : 1 + len(self.bands)]

    @property
    def params(self) -> tuple[Param, ...]:
        """The parameters that are operands."""
        return self.program.params[1 + len(self.bands) :]

    @cached_property
    def hiding(self) -> dict[int, float]:
        """The bands that hide the keys outside: by number, the largest score that such a key may have."""
        return hidden(self.program, self.band_params)

    @property
    def threshold(self) -> float:
        """A query with a larger score than this gives nothing to the hidden keys; -inf if none does ever."""
        return threshold(self.hiding)

    @property
    def divisible(self) -> bool:
        """Whether keys may be divided over blocks: not if a part cannot know that another one hides its keys."""
        return not self.hiding or math.isinf(self.threshold)


@dataclass(frozen=True)
class _Tensor:
    """Where a block's rows of q, k or v come from: ``source(row)`` gives a buffer's element for each buffer, and whether it is that one."""

    width: int
    base: int
    rows: int
    sources: Callable[[Expr], list[tuple[Buffer, Expr, Expr | bool]]]


class AttentionKernel:
    """The writing of one kernel. The main kernel and the merge have the same parameters."""

    def __init__(self, shape: CudaAttentionShape) -> None:
        self.shape = shape
        self.schedule = s = shape.schedule
        self.body = DeviceBody()
        half = partial(external, dtype="float16")
        self.q, self.k, self.v, self.out = (half(n) for n in ("q", "k", "v", "out"))
        self.past = [half(n) for n in ("past_k", "past_v")] if shape.past else []
        self.present = [half(n) for n in ("present_k", "present_v")] if shape.present else []
        self.operands = {p.name: external(p.name, STORAGE[p.dtype]) for p in shape.params}
        self.varies = dict(zip(self.operands, shape.varies, strict=True))
        read = {**self.operands, **({"sink": external("sink")} if shape.sink else {})}
        self.sink = read.get("sink") if shape.sink else None
        self.partials = external("partials")
        self.heads, self.queries, self.keys, self.past_keys, self.parts = (
            tirx.Var(n, "int64") for n in ("heads", "queries", "keys", "past_keys", "parts")
        )
        repeated = shape.repeated or (False,) * len(read)
        axes = {n: ("batch", "head", "query", *(["turns"] if t else [])) for n, t in zip(read, repeated, strict=True)}
        self.strides = {name: [tirx.Var(f"{name}_{axis}", "int64") for axis in axes[name]] for name in read}
        self.bounds = [
            tuple(tirx.Var(f"{side}{i}", "int64") if there else None for side, there in zip(_SIDES, band, strict=True))
            for i, band in enumerate(shape.bands)
        ]
        buffers = [self.q, self.k, self.v, *self.past, *read.values(), self.out, *self.present]
        self.params = [
            *(*buffers, *([self.partials] if shape.divisible else [])),
            *(self.heads, self.queries, self.keys, *([self.past_keys] if shape.past else [])),
            *(v for row in self.strides.values() for v in row),
            *(v for band in self.bounds for v in band if v is not None),
            *([self.parts] if shape.divisible else []),
        ]
        self.tiles_q, self.tiles_v = (-(-n // ROW) for n in (shape.depth, shape.columns))
        self.fragments = s.keys // 8
        self.columns = -(-shape.columns // 16) * 2
        self.values_at = s.stages * s.keys * self.tiles_q * _LINE
        self.keys_at = s.rows * self.tiles_q * _LINE

    def main(self, symbol: str) -> tirx.PrimFunc:
        """The kernel of which a block does some rows of q and a part of the keys."""
        body, s, shape = self.body, self.schedule, self.shape
        self.rows = body.let(self.queries * shape.group, "rows")
        number = int64(body.thread("blockIdx.x", _MANY))
        self.owner = int64(body.thread("blockIdx.y", _MANY))
        self.part = int64(body.thread("blockIdx.z", _MANY))
        self.thread = body.thread("threadIdx.x", s.threads)
        blocks = body.let(quotient(tirx.max(self.rows + (s.rows - 1), int64(s.rows)), s.rows), "blocks")
        # Later queries see more keys: they begin first.
        block = body.let(blocks - 1 - number if shape.hiding else number, "block")
        self.shared = body.shared(s.shared(shape.depth, shape.columns))
        self.first = body.let(block * s.rows, "first")
        self._place()
        with body.when(self.rows > int64(0)):
            self._start()
            self._attend()
            self._finish()
        if self.present:
            with body.when(block.equal(int64(0))):
                self._append()
        return body.device_function(symbol, self.params)

    def _place(self) -> None:
        """Which head, rows, queries and keys the block and the thread have."""
        body, shape = self.body, self.shape
        kv_heads = body.let(tirx.truncdiv(self.heads, int64(shape.group)), "kv_heads")
        self.batch = body.let(tirx.truncdiv(self.owner, kv_heads), "batch")
        self.kv_head = body.let(self.owner - self.batch * kv_heads, "kv_head")
        self.lane = body.let(remainder(self.thread, 32), "lane")
        self.warp = body.let(quotient(self.thread, 32), "warp")
        size = (
            body.let(tirx.truncdiv(self.keys + (self.parts - 1), self.parts), "size") if shape.divisible else self.keys
        )
        self.start = body.let(self.part * size, "start")
        self.stop = body.let(tirx.min(self.keys, self.start + size), "stop")
        row = self.first + int64(self.warp * 16 + quotient(self.lane, 4))
        self.mine = [body.let(row + 8 * i, "row") for i in range(2)]
        clamped = [body.let(tirx.max(int64(0), tirx.min(r, self.rows - 1)), "clamped") for r in self.mine]
        if shape.group == 1:
            self.groups: list[Expr] = [int64(0), int64(0)]
            self.numbers = clamped
        else:
            queries = body.let(tirx.max(self.queries, int64(1)), "some")
            self.groups = [body.let(tirx.truncdiv(r, queries), "group") for r in clamped]
            self.numbers = [body.let(r - g * queries, "query") for r, g in zip(clamped, self.groups, strict=True)]

    def _owner_of(self, tensor: str) -> Expr:
        return self.kv_head if tensor in self.shape.shared else self.owner

    def _start(self) -> None:
        """Starts to copy q; clears the running results, and reads what varies by query at most."""
        body, shape = self.body, self.shape
        base = body.let(self._owner_of("q") * self.rows, "q_row")

        def rows(row: Expr) -> list[tuple[Buffer, Expr, Expr | bool]]:
            at = base + tirx.min(self.first + int64(row), self.rows - 1)
            return [(self.q, at * shape.depth, True)]

        self._copy(_Tensor(shape.depth, 0, self.schedule.rows, rows), int32(0))
        body.do("coda_commit")
        self.acc = body.alloc(self.columns * 4, name="acc")
        for i in range(self.columns * 4):
            body.store(self.acc, i, f32(0))
        self.most, self.total = body.alloc(2, name="most"), body.alloc(2, name="total")
        for i in range(2):
            sink = self._sink(i)
            first = tirx.And(self.part.equal(int64(0)), remainder(self.lane, 4).equal(int32(0)))
            body.store(self.most, i, f32(-math.inf) if sink is None else sink)
            counted = f32(0) if sink is None else tirx.Select(tirx.And(first, sink >= f32(LOWEST)), f32(1), f32(0))
            body.store(self.total, i, counted)
        self.limits = {
            (p.name, i): tuple(None if b is None else self._limit(self.numbers[i] + b) for b in bounds)
            for p, bounds in zip(shape.band_params, self.bounds, strict=True)
            for i in range(2)
        }
        self.bases = {name: [self._base(name, i) for i in range(2)] for name in self.operands}
        self.fixed = {
            (p.name, i): body.let(load(self.operands[p.name], self.bases[p.name][i]), p.name)
            for p in shape.params
            if not self.varies[p.name]
            for i in range(2)
        }

    def _limit(self, key: Expr) -> Expr:
        """A key that bounds a band, as 32 bits hold it."""
        return self.body.let(tirx.max(int64(-1), tirx.min(key, self.keys)).astype("int32"), "limit")

    def _base(self, name: str, i: int) -> Expr:
        """Where the operand's scores of row i of the thread begin."""
        batch, step, query, *turns = self.strides[name]
        entry = tirx.truncmod(self.batch, turns[0]) if turns else self.batch
        head = self.kv_head * self.shape.group + self.groups[i]
        return self.body.let(entry * batch + head * step + self.numbers[i] * query, f"{name}_base")

    def _sink(self, i: int) -> Expr | None:
        """The score without a value; the first part of the keys has it."""
        if self.sink is None:
            return None
        value = load(self.sink, self._base("sink", i))
        return self.body.let(tirx.Select(self.part.equal(int64(0)), value, f32(-math.inf)), "sink")

    def _copy(self, tensor: _Tensor, stage: Expr) -> None:
        """Starts the copies of a tile's rows; columns beyond the last are zeros."""
        body, width = self.body, tensor.width
        chunks = -(-width // 16) * 2
        total, threads = tensor.rows * chunks, self.schedule.threads
        with body.repeat(-(-total // threads), total <= _UNROLL * threads, "round") as i:
            chunk = body.let(self.thread + i * threads, "chunk")
            row = body.let(quotient(chunk, chunks), "row")
            column = body.let(chunk - row * chunks, "column")
            with body.when(True if total % threads == 0 else chunk < total):
                swizzled = remainder(column, 8) ^ remainder(row, 8)
                line = quotient(column, 8) * tensor.rows + row
                to = address(self.shared, stage + tensor.base + line * _LINE + swizzled * 16)
                left = tirx.max(int32(0), tirx.min(int32(_CHUNK), width - column * _CHUNK))
                offset = int64(tirx.Select(left > 0, column * _CHUNK, int32(0)))
                for buffer, at, there in tensor.sources(row):
                    with body.when(there):
                        self._copy_chunk(to, buffer, at + offset, left, whole=width % _CHUNK == 0)

    def _copy_chunk(self, to: Expr, buffer: Buffer, at: Expr, left: Expr, whole: bool) -> None:
        if whole:
            self.body.do("coda_copy", to, address(buffer, at), left * 2)
        else:
            self.body.do("coda_gather", to, address(buffer, at), left)

    def _attend(self) -> None:
        """Over the keys, but for those that bands hide from all rows of the block, unless one of them sees no other."""
        body, hiding = self.body, self.shape.hiding
        if not hiding:
            self._pass(self.start, self.stop)
            return
        last_row = body.let(tirx.min(self.first + self.schedule.rows, self.rows) - 1, "last_row")
        first, last = self.first, last_row
        if self.shape.group > 1:
            one = tirx.truncdiv(self.first, self.queries).equal(tirx.truncdiv(last_row, self.queries))
            first = body.let(tirx.Select(one, tirx.truncmod(self.first, self.queries), int64(0)), "first_query")
            last = body.let(tirx.Select(one, tirx.truncmod(last_row, self.queries), self.queries - 1), "last_query")
        lows = [first + b[0] for i, b in enumerate(self.bounds) if i in hiding and b[0] is not None]
        highs = [last + b[1] + 1 for i, b in enumerate(self.bounds) if i in hiding and b[1] is not None]
        low = body.let(tirx.max(self.start, tirx.min(reduce(tirx.max, lows, int64(0)), self.stop)), "low")
        high = body.let(tirx.max(low, tirx.min(reduce(tirx.min, highs, self.keys), self.stop)), "high")
        if math.isinf(self.shape.threshold):
            self._pass(low, high)
            return
        wanted = body.alloc(1, "int32", "wanted")
        body.store(wanted, 0, int32(1))
        with body.loop(0, 3, "pass") as number:
            with body.when(number.equal(int64(1))):
                blind = [load(self.most, i) <= f32(self.shape.threshold) for i in range(2)]
                body.store(wanted, 0, body.call("coda_any", "int32", tirx.Or(*blind).astype("int32")))
            begin = tirx.Select(number < 1, low, tirx.Select(number < 2, self.start, high))
            end = tirx.Select(number < 1, high, tirx.Select(number < 2, low, self.stop))
            begin = body.let(begin, "begin")
            self._pass(begin, body.let(tirx.Select(load(wanted, 0) > 0, end, begin), "end"))

    def _pass(self, start: Expr, stop: Expr) -> None:
        """All blocks of the keys ``start ≤ j < stop``; the next one is on its way while one is computed."""
        body, s = self.body, self.schedule
        blocks = body.let(tirx.max(int64(0), quotient(stop - start + (s.keys - 1), s.keys)), "blocks")
        with body.when(blocks > int64(0)):
            self._copy_keys(start, stop, int64(0))
        with body.loop(0, blocks, "block") as block:
            with body.when(block + 1 < blocks):
                self._copy_keys(start, stop, block + 1)
            with body.when(block + 1 >= blocks):
                body.do("coda_commit")
                body.do("coda_commit")
            stage = body.let(remainder(block, s.stages).astype("int32"), "stage")
            first = body.let(start + block * s.keys, "first_key")
            body.do("coda_wait", 3)
            body.do("coda_barrier")
            scores = self._scores(stage, first, stop)
            corrections = self._probabilities(scores)
            body.do("coda_wait", 2)
            body.do("coda_barrier")
            self._values(scores, stage, corrections)
            body.do("coda_barrier")

    def _copy_keys(self, start: Expr, stop: Expr, block: Expr) -> None:
        """Starts the copies of a block of keys, then of its values; rows beyond the last are the last one again."""
        body, s, shape = self.body, self.schedule, self.shape
        stage = body.let(remainder(block, s.stages).astype("int32"), "stage")
        first = body.let(start + block * s.keys, "first_key")
        tensors = (
            ("k", shape.depth, self.keys_at, self.tiles_q, self.k),
            ("v", shape.columns, self.keys_at + self.values_at, self.tiles_v, self.v),
        )
        for number, (name, width, base, tiles, new) in enumerate(tensors):
            rows = partial(self._key_rows, name, width, number, new, first, stop)
            self._copy(_Tensor(width, base, s.keys, rows), stage * (s.keys * tiles * _LINE))
            body.do("coda_commit")

    def _key_rows(
        self, name: str, width: int, number: int, new: Buffer, first: Expr, stop: Expr, row: Expr
    ) -> list[tuple[Buffer, Expr, Expr | bool]]:
        key = self.body.let(tirx.min(first + int64(row), stop - 1), "key")
        return [(b, at * width, there) for b, at, there in self._key(name, number, new, key)]

    def _key(self, name: str, number: int, new: Buffer, key: Expr) -> list[tuple[Buffer, Expr, Expr | bool]]:
        """The row of a key in the tensors that may have it."""
        owner = self._owner_of(name)
        if not self.past:
            return [(new, owner * self.keys + key, True)]
        count = self.keys - self.past_keys
        return [
            (self.past[number], owner * self.past_keys + key, key < self.past_keys),
            (new, owner * count + key - self.past_keys, key >= self.past_keys),
        ]

    def _scores(self, stage: Expr, first: Expr, stop: Expr) -> Buffer:
        """The block's scores of the thread: of each product, two columns of the upper row, then two of the lower one."""
        body, s, shape = self.body, self.schedule, self.shape
        scores = body.alloc(self.fragments * 4, name="scores")
        for i in range(self.fragments * 4):
            body.store(scores, i, f32(0))
        a, b = body.alloc(4, "uint32", "a"), body.alloc(4, "uint32", "b")
        lane = self.lane
        row_a = body.let(self.warp * 16 + remainder(lane, 16), "row_a")
        row_b = body.let(remainder(lane, 8) + quotient(lane, 16) * 8, "row_b")
        half_a = body.let(quotient(lane, 16) ^ remainder(lane, 8), "half_a")
        half_b = body.let(remainder(quotient(lane, 8), 2) ^ remainder(lane, 8), "half_b")
        base = body.let(self.keys_at + stage * (s.keys * self.tiles_q * _LINE), "keys_at")
        for step in range(-(-shape.depth // 16)):
            tile, chunk = step // 4, step % 4 * 2
            at = (tile * s.rows + row_a) * _LINE + (half_a ^ chunk) * 16
            self._matrices("coda_ldmatrix", a, at)
            for pair in range(self.fragments // 2):
                at = base + (tile * s.keys + pair * 16 + row_b) * _LINE + (half_b ^ chunk) * 16
                self._matrices("coda_ldmatrix", b, at)
                for i in range(2):
                    self._multiply(scores, (pair * 2 + i) * 4, a, [element(b, i * 2), element(b, i * 2 + 1)])
        self._apply(scores, first, stop)
        return scores

    def _matrices(self, instruction: str, into: Buffer, at: Expr) -> None:
        self.body.do(instruction, *(element(into, e) for e in range(4)), address(self.shared, at))

    def _multiply(self, into: Buffer, start: int, a: Buffer, b: list[Expr]) -> None:
        self.body.do("coda_mma", *(element(into, start + e) for e in range(4)), *(element(a, e) for e in range(4)), *b)

    def _apply(self, scores: Buffer, first: Expr, stop: Expr) -> None:
        """Products to scores; those of keys that are not there become -inf."""
        body = self.body
        column = body.let(first.astype("int32") + remainder(self.lane, 4) * 2, "column")
        end = body.let(stop.astype("int32"), "end")
        keys = [body.let(column + (j // 2 * 8 + j % 2), "key") for j in range(self.fragments * 2)]
        places = [body.let(tirx.min(key, end - 1), "place") for key in keys] if any(self.shape.varies) else keys
        native = {op: partial(body.call, name, "float32") for op, name in NATIVE.items()}

        def leaf(name: str, place: Place) -> Expr | None:
            if name == self.shape.program.params[0].name:
                return load(scores, _score(place.row, place.part))
            if (name, place.row) in self.limits:
                low, high = self.limits[name, place.row]
                key = keys[place.part]
                tests = [] if low is None else [key >= low]
                tests += [] if high is None else [key <= high]
                return tests[0] if len(tests) == 1 else tirx.And(*tests)
            if name not in self.operands:
                return None
            if not self.varies[name]:
                return self.fixed[name, place.row]
            return load(self.operands[name], self.bases[name][place.row] + int64(places[place.part]))

        values = Evaluator(self.shape.program, body, leaf, native=native)
        output = self.shape.program.outputs[0].value
        for i in range(2):
            for j, key in enumerate(keys):
                score = cast(values.value(output, Place(i, 0, j)), "f32")
                body.store(scores, _score(i, j), tirx.Select(key < end, score, f32(-math.inf)))

    def _probabilities(self, scores: Buffer) -> list[Expr]:
        """Scores to probabilities, not divided by their sum; returns by what earlier results of each row are to be multiplied."""
        body, corrections = self.body, []
        exp = partial(body.call, NATIVE["exp"], "float32")
        for i in range(2):
            mine = [_score(i, j) for j in range(self.fragments * 2)]
            most = reduce(self._larger, [load(scores, j) for j in mine])
            for mask in (1, 2):
                most = self._larger(most, body.call("coda_exchange", "float32", most, mask))
            old = body.let(load(self.most, i), "old")
            new = body.let(self._larger(old, most), "new")
            shift = body.let(tirx.Select(new < f32(LOWEST), f32(0), new), "shift")
            correction = body.let(exp(old - shift), "correction")
            total = load(self.total, i) * correction
            for j in mine:
                p = body.let(exp(load(scores, j) - shift), "p")
                body.store(scores, j, p)
                total = body.let(total + p, "total")
            body.store(self.most, i, new)
            body.store(self.total, i, total)
            corrections.append(correction)
        return corrections

    def _larger(self, a: Expr, b: Expr) -> Expr:
        return self.body.let(self.body.call("coda_larger", "float32", a, b), "larger")

    def _values(self, p: Buffer, stage: Expr, corrections: list[Expr]) -> None:
        """``acc = acc · correction + p v``."""
        body, s = self.body, self.schedule
        for i in range(self.columns * 4):
            body.store(self.acc, i, load(self.acc, i) * corrections[i % 4 // 2])
        a, b = body.alloc(4, "uint32", "p"), body.alloc(4, "uint32", "b")
        lane = self.lane
        row = body.let(remainder(lane, 16), "row")
        half = body.let(quotient(lane, 16) ^ remainder(lane, 8), "half")
        base = body.let(self.keys_at + self.values_at + stage * (s.keys * self.tiles_v * _LINE), "values_at")
        for step in range(s.keys // 16):
            for e in range(4):
                low = (step * 2 + e // 2) * 4 + e % 2 * 2
                body.store(a, e, body.call("coda_halves", "uint32", load(p, low), load(p, low + 1)))
            for pair in range(self.columns // 2):
                tile, chunk = pair // 4, pair % 4 * 2
                at = base + (tile * s.keys + step * 16 + row) * _LINE + (half ^ chunk) * 16
                self._matrices("coda_ldmatrix_turned", b, at)
                for i in range(2):
                    self._multiply(self.acc, (pair * 2 + i) * 4, a, [element(b, i * 2), element(b, i * 2 + 1)])

    def _finish(self) -> None:
        """Stores the rows, or what the merge makes them of."""
        body, shape = self.body, self.shape
        for i in range(2):
            total = body.let(load(self.total, i), "total")
            for mask in (1, 2):
                total = body.let(total + body.call("coda_exchange", "float32", total, mask), "total")
            with body.when(self.mine[i] < self.rows):
                alone = self.parts.equal(int64(1)) if shape.divisible else True
                with body.when(alone):
                    scale = body.let(_inverse(total, shape.guard), "scale")
                    head = self.kv_head * shape.group + self.groups[i]
                    at = (self.batch * self.queries + self.numbers[i]) * self.heads + head
                    self._store_row(body.let(at * shape.columns, "at"), i, scale)
                if shape.divisible:
                    with body.when(self.parts > int64(1)):
                        self._store_part(i, total)

    def _store_row(self, at: Expr, i: int, scale: Expr) -> None:
        body, columns = self.body, self.shape.columns
        pair = body.alloc(2, "float16", "pair")
        for f in range(self.columns):
            column = body.let(remainder(self.lane, 4) * 2 + f * 8, "column")
            for e in range(2):
                body.store(pair, e, (load(self.acc, f * 4 + i * 2 + e) * scale).astype("float16"))
            if columns % 2 == 0:
                with body.when(True if columns % 16 == 0 else column < columns):
                    body.store(self.out, at + int64(column), load(pair, 0, 2))
                continue
            for e in range(2):
                with body.when(column + e < columns):
                    body.store(self.out, at + int64(column + e), load(pair, e))

    def _part_at(self, row: Expr, part: Expr) -> Expr:
        """Where a part's results of a row of all heads lie: the sums of values, the largest score, the sum of probabilities."""
        return (row * self.parts + part) * (self.shape.columns + 2)

    def _store_part(self, i: int, total: Expr) -> None:
        body, columns = self.body, self.shape.columns
        at = body.let(self._part_at(self.owner * self.rows + self.mine[i], self.part), "at")
        for f in range(self.columns):
            for e in range(2):
                column = body.let(remainder(self.lane, 4) * 2 + (f * 8 + e), "column")
                with body.when(True if columns % 16 == 0 else column < columns):
                    body.store(self.partials, at + int64(column), load(self.acc, f * 4 + i * 2 + e))
        with body.when(remainder(self.lane, 4).equal(int32(0))):
            body.store(self.partials, at + columns, load(self.most, i))
            body.store(self.partials, at + (columns + 1), total)

    def _append(self) -> None:
        """Writes this part's keys and values to the joined ones."""
        body = self.body
        widths = (self.shape.depth, self.shape.columns)
        for number, (name, new, width) in enumerate(zip("kv", (self.k, self.v), widths, strict=True)):
            whole = width % _CHUNK == 0
            chunks = width // _CHUNK if whole else width
            total = body.let((self.stop - self.start) * chunks, "total")
            rounds = quotient(total + (self.schedule.threads - 1), self.schedule.threads)
            with body.loop(0, tirx.max(rounds, int64(0)), "round") as i:
                chunk = body.let(i * self.schedule.threads + int64(self.thread), "chunk")
                with body.when(chunk < total):
                    row = body.let(quotient(chunk, chunks), "row")
                    column = body.let((chunk - row * chunks) * (_CHUNK if whole else 1), "column")
                    key = body.let(self.start + row, "key")
                    to = body.let((self.owner * self.keys + key) * width + column, "to")
                    for buffer, at, there in self._key(name, number, new, key):
                        with body.when(there):
                            self._move(self.present[number], to, buffer, at * width + column, whole)

    def _move(self, target: Buffer, to: Expr, source: Buffer, at: Expr, whole: bool) -> None:
        if whole:
            self.body.do("coda_move", address(target, to), address(source, at))
        else:
            self.body.store(target, to, load(source, at))

    def merge(self, symbol: str, threads: int) -> tirx.PrimFunc:
        """The kernel that makes results of what parts of the keys gave; a block does a row."""
        body, shape = self.body, self.shape
        row = int64(body.thread("blockIdx.x", _MANY))
        thread = body.thread("threadIdx.x", threads)
        most, total = body.alloc(1, name="most"), body.alloc(1, name="total")
        body.store(most, 0, f32(-math.inf))
        body.store(total, 0, f32(0))
        columns = [body.let(thread + start, "column") for start in range(0, shape.columns, threads)]
        acc = body.alloc(len(columns), name="acc")
        for i in range(len(columns)):
            body.store(acc, i, f32(0))
        exp = partial(body.call, NATIVE["exp"], "float32")
        with body.loop(0, self.parts, "part") as part:
            at = body.let(self._part_at(row, part), "at")
            old, found = body.let(load(most, 0), "old"), body.let(load(self.partials, at + shape.columns), "found")
            new = self._larger(old, found)
            shift = body.let(tirx.Select(new < f32(LOWEST), f32(0), new), "shift")
            before, now = body.let(exp(old - shift), "before"), body.let(exp(found - shift), "now")
            body.store(most, 0, new)
            body.store(total, 0, load(total, 0) * before + load(self.partials, at + (shape.columns + 1)) * now)
            for i, column in enumerate(columns):
                place = int64(tirx.min(column, int32(shape.columns - 1)))
                body.store(acc, i, load(acc, i) * before + load(self.partials, at + place) * now)
        scale = body.let(_inverse(load(total, 0), shape.guard), "scale")
        pair = body.let(tirx.truncdiv(row, self.queries), "pair")
        batch = body.let(tirx.truncdiv(pair, self.heads), "batch")
        query, head = row - pair * self.queries, pair - batch * self.heads
        at = body.let(((batch * self.queries + query) * self.heads + head) * shape.columns, "at")
        for i, column in enumerate(columns):
            with body.when(column < shape.columns):
                body.store(self.out, at + int64(column), (load(acc, i) * scale).astype("float16"))
        return body.device_function(symbol, self.params)


def _score(row: int, column: int) -> int:
    """Which of a thread's scores is the one of its row 0 or 1 and of a column, of which it has two in each product."""
    return column // 2 * 4 + row * 2 + column % 2


def _inverse(total: Expr, guard: bool) -> Expr:
    """What makes sums of probabilities' values results; NaN, or 0 with ``guard``, where there is no probability."""
    inverse = f32(1) / total
    return tirx.Select(total > f32(0), inverse, f32(0 if guard else math.nan))
