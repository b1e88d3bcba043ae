"""A gate and what it gates are one GEMM over interleaved weights, with a pairwise epilogue.

Rule: where a Gemm reads the only output of another Gemm on the same left operand as a whole-tensor operand of its epilogue, and nobody
else reads that output, both are one Gemm: the columns of their weights alternate (even ones the reader's), the first epilogue runs on the
odd columns, the second on the even ones, with the value in place of the operand. SwiGLU, GeGLU, ReGLU and every other product of two
projections fall out, whatever the activation.

Conditions: both weights are ``[K, N]`` of one dtype; the first epilogue stores one whole tensor and only does elementwise and vector steps.
Refused: a first epilogue with whole-tensor operands, pairs, reductions, column ranges or head layouts; a second one with pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge.epilogue.builder import Builder
from coda_edge.epilogue.ops import Group
from coda_edge.epilogue.program import Argument, EpilogueProgram, Kind
from coda_edge.ir import (
    DOMAIN,
    GraphEditor,
    Tensor,
    in_order,
    producer,
    remove_nodes,
    sole_consumer,
    sort,
)
from coda_edge.weights import choose_columns

from .base import Pass, PassLog, sources


@dataclass(frozen=True)
class _Pair:
    gated: gs.Node
    gate: gs.Node
    operand: str  # the gate's parameter that is the gated product


def run(graph: gs.Graph, log: PassLog) -> int:
    """Joins every such pair; returns how many."""
    editor = GraphEditor(graph)
    count = 0
    for node in in_order(graph):
        pair = _pair(graph, node) if node.op == "Gemm" and node.domain == DOMAIN else None
        if pair is not None:
            _join(editor, pair)
            count += 1
    if count:
        sort(graph)
    return count


def _pair(graph: gs.Graph, gate: gs.Node) -> _Pair | None:
    program = EpilogueProgram.parse(gate.attrs["epilogue"])
    if any(s.operator.group is Group.PAIRWISE for s in program.steps):
        return None
    for param, tensor in zip(program.params[1:], gate.inputs[2:], strict=True):
        gated = producer(tensor)
        if param.kind is not Kind.TILE or gated is None or gated.op != "Gemm" or gated.domain != DOMAIN:
            continue
        same_shape = gated.inputs[1].shape == gate.inputs[1].shape and gated.inputs[1].dtype == gate.inputs[1].dtype
        if gated.inputs[0] is gate.inputs[0] and same_shape and _plain(gated) and sole_consumer(graph, tensor) is gate:
            return _Pair(gated, gate, param.name)
    return None


def _plain(node: gs.Node) -> bool:
    program = EpilogueProgram.parse(node.attrs["epilogue"])
    (first, *rest) = program.outputs
    return (
        not rest
        and first.columns is None
        and first.heads is None
        and all(p.kind is not Kind.TILE for p in program.params[1:])
        and all(s.operator.group not in (Group.PAIRWISE, Group.REDUCE) for s in program.steps)
    )


def _join(editor: GraphEditor, pair: _Pair) -> None:
    builder = Builder(params=[EpilogueProgram.parse(pair.gate.attrs["epilogue"]).params[0]])
    operands: dict[str, Tensor] = {}
    odd = _inline(builder, operands, pair.gated, builder.add("odd", "acc"), {})
    (gated,) = odd.values()
    values = _inline(builder, operands, pair.gate, builder.add("even", "acc"), {pair.operand: gated})
    for output in EpilogueProgram.parse(pair.gate.attrs["epilogue"]).outputs:
        builder.output_like(output, values[output.name])
    program = builder.build(drop_unused_params=True)
    columns = np.arange(2 * int(pair.gate.inputs[1].shape[1])).reshape(2, -1).T.reshape(-1)
    inputs = [
        pair.gate.inputs[0],
        choose_columns(
            editor, f"{pair.gate.inputs[1].name}.gated", [pair.gate.inputs[1], pair.gated.inputs[1]], columns
        ),
        *(operands[p.name] for p in program.params[1:]),
    ]
    outputs = list(pair.gate.outputs)
    nodes = [pair.gated, pair.gate]
    name, source = pair.gate.name, sources(nodes)
    remove_nodes(editor.graph, nodes)
    editor.node("Gemm", inputs, outputs, f"{name}.gated", domain=DOMAIN, epilogue=str(program), source=source)


def _inline(
    builder: Builder, operands: dict[str, Tensor], node: gs.Node, acc: str, bound: dict[str, str]
) -> dict[str, str]:
    """Appends the epilogue of ``node`` on ``acc``; a tensor that is an operand already is not made one again."""
    program = EpilogueProgram.parse(node.attrs["epilogue"])
    bindings: dict[str, Argument] = {program.params[0].name: acc, **bound}
    for param, tensor in zip(program.params[1:], node.inputs[2:], strict=True):
        if param.name in bindings:
            continue
        known = next((name for name, t in operands.items() if t is tensor), None)
        if known is None:
            known = builder.declare(replace(param, name=f"{param.kind.value}{len(operands)}"))
            operands[known] = tensor
        bindings[param.name] = known
    return builder.inline(program, bindings)


PASS = Pass("merge_gates", run)
