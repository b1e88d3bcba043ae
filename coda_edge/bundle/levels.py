"""One bundle for several targets: constants that they share are stored once.

The targets' kernels read weights in panels of different widths. What is stored is the layout of one target; the others' panels are made of it
when the bundle is opened, by moves: each run of columns that lies together in both layouts is a rectangle of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from .plan import Buffer, BufferKind, Bundle, ExecutionPlan, Level, Move

_ALIGNMENT = 64
Bytes = npt.NDArray[np.uint8]
_Key = tuple[tuple[int, ...], str, bytes]


@dataclass(frozen=True, eq=False)
class StoredConstant:
    """A constant at byte ``offset`` of a constants section.

    ``columns``: where it holds panels ``[rows, columns]`` of a matrix, one behind another, the columns of each; empty for any
    other constant.
    """

    offset: int
    data: npt.NDArray[np.generic]
    columns: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class LevelParts:
    """What was built for one target: a level whose plan counts on ``constants``, a section that holds the ``stored`` ones."""

    level: Level
    constants: Bytes
    stored: Sequence[StoredConstant]


def combine(parts: Sequence[LevelParts], order: Sequence[str], metadata: dict[str, str]) -> Bundle:
    """The bundle of all levels, in the ``order`` of their targets, best last. The layout of the first of ``parts`` is stored."""
    section = _Section(parts[0])
    levels = {parts[0].level.target: parts[0].level}
    levels |= {p.level.target: replace(p.level, plan=section.moved(p)) for p in parts[1:]}
    return Bundle(tuple(levels[name] for name in order), section.whole(), metadata)


class _Section:
    """The constants section while levels are added to the first one's."""

    def __init__(self, first: LevelParts) -> None:
        self._pieces: list[Bytes] = [first.constants]
        self._size = first.constants.size
        self._offsets: dict[bytes, int] = {}
        self._panels: dict[_Key, StoredConstant] = {}
        self._first = first

    def whole(self) -> Bytes:
        """The section."""
        return np.concatenate(self._pieces) if len(self._pieces) > 1 else self._pieces[0]

    def moved(self, parts: LevelParts) -> ExecutionPlan:
        """The plan of ``parts`` over this section, which is given what it lacks."""
        if not self._offsets:
            self._offsets = {_digest(s.data): s.offset for s in self._first.stored}
            self._panels = {_key(s): s for s in self._first.stored if s.columns}
        places: dict[int, tuple[BufferKind, int]] = {}
        moves: list[Move] = []
        repacked = 0
        for constant in parts.stored:
            digest = _digest(constant.data)
            source = self._panels.get(_key(constant)) if constant.columns else None
            if digest not in self._offsets and source is not None:
                places[constant.offset] = (BufferKind.REPACKED, repacked)
                moves += _moves(source, constant, repacked)
                repacked += -(-constant.data.nbytes // _ALIGNMENT) * _ALIGNMENT
            else:
                places[constant.offset] = (BufferKind.CONSTANT, self._offset(digest, constant.data))
        buffers = [self._placed(b, places) for b in parts.level.plan.buffers]
        return replace(parts.level.plan, buffers=buffers, moves=moves)

    @staticmethod
    def _placed(buffer: Buffer, places: dict[int, tuple[BufferKind, int]]) -> Buffer:
        if buffer.kind != BufferKind.CONSTANT:
            return buffer
        kind, index = places[buffer.index]
        return replace(buffer, kind=kind, index=index)

    def _offset(self, digest: bytes, data: npt.NDArray[np.generic]) -> int:
        if digest not in self._offsets:
            padding = -self._size % _ALIGNMENT
            self._pieces += [np.zeros(padding, np.uint8), _flat(data)]
            self._offsets[digest] = self._size + padding
            self._size += padding + data.nbytes
        return self._offsets[digest]


def _flat(data: npt.NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def _digest(data: npt.NDArray[np.generic]) -> bytes:
    return sha256(_flat(data).data).digest()


def _panels(constant: StoredConstant) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """The first element and the columns of each panel."""
    rows, start = _rows(constant), 0
    for columns in constant.columns:
        yield start, np.asarray(columns, np.int64)
        start += rows * len(columns)


def _rows(constant: StoredConstant) -> int:
    return constant.data.size // sum(map(len, constant.columns))


def _matrix(constant: StoredConstant) -> npt.NDArray[np.generic]:
    """The matrix that the panels are of, ``[rows, columns]``."""
    rows, flat = _rows(constant), constant.data.reshape(-1)
    matrix = np.zeros((rows, 1 + max(max(columns) for columns in constant.columns)), flat.dtype)
    for start, columns in _panels(constant):
        matrix[:, columns] = flat[start : start + rows * len(columns)].reshape(rows, -1)
    return matrix


def _key(constant: StoredConstant) -> _Key:
    """By which two constants are known to hold the same matrix."""
    matrix = _matrix(constant)
    return matrix.shape, matrix.dtype.str, _digest(matrix)


def _moves(source: StoredConstant, target: StoredConstant, offset: int) -> Iterator[Move]:
    """How panels ``target``, at byte ``offset`` of the repacked constants, are made of panels ``source`` of the same matrix."""
    rows, size = _rows(source), source.data.itemsize
    width = 1 + max(max(columns) for columns in source.columns)
    at, stride = np.zeros(width, np.int64), np.zeros(width, np.int64)
    for start, columns in _panels(source):
        at[columns] = start + np.arange(len(columns))
        stride[columns] = len(columns)
    for start, columns in _panels(target):
        first, step = at[columns], stride[columns]
        breaks = np.flatnonzero((np.diff(first) != 1) | (np.diff(step) != 0)) + 1
        for begin, end in zip([0, *breaks], [*breaks, len(columns)], strict=True):
            run, step_here, panel = int(end - begin), int(step[begin]), len(columns)
            whole = run == step_here == panel
            yield Move(
                source=source.offset + size * int(first[begin]),
                target=offset + size * (start + int(begin)),
                row_bytes=size * run * (rows if whole else 1),
                rows=1 if whole else rows,
                source_stride=size * step_here * (rows if whole else 1),
                target_stride=size * panel * (rows if whole else 1),
            )
