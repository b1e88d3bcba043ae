"""Runs kernel calls in this process, on deliberately awkward memory: element-aligned only, with guard bytes on both sides."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Mapping, Sequence

import numpy as np

from coda_edge import targets
from coda_edge.lower.kernel import KernelCall, Packed, Workspace
from coda_edge.symbolic import evaluate

VECTOR_TARGETS = [t for t in targets.targets().values() if not t.missing() and "fma" in t.features]
_GUARD = 256


class Library:
    """A kernel library that this process has loaded."""

    def __init__(self, data: bytes) -> None:
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(data)
            file.flush()
            self._library = ctypes.CDLL(file.name)

    def call(self, name: str, buffers: Sequence[np.ndarray | None], ints: Sequence[int]) -> int:
        """Calls kernel ``name``; returns its status."""
        addresses = (ctypes.c_uint64 * len(buffers))(*(0 if b is None else b.ctypes.data for b in buffers))
        return int(getattr(self._library, name)(addresses, (ctypes.c_int64 * len(ints))(*ints)))


class Guarded:
    """Arrays between guard bytes, aligned to their element and to no more."""

    def __init__(self) -> None:
        self._memory: list[tuple[np.ndarray, int, int]] = []

    def array(self, like: np.ndarray) -> np.ndarray:
        """A copy of ``like``."""
        memory = np.full(like.nbytes + 2 * _GUARD + 64, 0xA5, np.uint8)
        start = _GUARD + (-memory.ctypes.data - _GUARD) % 64 + like.itemsize
        self._memory.append((memory, start, start + like.nbytes))
        array = memory[start : start + like.nbytes].view(like.dtype).reshape(like.shape)
        array[...] = like
        return array

    def check(self) -> None:
        """Asserts that nothing outside the arrays was written."""
        for memory, start, stop in self._memory:
            assert (memory[:start] == 0xA5).all() and (memory[stop:] == 0xA5).all(), (
                "a kernel wrote outside its buffers"
            )


def run(
    target: targets.Target,
    call: KernelCall,
    tensors: Mapping[str, np.ndarray],
    sizes: Mapping[str, int] | None = None,
    chunk: int | None = None,
    library: Library | None = None,
) -> dict[str, np.ndarray]:
    """Runs ``call`` in chunks of items; ``tensors`` hold its inputs, and its outputs' shapes. Returns the outputs."""
    sizes = sizes or {}
    library = library or Library(target.build([call.kernel, *([call.finish] if call.finish else [])]))
    memory = Guarded()
    arrays = {name: memory.array(np.ascontiguousarray(t)) for name, t in tensors.items()}
    buffers: list[np.ndarray | None] = []
    for buffer in call.buffers:
        if isinstance(buffer, Workspace):
            buffers.append(memory.array(np.full(evaluate(buffer.size, sizes) // 4, np.nan, np.float32)))
        else:
            buffers.append(memory.array(buffer.data) if isinstance(buffer, Packed) else arrays[buffer])
    ints = [evaluate(d, sizes) for d in call.ints]
    items = evaluate(call.items, sizes)
    step = chunk or max(items, 1)
    for begin in range(0, items, step):
        scratch = memory.array(np.full(evaluate(call.scratch, sizes) // 4, np.nan, np.float32))
        assert library.call(call.kernel.symbol, [*buffers, scratch], [*ints, begin, min(begin + step, items)]) == 0
    if call.finish:
        assert library.call(call.finish.symbol, [*buffers, None], [*ints, 0, items]) == 0
    memory.check()
    return {name: arrays[name] for name in call.outputs}
