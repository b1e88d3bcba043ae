"""A rotary embedding, however it is spelled, joins the epilogue of the Gemm that makes the heads it rotates.

Rule: let x be an output of a Gemm in heads, ``[B, H, S, D]`` or ``[B, S, H, D]``. Elementwise operators and operators that only move
heads, or elements within a head (Slice, Concat, Gather, Reshape, Unsqueeze, Transpose), make of x tensors each of whose elements
depends on some columns of the head. If these columns fall into pairs, all of it is elementwise on two half-wide values: the
columns of the weights are put into the order of the pairs, the epilogue computes on ``even`` and ``odd``, and ``interleave``s. The
operands (cosines, sines) become tiles of D/2 columns which all heads share.

A column that nothing pairs is paired with its neighbour if nothing pairs that; what is computed for some of the pairs only is chosen by
a column mask. Sums over a head (``ReduceMean``, ``RowMoments``, …) are values of kind ``head``, and elementwise operators combine them with its columns: so
a norm by heads joins, alone or with a rotation. A rotation of halves, of adjacent columns, of either in a part of the head, of each axis of an image in a part of its
own, and one that puts pairs into halves are one rule.

Conditions: what is read outside has all D columns. In what is read, the two columns of a pair are neighbours, or lie in the halves of a
range of the head (stored as ``heads[D] halves[a:b]``), and all that is read has its pairs in one order. Operands have one head, and
rows as an epilogue's operand may have.
Refused, with the reason: pairs that lie otherwise, a Gemm whose columns may not be moved (it also reads a whole tensor, or stores the
same columns in another way), column operands that are not constant, sums over heads of more
than ``head_region.WIDEST`` columns.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from coda_edge.epilogue.builder import Builder
from coda_edge.epilogue.ops import Group
from coda_edge.epilogue.program import Argument, EpilogueProgram, Kind, Param
from coda_edge.errors import ShapeError
from coda_edge.ir import (
    DOMAIN,
    ELEMENTWISE,
    GraphEditor,
    Tensor,
    constant_value,
    consumers,
    in_order,
    is_output,
    remove_dead,
    remove_nodes,
    same_shape,
    shape,
    sort,
)
from coda_edge.weights import choose_columns

from .base import Pass, PassLog, sources
from .head_region import Region, Root, grow, literal, operand_of
from .head_sums import head_sums, is_head_sum
from .heads import LEAD, SWAP, Labels, moved, unite_single_heads
from .pieces import Pieces
from .region import DTYPES, Refused


@dataclass(frozen=True)
class _Pairs:
    """The D/2 pairs of a head's columns, and the ranges of columns in which they lie in halves: elsewhere they are neighbours."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    halves: tuple[tuple[int, int], ...] = ()

    @property
    def apart(self) -> bool:
        """Whether there are no pairs: each column is one of ``first``."""
        return not self.second


def run(graph: gs.Graph, log: PassLog) -> int:
    """Absorbs every rotation; returns how many."""
    editor = GraphEditor(graph)
    pieces = Pieces(editor)
    count = 0
    for node in in_order(graph):
        if node.op != "Gemm" or node.domain != DOMAIN:
            continue
        unite_single_heads(editor, node)
        waiting = [str(t.name) for t in node.outputs]
        while waiting:
            name = waiting.pop()
            tensor = next((t for t in node.outputs if t.name == name), None)
            root = _root(graph, node, tensor) if tensor is not None else None
            if root is None:
                continue
            try:
                made = _rewrite(graph, editor, pieces, root)
            except Refused as why:
                log.refuse(PASS.name, node, str(why))
                continue
            if made is not None:
                node = made
                count += 1
    remove_dead(graph)
    sort(graph)
    return count


def _root(graph: gs.Graph, gemm: gs.Node, stored: gs.Variable) -> Root | None:
    """The heads that ``stored`` holds, if it holds heads: laid out by the Gemm, or split by a Reshape."""
    program = EpilogueProgram.parse(gemm.attrs["epilogue"])
    output = next(o for o, t in zip(program.outputs, gemm.outputs, strict=True) if t is stored)
    if output.kind is not Kind.TILE or output.halves:
        return None
    if output.heads is not None:
        return Root(gemm, program, output, stored, stored, rows=2)
    readers = consumers(stored)
    if len(readers) != 1 or readers[0].op != "Reshape" or is_output(graph, stored):
        return None
    split = readers[0].outputs[0]
    dims = shape(split)
    known = len(dims) > LEAD and all(isinstance(d, int) for d in dims[2:])
    if not known or len(shape(stored)) != 3 or not same_shape(dims[:2], shape(stored)[:2]):
        return None
    return Root(gemm, program, output, stored, split, rows=1)


def _rewrite(graph: gs.Graph, editor: GraphEditor, pieces: Pieces, root: Root) -> gs.Node | None:
    """The Gemm that does what follows ``root``; None if nothing that follows pairs columns."""
    region = grow(graph, root)
    groups = _groups(root.size, region)
    if len(set(groups)) == root.size and not any(is_head_sum(n) for n in region.nodes):
        if region.reasons and any(n.op in ("Slice", "Concat", "Gather") for n in region.nodes):
            raise Refused(region.reasons[0])
        return None
    exits = _exits(graph, root, region)
    apart = len(set(groups)) == root.size
    pairs = _Pairs(tuple(range(root.size)), ()) if apart else _paired(root, region, exits[-1], groups)
    product = root.columns
    if product[0] % root.size or (product[1] - product[0]) % root.size:
        raise Refused(f"columns {product} of the product are no whole heads of {root.size}")
    if not apart:
        _check_columns_move(root)
    order = _order(root, pairs)
    joint = _Joint(root, region, groups, pairs, pieces, editor)
    for node in region.nodes:
        joint.add(node)
    return joint.replace(graph, exits, order)


def _paired(root: Root, region: Region, tensor: gs.Variable, groups: list[int]) -> _Pairs:
    """The pairs of ``groups`` in the order in which they lie in ``tensor``."""
    origin = _origin(region, tensor, groups)
    lie = _lie(origin, groups)
    columns = {g: [c for c in range(root.size) if groups[c] == g] for g in groups}
    first = [columns[origin[a]][0] for a in lie.first]
    second = [columns[origin[b]][-1] for b in lie.second]
    return _Pairs(tuple(first), tuple(second))


def _groups(size: int, region: Region) -> list[int]:
    """For each of a head's columns the first one of those that the region makes depend on each other."""
    group = list(range(size))

    def find(c: int) -> int:
        while group[c] != c:
            c = group[c]
        return c

    for labels in region.depends.values():
        for columns in filter(None, labels.reshape(-1)):
            first, *others = sorted(columns)
            for other in others:
                a, b = sorted((find(first), find(other)))
                group[b] = a
    found = [find(c) for c in range(size)]
    widest = max(found.count(c) for c in found)
    if widest > 2 or (widest == 2 and size % 2):
        raise Refused(f"{widest} of the {size} columns of a head depend on each other, expected pairs")
    return found


def _origin(region: Region, tensor: gs.Variable, groups: list[int]) -> list[int]:
    """The group that each column of ``tensor``, which has all of a head, comes from."""
    return [groups[min(columns)] for columns in region.depends[id(tensor)]]


def _lie(origin: list[int], groups: list[int]) -> _Pairs:
    """How the pairs lie in a tensor whose columns come from the groups ``origin``."""
    first: list[int] = []
    second: list[int] = []
    halves: list[tuple[int, int]] = []
    while len(first) + len(second) < len(origin):
        at = len(first) + len(second)
        step = next((c for c in range(at + 1, len(origin)) if origin[c] == origin[at]), at + 1) - at
        here, there = range(at, at + step), range(at + step, at + 2 * step)
        fits = there.stop <= len(origin)
        alone = fits and step == 1 and all(groups.count(origin[c]) == 1 for c in (at, there.start))
        if not fits or not (alone or all(origin[a] == origin[b] for a, b in zip(here, there, strict=True))):
            raise Refused(
                f"columns {at} and {at + step} of the {len(origin)} of a head belong together, but not all between them and "
                "after in the same way: pairs are stored as neighbours or as halves of a range"
            )
        first += here
        second += there
        halves += [(at, there.stop)] if step > 1 else []
    return _Pairs(tuple(first), tuple(second), tuple(halves))


def _exits(graph: gs.Graph, root: Root, region: Region) -> list[gs.Variable]:
    """The tensors that are read outside."""
    inside = {id(n) for n in region.nodes}
    exits = [
        t
        for t in (root.tensor, *(n.outputs[0] for n in region.nodes))
        if is_output(graph, t) or any(id(u) not in inside for u in consumers(t))
    ]
    for t in exits:
        if not same_shape(shape(t), (*root.lead(region.rows[id(t)]), root.size)):
            reason = "; ".join(region.reasons[:1])
            raise Refused(f"a part of the heads is read elsewhere (tensor '{t.name}'){': ' + reason if reason else ''}")
    return exits


def _check_columns_move(root: Root) -> None:
    """Raises Refused unless the heads' columns of the product may be put into another order."""
    program, n = root.program, int(root.gemm.inputs[1].shape[1])
    start, end = root.columns
    for output in program.outputs:
        if output is root.output or output.kind is not Kind.TILE:
            continue
        width = program.width(output.value, n)
        first, last = (c * n // width for c in output.columns or (0, width))
        if first < end and start < last:
            raise Refused(f"the same columns of the product are also stored another way (output '{output.name}')")
    tensors = {p.name for p in program.params[1:] if p.kind is Kind.TILE}
    values = [root.output.value]
    values += [str(s.args[0]) for s in program.steps if s.operator.group is Group.REDUCE]
    read: set[str] = set()
    for value in values:
        cone, pairs = _cone(program, value)
        if tensors & cone or pairs:
            raise Refused("the epilogue reads a whole tensor or pairs columns already, whose order would change")
        read |= cone
    for param, tensor in zip(program.params[1:], root.gemm.inputs[2:], strict=True):
        moves = param.kind is Kind.COL and param.name in read
        if moves and constant_value(tensor) is None:
            raise Refused(f"column operand '{tensor.name}' is not constant: its columns cannot be put into order")


def _cone(program: EpilogueProgram, value: str) -> tuple[set[str], bool]:
    """The values that ``value`` is computed from, and whether columns are paired on the way."""
    steps = {name: s for s in program.steps for name in s.names}
    seen: set[str] = set()
    stack, pairs = [value], False
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in steps:
            pairs |= steps[name].operator.group is Group.PAIRWISE
            stack += [a for a in steps[name].args if isinstance(a, str)]
    return seen, pairs


def _order(root: Root, pairs: _Pairs) -> list[int]:
    """Which column of the product is at each place, with the pairs of each head side by side."""
    order = list(range(int(root.gemm.inputs[1].shape[1])))
    if pairs.apart:
        return order
    inner = [c for pair in zip(pairs.first, pairs.second, strict=True) for c in pair]
    for start in range(*root.columns, root.size):
        order[start : start + root.size] = [start + c for c in inner]
    return order


class _Joint:
    """The Gemm's program, growing over the region. The label of an element is (value, pair)."""

    def __init__(
        self, root: Root, region: Region, groups: list[int], pairs: _Pairs, pieces: Pieces, editor: GraphEditor
    ) -> None:
        self._root = root
        self._region = region
        self._groups = groups
        self._pieces = pieces
        self._editor = editor
        self.builder = Builder(root.program)
        self._operands = dict(zip((p.name for p in root.program.params[1:]), root.gemm.inputs[2:], strict=True))
        self._named = {
            (id(self._operands[p.name]), replace(p, name=p.kind.value)): p.name for p in root.program.params[1:]
        }
        self._labels: dict[int, Labels] = {}
        labels = np.empty(root.size, object)
        self._apart = pairs.apart
        self._count = len(pairs.first)
        for op, columns in (("even", pairs.first), ("odd", pairs.second)):
            value = root.output.value if self._apart else self.builder.add(op, root.output.value)
            for j, column in enumerate(columns):
                labels[column] = (value, j)
        self._labels[id(root.tensor)] = labels.reshape(root.head)

    def add(self, node: gs.Node) -> None:
        """Appends a node of the region."""
        if is_head_sum(node):
            sums = head_sums(self.builder, node, self._unordered(node.inputs[0]), self._root.size)
            for out, value in zip(node.outputs, sums, strict=True):
                label = np.empty(1, object)
                label[0] = (value, None)
                self._labels[id(out)] = label
            return
        if node.op not in ELEMENTWISE:
            made = moved(node, [self._labels.get(id(t)) for t in node.inputs])
            assert made is not None, "what joined moves elements"
            self._labels[id(node.outputs[0])] = made
            return
        out = node.outputs[0]
        labels = np.empty(tuple(int(d) for d in shape(out)[LEAD:]), object)
        inside = [np.broadcast_to(self._labels[id(t)], labels.shape) for t in node.inputs if id(t) in self._labels]
        groups: dict[tuple[object, ...], dict[int | None, tuple[int, ...]]] = {}
        for at in np.ndindex(labels.shape):
            values, pairs = zip(*(a[at] for a in inside), strict=True)
            j = next((p for p in pairs if p is not None), None)
            for copy in itertools.count():
                group = groups.setdefault((*values, copy), {})
                if j not in group:
                    group[j] = at
                    break
        for group in groups.values():
            value = self._step(node, group, labels.shape)
            for j, at in group.items():
                labels[at] = (value, j)
        self._labels[id(out)] = labels

    def replace(self, graph: gs.Graph, exits: list[gs.Variable], order: list[int]) -> gs.Node:
        """Puts the joint Gemm in the place of the Gemm and the region."""
        root, gemm = self._root, self._root.gemm
        outputs = {o.name: t for o, t in zip(root.program.outputs, gemm.outputs, strict=True)}
        self.builder.drop_output(root.output.name)
        del outputs[root.output.name]
        rotated: dict[str, gs.Variable] = {}
        for tensor in exits:
            name = next(f"y{i}" for i in itertools.count() if f"y{i}" not in outputs and f"y{i}" not in rotated)
            rotated[name] = tensor
            lie = _Pairs((), ()) if self._apart else _lie(_origin(self._region, tensor, self._groups), self._groups)
            stored = replace(root.output, name=name, heads=root.size, halves=lie.halves)
            self.builder.output_like(stored, self._whole(tensor, lie))
        try:
            program = self.builder.build(drop_unused_params=True)
            program.check(len(order))
        except ShapeError as e:
            raise Refused(str(e)) from e
        removed = list(self._region.nodes) + ([] if root.tensor is root.stored else [root.tensor.inputs[0]])
        outputs |= {name: self._target(tensor) for name, tensor in rotated.items()}
        weights = gemm.inputs[1]
        if not self._apart:
            weights = choose_columns(self._editor, f"{weights.name}.pairs", [weights], order)
        inputs = [gemm.inputs[0], weights]
        moved_columns = {p.name for p in root.program.params if p.kind is Kind.COL}
        for param in program.params[1:]:
            operand, column = self._operands[param.name], constant_value(self._operands[param.name])
            if (
                param.name in moved_columns
                and column is not None
                and program.width(param.name, len(order)) == len(order)
            ):
                inner = np.broadcast_to(column.reshape(-1), (len(order),))[order]
                operand = self._editor.constant(f"{operand.name}.pairs", inner)
            inputs.append(operand)
        source = sources([gemm, *removed])
        tensors = [outputs[o.name] for o in program.outputs]
        remove_nodes(graph, [gemm, *removed])
        return self._editor.node(
            "Gemm", inputs, tensors, f"{gemm.name}.rotated", domain=DOMAIN, epilogue=str(program), source=source
        )

    def _step(self, node: gs.Node, group: dict[int | None, tuple[int, ...]], size: tuple[int, ...]) -> str:
        """The value that an elementwise node makes for the elements of ``group``: one of each of some pairs."""
        rows = self._region.rows[id(node.outputs[0])]
        args: list[Argument] = []
        for t in node.inputs:
            number = literal(t)
            if id(t) in self._labels:
                value, _ = np.broadcast_to(self._labels[id(t)], size)[next(iter(group.values()))]
                args.append(value)
            else:
                args.append(number if number is not None else self._piece(t, rows, group, size))
        op = ELEMENTWISE[node.op]
        try:
            if op == "cast":
                target = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(node.attrs["to"])).name
                return self.builder.add(op, args[0], to=DTYPES.get(target, target))
            value = args[0]
            if node.op not in ("Min", "Max"):
                return self.builder.add(op, *args)
            for arg in args[1:]:
                value = self.builder.add(op, value, arg)
            return str(value)
        except ShapeError as e:
            raise Refused(str(e)) from e

    def _piece(self, tensor: Tensor, rows: int, group: dict[int | None, tuple[int, ...]], size: tuple[int, ...]) -> str:
        """The operand that holds what ``tensor`` has for each pair of ``group``."""
        lies = operand_of(self._root, rows, tensor, len(size) + LEAD)
        count = int(np.prod(lies.head))
        index = np.broadcast_to(np.arange(count).reshape(lies.head), size)
        rest = min(group.values())
        columns = [int(index[group.get(j, rest)]) for j in range(self._count)]
        if lies.param.kind is Kind.SCALAR:
            piece = self._pieces.squeezed(tensor, range(len(shape(tensor))))
        elif lies.param.kind is Kind.ROW:
            piece = self._pieces.squeezed(tensor, lies.axes)
        elif lies.head[-1] == 1:
            piece = self._pieces.columns(self._pieces.squeezed(tensor, lies.axes), columns)
        else:
            piece = self._pieces.squeezed(self._pieces.columns(tensor, columns), lies.axes)
        if self._apart and lies.param.period is not None:
            lies = replace(lies, param=replace(lies.param, period=self._count))
        key = (id(piece), lies.param)
        if key not in self._named:
            if lies.param.kind is Kind.COL:
                piece = self._column(constant_value(piece), f"{tensor.name}.pairs")
            self._named[key] = self._declare(lies.param, piece)
        return self._named[key]

    def _column(self, head: Any, name: str) -> gs.Constant:
        """A column operand that is ``head`` in each head."""
        heads = int(self._root.gemm.inputs[1].shape[1]) // self._root.size
        return self._editor.constant(name, np.tile(np.asarray(head).reshape(-1), heads))

    def _declare(self, param: Param, tensor: Tensor) -> str:
        name = self.builder.declare(replace(param, name=f"{param.name}{len(self._operands)}"))
        self._operands[name] = tensor
        return name

    def _whole(self, tensor: gs.Variable, lie: _Pairs) -> str:
        """The value of a tensor of all columns, whose pairs lie so."""
        labels = self._labels[id(tensor)]
        if self._apart:
            return self._chosen(list(labels))
        halves = [self._chosen([labels[c] for c in columns]) for columns in (lie.first, lie.second)]
        return self.builder.add("interleave", *halves)

    def _unordered(self, tensor: Tensor) -> str:
        """The value of a tensor that has every column of a head once, in any order."""
        places: list[list[tuple[str, int]]] = [[] for _ in range(self._count)]
        for label in self._labels[id(tensor)]:
            if label[1] is None or len(places[label[1]]) == self._root.size // self._count:
                raise Refused("a sum over a head is not of each of its columns once")
            places[label[1]].append(label)
        values = [self._chosen(list(labels)) for labels in zip(*places, strict=True)]
        return values[0] if self._apart else self.builder.add("interleave", *values)

    def _chosen(self, labels: list[tuple[str, int]]) -> str:
        """The value that is that of ``labels[j]`` at each pair j."""
        if any(pair != j for j, (_, pair) in enumerate(labels)):
            raise Refused("columns of a head change places")
        values = list(dict.fromkeys(value for value, _ in labels))
        chosen = values[0]
        for value in values[1:]:
            mask = np.array([v == value for v, _ in labels])
            name = self._declare(Param("mask", Kind.COL, "bool"), self._column(mask, "pairs.mask"))
            chosen = self.builder.add("where", name, value, chosen)
        return chosen

    def _target(self, tensor: gs.Variable) -> gs.Variable:
        """The tensor ``[B, H, S, D]`` to store; ``tensor`` itself, unless its axes have another order."""
        if self._region.rows[id(tensor)] == 2:
            return tensor
        dims, order = shape(tensor), [*SWAP, LEAD]
        heads = self._editor.variable(f"{tensor.name}.heads", tensor.dtype, [dims[i] for i in order])
        back = self._editor.apply("Transpose", [heads], dims, f"{tensor.name}.rows", perm=order)
        self._editor.replace(tensor, back)
        return heads


PASS = Pass("rotary", run)
