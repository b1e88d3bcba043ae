"""GEMMs that read one tensor and do the same to it become one GEMM over joined weights.

Rule: Gemms with the same left operand and the same epilogue program, but for the values of column operands, are one Gemm: weights and
column operands are joined along N, and each output is a column range of the joint tile, in its own layout. So q, k and v are one GEMM.

Conditions: the weights are float32; row and scalar operands are the same tensors; none of the Gemms depends on another.
Refused: epilogues that read a whole tensor, reduce the row, or pair columns (a joint row is not theirs).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge.epilogue.builder import Builder
from coda_edge.epilogue.ops import Group
from coda_edge.epilogue.program import EpilogueProgram, Kind
from coda_edge.ir import DOMAIN, GraphEditor, constant_value, descendants, in_order, remove_nodes, sort

from .base import Pass, PassLog, sources


@dataclass(frozen=True)
class _Candidate:
    node: gs.Node
    program: EpilogueProgram
    columns: int

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for Gemms that can be joined: left operand, program without its stores, operands that are not columns."""
        stem = Builder(self.program)
        for output in self.program.outputs:
            stem.output(output.name, output.value)
        operands = zip(self.program.params[1:], self.node.inputs[2:], strict=True)
        return (
            id(self.node.inputs[0]),
            str(stem.build()),
            tuple(id(t) if p.kind is not Kind.COL else t.dtype for p, t in operands),
        )


def run(graph: gs.Graph, log: PassLog) -> int:
    """Joins what can be joined; returns the number of Gemms that went."""
    groups: dict[tuple[object, ...], list[_Candidate]] = {}
    for node in in_order(graph):
        if node.op == "Gemm" and node.domain == DOMAIN:
            candidate = _candidate(node)
            if candidate is not None:
                groups.setdefault(candidate.key, []).append(candidate)
    editor = GraphEditor(graph)
    gone = 0
    for group in groups.values():
        joined = _independent(group)
        if len(joined) > 1:
            _join(editor, joined)
            gone += len(joined) - 1
    if gone:
        sort(graph)
    return gone


def _candidate(node: gs.Node) -> _Candidate | None:
    program = EpilogueProgram.parse(node.attrs["epilogue"])
    operands = list(zip(program.params[1:], node.inputs[2:], strict=True))
    if any(s.operator.group in (Group.PAIRWISE, Group.REDUCE) for s in program.steps):
        return None
    if any(p.kind is Kind.TILE or (p.kind is Kind.COL and constant_value(t) is None) for p, t in operands):
        return None
    return _Candidate(node, program, int(node.inputs[1].shape[1]))


def _independent(group: list[_Candidate]) -> list[_Candidate]:
    """The members of ``group``, in order, that do not depend on one before."""
    chosen: list[_Candidate] = []
    below: set[int] = set()
    for candidate in group:
        if id(candidate.node) not in below:
            chosen.append(candidate)
            below |= descendants(candidate.node)
    return chosen


def _join(editor: GraphEditor, group: list[_Candidate]) -> None:
    first = group[0]
    weights = np.concatenate([constant_value(c.node.inputs[1]) for c in group], axis=1)
    inputs = [first.node.inputs[0], editor.constant(f"{first.node.inputs[1].name}.joined", weights)]
    for i, param in enumerate(first.program.params[1:], start=2):
        operand = first.node.inputs[i]
        if param.kind is Kind.COL:
            joined = np.concatenate([_column(c, i) for c in group])
            operand = editor.constant(f"{operand.name}.joined", joined)
        inputs.append(operand)
    builder = Builder(first.program)
    for output in first.program.outputs:
        builder.drop_output(output.name)
    outputs: list[gs.Variable] = []
    start = 0
    for candidate in group:
        for output, tensor in zip(candidate.program.outputs, candidate.node.outputs, strict=True):
            c0, c1 = output.columns or (0, candidate.columns)
            value = next(o.value for o in first.program.outputs if o.name == output.name)
            builder.output(f"y{len(outputs)}", value, (start + c0, start + c1), output.heads)
            outputs.append(tensor)
        start += candidate.columns
    name = first.node.name
    nodes = [c.node for c in group]
    source = sources(nodes)
    remove_nodes(editor.graph, nodes)
    editor.node("Gemm", inputs, outputs, f"{name}.joined", domain=DOMAIN, epilogue=str(builder.build()), source=source)


def _column(candidate: _Candidate, index: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    value = constant_value(candidate.node.inputs[index])
    assert value is not None
    return np.broadcast_to(value.reshape(-1), (candidate.columns,))


PASS = Pass("merge_projections", run)
