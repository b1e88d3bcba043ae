"""The machine's float32 peak: ``fma_peak.c``, compiled here and run on each thread at once."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

_ROUNDS = 2_000_000


def fma_peak(threads: int, tries: int = 7) -> float:
    """FLOP/s of fused multiply-adds on ``threads`` threads together: the best of ``tries``, tens of milliseconds each."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "fma_peak.so"
        compiler = [cc] if (cc := shutil.which("cc")) else [sys.executable, "-m", "ziglang", "cc"]
        source = Path(__file__).with_name("fma_peak.c")
        flags = ["-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC"]
        subprocess.run([*compiler, *flags, str(source), "-o", str(library)], check=True)
        kernel = ctypes.CDLL(str(library)).fma_peak
        kernel.restype = ctypes.c_int64
        kernel.argtypes = [ctypes.c_int64, ctypes.c_void_p]

        def work(_: int) -> int:
            sink = np.array([0.999, 0.001, 0.0], np.float32)
            return int(kernel(_ROUNDS, sink.ctypes.data))

        best = 0.0
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(tries):
                start = time.perf_counter()
                done = sum(pool.map(work, range(threads)))
                best = max(best, done / (time.perf_counter() - start))
        return best
