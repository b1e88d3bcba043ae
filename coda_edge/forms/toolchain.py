"""Compiling, linking and archiving for a target: the system's C compiler for this machine, the ``ziglang`` package's for others."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ..errors import TargetError
from ..targets import Target
from ..targets.link import linker
from .sources import runtime, runtime_sources

COMMON = (
    "-std=c11",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffunction-sections",
    "-DCODA_BUILD",
)
_GLIBC = {"riscv64": "2.31"}
"""The oldest glibc that is to run what is linked, by machine: without it the linker takes one of its own choice."""
_OLDEST_GLIBC = "2.28"
_PLATFORMS = {
    "posix": ("-O2", "-D_GNU_SOURCE", "-pthread"),
    "bare": ("-Os", "-ffreestanding"),
}
# Atomic operations of one instruction each: GCC and Clang would call their support library for them.
_OF_MACHINE = {"aarch64": ("-mno-outline-atomics",)}


def run(command: Sequence[str], what: str, triple: str) -> None:
    """Runs a tool. Raises TargetError with what it says if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TargetError(
            f"{what} does not build for {triple} with `{' '.join(command[:4])}`: {done.stderr.strip()[:2000]}"
        )


def compiler(target: Target) -> list[str]:
    """The command that compiles for ``target``, with what every file of it is compiled with."""
    machine = target.triple.partition("-")[0]
    command = linker(target.triple)
    plain = ("-fno-sanitize=undefined",) if "ziglang" in command else ()
    if plain and "-linux-gnu" in target.triple:
        command[-1] += f".{_GLIBC.get(machine, _OLDEST_GLIBC)}"
    return [*command, *COMMON, *plain, *_OF_MACHINE.get(machine, ())]


def includes() -> list[str]:
    """Where the runtime's headers are."""
    return [f"-I{runtime() / 'include'}", f"-I{runtime() / 'src'}"]


def compile_runtime(target: Target, platform: str, version: str, folder: Path) -> list[Path]:
    """The objects of the runtime without what opens bundles, in ``folder``. ``platform``: a key of ``_PLATFORMS``."""
    flags = [*compiler(target), *_PLATFORMS[platform], f'-DCODA_VERSION_TEXT="{version}"', *includes()]
    objects = []
    for source in runtime_sources(platform):
        objects.append(folder / f"coda_{source.stem}.o")
        run([*flags, "-c", str(source), "-o", str(objects[-1])], "the runtime", target.triple)
    return objects


def compile_tables(target: Target, folder: Path, sources: Sequence[Path]) -> list[Path]:
    """The objects of C and assembly files of the model in ``folder``."""
    objects = []
    for source in sources:
        objects.append(source.with_suffix(".o"))
        command = [
            *compiler(target),
            "-ffreestanding",
            *includes(),
            f"-I{folder}",
            "-c",
            str(source),
            "-o",
            str(objects[-1]),
        ]
        run(command, "the model", target.triple)
    return objects


def archive(objects: Sequence[Path], output: Path, target: Target) -> None:
    """A static library of ``objects``."""
    form = ["--format=darwin"] if target.system == "darwin" else []
    command = [sys.executable, "-m", "ziglang", "ar", *form] if find_spec("ziglang") else ["ar"]
    if command == ["ar"] and not shutil.which("ar"):
        raise TargetError("no archiver: `pip install ziglang`, or install the system's binutils")
    run([*command, "rcs", str(output), *map(str, objects)], "the archive", target.triple)
