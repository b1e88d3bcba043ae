"""Control flow without control: an If of known condition is its branch, any other is both branches and a choice.

1. An If whose condition follows from constants and sizes is replaced by the branch taken.
2. One whose condition data decides is computed both ways, and ``Where`` picks each result. Both branches must give results of the same
   dtypes and shapes, and neither may fail or draw random numbers: no gathers or scatters by indices that are computed.
3. Where they do otherwise, or are large, the branch that is not taken works on nothing (``gates``), if a dynamic size allows it.
   Sizes that only one branch needs to be equal are then so only there.
4. A Loop or Scan is its body as often as it runs (``loops``); what repeats as data decides is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import partial

import numpy as np
import onnx_graphsurgeon as gs
import sympy

from .. import ir
from ..errors import UnsupportedOperator
from ..symbolic import Dim, nonnegative, same
from . import gates, loops
from .equalities import Equalities, Known
from .fold import RANDOM, inline_constants
from .shapes import Call, SymbolicInfo, Type, infer_nested, objects, shape_rule
from .sizes import SizeEmitter

_CONTROL_FLOW = ("If", "Loop", "Scan", "SequenceMap")
# Operators that fail for some indices; of the branch not taken they might be any.
_INDEXED = frozenset({"Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "OneHot", "Resize"})
# Branches of more nodes are not both computed if that can be helped.
_SMALL = 48
_ADVICE = "export the model without control flow, or pin sizes with --shape"


@shape_rule("If")
def _if(call: Call) -> list[Type]:
    condition = call.value(0)
    if condition is not None:
        return infer_nested(call, _branch(call.node, bool(condition.item())))
    results, gated = _infer_apart(call)
    if gated:
        return [
            (
                kind,
                tuple(
                    d if ir.same_shape([d], [o]) else call.fresh(axis, index)
                    for axis, (d, o) in enumerate(zip(dims, others, strict=True))
                ),
            )
            for index, ((kind, dims), (_, others)) in enumerate(zip(*results, strict=True))
        ]
    _check_branches(call.node)
    for (kind, dims), (other, others) in zip(*results, strict=True):
        if np.dtype(kind) != np.dtype(other) or not ir.same_shape(dims, others):
            why = f"data decides between results of {kind}{list(dims)} and {other}{list(others)}"
            raise UnsupportedOperator("If", call.name, f"{why}: {_ADVICE}")
    return results[0]


def _infer_apart(call: Call) -> tuple[list[list[Type]], bool]:
    """The types of both branches' results, and whether only one branch is to be computed.

    If so, sizes that one branch needs to be equal may be others in the other, and what each knows of them is kept in ``SymbolicInfo.apart``.
    """
    equal, info, node = call.state.equal, call.state.info, call.node
    before, data, sources, count = dict(equal.known), dict(info.data), dict(info.sources), len(info.constraints)
    results, found = [], []
    for branch in gates.branches(node):
        equal.known = dict(before)
        types = infer_nested(call, branch)
        results.append([(kind, tuple(map(equal.resolve, dims))) for kind, dims in types])
        _resolve_nested(call, branch)
        found.append(equal.known)
    equal.known = dict(before)

    def dims(tensor: ir.Tensor) -> Sequence[Dim]:
        return ir.shape(tensor) if isinstance(tensor, gs.Constant) else call.types[tensor.name][1]

    if _is_gated(node, dims):
        info.constraints[count:] = [c for c in info.constraints[count:] if c.relation != "="]
        info.apart[node.outputs[0].name] = _keep_apart(equal, found, partial(gates.can_differ, node, dims))
        return results, True
    if any(known != before for known in found):
        del info.constraints[count:]
        info.data, info.sources = data, sources
        results = [infer_nested(call, branch) for branch in gates.branches(node)]
    return results, False


def _keep_apart(
    equal: Equalities, found: Sequence[Known], can_differ: Callable[[sympy.Expr], bool]
) -> tuple[Known, Known]:
    """What only one branch needs of sizes that can differ, for both; the rest of what was ``found`` is put into ``equal``."""
    own: tuple[Known, Known] = ({}, {})
    for apart, known, other in zip(own, found, found[::-1], strict=True):
        elsewhere = Equalities(())
        elsewhere.known = other
        for term, value in known.items():
            common = same(elsewhere.resolve(term), elsewhere.resolve(value))
            if not isinstance(term, sympy.Symbol):
                equal.known[term] = value
            elif common or not can_differ(term) or not nonnegative(value):
                equal.equate(term, value)
            else:
                apart[term] = value
    return own


def _resolve_nested(call: Call, graph: gs.Graph) -> None:
    """Writes what is known of sizes to all that ``graph`` computes."""
    resolve, values = call.state.equal.resolve, call.state.info.values
    for node in graph.nodes:
        for tensor in node.outputs:
            if tensor.name in call.types:
                kind, dims = call.types[tensor.name]
                call.types[tensor.name] = kind, tuple(map(resolve, dims))
            if tensor.name in values:
                value = values[tensor.name]
                values[tensor.name] = objects(
                    [resolve(v) if isinstance(v, sympy.Expr) else v for v in value.flat], value.shape
                )
        for inner in node.attrs.values():
            if isinstance(inner, gs.Graph):
                _resolve_nested(call, inner)


def _is_gated(node: gs.Node, dims: gates.Dims) -> bool:
    """Whether only the branch taken is to be computed, and that can be had."""
    pairs = list(zip(*(branch.outputs for branch in gates.branches(node)), strict=True))
    if any(
        len(dims(a)) != len(dims(b)) or np.dtype(a.dtype or np.float32) != np.dtype(b.dtype or np.float32)
        for a, b in pairs
    ):
        return False
    small = all(len(branch.nodes) <= _SMALL for branch in gates.branches(node))
    alike = all(ir.same_shape(dims(a), dims(b)) for a, b in pairs)
    return not (small and alike and _refusal(node) is None) and gates.gating_size(node, dims) is not None


def _branch(node: gs.Node, condition: bool) -> gs.Graph:
    return node.attrs["then_branch" if condition else "else_branch"]


def _check_branches(node: gs.Node) -> None:
    """Raises UnsupportedOperator for a branch that must not be computed in vain."""
    why = _refusal(node)
    if why is not None:
        raise UnsupportedOperator("If", node.name, f"{why}: {_ADVICE}")


def _refusal(node: gs.Node) -> str | None:
    """Why a branch must not be computed in vain, if so."""
    for inner in (n for branch in gates.branches(node) for n in branch.nodes):
        indexed = inner.op in _INDEXED and len(inner.inputs) > 1 and not _is_constant(inner.inputs[1])
        if inner.op in RANDOM or inner.op in _CONTROL_FLOW[1:] or inner.domain or indexed:
            return f"data decides whether {inner.op} (node '{inner.name}') is to be computed"
        why = _refusal(inner) if inner.op == "If" else None
        if why is not None:
            return why
    return None


def _is_constant(tensor: ir.Tensor) -> bool:
    return isinstance(tensor, gs.Constant) or ir.made_by(tensor, "Constant") is not None


def name_apart(graph: gs.Graph) -> None:
    """Gives the tensors of nested graphs names of their own: two branches may have the same."""
    names = ir.Names(graph)

    def visit(inner: gs.Graph) -> None:
        for tensor in (*inner.inputs, *(t for n in inner.nodes for t in n.outputs if t.name)):
            tensor.name = names.fresh(tensor.name)
        for nested in _nested(inner):
            visit(nested)

    for inner in _nested(graph):
        visit(inner)


def _nested(graph: gs.Graph) -> list[gs.Graph]:
    return [
        g
        for n in graph.nodes
        if n.op in _CONTROL_FLOW and not n.domain
        for g in n.attrs.values()
        if isinstance(g, gs.Graph)
    ]


def inline_branches(graph: gs.Graph, info: SymbolicInfo) -> int:
    """Replaces each If, Loop and Scan by what it computes; returns how many. ``info``: from ``infer`` of this graph.

    Raises UnsupportedOperator for control flow that cannot be written so.
    """
    found = [n for n in graph.nodes if n.op in _CONTROL_FLOW and not n.domain]
    if not found:
        return 0
    emitter = SizeEmitter(graph, info)
    for node in found:
        if node.op not in _WRITTEN:
            raise UnsupportedOperator(node.op, node.name, f"it works on sequences: {_ADVICE}")
        outputs, nested = list(node.outputs), [g for g in node.attrs.values() if isinstance(g, gs.Graph)]
        results = _WRITTEN[node.op](emitter, info, node)
        ir.remove_nodes(graph, [node])
        moved = {id(n) for n in graph.nodes}
        for inner in nested:
            _unlink(inner, moved)
        for old, new in zip(outputs, results, strict=True):
            emitter.editor.replace(old, new)
    return len(found)


def _unlink(graph: gs.Graph, kept: Set[int]) -> None:
    """Makes the nodes of ``graph``, but those ``kept``, readers of nothing: what stands around them has no reader in them any more."""
    for node in graph.nodes:
        if id(node) not in kept:
            for inner in node.attrs.values():
                if isinstance(inner, gs.Graph):
                    _unlink(inner, kept)
            node.inputs.clear()


def _choice(emitter: SizeEmitter, info: SymbolicInfo, node: gs.Node) -> list[ir.Tensor]:
    """What an If gives."""
    editor, test = emitter.editor, node.inputs[0]
    condition = ir.scalar_value(test)
    if condition is not None:
        return _inlined(editor, _branch(node, bool(condition)))
    if node.outputs[0].name in info.apart:
        return gates.gate(emitter, info, node, partial(_inlined, editor))
    sides = [_inlined(editor, branch) for branch in gates.branches(node)]
    return [_chosen(editor, test, *pair) for pair in zip(*sides, strict=True)]


def _unrolled(emitter: SizeEmitter, info: SymbolicInfo, node: gs.Node) -> list[ir.Tensor]:
    return loops.unroll(emitter.editor, node)


_WRITTEN: dict[str, Callable[[SizeEmitter, SymbolicInfo, gs.Node], list[ir.Tensor]]] = {
    "If": _choice,
    "Loop": _unrolled,
    "Scan": _unrolled,
}


def _inlined(editor: ir.GraphEditor, branch: gs.Graph) -> list[ir.Tensor]:
    """The results of ``branch``, its nodes moved to the outer graph under names of their own."""
    inline_constants(branch)
    results = list(branch.outputs)
    for inner in branch.nodes:
        inner.name = editor.names.fresh(inner.name or inner.op)
        for tensor in (*inner.outputs, *(t for t in inner.inputs if isinstance(t, gs.Constant))):
            tensor.name = editor.names.fresh(tensor.name) if tensor.name else ""
    editor.graph.nodes.extend(branch.nodes)
    return results


def _chosen(editor: ir.GraphEditor, test: ir.Tensor, yes: ir.Tensor, no: ir.Tensor) -> gs.Variable:
    """``yes`` or ``no``, as the scalar or one-element ``test`` says."""
    scalar = editor.constant(f"{test.name}.shape", np.zeros(0, np.int64))
    flag = editor.apply("Reshape", [test, scalar], (), f"{test.name}.flag")
    out = gs.Variable(editor.names.fresh(f"{yes.name}.chosen"))
    editor.node("Where", [flag, yes, no], [out], f"{yes.name}.chosen")
    return out
