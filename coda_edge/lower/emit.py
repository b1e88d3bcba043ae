"""One kernel under construction: a stack of loop scopes into which statements are written.

Every value that is bound goes to the outermost scope in which its variables exist, once: loop-invariant code moves out and
common subexpressions are shared by construction, whatever order the operators ask in. The kernel signature is that of
``docs/architecture.md``: buffers, then the thread's scratch if the kernel uses it, sizes, begin, end.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import tvm
from tvm import tirx
from tvm.tirx import Buffer, PrimFunc, Stmt, Var
from tvm_ffi import StructuralMutator, structural_mutate

from ..symbolic import Dim, simplify
from . import intrinsics
from .abi import STATUS
from .kernel import KernelCall, KernelSource, Packed, Workspace

Expr: TypeAlias = "tvm.ir.Expr"
INDEX_ERROR = 1  # what a kernel returns when an index that it read is out of range
_UNBOUNDED = 1 << 40  # declared extent of a flat buffer, and of any size that is not known


class ScalarLanes(Exception):
    """The kernel cannot run several elements of the last axis at once: build it with one lane."""


class Granule(Exception):
    """The last axis falls into runs of ``size`` elements that must not share a vector: build it in such runs."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


@dataclass
class _Scope:
    statements: list[Stmt] = field(default_factory=list)
    memo: dict[str, Expr] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)
    conditional: bool = False


def int64(value: int) -> Expr:
    """An index constant."""
    return tirx.const(value, "int64")


def dtype_of(expr: Expr) -> str:
    """The dtype of an expression."""
    return str(expr.ty)


def as_int(expr: Expr) -> int | None:
    """The value of a constant index expression, else None."""
    return int(expr.value) if isinstance(expr, tirx.IntImm) else None


@dataclass(frozen=True)
class Half:
    """A half-precision dtype: how its stored elements become float32, and the other way round."""

    widen: Callable[[Expr], Expr]
    narrow: Callable[[Expr], Expr]


def _typed(dtype: str, like: Expr) -> str:
    count = int(like.ty.dtype.lanes)
    return dtype if count == 1 else f"{dtype}x{count}"


HALF = {
    "float16": Half(lambda x: x.astype(_typed("float32", x)), lambda x: x.astype(_typed("float16", x))),
    "bfloat16": Half(intrinsics.widen_bfloat16, intrinsics.narrow_bfloat16),
}
STORAGE = {"bool": "uint8", "bfloat16": "uint16"}
"""The element type of a buffer, where it is not the tensor's."""


def register(dtype: str) -> str:
    """The dtype that elements of ``dtype`` are computed in."""
    return "float32" if dtype in HALF else dtype


@dataclass(frozen=True)
class Reduction:
    """An associative operation on scalars, and its neutral element as a function of the dtype."""

    combine: Callable[[Expr, Expr], Expr]
    identity: Callable[[str], Expr]


SUM = Reduction(lambda a, b: a + b, lambda dtype: tirx.const(0, dtype))


@dataclass
class Accumulator:
    """Partial results of a reduction, one for each lane; ``result`` is the whole, once the reduction is over."""

    emit: Emitter
    parts: Buffer
    kind: Reduction
    result: Expr = None

    def add(self, value: Expr, lane: Expr) -> None:
        """Takes ``value`` into the partial result of ``lane``."""
        self.emit.store(self.parts, lane, self.kind.combine(tirx.BufferLoad(self.parts, [lane]), value))


class Emitter:
    """Writes one kernel. ``lanes`` is the vector width in elements, ``granule`` the length of a run of the last axis."""

    def __init__(self, lanes: int = 1, granule: int | None = None) -> None:
        self.lanes = lanes
        self.granule = granule
        self._scopes = [_Scope()]
        self._depth: dict[Var, int] = {}
        self._mutable: set[Buffer] = set()
        self._kept_in: set[Buffer] = set()
        self._lane: Var | None = None
        self._lane_depth = -1
        self._width = 1
        self._buffers: dict[str, Buffer] = {}
        self._stored_as: dict[Buffer, str] = {}
        self._operands: list[str | Packed | Workspace] = []
        self._sizes: dict[Dim, Var] = {}
        self._scratch: Buffer | None = None
        self._status: Buffer | None = None
        self._analyzer = tvm.sym.Analyzer()
        self._count = 0
        self.begin = self._variable("begin")
        self.end = self._variable("end")

    def size(self, dim: Dim) -> Expr:
        """``dim`` as an int64 expression: a constant, or a parameter of the kernel."""
        dim = simplify(dim)
        if isinstance(dim, int):
            return int64(dim)
        if dim not in self._sizes:
            self._sizes[dim] = self._variable(f"n{len(self._sizes)}")
        return self._sizes[dim]

    def buffer(self, operand: str | Packed | Workspace, dtype: str) -> Buffer:
        """The flat buffer of a graph tensor, constant or workspace, for ``load`` and ``store``."""
        key = operand if isinstance(operand, str) else f"{type(operand).__name__} {operand.name}"
        if key not in self._buffers:
            stored = STORAGE.get(dtype, dtype)
            self._buffers[key] = tirx.decl_buffer((_UNBOUNDED,), stored, name=f"buf{len(self._buffers)}")
            self._stored_as[self._buffers[key]] = dtype
            self._operands.append(operand)
        return self._buffers[key]

    def scratch(self, dtype: str) -> Buffer:
        """The calling thread's scratch, as a flat buffer."""
        if self._scratch is None:
            self._scratch = tirx.decl_buffer((_UNBOUNDED,), dtype, name="scratch")
        return self._scratch

    def local(self, extent: int, dtype: str) -> Buffer:
        """A small buffer on the stack, which the code generator keeps in registers."""
        self._count += 1
        buffer = tirx.decl_buffer((extent,), register(dtype), name=f"local{self._count}")
        self._scopes[0].statements.insert(0, tirx.AllocBuffer(buffer))
        self._mutable.add(buffer)
        return buffer

    def load(self, operand: str | Packed | Workspace, dtype: str, index: Expr) -> Expr:
        """The element at flat ``index``, as it is computed with: a half-precision number in float32."""
        loaded = tirx.BufferLoad(self.buffer(operand, dtype), [index])
        if dtype in HALF:
            return self.bind(HALF[dtype].widen(loaded))
        value = self.bind(loaded)
        return tirx.NE(value, tirx.const(0, "uint8")) if dtype == "bool" else value

    def store(self, buffer: Buffer, index: Expr, value: Expr) -> None:
        """Writes ``value`` at flat ``index``."""
        dtype = self._stored_as.get(buffer)
        if dtype_of(value) == "bool":
            value = tirx.Cast("uint8", value)
        elif dtype in HALF:
            value = self._without_lets(HALF[dtype].narrow(value))
        self.add(tirx.BufferStore(buffer, value, [index]))

    def add(self, statement: Stmt) -> None:
        """Appends a statement to the innermost scope."""
        self._scopes[-1].statements.append(statement)

    def bind(self, expr: Expr) -> Expr:
        """An expression that reads ``expr``, computed once, in the outermost scope possible.

        It is a variable for indices and a stack buffer for the rest: TVM's analysis writes the value of a variable out at each
        use, as if floats were exact, and has no variables that are vectors of bools.
        """
        if isinstance(expr, (Var, tirx.IntImm, tirx.FloatImm)) or self._is_local(expr):
            return expr
        expr = self._without_lets(expr)
        used = tirx.analysis.undefined_vars(expr)
        if any(v in self._mutable for v in used):
            return self._kept(expr, len(self._scopes) - 1)
        key = str(expr)
        for scope in self._scopes:
            if key in scope.memo:
                return scope.memo[key]
        depth = self._home(expr)
        scope = self._scopes[depth]
        if dtype_of(expr) == "int64" and not self.varies(expr):
            value: Expr = self._variable("v", "int64", depth)
            scope.statements.append(tirx.Bind(value, expr))
        else:
            value = self._kept(expr, depth)
        scope.memo[key] = value
        return value

    def once(self, key: str, compute: Callable[[], Expr]) -> Expr:
        """``bind(compute())``, computed at most once for each ``key`` wherever its result can still be read."""
        for scope in self._scopes:
            if key in scope.memo:
                return scope.memo[key]
        value = self.bind(compute())
        self._scopes[self._variables_depth(value)].memo[key] = value
        return value

    def require(self, condition: Expr) -> None:
        """Leaves the kernel with an error unless ``condition`` holds, before anything that is written later.

        Raises ``ScalarLanes`` if the condition differs within a vector.
        """
        condition = self._analyzer.simplify(condition)
        if as_int(condition) == 1:
            return
        key = str(condition)
        if any(key in scope.required for scope in self._scopes):
            return
        self.uniform(condition)
        scope = self._scopes[self._home(condition)]
        scope.required.add(key)
        if self._status is None:
            self._status = tirx.decl_buffer((1,), "int32", name=STATUS)
        report = tirx.BufferStore(self._status, tirx.const(INDEX_ERROR, "int32"), [int64(0)])
        leave = tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_throw_last_error"))
        scope.statements.append(tirx.IfThenElse(tirx.Not(condition), tirx.SeqStmt([report, leave]), None))

    def uniform(self, expr: Expr) -> Expr:
        """``expr``, which must be the same for all lanes: raises ``ScalarLanes`` otherwise."""
        if self.varies(expr) and self._width > 1:
            raise ScalarLanes
        return expr

    def varies(self, expr: Expr) -> bool:
        """Whether ``expr`` differs between the lanes of a vector."""
        return self._lane is not None and self._variables_depth(expr) >= self._lane_depth

    def divmod(self, index: Expr, divisor: Expr) -> tuple[Expr, Expr]:
        """Quotient and remainder of a non-negative index.

        Raises ``Granule`` or ``ScalarLanes`` when they would have to be computed for each lane.
        """
        if as_int(divisor) == 0:
            # A tensor with an axis of 0 has no element: this is compiled, never computed.
            return index, index * 0
        quotient = self._analyzer.simplify(tirx.floordiv(index, divisor))
        remainder = self._analyzer.simplify(tirx.floormod(index, divisor))
        if self.varies(quotient) and self._width > 1:
            start = self._start_of_run(index, as_int(divisor) or 0)
            if start is not None:
                quotient = self.bind(tirx.truncdiv(start, divisor))
                self._know(quotient, None)
                return quotient, self._analyzer.simplify(index - quotient * divisor)
            run = math.gcd(as_int(divisor) or 1, self.granule or 0)
            if run > 1 and run != self.granule:
                raise Granule(run)
            raise ScalarLanes
        if _divides(quotient):
            uniform = self.varies(index) and not self.varies(quotient)
            quotient = self.bind(quotient if uniform else tirx.truncdiv(index, divisor))
            remainder = self.bind(index - quotient * divisor)
            self._know(quotient, None)
            self._know(remainder, as_int(divisor))
        return quotient, remainder

    def _start_of_run(self, index: Expr, divisor: int) -> Expr | None:
        """The first lane's ``index`` if those of the others follow it and all are within one multiple of ``divisor``, else None."""

        def first(var: Var, mutator: StructuralMutator) -> Expr:
            return int64(0) if var.same_as(self._lane) else var

        start = structural_mutate(index, [(Var, first)])
        if self.varies(start) or as_int(self._analyzer.simplify(index - start - self._lane)) != 0:
            return None
        known = self._analyzer.modular_set(start)
        # Indices begin at multiples of this number.
        step = math.gcd(int(known.coeff), int(known.base)) or divisor
        return start if divisor and step >= self._width and divisor % step == 0 else None

    def unravel(self, linear: Expr, dims: Sequence[Dim]) -> list[Expr]:
        """The indices of the element that is ``linear``-th in row-major order."""
        indices: list[Expr] = []
        for dim in reversed(list(dims)[1:]):
            if dim == 1:
                indices.append(int64(0))
                continue
            linear, index = self.divmod(linear, self.size(dim))
            indices.append(index)
        if len(dims):
            indices.append(linear if dims[0] != 1 else int64(0))
        return indices[::-1]

    def ravel(self, indices: Sequence[Expr], dims: Sequence[Dim]) -> Expr:
        """The row-major position of an element."""
        linear = int64(0)
        for index, dim in zip(indices, dims, strict=True):
            linear = linear * self.size(dim) + index
        return self._analyzer.simplify(linear)

    @contextmanager
    def loop(self, extent: Expr, start: Expr | None = None) -> Iterator[Expr]:
        """A serial loop over ``[start, start + extent)``."""
        var = self._variable("i", "int64", len(self._scopes))
        if start is None:
            self._know(var, as_int(extent))
        with self._scope() as scope:
            yield var
        self.add(tirx.For(var, int64(0) if start is None else start, extent, tirx.ForKind.SERIAL, sequence(scope)))

    @contextmanager
    def items(self) -> Iterator[Expr]:
        """The loop over the items of this call."""
        with self.loop(self.end - self.begin, self.begin) as item:
            self._know(item, None)
            yield item

    @contextmanager
    def vector(self, width: int) -> Iterator[Expr]:
        """``width`` lanes at once; yields the lane number. One lane is no loop."""
        if width == 1:
            yield int64(0)
            return
        var = self._variable("lane", "int64", len(self._scopes))
        self._know(var, width)
        self._lane, self._lane_depth, self._width = var, len(self._scopes), width
        try:
            with self._scope() as scope:
                yield var
        finally:
            self._lane, self._lane_depth, self._width = None, -1, 1
        self.add(tirx.For(var, int64(0), int64(width), tirx.ForKind.VECTORIZED, sequence(scope)))

    @contextmanager
    def outside(self, indices: Sequence[Expr]) -> Iterator[None]:
        """Statements that go before all loops and branches that ``indices`` do not depend on, where no lane is.

        Raises ``ScalarLanes`` if one of them differs within a vector.
        """
        for index in indices:
            self.uniform(index)
        depth = max((self._variables_depth(index) for index in indices), default=0)
        inner, lanes = self._scopes[depth + 1 :], (self._lane, self._lane_depth, self._width)
        del self._scopes[depth + 1 :]
        self._lane, self._lane_depth, self._width = None, -1, 1
        try:
            yield
        finally:
            self._scopes += inner
            self._lane, self._lane_depth, self._width = lanes

    def span(self, count: Expr, body: Callable[[Expr, Expr, int], None]) -> None:
        """Covers ``[0, count)`` by vectors and a remainder; ``body(position, lane, width)`` is called for each form."""
        total, lanes = as_int(count), self.lanes
        whole = int64(total // lanes) if total is not None else self.bind(tirx.truncdiv(count, int64(lanes)))
        if total is None or total >= lanes:
            with self.loop(whole) as chunk, self.vector(lanes) as lane:
                body(chunk * int64(lanes) + lane, lane, lanes)
        if lanes == 1:
            return
        if total is None:
            done = self.bind(whole * int64(lanes))
            with self.loop(self.bind(count - done)) as rest:
                body(done + rest, int64(0), 1)
        elif total % lanes:
            with self.vector(total % lanes) as lane:
                body(int64(total // lanes * lanes) + lane, lane, total % lanes)

    @contextmanager
    def reduction(self, kind: Reduction, dtype: str) -> Iterator[Accumulator]:
        """An accumulator over the statements written inside; its ``result`` is there afterwards."""
        parts = self.local(max(self.lanes, 1), dtype)
        with self.loop(int64(self.lanes)) as lane:
            self.store(parts, lane, kind.identity(dtype))
        accumulator = Accumulator(self, parts, kind)
        yield accumulator
        values = [tirx.BufferLoad(parts, [int64(i)]) for i in range(self.lanes)]
        while len(values) > 1:
            values = [kind.combine(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
        accumulator.result = self._kept(values[0], len(self._scopes) - 1)

    def branch(self, condition: Expr, then: Callable[[], Expr], other: Callable[[], Expr], dtype: str) -> Expr:
        """``then()`` or ``other()``, each evaluated only when it is wanted.

        Raises ``ScalarLanes`` if the condition differs within a vector.
        """
        condition = self._analyzer.simplify(condition)
        known = as_int(condition)
        if known is not None:
            return then() if known else other()
        self.uniform(condition)
        stored = "uint8" if dtype == "bool" else dtype
        result = self.local(self._width, stored)
        slot = self._lane if self._lane is not None else int64(0)
        scopes: list[_Scope] = []
        for side in (then, other):
            with self._scope(conditional=True) as scope:
                self.store(result, slot, side())
            scopes.append(scope)
        self.add(tirx.IfThenElse(condition, sequence(scopes[0]), sequence(scopes[1])))
        self._mutable.discard(result)
        self._kept_in.add(result)
        self._depth[result] = len(self._scopes) - 1
        value = tirx.BufferLoad(result, [slot])
        return tirx.NE(value, tirx.const(0, "uint8")) if dtype == "bool" else value

    @contextmanager
    def when(self, condition: Expr) -> Iterator[None]:
        """Statements that run only if ``condition`` holds."""
        with self._scope(conditional=True) as scope:
            yield
        self.add(tirx.IfThenElse(condition, sequence(scope), None))

    def call(
        self,
        stem: str,
        items: Dim,
        outputs: Sequence[str],
        *,
        grain: int = 1,
        scratch: Dim = 0,
        flops: Dim = 0,
        traffic: Dim = 0,
        source: Sequence[str] = (),
    ) -> KernelCall:
        """The finished kernel and its call. ``stem`` says what it is; ``source`` which nodes it came from."""
        params = [*self._buffers.values()]
        params.extend(b for b in (self._scratch, self._status) if b is not None)
        func = PrimFunc([*params, *self._sizes.values(), self.begin, self.end], sequence(self._scopes[0]))
        func = func.with_attrs({"tirx.noalias": True, "s_tir": True})
        symbol = f"{stem}_{hashlib.sha256(func.script().encode()).hexdigest()[:12]}"
        return KernelCall(
            name=stem,
            kernel=KernelSource(symbol, lambda: func.with_attr("global_symbol", symbol)),
            buffers=tuple(self._operands),
            ints=tuple(self._sizes),
            items=simplify(items),
            grain=grain,
            scratch=simplify(scratch),
            outputs=tuple(outputs),
            flops=simplify(flops),
            bytes=simplify(traffic),
            source=tuple(source),
        )

    def _without_lets(self, expr: Expr) -> Expr:
        """``expr`` with what its Let expressions bind bound as statements: vectors of them are not handled by TVM."""
        bound: dict[Var, Expr] = {}
        done: dict[tirx.Let, Expr] = {}

        def let(node: tirx.Let, mutator: StructuralMutator) -> Expr:
            if node not in done:
                bound[node.var] = self.bind(mutator.mutate(node.value))
                done[node] = self.bind(mutator.mutate(node.body))
            return done[node]

        def variable(var: Var, mutator: StructuralMutator) -> Expr:
            return bound.get(var, var)

        return structural_mutate(expr, [(tirx.Let, let), (Var, variable)])

    def _kept(self, expr: Expr, depth: int) -> Expr:
        """``expr`` stored on the stack in scope ``depth``; returns what reads it."""
        kind = dtype_of(expr)
        varies = self.varies(expr)
        buffer = self.local(self._width if varies else 1, "uint8" if kind == "bool" else kind)
        self._mutable.discard(buffer)
        self._kept_in.add(buffer)
        self._depth[buffer] = depth
        slot = self._lane if varies and self._lane is not None else int64(0)
        stored = tirx.Cast("uint8", expr) if kind == "bool" else expr
        self._scopes[depth].statements.append(tirx.BufferStore(buffer, stored, [slot]))
        value = tirx.BufferLoad(buffer, [slot])
        return tirx.NE(value, tirx.const(0, "uint8")) if kind == "bool" else value

    def _is_local(self, expr: Expr) -> bool:
        return isinstance(expr, tvm.ir.TensorLoad) and expr.source in self._kept_in

    @contextmanager
    def _scope(self, conditional: bool = False) -> Iterator[_Scope]:
        scope = _Scope(conditional=conditional)
        self._scopes.append(scope)
        try:
            yield scope
        finally:
            self._scopes.pop()

    def _variable(self, stem: str, dtype: str = "int64", depth: int = 0) -> Var:
        self._count += 1
        var = Var(f"{stem}_{self._count}", dtype)
        self._depth[var] = depth
        return var

    def _know(self, var: Expr, bound: int | None) -> None:
        if isinstance(var, Var):
            self._analyzer.bind(var, tvm.ir.Range(int64(0), int64(_UNBOUNDED if bound is None else bound)), True)

    def _variables_depth(self, expr: Expr) -> int:
        return max((self._depth.get(v, 0) for v in tirx.analysis.undefined_vars(expr)), default=0)

    def _home(self, expr: Expr) -> int:
        guard = max((i for i, s in enumerate(self._scopes) if s.conditional), default=0)
        return max(guard, self._variables_depth(expr))


def sequence(scope: _Scope) -> Stmt:
    """The statements of a scope as one."""
    statements = scope.statements or [tirx.Evaluate(int64(0))]
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(statements)


def _divides(expr: Expr) -> bool:
    text = str(expr)
    return "//" in text or "%" in text or "floordiv" in text or "floormod" in text
