"""The way from a loaded model to normal form: infer, fold, decompose and simplify until nothing changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import onnx_graphsurgeon as gs

from .. import ir
from . import contrib, decompose_attention, simplify
from . import decompose as decompose_basic
from .branches import inline_branches
from .builder import decompose
from .fold import Digests, fold_constants, fold_values, inline_constants, merge_constants, merge_nodes
from .indexing import simplify_indexing
from .model import bind
from .movement import compose_movement
from .rows import sink_row_movement
from .shapes import infer
from .sizes import emit_sizes, simplify_bounds, simplify_targets
from .spread import defer_expands

# Imported for the decompositions that they register.
_TABLES = (simplify, decompose_basic, decompose_attention, contrib)

# Each round undoes at least one layer of composition; exporters nest a handful.
_ROUNDS = 12


def normalize(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int | str]] | None = None) -> gs.Graph:
    """``model`` (from ``load``) as a graph in normal form, every variable annotated with dtype and shape.

    ``shapes`` gives inputs dimensions by name, as in ``{"input_ids": (1, 128)}``; a string names a dynamic size.

    ``model`` is not changed. Raises ShapeError if ``shapes`` does not fit or a shape cannot be found, UnsupportedOperator for an operator that
    cannot be written in basic ones.
    """
    graph = gs.import_onnx(model)
    bind(graph, shapes or {})
    inline_constants(graph)
    digests: Digests = {}
    for _ in range(_ROUNDS):
        if not _round(graph, digests):
            break
    fold_constants(graph, expand=True)
    emit_sizes(graph, infer(graph))
    _tidy(graph, digests)
    infer(graph)
    ir.sort(graph)
    return graph


def _round(graph: gs.Graph, digests: Digests) -> int:
    info = infer(graph)
    changes = fold_values(graph, info) + fold_constants(graph) + inline_branches(graph)
    if changes:
        info = infer(graph)
    changes += simplify_targets(graph) + simplify_bounds(graph, info)
    ir.remove_dead(graph)
    changes += decompose(graph) + _tidy(graph, digests)
    return changes or _rearrange(graph, digests)


def _rearrange(graph: gs.Graph, digests: Digests) -> int:
    """What needs every shape: done once nothing else is left to do."""
    changes = simplify_indexing(graph, infer(graph)) + _tidy(graph, digests)
    infer(graph)
    changes += defer_expands(graph) + _tidy(graph, digests)
    infer(graph)
    changes += sink_row_movement(graph) + _tidy(graph, digests)
    infer(graph)
    return changes + compose_movement(graph) + _tidy(graph, digests)


def _tidy(graph: gs.Graph, digests: Digests) -> int:
    ir.remove_dead(graph)
    merge_constants(graph, digests)
    changes = merge_nodes(graph)
    ir.remove_dead(graph)
    return changes
