"""Why a kernel stands on its own: the operators that no GEMM and no attention took, each with the reason in one line."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_graphsurgeon as gs

from . import frontend
from .ir import DOMAIN, ELEMENTWISE, VIEWS, Tensor, made_by, producer, same_shape, shape
from .passes import PassLog
from .report import Unfused
from .window import rows_shape

_ROW_STATISTICS = ("RowMoments", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceSumSquare")
_FUSED = ("Gemm", "GroupedConv", "Attention")
_CALLED = {"Map": "another kernel that stands on its own", "Attention": "an attention"}


def unfused(graph: gs.Graph, log: PassLog) -> list[Unfused]:
    """Kernels of the rewritten ``graph`` that are neither GEMM nor attention, each with the reason.

    Reasons are the passes' own refusals, from ``log``; where none of them looked at the operators, what they read tells.
    """
    info = frontend.infer(graph)
    found = []
    for node in graph.nodes:
        if node.domain == DOMAIN and node.op in _FUSED:
            continue
        if all(o.name in info.values for o in node.outputs) or (not node.domain and node.op in VIEWS):
            continue
        inside = _inside(node)
        ops = "+".join(dict.fromkeys(n.op for n in inside))
        found.append(Unfused(ops, node.name, _refusal(node, inside, log) or _reason(node, inside)))
    return found


def _inside(node: gs.Node) -> list[gs.Node]:
    """The operators that ``node`` does, in order."""
    body: list[gs.Node] = node.attrs["body"].nodes if node.op == "Map" else [node]
    return body


def _refusal(node: gs.Node, inside: Iterable[gs.Node], log: PassLog) -> str | None:
    return next((reason for n in (node, *inside) for reason in log.reasons(n.name)), None)


def _reason(node: gs.Node, inside: list[gs.Node]) -> str:
    if not _behind(node):
        return "computed from the model's inputs, before any GEMM"
    sources = {t.name: made for t in node.inputs if (made := _maker(t)) is not None}
    for name, made in sources.items():
        if made.domain == DOMAIN and made.op == "Gemm":
            return _behind_gemm(inside, name, made)
    others = list(dict.fromkeys(_called(made) for made in sources.values()))
    return f"it reads the result of {' and '.join(others)}, which has no epilogue"


def _behind_gemm(inside: list[gs.Node], name: str, gemm: gs.Node) -> str:
    """Why what reads ``name``, which ``gemm`` makes, is not its epilogue."""
    read = next(t for n in inside for t in n.inputs if t.name == name)
    reader = _first_reader(inside, read)
    while reader.op in VIEWS and any(t.name == reader.outputs[0].name for n in inside for t in n.inputs):
        read = reader.outputs[0]
        reader = _first_reader(inside, read)
    if reader.op not in ELEMENTWISE and reader.op not in _ROW_STATISTICS:
        return f"{reader.op} of '{name}' is no step of an epilogue"
    tile = (*rows_shape(shape(gemm.inputs[0]), gemm.attrs.get("window"))[:-1], shape(gemm.inputs[1])[-1])
    if same_shape(shape(read), (*tile[:-1], 1)):
        return f"'{name}' is a statistic of whole rows, which the GEMM before knows only when it is done"
    dims, rows = (f"[{', '.join(map(str, d))}]" for d in (shape(read), tile))
    return f"{reader.op} works on '{name}' as {dims}, and the GEMM that makes it on rows of {rows}"


def _first_reader(inside: list[gs.Node], tensor: Tensor) -> gs.Node:
    return next(n for n in inside if any(t.name == tensor.name for t in n.inputs))


def _maker(tensor: Tensor) -> gs.Node | None:
    """The node with a kernel that ``tensor`` comes from, behind views."""
    node = producer(tensor)
    while node is not None and not node.domain and (view := made_by(tensor, *VIEWS)) is not None:
        tensor = view.inputs[0]
        node = producer(tensor)
    return node


def _called(node: gs.Node) -> str:
    if node.domain != DOMAIN:
        return "a product of run-time tensors" if node.op == "MatMul" else str(node.op)
    return _CALLED.get(node.op, str(node.op))


def _behind(node: gs.Node) -> bool:
    """Whether ``node`` depends on a GEMM's result."""
    stack, seen = [node], set()
    while stack:
        n = stack.pop()
        if id(n) in seen:
            continue
        seen.add(id(n))
        if n is not node and n.domain == DOMAIN and n.op == "Gemm":
            return True
        stack.extend(s for s in (producer(t) for t in n.inputs) if s is not None)
    return False
