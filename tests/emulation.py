"""Other machines on this one: qemu's user mode runs ``runtime/tests/remote.c`` and the cross-compiled runtime.

Needs ``qemu-user`` and the machine's C library (Debian: ``libc6-arm64-cross``, ``libc6-armhf-cross``, ``libc6-riscv64-cross``), and
the package ``ziglang`` as the compiler.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from coda_edge.bundle import TensorInfo, reader

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ("-std=c11", "-O2", "-fno-sanitize=undefined", "-D_GNU_SOURCE", '-DCODA_VERSION_TEXT="test"', "-Werror")


@dataclass(frozen=True)
class Machine:
    """An emulated machine: ``cpu`` is qemu's name, ``triple`` the compiler's, ``sysroot`` where its C library lies."""

    qemu: str
    cpu: str
    triple: str
    sysroot: str

    @property
    def lacks(self) -> str:
        """Why the machine cannot be emulated here; empty if it can."""
        if not find_spec("ziglang"):
            return "the package ziglang is not installed"
        if not shutil.which(self.qemu):
            return f"{self.qemu} is not installed"
        return "" if Path(self.sysroot).exists() else f"there is no C library in {self.sysroot}"

    def command(self, *words: str | Path) -> list[str]:
        """The command that runs a program of the machine."""
        return [self.qemu, "-cpu", self.cpu, "-L", self.sysroot, *map(str, words)]


def _machine(qemu: str, cpu: str, triple: str, sysroot: str) -> Machine:
    return Machine(f"qemu-{qemu}", cpu, f"{triple}.2.31", f"/usr/{sysroot}")


def _arm64(cpu: str) -> Machine:
    return _machine("aarch64", cpu, "aarch64-linux-gnu", "aarch64-linux-gnu")


MACHINES: dict[str, tuple[str, Machine]] = {
    "cortex-a72": ("arm64-linux", _arm64("cortex-a72")),
    "neoverse-n1": ("arm64-linux-a76", _arm64("neoverse-n1")),
    "max": ("arm64-linux-n2", _arm64("max")),
    "armv7": ("armv7-linux", _machine("arm", "cortex-a15", "arm-linux-gnueabihf", "arm-linux-gnueabihf")),
    "riscv64": ("riscv64-linux", _machine("riscv64", "rv64", "riscv64-linux-gnu", "riscv64-linux-gnu")),
}
"""What is emulated: the target that kernels are built for, and the machine that runs them."""

LONGER: dict[str, tuple[str, Machine]] = {
    "a53": ("arm64-linux-a53", _arm64("cortex-a53")),
    "a55": ("arm64-linux-a55", _arm64("neoverse-n1")),
    "x1": ("arm64-linux-x1", _arm64("neoverse-n1")),
    "a510": ("arm64-linux-a510", _arm64("max")),
    "v1": ("arm64-linux-v1", _arm64("max")),
    "v1, vectors of 32 bytes": ("arm64-linux-v1", _arm64("max,sve-max-vq=2")),
    "android": ("arm64-android", _arm64("cortex-a53")),
}
"""What is emulated only if asked for, by ``-m emulated``: the other cores, and other lengths of SVE's vectors."""


@cache
def remote(triple: str) -> Path:
    """The program ``remote`` with the runtime in it, for ``triple``."""
    folder = Path(tempfile.mkdtemp(prefix="coda-remote-"))
    parts = [ROOT / "runtime/src", ROOT / "runtime/src/posix"]
    sources = [*(source for part in parts for source in sorted(part.glob("*.c"))), ROOT / "runtime/tests/remote.c"]
    include = [f"-I{ROOT / 'runtime' / name}" for name in ("include", "src")]
    command = [sys.executable, "-m", "ziglang", "cc", "-target", triple, *FLAGS, *include, *map(str, sources)]
    done = subprocess.run([*command, "-o", str(folder / "remote")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "remote"


_FILE = "{file}"
"""In the command of a process: the file with what it is given."""


class _Process:
    """A running ``remote`` and the numbers and arrays that go to and fro."""

    def __init__(self, command: Sequence[str], data: bytes = b"") -> None:
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed by close()
        self._file.write(data)
        self._file.flush()
        command = [self._file.name if word == _FILE else word for word in command]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._to, self._from, self._errors = self._process.stdin, self._process.stdout, self._process.stderr

    def send(self, request: bytes) -> None:
        try:
            self._to.write(request)
            self._to.flush()
        except BrokenPipeError:
            raise AssertionError(self._errors.read().decode()) from None

    def read(self, size: int) -> bytes:
        data = self._from.read(size)
        if len(data) < size:
            raise AssertionError(f"exit status {self._process.wait()}: {self._errors.read().decode()}")
        return data

    def numbers(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}q", self.read(8 * count))

    def close(self) -> None:
        """Lets the program end; raises AssertionError if it fails."""
        self._to.close()
        assert self._process.wait() == 0, self._errors.read().decode()
        self._from.close()
        self._errors.close()
        self._file.close()


def _numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


class RemoteLibrary:
    """A kernel library in an emulated machine, called as ``kernel_harness.Library`` is."""

    def __init__(self, machine: Machine, data: bytes) -> None:
        self._process = _Process(machine.command(remote(machine.triple), "kernels", _FILE), data)

    def call(self, name: str, buffers: Sequence[np.ndarray | None], ints: Sequence[int]) -> int:
        """Calls kernel ``name`` and updates the buffers; returns its status, or -1 if it wrote outside them."""
        parts = [_numbers(len(name)), name.encode(), _numbers(len(buffers))]
        for buffer in buffers:
            parts += (
                [_numbers(1, -1)] if buffer is None else [_numbers(buffer.itemsize, buffer.nbytes), buffer.tobytes()]
            )
        self._process.send(b"".join([*parts, _numbers(8 * len(ints), *ints)]))
        (status,) = self._process.numbers(1)
        for buffer in buffers:
            if buffer is not None:
                found = np.frombuffer(self._process.read(buffer.nbytes), buffer.dtype)
                buffer[...] = found.reshape(buffer.shape)
        return status

    def close(self) -> None:
        """Ends the program."""
        self._process.close()


class RemoteSession:
    """A bundle in an emulated machine, run as ``coda_edge.Session`` is."""

    def __init__(self, machine: Machine, data: bytes, threads: int = 1) -> None:
        self._process = _Process(machine.command(remote(machine.triple), "bundle", _FILE, str(threads)), data)
        plan = reader.from_bytes(data).best.plan
        self._inputs, self._outputs = plan.inputs, plan.outputs

    @classmethod
    def of_program(
        cls, command: Sequence[str], inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]
    ) -> RemoteSession:
        """A program of runtime/tests/linked.c, whose model has these inputs and outputs."""
        session = cls.__new__(cls)
        session._process, session._inputs, session._outputs = _Process(command), inputs, outputs
        return session

    def run(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The outputs; raises RuntimeError with the runtime's message."""
        parts = []
        for tensor in self._inputs:
            array = np.ascontiguousarray(feeds[tensor.name], tensor.dtype)
            parts += [_numbers(array.ndim, *array.shape, array.nbytes), array.tobytes()]
        self._process.send(b"".join(parts))
        if self._process.numbers(1)[0]:
            raise RuntimeError(self._process.read(self._process.numbers(1)[0]).decode())
        outputs = []
        for tensor in self._outputs:
            shape = self._process.numbers(self._process.numbers(1)[0])
            data = self._process.read(self._process.numbers(1)[0])
            outputs.append(np.frombuffer(data, tensor.dtype).reshape(shape))
        return outputs

    def close(self) -> None:
        """Ends the session; raises AssertionError if the program does not end well."""
        self._process.close()
