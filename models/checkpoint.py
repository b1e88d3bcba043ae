"""Reads tensors out of a PyTorch checkpoint of the format before 1.6, without PyTorch and without running what is in it.

The file is a row of pickles (a magic number, a version, the machine's sizes, the state dict, the keys of its storages) and then
each storage's count and raw little-endian elements. The unpickler makes the few things of the table below and refuses all
others, so a file can't run code.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coda_edge.errors import InvalidModel

_MAGIC = 0x1950A86A20F9469CFC6C


@dataclass(frozen=True)
class _View:
    """A tensor before its storage has been read: where it starts there, and its steps, in elements."""

    storage: str
    offset: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]


def _view(storage: str, offset: int, shape: tuple[int, ...], steps: tuple[int, ...], *rest: Any) -> _View:
    return _View(storage, offset, shape, steps)


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _view,
    ("torch", "FloatStorage"): np.float32,
    ("torch", "HalfStorage"): np.float16,
    ("torch", "LongStorage"): np.int64,
}


class _Unpickler(pickle.Unpickler):
    dtypes: dict[str, npt.DTypeLike]

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) not in _ALLOWED:
            raise InvalidModel(f"the checkpoint asks for {module}.{name}, expected nothing but tensors: it is not read")
        return _ALLOWED[module, name]

    def persistent_load(self, what: Any) -> str:
        _, dtype, key, *_ = what
        self.dtypes[key] = dtype
        return str(key)


def read(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The state dict's tensors by name; names that share a storage share their array's memory.

    Raises InvalidModel if the file is of another format, is cut short, or holds anything but tensors.
    """
    dtypes: dict[str, npt.DTypeLike] = {}
    with path.open("rb") as stream:

        def load() -> Any:
            unpickler = _Unpickler(stream)
            unpickler.dtypes = dtypes
            try:
                return unpickler.load()
            except (pickle.UnpicklingError, EOFError) as e:
                raise InvalidModel(f"{path.name} is no PyTorch checkpoint of the format before 1.6: {e}") from e

        if load() != _MAGIC:
            raise InvalidModel(f"{path.name} does not begin as PyTorch checkpoints of the format before 1.6 do")
        load(), load()
        views = load()
        storages = {key: _storage(stream.read, np.dtype(dtypes[key]), path) for key in load()}
    return {
        name: np.lib.stride_tricks.as_strided(
            storages[v.storage][v.offset :],
            v.shape,
            [s * storages[v.storage].itemsize for s in v.steps],
            writeable=False,
        )
        for name, v in views.items()
    }


def _storage(read_bytes: Callable[[int], bytes], dtype: np.dtype[Any], path: Path) -> npt.NDArray[Any]:
    count = int.from_bytes(read_bytes(8), "little")
    raw = read_bytes(count * dtype.itemsize)
    if len(raw) != count * dtype.itemsize:
        raise InvalidModel(f"{path.name} is cut short: a storage of {count} elements has {len(raw)} bytes")
    return np.frombuffer(raw, dtype.newbyteorder("<"))
