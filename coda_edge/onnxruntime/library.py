"""Where the generic library for onnxruntime is."""

from __future__ import annotations

from pathlib import Path

from .. import _runtime


def library_path() -> str:
    """The path of ``libcoda_onnxruntime.so``: the execution provider, for ``register_execution_provider_library``."""
    return str(Path(_runtime.__file__).with_name("libcoda_onnxruntime.so"))
