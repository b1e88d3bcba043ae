"""Writes a bundle: one file, as ``docs/bundle-format.md`` specifies it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from struct import error as StructError

from ..errors import BundleError
from ..files import FileError, creatable
from . import format as fmt
from .plan import Bundle, ExecutionPlan, Level, TensorInfo


def write(bundle: Bundle, path: str | os.PathLike[str], durable: bool = True) -> None:
    """Writes ``bundle`` to ``path`` atomically: afterwards the file is complete, or as it was before.

    ``durable``: so too if the machine stops right then, which a file for the time being need not be.

    Raises ``BundleError`` for a plan that the format cannot hold, and ``FileError`` where the file cannot be written.
    """
    target = creatable(Path(path))
    parts = _parts(bundle)
    try:
        _replace(target, parts, durable)
    except OSError as e:
        raise FileError(f"{target}: cannot be written: {e.strerror or e}") from e


def _replace(target: Path, parts: Sequence[bytes | memoryview], durable: bool) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    if not durable:
        return
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def to_bytes(bundle: Bundle) -> bytes:
    """The bundle as one byte string. Raises ``BundleError`` for a plan that the format cannot hold."""
    return b"".join(_parts(bundle))


def _parts(bundle: Bundle) -> list[bytes | memoryview]:
    """Header, then each section after its padding."""
    _check_levels(bundle.levels)
    parts: list[bytes | memoryview] = []
    for level in bundle.levels:
        parts += [encode_plan(level.plan), encode_strings((level.target, *level.features)), level.library]
    parts.append(encode_strings(text for item in bundle.metadata.items() for text in item))
    parts.append(bundle.constants.tobytes() if bundle.constants.size == 0 else bundle.constants.data)
    entries: list[bytes] = []
    body: list[bytes | memoryview] = []
    end = fmt.PREFIX.size + len(parts) * fmt.ENTRY.size + fmt.DIGEST_BYTES + fmt.KEY_BYTES + fmt.SIGNATURE_BYTES
    for (kind, number), data in zip(fmt.sections(len(bundle.levels)), parts, strict=True):
        offset = -(-end // kind.alignment) * kind.alignment
        body += [bytes(offset - end), data]
        entries.append(fmt.ENTRY.pack(kind, number, offset, len(data), fmt.digest(kind, data)))
        end = offset + len(data)
    table = fmt.PREFIX.pack(fmt.MAGIC, fmt.VERSION, len(entries), end, 0) + b"".join(entries)
    return [table, sha256(table).digest(), bytes(fmt.KEY_BYTES + fmt.SIGNATURE_BYTES), *body]


def _check_levels(levels: Sequence[Level]) -> None:
    names = [level.target for level in levels]
    if not 1 <= len(levels) <= fmt.MAX_LEVELS or len(set(names)) != len(names):
        raise BundleError(
            f"a bundle holds 1 to {fmt.MAX_LEVELS} levels of different targets, not {', '.join(names) or 'none'}"
        )
    sides = [[[_described(t) for t in side] for side in (level.plan.inputs, level.plan.outputs)] for level in levels]
    if any(side != sides[0] for side in sides):
        raise BundleError(f"the plans for {', '.join(names)} differ in inputs or outputs: they are not of one model")


def _described(tensor: TensorInfo) -> tuple[str, str, int]:
    return tensor.name, tensor.dtype, len(tensor.dims)


def encode_strings(texts: Iterable[str]) -> bytes:
    """A section of strings. Raises ``BundleError`` for one with a zero byte."""
    encoded = [text.encode() for text in texts]
    for text in encoded:
        if b"\0" in text:
            raise BundleError(f"a bundle's strings cannot hold a zero byte: {text!r}")
    return b"".join(text + b"\0" for text in encoded)


class _Pools:
    """The word and string tables that records point into; equal entries are stored once."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self.strings = b""
        self._words: dict[tuple[int, ...], int] = {}
        self._strings: dict[str, int] = {}

    def range(self, values: tuple[int, ...]) -> int:
        """The first word of ``values``."""
        if values not in self._words:
            self._words[values] = len(self.words)
            self.words += values
        return self._words[values]

    def string(self, text: str) -> int:
        """The byte offset of ``text``."""
        if text not in self._strings:
            self._strings[text] = len(self.strings)
            self.strings += encode_strings([text])
        return self._strings[text]


def encode_plan(plan: ExecutionPlan) -> bytes:
    """A plan section. Raises ``BundleError`` for a plan that the format cannot hold."""
    try:
        return _pack_plan(plan)
    except StructError as e:
        raise BundleError(f"the plan holds a number that the bundle format cannot: {e}") from e


def _pack_plan(plan: ExecutionPlan) -> bytes:
    _check(plan)
    pools = _Pools()
    exprs = b"".join(fmt.EXPR.pack(e.op, 0, e.a, e.b) for e in plan.exprs.entries)
    tensors = b"".join(
        fmt.TENSOR.pack(pools.string(t.name), fmt.DTYPES[t.dtype], len(t.dims), pools.range(t.dims))
        for t in (*plan.inputs, *plan.outputs)
    )
    buffers = b"".join(fmt.BUFFER.pack(b.kind, b.size, b.index, b.first, b.last) for b in plan.buffers)
    steps = b"".join(
        fmt.STEP.pack(
            pools.string(s.name),
            s.kernel,
            s.finish,
            pools.range(s.buffers),
            len(s.buffers),
            pools.range(s.ints),
            len(s.ints),
            s.items,
            s.grain,
            s.scratch,
            s.flops,
            s.bytes,
            pools.string(s.source),
            0,
        )
        for s in plan.steps
    )
    symbols = b"".join(fmt.WORD.pack(pools.string(name)) for name in plan.exprs.symbols)
    kernels = b"".join(fmt.WORD.pack(pools.string(name)) for name in plan.kernels)
    words = b"".join(fmt.WORD.pack(word) for word in pools.words)
    constraints = b"".join(
        fmt.CONSTRAINT.pack(c.relation, c.left, c.right, pools.string(c.text)) for c in plan.constraints
    )
    reads = b"".join(
        fmt.READ.pack(pools.string(r.name), r.step, r.buffer, fmt.DTYPES[r.dtype], r.element) for r in plan.reads
    )
    moves = b"".join(
        fmt.MOVE.pack(m.source, m.target, m.row_bytes, m.rows, m.source_stride, m.target_stride) for m in plan.moves
    )
    strings = pools.strings or b"\0"
    header = fmt.PLAN_HEADER.pack(
        len(plan.exprs.symbols),
        len(plan.exprs.entries),
        len(plan.inputs),
        len(plan.outputs),
        len(plan.buffers),
        len(plan.kernels),
        len(plan.steps),
        len(pools.words),
        len(strings),
        len(plan.constraints),
        len(plan.reads),
        len(plan.moves),
    )
    tables = [exprs, tensors, buffers, steps, symbols, kernels, words, constraints, reads, moves]
    return b"".join([header, *tables, strings])


def _check(plan: ExecutionPlan) -> None:
    """What a plan may hold in memory but not in a bundle."""
    if len(plan.exprs.symbols) > fmt.MAX_SYMBOLS:
        raise BundleError(f"the plan has {len(plan.exprs.symbols)} symbolic sizes, a bundle at most {fmt.MAX_SYMBOLS}")
    for t in (*plan.inputs, *plan.outputs):
        if t.dtype not in fmt.DTYPES:
            raise BundleError(f"'{t.name}' has element type {t.dtype}; a bundle can hold {', '.join(fmt.DTYPES)}")
        if len(t.dims) > fmt.MAX_RANK:
            raise BundleError(f"'{t.name}' has {len(t.dims)} dimensions, an input or output at most {fmt.MAX_RANK}")
