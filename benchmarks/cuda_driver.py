"""The CUDA driver, and cuBLAS if it can be found, by ctypes: memory, launches, graphs, timings. Needs no toolkit."""

from __future__ import annotations

import ctypes
import glob
import statistics
import sys
from collections.abc import Callable, Sequence
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_MAX_DYNAMIC_SHARED = 8


class DriverError(Exception):
    """The driver is missing or refused a call."""


def driver() -> ctypes.CDLL:
    """The driver library. Raises DriverError if this machine has none, or no device."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"no NVIDIA driver on this machine ({error})") from error
    count = c_int()
    if library.cuInit(0) or library.cuDeviceGetCount(byref(count)) or not count.value:
        raise DriverError("the NVIDIA driver finds no device")
    return library


class Device:
    """The first GPU, with one stream."""

    def __init__(self) -> None:
        self._cuda = driver()
        device, context, stream = c_int(), c_void_p(), c_void_p()
        self.check(self._cuda.cuDeviceGet(byref(device), 0))
        self.check(self._cuda.cuDevicePrimaryCtxRetain(byref(context), device))
        self.check(self._cuda.cuCtxSetCurrent(context))
        self.check(self._cuda.cuStreamCreate(byref(stream), 1))
        self.stream = stream
        name = ctypes.create_string_buffer(128)
        self.check(self._cuda.cuDeviceGetName(name, 128, device))
        self.name = name.value.decode()
        major, minor = c_int(), c_int()
        self.check(self._cuda.cuDeviceGetAttribute(byref(major), 75, device))
        self.check(self._cuda.cuDeviceGetAttribute(byref(minor), 76, device))
        self.arch = f"sm_{major.value}{minor.value}"

    def check(self, status: int) -> None:
        """Raises DriverError unless ``status`` is success."""
        if status:
            text = c_char_p()
            self._cuda.cuGetErrorString(status, byref(text))
            raise DriverError(f"CUDA error {status}: {(text.value or b'unknown').decode()}")

    def upload(self, array: Array) -> int:
        """The address of a copy of ``array``, which lives as long as the process."""
        array = np.ascontiguousarray(array)
        address = c_uint64()
        self.check(self._cuda.cuMemAlloc_v2(byref(address), c_size_t(max(array.nbytes, 16))))
        self.refill(address.value, array)
        return address.value

    def refill(self, address: int, array: Array) -> None:
        """Copies ``array`` to the device."""
        array = np.ascontiguousarray(array)
        self.check(self._cuda.cuMemcpyHtoD_v2(c_uint64(address), c_void_p(array.ctypes.data), c_size_t(array.nbytes)))
        # The copy returns before its last bytes are on the device, and the stream does not wait for them by itself.
        self.check(self._cuda.cuCtxSynchronize())

    def download(self, address: int, like: Array) -> Array:
        """What is on the device, of the shape and dtype of ``like``."""
        array = np.empty_like(like, order="C")
        self.check(self._cuda.cuMemcpyDtoH_v2(c_void_p(array.ctypes.data), c_uint64(address), c_size_t(array.nbytes)))
        return array

    def module(self, cubin: bytes) -> c_void_p:
        """A loaded cubin."""
        module = c_void_p()
        self.check(self._cuda.cuModuleLoadData(byref(module), cubin))
        return module

    def function(self, module: c_void_p, symbol: str, shared: int) -> c_void_p:
        """A kernel, allowed ``shared`` bytes of dynamic shared memory."""
        function = c_void_p()
        self.check(self._cuda.cuModuleGetFunction(byref(function), module, symbol.encode()))
        self.check(self._cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared))
        return function

    def launcher(
        self,
        function: c_void_p,
        grid: Sequence[int],
        block: int,
        shared: int,
        buffers: Sequence[int],
        ints: Sequence[int],
    ) -> Callable[[], None]:
        """A launch on the stream, its arguments made once."""
        values = [c_uint64(b) for b in buffers] + [ctypes.c_int64(i) for i in ints]
        args = (c_void_p * len(values))(*(ctypes.addressof(v) for v in values))

        def launch(keep: object = values) -> None:
            self.check(self._cuda.cuLaunchKernel(function, *grid, block, 1, 1, shared, self.stream, args, None))

        return launch

    def synchronize(self) -> None:
        """Waits for the stream, and raises what a kernel did wrong."""
        self.check(self._cuda.cuStreamSynchronize(self.stream))

    def microseconds(self, run: Callable[[], None], count: int = 100, repeats: int = 51) -> float:
        """Median time of one ``run`` of ``count`` captured in a graph, over ``repeats`` replays after a warm-up."""
        for _ in range(3):
            run()
        self.synchronize()
        graph, executable, start, stop = c_void_p(), c_void_p(), c_void_p(), c_void_p()
        self.check(self._cuda.cuStreamBeginCapture_v2(self.stream, 2))
        for _ in range(count):
            run()
        self.check(self._cuda.cuStreamEndCapture(self.stream, byref(graph)))
        self.check(self._cuda.cuGraphInstantiateWithFlags(byref(executable), graph, c_uint64(0)))
        for event in (start, stop):
            self.check(self._cuda.cuEventCreate(byref(event), c_uint(0)))
        times = []
        for i in range(repeats + 5):
            self.check(self._cuda.cuEventRecord(start, self.stream))
            self.check(self._cuda.cuGraphLaunch(executable, self.stream))
            self.check(self._cuda.cuEventRecord(stop, self.stream))
            self.check(self._cuda.cuEventSynchronize(stop))
            elapsed = c_float()
            self.check(self._cuda.cuEventElapsedTime(byref(elapsed), start, stop))
            if i >= 5:
                times.append(elapsed.value * 1e3 / count)
        self.check(self._cuda.cuGraphExecDestroy(executable))
        self.check(self._cuda.cuGraphDestroy(graph))
        return statistics.median(times)


class Cublas:
    """cuBLAS's half-precision GEMM with float accumulation, the yardstick: no bias, no activation."""

    def __init__(self, device: Device) -> None:
        self._library = self._find()
        self._handle = c_void_p()
        self._check(self._library.cublasCreate_v2(byref(self._handle)))
        self._check(self._library.cublasSetStream_v2(self._handle, device.stream))
        size = 32 << 20
        workspace = device.upload(np.zeros(size, np.uint8))
        self._check(self._library.cublasSetWorkspace_v2(self._handle, c_void_p(workspace), c_size_t(size)))

    def gemm(self, m: int, n: int, k: int, a: int, w: int, c: int) -> Callable[[], None]:
        """C ``[m, n]`` = A ``[m, k]`` · Wᵀ for W ``[n, k]``, all row-major."""
        one, zero = c_float(1), c_float(0)

        def run() -> None:
            self._check(
                self._library.cublasGemmEx(
                    self._handle, 1, 0, n, m, k, byref(one), c_void_p(w), 2, k, c_void_p(a), 2, k, byref(zero),
                    c_void_p(c), 2, n, 68, -1,
                )
            )  # fmt: skip

        return run

    @staticmethod
    def _find() -> ctypes.CDLL:
        folders = [*sys.path, "/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu"]
        patterns = ("nvidia/*/lib/libcublas.so.1*", "libcublas.so.1*")
        for path in (p for folder in folders for pattern in patterns for p in glob.glob(str(Path(folder, pattern)))):
            # It needs its companion, which lies beside it.
            for companion in glob.glob(str(Path(path).with_name("libcublasLt.so.1*"))):
                ctypes.CDLL(companion, mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(path)
        raise DriverError("no libcublas on the Python path or among the system's libraries")

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise DriverError(f"cuBLAS error {status}")
