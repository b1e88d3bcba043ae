"""A driver for tests of the runtime without a GPU: libcuda.so.1 over the emulator, with a model's kernels compiled into it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import coda_edge
from coda_edge import targets
from coda_edge.lower.cuda import CudaKernel, cuda_source
from coda_edge.lower.cuda.device import MATH
from coda_edge.targets.cuda import CudaTarget

MODULE = b"kernels"
"""What the bundle has as its library; the driver knows only its first letters."""
_HERE = Path(__file__).parent
_RUN = """
import sys
import numpy as np
import coda_edge
folder, *calls = sys.argv[1:]
session = coda_edge.Session(folder + "/model.coda")
for call in calls:
    feeds = dict(np.load(call))
    results = session.run(None, feeds)
    np.savez(call + ".out.npz", **{o.name: r for o, r in zip(session.get_outputs(), results)})
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
print(*(ctypes.c_int.in_dll(driver, "fake_" + name).value for name in ("graphs", "graph_launches", "launches")))
"""


def optimized(
    monkeypatch: pytest.MonkeyPatch, model: Any, target: str, folder: Path, **options: Any
) -> coda_edge.Optimized:
    """``model`` for a GPU, as ``model.coda`` in ``folder``, with a driver beside it that has its kernels; needs no CUDA compiler."""
    kernels: dict[str, CudaKernel] = {}

    def build(self: CudaTarget, given: Sequence[CudaKernel], progress: object = None) -> bytes:
        kernels.update({kernel.symbol: kernel for kernel in given})
        return MODULE

    monkeypatch.setattr(CudaTarget, "build", build)
    result = coda_edge.optimize(model, target, **options)
    result.save(folder / "model.coda")
    arch = next(t.others[-1] if t.others else t.arch for t in targets.get_all(target) if isinstance(t, CudaTarget))
    compile_driver(list(kernels.values()), folder, arch)
    return result


def compile_driver(kernels: Sequence[CudaKernel], folder: Path, arch: str) -> None:
    """Writes ``libcuda.so.1`` into ``folder``; its kernels are the code for ``arch``, whatever the GPU says it is."""
    source = cuda_source(kernels, arch)
    kernels_text = source[source.index('extern "C" __global__') :]
    table, wrappers = [], []
    for kernel in kernels:
        count = len(kernel.func.params)
        wrappers.append(
            f"static void run_{kernel.symbol}(const int *grid, int threads, void **args, int lazy) "
            f"{{ emulator::launch({kernel.symbol}, grid, threads, args, lazy); }}"
        )
        table.append(f'{{"{kernel.symbol}", run_{kernel.symbol}, {count}}},')
    text = "\n".join(
        (
            (_HERE / "cuda_emulator.h").read_text(),
            "#include <ctime>",
            (_HERE / "cuda_fake_driver.h").read_text(),
            *MATH.values(),
            kernels_text,
            *wrappers,
            'extern "C" const fake::Kernel KERNELS[] = {',
            *table,
            "};",
            f'extern "C" const int KERNEL_COUNT = {len(kernels)};',
        )
    )
    code = folder / "driver.cpp"
    code.write_text(text)
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-fno-sanitize=all", "-Wl,-soname,libcuda.so.1"]
    flags += ["-fsanitize=alignment", "-fsanitize-trap=alignment", f"-D__CUDA_ARCH__={arch[3:]}0"]
    command = [sys.executable, "-m", "ziglang", "c++", *flags, str(code), "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, check=True)


def run(
    folder: Path, calls: Sequence[Mapping[str, npt.NDArray[Any]]]
) -> tuple[list[dict[str, npt.NDArray[Any]]], list[int]]:
    """The outputs of runs of one session in a process of its own; how many graphs were made, graphs launched, kernels launched or captured."""
    paths = []
    for i, feeds in enumerate(calls):
        paths.append(str(folder / f"call{i}.npz"))
        np.savez(paths[-1], **feeds)
    done = process(folder, _RUN, *paths)
    assert done.returncode == 0, done.stderr
    return [dict(np.load(f"{path}.out.npz")) for path in paths], [int(word) for word in done.stdout.split()]


def process(folder: Path, script: str, *arguments: str, devices: int = 1) -> subprocess.CompletedProcess[str]:
    """Runs ``script`` where the driver of ``folder`` is the one that the runtime finds."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "FAKE_CUDA_DEVICES": str(devices)}
    command = [sys.executable, "-c", script, str(folder), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
