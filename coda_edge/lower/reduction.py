"""Kernels of operators that go along axes: reductions, Softmax, ArgMax, CumSum, TopK.

All are written on a ``Run``: the elements along the axes, for one place of the other axes. If the last axis is among them,
its elements are the lanes of a vector; otherwise neighbouring places are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import onnx_graphsurgeon as gs
from tvm import tirx

from .. import ir
from ..errors import UnsupportedOperator
from ..symbolic import Dim
from . import intrinsics
from .emit import SUM, Emitter, Expr, Reduction, dtype_of, int64, register
from .kernel import KernelCall
from .ops_math import is_float, maximum, minimum
from .pointwise import GRAIN, attempt, product, rows_of
from .registry import Context, View, constant, dtype_name, kernel, leaf

#: Vectors of the last axis that an item does, where other axes are reduced.
BLOCK = 4

Visit = Callable[[list[Expr], Expr, Expr], None]
"""Called with the indices of an element, its position along the (single) axis, and the lane."""


@dataclass(frozen=True)
class Run:
    """The elements along some axes. ``place``: the row-major number of the place in the other axes."""

    place: Expr
    lane: Expr
    width: int
    each: Callable[[Visit], None]
    reduce: Callable[[Reduction, Callable[[list[Expr]], Expr], str], Expr]


def runs(emit: Emitter, shape: Sequence[Dim], axes: Sequence[int], body: Callable[[Run], None]) -> Dim:
    """Writes ``body`` for every run along ``axes`` (ascending) of a tensor of ``shape``; returns the items."""
    rank = len(shape)
    if not rank:
        with emit.items():
            body(_along(emit, (), [], [], int64(0)))
        return 1
    rest = [a for a in range(rank) if a not in axes]
    if rank - 1 in axes:
        with emit.items() as item:
            body(_along(emit, shape, axes, _scatter(rank, rest, emit.unravel(item, [shape[a] for a in rest])), item))
        return rows_of([shape[a] for a in rest], 1)
    lead, last = [shape[a] for a in rest[:-1]], shape[-1]
    size = BLOCK * emit.lanes
    blocks = -(-last // size) if isinstance(last, int) and last else 1
    with emit.items() as item:
        *outer, block = emit.unravel(item, [*lead, blocks])
        start = emit.ravel(outer, lead) * emit.size(last) if lead else int64(0)
        first = emit.bind(block * int64(size)) if blocks > 1 else int64(0)

        def across(position: Expr, lane: Expr, width: int) -> None:
            indices = _scatter(rank, rest, [*outer, first + position])
            body(_across(emit, shape, axes, indices, start + first + position, lane, width))

        if not isinstance(last, int) or blocks == 1:
            emit.span(emit.size(last), across)
            return rows_of(lead, last)
        if last % size == 0:
            emit.span(int64(size), across)
            return product([*lead, blocks])
        with emit.when(block < int64(blocks - 1)):
            emit.span(int64(size), across)
        with emit.when(block >= int64(blocks - 1)):
            emit.span(int64(last % size), across)
    return product([*lead, blocks])


def _scatter(rank: int, axes: Sequence[int], values: Sequence[Expr]) -> list[Expr]:
    indices = [int64(0)] * rank
    for axis, value in zip(axes, values, strict=True):
        indices[axis] = value
    return indices


def _along(emit: Emitter, shape: Sequence[Dim], axes: Sequence[int], indices: list[Expr], item: Expr) -> Run:
    """Lanes are elements of the last axis."""

    def each(visit: Visit) -> None:
        if not axes:
            visit(indices, int64(0), int64(0))
            return
        with ExitStack() as loops:
            here = list(indices)
            for axis in axes[:-1]:
                here[axis] = loops.enter_context(emit.loop(emit.size(shape[axis])))
            emit.span(emit.size(shape[axes[-1]]), lambda at, lane, width: visit([*here[:-1], at], at, lane))

    def reduce(kind: Reduction, value: Callable[[list[Expr]], Expr], dtype: str) -> Expr:
        with emit.reduction(kind, dtype) as total:
            each(lambda here, at, lane: total.add(value(here), lane))
        return total.result

    return Run(item, int64(0), 1, each, reduce)


def _across(
    emit: Emitter, shape: Sequence[Dim], axes: Sequence[int], indices: list[Expr], place: Expr, lane: Expr, width: int
) -> Run:
    """Lanes are neighbouring places."""

    def each(visit: Visit) -> None:
        with ExitStack() as loops:
            here = list(indices)
            for axis in axes:
                here[axis] = loops.enter_context(emit.loop(emit.size(shape[axis])))
            visit(here, here[axes[-1]] if axes else int64(0), lane)

    def reduce(kind: Reduction, value: Callable[[list[Expr]], Expr], dtype: str) -> Expr:
        total = emit.local(width, dtype)
        emit.store(total, lane, kind.identity(dtype))
        each(lambda here, at, _: emit.store(total, lane, kind.combine(tirx.BufferLoad(total, [lane]), value(here))))
        return tirx.BufferLoad(total, [lane])

    return Run(place, lane, width, each, reduce)


def _lowest(dtype: str) -> Expr:
    return constant(float("-inf"), dtype) if dtype.startswith("float") else tirx.min_value(dtype)


def _highest(dtype: str) -> Expr:
    return constant(float("inf"), dtype) if dtype.startswith("float") else tirx.max_value(dtype)


MAX = Reduction(maximum, _lowest)
MIN = Reduction(minimum, _highest)
PROD = Reduction(lambda a, b: a * b, lambda dtype: constant(1, dtype))


@dataclass(frozen=True)
class _Reduce:
    """A reduction operator: what is reduced of each element, how, and what becomes of the result and the element count."""

    kind: Reduction
    before: Callable[[Expr], Expr] = lambda x: x
    after: Callable[[Expr, Expr], Expr] = lambda total, count: total


def _mean(total: Expr, count: Expr) -> Expr:
    count = tirx.Cast(dtype_of(total), count)
    return total / count if is_float(total) else tirx.truncdiv(total, count)


_REDUCE = {
    "ReduceSum": _Reduce(SUM),
    "ReduceMean": _Reduce(SUM, after=_mean),
    "ReduceMax": _Reduce(MAX),
    "ReduceMin": _Reduce(MIN),
    "ReduceProd": _Reduce(PROD),
    "ReduceL1": _Reduce(SUM, before=tirx.abs),
    "ReduceL2": _Reduce(SUM, before=lambda x: x * x, after=lambda total, count: tirx.sqrt(total)),
    "ReduceSumSquare": _Reduce(SUM, before=lambda x: x * x),
    "ReduceLogSum": _Reduce(SUM, after=lambda total, count: intrinsics.log(total)),
}


@kernel(*_REDUCE)
def lower_reduce(node: gs.Node, context: Context) -> list[KernelCall]:
    """ReduceX over constant axes; float16 is accumulated in float32."""
    rule = _REDUCE[node.op]

    def write(emit: Emitter, x: View, run: Run, count: Expr) -> Expr:
        dtype = register(x.dtype)
        return rule.after(run.reduce(rule.kind, lambda here: rule.before(_cast(dtype, x.at(here))), dtype), count)

    return [_reduction(node, context, write)]


@kernel("ReduceLogSumExp")
def lower_log_sum_exp(node: gs.Node, context: Context) -> list[KernelCall]:
    """log Σ exp, with the largest element taken out first."""

    def write(emit: Emitter, x: View, run: Run, count: Expr) -> Expr:
        largest = emit.bind(run.reduce(MAX, lambda here: _cast("float32", x.at(here)), "float32"))
        finite = tirx.Select(largest > constant(-3.4e38, "float32"), largest, constant(0, "float32"))
        shift = emit.bind(tirx.Select(largest < constant(3.4e38, "float32"), finite, constant(0, "float32")))
        total = run.reduce(SUM, lambda here: emit.bind(intrinsics.exp(_cast("float32", x.at(here)) - shift)), "float32")
        return intrinsics.log(total) + shift

    return [_reduction(node, context, write)]


def _cast(dtype: str, x: Expr) -> Expr:
    return x if dtype_of(x) == dtype else tirx.Cast(dtype, x)


def _axes(node: gs.Node) -> list[int]:
    """The axes of a ReduceX, ascending; none given means all, unless noop_with_empty_axes is set."""
    rank = len(ir.shape(node.inputs[0]))
    given = node.attrs.get("axes")
    if len(node.inputs) > 1 and node.inputs[1].name:
        given = ir.constant_value(node.inputs[1])
        if given is None:
            raise UnsupportedOperator(node.op, node.name, "its axes must be constant")
    if given is None or not len(given):
        return [] if node.attrs.get("noop_with_empty_axes", 0) else list(range(rank))
    return sorted(int(a) % rank for a in given)


def _reduction(node: gs.Node, context: Context, write: Callable[[Emitter, View, Run, Expr], Expr]) -> KernelCall:
    source, out = node.inputs[0], node.outputs[0]
    shape, axes = ir.shape(source), _axes(node)

    def build(emit: Emitter) -> KernelCall:
        x = leaf(source, emit, context)
        result = emit.buffer(out.name, dtype_name(out))
        count = emit.size(product([shape[a] for a in axes]))

        def body(run: Run) -> None:
            emit.store(result, run.place, _cast(dtype_name(out), emit.bind(write(emit, x, run, count))))

        items = runs(emit, shape, axes, body)
        return _finish(emit, node, items, shape, axes)

    return attempt(build, context.lanes)


def _finish(emit: Emitter, node: gs.Node, items: Dim, shape: Sequence[Dim], axes: Sequence[int]) -> KernelCall:
    inner = product([shape[a] for a in axes])
    return emit.call(
        node.op.lower(),
        items,
        [t.name for t in node.outputs if t.name],
        grain=max(1, GRAIN // inner) if isinstance(inner, int) and inner else 4,
        flops=product(shape),
        source=(node.name,),
    )


@kernel("Softmax", "LogSoftmax")
def lower_softmax(node: gs.Node, context: Context) -> list[KernelCall]:
    """Softmax and LogSoftmax along one axis (opset 13), in float32, shifted by the largest element."""
    source, out = node.inputs[0], node.outputs[0]
    shape = ir.shape(source)
    axis = int(node.attrs.get("axis", -1)) % len(shape)
    logarithm = node.op == "LogSoftmax"
    # Exponentials wait for their sum where the result goes, which has their precision.
    waits = not logarithm and dtype_name(out) == "float32"

    def build(emit: Emitter) -> KernelCall:
        x, dtype = leaf(source, emit, context), dtype_name(out)
        result = emit.buffer(out.name, dtype)

        def body(run: Run) -> None:
            largest = emit.bind(run.reduce(MAX, lambda here: _cast("float32", x.at(here)), "float32"))

            def shifted(here: list[Expr]) -> Expr:
                return emit.bind(_cast("float32", x.at(here)) - largest)

            def term(here: list[Expr]) -> Expr:
                value = emit.bind(intrinsics.exp(shifted(here)))
                if waits:
                    emit.store(result, emit.ravel(here, shape), value)
                return value

            total = run.reduce(SUM, term, "float32")
            last = emit.bind(intrinsics.log(total) if logarithm else constant(1, "float32") / total)

            def finish(here: list[Expr], at: Expr, lane: Expr) -> None:
                index = emit.ravel(here, shape)
                if waits:
                    value = tirx.BufferLoad(result, [index]) * last
                else:
                    value = shifted(here) - last if logarithm else emit.bind(intrinsics.exp(shifted(here))) * last
                emit.store(result, index, _cast(dtype, value))

            run.each(finish)

        return _finish(emit, node, runs(emit, shape, [axis], body), shape, [axis])

    return [attempt(build, context.lanes)]


def _serial(axis: int, shape: Sequence[Dim], context: Context) -> int:
    """Lanes for an operator that goes along ``axis`` in order: one if the axis is the last."""
    return 1 if axis == len(shape) - 1 else context.lanes


@kernel("ArgMax", "ArgMin")
def lower_arg(node: gs.Node, context: Context) -> list[KernelCall]:
    """ArgMax and ArgMin: the first place, or with select_last_index the last, of the extreme element."""
    source, out = node.inputs[0], node.outputs[0]
    shape = ir.shape(source)
    axis = int(node.attrs.get("axis", 0)) % len(shape)
    last, larger = bool(node.attrs.get("select_last_index", 0)), node.op == "ArgMax"

    def better(x: Expr, best: Expr) -> Expr:
        if larger:
            return x >= best if last else x > best
        return x <= best if last else x < best

    def build(emit: Emitter) -> KernelCall:
        x, result = leaf(source, emit, context), emit.buffer(out.name, "int64")

        def body(run: Run) -> None:
            best, where = emit.local(run.width, x.dtype), emit.local(run.width, "int64")
            emit.store(where, run.lane, int64(0))

            def step(here: list[Expr], at: Expr, _: Expr) -> None:
                value = x.at(here)
                old = tirx.BufferLoad(best, [run.lane])
                first = tirx.Cast("uint8", at.equal(int64(0)))
                wins = emit.bind(tirx.Cast("uint8", better(value, old)) | first)
                won = tirx.NE(wins, constant(0, "uint8"))
                emit.store(where, run.lane, tirx.Select(won, at, tirx.BufferLoad(where, [run.lane])))
                emit.store(best, run.lane, tirx.Select(won, value, tirx.BufferLoad(best, [run.lane])))

            run.each(step)
            emit.store(result, run.place, tirx.BufferLoad(where, [run.lane]))

        return _finish(emit, node, runs(emit, shape, [axis], body), shape, [axis])

    return [attempt(build, _serial(axis, shape, context))]


@kernel("CumSum")
def lower_cumsum(node: gs.Node, context: Context) -> list[KernelCall]:
    """CumSum along a constant axis, exclusive and reverse."""
    source, out = node.inputs[0], node.outputs[0]
    shape, given = ir.shape(source), ir.constant_value(node.inputs[1])
    if given is None:
        raise UnsupportedOperator("CumSum", node.name, "its axis must be constant")
    axis = int(given.reshape(-1)[0]) % len(shape)
    exclusive, reverse = node.attrs.get("exclusive", 0), node.attrs.get("reverse", 0)

    def build(emit: Emitter) -> KernelCall:
        x, result = leaf(source, emit, context), emit.buffer(out.name, dtype_name(out))

        def body(run: Run) -> None:
            total = emit.local(run.width, x.dtype)
            emit.store(total, run.lane, constant(0, x.dtype))

            def step(here: list[Expr], at: Expr, _: Expr) -> None:
                here = list(here)
                if reverse:
                    here[axis] = emit.size(shape[axis]) - int64(1) - at
                before = tirx.BufferLoad(total, [run.lane])
                if exclusive:
                    emit.store(result, emit.ravel(here, shape), before)
                emit.store(total, run.lane, before + x.at(here))
                if not exclusive:
                    emit.store(result, emit.ravel(here, shape), before)

            run.each(step)

        return _finish(emit, node, runs(emit, shape, [axis], body), shape, [axis])

    return [attempt(build, _serial(axis, shape, context))]


@kernel("TopK")
def lower_topk(node: gs.Node, context: Context) -> list[KernelCall]:
    """TopK by insertion into the sorted outputs; of equal elements the one with the smaller index comes first."""
    source = node.inputs[0]
    shape = ir.shape(source)
    axis = int(node.attrs.get("axis", -1)) % len(shape)
    largest = bool(node.attrs.get("largest", 1))
    out_shape = ir.shape(node.outputs[0])

    def build(emit: Emitter) -> KernelCall:
        x = leaf(source, emit, context)
        values, places = (emit.buffer(t.name, dtype_name(t)) for t in node.outputs)
        count = emit.size(out_shape[axis])

        def body(run: Run) -> None:
            filled = emit.local(1, "int64")
            target = emit.local(1, "int64")
            emit.store(filled, int64(0), int64(0))

            def slot(here: list[Expr], i: Expr) -> Expr:
                return emit.ravel([*here[:axis], i, *here[axis + 1 :]], out_shape)

            def step(here: list[Expr], at: Expr, _: Expr) -> None:
                value = x.at(here)
                have = tirx.BufferLoad(filled, [int64(0)])
                emit.store(target, int64(0), have)
                with emit.loop(have) as back:
                    i = emit.bind(have - int64(1) - back)
                    other = tirx.BufferLoad(values, [slot(here, i)])
                    with emit.when(value > other if largest else value < other):
                        with emit.when(i + int64(1) < count):
                            emit.store(values, slot(here, i + int64(1)), tirx.BufferLoad(values, [slot(here, i)]))
                            emit.store(places, slot(here, i + int64(1)), tirx.BufferLoad(places, [slot(here, i)]))
                        emit.store(target, int64(0), i)
                goal = tirx.BufferLoad(target, [int64(0)])
                with emit.when(goal < count):
                    emit.store(values, slot(here, goal), value)
                    emit.store(places, slot(here, goal), at)
                emit.store(filled, int64(0), tirx.min(have + int64(1), count))

            run.each(step)

        return _finish(emit, node, runs(emit, shape, [axis], body), shape, [axis])

    return [attempt(build, 1)]
