"""softmax(A·B + …)·C over run-time tensors is one ``Attention``: scores never reach memory.

Rule: a Softmax over the last axis, whose input is a graph of elementwise operators over one MatMul of two run-time tensors
``[B,H,Sq,D] @ [B,H,D,Sk]``, and whose result only feeds a MatMul with ``[B,H,Sk,Dv]``, perhaps through a guard that turns
NaN into 0. What stands between the MatMul and the Softmax (scale, mask, cap, …) becomes the score program, whatever it is.
Constant scales of q and k, wherever the exporter put them, go into the score program too: (s·q)·(t·k) = s·t·(q·k).
k is handed over as ``[B,Hkv,Sk,D]``; the result is ``[B,Sq,H·Dv]``, so the head merge behind it disappears. Where k and v were
repeated for groups of query heads (Expand of an axis of 1 behind the heads, merged into them), they are handed over unrepeated.

Conditions: four dimensions; H, D and Dv are numbers; k and v have as many heads, H or a divisor; no score, probability or product is
read by anyone else.
Refused, with the node named: probabilities that are a graph output, other ranks, operands that do not broadcast to the scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge.ir import (
    DOMAIN,
    ELEMENTWISE,
    GraphEditor,
    Tensor,
    constant_value,
    in_order,
    is_output,
    made_by,
    producer,
    remove_dead,
    same_shape,
    scalar_value,
    shape,
    sole_consumer,
    sort,
)
from coda_edge.symbolic import same

from .base import Pass, PassLog, sources
from .region import Refused, Region, score_kind

_SWAP = (0, 1, 3, 2)
_HEADS = (0, 2, 1, 3)


@dataclass(frozen=True)
class _Match:
    product: gs.Node  # q·kᵀ
    between: list[gs.Node]  # from the scores to the Softmax's input, in order
    output: gs.Node  # p·v
    v: Tensor
    guard: bool


def run(graph: gs.Graph, log: PassLog) -> int:
    """Fuses every attention; returns how many."""
    editor = GraphEditor(graph)
    count = 0
    for node in in_order(graph):
        if node.op != "Softmax":
            continue
        try:
            _rewrite(graph, editor, node, _match(graph, node))
            count += 1
        except Refused as why:
            log.refuse(PASS.name, node, str(why))
    remove_dead(graph)  # also what was made for one that was refused
    sort(graph)
    return count


def _match(graph: gs.Graph, softmax: gs.Node) -> _Match:
    scores = softmax.inputs[0]
    rank = len(shape(scores))
    if int(softmax.attrs.get("axis", -1)) % rank != rank - 1:
        raise Refused("the softmax is not over the last axis")
    if rank != 4:
        raise Refused(f"scores have {rank} dimensions, expected 4 (batch, heads, queries, keys)")
    output, guard = _consumer(graph, softmax.outputs[0])
    probabilities, v = output.inputs
    if constant_value(v) is not None or producer(probabilities) is producer(v):
        raise Refused("the probabilities do not multiply a run-time tensor of values")
    product, between = _scores(graph, scores, softmax)
    for tensor in (*product.inputs, v):
        if len(shape(tensor)) != 4:
            raise Refused(f"operand '{tensor.name}' has {len(shape(tensor))} dimensions, expected 4")
    return _Match(product, between, output, v, guard)


def _consumer(graph: gs.Graph, p: Tensor) -> tuple[gs.Node, bool]:
    """The MatMul that reads the probabilities, and whether a NaN guard stands before it."""
    if is_output(graph, p):
        raise Refused("the probabilities are read outside: they are an output of the graph")
    user = sole_consumer(graph, p)
    if user is not None and user.op == "MatMul" and user.inputs[0] is p:
        return user, False
    for where in (u for u in p.outputs if u.op == "Where"):
        test = made_by(where.inputs[0], "IsNaN")
        if test is None or test.inputs[0] is not p or scalar_value(where.inputs[1]) != 0.0:
            continue
        if where.inputs[2] is p and len({id(u) for u in p.outputs}) == 2:
            after = sole_consumer(graph, where.outputs[0])
            if after is not None and after.op == "MatMul" and after.inputs[0] is where.outputs[0]:
                return after, True
    raise Refused("the probabilities are read by something else than one MatMul with the values")


def _scores(graph: gs.Graph, scores: Tensor, softmax: gs.Node) -> tuple[gs.Node, list[gs.Node]]:
    """The MatMul q·kᵀ, and the elementwise nodes from it to ``scores``."""
    region: dict[int, gs.Node] = {}
    products: dict[int, gs.Node] = {}
    stack = [scores]
    while stack:
        node = producer(stack.pop())
        if node is None or id(node) in region:
            continue
        if node.op == "MatMul" and not any(constant_value(t) is not None for t in node.inputs):
            products[id(node)] = node
        elif node.op in ELEMENTWISE and same_shape(shape(node.outputs[0]), shape(scores)):
            region[id(node)] = node
            stack.extend(node.inputs)
    if len(products) != 1:
        raise Refused(f"the softmax's input comes from {len(products)} products of run-time tensors, expected 1")
    (product,) = products.values()
    below = _below(graph, product, region)
    for node in (product, *below):
        for out in node.outputs:
            if is_output(graph, out) or any(id(u) not in region and u is not softmax for u in out.outputs):
                raise Refused(f"the scores are also read outside (tensor '{out.name}')")
    return product, below


def _below(graph: gs.Graph, product: gs.Node, region: dict[int, gs.Node]) -> list[gs.Node]:
    """The nodes of ``region`` that depend on ``product``, in order."""
    reached = {id(product)}
    order: list[gs.Node] = []
    for node in in_order(graph):
        if id(node) in region and any(id(producer(t)) in reached for t in node.inputs):
            reached.add(id(node))
            order.append(node)
    return order


def _rewrite(graph: gs.Graph, editor: GraphEditor, softmax: gs.Node, match: _Match) -> None:
    q, q_scale = _unscaled(match.product.inputs[0])
    kt, k_scale = _unscaled(match.product.inputs[1])
    batch, heads, queries, depth = shape(q)
    value_depth = shape(match.v)[-1]
    if not all(isinstance(d, int) for d in (heads, depth, value_depth)):
        raise Refused(f"heads and depths must be numbers, found {heads}, {depth}, {value_depth}")
    k, v = _transposed(editor, kt), match.v
    groups = [_repeated(t) for t in (k, v)]
    if (
        groups[0] is not None
        and groups[1] is not None
        and groups[0].outputs[0].shape[1:3] == groups[1].outputs[0].shape[1:3]
    ):
        k, v = _unrepeated(editor, k, groups[0]), _unrepeated(editor, v, groups[1])
    for name, t in (("keys", k), ("values", v)):
        kv_heads = shape(t)[1]
        if not same(shape(t)[0], batch) or not isinstance(kv_heads, int) or int(heads) % kv_heads:
            raise Refused(f"the {name} have batch and heads {shape(t)[:2]}, the queries {(batch, heads)}")
    if not same(shape(k)[1], shape(v)[1]):
        raise Refused(f"the keys have {shape(k)[1]} heads, the values {shape(v)[1]}")
    scores = match.product.outputs[0]
    region = Region(editor, scores, shape(scores), score_kind, inline=False)
    if q_scale * k_scale != 1.0:
        region.set(scores, region.builder.add("mul", "acc", q_scale * k_scale))
    for node in match.between:
        region.add(node)
    region.builder.output("scores", region.value(softmax.inputs[0]))
    program, operands = region.build()
    base = match.output.name or match.output.outputs[0].name
    merged = editor.variable(f"{base}.attention", q.dtype, (batch, queries, heads * value_depth))
    editor.node(
        "Attention",
        [q, k, v, *operands],
        [merged],
        f"{base}.attention",
        domain=DOMAIN,
        score=str(program),
        guard=int(match.guard),
        source=sources([match.product, *match.between, softmax, match.output]),
    )
    _connect(graph, editor, match.output.outputs[0], merged, base)


def _unscaled(tensor: Tensor) -> tuple[Tensor, float]:
    """A tensor without its constant scales, and their product."""
    node = made_by(tensor, "Mul", "Div")
    if node is None:
        return tensor, 1.0
    x, c = node.inputs if scalar_value(node.inputs[1]) is not None else node.inputs[::-1]
    scale = scalar_value(c)
    if scale is None or (node.op == "Div" and c is not node.inputs[1]) or not same_shape(shape(x), shape(tensor)):
        return tensor, 1.0
    inner, rest = _unscaled(x)
    return inner, rest * scale if node.op == "Mul" else rest / scale


def _transposed(editor: GraphEditor, kt: Tensor) -> Tensor:
    """k ``[B,H,Sk,D]`` from kᵀ, through the Transpose that made it where there is one."""
    node = made_by(kt, "Transpose")
    source, perm = (node.inputs[0], list(node.attrs["perm"])) if node is not None else (kt, [0, 1, 2, 3])
    perm = [perm[i] for i in _SWAP]
    if perm == sorted(perm):
        return source
    dims = [shape(source)[i] for i in perm]
    return editor.apply("Transpose", [source], dims, f"{kt.name}.k", perm=perm)


def _repeated(tensor: Tensor) -> gs.Node | None:
    """The Expand that repeats each head of ``tensor`` for a group of query heads, if one does."""
    merge = made_by(tensor, "Reshape")
    expand = made_by(merge.inputs[0], "Expand") if merge is not None else None
    if merge is None or expand is None:
        return None
    before, after, out = shape(expand.inputs[0]), shape(expand.outputs[0]), shape(tensor)
    grouped = len(before) == len(after) == 5 and same(before[2], 1) and isinstance(after[2], int)
    if not grouped or not same_shape((*before[:2], *before[3:]), (*after[:2], *after[3:])):
        return None
    return expand if same_shape(out, (after[0], after[1] * after[2], *after[3:])) else None


def _unrepeated(editor: GraphEditor, tensor: Tensor, expand: gs.Node) -> Tensor:
    """``tensor`` ``[B,H,S,D]`` without its repetition: ``[B,Hkv,S,D]``, by the way it was made where that is shorter."""
    source = expand.inputs[0]
    batch, heads, _, length, depth = shape(source)
    split = made_by(source, "Unsqueeze", "Reshape")
    if split is not None and same_shape(shape(split.inputs[0]), (batch, heads, length, depth)):
        return split.inputs[0]
    order = made_by(source, "Transpose")
    split = made_by(order.inputs[0], "Reshape", "Unsqueeze") if order is not None else None
    if order is not None and split is not None and list(order.attrs["perm"]) in ([0, 2, 3, 1, 4], [0, 3, 2, 1, 4]):
        target = editor.constant(f"{tensor.name}.split", np.array([0, 0, heads, depth], np.int64))
        if same_shape(shape(split.inputs[0])[:2], (batch, length)):
            rows = editor.apply(
                "Reshape", [split.inputs[0], target], (batch, length, heads, depth), f"{tensor.name}.rows"
            )
            dims = (batch, heads, length, depth)
            return editor.apply("Transpose", [rows], dims, f"{tensor.name}.shared", perm=list(_HEADS))
    axis = editor.constant(f"{tensor.name}.axis", np.array([2], np.int64))
    return editor.apply("Squeeze", [source, axis], (batch, heads, length, depth), f"{tensor.name}.shared")


def _connect(graph: gs.Graph, editor: GraphEditor, product: gs.Variable, merged: gs.Variable, base: str) -> None:
    """Hands ``merged`` to the readers of ``product`` ``[B,H,Sq,Dv]``: to a head merge as it is, to others with the heads split again."""
    batch, heads, queries, depth = shape(product)
    target = editor.constant(f"{base}.heads", np.array([0, 0, heads, depth], dtype=np.int64))
    split = editor.apply("Reshape", [merged, target], (batch, queries, heads, depth), f"{base}.split")
    merge = sole_consumer(graph, product)
    if merge is None or merge.op != "Transpose" or tuple(merge.attrs["perm"]) != _HEADS:
        editor.replace(product, editor.apply("Transpose", [split], shape(product), f"{base}.heads", perm=list(_HEADS)))
        return
    after = sole_consumer(graph, merge.outputs[0])
    if after is not None and after.op == "Reshape" and same_shape(shape(after.outputs[0]), shape(merged)):
        editor.replace(after.outputs[0], merged)
    else:
        editor.replace(merge.outputs[0], split)


PASS = Pass("attention", run)
