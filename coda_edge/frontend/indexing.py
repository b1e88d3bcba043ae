"""Index arithmetic: integer and bool tensors that are a formula of their own position, and gathers by them.

Exporters write masks and positions as gathers by counted indices: ``mask[b, k]`` as GatherND by [range, range], or as
Gather from the flattened mask by ``k + b·S``. Where the index of every axis is a count, the gather is a slice and a
rearrangement; where a comparison of counts has one answer, it is a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import onnx_graphsurgeon as gs
import sympy

from .. import ir
from ..symbolic import Dim, format_dim, nonnegative, product, same, simplify
from .equalities import Equalities
from .movement import View, reshape, trace
from .shapes import SymbolicInfo
from .sizes import SizeEmitter, expand_target

_COMPARISONS = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
# Constants up to this size are looked at for counting.
_MOST_ELEMENTS = 1 << 20


@lru_cache(maxsize=64)
def axis_symbol(axis: int) -> sympy.Symbol:
    """The position along an axis, in a formula."""
    return sympy.Symbol(f"position{axis}", integer=True, nonnegative=True)


@dataclass(frozen=True)
class Formula:
    """A tensor whose element at position ``p`` is ``value``, in ``axis_symbol`` of each axis and sizes."""

    value: Dim
    dims: tuple[Dim, ...]

    @classmethod
    def of(cls, tensor: gs.Constant) -> Formula | None:
        """The formula of a constant that is one number throughout, or counts along one axis."""
        return _constant(tensor)

    def aligned(self, dims: Sequence[Dim]) -> Formula:
        """The formula broadcast to ``dims``."""
        return _aligned(self, dims)

    def moved(self, axes: dict[int, int], dims: Sequence[Dim]) -> Formula:
        """The formula in a tensor of shape ``dims`` where axis ``a`` is at ``axes[a]``."""
        names = {axis_symbol(a): axis_symbol(b) for a, b in axes.items()}
        value = self.value if isinstance(self.value, int) else self.value.subs(names, simultaneous=True)
        return Formula(value, tuple(dims))

    def terms(self) -> tuple[dict[int, Dim], Dim] | None:
        """The factor of each axis' position and the rest; None if it is not linear in the positions."""
        rest = sympy.sympify(self.value)
        factors: dict[int, Dim] = {}
        for axis in range(len(self.dims)):
            factor = rest.coeff(axis_symbol(axis))
            if factor != 0:
                factors[axis] = simplify(factor)
                rest = sympy.expand(rest - factor * axis_symbol(axis))
        left = {axis_symbol(a) for a in range(len(self.dims))}
        if rest.free_symbols & left or any(not isinstance(f, int) and f.free_symbols & left for f in factors.values()):
            return None
        return factors, simplify(rest)

    def at_least_zero(self) -> bool:
        """Whether every element is provably at least 0."""
        found = self.terms()
        if found is None:
            return False
        lowest = sympy.sympify(found[1])
        for axis, factor in found[0].items():
            if nonnegative(factor):
                continue
            if not nonnegative(simplify(-factor)):
                return False
            lowest += factor * (self.dims[axis] - 1)
        return nonnegative(simplify(lowest))


@dataclass
class _Analysis:
    info: SymbolicInfo
    formulas: dict[str, Formula] = field(default_factory=dict)

    def of(self, tensor: ir.Tensor) -> Formula | None:
        """The formula of a tensor, if one is known."""
        if isinstance(tensor, gs.Constant):
            return _constant(tensor)
        return self.formulas.get(tensor.name)

    def visit(self, node: gs.Node, views: dict[str, View]) -> None:
        """Finds the formula of a node's output."""
        out = node.outputs[0]
        if node.domain or np.dtype(out.dtype).kind not in "ib":
            return
        dims = ir.shape(out)
        value = self.info.values.get(out.name)
        if value is not None and value.size == 1 and not isinstance(value.item(), float):
            self.formulas[out.name] = Formula(_number(value.item()), dims)
            return
        found = self._formula(node, dims, views)
        if found is not None:
            self.formulas[out.name] = found

    def _formula(self, node: gs.Node, dims: tuple[Dim, ...], views: dict[str, View]) -> Formula | None:
        if node.op == "Range":
            start, step = (self.of(node.inputs[i]) for i in (0, 2))
            return (
                None
                if start is None or step is None
                else Formula(simplify(start.value + step.value * axis_symbol(0)), dims)
            )
        operands = [self.of(t) for t in node.inputs]
        if not operands or operands[0] is None:
            return None
        first = operands[0]
        if node.op == "Expand":
            return _aligned(first, dims)
        if node.op == "Cast":
            # What a bool keeps of a number is whether it is 0.
            lossless = np.dtype(node.outputs[0].dtype).kind == "i" or first.value in (0, 1, sympy.true, sympy.false)
            return first if lossless else None
        if node.op in ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose"):
            return _rearranged(first, node, dims)
        if node.op == "Slice":
            return _sliced(first, [self._known(t) for t in (node.inputs[1], *node.inputs[3:])], dims)
        if node.op == "CumSum" and first.value == 1 and not any(node.attrs.get(a, 0) for a in ("exclusive", "reverse")):
            axis = ir.scalar_value(node.inputs[1])
            return None if axis is None else Formula(axis_symbol(int(axis) % len(dims)) + 1, dims)
        if len(operands) != 2 or operands[1] is None or first.value in (sympy.true, sympy.false):
            return None
        a, b = _aligned(first, dims).value, _aligned(operands[1], dims).value
        if node.op in _COMPARISONS:
            answer = _compare(node.op, Formula(simplify(sympy.sympify(a) - sympy.sympify(b)), dims))
            return None if answer is None else Formula(int(answer), dims)
        if node.op in ("Add", "Sub", "Mul") and np.dtype(node.outputs[0].dtype).kind == "i":
            combined = {"Add": lambda: a + b, "Sub": lambda: a - b, "Mul": lambda: a * b}[node.op]()
            return Formula(simplify(combined), dims)
        return None

    def _known(self, tensor: ir.Tensor) -> list[Dim] | None:
        value = ir.constant_value(tensor) if isinstance(tensor, gs.Constant) else self.info.values.get(tensor.name)
        return None if value is None else [_number(v) for v in value.reshape(-1)]


def formulas(graph: gs.Graph, info: SymbolicInfo) -> dict[str, Formula]:
    """The formulas of the integer and bool tensors of ``graph`` that have one, by name. Shapes must be annotated."""
    return _analysed(graph, info, trace(graph)).formulas


def _analysed(graph: gs.Graph, info: SymbolicInfo, views: dict[str, View]) -> _Analysis:
    analysis = _Analysis(info)
    for node in ir.in_order(graph):
        if node.outputs and node.outputs[0].name:
            analysis.visit(node, views)
    return analysis


def _number(value: object) -> Dim:
    return value if isinstance(value, sympy.Expr) else int(value)  # type: ignore[call-overload]


def _constant(tensor: gs.Constant) -> Formula | None:
    """A constant that is one number throughout, or counts along one axis."""
    dims = ir.shape(tensor)
    if np.dtype(tensor.dtype).kind not in "ib" or not 0 < np.prod(dims, dtype=np.int64) <= _MOST_ELEMENTS:
        return None
    value = np.asarray(tensor.values).astype(np.int64)
    first = value.reshape(-1)[0]
    if (value == first).all():
        return Formula(int(first), dims)
    long = [i for i, d in enumerate(dims) if d != 1]
    steps = np.diff(value.reshape(-1))
    if len(long) != 1 or (steps != steps[0]).any():
        return None
    return Formula(simplify(int(first) + int(steps[0]) * axis_symbol(long[0])), dims)


def _aligned(formula: Formula, dims: Sequence[Dim]) -> Formula:
    """The formula broadcast to ``dims``."""
    shift = len(dims) - len(formula.dims)
    return formula.moved({a: a + shift for a in range(len(formula.dims))}, dims)


def _rearranged(formula: Formula, node: gs.Node, dims: tuple[Dim, ...]) -> Formula | None:
    """The formula after a movement that keeps every axis in one piece."""
    start = View.of(gs.Variable("x", shape=[format_dim(d) for d in formula.dims]))
    if node.op == "Transpose":
        end: View | None = start.transposed(node.attrs.get("perm") or range(len(dims))[::-1])
    else:
        end = start.reshaped(dims)
    if end is None or any(len(g) > 1 for g in (*end.source, *end.axes)):
        return None
    place = {id(g[0]): i for i, g in enumerate(end.axes) if g}
    return formula.moved({i: place[id(g[0])] for i, g in enumerate(end.source) if g}, dims)


def _sliced(formula: Formula, given: list[list[Dim] | None], dims: tuple[Dim, ...]) -> Formula | None:
    """The formula after a Slice of ``given`` starts, axes and perhaps steps."""
    starts, axes, *steps = given
    if starts is None or axes is None or (steps and (steps[0] is None or any(s != 1 for s in steps[0]))):
        return None
    value = sympy.sympify(formula.value)
    for start, axis in zip(starts, axes, strict=True):
        if not nonnegative(start) and not isinstance(start, int):
            return None
        axis = int(axis) % len(dims)
        first = start if nonnegative(start) else formula.dims[axis] + start
        value = value.subs(axis_symbol(axis), axis_symbol(axis) + first)
    return Formula(simplify(value), dims)


def _compare(op: str, difference: Formula) -> bool | None:
    """The one answer of comparing two tensors that differ by ``difference``, if there is one."""
    negated = Formula(simplify(-sympy.sympify(difference.value)), difference.dims)
    less = Formula(simplify(sympy.sympify(negated.value) - 1), difference.dims).at_least_zero()
    greater = Formula(simplify(sympy.sympify(difference.value) - 1), difference.dims).at_least_zero()
    at_least, at_most = difference.at_least_zero(), negated.at_least_zero()
    yes, no = {
        "Equal": (at_least and at_most, less or greater),
        "Less": (less, at_least),
        "LessOrEqual": (at_most, greater),
        "Greater": (greater, at_most),
        "GreaterOrEqual": (at_least, less),
    }[op]
    return True if yes else False if no else None


def simplify_indexing(graph: gs.Graph, info: SymbolicInfo) -> int:
    """Turns gathers by counted indices into slices, and decided comparisons into constants; returns how many.

    A gather that counts through an axis of another size is taken to count through all of it: the graph's inputs then
    share one size. Shapes must be annotated; the new tensors' are too.
    """
    views = trace(graph)
    rewriter = _Rewriter(graph, _analysed(graph, info, views), views)
    return sum(rewriter.rewrite(node) for node in ir.in_order(graph))


class _Rewriter:
    def __init__(self, graph: gs.Graph, analysis: _Analysis, views: dict[str, View]) -> None:
        self.graph = graph
        self.analysis = analysis
        self.views = views
        self.emitter = SizeEmitter(graph, analysis.info)

    def rewrite(self, node: gs.Node) -> int:
        """Rewrites one node if it can be; returns 1 if so."""
        if node.domain or not node.outputs:
            return 0
        out = node.outputs[0]
        new = {"Gather": self._gather, "GatherND": self._gather_nd}.get(node.op, self._decided)(node)
        if new is None:
            return 0
        node.outputs.clear()
        self.emitter.editor.replace(out, new)
        return 1

    def _decided(self, node: gs.Node) -> ir.Tensor | None:
        if node.op not in _COMPARISONS:
            return None
        formula = self.analysis.of(node.outputs[0])
        if formula is None or formula.value not in (0, 1):
            return None
        fill = self.emitter.editor.constant("fill", np.full([1] * len(formula.dims), bool(formula.value)))
        return self._expand(fill, formula.dims, node.outputs[0].name)

    def _gather(self, node: gs.Node) -> ir.Tensor | None:
        data, indices = node.inputs
        formula = self.analysis.of(indices)
        axis = node.attrs.get("axis", 0)
        if formula is None:
            return None
        plain = self._take(data, {axis: formula}, axis, formula.dims, node.outputs[0].name)
        return plain if plain is not None else self._gather_flat(node, formula, axis)

    def _gather_flat(self, node: gs.Node, formula: Formula, axis: int) -> ir.Tensor | None:
        """Gather from merged axes: the index's factors tell the axes apart."""
        view, terms = self.views.get(node.inputs[0].name), formula.terms()
        if view is None or terms is None or axis != 0 or terms[1] != 0:
            return None
        whole = {id(group[0]): i for i, group in enumerate(view.source) if len(group) == 1}
        atoms = view.axes[0]
        others = [a for group in view.axes[1:] for a in group]
        if others or len(atoms) != len(whole) or not all(id(a) in whole for a in atoms):
            return None
        picked: dict[int, Formula] = {}
        for position, atom in enumerate(atoms):
            stride = product(a.size for a in atoms[position + 1 :])
            axes = [a for a, factor in terms[0].items() if same(factor, stride)]
            if len(axes) != 1:
                return None
            picked[whole[id(atom)]] = Formula(axis_symbol(axes[0]), formula.dims)
        if len(terms[0]) != len(picked):
            return None
        squeezed = [i for i, group in enumerate(view.source) if not group]
        if squeezed:
            return None
        taken = self._take(view.root, picked, 0, formula.dims, node.outputs[0].name)
        dims = ir.shape(node.outputs[0])
        if taken is None or ir.same_shape(ir.shape(taken), dims):
            return taken
        return reshape(self.emitter, taken, dims, node.outputs[0].name)

    def _gather_nd(self, node: gs.Node) -> ir.Tensor | None:
        data, indices = node.inputs
        if node.attrs.get("batch_dims", 0):
            return None
        parts = ir.made_by(indices, "Concat")
        pieces = [indices] if parts is None else list(parts.inputs)
        dims = ir.shape(indices)
        rank = len(dims) - 1
        if (parts is not None and parts.attrs["axis"] % len(dims) != rank) or len(pieces) != dims[-1]:
            return None
        formulas = [self.analysis.of(p) for p in pieces]
        if any(f is None for f in formulas):
            return None
        picked = {axis: Formula(f.value, dims[:-1]) for axis, f in enumerate(formulas) if f is not None}
        return self._take(data, picked, 0, dims[:-1], node.outputs[0].name)

    def _take(
        self, data: ir.Tensor, picked: dict[int, Formula], place: int, index_dims: Sequence[Dim], base: str
    ) -> ir.Tensor | None:
        """``data`` with the axes of ``picked`` (adjacent, from ``place``) indexed by counts; their axes come in their place."""
        dims = list(ir.shape(data))
        counts: dict[int, int] = {}
        for axis, formula in picked.items():
            terms = formula.terms()
            if terms is None or len(terms[0]) > 1 or any(f != 1 for f in terms[0].values()):
                return None
            for index_axis in terms[0]:
                if index_axis in counts.values():
                    return None
                counts[axis] = index_axis
        x = data
        for axis, formula in picked.items():
            terms = formula.terms()
            assert terms is not None
            count = index_dims[counts[axis]] if axis in counts else 1
            x = self._range(x, axis, terms[1], count, base)
            dims[axis] = count
        before, after = list(range(place)), list(range(place + len(picked), len(dims)))
        order = sorted(counts, key=lambda a: counts[a])
        perm = before + order + [a for a in picked if a not in counts] + after
        if perm != list(range(len(dims))):
            x = self.emitter.editor.apply("Transpose", [x], [dims[p] for p in perm], f"{base}.order", perm=perm)
        used = set(counts.values())
        inner = [d if i in used else 1 for i, d in enumerate(index_dims)]
        shape = [dims[a] for a in before] + inner + [dims[a] for a in after]
        if not ir.same_shape(ir.shape(x), shape):
            x = reshape(self.emitter, x, shape, base)
        full = [dims[a] for a in before] + list(index_dims) + [dims[a] for a in after]
        return x if ir.same_shape(shape, full) else self._expand(x, full, base)

    def _range(self, x: ir.Tensor, axis: int, start: Dim, count: Dim, base: str) -> ir.Tensor:
        """``count`` elements of an axis from ``start``."""
        dims = list(ir.shape(x))
        if start == 0 and same(count, dims[axis]):
            return x
        if start == 0 and not isinstance(dims[axis], int) and count != 1 and self._one_size(count, dims[axis]):
            dims[axis] = count
            return self.emitter.editor.apply("Identity", [x], dims, base)
        if isinstance(start, int) and start < 0:
            start = simplify(dims[axis] + start)
        bounds = [self.emitter.vector([v]) for v in (start, simplify(start + count), axis)]
        dims[axis] = count
        return self.emitter.editor.apply("Slice", [x, *bounds], dims, f"{base}.part")

    def _one_size(self, a: Dim, b: Dim) -> bool:
        """Makes two sizes one in the graph's inputs; False if neither can be written by the other."""
        symbols = [s for t in self.graph.inputs for d in ir.shape(t) if not isinstance(d, int) for s in d.free_symbols]
        equal = Equalities(symbols)
        if nonnegative(simplify(sympy.sympify(b) - sympy.sympify(a))) or not equal.equate(a, b):
            return False
        for tensor in self.graph.inputs:
            ir.set_shape(tensor, [equal.resolve(d) for d in ir.shape(tensor)])
        return True

    def _expand(self, x: ir.Tensor, dims: Sequence[Dim], base: str) -> ir.Tensor:
        if ir.same_shape(ir.shape(x), dims):
            return x
        target = self.emitter.vector(expand_target(ir.shape(x), dims))
        return self.emitter.editor.apply("Expand", [x, target], dims, f"{base}.spread")
