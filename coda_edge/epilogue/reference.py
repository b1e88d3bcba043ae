"""What an epilogue program means, in numpy: the semantics that every lowering is tested against."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ShapeError
from .ops import Array, Group
from .program import FLOATS, EpilogueProgram, Kind, Output, Param, Rows, Step

_WIDE = (Kind.TILE, Kind.COL)
_EXACT = {"i8": np.int8, "u8": np.uint8, "i32": np.int32, "i64": np.int64, "bool": np.bool_}


def evaluate(
    program: EpilogueProgram,
    acc: Array,
    operands: Mapping[str, Any],
    rows_per_batch: int | None,
    dtype: np.dtype[Any],
) -> dict[str, Array]:
    """The outputs of ``program`` by name.

    ``acc`` is ``[…, N]``. Tile operands are ``[…, width]`` (with a period P ``[…, P]``), row operands ``[…, 1]`` or ``[…]``, column
    operands ``[width]`` (any that broadcast will do, as for attention scores), scalars 0-D. ``position`` operands have S rows,
    ``batch`` operands one a batch entry. Tile outputs are ``[…, width]``, row outputs ``[…, 1]``; one with ``heads[D]`` is
    ``[B, H, S, D]``. All that is batched needs a 3-D ``acc`` or ``rows_per_batch`` S. f32 is computed in ``dtype``; narrower floats
    are rounded to where they arise and held in ``dtype``. Raises ShapeError for operands that are missing, unknown or do not fit.
    """
    acc = np.asarray(acc)
    program.check(acc.shape[-1])
    given = {program.params[0].name: acc, **operands}
    unknown = sorted(set(given) - {p.name for p in program.params})
    if unknown:
        raise ShapeError(f"epilogue has no operand '{unknown[0]}'; it has {', '.join(p.name for p in program.params)}")
    dtypes = program.dtypes()
    values: dict[str, Array] = {}
    for param in program.params:
        if param.name not in given:
            raise ShapeError(f"epilogue operand '{param.name}' ({param.kind.value} {param.dtype}) is not given")
        array = _all_rows(param, np.asarray(given[param.name]), acc, rows_per_batch)
        values[param.name] = _hold(_place(program, param, array, acc), param.dtype, dtype)
    with np.errstate(all="ignore"):
        for step in program.steps:
            values.update(_run(program, step, values, dtypes, dtype, acc.shape[-1]))
    return {o.name: _store(program, o, values[o.value], acc.shape, rows_per_batch) for o in program.outputs}


def _all_rows(param: Param, array: Array, acc: Array, rows_per_batch: int | None) -> Array:
    """An operand that batch entries or positions share, with a row for each row of ``acc``."""
    if param.rows is Rows.ALL:
        return array
    if rows_per_batch is None and acc.ndim != 3:
        raise ShapeError(f"operand '{param.name}' is shared by rows: give a 3-D accumulator or rows_per_batch")
    lead = acc.shape[:-1]
    row, count = np.arange(math.prod(lead)), rows_per_batch or lead[1]
    width = 1 if param.kind is Kind.ROW else array.shape[-1]
    flat = array.reshape(-1, width)
    expected = count if param.rows is Rows.POSITION else len(row) // max(count, 1)
    if len(flat) != expected:
        raise ShapeError(
            f"epilogue operand '{param.name}' ({param.rows.value}) has {len(flat)} rows, expected {expected}"
        )
    return flat[row % count if param.rows is Rows.POSITION else row // count].reshape(*lead, width)


def _place(program: EpilogueProgram, param: Param, array: Array, acc: Array) -> Array:
    n = acc.shape[-1]
    row = param.kind is Kind.ROW
    if row and array.ndim == acc.ndim - 1:
        array = array[..., None]
    wide = param.kind in (Kind.TILE, Kind.COL)
    if param.period and array.ndim and array.shape[-1] == param.period:
        array = np.tile(array, program.width(param.name, n) // param.period)
    expected = {
        Kind.TILE: (*acc.shape[:-1], program.width(param.name, n) if wide else 0),
        Kind.ROW: (*acc.shape[:-1], 1),
        Kind.COL: (*acc.shape[:-1], program.width(param.name, n) if wide else 0),
        Kind.SCALAR: (),
    }[param.kind]
    try:
        fits = np.broadcast_shapes(array.shape, expected) == expected
    except ValueError:
        fits = False
    if not fits or (wide and array.shape[-1:] != expected[-1:]):
        raise ShapeError(
            f"epilogue operand '{param.name}' ({param.kind.value}) has shape {array.shape}; "
            f"it must broadcast to {expected} for an accumulator {acc.shape}"
        )
    return array


def _run(
    program: EpilogueProgram,
    step: Step,
    values: Mapping[str, Array],
    dtypes: Mapping[str, str],
    dtype: np.dtype[Any],
    n: int,
) -> dict[str, Array]:
    literal = program.operand_dtype(step)
    args = [values[a] if isinstance(a, str) else _hold(np.asarray(a), literal, dtype) for a in step.args]
    kinds = program.kinds()
    if step.operator.group is Group.HEADS:
        # A value of kind head is [.., heads, 1].
        args = [np.broadcast_to(a, (*a.shape[:-1], n)).reshape(*a.shape[:-1], -1, program.head) for a in args]
    elif kinds[step.names[0]] is Kind.TILE:
        wide = next(program.width(v, n) for v in (*step.names, *step.args) if isinstance(v, str) and kinds[v] in _WIDE)
        args = [
            np.repeat(a[..., 0], wide // a.shape[-2], -1) if isinstance(v, str) and kinds[v] is Kind.HEAD else a
            for v, a in zip(step.args, args, strict=True)
        ]
    elif kinds[step.names[0]] is Kind.HEAD:
        args = [
            a[..., None] if isinstance(v, str) and kinds[v] is Kind.ROW else a
            for v, a in zip(step.args, args, strict=True)
        ]
    results = step.operator.numpy(*args)
    results = results if isinstance(results, tuple) else (results,)
    return {name: _hold(np.asarray(r), dtypes[name], dtype) for name, r in zip(step.names, results, strict=True)}


def _hold(array: Array, name: str, dtype: np.dtype[Any]) -> Array:
    """``array`` as values of the program's dtype ``name``."""
    if name not in FLOATS:
        return array.astype(_EXACT[name])
    if name == "f16":
        array = array.astype(np.float16)
    if name == "bf16":
        array = _round_bf16(array.astype(np.float32))
    return array.astype(dtype)


def _round_bf16(array: Array) -> Array:
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(array), rounded, array)


def _store(program: EpilogueProgram, output: Output, value: Array, shape: tuple[int, ...], rows: int | None) -> Array:
    if output.kind is Kind.ROW:
        return np.broadcast_to(value, (*shape[:-1], 1)).copy()
    value = np.broadcast_to(value, (*shape[:-1], program.width(output.value, shape[-1])))
    if output.columns:
        value = value[..., slice(*output.columns)]
    if output.heads is None:
        return value.copy()
    if rows is None and len(shape) != 3:
        raise ShapeError(f"output '{output.name}' has heads: give a 3-D accumulator or rows_per_batch, not {shape}")
    batched = value.reshape(-1, rows or shape[1], value.shape[-1] // output.heads, output.heads).transpose(0, 2, 1, 3)
    return batched[..., output.order]
