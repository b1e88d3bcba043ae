"""coda-edge: exported ONNX Transformers, rewritten into GEMM-plus-epilogue kernels for devices.

Importing this package imports nothing else: each public name loads its module when it is first used, so that running
a bundle needs neither TVM nor onnx.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import epilogue
    from .driver import Optimized, optimize
    from .errors import CodaError
    from .session import Session
    from .targets import Target

__version__ = "0.1.0"
__all__ = ["CodaError", "Optimized", "Session", "Target", "__version__", "epilogue", "optimize"]

_MODULES = {
    "CodaError": ".errors",
    "Optimized": ".driver",
    "Session": ".session",
    "Target": ".targets",
    "optimize": ".driver",
}


def __getattr__(name: str) -> Any:
    if name == "epilogue":
        return import_module(".epilogue", __name__)
    if name not in _MODULES:
        raise AttributeError(f"module 'coda_edge' has no attribute '{name}'")
    value = getattr(import_module(_MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
