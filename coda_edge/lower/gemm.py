"""GEMM with an epilogue: ``program(A @ W, operands)`` for a constant W, on register tiles.

A ``[M, K]``, operands and outputs are plain row-major tensors, M known at run time. W is packed into panels of ``width`` columns,
each ``[K, width]``; the last panel is as narrow as what is left. An item is one panel for one block of rows; consecutive
items share the block; ``weights`` says how panels are stored. The accumulators stay in registers until the epilogue has made the outputs of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import sympy
import tvm

from ..epilogue.program import EpilogueProgram, Kind, Rows
from ..epilogue.tir import STORAGE, depth
from ..errors import ShapeError
from ..schedule.gemm import GemmSchedule, choose_gemm
from ..symbolic import Dim, simplify
from ..targets.target import Target
from ..weights import Weight
from ..window import Window
from .dot import DOTS, dot_for
from .gemm_heads import HeadShape, first_of_heads
from .gemm_items import Kernel
from .gemm_rows import WindowShape, WindowSizes
from .gemm_shape import GemmShape
from .gemv import few_rows_scratch
from .kernel import KernelCall, KernelSource, Packed, Workspace
from .weights import BYTES, WeightFormat

Operand: TypeAlias = "str | Packed"

_STRIDE = 16
"""Words of K between two requests for the next panel, each of which takes the time that a step takes in float32."""


@dataclass(frozen=True)
class Windows:
    """What A is instead of a matrix: a tensor ``[batch, *sizes, channels]``, each row a window of it."""

    window: Window
    batch: Dim
    sizes: tuple[Dim, ...]


def lower_gemm(
    target: Target,
    name: str,
    program: EpilogueProgram,
    a: Operand,
    weight: npt.NDArray[Any] | Weight,
    operands: Sequence[Operand],
    outputs: Sequence[str],
    rows: Dim,
    rows_per_batch: Dim | None = None,
    schedule: GemmSchedule | None = None,
    source: tuple[str, ...] = (),
    windows: Windows | None = None,
    zero: int = 0,
) -> KernelCall:
    """The kernel call for ``program`` over ``a [rows, K] @ weight [K, N]``, computed in float32, or of whole numbers.

    ``operands`` follow ``program.params[1:]`` and ``outputs`` ``program.outputs``: tiles ``[rows, width]``, rows ``[rows]``, columns
    ``[width]``, scalars one element. ``rows_per_batch``: S of outputs with ``heads`` and of operands that positions or batch
    entries share. ``windows``: A is a tensor, and ``rows`` are its windows.

    Where ``program`` begins with int32 sums, A is of bytes as the target's ``Dot`` reads them, ``weight`` of int8, and ``zero`` what A holds in place of 0. Raises ShapeError if they do not fit.
    """
    whole = program.params[0].dtype == "i32"
    weight = weight if isinstance(weight, Weight) else Weight(np.asarray(weight, np.int8 if whole else np.float32))
    k, n = weight.stored.shape
    check_call(name, program, n, operands, outputs)
    if program.batched and rows_per_batch is None:
        raise ShapeError(
            f"GEMM '{name}': an output laid out in heads, or an operand shared by rows, needs the number of rows of a batch entry"
        )
    dot = dot_for(target.dot, 0 if windows is None else k // windows.window.taps) if whole else ""
    if schedule is None:
        schedule = (
            choose_gemm(target, n, k, 1 << depth(program)) if not whole else _choose_whole(target, dot, n, k, program)
        )
    if program.head:
        if windows is not None or whole:
            raise ShapeError(f"GEMM '{name}': sums over heads are of rows and of float32")
        if program.head % (1 << depth(program)):
            raise ShapeError(f"GEMM '{name}': heads of {program.head} columns are not halved {depth(program)} times")
        schedule = replace(schedule, panels=first_of_heads(schedule.panels, schedule.width, program.head))
    blocks = simplify(sympy.ceiling(sympy.sympify(rows) / schedule.block_rows))
    window: WindowShape | None = None
    sizes: tuple[Dim, ...] = ()
    lines: Dim = 0
    if windows is not None:
        window = WindowShape.of(windows.window, k // windows.window.taps)
        placed = WindowSizes.of(window, windows.batch, windows.sizes, schedule.block_rows, schedule.rows)
        blocks, sizes, lines = placed.blocks, placed.ints, placed.scratch(window)
    form = WeightFormat(BYTES[DOTS[dot].word]) if dot else WeightFormat.of(weight)
    shape = GemmShape(program, n, k, schedule, form, window, dot, zero)
    symbol = f"gemm_{n}x{k}_{_key(target, shape)}"
    merge = f"{symbol}_finish"
    count = shape.partials
    workspaces = (Workspace(f"{name}.partials", simplify(4 * count * shape.panels * rows)),) if count else ()
    batches = (rows_per_batch,) if program.batched and rows_per_batch is not None else ()
    return KernelCall(
        name=name,
        kernel=KernelSource(symbol, lambda: Kernel(shape).items(symbol)),
        buffers=(a, *shape.format.packed(f"{name}.weight", weight, shape.orders()), *operands, *outputs, *workspaces),
        ints=(rows, *batches, *sizes),
        items=simplify(blocks * shape.groups),
        grain=schedule.grain,
        scratch=simplify(shape.itemsize * lines + 4 * _scratch(shape)),
        finish=KernelSource(merge, lambda: Kernel(shape).merge(merge)) if count else None,
        outputs=tuple(outputs),
        flops=simplify(rows * (2 * n * k + program.flops(n))),
        bytes=simplify(_traffic(shape, rows, rows_per_batch)),
        source=source,
    )


def _scratch(shape: GemmShape) -> int:
    """float32 of a thread's scratch but for the lines of windows."""
    least = max(shape.scratch, few_rows_scratch(shape))
    return least + (HeadShape(shape, least).size if shape.waits else 0)


def check_call(
    name: str, program: EpilogueProgram, n: int, operands: Sequence[Operand], outputs: Sequence[str]
) -> None:
    """Raises ShapeError unless ``program`` suits ``n`` columns and has as many operands and outputs as are given."""
    program.check(n)
    if len(operands) != len(program.params) - 1 or len(outputs) != len(program.outputs):
        raise ShapeError(
            f"GEMM '{name}': the epilogue has {len(program.params) - 1} operands and {len(program.outputs)} outputs; "
            f"{len(operands)} and {len(outputs)} were given"
        )


def _choose_whole(target: Target, dot: str, n: int, k: int, program: EpilogueProgram) -> GemmSchedule:
    """The untuned schedule for products of whole numbers: the panels behind are asked for as seldom as sums allow, which are done four steps at a time."""
    tiled = replace(target, tiles=DOTS[dot].tiles or target.tiles)
    return replace(choose_gemm(tiled, n, k, 1 << depth(program)), stride=_STRIDE * DOTS[dot].word)


def _key(target: Target, shape: GemmShape) -> str:
    """What makes this kernel differ from every other one, in eight hex digits."""
    text = repr(
        (
            target.name,
            sorted(target.tvm.items()),
            str(shape.program),
            shape.n,
            shape.k,
            shape.schedule,
            shape.format,
            shape.window,
            shape.dot,
            shape.zero,
        )
    )
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _traffic(shape: GemmShape, rows: Dim, rows_per_batch: Dim | None) -> Dim:
    """Bytes of every tensor read or written once."""
    program, n = shape.program, shape.n
    kinds, dtypes = program.kinds(), program.dtypes()
    counts: dict[Rows, Dim] = {Rows.ALL: rows}
    if rows_per_batch is not None:
        counts |= {Rows.POSITION: rows_per_batch, Rows.BATCH: rows / sympy.sympify(rows_per_batch)}
    wide = (Kind.TILE, Kind.COL)
    stored = [(p.name, program.operand_width(p, n) if p.kind in wide else 1, p.rows) for p in program.params[1:]]
    stored += [(o.value, program.output_width(o, n) if o.kind is Kind.TILE else 1, Rows.ALL) for o in program.outputs]
    total: Dim = shape.itemsize * rows * shape.k + shape.format.bytes(n, shape.k)
    for value, width, which in stored:
        size = tvm.DataType(STORAGE[dtypes[value]]).itemsize
        total = total + size * width * (counts[which] if kinds[value] in (Kind.TILE, Kind.ROW) else 1)
    return total
