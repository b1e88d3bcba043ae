"""Linking kernel objects into a shared library that depends on nothing.

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
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..errors import TargetError

_FLAGS = ("-shared", "-nostdlib", "-s", "-Wl,--gc-sections", "-Wl,--no-undefined", "-Wl,-z,noexecstack")
_SHT_DYNSYM = 11
_ARITHMETIC = {"arm": ("-lcompiler_rt",), "riscv64": ("-lcompiler_rt",)}
"""By machine: where what its instructions lack is linked in from, such as 64-bit division and half precision."""


def link_shared(objects: Sequence[bytes], symbols: Sequence[str], triple: str) -> bytes:
    """The shared library of ``objects`` that exports ``symbols`` only.

    Raises TargetError if there is no linker for ``triple``, linking fails, or a symbol would be left undefined.
    """
    with tempfile.TemporaryDirectory() as folder:
        script, library = Path(folder, "k.map"), Path(folder, "k.so")
        sources = [Path(folder, f"{number}.o") for number in range(len(objects))]
        for source, data in zip(sources, objects, strict=True):
            source.write_bytes(data)
        script.write_text("{ global: " + " ".join(f"{s};" for s in symbols) + " local: *; };\n")
        inputs = [f"-Wl,--version-script={script}", *map(str, sources), *_ARITHMETIC.get(triple.partition("-")[0], ())]
        command = [*linker(triple), *_FLAGS, *inputs, "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise TargetError(f"kernels do not link for {triple} with `{' '.join(command[:3])}`: {done.stderr.strip()}")
        data = library.read_bytes()
    undefined = undefined_symbols(data)
    if undefined:
        raise TargetError(f"kernels for {triple} need symbols that a device does not have: {', '.join(undefined)}")
    return data


def linker(triple: str) -> list[str]:
    """The command that links for ``triple``."""
    host = f"{platform.machine()}-{platform.system().lower()}"
    if triple.startswith(host) and shutil.which("cc"):
        return ["cc"]
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc", "-target", triple]
    raise TargetError(
        f"no linker for {triple}: install a C compiler (for this machine) or `pip install ziglang` (for any)"
    )


@dataclass(frozen=True)
class _Elf:
    """How one class of little-endian ELF file is laid out (System V ABI): formats for ``struct``, and where fields are.

    ``sections``: where the header says where the section table is; ``counts``: where the size of an entry and their number are. A
    ``section`` is unpacked to name, type, flags, address, offset, size, link, info, alignment, entry size; a ``symbol``'s name
    comes first, its section is the field number ``section_field``.
    """

    pointer: str
    sections: int
    counts: int
    section: str
    symbol: str
    section_field: int


_CLASSES = {
    b"\x7fELF\x01\x01": _Elf("<I", 0x20, 0x2E, "<IIIIIIIIII", "<IIIBBH", 5),
    b"\x7fELF\x02\x01": _Elf("<Q", 0x28, 0x3A, "<IIQQQQIIQQ", "<IBBH", 3),
}


def undefined_symbols(elf: bytes) -> tuple[str, ...]:
    """Names that a little-endian ELF shared library expects others to define. Raises TargetError if it is none."""
    form = _CLASSES.get(elf[:6])
    if form is None:
        raise TargetError("the linker gave something else than a little-endian ELF library")
    (offset,) = struct.unpack_from(form.pointer, elf, form.sections)
    size, count = struct.unpack_from("<HH", elf, form.counts)
    sections = [struct.unpack_from(form.section, elf, offset + i * size) for i in range(count)]
    missing: list[str] = []
    for section in sections:
        if section[1] != _SHT_DYNSYM:
            continue
        names = sections[section[6]][4]
        for at in range(section[4] + section[9], section[4] + section[5], section[9]):
            symbol = struct.unpack_from(form.symbol, elf, at)
            if symbol[form.section_field] == 0:
                name = names + symbol[0]
                missing.append(elf[name : elf.index(0, name)].decode())
    return tuple(missing)
