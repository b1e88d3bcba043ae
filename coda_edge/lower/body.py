"""Writing TIR by hand: statements in order, explicit vectors, values bound once.

``Body`` is what the kernel templates write with. A vector is a TIR expression of dtype ``float32x8`` and the like; it is
loaded and stored with ``load``/``Body.store`` at a scalar index. Indices are int64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import tvm
from tvm import tirx

Expr: TypeAlias = Any
"""A TIR expression (TVM's Python classes are untyped)."""
Buffer: TypeAlias = Any
Index: TypeAlias = "Any | int"

_LOAD = type(tirx.BufferLoad(tirx.decl_buffer((1,)), [0]))
UNBOUNDED = 1 << 40
"""Extent given to buffers whose size is known only at run time."""


def index(value: Index) -> Expr:
    """An int64 index."""
    return tirx.const(value, "int64") if isinstance(value, int) else value


def f32(value: float) -> Expr:
    """A float32 literal."""
    return tirx.const(float(value), "float32")


def lanes(value: Expr) -> int:
    """How many lanes ``value`` has; a scalar has one."""
    return int(value.ty.dtype.lanes)


def widen(value: Expr, count: int) -> Expr:
    """``value`` in ``count`` lanes: a scalar is repeated."""
    return value if count == 1 or lanes(value) == count else tirx.Broadcast(value, count)


def ramp(base: Index, count: int, stride: Index = 1) -> Expr:
    """The index of ``count`` elements, ``stride`` apart, from ``base``."""
    return index(base) if count == 1 else tirx.Ramp(index(base), index(stride), count)


def load(buffer: Buffer, at: Index, count: int = 1) -> Expr:
    """``count`` consecutive elements of a flat buffer, from element ``at``."""
    return tirx.BufferLoad(buffer, [ramp(at, count)])


def shuffle(vectors: Sequence[Expr], order: Sequence[int]) -> Expr:
    """The vector (or scalar) of the elements numbered ``order`` in the concatenation of ``vectors``."""
    if list(order) == list(range(lanes(vectors[0]))):
        return vectors[0]
    return tirx.Shuffle(list(vectors), list(order))


def external(name: str, dtype: str = "float32") -> Buffer:
    """A buffer parameter: flat, of unknown size."""
    return tirx.decl_buffer((index(UNBOUNDED),), dtype, name=name)


class Body:
    """A list of statements that grows, with nested blocks as context managers."""

    def __init__(self) -> None:
        self._blocks: list[list[Any]] = [[]]

    def emit(self, statement: Any) -> None:
        """Appends a statement."""
        self._blocks[-1].append(statement)

    def let(self, value: Index, name: str = "x") -> Expr:
        """A variable bound to ``value``, which is then computed once; literals and variables stay as they are."""
        value = index(value) if isinstance(value, int) else value
        if isinstance(value, (tirx.Var, tirx.IntImm, tirx.FloatImm)):
            return value
        if value.ty.dtype.is_bool and lanes(value) > 1:
            return value  # TVM's simplifier fails on a variable of this type; comparisons are cheap to repeat
        if not isinstance(value, _LOAD):
            # TVM's simplifier replaces a variable by its pure definition, which makes trees of shared values explode;
            # it does not look through memory, and LLVM makes a register of it.
            local = self.alloc(lanes(value), value.ty.dtype.with_lanes(1), name)
            self.store(local, 0, value)
            value = load(local, 0, lanes(value))
        variable = tirx.Var(name, value.ty)
        self.emit(tirx.stmt.Bind(variable, value))
        return variable

    def store(self, buffer: Buffer, at: Index, value: Expr) -> None:
        """Stores a scalar or vector to a flat buffer from element ``at`` on."""
        self.emit(tirx.BufferStore(buffer, value, [ramp(at, lanes(value))]))

    def alloc(self, count: int, dtype: str = "float32", name: str = "local") -> Buffer:
        """A flat buffer on the stack; at most 1 KiB. A vector's worth, used at constant indices, is a register."""
        buffer = tirx.decl_buffer((count,), dtype, name=name)
        self.emit(tirx.AllocBuffer(buffer))
        return buffer

    def view(self, buffer: Buffer, dtype: str) -> Buffer:
        """The memory of a buffer parameter as elements of ``dtype``."""
        pointer = tvm.ir.PointerType(tvm.ir.PrimType(dtype))
        data = tirx.Var(f"{buffer.name}_{dtype}", pointer)
        address = tirx.address_of(tirx.BufferLoad(buffer, [index(0)]))
        self.emit(tirx.stmt.Bind(data, tirx.call_intrin(pointer, "tirx.reinterpret", address)))
        seen = external(f"{buffer.name}_{dtype}", dtype)
        self.emit(tirx.DeclBuffer(seen, data=data))
        return seen

    def prefetch(self, buffer: Buffer, at: Index, cache: int = 2) -> None:
        """Asks for the cache line of element ``at`` to be brought to the first-level or the second-level ``cache``."""
        address = tirx.address_of(tirx.BufferLoad(buffer, [index(at)]))
        read, near, data = (tirx.const(v, "int32") for v in (0, 4 - cache, 1))
        self.emit(tirx.Evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", address, read, near, data)))

    @contextmanager
    def loop(self, start: Index, stop: Index, name: str = "i") -> Iterator[Expr]:
        """A loop over ``start ≤ i < stop``."""
        variable = tirx.Var(name, "int64")
        self._blocks.append([])
        yield variable
        block = self._close()
        if block is not None:
            self.emit(tirx.For(variable, index(start), index(stop) - index(start), tirx.ForKind.SERIAL, block))

    @contextmanager
    def when(self, condition: Expr) -> Iterator[None]:
        """A block that is run if ``condition`` holds; a Python bool decides now."""
        self._blocks.append([])
        yield
        block = self._close()
        if block is not None and condition is not False:
            self.emit(block if condition is True else tirx.IfThenElse(condition, block, None))

    def function(self, symbol: str, params: Sequence[Expr]) -> tirx.PrimFunc:
        """The kernel of all that was written, with ``params`` (see ``abi``)."""
        func = tirx.PrimFunc(list(params), self._close(), tvm.ir.PrimType("int32"))
        return func.with_attrs({"global_symbol": symbol, "tirx.noalias": True})

    def _close(self) -> Any:
        block = self._blocks.pop()
        if not block:
            return None
        return block[0] if len(block) == 1 else tirx.SeqStmt(block)


def turned(body: Body, rows: Sequence[Expr]) -> list[Expr]:
    """A square of as many vectors as they have elements, a power of two: its columns."""
    half = len(rows) // 2
    low = [at for i in range(half) for at in (i, len(rows) + i)]
    for _ in range(len(rows).bit_length() - 1):
        pairs = zip(rows[:half], rows[half:], strict=True)
        rows = [body.let(shuffle(pair, [at + start for at in low]), "turned") for pair in pairs for start in (0, half)]
    return list(rows)
