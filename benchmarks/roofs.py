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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# About as long as a kernel runs: the clock changes within milliseconds.
_ROUNDS = 500_000
_CHUNKS = 6
_ALIGNMENT = 64
# Of one thread: far beyond any last-level cache that it might have alone, and within any second-level one.
_MEMORY_BYTES = 1 << 27
_CACHE_BYTES = 1 << 17
_READ_BYTES = 1 << 27

Work = Callable[[int], int]


@dataclass(frozen=True)
class Roofs:
    """FLOP/s, and bytes/s read from memory and from the second-level caches, of ``threads`` threads together."""

    threads: int
    flops: float
    memory: float
    cache: float


class Sampler:
    """The machine, tried again and again: ``sample`` takes tens of milliseconds, ``best`` is the best of all."""

    def __init__(self, threads: int, works: Sequence[tuple[str, Work]], pool: ThreadPoolExecutor) -> None:
        self._threads, self._works, self._pool = threads, works, pool
        self._best = dict.fromkeys((name for name, _ in works), 0.0)

    def sample(self) -> None:
        for name, work in self._works:
            start = time.perf_counter()
            done = sum(self._pool.map(work, range(self._threads)))
            self._best[name] = max(self._best[name], done / (time.perf_counter() - start))

    def best(self) -> Roofs:
        return Roofs(self._threads, **self._best)


@contextmanager
def sampling(threads: int, level: str = "native") -> Iterator[Sampler]:
    """Samples what ``threads`` threads do together. ``level``: the instruction set of the arithmetic, as ``-march`` names it."""
    with _compiled("fma_peak.c", level) as arithmetic, _compiled("read_stream.c") as reading:
        works = [
            *[("flops", _multiply_adds(arithmetic))] * _CHUNKS,
            ("memory", _reads(reading.read_memory, threads, _MEMORY_BYTES)),
            ("cache", _reads(reading.read_cache, threads, _CACHE_BYTES)),
        ]
        with ThreadPoolExecutor(threads) as pool:
            yield Sampler(threads, works, pool)


def fma_peak(threads: int, tries: int = 7) -> float:
    """FLOP/s of fused multiply-adds on ``threads`` threads together: the best of ``tries``."""
    with sampling(threads) as machine:
        for _ in range(tries):
            machine.sample()
        return machine.best().flops


def _multiply_adds(library: ctypes.CDLL) -> Work:
    """Does multiply-adds and gives the number of floating-point operations."""
    kernel = library.fma_peak
    kernel.restype = ctypes.c_int64
    kernel.argtypes = [ctypes.c_int64, ctypes.c_void_p]

    def work(_: int) -> int:
        sink = np.array([0.999, 0.001, 0.0], np.float32)
        return int(kernel(_ROUNDS, sink.ctypes.data))

    return work


def _reads(kernel: Any, threads: int, size: int) -> Work:
    """Reads and gives the number of bytes; each thread has ``size`` bytes of its own."""
    kernel.restype = ctypes.c_float
    kernel.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    data = [_aligned(size // 4) for _ in range(threads)]
    rounds = max(_READ_BYTES // size, 1)

    def work(thread: int) -> int:
        kernel(data[thread].ctypes.data, size // 4, rounds)
        return rounds * size

    return work


def _aligned(count: int) -> npt.NDArray[np.float32]:
    raw = np.ones(count + _ALIGNMENT // 4, np.float32)
    skip = -raw.ctypes.data % _ALIGNMENT // 4
    return raw[skip : skip + count]


@contextmanager
def _compiled(source: str, level: str = "native") -> Iterator[ctypes.CDLL]:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernel.so"
        compiler = [cc] if (cc := shutil.which("cc")) else [sys.executable, "-m", "ziglang", "cc"]
        # Without reassociation the sums stay in the vectors that the source names.
        flags = ["-O3", f"-march={level}", "-ffp-contract=fast", "-Wno-psabi", "-shared", "-fPIC"]
        subprocess.run([*compiler, *flags, str(Path(__file__).with_name(source)), "-o", str(library)], check=True)
        yield ctypes.CDLL(str(library))
