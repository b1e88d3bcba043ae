"""How many instructions a whole model executes on Arm, by qemu's user mode. Nothing is timed.

    python -m benchmarks.arm_instructions MODEL.onnx… [--sizes batch=1,sequence=128]

For each target the bundle runs on one thread of an emulated machine, once and twice: the difference is one run, whose loading is done. Per
run it prints all instructions, the vector multiply-adds among them (those of epilogues too), and the quotient, which is what loads, addresses
and loops cost. Needs ``qemu-user``, Debian's ``libc6-arm64-cross`` and ``libc6-armhf-cross``, a C compiler and the package ``ziglang``.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx

import coda_edge
from coda_edge.bundle import TensorInfo, reader, writer
from coda_edge.inputs import generate_inputs

ROOT = Path(__file__).resolve().parent.parent
_FLAGS = ("-std=c11", "-O2", "-fno-sanitize=undefined", "-D_GNU_SOURCE", '-DCODA_VERSION_TEXT="counted"')
# Of qemu's versions the first with each plugin interface that ``instructions.c`` knows.
_INTERFACES = {(9, 1): 3, (9, 0): 2, (0, 0): 1}


@dataclass(frozen=True)
class Counted:
    """What one run executes."""

    instructions: int
    multiplies: int


@dataclass(frozen=True)
class Core:
    """``target``: whose kernels; ``qemu`` and ``cpu``: the emulator and what it is to be; ``triple``: the runtime's compiler's."""

    target: str
    cpu: str
    qemu: str = "qemu-aarch64"
    triple: str = "aarch64-linux-gnu"


CORES = (
    Core("arm64-linux", "cortex-a72"),
    Core("arm64-linux-a55", "neoverse-n1"),
    Core("arm64-linux-a76", "neoverse-n1"),
    Core("arm64-linux-v1", "max"),
    Core("armv7-linux", "cortex-a15", "qemu-arm", "arm-linux-gnueabihf"),
)


def count(core: Core, model: onnx.ModelProto | Path, sizes: Mapping[str, int], folder: Path) -> Counted:
    """What a run of ``model`` at ``sizes`` executes on ``core``; ``folder`` takes what is built, once for all models.

    Raises CalledProcessError if something does not build or the model does not run.
    """
    data = writer.to_bytes(coda_edge.optimize(model, core.target, verify=False).bundle)
    (folder / "model.coda").write_bytes(data)
    plan = reader.from_bytes(data).best.plan
    loaded = model if isinstance(model, onnx.ModelProto) else onnx.load(model, load_external_data=False)
    request = _request(plan.inputs, generate_inputs(loaded, sizes))
    one, two = (_executed(core, folder, request * times) for times in (1, 2))
    return Counted(two.instructions - one.instructions, two.multiplies - one.multiplies)


def _request(inputs: Sequence[TensorInfo], feeds: Mapping[str, npt.NDArray[np.generic]]) -> bytes:
    """One run, as ``runtime/tests/remote.c`` reads it."""
    parts = []
    for tensor in inputs:
        array = np.ascontiguousarray(feeds[tensor.name], tensor.dtype)
        numbers = (array.ndim, *array.shape, array.nbytes)
        parts += [struct.pack(f"<{len(numbers)}q", *numbers), array.tobytes()]
    return b"".join(parts)


def _executed(core: Core, folder: Path, requests: bytes) -> Counted:
    """All that the program executes that answers ``requests``."""
    command = [
        core.qemu,
        "-cpu",
        core.cpu,
        "-L",
        f"/usr/{core.triple}",
        "-plugin",
        f"file={_plugin(core.qemu, folder)}",
    ]
    command += [str(_remote(core.triple, folder)), "bundle", str(folder / "model.coda"), "1"]
    done = subprocess.run(command, input=requests, capture_output=True, check=True)
    found = re.search(rb"(\d+) (\d+)\s*$", done.stderr)
    if found is None:
        raise ValueError(f"{core.qemu} counted nothing: {done.stderr[-300:].decode()}")
    return Counted(int(found[1]), int(found[2]))


def _plugin(qemu: str, folder: Path) -> Path:
    """The plugin that counts, for the interface that ``qemu`` has."""
    said = subprocess.run([qemu, "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"version (\d+)\.(\d+)", said)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    interface = next(number for first, number in _INTERFACES.items() if version >= first)
    built = folder / f"instructions{interface}.so"
    if not built.exists():
        source = ROOT / "benchmarks/instructions.c"
        command = [
            "cc",
            "-std=c11",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-shared",
            "-fPIC",
            f"-DINTERFACE={interface}",
        ]
        subprocess.run([*command, str(source), "-o", str(built)], check=True)
    return built


def _remote(triple: str, folder: Path) -> Path:
    """The program that runs bundles, for ``triple``."""
    built = folder / f"remote-{triple}"
    if not built.exists():
        parts = [ROOT / "runtime/src", ROOT / "runtime/src/posix"]
        sources = [*(source for part in parts for source in sorted(part.glob("*.c"))), ROOT / "runtime/tests/remote.c"]
        include = [f"-I{ROOT / 'runtime' / name}" for name in ("include", "src")]
        command = [sys.executable, "-m", "ziglang", "cc", "-target", f"{triple}.2.31", *_FLAGS, *include]
        subprocess.run([*command, *map(str, sources), "-o", str(built)], check=True)
    return built


def main(words: Sequence[str] | None = None) -> None:
    """Prints a line for each model and core."""
    parser = argparse.ArgumentParser(
        prog="arm_instructions", description="Instructions of whole models on Arm, by qemu."
    )
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.onnx")
    parser.add_argument("--sizes", default="", help="values of the inputs' symbols, as in batch=1,sequence=128")
    given = parser.parse_args(words)
    sizes = {name: int(value) for name, value in (one.split("=") for one in given.sizes.split(",") if one)}
    print(f"{'model':28} {'target':16} {'instructions':>14} {'multiply-adds':>14} {'per multiply':>12}")
    with tempfile.TemporaryDirectory() as folder:
        for model in given.models:
            for core in CORES:
                found = count(core, model, sizes, Path(folder))
                quotient = found.instructions / max(found.multiplies, 1)
                print(
                    f"{model.stem:28} {core.target:16} {found.instructions:14} {found.multiplies:14} {quotient:12.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
