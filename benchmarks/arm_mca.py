"""How near the GEMM's inner loop comes to a core's peak of multiply-adds, by LLVM's model of the core. Nothing is timed.

    python -m benchmarks.arm_mca

For each target: its tiles' K loops, as the kernel library has them, go through ``llvm-mca``, which knows each instruction's latency and
units, but no caches. LLVM's model of Cortex-A76 is that of the older A57, so that A76-class cores are judged by Neoverse N1's. Its model of Cortex-A55 starts two 128-bit multiply-adds a cycle, the core one: there
the figures compare tiles, and are no shares of a peak.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from coda_edge import targets
from coda_edge.epilogue import library
from coda_edge.lower.abi import assembly
from coda_edge.lower.gemm import lower_gemm
from coda_edge.schedule import GemmSchedule
from coda_edge.symbolic import symbol

VERSIONS = (22, 21, 20, 19)
ITERATIONS = 200
SIZE = 768
TILES = ((8, 3), (12, 2), (6, 4), (8, 2))


@dataclass(frozen=True)
class Core:
    """``target``: whose kernels; ``model``: llvm-mca's name of the core; ``peak``: vector multiply-adds a cycle."""

    target: str
    model: str
    peak: int


CORES = (
    Core("arm64-linux-a55", "cortex-a55", 1),
    Core("arm64-linux", "neoverse-n1", 2),
    Core("arm64-linux-a76", "neoverse-n1", 2),
    Core("arm64-linux-x1", "neoverse-v1", 4),
)


@dataclass(frozen=True)
class Estimate:
    """Of one loop: instructions, multiply-adds, accesses of the stack (spills), cycles for one iteration."""

    instructions: int
    multiplies: int
    spills: int
    cycles: float


def find_tool() -> str:
    """The newest llvm-mca there is. Exits with a message if there is none from LLVM 19 on."""
    for name in (f"llvm-mca-{version}" for version in VERSIONS):
        if shutil.which(name):
            return name
    sys.exit(f"arm_mca: no llvm-mca of LLVM {VERSIONS[-1]} to {VERSIONS[0]} is installed (Debian: apt install llvm-19)")


def inner_loops(text: str) -> Iterator[list[str]]:
    """The instructions of each loop of AArch64 assembly that has none inside."""
    lines = [line.strip() for line in text.splitlines()]
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if re.match(r"\.LBB\w+:", line)}
    for at, line in enumerate(lines):
        jump = re.match(r"(?:b\.|cbn?z|tbn?z).*(\.LBB\w+)$", line)
        start = labels.get(jump[1], at) if jump else at
        body = lines[start + 1 : at + 1]
        if start < at and not any(one.startswith(".LBB") for one in body):
            yield [one for one in body if one and not one.startswith((".", "//"))]


def estimate(tool: str, core: Core, tile: tuple[int, int]) -> Estimate:
    """The estimate for the K loop of a whole tile of ``tile`` (rows, vectors)."""
    target = targets.get(core.target)
    schedule = GemmSchedule(*tile, target.lanes(4))
    weight = np.ones((SIZE, SIZE), np.float32)
    call = lower_gemm(target, "gemm", library.bias.program, "a", weight, ["b"], ["y"], symbol("M"), schedule=schedule)
    wanted = tile[0] * tile[1]
    # The forms for few rows and for the last ones have loops of as many multiply-adds, among more of other instructions.
    loops = [body for body in inner_loops(assembly([call.kernel.func], target.tvm)) if _multiplies(body)]
    loop = max((b for b in loops if _multiplies(b) % wanted == 0), key=lambda body: _multiplies(body) / len(body))
    command = [tool, "-mtriple=aarch64-linux-gnu", f"-mcpu={core.model}", f"-iterations={ITERATIONS}"]
    done = subprocess.run(command, input="\n".join(loop), capture_output=True, text=True, check=True)
    cycles = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    if cycles is None:
        raise ValueError(f"{tool} reports no cycles: {done.stdout[:200]}")
    return Estimate(len(loop), _multiplies(loop), sum("[sp" in line for line in loop), int(cycles[1]) / ITERATIONS)


def _multiplies(loop: list[str]) -> int:
    return sum(line.startswith("fmla") for line in loop)


def main() -> None:
    """Prints a table."""
    tool = find_tool()
    print(f"{tool}: K loop of a {SIZE} x {SIZE} GEMM; an estimate of the model, not a measurement")
    print(
        f"{'target':17} {'model':12} {'tile':>6} {'fmla':>5} {'instr':>6} {'spills':>6} {'fmla/cycle':>10} {'of peak':>8}"
    )
    for core in CORES:
        for tile in TILES:
            found = estimate(tool, core, tile)
            rate = found.multiplies / found.cycles
            name = f"{tile[0]}x{4 * tile[1]}"
            print(
                f"{core.target:17} {core.model:12} {name:>6} {found.multiplies:5} {found.instructions:6} {found.spills:6} "
                f"{rate:10.2f} {rate / core.peak:8.1%}"
            )


if __name__ == "__main__":
    main()
