"""What a rewritten model costs and contains, for the report: kernels, traffic, memory, what was fused and what was not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from . import frontend
from .frontend.fold import fold_constants, inline_constants
from .frontend.half import import_sized
from .ir import DOMAIN, constant_value, own_values, shape
from .passes import PassLog
from .report import Fused, Report
from .symbolic import Dim, evaluate
from .why import unfused
from .window import Window

if TYPE_CHECKING:
    from .lower import Lowered

# Elements above which a constant is a weight, and no size.
_LARGE = 1024


def account(original: gs.Graph, graph: gs.Graph, log: PassLog, lowered: Lowered, sizes: Mapping[str, int]) -> Report:
    """The report of ``graph``, made from ``original`` (by ``outline``) by the passes that wrote ``log`` and lowered to ``lowered``, at ``sizes``."""
    plan = lowered.plan
    values = plan.exprs.evaluate(sizes)
    ops = Counter(n.op for n in graph.nodes if n.domain == DOMAIN)
    return Report(
        nodes_before=len(original.nodes),
        kernels=len(plan.steps),
        gemm=ops["Gemm"],
        attention=ops["Attention"],
        target="",
        seconds=0.0,
        bytes_before=_bytes_before(_sized_alike(original, graph), sizes),
        bytes_after=sum(values[s.bytes] for s in plan.steps),
        weights_bytes=int(lowered.constants.nbytes),
        arena_bytes=lowered.arena_bytes(sizes),
        fused=_fused(graph),
        unfused=unfused(graph, log),
        sizes=dict(sizes),
    )


def outline(loaded: onnx.ModelProto) -> gs.Graph:
    """``loaded`` as a graph for counting: zeros, which take no memory, stand for its weights."""
    graph = import_sized(loaded)
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Constant) and prod(tensor.shape) > _LARGE:
            tensor.values = np.broadcast_to(np.zeros((), tensor.dtype), tensor.shape)
    own_values(graph)
    return graph


def _sized_alike(original: gs.Graph, graph: gs.Graph) -> gs.Graph:
    """``original`` with the sizes that the inputs of ``graph`` have: those that were given as numbers, equal ones under one name."""
    shapes = {t.name: t.shape for t in graph.inputs}
    for tensor in original.inputs:
        tensor.shape = shapes.get(tensor.name, tensor.shape)
    return original


def _bytes_before(original: gs.Graph, sizes: Mapping[str, int]) -> int:
    """Bytes that one run moves if every ONNX node reads its inputs and writes its outputs once; weights included. ``original`` is folded."""
    inline_constants(original)
    fold_constants(original)
    info = frontend.infer(original)
    total = 0
    for node in original.nodes:
        if all(o.name in info.values for o in node.outputs):
            continue
        for tensor in (*node.inputs, *node.outputs):
            if not tensor.name or tensor.name in info.values:
                continue
            dims = shape(tensor) if constant_value(tensor) is not None else info.shapes.get(tensor.name, ())
            total += _elements(dims, sizes) * (np.dtype(tensor.dtype).itemsize if tensor.dtype is not None else 4)
    return total


def _elements(dims: tuple[Dim, ...], sizes: Mapping[str, int]) -> int:
    count = 1
    for dim in dims:
        known = isinstance(dim, int) or all(s.name in sizes for s in dim.free_symbols)
        count *= evaluate(dim, sizes) if known else 1
    return count


def _fused(graph: gs.Graph) -> list[Fused]:
    """The fused kernels, alike ones counted together."""
    groups: dict[tuple[str, tuple[str, ...]], int] = {}
    for node in graph.nodes:
        if node.domain == DOMAIN and node.op != "RowMoments":
            key = (_title(node), tuple(s.split(" ", 1)[0] for s in node.attrs.get("source", ())))
            groups[key] = groups.get(key, 0) + 1
    return [Fused(kernel, count, sources) for (kernel, sources), count in groups.items()]


def _title(node: gs.Node) -> str:
    if node.op == "Gemm":
        k, n = node.inputs[1].shape
        if (text := node.attrs.get("window")) is not None:
            window = Window.parse(text)
            return f"convolution {'×'.join(map(str, window.kernel))}, {k // window.taps}→{n}"
        return f"GEMM {k}→{n}"
    if node.op == "GroupedConv":
        kernel = "×".join(map(str, Window.parse(node.attrs["window"]).kernel))
        return f"convolution {kernel} in {node.attrs['group']} groups, {shape(node.inputs[0])[-1]}→{node.inputs[1].shape[1]}"
    if node.op == "Attention":
        dims = shape(node.inputs[0])
        return f"attention, {dims[1]} heads of {dims[3]}"
    return "map"
