"""The way from a loaded model to normal form: infer, fold, decompose and simplify until nothing changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx
import onnx_graphsurgeon as gs

from .. import ir
from . import (
    columns,
    contrib,
    conv_transpose,
    convolution,
    data_sizes,
    decompose_attention,
    einsum,
    elementary,
    factors,
    fourier,
    grouped_convolution,
    half,
    pooling,
    quantization,
    rearrange,
    recurrent,
    reductions,
    resizing,
    sampling,
    simplify,
    softmax,
    transposes,
)
from . import decompose as decompose_basic
from .branches import inline_branches, name_apart
from .builder import decompose
from .composite import refuse_foreign
from .constraints import ConstraintSet
from .fold import Digests, fold_constants, fold_values, inline_constants, merge_constants, merge_nodes
from .gates import free_unread_sizes
from .indexing import simplify_indexing
from .model import bind
from .movement import compose_movement
from .quanta import place_quantisation
from .rows import sink_row_movement
from .scales import defer_scales
from .shapes import Constraint, SymbolicInfo, infer
from .sizes import emit_sizes, simplify_bounds, simplify_targets
from .spread import defer_expands

# Imported for the decompositions that they register.
_TABLES = (
    simplify,
    transposes,
    decompose_basic,
    decompose_attention,
    contrib,
    conv_transpose,
    convolution,
    grouped_convolution,
    data_sizes,
    quantization,
    pooling,
    resizing,
    einsum,
    columns,
    elementary,
    rearrange,
    recurrent,
    sampling,
    fourier,
    factors,
    reductions,
    softmax,
)

# Each round undoes at least one layer of composition; exporters nest a handful.
_ROUNDS = 12


@dataclass(frozen=True)
class NormalForm:
    """A graph in normal form, and what was assumed of its inputs' sizes on the way there (also at nodes now gone)."""

    graph: gs.Graph
    constraints: tuple[Constraint, ...]

    def allows(self, sizes: Mapping[str, int]) -> bool:
        """Whether the graph is right at ``sizes``, which name every symbol of its inputs, as far as these tell."""
        return all(c.holds(sizes) for c in self.constraints if all(s.name in sizes for s in c.symbols))


@dataclass
class _State:
    """What is kept from round to round."""

    digests: Digests = field(default_factory=dict)
    constraints: ConstraintSet = field(default_factory=ConstraintSet)

    def infer(self, graph: gs.Graph) -> SymbolicInfo:
        """``infer``, its constraints kept."""
        info = infer(graph)
        self.constraints.add(info)
        return info


def normalize(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int | str]] | None = None) -> gs.Graph:
    """``model`` (from ``load``) as a graph in normal form, every variable annotated with dtype and shape.

    ``shapes`` gives inputs dimensions by name, as in ``{"input_ids": (1, 128)}``; a string names a dynamic size. Half-precision
    tensors become float32 (see ``half``), but for inputs and outputs.

    ``to_normal_form`` gives the constraints on sizes too. ``model`` is not changed.

    Raises ShapeError if ``shapes`` does not fit or a shape cannot be found, UnsupportedOperator for an operator that
    cannot be written in basic ones.
    """
    return to_normal_form(model, shapes).graph


def to_normal_form(
    model: onnx.ModelProto, shapes: Mapping[str, Sequence[int | str]] | None = None, keep_half: bool = False
) -> NormalForm:
    """As ``normalize``, with what was assumed of sizes. ``keep_half``: half-precision tensors stay so, for targets that compute in it."""
    graph = gs.import_onnx(model) if keep_half else half.import_promoted(model)
    bind(graph, shapes or {})
    name_apart(graph)
    ir.remove_dead(graph)
    free_unread_sizes(graph)
    inline_constants(graph)
    refuse_foreign(graph)
    place_quantisation(graph)
    defer_scales(graph)
    # What constants alone determine may be a shape operand that no rule follows.
    fold_constants(graph)
    state = _State()
    for _ in range(_ROUNDS):
        if not _round(graph, state):
            break
    fold_constants(graph, expand=True)
    emit_sizes(graph, state.infer(graph))
    _tidy(graph, state)
    _copy_constant_outputs(graph)
    _write_perms(graph)
    info = state.infer(graph)
    ir.sort(graph)
    ir.own_values(graph)
    return NormalForm(graph, state.constraints.known_by(graph, info))


def _round(graph: gs.Graph, state: _State) -> int:
    info = state.infer(graph)
    changes = fold_values(graph, info) + fold_constants(graph) + inline_branches(graph, info)
    if changes:
        info = state.infer(graph)
    changes += simplify_targets(graph) + simplify_bounds(graph, info)
    ir.remove_dead(graph)
    changes += decompose(graph) + _tidy(graph, state)
    return changes or _rearrange(graph, state)


def _rearrange(graph: gs.Graph, state: _State) -> int:
    """What needs every shape: done once nothing else is left to do."""
    changes = simplify_indexing(graph, state.infer(graph)) + _tidy(graph, state)
    for rewrite in (defer_expands, compose_movement, sink_row_movement, compose_movement):
        changes += rewrite(graph, state.infer(graph)) + _tidy(graph, state)
    return changes


def _write_perms(graph: gs.Graph) -> None:
    """Gives each Transpose the order of axes that it has by default."""
    for node in graph.nodes:
        if node.op == "Transpose" and not node.domain:
            node.attrs.setdefault("perm", list(range(len(ir.shape(node.inputs[0]))))[::-1])


def _copy_constant_outputs(graph: gs.Graph) -> None:
    """Makes each output that is a constant the result of an Identity: a graph returns only what nodes make."""
    editor = ir.GraphEditor(graph)
    for i, out in enumerate(graph.outputs):
        if isinstance(out, gs.Constant):
            value = editor.constant(f"{out.name}.value", out.values)
            for user in ir.consumers(out):
                user.inputs = [value if t is out else t for t in user.inputs]
            graph.outputs[i] = gs.Variable(out.name, dtype=out.values.dtype, shape=list(out.values.shape))
            editor.node("Identity", [value], [graph.outputs[i]], f"{out.name}.copy")


def _tidy(graph: gs.Graph, state: _State) -> int:
    ir.remove_dead(graph)
    merge_constants(graph, state.digests)
    changes = merge_nodes(graph)
    ir.remove_dead(graph)
    return changes
