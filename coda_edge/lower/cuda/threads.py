"""Any kernel of a CPU as one of a GPU: each thread does a range of items, in scalars. Slow, and right for every operator."""

from __future__ import annotations

from dataclasses import replace

import sympy
import tvm
from tvm import tirx
from tvm.script import tirx as script
from tvm.tirx.buffer import is_buffer_var
from tvm_ffi import StructuralMutator, structural_mutate

from ...symbolic import Dim, simplify
from ..abi import STATUS
from ..body import Expr
from ..kernel import KernelCall, KernelSource, Workspace
from .device import INSTRUCTIONS, CudaKernel, Launch, device_kernel

THREADS = 64
_MOST = 1 << 13
"""Threads that each have scratch of their own, at most."""


def by_threads(call: KernelCall) -> KernelCall:
    """``call``, written for CPUs, with kernels for GPUs. What the runtime gives a CPU's kernel as its thread's scratch is a workspace."""
    if isinstance(call.kernel, CudaKernel):
        return call
    items: Dim = call.items
    chunk: Dim = call.grain
    if call.scratch != 0:
        chunk = simplify(call.grain * sympy.ceiling(sympy.sympify(items) / (call.grain * _MOST)))
        chunk = simplify(sympy.Max(call.grain, chunk))
    threads = simplify(sympy.ceiling(sympy.sympify(items) / chunk))
    stride = simplify(64 * sympy.ceiling(sympy.sympify(call.scratch) / 64)) if call.scratch != 0 else 0
    workspaces = (Workspace(f"{call.name}.scratch", simplify(stride * threads)),) if call.scratch != 0 else ()
    grid = simplify(sympy.ceiling(sympy.sympify(threads) / THREADS))
    buffers, ints = len(call.buffers), len(call.ints)
    has = call.scratch != 0
    return replace(
        call,
        kernel=_kernel(call.kernel, buffers, ints, has, Launch((grid, 1, 1), THREADS)),
        finish=_kernel(call.finish, buffers, ints, has, Launch((1, 1, 1), 1)) if call.finish is not None else None,
        buffers=(*call.buffers, *workspaces),
        ints=(*call.ints, items, chunk, stride),
        scratch=0,
        grain=1,
    )


def _kernel(source: KernelSource, buffers: int, ints: int, scratch: bool, launch: Launch) -> CudaKernel:
    symbol = f"{source.symbol}_{'threads' if launch.block > 1 else 'alone'}"
    return CudaKernel(symbol, lambda: _written(source, symbol, buffers, ints, scratch, launch), launch)


def _written(
    source: KernelSource, symbol: str, buffers: int, ints: int, scratch: bool, launch: Launch
) -> tirx.PrimFunc:
    """The kernel: the CPU's, between a thread's first item and its last."""
    func = source.func
    given = [p for p in func.params if is_buffer_var(p) and str(p.name) != STATUS]
    status = [p for p in func.params if is_buffer_var(p) and str(p.name) == STATUS]
    sizes = [p for p in func.params if not is_buffer_var(p)]
    own = given[buffers:]
    begin, end = sizes[ints:]
    items, chunk, stride = (tirx.Var(name, "int64") for name in ("items", "chunk", "stride"))
    block, thread = tirx.Var("blockIdx_x", "int32"), tirx.Var("threadIdx_x", "int32")
    place = block.astype("int64") * launch.block + thread.astype("int64")
    body = _in_scalars(func.body)
    spare: list[Expr] = []
    if scratch:
        # A kernel may have scratch that it does not use: its place among the parameters is kept.
        spare = own or [tirx.decl_buffer((1,), "uint8", name="scratch")]
        if own:
            size = tvm.DataType(str(own[0].dtype)).itemsize
            body = offset(body, own[0], place * tirx.truncdiv(stride, tirx.const(size, "int64")))
    body = tirx.IfThenElse(begin < end, body, None)
    if launch.block == 1:
        bounds = [tirx.Bind(begin, tirx.const(0, "int64")), tirx.Bind(end, items)]
    else:
        bounds = [tirx.Bind(begin, place * chunk), tirx.Bind(end, tirx.min(begin + chunk, items))]
    body = tirx.SeqStmt([*bounds, body])
    params = [*given[:buffers], *spare, *sizes[:ints], items, chunk, stride, *status]
    if status:
        body = leaving(body)
    return device_kernel(symbol, params, body, {"blockIdx.x": block, "threadIdx.x": thread}, launch.block)


def leaving(body: Expr) -> Expr:
    """``body`` with the end of the thread in place of the way out of a CPU's kernel."""

    def statement(node: tirx.Evaluate, mutator: StructuralMutator) -> Expr:
        if isinstance(node.value, tvm.ir.Call) and str(node.value.op.name) == "tirx.tvm_throw_last_error":
            code = INSTRUCTIONS["coda_leave"]
            return tirx.Evaluate(script.cuda.func_call("coda_leave", source_code=code, return_type="void"))
        return node

    return structural_mutate(body, [(tirx.Evaluate, statement)])


def offset(body: Expr, buffer: Expr, by: Expr) -> Expr:
    """``body`` with the elements of ``buffer`` that many places further on."""

    def stored(node: tirx.BufferStore, mutator: StructuralMutator) -> Expr:
        if not node.buffer.same_as(buffer):
            return tirx.BufferStore(node.buffer, mutator.mutate(node.value), [mutator.mutate(i) for i in node.indices])
        return tirx.BufferStore(buffer, mutator.mutate(node.value), [mutator.mutate(i) + by for i in node.indices])

    def loaded(node: Expr, mutator: StructuralMutator) -> Expr:
        indices = [mutator.mutate(i) for i in node.indices]
        return tirx.BufferLoad(node.source, [i + by for i in indices] if node.source.same_as(buffer) else indices)

    return structural_mutate(body, [(tirx.BufferStore, stored), (_LOAD, loaded)])


_LOAD = type(tirx.BufferLoad(tirx.decl_buffer((1,)), [0]))


def _in_scalars(body: Expr) -> Expr:
    """``body`` with loops in place of vectors, registers in place of the stack, and without prefetches."""
    local: dict[Expr, Expr] = {}

    def allocated(node: tirx.AllocBuffer, mutator: StructuralMutator) -> Expr:
        old = node.buffer
        local[old] = tirx.decl_buffer(list(old.shape), str(old.dtype), name=str(old.name), scope="local")
        return tirx.AllocBuffer(local[old])

    body = structural_mutate(body, [(tirx.AllocBuffer, allocated)])
    body = structural_mutate(body, [(tirx.Var, lambda v, m: local.get(v, v)), (tirx.Evaluate, _kept)])
    module = tvm.IRModule({"f": tirx.PrimFunc([], body)})
    return tirx.transform.VectorizeLoop(False)(module)["f"].body


def _kept(node: tirx.Evaluate, mutator: StructuralMutator) -> Expr:
    if isinstance(node.value, tvm.ir.Call) and "call_llvm" in str(node.value.op.name):
        return tirx.Evaluate(tirx.const(0, "int32"))
    return tirx.Evaluate(mutator.mutate(node.value))
