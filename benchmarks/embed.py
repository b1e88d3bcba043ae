"""What a bundle costs a program besides time: size of the runtime and of the kernels, load time, memory.

``python -m benchmarks.embed MODEL.onnx BUNDLE [--shape 1x128]`` prints each beside its bound. Load times are the best of several, with the file in
the page cache; memory is that of a process of its own, which opens the bundle by the C library and runs it once.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from coda_edge import _runtime
from coda_edge.bundle import read

LOADS = 30
MARGIN = 3 << 20
"""Bytes that a process may have beyond weights and arena."""


@dataclass(frozen=True)
class Bar:
    """A measured number and what it must not exceed; None where there is nothing to hold it to."""

    name: str
    value: float
    bound: float | None
    unit: str

    @property
    def holds(self) -> bool:
        """Whether the number is within its bound."""
        return self.bound is None or self.value <= self.bound

    @property
    def line(self) -> str:
        """The bar as a row of a table."""
        bound = "" if self.bound is None else f"{self.bound:,.6g}"
        verdict = "" if self.bound is None else "holds" if self.holds else "EXCEEDED"
        return f"{self.name:<44} {self.value:>14,.6g} {self.unit:<3} {bound:>14} {verdict}"


def stripped_bytes(library: Path) -> int:
    """The size of a shared library without what debuggers read."""
    if not shutil.which("strip"):
        return library.stat().st_size
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, library.name)
        subprocess.run(["strip", "-o", str(output), str(library)], check=True)
        return output.stat().st_size


class _Options(ctypes.Structure):
    """The first fields of ``coda_model_options``."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("target", ctypes.c_char_p),
        ("allocator", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("verify", ctypes.c_int32),
    )


def load_ms(bundle: Path, verify: bool = False) -> float:
    """The best of ``LOADS`` times from a path to a model, in milliseconds. ``verify``: with its constants verified."""
    api = ctypes.CDLL(str(_library()))
    options = _Options(size=ctypes.sizeof(_Options), verify=verify)

    def load() -> float:
        model = ctypes.c_void_p()
        begin = time.perf_counter()
        code = api.coda_model_open(os.fsencode(bundle), ctypes.byref(options), ctypes.byref(model), None)
        seconds = time.perf_counter() - begin
        assert code == 0, f"{bundle} cannot be opened: code {code}"
        api.coda_model_free(model)
        return seconds * 1e3

    return min(load() for _ in range(LOADS))


def verify_ms(bundle: Path) -> float:
    """What verifying the constants takes, once for a model, on one thread: by how much opening with ``verify`` is slower, in milliseconds."""
    return load_ms(bundle, verify=True) - load_ms(bundle)


def _library() -> Path:
    return Path(_runtime.__file__).parent / "libcoda_runtime.so"


_MEASURE = """
import ctypes, json, sys
from pathlib import Path

class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("dtype", ctypes.c_int32), ("rank", ctypes.c_int32), ("dims", ctypes.c_int64 * 8)]

def resident():
    return {k: int(v.split()[0]) << 10 for k, v in (line.split(":") for line in Path("/proc/self/status").read_text().splitlines()) if k in ("VmRSS", "RssAnon", "RssFile")}

library, bundle, shape, count = sys.argv[1], sys.argv[2], [int(s) for s in sys.argv[3].split("x")], int(sys.argv[4])
api = ctypes.CDLL(library)
api.coda_session_arena_bytes.restype = api.coda_model_constant_bytes.restype = ctypes.c_size_t
size = 8
for s in shape: size *= s
data = (ctypes.c_int64 * (size // 8))(*([1] * (size // 8)))
inputs, outputs = (Tensor * count)(), (Tensor * 8)()
for t in inputs:
    t.data, t.bytes, t.dtype, t.rank = ctypes.addressof(data), size, 7, len(shape)
    t.dims[: len(shape)] = shape
model, session, error = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.create_string_buffer(1016)
before = resident()
assert api.coda_model_open(bundle.encode(), None, ctypes.byref(model), error) == 0, error.raw[4:]
assert api.coda_session_create(model, None, ctypes.byref(session), error) == 0, error.raw[4:]
assert api.coda_session_run(session, inputs, outputs, error) == 0, error.raw[4:]
after = resident()
found = {k: after[k] - before[k] for k in after}
print(json.dumps(found | {"arena": api.coda_session_arena_bytes(session), "constants": api.coda_model_constant_bytes(model)}))
"""


def memory(bundle: Path, shape: str, inputs: int) -> dict[str, int]:
    """Bytes that opening and running a bundle once add to a process, of which kind, and what the arena and the constants are.

    The model's inputs are int64 tensors of ``shape``.
    """
    command = [sys.executable, "-c", _MEASURE, str(_library()), str(bundle), shape, str(inputs)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, int] = json.loads(done.stdout)
    return found


_PEER = """
import json, sys, onnxruntime as ort, numpy as np
from pathlib import Path

options = ort.SessionOptions()
options.intra_op_num_threads, options.log_severity_level = 1, 3
options.enable_cpu_mem_arena = options.enable_mem_pattern = False
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
feeds = {i.name: np.ones([int(s) for s in sys.argv[2].split("x")], np.int64) for i in session.get_inputs()}

def status(key):
    return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))

session.run(None, feeds)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
session.run(None, feeds)
print(json.dumps(status("VmHWM") - before))
"""


def onnxruntime_peak(model: Path, shape: str) -> int:
    """Bytes that onnxruntime's activations take at their peak: by how much a run without its arena raises the process's memory."""
    command = [sys.executable, "-c", _PEER, str(model), shape]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return int(json.loads(done.stdout))


def bars(model: Path, bundle: Path, shape: str) -> list[Bar]:
    """Every bar of a model with int64 inputs of ``shape``."""
    opened = read(bundle)
    used = memory(bundle, shape, len(opened.best.plan.inputs))
    allowed = used["constants"] + used["arena"] + MARGIN
    return [
        Bar("runtime library, stripped", stripped_bytes(_library()), 100_000, "B"),
        Bar("kernels of the model", len(opened.best.library), 400_000, "B"),
        Bar("load", load_ms(bundle), 10.0, "ms"),
        Bar("verifying the weights, once, one thread", verify_ms(bundle), None, "ms"),
        Bar("memory after a run", used["VmRSS"], allowed, "B"),
        Bar("memory after a run, not of the file", used["RssAnon"], used["arena"] + MARGIN, "B"),
        Bar("arena", used["arena"], 0.6 * onnxruntime_peak(model, shape), "B"),
    ]


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--shape", default="1x128")
    given = parser.parse_args(arguments)
    for bar in bars(given.model, given.bundle, given.shape):
        print(bar.line)


if __name__ == "__main__":
    main()
