"""Attention: ``softmax(program(q kᵀ)) v`` per head, tile by tile; the scores exist only in the thread's scratch.

The tiles are transposed: vectors run over queries, rows over keys. So keys are read in place, row by row, the maximum
and the sum over keys need no operation across lanes, and only the item's queries have to be packed. Keys are taken in
blocks with the running maximum and sum of Milakov and Gimelshein (Online normalizer calculation for softmax, arXiv 1805.02867),
so that scratch does not grow with their number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import sympy

from ..epilogue.ops import Group
from ..epilogue.program import EpilogueProgram, Kind
from ..errors import ShapeError
from ..schedule.attention import AttentionSchedule, choose_attention
from ..symbolic import Dim, same, simplify
from ..targets.target import Target
from .attention_tile import AttentionKernel, AttentionShape
from .kernel import KernelCall, KernelSource, Packed

Operand: TypeAlias = "str | Packed"


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of ``q [batch, heads, queries, depth]``, ``k [batch, heads / group, keys, depth]`` and ``v`` alike, of ``columns``."""

    batch: Dim
    heads: Dim
    queries: Dim
    keys: Dim
    depth: int
    columns: int
    group: int = 1


@dataclass(frozen=True)
class ScoreOperand:
    """An operand of the score program: its buffer and its shape ``[batch|1, heads|1, queries|1, keys|1]``."""

    buffer: Operand
    shape: tuple[Dim, Dim, Dim, Dim]


def lower_attention(
    target: Target,
    name: str,
    program: EpilogueProgram,
    qkv: tuple[Operand, Operand, Operand],
    operands: Sequence[ScoreOperand],
    output: str,
    sizes: AttentionSizes,
    guard: bool = False,
    schedule: AttentionSchedule | None = None,
    source: tuple[str, ...] = (),
) -> KernelCall:
    """The kernel call for attention into ``output [batch, queries, heads · columns]``, all float32 but masks.

    ``program`` is over the score tile ``[queries, keys]``: elementwise steps and one tile output; ``operands`` follow its
    ``params[1:]``. ``guard``: a NaN probability (a row masked by -inf throughout) becomes 0. Raises ShapeError otherwise.
    """
    _check(name, program, operands, sizes)
    schedule = schedule or choose_attention(target)
    strides = [_strides(operand, sizes) for operand in operands]
    shape = AttentionShape(
        transposed(program),
        sizes.depth,
        sizes.columns,
        guard,
        schedule,
        tuple(not same(o.shape[3], 1) for o in operands),
        sizes.group,
    )
    text = repr((target.name, sorted(target.tvm.items()), str(program), shape))
    symbol = f"attention_{sizes.depth}x{sizes.columns}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    blocks = sympy.ceiling(sympy.sympify(sizes.queries) / schedule.queries)
    heads = sizes.batch * sizes.heads
    scores = heads * sizes.queries * sizes.keys
    flops = 2 * (sizes.depth + sizes.columns) + program.flops(1) + 14
    traffic = heads * (sizes.queries + sizes.keys) * (sizes.depth + sizes.columns)
    for operand in operands:
        traffic = traffic + operand.shape[0] * operand.shape[1] * operand.shape[2] * operand.shape[3]
    return KernelCall(
        name=name,
        kernel=KernelSource(symbol, lambda: AttentionKernel(shape).items(symbol)),
        buffers=(*qkv, *(o.buffer for o in operands), output),
        ints=(sizes.heads, sizes.queries, sizes.keys, *(s for row in strides for s in row)),
        items=simplify(heads * blocks),
        grain=schedule.grain,
        scratch=4 * shape.scratch,
        outputs=(output,),
        flops=simplify(scores * flops),
        bytes=simplify(4 * traffic),
        source=source,
    )


def transposed(program: EpilogueProgram) -> EpilogueProgram:
    """The program over the transposed tile: what varied over rows varies over columns."""
    swap = {Kind.ROW: Kind.COL, Kind.COL: Kind.ROW}
    params = tuple(replace(p, kind=swap.get(p.kind, p.kind)) for p in program.params)
    return EpilogueProgram(params, program.steps, program.outputs)


def _check(name: str, program: EpilogueProgram, operands: Sequence[ScoreOperand], sizes: AttentionSizes) -> None:
    where = f"attention '{name}'"
    if len(operands) != len(program.params) - 1:
        raise ShapeError(
            f"{where}: the score program has {len(program.params) - 1} operands; {len(operands)} were given"
        )
    if len(program.outputs) != 1 or program.outputs[0].columns or program.outputs[0].heads:
        raise ShapeError(f"{where}: the score program must have one output, the scores as a plain tile")
    crossing = next((s for s in program.steps if s.operator.group is not Group.POINTWISE), None)
    if crossing:
        raise ShapeError(
            f"{where}: the score program's step {crossing.op} works across columns; only pointwise steps can"
        )
    whole = (sizes.batch, sizes.heads, sizes.queries, sizes.keys)
    for param, operand in zip(program.params[1:], operands, strict=True):
        fixed = {Kind.SCALAR: (0, 1, 2, 3), Kind.ROW: (3,), Kind.COL: (2,), Kind.TILE: ()}[param.kind]
        for axis, (have, full) in enumerate(zip(operand.shape, whole, strict=True)):
            if not same(have, 1) and (axis in fixed or not same(have, full)):
                raise ShapeError(
                    f"{where}: score operand '{param.name}' ({param.kind.value}) has shape {operand.shape}; axis {axis} "
                    f"must be {'1' if axis in fixed else f'1 or {full}'}"
                )


def _strides(operand: ScoreOperand, sizes: AttentionSizes) -> tuple[Dim, Dim, Dim]:
    """Elements from one batch entry, head and query to the next; 0 along an axis of one."""
    _, heads, queries, keys = operand.shape
    steps = (simplify(heads * queries * keys), simplify(queries * keys), keys)
    batch, head, query = (0 if same(d, 1) else s for d, s in zip(operand.shape, steps, strict=False))
    return batch, head, query
