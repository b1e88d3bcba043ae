"""Attention on tensor cores: ``softmax(program(q kᵀ)) v`` per head, halves in and out, scores and sums in float32 registers.

Keys are taken in blocks with the running maximum and sum of Milakov and Gimelshein (Online normalizer calculation for softmax,
arXiv 1805.02867). A block of threads has rows of q of all heads that share their keys, so that few queries of many heads still fill a tile.
Where rows are few the keys are divided over more blocks, and a second kernel merges what these found. Blocks of keys
that bands hide are skipped, as on CPUs (``coda_edge.lower.attention``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import sympy

from ...epilogue.program import EpilogueProgram
from ...errors import ShapeError
from ...schedule.cuda_attention import CudaAttentionSchedule, choose_cuda_attention
from ...symbolic import Dim, same, simplify
from ..attention import AttentionSizes, Extras, Operand, ScoreOperand, check_attention, strides
from ..kernel import KernelCall, Workspace
from .attention_tile import AttentionKernel, CudaAttentionShape
from .device import CudaKernel, Launch

if TYPE_CHECKING:
    from ...targets.cuda import CudaTarget

_NONE = Extras()
_ROWS_HINT = 128
_PART = 128
"""Keys that are worth a block of their own."""
MERGE_THREADS = 64


def lower_cuda_attention(
    target: CudaTarget,
    name: str,
    program: EpilogueProgram,
    qkv: tuple[Operand, Operand, Operand],
    operands: Sequence[ScoreOperand],
    output: str,
    sizes: AttentionSizes,
    guard: bool = False,
    schedule: CudaAttentionSchedule | None = None,
    extras: Extras = _NONE,
    source: tuple[str, ...] = (),
) -> KernelCall:
    """The kernel call for attention into ``output [batch, queries, heads · columns]``, q, k, v, past, present and output float16.

    As ``lower_attention``; score operands are stored as the program says, a sink in float32. A grid of no blocks means that the kernel
    is not started: ``finish`` has one where keys are not divided. A schedule is chosen for the numbers of queries (128 if symbolic) and is
    right at any. Raises ShapeError if operands do not fit, or for what only CPUs do.
    """
    check_attention(name, program, operands, sizes, extras)
    if extras.probability is not None:
        raise ShapeError(
            f"attention '{name}': rounded probabilities are computed on CPUs only: use a CPU target for this model"
        )
    rows: Dim = simplify(sizes.group * sympy.sympify(sizes.queries))
    schedule = schedule or choose_cuda_attention(
        rows if isinstance(rows, int) else sizes.group * _ROWS_HINT, sizes.depth, sizes.columns
    )
    read = [*operands, *([extras.sink] if extras.sink is not None else [])]
    shape = CudaAttentionShape(
        program,
        sizes.depth,
        sizes.columns,
        guard,
        schedule,
        tuple(not same(o.shape[3], 1) for o in operands),
        sizes.group,
        tuple((b.first is not None, b.last is not None) for b in extras.bands),
        extras.past is not None,
        extras.present is not None,
        extras.sink is not None,
        sizes.shared,
        tuple(o.repeated for o in read),
    )
    key = hashlib.sha256(repr((target.arch, str(program), shape)).encode()).hexdigest()[:8]
    symbol = f"attention_{sizes.depth}x{sizes.columns}_{key}"
    merge = f"{symbol}_finish"
    owners = simplify(sympy.sympify(sizes.batch) * sizes.heads / sizes.group)
    blocks: Dim = simplify(sympy.Max(1, sympy.ceiling(sympy.sympify(rows) / schedule.rows)))
    parts: Dim = 1
    if shape.divisible:
        spare = sympy.floor(2 * target.multiprocessors / sympy.Max(1, sympy.sympify(blocks) * owners))
        parts = simplify(sympy.Max(1, sympy.Min(spare, sympy.ceiling(sympy.sympify(sizes.keys) / _PART))))
    divided = simplify(sympy.Min(1, sympy.sympify(parts) - 1))
    whole = simplify(owners * rows)
    left = simplify(4 * divided * parts * whole * (sizes.columns + 2))
    scores = owners * rows * sizes.keys
    traffic = (owners * rows + owners * sizes.keys) * (sizes.depth + sizes.columns)
    bounds = [d for b in extras.bands for d in (b.first, b.last) if d is not None]
    outputs = (output, *(extras.present or ()))
    return KernelCall(
        name=name,
        kernel=CudaKernel(
            symbol,
            lambda: AttentionKernel(shape).main(symbol),
            Launch((blocks, owners, parts), schedule.threads, schedule.shared(sizes.depth, sizes.columns)),
        ),
        buffers=(
            *(*qkv, *(extras.past or ()), *(o.buffer for o in read), *outputs),
            *((Workspace(f"{name}.partials", left),) if shape.divisible else ()),
        ),
        ints=(
            *(sizes.heads, sizes.queries, sizes.keys),
            *((sizes.past,) if extras.past is not None else ()),
            *(s for o in read for s in strides(o)),
            *bounds,
            *((parts,) if shape.divisible else ()),
        ),
        items=simplify(blocks * owners * parts),
        finish=CudaKernel(
            merge,
            lambda: AttentionKernel(shape).merge(merge, MERGE_THREADS),
            Launch((simplify(divided * whole), 1, 1), MERGE_THREADS),
        )
        if shape.divisible
        else None,
        outputs=outputs,
        flops=simplify(scores * (2 * (sizes.depth + sizes.columns) + program.flops(1) + 6)),
        bytes=simplify(2 * traffic),
        source=source,
    )
