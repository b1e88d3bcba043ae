"""Plain TVM: the ONNX importer and default pipeline of relax, no schedules of ours; sizes of the inputs fixed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from coda_edge import targets

from . import Call, Feeds
from .fixed import fixed

_FILE = "model.so"


class Tvm:
    """Its virtual machine on kernels that are scheduled by defaults alone."""

    name = "tvm"

    def available(self) -> str:
        return ""

    def prepare(self, model: Path, feeds: Feeds, folder: Path) -> None:
        import tvm
        from tvm import relax
        from tvm.relax.frontend.onnx import from_onnx

        module = from_onnx(fixed(model, feeds, folder), {n: list(v.shape) for n, v in feeds.items()})
        module = relax.get_pipeline("zero")(module)
        native = targets.get("native")
        tvm.compile(module, tvm.target.Target(native.tvm)).export_library(str(folder / _FILE))

    def load(self, model: Path, feeds: Feeds, folder: Path, threads: int) -> Call:
        os.environ["TVM_NUM_THREADS"] = str(threads)
        import tvm
        from tvm import relax

        machine = relax.VirtualMachine(tvm.runtime.load_module(str(folder / _FILE)), tvm.cpu())
        inputs = [tvm.runtime.tensor(np.ascontiguousarray(v)) for v in feeds.values()]

        def call() -> list[Any]:
            results = machine["main"](*inputs)
            many = not hasattr(results, "numpy")
            return [r.numpy() for r in (results if many else (results,))]

        return call
