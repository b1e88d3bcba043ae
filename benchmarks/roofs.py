"""What the machine can do, measured: fused multiply-adds a second, and bytes read a second from memory and from the cores' caches.

``fma_peak.c`` and ``read_stream.c`` are compiled here and run on each thread at once.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

_ROUNDS = 2_000_000
_ALIGNMENT = 64
# Of one thread: far beyond any last-level cache that it might have alone, and within any second-level one.
_MEMORY_BYTES = 1 << 28
_CACHE_BYTES = 1 << 17
_READ_BYTES = 1 << 28


@dataclass(frozen=True)
class Roofs:
    """FLOP/s, and bytes/s read from memory and from the second-level caches, of ``threads`` threads together."""

    threads: int
    flops: float
    memory: float
    cache: float


def roofs(threads: int, level: str = "native", tries: int = 7) -> Roofs:
    """All of them: the best of ``tries``, tens of milliseconds each. ``level``: as for ``fma_peak``."""
    memory, cache = (_read(threads, tries, size) for size in (_MEMORY_BYTES, _CACHE_BYTES))
    return Roofs(threads, fma_peak(threads, tries, level), memory, cache)


def fma_peak(threads: int, tries: int = 7, level: str = "native") -> float:
    """FLOP/s of fused multiply-adds on ``threads`` threads together: the best of ``tries``, tens of milliseconds each.

    ``level``: of the instruction set, as the compiler's ``-march`` names it.
    """
    with _compiled("fma_peak.c", level) as library:
        kernel = library.fma_peak
        kernel.restype = ctypes.c_int64
        kernel.argtypes = [ctypes.c_int64, ctypes.c_void_p]

        def work(_: int) -> int:
            sink = np.array([0.999, 0.001, 0.0], np.float32)
            return int(kernel(_ROUNDS, sink.ctypes.data))

        return _best(work, threads, tries)


def _read(threads: int, tries: int, size: int) -> float:
    """Bytes/s that ``threads`` threads read together, each from ``size`` bytes of its own."""
    with _compiled("read_stream.c") as library:
        kernel = library.read_stream
        kernel.restype = ctypes.c_float
        kernel.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        data = [_aligned(size // 4) for _ in range(threads)]

        def work(thread: int) -> int:
            rounds = max(_READ_BYTES // size, 1)
            kernel(data[thread].ctypes.data, size // 4, rounds)
            return rounds * size

        return _best(work, threads, tries)


def _aligned(count: int) -> npt.NDArray[np.float32]:
    raw = np.ones(count + _ALIGNMENT // 4, np.float32)
    skip = -raw.ctypes.data % _ALIGNMENT // 4
    return raw[skip : skip + count]


def _best(work: Callable[[int], int], threads: int, tries: int) -> float:
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(tries):
            start = time.perf_counter()
            done = sum(pool.map(work, range(threads)))
            best = max(best, done / (time.perf_counter() - start))
    return best


@contextmanager
def _compiled(source: str, level: str = "native") -> Iterator[ctypes.CDLL]:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernel.so"
        compiler = [cc] if (cc := shutil.which("cc")) else [sys.executable, "-m", "ziglang", "cc"]
        # Without reassociation the sums stay in the vectors that the source names.
        flags = ["-O3", f"-march={level}", "-ffp-contract=fast", "-Wno-psabi", "-shared", "-fPIC"]
        subprocess.run([*compiler, *flags, str(Path(__file__).with_name(source)), "-o", str(library)], check=True)
        yield ctypes.CDLL(str(library))
