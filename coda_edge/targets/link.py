"""Linking a kernel object into a shared library that depends on nothing.

The system's C compiler drives the linker if there is one for the triple; otherwise the ``ziglang`` package's, which links for every platform.
"""

from __future__ import annotations

import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ..errors import TargetError

_FLAGS = ("-shared", "-nostdlib", "-s", "-Wl,--gc-sections", "-Wl,--no-undefined", "-Wl,-z,noexecstack")
_SHT_DYNSYM = 11


def link_shared(objects: bytes, symbols: Sequence[str], triple: str) -> bytes:
    """The shared library of ``objects`` that exports ``symbols`` only.

    Raises TargetError if there is no linker for ``triple``, linking fails, or a symbol would be left undefined.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, script, library = Path(folder, "k.o"), Path(folder, "k.map"), Path(folder, "k.so")
        source.write_bytes(objects)
        script.write_text("{ global: " + " ".join(f"{s};" for s in symbols) + " local: *; };\n")
        command = [*_linker(triple), *_FLAGS, f"-Wl,--version-script={script}", str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise TargetError(f"kernels do not link for {triple} with `{' '.join(command[:3])}`: {done.stderr.strip()}")
        data = library.read_bytes()
    undefined = undefined_symbols(data)
    if undefined:
        raise TargetError(f"kernels for {triple} need symbols that a device does not have: {', '.join(undefined)}")
    return data


def _linker(triple: str) -> list[str]:
    """The command that links for ``triple``."""
    host = f"{platform.machine()}-{platform.system().lower()}"
    if triple.startswith(host) and shutil.which("cc"):
        return ["cc"]
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc", "-target", triple]
    raise TargetError(
        f"no linker for {triple}: install a C compiler (for this machine) or `pip install ziglang` (for any)"
    )


def undefined_symbols(elf: bytes) -> tuple[str, ...]:
    """Names that a 64-bit little-endian ELF shared library expects others to define."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise TargetError("the linker gave something else than a 64-bit little-endian ELF library")
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    # A section header: name, type, flags, address, offset, size, link, info, alignment, entry size.
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + i * size) for i in range(count)]
    missing: list[str] = []
    for section in sections:
        if section[1] != _SHT_DYNSYM:
            continue
        names = sections[section[6]][4]
        for at in range(section[4] + section[9], section[4] + section[5], section[9]):
            name, _, _, where = struct.unpack_from("<IBBH", elf, at)
            if where == 0:
                missing.append(elf[names + name : elf.index(0, names + name)].decode())
    return tuple(missing)
