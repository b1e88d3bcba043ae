"""The records of a bundle, shared by its writer and its reader; ``docs/bundle-format.md`` explains them."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

MAGIC = b"CODA\r\n\x1a\n"
VERSION = 3


class Section(IntEnum):
    """The sections, in file order."""

    PLAN = 0
    FEATURES = 1
    METADATA = 2
    LIBRARY = 3
    CONSTANTS = 4

    @property
    def alignment(self) -> int:
        """What the section's offset is a multiple of; constants are mapped in pages."""
        return 4096 if self is Section.CONSTANTS else 64


PREFIX = Struct("<8sIIQQ")  # magic, version, sections, file bytes, 0
ENTRY = Struct("<IIQQ32s")  # kind, 0, offset, bytes, SHA-256
DIGEST_BYTES = 32
TABLE_BYTES = PREFIX.size + len(Section) * ENTRY.size
HEADER_BYTES = TABLE_BYTES + DIGEST_BYTES

# symbols, exprs, inputs, outputs, buffers, kernels, steps, words, string bytes, constraints, reads
PLAN_HEADER = Struct("<11I")
EXPR = Struct("<IIqq")  # operator, 0, a, b
TENSOR = Struct("<IIII")  # name, element type, rank, first word of its dims
BUFFER = Struct("<IIQII")  # kind, size, index, first, last
# name, kernel, finish, first word and count of buffers, of ints, items, grain, scratch, flops, bytes, source, 0
STEP = Struct("<IIiIIIIIIIIIII")
WORD = Struct("<I")
CONSTRAINT = Struct("<IIII")  # relation, left, right, text
READ = Struct("<IIIIQ")  # name, step, buffer, element type, element

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
