"""The operation that products of whole numbers are made of: four or eight products of bytes, added to an int32 lane.

A target that has such an instruction names its row (``Target.dot``); a new processor's is a row here. Bytes of the weights are signed;
``low`` is the smallest number that a byte of the left operand holds, whose instruction says how it reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from .body import Expr, widen


@dataclass(frozen=True)
class Dot:
    """``accumulate(sums, a, w)``: ``lanes`` int32 sums, each with the products of the ``word`` bytes that it has in ``a`` and in ``w`` added.

    ``lanes``: how many the instruction has; sums that do not fit in 32 bits wrap. ``tiles``: the register tiles (rows, vectors) to choose from, best
    first; (): the target's. Each row's word of A takes a register as the weights do, unlike in float32, where it is read from memory as it is multiplied.
    ``together``: words of a row of A that are loaded at once and taken one by one, for an instruction that has one element of a vector meet all of another's.
    ``rows``: 2 where ``a`` has a word of each of two rows, ``w`` of each of two columns, and the four sums are theirs, row by row.
    ``narrower``: the operation that reads the same bytes of A in words of half the size, for rows whose parts are no whole words.
    """

    lanes: int
    low: int
    accumulate: Callable[[Expr, Expr, Expr], Expr]
    tiles: tuple[tuple[int, int], ...] = ()
    together: int = 1
    word: int = 4
    rows: int = 1
    narrower: str = ""

    @property
    def dtype(self) -> str:
        """The dtype of the left operand's bytes."""
        return "int8" if self.low < 0 else "uint8"


def _vpdpbusd(bits: int) -> Callable[[Expr, Expr, Expr], Expr]:
    """Intel SDM vol. 2C, VPDPBUSD: unsigned bytes of the second operand by signed bytes of the third."""

    def accumulate(sums: Expr, a: Expr, w: Expr) -> Expr:
        bytes_of_a, bytes_of_w = (tirx.reinterpret(f"int8x{bits // 8}", v) for v in (widen(a, bits // 32), w))
        name = f"llvm.x86.avx512.vpdpbusd.{bits}"
        return tirx.call_llvm_pure_intrin(f"int32x{bits // 32}", name, sums, bytes_of_a, bytes_of_w)

    return accumulate


def _sdot(sums: Expr, a: Expr, w: Expr) -> Expr:
    """Arm Architecture Reference Manual, SDOT: signed bytes of both. Of a word that lies in a vector LLVM makes the form by element."""
    bytes_of_a, bytes_of_w = (tirx.reinterpret("int8x16", v) for v in (widen(a, 4), w))
    return tirx.call_llvm_pure_intrin("int32x4", "llvm.aarch64.neon.sdot.v4i32.v16i8", sums, bytes_of_w, bytes_of_a)


def _smmla(sums: Expr, a: Expr, w: Expr) -> Expr:
    """Arm Architecture Reference Manual, SMMLA: 2 × 8 signed bytes by 8 × 2, each column's together."""
    bytes_of_a, bytes_of_w = (tirx.reinterpret("int8x16", v) for v in (a, w))
    return tirx.call_llvm_pure_intrin("int32x4", "llvm.aarch64.neon.smmla.v4i32.v16i8", sums, bytes_of_a, bytes_of_w)


DOTS: dict[str, Dot] = {
    # Of 384 columns, 1536 steps and 400 rows the tiles do 98 and 92 % of the multiply-add peak; 8×3 spills and does 52 %.
    "vpdpbusd512": Dot(16, 0, _vpdpbusd(512), ((6, 3), (5, 4))),
    # As above 4×3, 6×2 and 3×3 do 99, 98 and 91 % on Zen 5.
    "vpdpbusd256": Dot(8, 0, _vpdpbusd(256), ((4, 3), (6, 2))),
    "sdot128": Dot(4, -128, _sdot, ((6, 3), (8, 2)), together=4),
    # Two rows' words take an instruction to become one vector, so that few rows and many columns are best.
    "smmla128": Dot(4, -128, _smmla, ((4, 6), (6, 4)), together=2, word=8, rows=2, narrower="sdot128"),
}


def dot_for(name: str, run: int) -> str:
    """The operation ``name``, or the narrower one where rows come in parts of ``run`` bytes (0: in one) that are no whole words of it."""
    dot = DOTS[name]
    return dot.narrower if run % dot.word and dot.narrower else name
