"""Kernels of pointwise operators: a Map node, or any single node, is one pass over its output.

An item is a row (all indices but the last) and the last axis is done in vectors; a one-dimensional output is cut into
blocks instead. Row sums within a body are taken once a row. A body that ends in row sums takes them on the way; one that ends in RowMoments stores a row and then takes its
mean and variance in two passes, while it is in cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TypeVar

import numpy as np
import onnx_graphsurgeon as gs
import sympy
from tvm import tirx
from tvm.tirx import Buffer

from .. import ir
from ..frontend import infer
from ..ir import Tensor
from ..symbolic import Dim, simplify
from .emit import SUM, Emitter, Expr, Granule, ScalarLanes, dtype_of, int64
from .kernel import KernelCall
from .registry import (
    ELEMENTWISE,
    Application,
    Context,
    Fold,
    View,
    apply,
    dtype_name,
    identical,
    kernel,
    leaf,
    pointwise,
)

BLOCK = 2048  # elements of an item of a one-dimensional output
GRAIN = 4096  # elements below which a chunk is not worth another thread
_SELECTS = frozenset({"Gather", "GatherND", "GatherElements", "Slice"})
R = TypeVar("R")


@dataclass(frozen=True)
class Body:
    """Pointwise nodes in topological order, and what is wanted of them.

    ``inputs``: for names that the nodes read, the graph's tensors; a name that is missing is the tensor of that name.
    ``outputs``: values of one shape, with the graph's names for them. ``moments``: a value of that shape whose row mean and
    variance are wanted, with the graph's names for those. ``sums``: operator of ``ROW_SUMS``, value and the result's name.
    """

    name: str
    nodes: tuple[gs.Node, ...]
    outputs: tuple[tuple[Tensor, str], ...]
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    moments: tuple[Tensor, str | None, str | None] | None = None
    source: tuple[str, ...] = ()
    sums: tuple[tuple[str, Tensor, str], ...] = ()

    @property
    def value(self) -> Tensor:
        """A tensor of the shape that the kernel runs over."""
        wanted = [t for t, _ in self.outputs] + self._summed()
        return wanted[0] if wanted else self.nodes[-1].outputs[0]

    def leaves(self) -> dict[str, Tensor]:
        """What is read and not computed: by the name that the nodes use, the graph's tensor."""
        made = {t.name for n in self.nodes for t in n.outputs}
        wanted = [t for n in self.nodes for t in n.inputs] + [t for t, _ in self.outputs]
        wanted += self._summed()
        return {t.name: self.inputs.get(t.name, t) for t in wanted if t.name and t.name not in made}

    def _summed(self) -> list[Tensor]:
        """The values whose row statistics are wanted."""
        return [*([self.moments[0]] if self.moments is not None else []), *(t for _, t, _ in self.sums)]


@dataclass(frozen=True)
class RowSum:
    """A sum over a row: of what of each element, and what becomes of the sum and the number of elements."""

    before: Callable[[Expr], Expr] = lambda x: x
    after: Callable[[Expr, Expr], Expr] = lambda total, count: total


ROW_SUMS = {
    "ReduceSum": RowSum(),
    "ReduceMean": RowSum(after=lambda total, count: total / tirx.Cast("float32", count)),
    "ReduceSumSquare": RowSum(before=lambda x: x * x),
}


def attempt(build: Callable[[Emitter], R], lanes: int, emitter: type[Emitter] = Emitter) -> R:
    """``build`` with the widest vectors that its operators allow; ``emitter`` writes the kernel."""
    granule: int | None = None
    while True:
        try:
            return build(emitter(lanes, granule))
        except Granule as run:
            granule = run.size
        except ScalarLanes:
            lanes, granule = 1, None


def lower_node(node: gs.Node, context: Context) -> list[KernelCall]:
    """The kernel of one pointwise node."""
    out = node.outputs[0]
    return [lower_body(Body(node.op.lower(), (node,), ((out, out.name),), source=(node.name,)), context)]


def lower_copy(tensor: Tensor, name: str, context: Context) -> KernelCall:
    """A kernel that copies ``tensor`` (a constant, an input, or values that shapes determine) to the tensor ``name``."""
    return lower_body(Body("copy", (), ((tensor, name),), source=(name,)), context)


@pointwise(*ROW_SUMS)
def row_sum(op: Application) -> View:
    """A row sum that elementwise operators of the same row read: computed once a row, before them."""
    x, rule = op.view(0), ROW_SUMS[op.node.op]

    def at(indices: Sequence[Expr]) -> Expr:
        row = list(indices[:-1])

        def compute() -> Expr:
            size = op.emit.size(x.shape[-1])
            with op.emit.outside(row):
                with op.emit.reduction(SUM, "float32") as total:

                    def add(position: Expr, lane: Expr, width: int) -> None:
                        total.add(rule.before(op.emit.bind(widen(x.at([*row, position])))), lane)

                    op.emit.span(size, add)
                return op.emit.bind(tirx.Cast(op.dtype, rule.after(total.result, size)))

        return op.emit.once(f"{op.node.outputs[0].name} {row}", compute)

    return op.result(at)


@kernel("Map")
def lower_map(node: gs.Node, context: Context) -> list[KernelCall]:
    """The kernels of a ``coda.Map`` node: one for each distinct shape among its outputs."""
    graph: gs.Graph = node.attrs["body"]
    inputs = {inner.name: outer for inner, outer in zip(graph.inputs, node.inputs, strict=True)}
    names = {inner.name: outer.name for inner, outer in zip(graph.outputs, node.outputs, strict=True)}
    known = {**context.values, **context.sources}
    outside = {i.name: known[o.name] for i, o in zip(graph.inputs, node.inputs, strict=True) if o.name in known}
    context = replace(context, values=infer(graph, outside, context.decided).values)
    nodes = ir.in_order(graph)
    results = {t.name for t in graph.outputs}
    ends = [n for n in nodes if any(t.name in results for t in n.outputs)]
    statistics = [n for n in ends if n.op == "RowMoments"]
    sums = [n for n in ends if n.op in ROW_SUMS]
    nodes = [n for n in nodes if not any(n is end for end in (*statistics, *sums))]
    computed = {t.name for n in (*statistics, *sums) for t in n.outputs}
    groups: list[tuple[list[Tensor], gs.Node | None]] = [([], n) for n in statistics]
    for out in graph.outputs:
        if out.name in computed:
            continue
        for members, moments in groups:
            model = moments.inputs[0] if moments is not None else members[0]
            if identical(ir.shape(model), ir.shape(out)):
                members.append(out)
                break
        else:
            groups.append(([out], None))
    calls: list[KernelCall] = []
    for members, moments in groups:
        like = moments.inputs[0] if moments is not None else members[0]
        here = [n for n in sums if identical(ir.shape(like), ir.shape(n.inputs[0]))]
        sums = [n for n in sums if not any(n is h for h in here)]
        wanted = [*members, *([moments.inputs[0]] if moments is not None else []), *(n.inputs[0] for n in here)]
        body = Body(
            "map",
            tuple(_needed(nodes, wanted)),
            tuple((t, names[t.name]) for t in members),
            inputs,
            (moments.inputs[0], *(names.get(t.name) for t in moments.outputs)) if moments is not None else None,
            tuple(n.name for n in graph.nodes),
            tuple((n.op, n.inputs[0], names[n.outputs[0].name]) for n in here),
        )
        calls.append(lower_body(body, context))
    return calls


@kernel("RowMoments")
def lower_moments(node: gs.Node, context: Context) -> list[KernelCall]:
    """Mean and variance of each row of a tensor."""
    mean, var = (t.name for t in node.outputs)
    return [lower_body(Body("moments", (), (), moments=(node.inputs[0], mean, var), source=(node.name,)), context)]


def _needed(nodes: Sequence[gs.Node], wanted: Sequence[Tensor]) -> list[gs.Node]:
    live = {t.name for t in wanted}
    kept: list[gs.Node] = []
    for node in reversed(nodes):
        if any(t.name in live for t in node.outputs):
            kept.append(node)
            live.update(t.name for t in node.inputs)
    return kept[::-1]


def lower_body(body: Body, context: Context) -> KernelCall:
    """The kernel of ``body``."""
    return attempt(lambda emit: _build(body, context, emit), context.lanes, context.emitter)


def _build(body: Body, context: Context, emit: Emitter) -> KernelCall:
    fold = _fold(body)
    shape = fold(ir.shape(body.value))
    leaves = body.leaves()
    views = {name: leaf(t, emit, context, fold) for name, t in leaves.items()}
    apply(body.nodes, views, emit, context, fold)
    outputs = [(views[t.name], emit.buffer(name, dtype_name(t))) for t, name in body.outputs]
    last = shape[-1] if shape else 1
    if emit.granule is not None and not divides(emit.granule, last):
        raise ScalarLanes
    scratch: Dim = 0
    run: Dim = emit.granule or last
    if body.moments is not None or body.sums:
        items, run = _rows_with_statistics(body, views, outputs, shape, emit), last
        kept = body.moments is None or any(t.name == body.moments[0].name for t, _ in body.outputs)
        scratch = 0 if kept else 4 * last
    elif len(shape) < 2 and emit.granule is None:
        items, run = _blocks(outputs, last, shape, emit), BLOCK
    else:
        items = _rows(outputs, shape, emit)
    statistics = (*(body.moments[1:] if body.moments is not None else ()), *(name for _, _, name in body.sums))
    arithmetic = sum(n.op in ELEMENTWISE for n in body.nodes) + 2 * len(statistics)
    return emit.call(
        body.name,
        items,
        [name for name in (*(n for _, n in body.outputs), *statistics) if name is not None],
        grain=max(1, GRAIN // run) if isinstance(run, int) and run else 8,
        scratch=scratch,
        flops=product(shape) * arithmetic,
        traffic=_traffic(body),
        source=body.source,
    )


def _blocks(outputs: Sequence[tuple[View, Buffer]], total: Dim, shape: Sequence[Dim], emit: Emitter) -> Dim:
    with emit.items() as item:
        if isinstance(total, int) and total <= BLOCK:
            first, count = int64(0), int64(total)
        else:
            first = emit.bind(item * int64(BLOCK))
            count = emit.bind(tirx.min(emit.size(total) - first, int64(BLOCK)))

        def body(position: Expr, lane: Expr, width: int) -> None:
            for view, buffer in outputs:
                emit.store(buffer, first + position, view.at([first + position] if shape else []))

        emit.span(count, body)
    return ceil_div(total, BLOCK)


def _rows(outputs: Sequence[tuple[View, Buffer]], shape: Sequence[Dim], emit: Emitter) -> Dim:
    *lead, last = shape
    run = emit.granule
    if run is not None:
        lead, last = [*lead, ratio(last, run)], run
    with emit.items() as item:
        row = emit.unravel(item, lead)

        def body(position: Expr, lane: Expr, width: int) -> None:
            indices = [*row[:-1], row[-1] * int64(run) + position] if run is not None else [*row, position]
            for view, buffer in outputs:
                emit.store(buffer, item * emit.size(last) + position, view.at(indices))

        emit.span(emit.size(last), body)
    return rows_of(lead, last)


def _rows_with_statistics(
    body: Body, views: Mapping[str, View], outputs: Sequence[tuple[View, Buffer]], shape: Sequence[Dim], emit: Emitter
) -> Dim:
    *lead, last = shape
    moments = body.moments
    value = views[moments[0].name] if moments is not None else None
    kept = next((b for v, b in outputs if v is value), None)
    width, run = emit.size(last), emit.granule or last
    with emit.items() as item:
        row, start = emit.unravel(item, lead), item * width
        row_buffer, row_start = kept, start
        if value is not None and kept is None:
            row_buffer, row_start = emit.scratch("float32"), int64(0)

        turns = emit.loop(emit.size(ratio(last, run))) if emit.granule else nullcontext(int64(0))
        with ExitStack() as totals:
            total = totals.enter_context(emit.reduction(SUM, "float32")) if value is not None else None
            sums = [
                (ROW_SUMS[op].before, views[t.name], totals.enter_context(emit.reduction(SUM, "float32")))
                for op, t, _ in body.sums
            ]
            turn = totals.enter_context(turns)

            def first(position: Expr, lane: Expr, width: int) -> None:
                column = turn * emit.size(run) + position
                for view, buffer in outputs:
                    emit.store(buffer, start + column, view.at([*row, column]))
                if value is not None and total is not None:
                    x = value.at([*row, column])
                    if kept is None:
                        emit.store(row_buffer, column, widen(x))
                    total.add(widen(x), lane)
                for before, view, accumulator in sums:
                    accumulator.add(before(emit.bind(widen(view.at([*row, column])))), lane)

            emit.span(emit.size(run), first)
        for (op, t, target), (_, _, accumulator) in zip(body.sums, sums, strict=True):
            result = ROW_SUMS[op].after(accumulator.result, width)
            emit.store(emit.buffer(target, dtype_name(t)), item, tirx.Cast(dtype_name(t), result))
        if moments is None or total is None:
            return product(lead)  # empty rows too have a sum
        mean = emit.bind(total.result / tirx.Cast("float32", width))
        with emit.reduction(SUM, "float32") as squares:

            def second(position: Expr, lane: Expr, width: int) -> None:
                centred = emit.bind(widen(tirx.BufferLoad(row_buffer, [row_start + position])) - mean)
                squares.add(centred * centred, lane)

            emit.span(width, second)
        var = squares.result / tirx.Cast("float32", width)
        for name, result in ((moments[1], mean), (moments[2], var)):
            if name is not None:
                dtype = dtype_name(moments[0])
                emit.store(emit.buffer(name, dtype), item, tirx.Cast(dtype, result))
    return product(lead)


def widen(x: Expr) -> Expr:
    """``x`` as float32, in which statistics are computed."""
    return x if dtype_of(x) == "float32" else tirx.Cast("float32", x)


def rows_of(lead: Sequence[Dim], last: Dim) -> Dim:
    """The rows of a tensor, none if they are empty."""
    empty = sympy.Min(1, last) if not isinstance(last, int) else min(1, last)
    return simplify(product(lead) * empty)


def product(dims: Sequence[Dim]) -> Dim:
    """The number of elements."""
    return simplify(reduce(lambda a, b: a * b, dims, 1))


def ceil_div(dim: Dim, by: int) -> Dim:
    """⌈dim / by⌉."""
    return -(-dim // by) if isinstance(dim, int) else sympy.floor((dim + by - 1) / sympy.Integer(by))


def divides(by: int, dim: Dim) -> bool:
    """Whether ``by`` is a factor of ``dim`` for all sizes."""
    if isinstance(dim, int):
        return dim % by == 0
    return all(c % by == 0 for c in sympy.expand(dim).as_coefficients_dict().values())


def ratio(dim: Dim, by: Dim) -> Dim:
    """``dim / by``, which is whole."""
    return simplify(sympy.sympify(dim) / sympy.sympify(by)) if dim != by else 1


def _fold(body: Body) -> Fold:
    """Which axes the kernel may treat as one: neighbours that every tensor read either has whole or broadcasts over."""
    shape = ir.shape(body.value)
    rank = len(shape)
    if rank < 2 or any(n.op not in ELEMENTWISE for n in body.nodes):
        return tuple
    has = [_present(ir.shape(t), shape) for t in body.leaves().values()]
    if any(h is None for h in has):
        return tuple
    groups: list[list[int]] = [[0]]
    for axis in range(1, rank):
        apart = bool(body.moments or body.sums) and axis == rank - 1
        before = next((a for a in reversed(groups[-1]) if shape[a] != 1), None)
        joined = shape[axis] == 1 or before is None or all(h[axis] == h[before] for h in has if h is not None)
        groups[-1].append(axis) if joined and not apart else groups.append([axis])

    def fold(dims: Sequence[Dim]) -> tuple[Dim, ...]:
        padded = [1] * (rank - len(dims)) + list(dims)
        return tuple(product([padded[a] for a in group]) for group in groups)

    return fold


def _present(dims: Sequence[Dim], shape: Sequence[Dim]) -> list[bool] | None:
    """For each axis of ``shape`` whether a tensor of ``dims`` has it; None if it does not broadcast to ``shape``."""
    if len(dims) > len(shape):
        return None
    padded = [1] * (len(shape) - len(dims)) + list(dims)
    return [d != 1 for d in padded]


def _traffic(body: Body) -> Dim:
    """Bytes read and written, a gathered table counting as what is taken of it."""
    picked: dict[str, Dim] = {}
    for node in body.nodes:
        if node.op in _SELECTS:
            picked[node.inputs[0].name] = product(ir.shape(node.outputs[0]))
    total: Dim = 0
    for name, tensor in body.leaves().items():
        total += picked.get(name, product(ir.shape(tensor))) * np.dtype(tensor.dtype).itemsize
    for tensor, _ in body.outputs:
        total += product(ir.shape(tensor)) * np.dtype(tensor.dtype).itemsize
    return simplify(total)
