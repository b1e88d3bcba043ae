"""What must hold of sizes, gathered from every inference of a graph while it is rewritten.

A rewrite may remove the node at which a size was assumed to be within bounds, while the result still relies on it.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs
import sympy

from .. import ir
from ..symbolic import symbol
from .shapes import Constraint, SymbolicInfo


def input_symbols(graph: gs.Graph) -> set[sympy.Symbol]:
    """The sizes that the shapes of the graph's inputs are made of."""
    return {s for t in graph.inputs for d in ir.shape(t) if not isinstance(d, int) for s in d.free_symbols}


def known_symbols(graph: gs.Graph, info: SymbolicInfo) -> set[sympy.Symbol]:
    """The sizes that a run knows at its start, or reads on its way."""
    return input_symbols(graph) | {symbol(name) for name in info.data}


def decided_by_data(graph: gs.Graph) -> frozenset[str]:
    """The outputs whose shapes the inputs' shapes do not tell."""
    known = input_symbols(graph)
    shapes = {t.name: ir.shape(t) for t in graph.outputs}
    return frozenset(
        n for n, dims in shapes.items() if any(not isinstance(d, int) and d.free_symbols - known for d in dims)
    )


class ConstraintSet:
    """Constraints other than equalities, each once, in the sizes that are left after all equalities found since."""

    def __init__(self) -> None:
        self._found: list[Constraint] = []

    def add(self, info: SymbolicInfo) -> None:
        """Takes the constraints of one inference, and puts its equalities into those found before."""
        found = [c.resolved(info.equal) for c in self._found]
        found += [c for c in info.constraints if c.relation != "="]
        self._found = list({(c.left, c.relation, c.right): c for c in found}.values())

    def known_by(self, graph: gs.Graph, info: SymbolicInfo) -> tuple[Constraint, ...]:
        """Those on sizes of the graph's inputs and of its data: others were about sizes that ``info``, the last inference, knows better."""
        known = known_symbols(graph, info)
        return tuple(c for c in self._found if c.symbols <= known)
