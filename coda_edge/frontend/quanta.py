"""Where a quantisation stands: with the product that makes its operand, and not between that product and the merging of heads.

A QuantizeLinear and the DequantizeLinear behind it, both by one scale, act on each element alone, so they may change places with whatever
only moves elements, and so may factors.

1. Before movement: where the operand is a moved result of a product with constant weights (perhaps biased, scaled, or quantised before), the
   pair comes before the movement, into reach of the product's epilogue.
2. Behind movement: where it is a product of two run-time tensors, whose movement merges heads, the pair comes behind that.

Refused: scales for each channel, tensors that others read too.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from .. import ir

MOVES = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")
_PRODUCTS = ("MatMul", "Gemm", "Conv")
_FACTORS = ("Mul", "Div")
_CARRIES = (*MOVES, *_FACTORS, "Add", "Sub", "QuantizeLinear", "DequantizeLinear")


def place_quantisation(graph: gs.Graph) -> int:
    """Applies both rules; returns how many pairs moved. Shapes need not be known."""
    editor = ir.GraphEditor(graph)
    count = 0
    for node in [n for n in graph.nodes if n.op == "QuantizeLinear" and not n.domain]:
        back = reader(graph, node.outputs[0])
        if back is None or back.op != "DequantizeLinear" or not all(_by_one_scale(n) for n in (node, back)):
            continue
        count += _before_movement(editor, node, back) or _behind_movement(editor, node, back)
    ir.remove_dead(graph)
    return count


def moved_on(graph: gs.Graph, tensor: ir.Tensor) -> list[gs.Node]:
    """The operators that only move the elements of ``tensor``, one after another, each the only reader of what it moves."""
    moves: list[gs.Node] = []
    while (user := reader(graph, tensor)) is not None and user.op in MOVES and user.inputs[0] is tensor:
        moves.append(user)
        tensor = user.outputs[0]
    return moves


def reader(graph: gs.Graph, tensor: ir.Tensor) -> gs.Node | None:
    """The only node that reads ``tensor``, but for those that read its shape; None for an output of the graph too."""
    users = [u for u in ir.consumers(tensor) if u.op != "Shape"]
    return users[0] if len(users) == 1 and not ir.is_output(graph, tensor) else None


def is_constant(tensor: ir.Tensor) -> bool:
    """Whether ``tensor`` is a constant, quantised, dequantised or moved at most."""
    while (node := ir.made_by(tensor, "DequantizeLinear", "QuantizeLinear", *MOVES)) is not None:
        tensor = node.inputs[0]
    return ir.constant_value(tensor) is not None


def _before_movement(editor: ir.GraphEditor, quantise: gs.Node, back: gs.Node) -> bool:
    graph = editor.graph
    tensor, user = quantise.inputs[0], quantise
    chain: list[gs.Node] = []
    while (node := ir.made_by(tensor, *MOVES, *_FACTORS)) is not None:
        if reader(graph, tensor) is not user or (node.op in _FACTORS and not _is_factor(node)):
            break
        chain.insert(0, node)
        tensor, user = node.inputs[_operand(node)], node
    moves, factors = [n for n in chain if n.op in MOVES], [n for n in chain if n.op in _FACTORS]
    if not moves or not _of_weights(tensor):
        return False
    _rewire(editor, tensor, [*chain, quantise, back], [*factors, quantise, back, *moves])
    return True


def _behind_movement(editor: ir.GraphEditor, quantise: gs.Node, back: gs.Node) -> bool:
    x = quantise.inputs[0]
    product = ir.made_by(x, "MatMul")
    if product is None or _of_weights(x) or reader(editor.graph, x) is not quantise:
        return False
    moves = moved_on(editor.graph, back.outputs[0])
    if not moves:
        return False
    _rewire(editor, x, [quantise, back, *moves], [*moves, quantise, back])
    return True


def _rewire(editor: ir.GraphEditor, source: ir.Tensor, before: list[gs.Node], after: list[gs.Node]) -> None:
    """Applies operators one after another to ``source`` in the order ``after``, in place of ``before``; the last result is the same."""
    result = before[-1].outputs[0]
    result.inputs.clear()
    made: dict[int, ir.Tensor] = {}
    tensor = source
    for node in after:
        out = result if node is after[-1] else gs.Variable(editor.names.fresh(f"{result.name}.{node.op}"))
        inputs = [tensor if i == _operand(node) else t for i, t in enumerate(node.inputs)]
        editor.node(node.op, inputs, [out], node.name, **node.attrs)
        made[id(node)] = tensor = out
    # Only movement makes shapes: whatever had one has that of the last movement before it.
    moved = source
    for node in before:
        moved = made[id(node)] if node.op in MOVES else moved
        for reads_shape in [u for old in node.outputs for u in ir.consumers(old) if u.op == "Shape"]:
            reads_shape.inputs = [moved]
    ir.remove_nodes(editor.graph, before)


def _by_one_scale(node: gs.Node) -> bool:
    """Whether scale and zero point are constants of one element."""
    values = [ir.constant_value(t) for t in node.inputs[1:] if t.name]
    return all(v is not None and v.size == 1 for v in values)


def _is_factor(node: gs.Node) -> bool:
    """Whether a Mul or Div is by one constant number."""
    value = ir.constant_value(node.inputs[1 - _operand(node)])
    return value is not None and value.size == 1 and (node.op == "Mul" or _operand(node) == 0)


def _operand(node: gs.Node) -> int:
    """Which input is the tensor that a node moves, scales or quantises."""
    return 1 if node.op in _FACTORS and ir.constant_value(node.inputs[0]) is not None else 0


def _of_weights(tensor: ir.Tensor) -> bool:
    """Whether ``tensor`` is a product with constant weights, with constants added or multiplied, moved or quantised at most."""
    while (node := ir.made_by(tensor, *_CARRIES)) is not None:
        variables = [t for t in node.inputs if ir.constant_value(t) is None and t.name]
        if node.op in ("Add", "Sub", *_FACTORS) and len(variables) != 1:
            return False
        tensor = variables[0] if node.op in ("Add", "Sub", *_FACTORS) else node.inputs[0]
    product = ir.made_by(tensor, *_PRODUCTS)
    return product is not None and is_constant(product.inputs[1])
