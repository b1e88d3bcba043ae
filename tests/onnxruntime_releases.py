"""One packaged model on several releases of onnxruntime, each in an environment of its own: ``python tests/onnxruntime_releases.py``.

Needs a package index, and downloads each release once into ``build/onnxruntime-<release>``. Releases may be named as arguments.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import graphs
import numpy as np

from coda_edge import frontend
from coda_edge.inputs import default_sizes, generate_inputs, input_specs
from coda_edge.onnxruntime import package
from coda_edge.verify import TOLERANCE, ort_session

RELEASES = ("1.20.1", "1.22.0", "1.24.1")
MODELS = ("bert.sdpa.dyn20", "gpt2.sdpa.ts17")
_BUILD = Path(__file__).resolve().parent.parent / "build"
# Runs in the other environment: prints the worst error with the library and without, and whether its operators ran.
_PROGRAM = """
import json, sys
import numpy as np, onnxruntime as ort
base, data = sys.argv[1], np.load(sys.argv[1] + ".npz")
feeds = {k[3:]: data[k] for k in data if k.startswith("in:")}
expected = [data[f"out:{i}"] for i in range(sum(k.startswith("out:") for k in data))]
for library in (base + ".so", None):
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = base
    if library:
        options.register_custom_ops_library(library)
    session = ort.InferenceSession(base + ".onnx", options, providers=["CPUExecutionProvider"])
    results = session.run(None, feeds)
    events = json.load(open(session.end_profiling()))
    ops = {e["args"]["op_name"] for e in events if e["cat"] == "Node" and e["name"].endswith("_kernel_time")}
    ours = any(op.startswith("Attention_") for op in ops)
    error = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(results, expected))
    print(error if ours == bool(library) else "inf")
"""


def interpreter(release: str) -> Path:
    """Python with onnxruntime ``release``, installed if it is not there."""
    folder = _BUILD / f"onnxruntime-{release}"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", f"onnxruntime=={release}", "numpy"], check=True)
    return python


def write(name: str, folder: Path) -> Path:
    """The fixture ``name`` packaged, with inputs and what onnxruntime makes of them here; the files' common stem."""
    model = frontend.load(graphs.load_fixture(name))
    base = folder / name
    package(model, verify=False).save(f"{base}.onnx", f"{base}.so")
    specs = input_specs(model)
    feeds = generate_inputs(specs, default_sizes(specs, 3, 7), padding="left")
    results = ort_session(model).run(None, feeds)
    arrays = {f"in:{k}": v for k, v in feeds.items()} | {f"out:{i}": np.asarray(v) for i, v in enumerate(results)}
    np.savez(f"{base}.npz", allow_pickle=False, **arrays)
    return base


def main(releases: tuple[str, ...]) -> int:
    """Prints one line for each model, release and way of running; returns how many are beyond the tolerance."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for base in [write(name, Path(folder)) for name in MODELS]:
            for release in releases:
                done = subprocess.run(
                    [interpreter(release), "-c", _PROGRAM, base], capture_output=True, text=True, check=False
                )
                errors = [float(line) for line in done.stdout.split()] if not done.returncode else [float("inf")] * 2
                for way, error in zip(("with its library", "by its functions"), errors, strict=True):
                    bad = not error <= TOLERANCE
                    failed += bad
                    print(f"{base.name} {way}, onnxruntime {release}: {error:.1e}{' FAILED' if bad else ''}")
                if done.returncode:
                    print(done.stderr, file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(tuple(sys.argv[1:]) or RELEASES), 1))
