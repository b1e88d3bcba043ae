"""What every pass must leave: a graph that can be evaluated, and coda nodes that are what they say."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from coda_edge.epilogue.program import EpilogueProgram
from coda_edge.errors import CodaError, VerificationError
from coda_edge.ir import DOMAIN, Tensor, shape
from coda_edge.symbolic import same, simplify
from coda_edge.window import rows_shape


def check(graph: gs.Graph, what: str) -> None:
    """Raises VerificationError, naming ``what`` made the graph, at the first thing that is wrong with it.

    Each node reads inputs of the graph, constants and results of nodes of the graph, without a cycle; each tensor has one
    producer and, if a node makes it, a dtype and a shape; a Gemm or GroupedConv has as many operands and results as its epilogue.
    """
    waiting = {id(n): {id(p) for t in n.inputs for p in _producers(t)} for n in graph.nodes}
    for node in graph.nodes:
        for tensor in node.inputs:
            _check_operand(graph, waiting, node, tensor, what)
        for tensor in (t for t in node.outputs if t.name):
            if len(tensor.inputs) != 1:
                raise _error(what, node, f"'{tensor.name}' is made by {len(tensor.inputs)} nodes")
            if tensor.dtype is None or tensor.shape is None:
                raise _error(what, node, f"'{tensor.name}' has no dtype or shape")
        if node.domain == DOMAIN and node.op in ("Gemm", "GroupedConv"):
            _check_epilogue(node, what)
            _check_window(node, what)
    for output in graph.outputs:
        if not isinstance(output, gs.Constant) and not output.inputs and not _is_input(graph, output):
            raise VerificationError(
                f"{what} leaves output '{output.name}' that nothing computes: please report the model"
            )
    _check_order(graph, waiting, what)


def _producers(tensor: Tensor) -> list[gs.Node]:
    return [] if isinstance(tensor, gs.Constant) else list(tensor.inputs)


def _is_input(graph: gs.Graph, tensor: Tensor) -> bool:
    return any(tensor is t for t in graph.inputs)


def _check_operand(graph: gs.Graph, nodes: dict[int, set[int]], node: gs.Node, tensor: Tensor, what: str) -> None:
    if isinstance(tensor, gs.Constant) or not tensor.name or _is_input(graph, tensor):
        return
    if not tensor.inputs or any(id(p) not in nodes for p in tensor.inputs):
        raise _error(what, node, f"it reads '{tensor.name}', which nothing computes")


def _check_epilogue(node: gs.Node, what: str) -> None:
    try:
        program = EpilogueProgram.parse(node.attrs["epilogue"])
    except (CodaError, KeyError) as e:
        raise _error(what, node, f"its epilogue is no program: {e}") from e
    # The accumulator is a parameter; the left operand and the weights are inputs.
    if len(program.params) + 1 != len(node.inputs) or len(program.outputs) != len(node.outputs):
        raise _error(
            what,
            node,
            f"it has {len(node.inputs)} inputs and {len(node.outputs)} outputs, and an epilogue of "
            f"{len(program.params)} parameters and {len(program.outputs)} outputs",
        )


def _check_window(node: gs.Node, what: str) -> None:
    if "window" not in node.attrs:
        return
    try:
        rows = rows_shape(shape(node.inputs[0]), node.attrs["window"])
    except CodaError as e:
        raise _error(what, node, f"its rows are no windows: {e}") from e
    expected = simplify(shape(node.inputs[1])[0] * int(node.attrs.get("group", 1)))
    if not same(rows[-1], expected):
        raise _error(what, node, f"its windows have {rows[-1]} elements, its weights are for {expected}")


def _check_order(graph: gs.Graph, waiting: dict[int, set[int]], what: str) -> None:
    ready = [n for n in graph.nodes if not waiting[id(n)]]
    left = {id(n): set(sources) for n, sources in zip(graph.nodes, waiting.values(), strict=True) if sources}
    while ready:
        node = ready.pop()
        for user in {id(u): u for t in node.outputs for u in t.outputs}.values():
            sources = left.get(id(user), set())
            sources.discard(id(node))
            if id(user) in left and not sources:
                del left[id(user)]
                ready.append(user)
    if left:
        node = next(n for n in graph.nodes if id(n) in left)
        raise _error(what, node, "it depends on its own result")


def _error(what: str, node: gs.Node, found: str) -> VerificationError:
    return VerificationError(f"{what} breaks node '{node.name}' ({node.op}): {found}: please report the model")
