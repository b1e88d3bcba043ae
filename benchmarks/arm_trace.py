"""Which instructions of a kernel an Arm core executes, in order: qemu's user mode runs the kernel and logs the blocks it enters.

A trace is what ``arm_mca`` has LLVM's model of a core judge as a whole, loops, prologues, epilogues and all. Needs ``qemu-aarch64``,
``llvm-objdump`` and the package ``ziglang``; the program is a static one, so that no C library of the machine is needed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

TRIPLE = "aarch64-linux-musl"
_MAIN = """
#include <stdint.h>
int32_t {symbol}(const uint64_t *buffers, const int64_t *ints);
static _Alignas(64) unsigned char memory[{total}];
int main(void) {{
  const uint64_t offsets[] = {{ {offsets} }};
  uint64_t buffers[{count}];
  for (int i = 0; i < {count}; i++)
    buffers[i] = (uint64_t)(uintptr_t)memory + offsets[i];
  return {symbol}(buffers, (const int64_t[]){{ {ints} }});
}}
"""
_BRANCHES = ("b", "bl", "br", "blr", "ret", "cbz", "cbnz", "tbz", "tbnz")
_INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S.*)$")
_LISTED = re.compile(r"^0x([0-9a-f]+): ")
_ENTERED = re.compile(r"^Trace \d+: 0x[0-9a-f]+ \[[0-9a-f]+/([0-9a-f]+)/")


@dataclass(frozen=True)
class Program:
    """A program that calls one kernel once. ``instructions``: the kernel's, by address."""

    path: Path
    instructions: dict[int, str]

    @cached_property
    def addresses(self) -> list[int]:
        """Where the kernel's instructions are, in order."""
        return sorted(self.instructions)

    def trace(self, cpu: str = "max") -> list[str]:
        """The kernel's instructions as qemu's ``cpu`` executes them. Raises CalledProcessError if the kernel fails."""
        first, last = self.addresses[0], self.addresses[-1]
        with tempfile.NamedTemporaryFile("r") as log:
            where = f"{first:#x}..{last:#x}"
            options = ["-cpu", cpu, "-d", "in_asm,exec,nochain", "-dfilter", where, "-D", log.name]
            subprocess.run(["qemu-aarch64", *options, str(self.path)], check=True)
            return list(self._executed(log))

    def _executed(self, log: Iterable[str]) -> Iterator[str]:
        """The instructions of the blocks that ``log`` says were entered; where a block is translated it lists the block's instructions."""
        blocks: dict[int, list[str]] = {}
        block: list[str] = []
        for line in log:
            if entered := _ENTERED.match(line):
                yield from blocks[int(entered[1], 16)]
            elif line.startswith("IN:"):
                block = []
            elif listed := _LISTED.match(line):
                if not block:
                    blocks[int(listed[1], 16)] = block
                block.append(self.instructions[int(listed[1], 16)])


def build(
    folder: Path, objects: bytes, symbol: str, sizes: Sequence[int], ints: Sequence[int], objdump: str
) -> Program:
    """The program, in ``folder``, that calls the kernel ``symbol`` of ``objects`` with buffers of ``sizes`` bytes, all zero.

    Raises CalledProcessError if it does not link.
    """
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // 4096) * 4096 + 4096)
    text = _MAIN.format(
        symbol=symbol,
        total=offsets[-1],
        count=len(sizes),
        offsets=", ".join(map(str, offsets[:-1])),
        ints=", ".join(map(str, ints)),
    )
    (folder / "main.c").write_text(text)
    (folder / "kernels.o").write_bytes(objects)
    command = [sys.executable, "-m", "ziglang", "cc", "-target", TRIPLE, "-static", "-O1", "main.c", "kernels.o"]
    subprocess.run([*command, "-o", "program"], cwd=folder, check=True)
    command = [objdump, "-d", "--no-show-raw-insn", f"--disassemble-symbols={symbol}", "program"]
    listing = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    found = [line for line in map(_INSTRUCTION.match, listing.splitlines()) if line]
    return Program(folder / "program", {int(one[1], 16): _plain(one[2]) for one in found})


def is_branch(instruction: str) -> bool:
    """Whether a block ends with it."""
    return instruction.partition("\t")[0].partition(".")[0] in _BRANCHES


def _plain(instruction: str) -> str:
    """An instruction as an assembler takes it: without the names that a disassembler adds, and branches to an address as to the next one."""
    text = re.sub(r"\s*(<[^>]*>|//.*)", "", instruction).strip()
    return re.sub(r"0x[0-9a-f]+$", "#4", text) if is_branch(text) else text
