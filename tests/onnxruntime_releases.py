"""Packaged models on several releases of onnxruntime, from the same binaries: ``python tests/onnxruntime_releases.py [RELEASE|MODEL…]``.

Needs a package index, and downloads each release once into ``build/onnxruntime-<release>``. Models are those of ``onnxruntime_accuracy``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime_accuracy

from coda_edge import frontend
from coda_edge.onnxruntime import library_path, package, package_regions
from coda_edge.verify import TOLERANCE

RELEASES = ("1.20.1", "1.22.0", "1.24.1")
MODELS = ("bert.sdpa.dyn20", "gpt2.sdpa.ts17")
SOURCE = "the source"
WAYS = (
    SOURCE,
    "its own library",
    "its functions",
    "the generic library",
    "the region's function",
    "the execution provider",
)
_BUILD = Path(__file__).resolve().parent.parent / "build"
# Runs on the other release: prints for each way the worst error, "inf" if others than it asks for ran; "-" where there is no such way.
_PROGRAM = """
import json, sys
import numpy as np, onnxruntime as ort
base, generic, data = sys.argv[1], sys.argv[2], np.load(sys.argv[1] + ".npz")
feeds = {k[3:]: data[k] for k in data if k.startswith("in:")}
expected = [data[f"out:{i}"] for i in range(sum(k.startswith("out:") for k in data))]
def run(model, library, ours, provider=False):
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = base
    if provider:
        ort.register_execution_provider_library("CodaEP", library)
        devices = [d for d in ort.get_ep_devices() if d.ep_name == "CodaEP"]
        options.add_provider_for_devices(devices[:1], {"bundle": base + "-regions.coda"})
        session = ort.InferenceSession(model, options)
    else:
        if library:
            options.register_custom_ops_library(library)
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    results = session.run(None, feeds)
    events = json.load(open(session.end_profiling()))
    ops = {e["args"]["op_name"] for e in events if e["cat"] == "Node" and e["name"].endswith("_kernel_time")}
    error = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(results, expected))
    print(error if any(op.startswith(("Gemm_", "Region", "CodaEP")) for op in ops) == ours else "inf")
run(base + "-source.onnx", None, False)
run(base + ".onnx", base + ".so", True)
run(base + ".onnx", None, False)
run(base + "-regions.onnx", generic, True)
run(base + "-regions.onnx", None, False)
if hasattr(ort, "register_execution_provider_library"):
    run(base + "-source.onnx", generic, True, True)
else:
    print("-")
"""


def installed(release: str) -> Path:
    """A folder with onnxruntime ``release``, installed if it is not there. Raises CalledProcessError if it cannot be had."""
    folder = _BUILD / f"onnxruntime-{release}"
    if not (folder / "onnxruntime").exists():
        part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            part,
            f"onnxruntime=={release}",
        ]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def write(model: onnx.ModelProto, base: Path) -> None:
    """``model`` packaged in both ways as files that begin with ``base``, with inputs and what onnxruntime makes of them here."""
    onnx.save(model, f"{base}-source.onnx")
    package(model, verify=False).save(f"{base}.onnx", f"{base}.so")
    package_regions(f"{base}-source.onnx", verify=False).save(f"{base}-regions.onnx")
    feeds, results = onnxruntime_accuracy.verifier(model).cases[-1]
    arrays = {f"in:{k}": v for k, v in feeds.items()} | {f"out:{i}": np.asarray(v) for i, v in enumerate(results)}
    np.savez(f"{base}.npz", allow_pickle=False, **arrays)


def errors(base: Path, release: str) -> Mapping[str, float]:
    """By way of running, the worst error of what ``write`` left at ``base`` on ``release``; without ways that it does not have.

    Infinite: others ran than should have. Raises RuntimeError with what the release said if it fails.
    """
    environment = {**os.environ, "PYTHONPATH": str(installed(release))}
    command = [sys.executable, "-c", _PROGRAM, str(base), library_path()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"onnxruntime {release}: {done.stderr.strip()}")
    return {way: float(text) for way, text in zip(WAYS, done.stdout.split(), strict=True) if text != "-"}


def allowed(found: Mapping[str, float]) -> float:
    """What another way than the source may differ by: as onnxruntime's release does itself, where roundings of whole numbers tip."""
    return max(TOLERANCE, 4 * found[SOURCE])


def main(arguments: Sequence[str]) -> int:
    """Prints one row for each model and release; returns how many are beyond what is allowed."""
    releases = [a for a in arguments if a[0].isdigit()] or RELEASES
    failed = 0
    print("| model | onnxruntime |", " | ".join(WAYS), "|")
    print("|---" * (2 + len(WAYS)) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for name in [a for a in arguments if not a[0].isdigit()] or MODELS:
            base = Path(folder, name)
            write(frontend.load(onnxruntime_accuracy.load(name)), base)
            for release in releases:
                found = errors(base, release)
                bad = [way for way, error in found.items() if way != SOURCE and not error <= allowed(found)]
                failed += len(bad)
                row = [f"{found[way]:.1e}{' FAILED' * (way in bad)}" if way in found else "" for way in WAYS]
                print("|", name, "|", release, "|", " | ".join(row), "|", flush=True)
    return failed


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(min(main(sys.argv[1:]), 1))
