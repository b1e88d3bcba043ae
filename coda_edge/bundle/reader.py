"""Reads a bundle back into memory, verifying every byte: for inspection and tests. The C runtime has its own reader."""

from __future__ import annotations

import os
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .. import _runtime
from ..errors import BundleError, SignatureError
from . import format as fmt
from .plan import (
    Buffer,
    BufferKind,
    Bundle,
    Constraint,
    ExecutionPlan,
    Expr,
    ExprOp,
    ExprTable,
    Level,
    Move,
    PlanStep,
    Read,
    Relation,
    TensorInfo,
)


def read(path: str | os.PathLike[str]) -> Bundle:
    """The bundle in file ``path``. Raises ``BundleError`` if it cannot be read, or is damaged or of another version."""
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise BundleError(f"bundle '{os.fspath(path)}' cannot be read: {e.strerror}") from e
    try:
        return from_bytes(data)
    except BundleError as e:
        raise BundleError(f"{os.fspath(path)}: {e}") from e.__cause__


def from_bytes(data: bytes) -> Bundle:
    """The bundle that ``data`` holds; its ``constants`` share the memory. Raises ``BundleError`` as ``read`` does."""
    sections = _sections(data)
    metadata = _texts(sections[fmt.Section.METADATA, 0], "metadata")
    return Bundle(
        levels=tuple(_level(sections, i) for kind, i in sections if kind == fmt.Section.PLAN),
        constants=np.frombuffer(sections[fmt.Section.CONSTANTS, 0], np.uint8),
        metadata=dict(zip(metadata[::2], metadata[1::2], strict=False)),
    )


_Sections = dict[tuple[fmt.Section, int], memoryview]


def _level(sections: _Sections, number: int) -> Level:
    target = _texts(sections[fmt.Section.TARGET, number], "targets")
    if not target:
        raise BundleError(f"bundle is invalid: its level {number} has no target")
    plan = _decode_plan(sections[fmt.Section.PLAN, number])
    return Level(target[0], tuple(target[1:]), plan, bytes(sections[fmt.Section.LIBRARY, number]))


def _sections(data: bytes) -> _Sections:
    if data[: len(fmt.MAGIC)] != fmt.MAGIC:
        raise BundleError("not a coda bundle: it does not begin with the bundle signature")
    if len(data) < fmt.PREFIX.size:
        raise BundleError(f"bundle is truncated: it has {len(data)} bytes, its header alone needs {fmt.PREFIX.size}")
    _, version, count, size, reserved = fmt.PREFIX.unpack_from(data)
    if version != fmt.VERSION:
        raise BundleError(
            f"bundle has format version {version}, this coda-edge reads version {fmt.VERSION}: "
            "build it again with a matching coda-edge"
        )
    levels = fmt.levels(count)
    if levels is None:
        raise BundleError(f"bundle has {count} sections, expected 2 and 3 for each of 1 to {fmt.MAX_LEVELS} levels")
    table = fmt.PREFIX.size + count * fmt.ENTRY.size
    checked = table + fmt.DIGEST_BYTES
    header = checked + fmt.KEY_BYTES + fmt.SIGNATURE_BYTES
    if len(data) < header:
        raise BundleError(f"bundle is truncated: it has {len(data)} bytes, its header alone needs {header}")
    if size != len(data):
        raise BundleError(f"bundle is truncated or extended: it has {len(data)} bytes, expected {size}")
    if sha256(data[:table]).digest() != data[table:checked]:
        raise BundleError("bundle is damaged: the checksum of its header differs")
    signed, key, signature = (
        data[:checked],
        data[checked : checked + fmt.KEY_BYTES],
        data[header - fmt.SIGNATURE_BYTES : header],
    )
    if any(key + signature) and not _runtime.signature_valid(key, signed, signature):
        raise SignatureError("bundle's signature is wrong: it was altered after it was signed")
    if reserved != 0:
        raise BundleError("bundle is invalid: the reserved field of its header is not 0")
    view = memoryview(data)
    sections: _Sections = {}
    end = header
    for i, expected in enumerate(fmt.sections(levels)):
        section, name = expected[0], expected[0].name.lower()
        kind, level, offset, size, digest = fmt.ENTRY.unpack_from(data, fmt.PREFIX.size + i * fmt.ENTRY.size)
        if (kind, level) != expected:
            raise BundleError(f"bundle is invalid: section {i} is of kind {kind} and level {level}")
        if offset != -(-end // section.alignment) * section.alignment or offset + size > len(data):
            raise BundleError(f"bundle is invalid: section '{name}' is {size} bytes at {offset}, after byte {end}")
        if any(view[end:offset]):
            raise BundleError(f"bundle is damaged: the padding before section '{name}' is not zero")
        sections[expected] = view[offset : offset + size]
        if fmt.digest(expected[0], sections[expected]) != digest:
            raise BundleError(f"bundle is damaged: the checksum of section '{name}' differs")
        end = offset + size
    if end != len(data):
        raise BundleError(f"bundle is invalid: {len(data) - end} bytes follow its last section")
    return sections


def _texts(section: memoryview, name: str) -> list[str]:
    data = bytes(section)
    if data and data[-1] != 0:
        raise BundleError(f"bundle is invalid: its {name} do not end in a zero byte")
    return [text.decode(errors="replace") for text in data.split(b"\0")[:-1]]


def _decode_plan(section: memoryview) -> ExecutionPlan:
    try:
        return _Tables(section).plan()
    except (ValueError, IndexError, KeyError, OverflowError) as e:
        raise BundleError(f"bundle's plan is invalid: {e}") from e


class _Tables:
    """The plan section cut into its tables. Its methods raise ``ValueError``, ``IndexError`` or ``KeyError`` where they contradict."""

    def __init__(self, section: memoryview) -> None:
        if len(section) < fmt.PLAN_HEADER.size:
            raise ValueError(f"it has {len(section)} bytes, its header alone needs {fmt.PLAN_HEADER.size}")
        counts = fmt.PLAN_HEADER.unpack_from(section)
        symbols, exprs, self.inputs, outputs, buffers, kernels, steps, words, strings, constraints, reads, moves = (
            counts
        )
        sizes = [
            fmt.PLAN_HEADER.size,
            exprs * fmt.EXPR.size,
            (self.inputs + outputs) * fmt.TENSOR.size,
            buffers * fmt.BUFFER.size,
            steps * fmt.STEP.size,
            symbols * fmt.WORD.size,
            kernels * fmt.WORD.size,
            words * fmt.WORD.size,
            constraints * fmt.CONSTRAINT.size,
            reads * fmt.READ.size,
            moves * fmt.MOVE.size,
            strings,
        ]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        if ends[-1] != len(section):
            raise ValueError(f"its tables and strings take {ends[-1]} bytes, it has {len(section)}")
        parts = [section[a:b] for a, b in pairwise(ends)]
        self.exprs, self.tensors, self.buffers, self.steps, self.symbols, self.kernels = parts[:6]
        self.words = [word for (word,) in fmt.WORD.iter_unpack(parts[6])]
        self.constraints, self.reads, self.moves, self.strings = parts[7], parts[8], parts[9], bytes(parts[10])

    def plan(self) -> ExecutionPlan:
        """All tables as the plan's dataclasses."""
        tensors = [
            TensorInfo(self.text(name), _DTYPE_NAMES[dtype], self.range(first, rank))
            for name, dtype, rank, first in fmt.TENSOR.iter_unpack(self.tensors)
        ]
        return ExecutionPlan(
            exprs=self.size_table(),
            inputs=tensors[: self.inputs],
            outputs=tensors[self.inputs :],
            buffers=[Buffer(BufferKind(kind), *numbers) for kind, *numbers in fmt.BUFFER.iter_unpack(self.buffers)],
            kernels=self.names(self.kernels),
            steps=[self.step(record) for record in fmt.STEP.iter_unpack(self.steps)],
            constraints=[
                Constraint(Relation(relation), left, right, self.text(text))
                for relation, left, right, text in fmt.CONSTRAINT.iter_unpack(self.constraints)
            ],
            reads=[
                Read(self.text(name), step, buffer, _DTYPE_NAMES[dtype], element)
                for name, step, buffer, dtype, element in fmt.READ.iter_unpack(self.reads)
            ],
            moves=[Move(*record) for record in fmt.MOVE.iter_unpack(self.moves)],
        )

    def size_table(self) -> ExprTable:
        """The size table, ready to be evaluated or extended."""
        return ExprTable.of(
            [Expr(ExprOp(op), a, b) for op, _, a, b in fmt.EXPR.iter_unpack(self.exprs)],
            self.names(self.symbols),
            [self.text(name) for name, *_ in fmt.READ.iter_unpack(self.reads)],
        )

    def step(self, record: tuple[Any, ...]) -> PlanStep:
        """One kernel call."""
        name, kernel, finish, buffers, buffer_count, ints, int_count, items, grain, scratch, flops, moved, source, _ = (
            record
        )
        return PlanStep(
            name=self.text(name),
            kernel=kernel,
            finish=finish,
            buffers=self.range(buffers, buffer_count),
            ints=self.range(ints, int_count),
            items=items,
            grain=grain,
            scratch=scratch,
            flops=flops,
            bytes=moved,
            source=self.text(source),
        )

    def names(self, table: memoryview) -> list[str]:
        """A table of strings."""
        return [self.text(offset) for (offset,) in fmt.WORD.iter_unpack(table)]

    def text(self, offset: int) -> str:
        """The string at byte ``offset``."""
        return self.strings[offset : self.strings.index(b"\0", offset)].decode(errors="replace")

    def range(self, first: int, count: int) -> tuple[int, ...]:
        """``count`` words from ``first``."""
        if first + count > len(self.words):
            raise ValueError(f"words {first} and {count} more of {len(self.words)}")
        return tuple(self.words[first : first + count])


_DTYPE_NAMES = {number: name for name, number in fmt.DTYPES.items()}
