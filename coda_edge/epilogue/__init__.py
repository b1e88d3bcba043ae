"""Epilogues: what a GEMM does to its output tile before it stores it.

Layers, each knowing only those before it: ``ops`` (the operator table), ``program`` (the typed program), ``text`` and
``reference`` (its text and its meaning), ``builder`` (growing one), ``onnx`` and ``tir`` (spelling one), ``frontend`` with
``math`` (writing one as a Python function) and ``library`` (ready ones).

The module itself is the decorator too: ``@coda_edge.epilogue`` is ``frontend.epilogue``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .frontend import Col, Epilogue, Period, Row, Scalar, Tile, Value, epilogue
from .program import EpilogueProgram, Kind, Rows

__all__ = ["Col", "Epilogue", "EpilogueProgram", "Kind", "Period", "Row", "Rows", "Scalar", "Tile", "Value", "epilogue"]


class _Decorator(ModuleType):
    def __call__(self, function: Callable[..., Any]) -> Epilogue:
        return epilogue(function)


sys.modules[__name__].__class__ = _Decorator
