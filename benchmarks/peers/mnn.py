"""MNN, from its own format."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from . import Call, Feeds
from .wheels import lacks

_FILE = "model.mnn"
# The converter itself: MNN's command line around it installs a package and sends statistics.
_CONVERT = "import sys, _tools; _tools.mnnconvert(sys.argv[1:])"
# MNN has neither wide integers nor bools in its inputs.
_NARROW = {"int64": np.int32, "bool": np.int32, "uint8": np.int32}


class Mnn:
    """Its CPU backend, precision ``high``: float32."""

    name = "mnn"

    def available(self) -> str:
        return lacks("MNN")

    def prepare(self, model: Path, feeds: Feeds, folder: Path) -> None:
        target = folder / _FILE
        arguments = ["mnnconvert", "-f", "ONNX", "--modelFile", str(model.resolve()), "--MNNModel", _FILE]
        # It leaves scratch files where it runs.
        command = [sys.executable, "-c", _CONVERT, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if not target.is_file():
            lines = (done.stdout + done.stderr).splitlines()
            told = [line.rpartition("] ")[2].partition(": ")[2] for line in lines if "Not Support" in line]
            raise RuntimeError(f"its converter wrote no model: {' '.join(told or lines[-1:])}")

    def load(self, model: Path, feeds: Feeds, folder: Path, threads: int) -> Call:
        import MNN

        names = [o.name for o in onnx.load(model, load_external_data=False).graph.output]
        settings = ({"backend": 0, "numThread": threads, "precision": "high", "memory": "normal", "power": "high"},)
        manager = MNN.nn.create_runtime_manager(settings)
        net = MNN.nn.load_module_from_file(str(folder / _FILE), list(feeds), names, runtime_manager=manager)
        kept = [np.ascontiguousarray(v.astype(_NARROW.get(v.dtype.name, v.dtype))) for v in feeds.values()]
        inputs = [MNN.expr.const(v, list(v.shape), MNN.expr.NCHW, _element(v)) for v in kept]

        def call() -> list[Any]:
            return [np.array(o.read(), copy=False) for o in net.forward(inputs)]

        return call


def _element(value: Any) -> Any:
    import MNN

    return MNN.expr.int if value.dtype == np.int32 else MNN.expr.float
