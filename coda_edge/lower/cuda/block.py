"""Pointwise kernels and rows with statistics on a GPU: an item a block, whose threads share its columns.

``Emitter`` writes an item in order; where it goes over columns in vectors (``span``), here each thread takes every so manieth column. What is
outside of that is the same for all threads, and all do it. A sum over a row is one of all threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import tvm
from tvm import tirx

from ...symbolic import Dim, simplify
from ..emit import SUM, Accumulator, Emitter, Expr, Reduction, as_int, int64, register, sequence
from ..kernel import KernelCall, Workspace
from .device import INSTRUCTIONS, CudaKernel, Launch, device_kernel
from .threads import leaving, offset

THREADS = 128
"""Threads of a block."""


class BlockEmitter(Emitter):
    """Writes a kernel of which a block does an item. Vectors have one lane."""

    def __init__(self, lanes: int = 1, granule: int | None = None) -> None:
        super().__init__(1, None)
        self._block = tirx.Var("blockIdx_x", "int32")
        self._thread = tirx.Var("threadIdx_x", "int32")
        self._item = self._bound("item", self._block.astype("int64"))
        self._own = self._bound("own", self._thread.astype("int64"))
        self._spread: int | None = None

    def _bound(self, name: str, value: Expr) -> Expr:
        variable = self._variable(name)
        self._scopes[0].statements.append(tirx.Bind(variable, value))
        self._know(variable, None)
        return variable

    def local(self, extent: int, dtype: str) -> tirx.Buffer:
        """A thread's own small buffer."""
        self._count += 1
        buffer = tirx.decl_buffer((extent,), register(dtype), name=f"local{self._count}", scope="local")
        self._scopes[0].statements.insert(0, tirx.AllocBuffer(buffer))
        self._mutable.add(buffer)
        return buffer

    @contextmanager
    def items(self) -> Iterator[Expr]:
        """The block's item."""
        yield self._item

    @property
    def _alone(self) -> bool:
        """Whether what is written now is within a thread's own columns."""
        return self._spread is not None and len(self._scopes) > self._spread

    def span(self, count: Expr, body: Callable[[Expr, Expr, int], None]) -> None:
        """Covers ``[0, count)``, each thread some of it; within that, each thread all of it."""
        if self._alone:
            with self.loop(count) as i:
                body(i, int64(0), 1)
            return
        total = as_int(count)
        turns = (
            self.bind(tirx.truncdiv(count + int64(THREADS - 1), int64(THREADS)))
            if total is None
            else int64(-(-total // THREADS))
        )
        before, self._spread = self._spread, len(self._scopes)
        with self.loop(turns) as turn:
            position = self._variable("position", "int64", len(self._scopes) - 1)
            self._know(position, total)
            self.add(tirx.Bind(position, turn * int64(THREADS) + self._own))
            with self.when(position < count):
                body(position, int64(0), 1)
        self._spread = before

    @contextmanager
    def reduction(self, kind: Reduction, dtype: str) -> Iterator[Accumulator]:
        """A sum over what all threads add."""
        if kind is not SUM or dtype != "float32":
            raise NotImplementedError("threads of a block sum float32 only")
        alone = self._alone
        parts = self.local(1, dtype)
        self.store(parts, int64(0), kind.identity(dtype))
        accumulator = Accumulator(self, parts, kind)
        yield accumulator
        value = tirx.BufferLoad(parts, [int64(0)])
        if not alone:
            value = tvm.script.tirx.cuda.func_call(
                "coda_block_sum", value, source_code=INSTRUCTIONS["coda_block_sum"], return_type="float32"
            )
        accumulator.result = self._kept(value, len(self._scopes) - 1)

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
        """The finished kernel and its call."""
        operands = list(self._operands)
        body = sequence(self._scopes[0])
        if self._scratch is not None:
            operands.append(Workspace("rows", simplify(scratch * items)))
            body = offset(body, self._scratch, self._item * self.size(simplify(scratch / 4)))
        params = [
            *self._buffers.values(),
            *([self._scratch] if self._scratch is not None else []),
            *self._sizes.values(),
        ]
        if self._status is not None:
            params.append(self._status)
            body = leaving(body)
        script = tirx.PrimFunc([self._block, self._thread, *params], body).script()
        symbol = f"{stem}_{hashlib.sha256(script.encode()).hexdigest()[:12]}"
        return KernelCall(
            name=stem,
            kernel=CudaKernel(
                symbol,
                lambda: device_kernel(
                    symbol, params, body, {"blockIdx.x": self._block, "threadIdx.x": self._thread}, THREADS
                ),
                Launch((simplify(items), 1, 1), THREADS),
            ),
            buffers=tuple(operands),
            ints=tuple(self._sizes),
            items=simplify(items),
            outputs=tuple(outputs),
            flops=simplify(flops),
            bytes=simplify(traffic),
            source=tuple(source),
        )
