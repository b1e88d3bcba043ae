"""The execution plan: what the runtime does, with every size an entry of one expression table.

A size may be an element of a tensor that the plan computes itself: ``Read`` says which, and before which step it is known.
The plan knows nothing of ONNX or TVM. ``docs/bundle-format.md`` gives its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import sympy

from ..errors import ShapeError
from ..symbolic import Dim, simplify, symbol


class ExprOp(IntEnum):
    """Operators of the size table; ``FLOORDIV`` and ``MOD`` round towards minus infinity, divisors are positive."""

    CONST = 0  # a: the value
    SYMBOL = 1  # a: index of the symbol
    ADD = 2
    MUL = 3
    FLOORDIV = 4
    MOD = 5
    MAX = 6
    MIN = 7
    DATA = 8  # a: index of the read
    RUN = 9  # a number that is another one for each run; only an int of a step can be it


class BufferKind(IntEnum):
    """Where a buffer lives. ``STATE`` is reserved for buffers that persist across runs (a KV cache).

    ``REPACKED``: a constant that is made of the stored ones when the bundle is opened, by the plan's moves.
    """

    INPUT = 0
    OUTPUT = 1
    CONSTANT = 2
    ARENA = 3
    STATE = 4
    REPACKED = 5


class Relation(IntEnum):
    """What a constraint asks of two sizes."""

    AT_MOST = 0  # left <= right
    EQUAL = 1


@dataclass(frozen=True)
class Expr:
    """One entry of the size table; ``a`` and ``b`` are earlier entries, except for CONST and SYMBOL."""

    op: ExprOp
    a: int
    b: int = 0


#: In a size: the number of the run.
RUN = symbol("run number")


class ExprTable:
    """Sizes as a table of integer operations, each distinct expression stored once. ``data``: names of the sizes that are read."""

    def __init__(self) -> None:
        self.entries: list[Expr] = []
        self.symbols: list[str] = []
        self.data: list[str] = []
        self._index: dict[Expr, int] = {}

    @classmethod
    def of(cls, entries: list[Expr], symbols: list[str], data: list[str]) -> ExprTable:
        """A table of these entries."""
        table = cls()
        table.entries = entries
        table.symbols = symbols
        table.data = data
        table._index = {e: i for i, e in enumerate(entries)}
        return table

    def add(self, dim: Dim) -> int:
        """The index of ``dim`` in the table, adding what it needs."""
        dim = simplify(dim)
        if isinstance(dim, int):
            return self._entry(ExprOp.CONST, dim)
        return self._convert(dim)

    def symbol(self, name: str) -> int:
        """The index of symbol ``name`` in ``symbols``, adding it."""
        if name not in self.symbols:
            self.symbols.append(name)
        return self.symbols.index(name)

    def evaluate(self, sizes: Mapping[str, int]) -> list[int]:
        """Every entry's value, as the runtime computes them; ``sizes`` names those that are read too. One left out counts as 1."""
        values: list[int] = []
        for e in self.entries:
            if e.op == ExprOp.CONST:
                values.append(e.a)
            elif e.op == ExprOp.SYMBOL:
                values.append(sizes.get(self.symbols[e.a], 1))
            elif e.op == ExprOp.DATA:
                values.append(sizes.get(self.data[e.a], 1))
            elif e.op == ExprOp.RUN:
                values.append(0)
            else:
                values.append(_EVALUATE[e.op](values[e.a], values[e.b]))
        return values

    def text(self, index: int) -> str:
        """Entry ``index`` in words: ``(past + seq)``."""
        e = self.entries[index]
        if e.op in _LEAVES:
            return _LEAVES[e.op](self, e.a)
        a, b = self.text(e.a), self.text(e.b)
        return f"({a} {_INFIX[e.op]} {b})" if e.op in _INFIX else f"{e.op.name.lower()}({a}, {b})"

    def _entry(self, op: ExprOp, a: int, b: int = 0) -> int:
        e = Expr(op, a, b)
        if e not in self._index:
            self._index[e] = len(self.entries)
            self.entries.append(e)
        return self._index[e]

    def _fold(self, op: ExprOp, args: list[int]) -> int:
        acc = args[0]
        for arg in args[1:]:
            acc = self._entry(op, acc, arg)
        return acc

    def _convert(self, e: sympy.Expr) -> int:
        if e.is_Integer:
            return self._entry(ExprOp.CONST, int(e))
        if e.is_Symbol:
            if e == RUN:
                return self._entry(ExprOp.RUN, 0)
            if e.name in self.data:
                return self._entry(ExprOp.DATA, self.data.index(e.name))
            return self._entry(ExprOp.SYMBOL, self.symbol(e.name))
        if e.func in (sympy.floor, sympy.ceiling):
            numerator, denominator = sympy.fraction(sympy.together(e.args[0]))
            if e.func is sympy.ceiling:
                numerator = sympy.expand(numerator + denominator - 1)
            return self._entry(ExprOp.FLOORDIV, self._convert(numerator), self._convert(denominator))
        numerator, denominator = sympy.fraction(sympy.together(e))
        if denominator != 1:
            # Whole: sizes that do not divide are refused before.
            return self._entry(ExprOp.FLOORDIV, self._convert(sympy.expand(numerator)), self._convert(denominator))
        if e.is_Pow and e.exp.is_Integer and e.exp > 0:
            return self._fold(ExprOp.MUL, [self._convert(e.base)] * int(e.exp))
        op = _SYMPY.get(e.func)
        if op is None:
            raise ShapeError(
                f"size expression {e} cannot be evaluated on the device: only +, *, //, %, min, max of integers can; "
                "bind its sizes to numbers with --shape"
            )
        return self._fold(op, [self._convert(a) for a in e.args])


_LEAVES: dict[ExprOp, Callable[[ExprTable, int], str]] = {
    ExprOp.CONST: lambda table, a: str(a),
    ExprOp.SYMBOL: lambda table, a: table.symbols[a],
    ExprOp.DATA: lambda table, a: table.data[a],
    ExprOp.RUN: lambda table, a: "run",
}
_INFIX = {ExprOp.ADD: "+", ExprOp.MUL: "*", ExprOp.FLOORDIV: "//", ExprOp.MOD: "%"}
_SYMPY = {
    sympy.Add: ExprOp.ADD,
    sympy.Mul: ExprOp.MUL,
    sympy.Mod: ExprOp.MOD,
    sympy.Max: ExprOp.MAX,
    sympy.Min: ExprOp.MIN,
}
_EVALUATE: dict[ExprOp, Callable[[int, int], int]] = {
    ExprOp.ADD: lambda a, b: a + b,
    ExprOp.MUL: lambda a, b: a * b,
    ExprOp.FLOORDIV: lambda a, b: a // b,
    ExprOp.MOD: lambda a, b: a % b,
    ExprOp.MAX: max,
    ExprOp.MIN: min,
}


@dataclass(frozen=True)
class TensorInfo:
    """An input or output: its dimensions are entries of the size table."""

    name: str
    dtype: str  # a numpy dtype name
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Buffer:
    """A buffer. ``index``: of the input or output, or the byte offset among the (repacked) constants. ``size``: bytes, a table entry.

    ``first`` and ``last`` are the steps between which an ARENA buffer is live, both included.
    """

    kind: BufferKind
    size: int
    index: int = 0
    first: int = 0
    last: int = 0


@dataclass(frozen=True)
class PlanStep:
    """One kernel call. ``kernel`` and ``finish`` index ``kernels``, ``buffers`` indexes ``buffers``.

    ``ints``, ``items``, ``scratch`` (bytes), ``flops`` and ``bytes`` are entries of the size table; ``grain`` is a number.
    """

    name: str
    kernel: int
    finish: int  # -1: none
    buffers: tuple[int, ...]
    ints: tuple[int, ...]
    items: int
    grain: int
    scratch: int
    flops: int
    bytes: int
    source: str  # the ONNX nodes it came from


@dataclass(frozen=True)
class Constraint:
    """What a run's sizes must satisfy: ``left relation right``, both entries of the size table.

    ``text`` tells a user why, naming tensor and node, as in ``axis 0 of 'positions' (node 'embed')``.
    """

    relation: Relation
    left: int
    right: int
    text: str


@dataclass(frozen=True)
class Read:
    """A size that data decides: ``element`` of ``buffer``, read when the steps before ``step`` are done.

    ``name`` is its symbol's; number *i* is the size table's ``DATA`` of *i*. ``dtype``: int32 or int64.
    """

    name: str
    step: int
    buffer: int
    dtype: str = "int64"
    element: int = 0


@dataclass(frozen=True)
class Move:
    """``rows`` times ``row_bytes`` bytes, copied from the constants section to the repacked constants when a bundle is opened.

    ``source`` and ``target`` are byte offsets of the first row, ``source_stride`` and ``target_stride`` the bytes from row to row.
    """

    source: int
    target: int
    row_bytes: int
    rows: int
    source_stride: int
    target_stride: int


@dataclass
class ExecutionPlan:
    """Everything the runtime needs besides constants and kernels."""

    exprs: ExprTable = field(default_factory=ExprTable)
    inputs: list[TensorInfo] = field(default_factory=list)
    outputs: list[TensorInfo] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    steps: list[PlanStep] = field(default_factory=list)
    constraints: list[Constraint] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)


@dataclass(frozen=True)
class Level:
    """What of a bundle is for one target: its name, the CPU features that its kernels need (``avx2``), its plan, its shared object."""

    target: str
    features: tuple[str, ...]
    plan: ExecutionPlan
    library: bytes


@dataclass
class Bundle:
    """A bundle in memory. ``levels``: best last; the runtime takes the last one that runs on its CPU. ``constants``: the section."""

    levels: tuple[Level, ...]
    constants: npt.NDArray[np.uint8]
    metadata: dict[str, str]

    @property
    def best(self) -> Level:
        """The last level. Its plan has the same inputs and outputs as those of the others."""
        return self.levels[-1]
