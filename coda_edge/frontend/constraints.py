"""What must hold of the inputs' sizes, gathered from every inference of a graph while it is rewritten.

A rewrite may remove the node at which a size was assumed to be within bounds, while the result still relies on it.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs
import sympy

from .. import ir
from .shapes import Constraint, SymbolicInfo


def input_symbols(graph: gs.Graph) -> set[sympy.Symbol]:
    """The sizes that the shapes of the graph's inputs are made of."""
    return {s for t in graph.inputs for d in ir.shape(t) if not isinstance(d, int) for s in d.free_symbols}


class ConstraintSet:
    """Constraints other than equalities, each once, in the sizes that are left after all equalities found since."""

    def __init__(self) -> None:
        self._found: list[Constraint] = []

    def add(self, info: SymbolicInfo) -> None:
        """Takes the constraints of one inference, and puts its equalities into those found before."""
        found = [c.resolved(info.equal) for c in self._found]
        found += [c for c in info.constraints if c.relation != "="]
        self._found = list({(c.left, c.relation, c.right): c for c in found}.values())

    def known_by(self, graph: gs.Graph) -> tuple[Constraint, ...]:
        """Those on sizes of the graph's inputs: others were about sizes that a later inference knew better."""
        known = input_symbols(graph)
        return tuple(c for c in self._found if c.symbols <= known)
