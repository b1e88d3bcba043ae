"""The frontend: an ONNX model in, a graph in normal form out.

``load`` reads and checks; ``normalize`` binds sizes, folds what is constant, writes composite operators in basic ones
and cancels data movement; ``infer`` gives every tensor its symbolic shape, also after passes have edited the graph.
"""

from __future__ import annotations

from . import coda_rules, contrib, layout_rules, shape_rules, value_rules
from .model import load
from .normal_form import normalize
from .shapes import Constraint, SymbolicInfo, infer

__all__ = ["Constraint", "SymbolicInfo", "infer", "load", "normalize"]

# Imported for the rules that they register.
_RULES = (coda_rules, contrib, layout_rules, shape_rules, value_rules)
