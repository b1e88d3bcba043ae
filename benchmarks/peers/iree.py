"""IREE, compiled for this machine's CPU, with the sizes of the inputs fixed."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from . import Call, Feeds
from .fixed import fixed
from .wheels import lacks

_FILE = "model.vmfb"
_COMPILE = (
    "--iree-hal-target-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
    "--iree-opt-level=O3",
    "--iree-opt-data-tiling",
)


class Iree:
    """Its ``local-sync`` device for one thread, ``local-task`` for more."""

    name = "iree"

    def available(self) -> str:
        return lacks("iree.compiler", "iree.runtime")

    def prepare(self, model: Path, feeds: Feeds, folder: Path) -> None:
        onnx.save(fixed(model, feeds, folder), folder / "import.onnx")
        _tool("iree-import-onnx", folder / "import.onnx", "-o", folder / "model.mlir")
        _tool("iree-compile", folder / "model.mlir", *_COMPILE, "-o", folder / _FILE)

    def load(self, model: Path, feeds: Feeds, folder: Path, threads: int) -> Call:
        import iree.runtime as rt

        rt.flags.parse_flags(f"--task_topology_group_count={threads}")
        config = rt.Config("local-sync" if threads == 1 else "local-task")
        module = rt.VmModule.mmap(config.vm_instance, str(folder / _FILE))
        context = rt.load_vm_module(module, config)
        (entry,) = (name for name in module.function_names if not name.startswith("__") and "$" not in name)
        function = context[entry]
        inputs = [rt.asdevicearray(config.device, np.ascontiguousarray(v)) for v in feeds.values()]

        def call() -> list[Any]:
            results = function(*inputs)
            return [np.asarray(r) for r in (results if isinstance(results, (tuple, list)) else (results,))]

        return call


def _tool(name: str, *arguments: object) -> None:
    command = [str(Path(sysconfig.get_path("scripts"), name)), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
        raise RuntimeError(f"{name}: {lines[0]}")
