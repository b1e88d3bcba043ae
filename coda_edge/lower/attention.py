"""Attention: ``softmax(program(q kᵀ)) v`` per head, tile by tile; the scores exist only in the thread's scratch.

The tiles are transposed: vectors run over queries, rows over keys. So keys are read in place, row by row, the maximum
and the sum over keys need no operation across lanes, and only the item's queries have to be packed. Keys are taken in
blocks with the running maximum and sum of Milakov and Gimelshein (Online normalizer calculation for softmax, arXiv 1805.02867),
so that scratch does not grow with their number.

Bands (see ``coda_edge.attention``) are compared, not read, and only where a tile is not wholly within them; blocks wholly outside of
one that hides what is outside are skipped. A query that sees no key within is given the others after all, since the graph may define that.
Where probabilities are rounded before they meet the values, the keys are gone over twice: first for the maxima and sums, without which
probabilities are not known. Past keys and values are read where they lie; the first item of each head that owns some also writes the joined rows.
Few queries, as when text is generated, are another matter: see ``attention_few``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy

from ..attention import Band
from ..epilogue.ops import Group
from ..epilogue.program import EpilogueProgram, Kind, Param
from ..errors import ShapeError
from ..schedule.attention import AttentionSchedule, choose_attention
from ..symbolic import Dim, same, simplify
from ..targets.target import Target
from .attention_few import PART
from .attention_shape import AttentionShape, transposed
from .attention_tile import AttentionKernel
from .kernel import KernelCall, KernelSource, Packed, Workspace

Operand: TypeAlias = "str | Packed"


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of ``q [batch, heads, queries, depth]``, ``k [batch, heads / group, keys, depth]`` and ``v`` alike, of ``columns``.

    The first ``past`` of the keys are tensors of their own. ``shared``: which of q, k and v have one batch entry for all.
    """

    batch: Dim
    heads: Dim
    queries: Dim
    keys: Dim
    depth: int
    columns: int
    group: int = 1
    past: Dim = 0
    shared: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScoreOperand:
    """An operand of the score program: its buffer and its shape ``[batch|1, heads|1, queries|1, keys|1]``.

    ``repeated``: its batch entries take turns; their number divides ``batch``.
    """

    buffer: Operand
    shape: tuple[Dim, Dim, Dim, Dim]
    repeated: bool = False


@dataclass(frozen=True)
class Extras:
    """What an attention may have besides: buffers of past keys and values and of all of them, a score without a value, bands, and what
    becomes of a probability ``acc`` before it meets the values: pointwise steps that leave 0 as it is.
    """

    past: tuple[Operand, Operand] | None = None
    present: tuple[str, str] | None = None
    sink: ScoreOperand | None = None
    bands: tuple[Band, ...] = ()
    probability: EpilogueProgram | None = None


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
    extras: Extras = Extras(),
    source: tuple[str, ...] = (),
) -> KernelCall:
    """The kernel call for attention into ``output [batch, queries, heads · columns]``, all float32 but masks.

    ``program`` is over the score tile ``[queries, keys]``: elementwise steps and one tile output. Of its ``params[1:]`` the first are
    the bands, the others ``operands``. ``guard``: a NaN probability (a row masked by -inf throughout) becomes 0. Raises ShapeError otherwise.
    """
    check_attention(name, program, operands, sizes, extras)
    schedule = schedule or choose_attention(target, sizes.columns)
    read = [*operands, *([extras.sink] if extras.sink is not None else [])]
    shape = AttentionShape(
        transposed(program),
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
        extras.probability,
    )
    text = repr((target.name, sorted(target.tvm.items()), str(program), shape))
    symbol = f"attention_{sizes.depth}x{sizes.columns}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    merge = f"{symbol}_finish"
    blocks: Dim = sympy.ceiling(sympy.sympify(sizes.queries) / schedule.queries)
    heads: Dim = sizes.batch * sizes.heads
    scores = heads * sizes.queries * sizes.keys
    flops = 2 * (sizes.depth + sizes.columns) + program.flops(1) + 14
    if extras.probability is not None:
        # Scores are computed twice: probabilities are known with the sum over all of them.
        flops = flops + 2 * sizes.depth + program.flops(1) + 14 + extras.probability.flops(1)
    owners = simplify(sympy.sympify(heads) / sizes.group)
    traffic = (heads * sizes.queries + owners * sizes.keys) * (sizes.depth + sizes.columns)
    for operand in read:
        traffic = traffic + operand.shape[0] * operand.shape[1] * operand.shape[2] * operand.shape[3]
    if extras.present is not None:
        traffic = traffic + 2 * owners * sizes.keys * (sizes.depth + sizes.columns)
        blocks = sympy.Max(blocks, 1)
    items: Dim = heads * blocks
    parts: tuple[Dim, ...] = ()
    workspaces: tuple[Workspace, ...] = ()
    if shape.few:
        # 1 if there are few queries, else 0: sizes know no conditions.
        few = sympy.Max(0, sympy.Min(1, shape.few + 1 - sizes.queries))
        number = sympy.ceiling(sympy.sympify(sizes.keys) / PART) if shape.divisible else 1
        parts = (simplify(sympy.Max(1, few * number)),)
        items = few * owners * parts[0] + (1 - few) * items
        left = few * sympy.Min(1, parts[0] - 1) * heads * sizes.queries * parts[0] * (sizes.columns + 2)
        workspaces = (Workspace(f"{name}.partials", simplify(4 * left)),)
    outputs = (output, *(extras.present or ()))
    bounds = [d for b in extras.bands for d in (b.first, b.last) if d is not None]
    return KernelCall(
        name=name,
        kernel=KernelSource(symbol, lambda: AttentionKernel(shape).items(symbol)),
        buffers=(*qkv, *(extras.past or ()), *(o.buffer for o in read), *outputs, *workspaces),
        ints=(
            *(sizes.heads, sizes.queries, sizes.keys),
            *((sizes.past,) if extras.past is not None else ()),
            *(s for o in read for s in strides(o)),
            *bounds,
            *parts,
        ),
        items=simplify(items),
        grain=schedule.grain,
        scratch=4 * shape.scratch,
        finish=KernelSource(merge, lambda: AttentionKernel(shape).merge(merge)) if shape.few else None,
        outputs=outputs,
        flops=simplify(scores * flops),
        bytes=simplify(4 * traffic),
        source=source,
    )


def check_attention(
    name: str, program: EpilogueProgram, operands: Sequence[ScoreOperand], sizes: AttentionSizes, extras: Extras
) -> None:
    """Raises ShapeError if operands, bands and the score program do not fit each other."""
    where = f"attention '{name}'"
    bands = program.params[1 : 1 + len(extras.bands)]
    params = program.params[1 + len(extras.bands) :]
    if len(operands) != len(params) or len(bands) != len(extras.bands):
        raise ShapeError(
            f"{where}: the score program has {len(program.params) - 1} operands; {len(operands)} were given"
            + (f" and {len(extras.bands)} bands" if extras.bands else "")
        )
    if any((p.kind, p.dtype) != (Kind.TILE, "bool") for p in bands):
        raise ShapeError(f"{where}: whether a key is in a band is a bool tile; the score program has {bands}")
    if len(program.outputs) != 1 or program.outputs[0].columns or program.outputs[0].heads:
        raise ShapeError(f"{where}: the score program must have one output, the scores as a plain tile")
    after = extras.probability
    if after is not None and (len(after.params) != 1 or len(after.outputs) != 1):
        raise ShapeError(f"{where}: what becomes of a probability has one operand and one output, found {after}")
    steps = [*program.steps, *(after.steps if after is not None else ())]
    crossing = next((s for s in steps if s.operator.group is not Group.POINTWISE), None)
    if crossing:
        raise ShapeError(f"{where}: a score's step {crossing.op} works across columns; only pointwise steps can")
    whole = (sizes.batch, sizes.heads, sizes.queries, sizes.keys)
    for param, operand in [*zip(params, operands, strict=True), *_sink(extras)]:
        fixed = {Kind.SCALAR: (0, 1, 2, 3), Kind.ROW: (3,), Kind.COL: (2,), Kind.TILE: ()}[param.kind]
        for axis, (have, full) in enumerate(zip(operand.shape, whole, strict=True)):
            if axis == 0 and operand.repeated and 0 not in fixed:
                continue
            if not same(have, 1) and (axis in fixed or not same(have, full)):
                raise ShapeError(
                    f"{where}: score operand '{param.name}' ({param.kind.value}) has shape {operand.shape}; axis {axis} "
                    f"must be {'1' if axis in fixed else f'1 or {full}'}"
                )


def _sink(extras: Extras) -> list[tuple[Param, ScoreOperand]]:
    return [] if extras.sink is None else [(Param("sink", Kind.ROW), extras.sink)]


def strides(operand: ScoreOperand) -> tuple[Dim, ...]:
    """Elements from one batch entry, head and query to the next; 0 along an axis of one. How many batch entries there are if repeated."""
    batch, heads, queries, keys = operand.shape
    steps = (simplify(heads * queries * keys), simplify(queries * keys), keys)
    found = tuple(0 if same(d, 1) else s for d, s in zip(operand.shape, steps, strict=False))
    return (*found, batch) if operand.repeated else found
