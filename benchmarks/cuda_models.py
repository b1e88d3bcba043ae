"""Whole models on a GPU: bundles are built here, checked and timed where there is a GPU and nothing of this package's compiler.

``python -m benchmarks.cuda_models build DIR MODEL.onnx …`` writes a bundle for each model, compressed, with inputs and what onnxruntime
makes of them in float32; ``… run DIR`` compiles the runtime with ``cc``, compares the outputs of every case, runs each shape twice, and times
the last two cases, with inputs and outputs on the host and on the device.
"""

from __future__ import annotations

import argparse
import ctypes
import lzma
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
TOLERANCE = 3e-3
"""The relative L2 error of an output, against float32."""
_ROOT = Path(__file__).parents[1]
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 256 << 20}]
_DTYPES = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "float64": 11}
_NAMES = {number: name for name, number in _DTYPES.items()}


# --- where bundles are built


def build(folder: Path, models: Sequence[Path], target: str, sizes: Sequence[dict[str, int]]) -> None:
    """Writes ``NAME.coda.xz`` and ``NAME.npz`` for each model. ``sizes``: cases by name of symbol, beside those of verification."""
    import coda_edge
    from coda_edge import frontend
    from coda_edge.inputs import bound_specs, generate_inputs
    from coda_edge.verify import Verifier, ort_session, run_session

    folder.mkdir(parents=True, exist_ok=True)
    for path in models:
        loaded = frontend.load(str(path))
        normal = frontend.to_normal_form(loaded)
        specs = bound_specs(loaded, normal.graph)
        cases = Verifier.of_model(loaded, specs, str(path), normal.allows, frontend.decided_by_data(normal.graph)).cases
        session = ort_session(loaded)
        names = [o.name for o in session.get_outputs()]
        for at in sizes:
            feeds = generate_inputs(specs, at, seed=7, padding="none")
            cases.append((feeds, run_session(session, names, feeds)))
        arrays: dict[str, Array] = {}
        for i, (feeds, outputs) in enumerate(cases):
            arrays |= {f"{i}/in/{name}": value for name, value in feeds.items()}
            arrays |= {f"{i}/out/{name}": value for name, value in zip(names, outputs, strict=True)}
        np.savez_compressed(folder / f"{path.stem}.npz", **arrays)  # type: ignore[arg-type]
        bundle = folder / f"{path.stem}.coda"
        coda_edge.optimize(str(path), target, verify=False).save(bundle)
        compressed = lzma.compress(bundle.read_bytes(), lzma.FORMAT_XZ, filters=_FILTERS)
        bundle.with_suffix(".coda.xz").write_bytes(compressed)
        print(
            f"{path.stem}: {bundle.stat().st_size >> 10} KiB, compressed {len(compressed) >> 10} KiB, {len(cases)} cases"
        )
        bundle.unlink()


# --- where they run


class _Error(Structure):
    _fields_ = [("code", c_int32), ("message", c_char * 1012)]


class _Tensor(Structure):
    _fields_ = [("data", c_void_p), ("bytes", c_size_t), ("dtype", c_int32), ("rank", c_int32), ("dims", c_int64 * 8)]


class _Info(Structure):
    _fields_ = [("name", c_char_p), ("dtype", c_int32), ("rank", c_int32)]


class Runtime:
    """The C runtime of this tree."""

    def __init__(self, folder: Path) -> None:
        """Compiles it into ``folder``."""
        source = _ROOT / "runtime"
        files = [*sorted((source / "src").glob("*.c")), *sorted((source / "src" / "posix").glob("*.c"))]
        flags = [
            "-O2",
            "-shared",
            "-fPIC",
            "-std=c11",
            "-D_GNU_SOURCE",
            "-DCODA_BUILD",
            "-DCODA_SIGNATURES=0",
            "-pthread",
        ]
        flags += ['-DCODA_VERSION_TEXT="0"', f"-I{source / 'src'}", f"-I{source / 'include'}"]
        kept = [str(f) for f in files if f.stem not in ("ed25519", "sha512")]
        subprocess.run(["cc", *flags, *kept, "-ldl", "-o", str(folder / "libcoda.so")], check=True)
        self.library = ctypes.CDLL(str(folder / "libcoda.so"))
        for name in ("coda_model_input", "coda_model_output"):
            getattr(self.library, name).restype = POINTER(_Info)
        for name in ("coda_model_input_count", "coda_model_output_count"):
            getattr(self.library, name).restype = c_size_t

    def check(self, code: int, error: _Error) -> None:
        """Raises RuntimeError unless ``code`` is 0."""
        if code:
            raise RuntimeError(error.message.decode())


class Model:
    """An opened bundle with a session."""

    def __init__(self, runtime: Runtime, path: Path) -> None:
        self.runtime, self.error = runtime, _Error()
        self.model, self.session = c_void_p(), c_void_p()
        library = runtime.library
        runtime.check(
            library.coda_model_open(str(path).encode(), None, byref(self.model), byref(self.error)), self.error
        )
        runtime.check(library.coda_session_create(self.model, None, byref(self.session), byref(self.error)), self.error)
        self.inputs = self._names("input")
        self.outputs = self._names("output")

    def _names(self, which: str) -> list[tuple[str, int]]:
        count = getattr(self.runtime.library, f"coda_model_{which}_count")(self.model)
        infos = [
            getattr(self.runtime.library, f"coda_model_{which}")(self.model, c_size_t(i)).contents for i in range(count)
        ]
        return [(info.name.decode(), info.dtype) for info in infos]

    def tensors(self, feeds: dict[str, Array], addresses: Sequence[int] = ()) -> Any:
        """The inputs, at ``addresses`` if there are some."""
        tensors = (_Tensor * len(self.inputs))()
        for i, (tensor, (name, dtype)) in enumerate(zip(tensors, self.inputs, strict=True)):
            array = feeds[name]
            tensor.data = addresses[i] if addresses else array.ctypes.data
            tensor.bytes, tensor.dtype, tensor.rank = array.nbytes, dtype, array.ndim
            tensor.dims[: array.ndim] = array.shape
        return tensors

    def run(self, inputs: Any, outputs: Any) -> None:
        """One run; outputs without memory get the session's."""
        code = self.runtime.library.coda_session_run(self.session, inputs, outputs, byref(self.error))
        self.runtime.check(code, self.error)

    def results(self, feeds: dict[str, Array]) -> dict[str, Array]:
        """The outputs of a run."""
        outputs = (_Tensor * len(self.outputs))()
        self.run(self.tensors(feeds), outputs)
        found = {}
        for tensor, (name, dtype) in zip(outputs, self.outputs, strict=True):
            raw = ctypes.string_at(tensor.data, tensor.bytes)
            found[name] = np.frombuffer(raw, _NAMES[dtype]).reshape(tensor.dims[: tensor.rank])
        return found

    def close(self) -> None:
        """Frees both."""
        self.runtime.library.coda_session_free(self.session)
        self.runtime.library.coda_model_free(self.model)


def run(folder: Path, timings: bool = True) -> bool:
    """Checks and times every model of ``folder``; whether all were within ``TOLERANCE``."""
    work = Path("/tmp/coda-cuda-models")
    work.mkdir(exist_ok=True)
    runtime, good = Runtime(work), True
    for packed in sorted(folder.glob("*.coda.xz")):
        name = packed.name.removesuffix(".coda.xz")
        bundle = work / f"{name}.coda"
        bundle.write_bytes(lzma.decompress(packed.read_bytes()))
        cases = _cases(folder / f"{name}.npz")
        try:
            model = Model(runtime, bundle)
            errors = [_error(model.results(feeds), outputs) for _ in range(2) for feeds, outputs in cases]
        except RuntimeError as error:
            print(f"{name}: {error}", flush=True)
            good = False
            continue
        good = good and all(error <= TOLERANCE for error in errors)
        print(f"{name}: relative L2 {' '.join(f'{e:.1e}' for e in errors)}", flush=True)
        for feeds, _ in cases[-2:] if timings else ():
            shapes = " ".join(f"{n}{list(a.shape)}" for n, a in list(feeds.items())[:2])
            print(f"  {shapes}: {_timed(model, feeds)}", flush=True)
        model.close()
        bundle.unlink()
    return good


def _cases(path: Path) -> list[tuple[dict[str, Array], dict[str, Array]]]:
    found: dict[int, tuple[dict[str, Array], dict[str, Array]]] = {}
    for key, value in np.load(path).items():
        number, way, name = key.split("/", 2)
        found.setdefault(int(number), ({}, {}))[way == "out"][name] = np.array(value, order="C")
    return [found[i] for i in sorted(found)]


def _error(actual: dict[str, Array], expected: dict[str, Array]) -> float:
    """The largest relative L2 error of any output."""
    worst = 0.0
    for name, want in expected.items():
        difference = float(np.linalg.norm(actual[name].astype(np.float64) - want.astype(np.float64)))
        worst = max(worst, difference / max(float(np.linalg.norm(want.astype(np.float64))), 1e-30))
    return worst


def _timed(model: Model, feeds: dict[str, Array]) -> str:
    """Median wall times of a run, in microseconds, with tensors on the host and on the device."""
    outputs = (_Tensor * len(model.outputs))()
    model.run(model.tensors(feeds), outputs)
    host = _median(lambda: model.run(model.tensors(feeds), outputs))
    cuda = ctypes.CDLL("libcuda.so.1")
    context, device = c_void_p(), ctypes.c_int()
    cuda.cuDeviceGet(byref(device), 0)
    cuda.cuDevicePrimaryCtxRetain(byref(context), device)
    cuda.cuCtxSetCurrent(context)

    def memory(size: int) -> int:
        address = c_uint64()
        if cuda.cuMemAlloc_v2(byref(address), c_size_t(max(size, 16))):
            raise RuntimeError("no memory on the device")
        return address.value

    addresses = []
    for name, _ in model.inputs:
        addresses.append(memory(feeds[name].nbytes))
        cuda.cuMemcpyHtoD_v2(c_uint64(addresses[-1]), c_void_p(feeds[name].ctypes.data), c_size_t(feeds[name].nbytes))
    cuda.cuCtxSynchronize()
    there = (_Tensor * len(model.outputs))()
    for tensor, known in zip(there, outputs, strict=True):
        tensor.data, tensor.bytes = memory(known.bytes), known.bytes
    inputs = model.tensors(feeds, addresses)
    near = _median(lambda: model.run(inputs, there))
    for address in (*addresses, *(t.data for t in there)):
        cuda.cuMemFree_v2(c_uint64(address))
    return f"host {host:.0f} us, device {near:.0f} us"


def _median(call: Callable[[], None], rounds: int = 200) -> float:
    times = []
    for i in range(rounds + 20):
        start = time.perf_counter()
        call()
        if i >= 20:
            times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build")
    building.add_argument("folder", type=Path)
    building.add_argument("models", type=Path, nargs="+")
    building.add_argument("--target", default="cuda-sm90")
    building.add_argument(
        "--sizes", action="append", default=[], help="a case more, as batch=1,sequence=128; times are of the last two"
    )
    running = commands.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("--no-timings", action="store_true")
    given = parser.parse_args()
    if given.command == "build":
        sizes = [{k: int(v) for k, v in (pair.split("=") for pair in text.split(","))} for text in given.sizes]
        build(given.folder, given.models, given.target, sizes)
    else:
        sys.exit(0 if run(given.folder, not given.no_timings) else 1)


if __name__ == "__main__":
    main()
