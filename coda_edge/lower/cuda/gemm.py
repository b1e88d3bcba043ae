"""GEMM with an epilogue on tensor cores: ``program(A @ W, operands)``, halves in, float accumulators.

A ``[M, K]`` and the operands are plain row-major tensors, M known at run time. W is packed at compile time into tiles of
``[columns, 64]`` as shared memory holds them, padded with zeros, so its copies are contiguous and need no bounds. Within a
tile the columns are in the order that gives every thread consecutive columns of the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import sympy

from ...epilogue.program import EpilogueProgram
from ...epilogue.tir import depth
from ...errors import ShapeError
from ...schedule.cuda_gemm import CudaGemmSchedule, choose_cuda_gemm, pack_weight
from ...symbolic import Dim, simplify
from ..gemm import Operand, check_call
from ..kernel import KernelCall, Packed, Workspace
from .device import CudaKernel, Launch
from .gemm_tile import MERGE_THREADS, CudaGemmShape, GemmKernel

if TYPE_CHECKING:
    from ...targets.cuda import CudaTarget

_ROWS_HINT = 128


def lower_cuda_gemm(
    target: CudaTarget,
    name: str,
    program: EpilogueProgram,
    a: Operand,
    weight: npt.NDArray[Any],
    operands: Sequence[Operand],
    outputs: Sequence[str],
    rows: Dim,
    rows_per_batch: Dim | None = None,
    schedule: CudaGemmSchedule | None = None,
    source: tuple[str, ...] = (),
) -> KernelCall:
    """The kernel call for ``program`` over ``a [rows, K] @ weight [K, N]`` in float16, accumulated in float32.

    As ``lower_gemm``; how operands and outputs are stored is what the program says: a parameter of dtype f16 is float16, and an
    output is float16 if its value is cast to f16. The kernels are ``CudaKernel``s and ``items`` are blocks. A schedule is chosen
    for ``rows`` (128 if they are symbolic), and right at any number of rows. Raises ShapeError if operands do not fit.
    """
    k, n = weight.shape
    check_call(name, program, n, operands, outputs)
    if program.batched and rows_per_batch is None:
        raise ShapeError(
            f"GEMM '{name}': an output laid out in heads, or an operand shared by rows, needs the number of rows of a batch entry"
        )
    expected = rows if isinstance(rows, int) else _ROWS_HINT
    schedule = schedule or choose_cuda_gemm(expected, n, target.multiprocessors, 1 << depth(program))
    shape = CudaGemmShape(program, n, k, schedule)
    symbol = f"gemm_{n}x{k}_{_key(target, shape)}"
    blocks = (-(-n // schedule.columns), simplify(sympy.ceiling(sympy.sympify(rows) / schedule.rows)), 1)
    merge = (simplify(sympy.ceiling(sympy.sympify(rows) / MERGE_THREADS)), 1, 1)
    count = shape.partials
    workspaces = (Workspace(f"{name}.partials", simplify(4 * count * shape.strips * rows)),) if count else ()
    finish = None
    if count:
        last = f"{symbol}_finish"
        finish = CudaKernel(last, lambda: GemmKernel(shape).merge(last), Launch(merge, MERGE_THREADS))
    launch = Launch(blocks, schedule.threads, schedule.shared(k))
    return KernelCall(
        name=name,
        kernel=CudaKernel(symbol, lambda: GemmKernel(shape).main(symbol), launch),
        buffers=(a, Packed(f"{name}.weight", pack_weight(schedule, weight)), *operands, *outputs, *workspaces),
        ints=(rows, rows_per_batch) if program.batched and rows_per_batch is not None else (rows,),
        items=simplify(blocks[0] * blocks[1]),
        finish=finish,
        outputs=tuple(outputs),
        flops=simplify(rows * (2 * n * k + program.flops(n))),
        source=source,
    )


def _key(target: CudaTarget, shape: CudaGemmShape) -> str:
    """What makes this kernel differ from every other one, in eight hex digits."""
    text = repr((target.arch, str(shape.program), shape.n, shape.k, shape.schedule))
    return hashlib.sha256(text.encode()).hexdigest()[:8]
