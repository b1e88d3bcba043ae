"""Arrays in a GPU's memory, as other libraries hand them over: ``__cuda_array_interface__`` (PyTorch, CuPy, Numba, JAX)."""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any

import numpy as np

from .errors import DataError, ShapeError

_LEGACY = 1
"""The default stream, which sessions wait for by themselves."""


class DeviceArray:
    """Where an array lies on a GPU: ``address``, ``shape``, ``dtype``, ``nbytes``; it keeps ``owner``, whose memory it is, alive."""

    def __init__(self, owner: Any, name: str) -> None:
        """Of an object that has the interface; waits for the stream, if it names one, that its elements come of.

        Raises ShapeError unless it is contiguous, DataError if that stream has failed; ``name`` is for the message.
        """
        given = owner.__cuda_array_interface__
        self.owner = owner
        self.shape: tuple[int, ...] = tuple(given["shape"])
        self.dtype = np.dtype(given["typestr"])
        self.nbytes = prod(self.shape) * self.dtype.itemsize
        self.address = int(given["data"][0] or 0)
        self.writeable = not given["data"][1]
        strides = given.get("strides")
        dense = tuple(prod(self.shape[i + 1 :]) * self.dtype.itemsize for i in range(len(self.shape)))
        if strides is not None and tuple(strides) != dense and self.nbytes:
            raise ShapeError(f"{name} is an array on a GPU with gaps or another order: make it contiguous")
        stream = given.get("stream")
        if stream is not None and stream != _LEGACY:
            failed = ctypes.CDLL("libcuda.so.1").cuStreamSynchronize(ctypes.c_void_p(stream))
            if failed:
                raise DataError(f"{name} comes of a stream that failed (CUDA error {failed})")


def on_device(value: Any) -> bool:
    """Whether ``value`` is an array on a GPU."""
    return type(value) is not np.ndarray and hasattr(value, "__cuda_array_interface__")
