"""Runs a linked model through the runtime's C interface, as a program does that has it inside."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..bundle.format import DTYPES
from ..dtypes import numpy_dtype
from ..errors import BundleError

_MAX_RANK = 8
_NAMES = {number: name for name, number in DTYPES.items()}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.c_int64 * _MAX_RANK),
    )


class _TensorInfo(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("dtype", ctypes.c_int32), ("rank", ctypes.c_int32))


class _Error(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int), ("message", ctypes.c_char * 1012))


class _Region(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("used", ctypes.c_size_t))


class _Allocator(ctypes.Structure):
    _fields_ = (("allocate", ctypes.c_void_p), ("release", ctypes.c_void_p), ("context", ctypes.c_void_p))


class _Options(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("target", ctypes.c_char_p),
        ("allocator", ctypes.POINTER(_Allocator)),
        ("key", ctypes.c_void_p),
        ("verify", ctypes.c_int32),
    )


class LinkedModel:
    """The model ``name`` in shared library ``library``, run in ``memory`` bytes that all it needs is taken from."""

    def __init__(self, library: Path, name: str, memory: int = 1 << 30) -> None:
        self._api = ctypes.CDLL(str(library))
        self._memory = np.empty(memory, np.uint8)
        self._region = _Region(self._memory.ctypes.data, memory, 0)
        self._api.coda_region_allocator.restype = _Allocator
        allocator = self._api.coda_region_allocator(ctypes.byref(self._region))
        options = _Options(ctypes.sizeof(_Options), None, ctypes.pointer(allocator), None, 0)
        self._model, self._session, self._error = ctypes.c_void_p(), ctypes.c_void_p(), _Error()
        linked = ctypes.c_char.in_dll(self._api, f"{name}_model")
        error = ctypes.byref(self._error)
        self._check(
            self._api.coda_model_open_linked(
                ctypes.byref(linked), ctypes.byref(options), ctypes.byref(self._model), error
            )
        )
        self._check(self._api.coda_session_create(self._model, None, ctypes.byref(self._session), error))
        self._inputs, self._outputs = self._names("input"), self._names("output")

    def _names(self, side: str) -> list[str]:
        count, get = getattr(self._api, f"coda_model_{side}_count"), getattr(self._api, f"coda_model_{side}")
        count.restype, get.restype = ctypes.c_size_t, ctypes.POINTER(_TensorInfo)
        infos = (get(self._model, ctypes.c_size_t(i)).contents for i in range(count(self._model)))
        return [info.name.decode() for info in infos]

    def _check(self, code: int) -> None:
        if code:
            raise BundleError(self._error.message.decode())

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """The outputs ``names``, all by default. Raises BundleError with the runtime's message."""
        arrays = [np.ascontiguousarray(feeds[name]) for name in self._inputs]
        inputs = (_Tensor * len(arrays))(*map(_tensor, arrays))
        outputs = (_Tensor * len(self._outputs))()
        self._check(self._api.coda_session_run(self._session, inputs, outputs, ctypes.byref(self._error)))
        results = dict(zip(self._outputs, map(_array, outputs), strict=True))
        return [results[name] for name in names or self._outputs]

    @property
    def used(self) -> int:
        """Bytes of memory in use."""
        return int(self._region.used)

    def __enter__(self) -> LinkedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._api.coda_session_free(self._session)
        self._api.coda_model_free(self._model)


def _tensor(array: npt.NDArray[Any]) -> _Tensor:
    dims = (ctypes.c_int64 * _MAX_RANK)(*array.shape)
    return _Tensor(array.ctypes.data, array.nbytes, DTYPES[array.dtype.name], array.ndim, dims)


def _array(tensor: _Tensor) -> npt.NDArray[Any]:
    data = ctypes.string_at(tensor.data, tensor.bytes)
    return np.frombuffer(data, numpy_dtype(_NAMES[tensor.dtype])).reshape(tensor.dims[: tensor.rank])
