"""Inner loops of a GEMM as one would write them by hand for Arm cores, from the instruction set alone: what compiled loops are measured against.

Each multiplies a tile of accumulators v8 to v31 and has both operands packed, as hand-written libraries do: rows of A side by side (x0), panels
of W (x1). A vector is loaded for the next step right behind its last use in this one, so that in-order cores find it there.
Instructions: Arm Architecture Reference Manual, FMLA (by element), SDOT (by element), SMMLA.
"""

from __future__ import annotations

from collections.abc import Iterator

ROWS = 8
COLUMNS = 3
"""Vectors of columns of the tiles of FMLA and SDOT."""
PAIRS = 4, 6
"""Pairs of rows and of columns of SMMLA's tile, whose accumulators are 2 × 2."""


def float32() -> list[str]:
    """8 × 12, two steps of K."""
    return [line for step in range(2) for line in _by_element("fmla v{acc}.4s, v{w}.4s, v{a}.s[{lane}]", step, 4)]


def float16() -> list[str]:
    """8 × 24 in half precision, sums as well: two steps of K."""
    return [line for step in range(2) for line in _by_element("fmla v{acc}.8h, v{w}.8h, v{a}.h[{lane}]", step, 8)]


def products_of_bytes() -> list[str]:
    """8 × 12 by SDOT: two steps of four of K."""
    return [line for step in range(2) for line in _by_element("sdot v{acc}.4s, v{w}.16b, v{a}.4b[{lane}]", step, 4)]


def matrices_of_bytes() -> list[str]:
    """8 × 12 by SMMLA: a step of eight of K. Columns take turns in four registers."""
    rows, columns = PAIRS
    lines = []
    for j in range(columns):
        for i in range(rows):
            lines.append(f"smmla v{8 + rows * j + i}.4s, v{i}.16b, v{4 + j % 4}.16b")
            if j == columns - 1:
                lines.append(f"ldr q{i}, [x0], #16")
        lines.append(f"ldr q{4 + j % 4}, [x1], #16")
    return lines


def _by_element(multiply: str, step: int, lanes: int) -> Iterator[str]:
    """One step: A has two sets of registers, v3 and v4 or v5 and v6, of which the other is loaded meanwhile."""
    here, there = (3, 5) if step == 0 else (5, 3)
    for j in range(COLUMNS):
        for i in range(ROWS):
            yield multiply.format(acc=8 + ROWS * j + i, w=j, a=here + i // lanes, lane=i % lanes)
            if j == 0 and i % lanes == 0:
                yield f"ldr q{there + i // lanes}, [x0], #16"
        yield f"ldr q{j}, [x1], #16"


LOOPS = {
    "float32": float32,
    "float16": float16,
    "bytes, SDOT": products_of_bytes,
    "bytes, SMMLA": matrices_of_bytes,
}
COUNTED = ["subs x2, x2, #1", "b.ne #4"]
"""What ends each loop."""
