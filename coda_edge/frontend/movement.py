"""Movement algebra: chains of Reshape, Transpose, Squeeze, Unsqueeze and Flatten as one rearrangement.

A tensor's axes are split into *atoms*, the factors that no operator of the chain divides further. A chain then is the
order of its source's atoms and how they group into axes, and is written back as at most Reshape, Transpose, Reshape;
as nothing when it changes nothing. A scalar operator inside a chain moves behind it, and a slice before it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from .. import ir
from ..symbolic import Dim, divide, product
from .shapes import SymbolicInfo
from .sizes import SizeEmitter, reshape_target

_VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")
MOVES = (*_VIEWS, "Transpose")
# Operators that treat all elements alike, given that any other operand is one number.
_SCALAR = ("Mul", "Div", "Add", "Sub", "Cast", "Neg", "Not")


class Atom:
    """One factor of an axis. Two atoms are the same only if they are one object."""

    def __init__(self, size: Dim) -> None:
        self.size = size


@dataclass
class View:
    """A rearrangement of ``root``: its atoms by axis, and the result's. An axis of size 1 has no atoms."""

    root: gs.Variable
    source: list[list[Atom]]
    axes: list[list[Atom]]
    length: int = 0

    @classmethod
    def of(cls, root: gs.Variable) -> View:
        """``root`` as it is."""
        source = [[] if d == 1 else [Atom(d)] for d in ir.shape(root)]
        return cls(root, source, [list(g) for g in source])

    def transposed(self, perm: Sequence[int]) -> View:
        """The view after a Transpose."""
        return View(self.root, self.source, [self.axes[p] for p in perm], self.length + 1)

    def reshaped(self, dims: Sequence[Dim]) -> View | None:
        """The view after a Reshape to ``dims``; None if that cuts across atoms."""
        splits: dict[Atom, tuple[Atom, Atom]] = {}
        queue = deque(a for group in self.axes for a in group)
        axes: list[list[Atom]] = []
        for dim in dims:
            group: list[Atom] = []
            need: Dim | None = dim
            while need != 1:
                if not queue or need is None or need == 0:
                    return None
                atom = queue.popleft()
                rest, over = divide(need, atom.size), divide(atom.size, need)
                if rest is not None:
                    group.append(atom)
                    need = rest
                elif over is not None:
                    splits[atom] = (Atom(need), Atom(over))
                    group.append(splits[atom][0])
                    queue.appendleft(splits[atom][1])
                    need = 1
                else:
                    return None
            axes.append(group)
        if queue:
            return None
        source = [[piece for atom in group for piece in _pieces(atom, splits)] for group in self.source]
        return View(self.root, source, axes, self.length + 1)


def _pieces(atom: Atom, splits: dict[Atom, tuple[Atom, Atom]]) -> list[Atom]:
    if atom not in splits:
        return [atom]
    return [piece for part in splits[atom] for piece in _pieces(part, splits)]


@dataclass(frozen=True)
class Steps:
    """A rearrangement as operators: reshape to ``split``, permute, reshape to ``merged``; None where not needed."""

    split: tuple[Dim, ...] | None
    perm: tuple[int, ...] | None
    merged: tuple[Dim, ...] | None

    def __len__(self) -> int:
        return sum(s is not None for s in (self.split, self.perm, self.merged))


def plan(view: View) -> Steps:
    """The fewest operators that make the view from its root."""
    have = ir.shape(view.root)
    out = tuple(product(a.size for a in group) for group in view.axes)
    before = [a for group in view.source for a in group]
    after = [a for group in view.axes for a in group]
    if before == after:
        return Steps(None, None, None if ir.same_shape(have, out) else out)
    ways = (
        _by_result(view, have, out, before),
        _by_source(view, have, out, after),
        _by_groups(have, out, before, after),
    )
    return min((way for way in ways if way is not None), key=len)


def _by_source(view: View, have: Sequence[Dim], out: tuple[Dim, ...], after: list[Atom]) -> Steps | None:
    """Permutes the root's own axes, if each stays in one piece."""
    where = {atom: i for i, atom in enumerate(after)}
    if not all(_in_a_row(group, where) for group in view.source):
        return None
    units = deque(i for i, group in enumerate(view.source) if not group)
    starting = {group[0]: i for i, group in enumerate(view.source) if group}
    perm: list[int] = []
    for group in view.axes:
        if group:
            perm.extend(starting[a] for a in group if a in starting)
        elif units:
            perm.append(units.popleft())
    perm.extend(units)
    dims = [have[p] for p in perm]
    return Steps(None, tuple(perm), None if ir.same_shape(dims, out) else out)


def _by_result(view: View, have: Sequence[Dim], out: tuple[Dim, ...], before: list[Atom]) -> Steps | None:
    """Splits the root into the result's axes, if each lies in one piece, then permutes."""
    where = {atom: i for i, atom in enumerate(before)}
    if not all(_in_a_row(group, where) for group in view.axes):
        return None
    order = sorted(range(len(out)), key=lambda i: (where[view.axes[i][0]] if view.axes[i] else len(before), i))
    split = tuple(out[i] for i in order)
    perm = tuple(order.index(i) for i in range(len(out)))
    return Steps(None if ir.same_shape(split, have) else split, perm, None)


def _in_a_row(group: list[Atom], where: dict[Atom, int]) -> bool:
    return all(where[b] == where[a] + 1 for a, b in itertools.pairwise(group))


def _by_groups(have: Sequence[Dim], out: tuple[Dim, ...], before: list[Atom], after: list[Atom]) -> Steps:
    """Splits into the largest groups that stay together, permutes, and merges."""
    following = dict(itertools.pairwise(after))
    groups: list[list[Atom]] = []
    for atom in before:
        if groups and following.get(groups[-1][-1]) is atom:
            groups[-1].append(atom)
        else:
            groups.append([atom])
    split = tuple(product(a.size for a in group) for group in groups)
    where = {group[0]: i for i, group in enumerate(groups)}
    perm = tuple(where[a] for a in after if a in where)
    permuted = tuple(split[p] for p in perm)
    return Steps(None if ir.same_shape(split, have) else split, perm, None if ir.same_shape(permuted, out) else out)


def trace(graph: gs.Graph) -> dict[str, View]:
    """Every movement operator's output, by name, as a rearrangement of the source of its chain."""
    views: dict[str, View] = {}
    for node in ir.in_order(graph):
        if node.domain or node.op not in MOVES or isinstance(node.inputs[0], gs.Constant):
            continue
        fresh = View.of(node.inputs[0])
        for view in (views.get(node.inputs[0].name, fresh), fresh):
            if node.op == "Transpose":
                perm = node.attrs.get("perm") or range(len(view.axes))[::-1]
                after: View | None = view.transposed(perm)
            else:
                after = view.reshaped(ir.shape(node.outputs[0]))
            if after is not None:
                views[node.outputs[0].name] = after
                break
    return views


def write(emitter: SizeEmitter, view: View, base: str) -> ir.Tensor:
    """The view's tensor, computed from its root by the fewest operators."""
    steps = plan(view)
    x: ir.Tensor = view.root
    x = x if steps.split is None else reshape(emitter, x, steps.split, base)
    if steps.perm is not None:
        dims = ir.shape(x)
        order = [dims[p] for p in steps.perm]
        x = emitter.editor.apply("Transpose", [x], order, f"{base}.order", perm=list(steps.perm))
    return x if steps.merged is None else reshape(emitter, x, steps.merged, base)


def reshape(emitter: SizeEmitter, x: ir.Tensor, dims: Sequence[Dim], base: str) -> gs.Variable:
    """``x`` in the shape ``dims``."""
    target = reshape_target(ir.shape(x), dims)
    if target is None:
        return emitter.editor.apply("Reshape", [x, emitter.vector(dims)], dims, f"{base}.view", allowzero=1)
    return emitter.editor.apply("Reshape", [x, emitter.vector(target)], dims, f"{base}.view")


def compose_movement(graph: gs.Graph, info: SymbolicInfo) -> int:
    """Shortens every chain of movement operators that can be written with fewer; returns how many it rewrote."""
    count = _sink_scalars(graph)
    emitter, views = SizeEmitter(graph, info), trace(graph)
    nodes = list(graph.nodes)
    hoisted = sum(_hoist_slice(graph, emitter, views, n) for n in nodes if n.op == "Slice" and not n.domain)
    if hoisted:
        # A slice that moved may have been the source of a chain: those are for the next call.
        return count + hoisted
    ends = [n for n in nodes if n.op in MOVES and n.outputs and _ends_here(graph, views, n.outputs[0])]
    for node in ends:
        out = node.outputs[0]
        view = views[out.name]
        if _is_gone(graph, view.root):
            continue  # an output of the graph that equals it has taken its place just now
        if len(plan(view)) < view.length:
            node.outputs.clear()
            emitter.editor.replace(out, write(emitter, view, out.name))
            count += 1
    return count


def _is_gone(graph: gs.Graph, tensor: gs.Variable) -> bool:
    return tensor not in graph.inputs and ir.producer(tensor) is None


def _ends_here(graph: gs.Graph, views: dict[str, View], out: gs.Variable) -> bool:
    """Whether anything but the chain's next movement reads ``out``, which has a view."""
    if out.name not in views:
        return False
    users = ir.consumers(out)
    longer = [n for n in users if n.op in MOVES and n.outputs and n.outputs[0].name in views]
    return ir.is_output(graph, out) or len(longer) < len(users)


def _sink_scalars(graph: gs.Graph) -> int:
    """Moves scalar operators between two movements behind the second."""
    editor = ir.GraphEditor(graph)
    count = 0
    for node in ir.in_order(graph):
        if node.op not in MOVES or node.domain:
            continue
        scalar = ir.made_by(node.inputs[0], *_SCALAR)
        if scalar is None or ir.sole_consumer(graph, node.inputs[0]) is None:
            continue
        data = next((t for t in scalar.inputs if ir.made_by(t, *MOVES) is not None), None)
        others = [t for t in scalar.inputs if t is not data]
        if data is None or len(others) != len(scalar.inputs) - 1 or any(ir.scalar_value(t) is None for t in others):
            continue
        out = node.outputs[0]
        middle = editor.variable(f"{out.name}.moved", data.dtype, ir.shape(out))
        scalar.inputs = [middle if t is data else _number(editor, t) for t in scalar.inputs]
        node.inputs[0] = data
        node.outputs = [middle]
        scalar.outputs = [out]
        count += 1
    return count


def _number(editor: ir.GraphEditor, tensor: gs.Constant) -> gs.Constant:
    value = ir.constant_value(tensor)
    assert value is not None
    return tensor if not value.ndim else editor.constant(f"{tensor.name}.number", value.reshape(()))


def _cover(slices: Sequence[gs.Node], axis: int, size: int) -> bool:
    """Whether constant ranges of ``axis``, one behind the other, are all of it."""
    bounds = [[ir.constant_value(t) for t in node.inputs[1:4]] for node in slices]
    if any(len(b) < 3 or any(v is None or v.size != 1 for v in b) for b in bounds):
        return False
    ranges = sorted(tuple(int(v.reshape(-1)[0]) for v in b if v is not None) for b in bounds)
    ends = [0, *(min(end, size) for _, end, _ in ranges)]
    alike = all(at == axis for *_, at in ranges)
    return len(ranges) > 1 and alike and ends[-1] == size and [start for start, *_ in ranges] == ends[:-1]


def _hoist_slice(graph: gs.Graph, emitter: SizeEmitter, views: dict[str, View], node: gs.Node) -> int:
    """Slices the source of a chain instead of its end, where the slice is one range of a source axis.

    What others read whole is arranged anyway: parts of that (halves of a head that is rotated) stay parts of it. So do rows that
    are all of an axis together (tokens that are rotated and those that are not); columns are split where they are made.
    """
    view = views.get(node.inputs[0].name)
    if any(u.op != "Slice" for u in ir.consumers(node.inputs[0])) or ir.is_output(graph, node.inputs[0]):
        return 0
    bounds = [ir.constant_value(t) for t in node.inputs[1:]]
    if view is None or any(b is None or b.size != 1 for b in bounds) or len(bounds) != 3:
        return 0
    if _is_gone(graph, view.root):
        return 0  # the source is a slice that has moved just now
    start, end, axis = (int(b.reshape(-1)[0]) for b in bounds if b is not None)
    atoms = view.axes[axis]
    if len(atoms) != 1 or not isinstance(atoms[0].size, int) or not 0 <= start < end <= atoms[0].size:
        return 0
    place = next(i for i, group in enumerate(view.source) if atoms[0] in group)
    group = view.source[place]
    inner = product(a.size for a in group[1:])
    if group[0] is not atoms[0] or not isinstance(inner, int):
        return 0
    rows = len(group) == 1 and place != len(view.source) - 1
    if rows and _cover(ir.consumers(node.inputs[0]), axis, atoms[0].size):
        return 0
    out, size = node.outputs[0], end - start
    dims = [size * inner if i == place else d for i, d in enumerate(ir.shape(view.root))]
    operands = [emitter.vector([v]) for v in (start * inner, end * inner, place)]
    root = emitter.editor.apply("Slice", [view.root, *operands], dims, f"{out.name}.source")
    piece = [] if size == 1 else [Atom(size)]
    moved = View(
        root,
        [piece + g[1:] if i == place else g for i, g in enumerate(view.source)],
        [piece if i == axis else g for i, g in enumerate(view.axes)],
        view.length,
    )
    node.outputs.clear()
    emitter.editor.replace(out, write(emitter, moved, out.name))
    return 1
