"""Each constant-weight MatMul becomes a ``Gemm`` whose epilogue has grown over whatever elementwise graph follows it; so does each ``GroupedConv``.

Rule: an operator joins the epilogue when one of its operands is in the epilogue and

1. it is elementwise with a result of the tile's shape, and its other operands are literals, columns, rows or whole tensors that
   do not depend on the product: bias, activation (however spelled), residual, scale, cast. Over ``[B, S, N]`` rows and tensors
   may be shared by the batch entries (``[1, S, N]``: position embeddings) or by the positions (``[B, 1, N]``); or
2. it reduces a tile value over the row (RowMoments, ReduceMean, ReduceSum, ReduceMax, ReduceMin, ReduceSumSquare, ArgMax, ArgMin over
   the last axis): its result is a row output of the kernel, known only after the last tile, so nothing behind it joins; or
3. it is Σ e^(t − max t) over the row of a tile value t, whose terms are then never stored: what the logarithm of a softmax needs.

An operand that elementwise operators make from one stored tensor, rows and columns is computed again in the tile and never stored:
so a post-norm residual is rebuilt from the raw tensor and its row statistics. A value that is read outside is an output. If all who
read it take a range of columns, or split heads (Reshape ``[B,S,H,D]``, Transpose to ``[B,H,S,D]``, also with axes of 1 between or
as the only head), the store does that.

Conditions: the weights are a float32 constant ``[K, N]``; the left operand has at least two dimensions.
Refused, with the operand named: operands that broadcast over some columns, or over rows in another way; weights of more than two
dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge.ir import (
    DOMAIN,
    ELEMENTWISE,
    VIEWS,
    GraphEditor,
    column_range,
    constant_value,
    consumers,
    in_order,
    is_output,
    made_by,
    reduces_rows,
    remove_dead,
    remove_nodes,
    same_shape,
    shape,
    sort,
)
from coda_edge.symbolic import Dim, same

from .base import Pass, PassLog, sources
from .region import Refused, Region, row_kind

_REDUCTIONS = {
    "ReduceMean": "mean",
    "ReduceSum": "sum",
    "ReduceMax": "rowmax",
    "ReduceMin": "rowmin",
    "ReduceSumSquare": "sumsq",
}
_PLACES = {"ArgMax": 1.0, "ArgMin": -1.0}
"""Operators that say where the largest is of the row times the factor."""


@dataclass(frozen=True)
class _Store:
    """One stored tensor: ``tensor`` is written, ``nodes`` are the layout operators that the store does."""

    tensor: gs.Variable
    columns: tuple[int, int] | None = None
    heads: int | None = None
    nodes: tuple[gs.Node, ...] = ()


@dataclass
class _Growth:
    """The nodes that joined, the tensors they made of the product, and the row outputs."""

    nodes: list[gs.Node]
    tiles: set[int]
    rows: dict[int, tuple[gs.Variable, str]] = field(default_factory=dict)


def run(graph: gs.Graph, log: PassLog) -> int:
    """Turns every MatMul with constant weights into a Gemm, and grows every GroupedConv; returns how many."""
    count = 0
    editor = GraphEditor(graph)
    _keep_axes(graph, editor)
    for node in in_order(graph):
        if node.op == "GroupedConv" and node.domain == DOMAIN:
            _rewrite(graph, editor, node, log)
            count += 1
            continue
        if node.op != "MatMul":
            continue
        weights = constant_value(node.inputs[1])
        if weights is None or weights.ndim != 2 or len(shape(node.inputs[0])) < 2:
            log.refuse(PASS.name, node, "the right operand is no constant matrix: not a GEMM with packed weights")
            continue
        if weights.dtype != np.float32:
            log.refuse(PASS.name, node, f"weights are {weights.dtype}: GEMMs with an epilogue are of float32 only")
            continue
        _rewrite(graph, editor, node, log)
        count += 1
    if count:
        remove_dead(graph)
        sort(graph)
    return count


def _rewrite(graph: gs.Graph, editor: GraphEditor, matmul: gs.Node, log: PassLog) -> None:
    region = Region(editor, matmul.outputs[0], shape(matmul.outputs[0]), row_kind, inline=True)
    growth = _grow(graph, region, matmul, log)
    inside = {id(n) for n in growth.nodes}
    outputs: list[gs.Variable] = []
    absorbed: list[gs.Node] = []
    for tensor in (o for n in growth.nodes for o in n.outputs):
        if id(tensor) in growth.rows:
            name = f"row{len(outputs)}"
            region.builder.output(name, growth.rows[id(tensor)][1])
            outputs.append(tensor)
        elif is_output(graph, tensor) or any(id(u) not in inside for u in consumers(tensor)):
            for store in _stores(editor, tensor, inside):
                region.builder.output(f"y{len(outputs)}", region.value(tensor), store.columns, store.heads)
                outputs.append(store.tensor)
                absorbed += store.nodes
    program, operands = region.build()
    inputs = [*matmul.inputs, *operands]
    name = matmul.name or outputs[0].name
    op, attrs = ("Gemm", {}) if matmul.op == "MatMul" else (matmul.op, matmul.attrs)
    absorbed = list({id(n): n for n in absorbed}.values())
    source = sources([*growth.nodes, *region.recomputed, *absorbed])
    remove_nodes(graph, [*growth.nodes, *absorbed])
    attrs = {**attrs, "epilogue": str(program), "source": source}
    editor.node(op, inputs, outputs, f"{name}.{'gemm' if op == 'Gemm' else 'grouped'}", domain=DOMAIN, **attrs)


def _grow(graph: gs.Graph, region: Region, matmul: gs.Node, log: PassLog) -> _Growth:
    growth = _Growth([matmul], {id(matmul.outputs[0])})
    for node in in_order(graph):
        if node is matmul or not (any(id(t) in growth.tiles for t in node.inputs) or _exponentials(growth, node)):
            continue
        try:
            joined = _join(region, growth, node)
        except Refused as why:
            log.refuse(PASS.name, node, str(why))
            continue
        if joined:
            growth.nodes.append(node)
    return growth


def _join(region: Region, growth: _Growth, node: gs.Node) -> bool:
    if node.domain == DOMAIN and node.op == "RowMoments":
        stem = region.builder.add("moments", region.value(node.inputs[0]))
        growth.rows.update({id(o): (o, f"{stem}.{i}") for i, o in enumerate(node.outputs)})
        return True
    exponentials = _exponentials(growth, node)
    if exponentials is not None:
        tile, largest = exponentials
        stem = region.builder.add("expsum", region.value(tile))
        growth.rows[id(largest)] = (largest, f"{stem}.0")
        growth.rows[id(node.outputs[0])] = (node.outputs[0], f"{stem}.1")
        return True
    if node.op in _REDUCTIONS and reduces_rows(node, node.op):
        value = region.builder.add(_REDUCTIONS[node.op], region.value(node.inputs[0]))
        growth.rows[id(node.outputs[0])] = (node.outputs[0], value)
        return True
    if node.op in _PLACES and _is_place(node):
        value = region.value(node.inputs[0])
        value = value if _PLACES[node.op] > 0 else region.builder.add("neg", value)
        growth.rows[id(node.outputs[0])] = (node.outputs[0], region.builder.add("argmax", value))
        return True
    if node.domain or node.op not in ELEMENTWISE:
        return False
    if not same_shape(shape(node.outputs[0]), region.tile):
        raise Refused(f"its result is larger than the tile {list(map(str, region.tile))}")
    region.add(node)
    growth.tiles.add(id(node.outputs[0]))
    return True


def _is_place(node: gs.Node) -> bool:
    """Whether ``node`` says which column comes first, keeping the axis as 1."""
    axis = int(node.attrs.get("axis", 0)) % len(shape(node.inputs[0]))
    last = axis == len(shape(node.inputs[0])) - 1
    return last and bool(node.attrs.get("keepdims", 1)) and not node.attrs.get("select_last_index", 0)


def _exponentials(growth: _Growth, node: gs.Node) -> tuple[gs.Variable, gs.Variable] | None:
    """t and max t, if ``node`` is Σ e^(t − max t) over the row of a tile t whose largest is a row output."""
    power = made_by(node.inputs[0], "Exp") if reduces_rows(node, "ReduceSum") else None
    below = made_by(power.inputs[0], "Sub") if power is not None else None
    if below is None:
        return None
    tile, largest = below.inputs
    source = made_by(largest, "ReduceMax")
    known = source is not None and source.inputs[0] is tile and id(tile) in growth.tiles and id(largest) in growth.rows
    return (tile, largest) if known else None


def _keep_axes(graph: gs.Graph, editor: GraphEditor) -> None:
    """Reductions and places over the last axis keep it as 1, and a Squeeze takes it away, so that they can be row outputs."""
    for node in in_order(graph):
        if node.domain or node.attrs.get("keepdims", 1) or node.op not in (*_REDUCTIONS, *_PLACES):
            continue
        kept = {**node.attrs, "keepdims": 1}
        whole = gs.Node(node.op, attrs=kept, inputs=list(node.inputs), outputs=[])
        rows = reduces_rows(whole, node.op) if node.op in _REDUCTIONS else _is_place(whole)
        whole.inputs.clear()
        if rows:
            out = node.outputs[0]
            dims = (*shape(node.inputs[0])[:-1], 1)
            row = editor.variable(f"{out.name}.row", out.dtype, dims)
            node.attrs, node.outputs = kept, [row]
            axis = editor.constant(f"{out.name}.axis", np.array([len(dims) - 1], np.int64))
            editor.node("Squeeze", [row, axis], [out], f"{out.name}.squeeze")


def _stores(
    editor: GraphEditor,
    tensor: gs.Variable,
    inside: set[int],
    columns: tuple[int, int] | None = None,
    nodes: tuple[gs.Node, ...] = (),
) -> list[_Store]:
    """How ``tensor`` is written: as it is, or as the column ranges and head layouts that its readers take.

    It is itself the range ``columns`` of the tile, which ``nodes`` take.
    """
    whole = [_Store(tensor, columns, None, nodes)]
    readers = [u for u in consumers(tensor) if id(u) not in inside]
    if is_output(editor.graph, tensor) or not readers:
        return whole
    ranges = {id(u): column_range(u) for u in readers}
    splits = {id(u): _heads(editor.graph, tensor, u) for u in readers if ranges[id(u)] is None}
    if any(split is None for split in splits.values()):
        return whole
    first = columns[0] if columns else 0
    stores: list[_Store] = []
    for reader in readers:
        part, split = ranges[id(reader)], splits.get(id(reader))
        if part is not None:
            taken = (first + part[0], first + part[1])
            stores += _stores(editor, reader.outputs[0], inside, taken, (*nodes, reader))
        elif split is not None:
            stores.append(_store_heads(editor, columns, tensor, (*nodes, *split)))
    return stores


def _store_heads(
    editor: GraphEditor, columns: tuple[int, int] | None, tensor: gs.Variable, nodes: tuple[gs.Node, ...]
) -> _Store:
    """``tensor`` stored as the last of ``nodes`` lays it out; axes of 1 within that are a view of what is stored."""
    out = nodes[-1].outputs[0]
    (batch, rows, width), size = shape(tensor), int(shape(out)[-1])
    dims = (batch, width // size, rows, size)
    if len(shape(out)) == len(dims):
        return _Store(out, columns, size, nodes)
    heads = editor.variable(f"{out.name}.heads", out.dtype, dims)
    for reader in consumers(out):
        back = reader.outputs[0]
        if reader.op in VIEWS and same_shape(shape(back), dims) and not is_output(editor.graph, back):
            editor.replace(back, heads)
    axes = np.array([i for i, d in enumerate(shape(out)) if same(d, 1)])
    view = editor.apply("Unsqueeze", [heads, editor.constant(f"{out.name}.axes", axes)], shape(out), f"{out.name}.view")
    editor.replace(out, view)
    return _Store(heads, columns, size, nodes)


def _heads(graph: gs.Graph, tensor: gs.Variable, reshape: gs.Node) -> tuple[gs.Node, ...] | None:
    """The nodes that lay ``tensor`` ``[B,S,H·D]`` out as ``[B,H,S,D]``, beginning with ``reshape``, if that is all it feeds.

    Axes of 1 may stand anywhere but at the ends; with one head the Reshape alone does it.
    """
    dims = shape(tensor)
    if reshape.op not in VIEWS or len(dims) != 3:
        return None
    out = reshape.outputs[0]
    split = shape(out)
    if same_shape(split, (dims[0], 1, *dims[1:])):
        return (reshape,)
    users = consumers(out)
    alone = len(users) == 1 and users[0].op == "Transpose" and not is_output(graph, out)
    if (
        alone
        and same_shape(split, (*dims[:2], 1, dims[2]))
        and same_shape(shape(users[0].outputs[0]), (dims[0], 1, *dims[1:]))
    ):
        return (reshape, users[0])
    wide = [i for i, d in enumerate(split) if i < 2 or not same(d, 1)]
    if len(wide) != 4 or not same_shape(split[:2], dims[:2]) or not isinstance(split[wide[3]], int):
        return None
    if not alone:
        return None
    perm = [int(p) for p in users[0].attrs["perm"]]
    moved = [wide.index(p) for p in perm if p in wide]
    plain = moved == [0, 2, 1, 3] and perm[-1] == wide[3] and perm[0] == 0
    return (reshape, users[0]) if plain and (len(perm) == 4 or not _any_one(dims[:2])) else None


def _any_one(dims: Sequence[Dim]) -> bool:
    return any(same(d, 1) for d in dims)


PASS = Pass("grow_epilogue", run)
