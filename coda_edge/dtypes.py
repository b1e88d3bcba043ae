"""Element types by their names, bfloat16 included, which numpy does not have of its own."""

from __future__ import annotations

from typing import Any

import numpy as np


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype called ``name``; bfloat16 is ml_dtypes'."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def is_float(name: str) -> bool:
    """Whether the dtype called ``name`` holds floating-point numbers."""
    return name == "bfloat16" or np.dtype(name).kind == "f"
