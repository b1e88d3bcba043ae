"""What a schedule is chosen for, in the words that a database keeps. Needs nothing of TVM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace

from ..epilogue.ops import Group
from ..epilogue.program import EpilogueProgram, Kind
from ..symbolic import Dim

_COSTLY = 10
"""Operations of an operator from which on it is a polynomial and more."""


@dataclass(frozen=True)
class Problem:
    """A kind of kernel with everything that its best schedule depends on.

    ``target``: its name; ``kind``: ``gemm``, ``attention`` or ``norm``; ``shape``: (N, K) of a GEMM, (depth, columns) of an attention,
    (K, N of all its readers) of a norm. ``epilogue``: what of a program there is, see ``epilogue_class``; ``weights``: how they are
    stored. ``rows``: the least power of two that is not below the number of rows, where that is known at compile time; otherwise 0.
    """

    target: str
    kind: str
    shape: tuple[int, ...]
    epilogue: str = ""
    weights: str = "float32"
    rows: int = 0

    def widening(self) -> Iterator[Problem]:
        """This problem, then the one for any number of rows."""
        yield self
        if self.rows:
            yield replace(self, rows=0)


def norm_problem(target: str, k: int, n: int, centred: bool) -> Problem:
    """The problem of a norm over ``k`` columns, which GEMMs with ``n`` columns together read; ``centred``: whether it takes off a mean."""
    return Problem(target, "norm", (k, n), "mean" if centred else "")


def rows_bucket(rows: Dim) -> int:
    """``Problem.rows`` of so many rows."""
    return 1 << (max(int(rows), 1) - 1).bit_length() if isinstance(rows, int) else 0


def epilogue_class(program: EpilogueProgram) -> str:
    """What of a program decides how fast a schedule is, as words joined by ``+``.

    ``halves`` and ``doubles`` (its values' widths), ``reduce``, ``costly`` (an exponential or the like an element), ``tile`` (a
    tensor read), ``heads`` (stored in heads), ``cut`` (stored in ranges of columns).
    """
    kinds = program.kinds()
    wide = 1 << 20
    widths = [program.width(name, wide) for name, kind in kinds.items() if kind in (Kind.TILE, Kind.COL)]
    halved = any(o.halves for o in program.outputs)
    words = {
        f"halves{wide // min(widths) * (2 if halved else 1)}": min(widths) < wide or halved,
        "doubles": max(widths) > wide,
        "reduce": any(s.operator.group is Group.REDUCE for s in program.steps),
        "costly": any(s.operator.flops >= _COSTLY and kinds[s.names[0]] is Kind.TILE for s in program.steps),
        "tile": any(p.kind is Kind.TILE for p in program.params[1:]),
        "heads": any(o.heads for o in program.outputs),
        "cut": any(o.columns for o in program.outputs),
    }
    return "+".join(word for word, present in words.items() if present)


def format_class(form: object) -> str:
    """A dataclass of how weights are stored as words: its first field, then each other one that is not as by default."""
    first, *others = fields(form)  # type: ignore[arg-type]  # any dataclass
    words = [str(getattr(form, first.name))]
    for f in others:
        value = getattr(form, f.name)
        default = None if f.default is MISSING else f.default
        if value != default:
            words.append(f.name if value is True else f"{f.name}={value}")
    return "+".join(words)
