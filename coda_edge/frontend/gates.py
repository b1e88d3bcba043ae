"""Branches of which one is computed though data decides which: the other works on nothing.

Rule: of an If whose condition data decides, what the branches read from outside is cut along one dynamic size, usually the batch: the branch taken
gets all of it, the other none, so that each of its tensors is empty and no kernel has work. A result is the elements of both branches' one behind the
other, in the shape of the branch taken. So the branches may give results of other shapes, gather by computed indices and draw numbers:

    n = size · Cast(condition)          m = size · Cast(¬condition)
    y = Reshape(Concat(then(x[:n]), else(x[:m])), Cast(condition) · shape of then + Cast(¬condition) · shape of else)

Sizes that only one branch needs to be equal, as the rows of a cache and those that a mask is for, are so where that branch has elements: what is cut is
viewed in the sizes that the branch knows, and a run compares the numbers of elements.

Conditions: the size stands alone as a dimension of what is read, and is a factor of some dimension of each result, in both branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import sympy

from .. import ir
from ..symbolic import Dim, format_dim, same, simplify, symbol
from .equalities import Equalities
from .shapes import SymbolicInfo
from .sizes import SizeEmitter

Dims = Callable[[ir.Tensor], Sequence[Dim]]


def branches(node: gs.Node) -> tuple[gs.Graph, gs.Graph]:
    """What an If does if its condition holds, and if not."""
    return node.attrs["then_branch"], node.attrs["else_branch"]


def gating_size(node: gs.Node, dims: Dims) -> sympy.Symbol | None:
    """The size by which the branches of ``node`` can be given nothing, if there is one; ``dims``: of any tensor."""
    results = [dims(t) for branch in branches(node) for t in branch.outputs]
    read = [dims(t) for t in _captured(node)]
    alone = [d for axis in range(8) for some in read for d in some[axis : axis + 1] if isinstance(d, sympy.Symbol)]
    for size in dict.fromkeys(alone):
        whole = all(isinstance(d, int) or d == size or size not in d.free_symbols for some in read for d in some)
        if whole and all(any(_vanishes(d, size) for d in some) for some in results):
            return size
    return None


def _vanishes(dim: Dim, size: sympy.Symbol) -> bool:
    return simplify(sympy.sympify(dim).xreplace({size: sympy.Integer(0)})) == 0


def can_differ(node: gs.Node, dims: Dims, size: sympy.Symbol) -> bool:
    """Whether ``size`` may be another in each branch: all that is read of it is cut along the ``gating_size``."""
    gating = gating_size(node, dims)
    read = [some for some in map(dims, _captured(node)) if any(size in sympy.sympify(d).free_symbols for d in some)]
    return size != gating and bool(read) and all(gating in some for some in read)


def _captured(node: gs.Node) -> list[gs.Variable]:
    """The variables around ``node`` that its branches read, each once."""
    own = {id(t) for t in node.inputs}
    read = {id(t): t for t in ir.reads(node) if isinstance(t, gs.Variable) and t.name and id(t) not in own}
    return list(read.values())


def free_unread_sizes(graph: gs.Graph) -> None:
    """Sizes of inputs that one branch of an If does not read get names of their own, but for those that any input has first, such as the batch.

    Whatever names exporters gave them, callers feed anything where it is not read; what else needs them to be equal is found by inference.
    """
    inputs = {t.name: t for t in graph.inputs if t.shape is not None}
    first = {s for t in inputs.values() for d in ir.shape(t)[:1] for s in _symbols([d])}
    for node in graph.nodes:
        if node.op != "If" or node.domain or _is_of_sizes(node.inputs[0]):
            continue
        outside = {t.name for other in graph.nodes if other is not node for t in ir.reads(other)}
        read = [_names_read(branch) & inputs.keys() for branch in branches(node)]
        for here, there in (read, read[::-1]):
            sizes = {name: _symbols(ir.shape(t)) for name, t in inputs.items()}
            unread = there - here - outside
            shared = set[sympy.Symbol]().union(*(sizes[n] for n in here)) - first
            taken = {s.name for some in sizes.values() for s in some}
            for size in sorted(shared.intersection(s for n in unread for s in sizes[n]), key=str):
                own = symbol(next(n for i in range(len(taken) + 1) if (n := f"{size.name}_{i}") not in taken))
                for name in unread:
                    dims = [sympy.sympify(d).xreplace({size: own}) for d in ir.shape(inputs[name])]
                    inputs[name].shape = [format_dim(simplify(d)) for d in dims]


def _is_of_sizes(condition: ir.Tensor) -> bool:
    """Whether constants alone or shapes have a part in ``condition``, which may then be known before data is."""
    seen, waiting, data = set[int](), [condition], False
    while waiting:
        tensor = waiting.pop()
        node = ir.producer(tensor)
        data |= node is None and isinstance(tensor, gs.Variable)
        if node is not None and id(node) not in seen:
            seen.add(id(node))
            if node.op in ("Shape", "Size"):
                return True
            waiting.extend(ir.reads(node))
    return not data


def _symbols(dims: Sequence[Dim]) -> set[sympy.Symbol]:
    return {s for d in dims if not isinstance(d, int) for s in d.free_symbols}


def _names_read(graph: gs.Graph) -> set[str]:
    return {t.name for t in (*graph.outputs, *(t for n in graph.nodes for t in ir.reads(n)))}


def gate(
    emitter: SizeEmitter, info: SymbolicInfo, node: gs.Node, inlined: Callable[[gs.Graph], list[ir.Tensor]]
) -> list[ir.Tensor]:
    """What ``node`` gives; ``inlined`` moves a branch to the outer graph. There must be a ``gating_size``."""

    def dims(tensor: ir.Tensor) -> Sequence[Dim]:
        return ir.shape(tensor) if isinstance(tensor, gs.Constant) else info.shapes[tensor.name]

    size = gating_size(node, dims)
    assert size is not None
    shapes = [[tuple(dims(t)) for t in branch.outputs] for branch in branches(node)]
    flags = _flags(emitter.editor, node.inputs[0])
    captured = [t for t in _captured(node) if size in dims(t)]
    sides = []
    for branch, flag, known in zip(branches(node), flags, info.apart[node.outputs[0].name], strict=True):
        equal = Equalities(())
        equal.known = {s: info.equal.resolve(value) for s, value in known.items()}
        _redirect(branch, {id(t): _cut(emitter, t, dims(t), size, flag, equal) for t in captured})
        sides.append(inlined(branch))
    return [
        _merged(emitter, parts, both, flags)
        for parts, both in zip(zip(*sides, strict=True), zip(*shapes, strict=True), strict=True)
    ]


def _flags(editor: ir.GraphEditor, test: ir.Tensor) -> tuple[gs.Variable, gs.Variable]:
    """1 or 0, int64 ``[1]``: whether the condition holds, and whether not."""
    one = editor.constant(f"{test.name}.shape", np.asarray([1], np.int64))
    flat = _made(editor, "Reshape", [test, one])
    whole = int(onnx.TensorProto.INT64)
    return _made(editor, "Cast", [flat], to=whole), _made(editor, "Cast", [_made(editor, "Not", [flat])], to=whole)


def _cut(
    emitter: SizeEmitter,
    tensor: gs.Variable,
    dims: Sequence[Dim],
    size: sympy.Symbol,
    flag: gs.Variable,
    equal: Equalities,
) -> gs.Variable:
    """All of ``tensor`` or, where ``flag`` is 0, nothing along the axes of ``size``; its other sizes are as the branch knows them."""
    editor = emitter.editor
    count = _made(editor, "Mul", [emitter.vector([size]), flag])
    zero, one = (editor.constant("bound", np.asarray(i, np.int64)) for i in (0, 1))
    scalar = _made(editor, "Squeeze", [count, editor.constant("axis", np.asarray([0], np.int64))])
    places = _made(editor, "Range", [zero, scalar, one])
    for axis, dim in enumerate(dims):
        if dim == size:
            tensor = _made(editor, "Gather", [tensor, places], axis=axis)
    inside = [equal.resolve(d) for d in dims]
    if ir.same_shape(inside, dims):
        return tensor
    target = [count if d == size else emitter.vector([i]) for d, i in zip(dims, inside, strict=True)]
    return _made(editor, "Reshape", [tensor, _made(editor, "Concat", target, axis=0)], allowzero=1)


def _redirect(graph: gs.Graph, instead: dict[int, gs.Variable]) -> None:
    """Makes ``graph`` and the graphs within read other tensors."""
    for node in graph.nodes:
        for i, tensor in enumerate(node.inputs):
            if id(tensor) in instead:
                node.inputs[i] = instead[id(tensor)]
        for inner in node.attrs.values():
            if isinstance(inner, gs.Graph):
                _redirect(inner, instead)
    for i, tensor in enumerate(graph.outputs):
        graph.outputs[i] = instead.get(id(tensor), tensor)


def _merged(
    emitter: SizeEmitter,
    parts: Sequence[ir.Tensor],
    shapes: Sequence[tuple[Dim, ...]],
    flags: Sequence[gs.Variable],
) -> gs.Variable:
    """One result: the elements of both parts, in the shape of the one whose flag is 1."""
    editor = emitter.editor
    flat = [_made(editor, "Reshape", [p, editor.constant("flat", np.asarray([-1], np.int64))]) for p in parts]
    target = []
    for first, other in zip(*shapes, strict=True):
        if same(first, other):
            target.append(emitter.vector([first]))
        else:
            either = [
                _made(editor, "Mul", [emitter.vector([d]), f]) for d, f in zip((first, other), flags, strict=True)
            ]
            target.append(_made(editor, "Add", either))
    shape = _made(editor, "Concat", target, axis=0)
    return _made(editor, "Reshape", [_made(editor, "Concat", flat, axis=0), shape], allowzero=1)


def _made(editor: ir.GraphEditor, op: str, inputs: Sequence[ir.Tensor], **attrs: int) -> gs.Variable:
    out = gs.Variable(editor.names.fresh(f"{inputs[0].name}.{op}"))
    editor.node(op, inputs, [out], out.name, domain=None, **attrs)
    return out
