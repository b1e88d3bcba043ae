"""The frontend: an ONNX model in, a graph in normal form out.

``load`` reads and checks; ``normalize`` binds sizes, folds what is constant, writes composite operators in basic ones
and cancels data movement; ``infer`` gives every tensor its symbolic shape, also after passes have edited the graph.

| module | concern |
|---|---|
| ``model`` | read, check, convert, bind sizes |
| ``normal_form`` | the order in which all of the following run |
| ``shapes`` with ``shape_rules``, ``layout_rules``, ``value_rules``, ``coda_rules`` | symbolic inference; a new operator is one rule |
| ``constraints`` | what inference assumed of sizes |
| ``fold``, ``branches`` | constants, equal nodes, control flow that sizes decide |
| ``builder`` with ``decompose``, ``data_sizes``, ``decompose_attention``, ``contrib``, ``convolution``, ``conv_transpose``, ``pooling``, ``quantization``, ``simplify``, ``transposes`` | one function for each operator written otherwise |
| ``sizes`` | shape operands as constants, or read from the inputs |
| ``indexing``, ``spread``, ``movement``, ``rows`` | gathers by counts, lazy Expand, chains of reshapes and transposes |
"""

from __future__ import annotations

from . import coda_rules, contrib, layout_rules, shape_rules, value_rules
from .constraints import ConstraintSet, decided_by_data
from .model import load, without_weights
from .normal_form import NormalForm, normalize, to_normal_form
from .shapes import Constraint, SymbolicInfo, infer

__all__ = [
    "Constraint",
    "ConstraintSet",
    "NormalForm",
    "SymbolicInfo",
    "decided_by_data",
    "infer",
    "load",
    "normalize",
    "to_normal_form",
    "without_weights",
]

# Imported for the rules that they register.
_RULES = (coda_rules, contrib, layout_rules, shape_rules, value_rules)
