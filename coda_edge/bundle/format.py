"""The records of a bundle, shared by its writer and its reader; ``docs/bundle-format.md`` explains them."""

from __future__ import annotations

from enum import IntEnum
from hashlib import sha256
from struct import Struct

MAGIC = b"CODA\r\n\x1a\n"
VERSION = 5
MAX_LEVELS = 16


class Section(IntEnum):
    """The kinds of sections. The first three are there for each level, in this order, then the other two."""

    PLAN = 0
    TARGET = 1
    LIBRARY = 2
    METADATA = 3
    CONSTANTS = 4

    @property
    def alignment(self) -> int:
        """What the section's offset is a multiple of; constants are mapped in pages."""
        return 4096 if self is Section.CONSTANTS else 64


_OF_LEVEL = (Section.PLAN, Section.TARGET, Section.LIBRARY)
_OF_FILE = (Section.METADATA, Section.CONSTANTS)


def sections(levels: int) -> list[tuple[Section, int]]:
    """The kind and the level of each section, in file order; the level is 0 for those of the whole file."""
    return [*((kind, level) for level in range(levels) for kind in _OF_LEVEL), *((kind, 0) for kind in _OF_FILE)]


def levels(count: int) -> int | None:
    """How many levels a file of ``count`` sections has; None if no file has so many sections."""
    levels, rest = divmod(count - len(_OF_FILE), len(_OF_LEVEL))
    return levels if rest == 0 and 1 <= levels <= MAX_LEVELS else None


CONSTANT_BLOCK = 1 << 20


def digest(section: Section, data: bytes | memoryview) -> bytes:
    """The checksum of a section: SHA-256, and of constants that of the SHA-256 of all blocks, so that threads can share the work."""
    if section is not Section.CONSTANTS:
        return sha256(data).digest()
    view = memoryview(data).cast("B")
    blocks = (view[start : start + CONSTANT_BLOCK] for start in range(0, len(view), CONSTANT_BLOCK))
    return sha256(b"".join(sha256(block).digest() for block in blocks)).digest()


PREFIX = Struct("<8sIIQQ")  # magic, version, sections, file bytes, 0
ENTRY = Struct("<IIQQ32s")  # kind, level, offset, bytes, checksum
DIGEST_BYTES = 32
KEY_BYTES, SIGNATURE_BYTES = 32, 64

# symbols, exprs, inputs, outputs, buffers, kernels, steps, words, string bytes, constraints, reads, moves
PLAN_HEADER = Struct("<12I")
EXPR = Struct("<IIqq")  # operator, 0, a, b
TENSOR = Struct("<IIII")  # name, element type, rank, first word of its dims
BUFFER = Struct("<IIQII")  # kind, size, index, first, last
# name, kernel, finish, first word and count of buffers, of ints, items, grain, scratch, flops, bytes, source, 0
STEP = Struct("<IIiIIIIIIIIIII")
WORD = Struct("<I")
CONSTRAINT = Struct("<IIII")  # relation, left, right, text
READ = Struct("<IIIIQ")  # name, step, buffer, element type, element
MOVE = Struct("<QQIIII")  # from, to, bytes of a row, rows, distance of rows where they come from, where they go

CONSTANT_ALIGNMENT = 64
MAX_RANK = 8
MAX_SYMBOLS = 256

# Element types by their numbers in ONNX's TensorProto.DataType.
DTYPES = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "uint32": 12,
    "uint64": 13,
    "bfloat16": 16,
}
