"""GEMMs that read one tensor become one GEMM over joined weights.

Rule: Gemms with the same left operand are one Gemm: their weights are joined along N, the joint program makes of the joint accumulator
what each of theirs makes of it, and each output is a column range of such a value, in its own layout. So q, k and v are one
GEMM, also where q and k are rotated and v is not. What several programs compute alike is computed once.

The i-th column operands of all programs are joined along N, zero where a program has none. Rows, scalars and periodic tiles that are the
same tensor are one operand.

Conditions: the weights are constants of one dtype; column operands are constants; none of the Gemms depends on another; each one's columns
begin at a whole pair, and period, of what its program does.
Refused: epilogues that read a whole tensor or reduce the row (a joint row is not theirs).
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge.epilogue.builder import Builder
from coda_edge.epilogue.ops import Group
from coda_edge.epilogue.program import Argument, EpilogueProgram, Kind, Param
from coda_edge.errors import ShapeError
from coda_edge.ir import DOMAIN, Array, GraphEditor, Tensor, constant_value, descendants, in_order, remove_nodes, sort
from coda_edge.weights import choose_columns

from .base import Pass, PassLog, sources


@dataclass(frozen=True)
class _Candidate:
    node: gs.Node
    program: EpilogueProgram
    columns: int

    @property
    def key(self) -> Hashable:
        """Equal for Gemms that can be joined."""
        return id(self.node.inputs[0]), str(self.node.inputs[1].dtype), self.program.params[0].dtype

    def scaled(self, value: str, columns: int) -> int:
        """How many columns of ``value`` belong to the first ``columns`` of the accumulator."""
        return columns * self.program.width(value, self.columns) // self.columns

    @property
    def alignment(self) -> int:
        """What the first column in a joint accumulator must be a multiple of."""
        program, n = self.program, self.columns
        units = [(name, 1) for name, kind in program.kinds().items() if kind in (Kind.TILE, Kind.COL)]
        units += [(p.name, p.period) for p in program.params if p.period is not None]
        units += [(o.value, 2) for o in program.outputs if o.halves]
        found = max(1, program.head)
        for value, unit in units:
            width = program.width(value, n)
            found = math.lcm(found, unit * n // math.gcd(unit * n, width))
        return found


def run(graph: gs.Graph, log: PassLog) -> int:
    """Joins what can be joined; returns the number of Gemms that went."""
    groups: dict[Hashable, list[_Candidate]] = {}
    for node in in_order(graph):
        if node.op == "Gemm" and node.domain == DOMAIN:
            candidate = _candidate(node)
            if candidate is not None:
                groups.setdefault(candidate.key, []).append(candidate)
    editor = GraphEditor(graph)
    gone = sum(_join_most(editor, log, _independent(group)) for group in groups.values())
    if gone:
        sort(graph)
    return gone


def _candidate(node: gs.Node) -> _Candidate | None:
    program = EpilogueProgram.parse(node.attrs["epilogue"])
    operands = zip(program.params[1:], node.inputs[2:], strict=True)
    if constant_value(node.inputs[1]) is None or any(s.operator.group is Group.REDUCE for s in program.steps):
        return None
    for param, tensor in operands:
        whole = param.kind is Kind.TILE and param.period is None
        if whole or (param.kind is Kind.COL and constant_value(tensor) is None):
            return None
    return _Candidate(node, program, int(node.inputs[1].shape[1]))


def _independent(group: list[_Candidate]) -> list[_Candidate]:
    """The members of ``group`` that do not depend on each other, first come first; those that must begin at round columns first."""
    chosen: list[_Candidate] = []
    members: set[int] = set()
    below: set[int] = set()
    for candidate in group:
        after = descendants(candidate.node)
        if id(candidate.node) not in below and not members & after:
            chosen.append(candidate)
            members.add(id(candidate.node))
            below |= after
    return sorted(chosen, key=lambda c: -c.alignment)


def _join_most(editor: GraphEditor, log: PassLog, group: list[_Candidate]) -> int:
    """Joins as many of ``group`` as lie well side by side, from the first on; returns how many Gemms went."""
    while len(group) > 1:
        try:
            joint = _Joint(group)
        except ShapeError as why:
            log.refuse(PASS.name, group[-1].node, f"its columns do not lie well beside others': {why}")
            group = group[:-1]
            continue
        joint.replace(editor)
        return len(group) - 1
    return 0


class _Joint:
    """The Gemm that is all of ``group``. Raises ShapeError if widths or periods do not allow it."""

    def __init__(self, group: list[_Candidate]) -> None:
        self._group = group
        self._columns = sum(c.columns for c in group)
        self._builder = Builder(params=[group[0].program.params[0]])
        self._operands: dict[str, Tensor] = {}
        self._shared: dict[Hashable, str] = {}
        self._joined: dict[str, Array] = {}
        self._outputs: list[gs.Variable] = []
        start = 0
        for candidate in group:
            if start % candidate.alignment:
                raise ShapeError(f"column {start} is no multiple of {candidate.alignment}")
            self._add(candidate, start)
            start += candidate.columns
        self.program = self._builder.build()
        self.program.check(self._columns)

    def replace(self, editor: GraphEditor) -> None:
        """Puts the joint Gemm in the place of all."""
        nodes = [c.node for c in self._group]
        first = nodes[0]
        weights = choose_columns(editor, f"{first.inputs[1].name}.joined", [n.inputs[1] for n in nodes])
        inputs = [first.inputs[0], weights]
        for param in self.program.params[1:]:
            operand = self._operands[param.name]
            if param.name in self._joined:
                operand = editor.constant(f"{operand.name}.joined", self._joined[param.name])
            inputs.append(operand)
        name, source = first.name, sources(nodes)
        remove_nodes(editor.graph, nodes)
        editor.node(
            "Gemm", inputs, self._outputs, f"{name}.joined", domain=DOMAIN, epilogue=str(self.program), source=source
        )

    def _add(self, candidate: _Candidate, start: int) -> None:
        program = candidate.program
        bindings: dict[str, Argument] = {program.params[0].name: self._builder.params[0].name}
        for param, tensor in zip(program.params[1:], candidate.node.inputs[2:], strict=True):
            if param.kind is Kind.COL:
                bindings[param.name] = self._column(candidate, start, param, tensor)
            else:
                bindings[param.name] = self._operand((id(tensor), replace(param, name="")), param, tensor)
        values = self._builder.inline(program, bindings)
        for output, tensor in zip(program.outputs, candidate.node.outputs, strict=True):
            c0, c1 = output.columns or (0, program.width(output.value, candidate.columns))
            at = candidate.scaled(output.value, start)
            stored = replace(output, name=f"y{len(self._outputs)}", columns=(at + c0, at + c1))
            self._builder.output_like(stored, values[output.name])
            self._outputs.append(tensor)

    def _operand(self, key: Hashable, param: Param, tensor: Tensor) -> str:
        """The joint parameter for ``key``, which is made for ``tensor`` if there is none yet."""
        if key not in self._shared:
            name = self._builder.declare(replace(param, name=f"{param.kind.value}{len(self._operands)}"))
            self._shared[key] = name
            self._operands[name] = tensor
        return self._shared[key]

    def _column(self, candidate: _Candidate, start: int, param: Param, tensor: Tensor) -> str:
        """The joint column operand that holds ``tensor`` in the candidate's columns: the first of its width that is free there."""
        width = candidate.program.width(param.name, candidate.columns)
        before = candidate.program.params[: candidate.program.params.index(param)]
        alike = [p for p in before if p.kind is Kind.COL and p.dtype == param.dtype]
        index = sum(candidate.program.width(p.name, candidate.columns) == width for p in alike)
        total = candidate.scaled(param.name, self._columns)
        name = self._operand(("col", param.dtype, total, index), param, tensor)
        value = constant_value(tensor)
        assert value is not None
        joined = self._joined.setdefault(name, np.zeros(total, value.dtype))
        at = candidate.scaled(param.name, start)
        joined[at : at + width] = np.broadcast_to(value.reshape(-1), (width,))
        return name


PASS = Pass("merge_projections", run)
