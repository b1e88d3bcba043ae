"""What a relocatable object of kernels needs from others, in the three formats that systems have: ELF, Mach-O and COFF.

Formats: System V ABI; Apple's ``mach-o/loader.h`` and ``mach-o/nlist.h``; Microsoft's PE format, section COFF symbol table.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from ..errors import TargetError

_SHT_SYMTAB = 2
_LC_SYMTAB = 2
_MACHO_EXTERNAL, _MACHO_TYPE, _MACHO_DEBUG = 0x01, 0x0E, 0xE0
_COFF_EXTERNAL, _COFF_SYMBOL = 2, 18
_COFF_MACHINES = (b"\x64\x86", b"\x64\xaa")
"""Of x86-64 and of 64-bit Arm."""

FORMATS = {"elf": "ELF", "macho": "Mach-O", "coff": "COFF"}


def undefined(data: bytes) -> tuple[str, ...]:
    """Names that a little-endian 64-bit relocatable object expects others to define, as its C sources would spell them.

    Raises TargetError if ``data`` is none.
    """
    return tuple(_READERS[format_of(data)](data))


def format_of(data: bytes) -> str:
    """The key of ``FORMATS`` that ``data`` is. Raises TargetError if it is none."""
    if data[:6] == b"\x7fELF\x02\x01":
        return "elf"
    if data[:4] == b"\xcf\xfa\xed\xfe":
        return "macho"
    if data[:2] in _COFF_MACHINES:
        return "coff"
    raise TargetError(
        f"the compiler gave no little-endian 64-bit object of {', '.join(FORMATS.values())}: it begins with {data[:4].hex()}"
    )


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(0, at)].decode()


def _elf(data: bytes) -> Iterator[str]:
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]
    for _, kind, _, _, start, length, link, _, _, entry in sections:
        for at in range(start + entry, start + length, entry) if kind == _SHT_SYMTAB else ():
            name, _, _, section = struct.unpack_from("<IBBH", data, at)
            if section == 0 and name:
                yield _text(data, sections[link][4] + name)


def _macho(data: bytes) -> Iterator[str]:
    (commands,) = struct.unpack_from("<I", data, 16)
    at = 32
    for _ in range(commands):
        kind, size = struct.unpack_from("<II", data, at)
        if kind == _LC_SYMTAB:
            symbols, count, strings, _ = struct.unpack_from("<IIII", data, at + 8)
            for i in range(count):
                name, bits = struct.unpack_from("<IB", data, symbols + 16 * i)
                if bits & _MACHO_EXTERNAL and not bits & (_MACHO_TYPE | _MACHO_DEBUG):
                    yield _text(data, strings + name).removeprefix("_")
        at += size


def _coff(data: bytes) -> Iterator[str]:
    start, count = struct.unpack_from("<II", data, 8)
    strings, i = start + _COFF_SYMBOL * count, 0
    while i < count:
        at = start + _COFF_SYMBOL * i
        zeros, offset = struct.unpack_from("<II", data, at)
        value, section, _, storage, auxiliary = struct.unpack_from("<IhHBB", data, at + 8)
        if storage == _COFF_EXTERNAL and section == 0 and value == 0:
            yield data[at : at + 8].rstrip(b"\0").decode() if zeros else _text(data, strings + offset)
        i += 1 + auxiliary


_READERS: dict[str, Callable[[bytes], Iterator[str]]] = {"elf": _elf, "macho": _macho, "coff": _coff}
