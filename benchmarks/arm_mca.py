"""How near GEMM kernels come to an Arm core's peak of multiply-adds, by LLVM's model of the core. Nothing is timed.

    python -m benchmarks.arm_mca

A kernel runs once in qemu's user mode, and the instructions that it executed (``arm_trace``) go through ``llvm-mca``, which knows each one's
latency and units, but no caches and no mispredicted branch. Three tables: loops over K, against the same written by hand (``arm_yardsticks``); whole
kernels, of which only the products count as work; and what each executes. LLVM's model of Cortex-A76 is that of the
older A57, so that A76-class cores are judged by Neoverse N1's. Its model of Cortex-A55 starts two 128-bit multiply-adds a cycle, the core one: its
figures compare loops with each other, and can exceed what the core does.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coda_edge import targets
from coda_edge.epilogue import library
from coda_edge.epilogue.program import EpilogueProgram
from coda_edge.lower.abi import compile_kernels
from coda_edge.lower.dot import DOTS
from coda_edge.lower.gemm import lower_gemm
from coda_edge.lower.kernel import Packed
from coda_edge.symbolic import evaluate, symbol

from . import arm_trace, arm_yardsticks

VERSIONS = (22, 21, 20, 19)
ITERATIONS = 200
MULTIPLIES = ("fmla", "sdot", "smmla")
BYTES = EpilogueProgram.parse(
    "(acc: tile i32, scale: col f32) -> (y: tile = v1) {\n  v0 = cast acc to=f32\n  v1 = mul v0 scale\n}"
)


@dataclass(frozen=True)
class Core:
    """``target``: whose kernels; ``model``: llvm-mca's name of the core; ``peak``: vector multiply-adds a cycle; ``matrices``: it has SMMLA."""

    target: str
    model: str
    peak: int
    matrices: bool = False


CORES = (
    Core("arm64-linux-a55", "cortex-a55", 1),
    Core("arm64-linux-a76", "neoverse-n1", 2),
    Core("arm64-linux-v1", "neoverse-v1", 4, matrices=True),
)


@dataclass(frozen=True)
class Case:
    """A GEMM ``[m, k] @ [k, n]`` with an epilogue, which begins with int32 where the products are of bytes."""

    name: str
    program: EpilogueProgram
    m: int
    n: int = 768
    k: int = 768

    @property
    def whole(self) -> bool:
        """Whether the products are of bytes."""
        return self.program.params[0].dtype == "i32"

    def products(self, target: targets.Target) -> int:
        """How many products an int32 or float32 lane of a multiply-add sums."""
        return DOTS[target.dot].word if self.whole else 1


CASES = (
    Case("bias", library.bias.program, 32),
    Case("bias, gelu", library.bias_gelu.program, 32),
    Case("bias", library.bias.program, 128, k=384),
    Case("bias, gelu", library.bias_gelu.program, 128, k=384),
    Case("bytes, scale", BYTES, 32),
    Case("bytes, scale", BYTES, 128),
)


@dataclass(frozen=True)
class Executed:
    """What one item, a panel of all rows, executes; and its vector multiply-adds, epilogue and conversions aside."""

    instructions: list[str]
    multiplies: int

    @property
    def loop(self) -> list[str]:
        """The block that takes the most instructions of all: the loop over K."""
        blocks: Counter[tuple[str, ...]] = Counter()
        straight: list[str] = []
        for line in self.instructions:
            straight.append(line)
            if arm_trace.is_branch(line):
                blocks[tuple(straight)] += 1
                straight = []
        return list(max(blocks.items(), key=lambda block: len(block[0]) * block[1])[0])


def find_tool(name: str) -> str:
    """The newest of LLVM's tool ``name`` there is. Exits with a message if there is none from LLVM 19 on."""
    for found in (f"{name}-{version}" for version in VERSIONS):
        if shutil.which(found):
            return found
    sys.exit(f"arm_mca: no {name} of LLVM {VERSIONS[-1]} to {VERSIONS[0]} is installed (Debian: apt install llvm-19)")


def execute(core: Core, case: Case) -> Executed:
    """The first item of ``case`` as the core's target has it."""
    target, rows = targets.get(core.target), {"M": case.m}
    operands, outputs = [p.name for p in case.program.params[1:]], [o.name for o in case.program.outputs]
    weight = np.ones((case.k, case.n), np.int8 if case.whole else np.float32)
    call = lower_gemm(target, "gemm", case.program, "a", weight, operands, outputs, symbol("M"))
    # A tensor is at most as large as the larger of A and the output, in float32.
    largest = 4 * case.m * max(case.k, case.n)
    sizes = [b.data.nbytes if isinstance(b, Packed) else largest for b in call.buffers]
    ints = [evaluate(size, rows) for size in call.ints]
    with tempfile.TemporaryDirectory() as folder:
        program = arm_trace.build(
            Path(folder),
            compile_kernels([call.kernel.func], target.tvm),
            call.kernel.symbol,
            [*sizes, evaluate(call.scratch, rows)],
            [*ints, 0, 1],
            find_tool("llvm-objdump"),
        )
        instructions = program.trace()
    panel = next(b.columns[0] for b in call.buffers if isinstance(b, Packed) and b.columns)
    return Executed(instructions, case.m * len(panel) // target.lanes(4) * -(-case.k // case.products(target)))


def cycles(model: str, instructions: Sequence[str], iterations: int = 1) -> float:
    """Cycles that the model of a core takes for the instructions, on average of ``iterations`` in a row. Raises ValueError if it does not say."""
    tool = find_tool("llvm-mca")
    command = [tool, "-mtriple=aarch64-linux-gnu", f"-mcpu={model}", "-mattr=+dotprod,+fullfp16,+i8mm"]
    command += [f"-iterations={iterations}", "-resource-pressure=0", "-instruction-info=0"]
    done = subprocess.run(command, input="\n".join(instructions), capture_output=True, text=True, check=False)
    found = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    if found is None:
        raise ValueError(f"{tool} reports no cycles: {done.stderr[:300]}")
    return int(found[1]) / iterations


def multiplies(loop: Sequence[str]) -> int:
    """How many vector multiply-adds there are."""
    return sum(line.startswith(MULTIPLIES) for line in loop)


def _share(core: Core, loop: Sequence[str]) -> float:
    return multiplies(loop) / cycles(core.model, loop, ITERATIONS) / core.peak


def main() -> None:
    """Prints the tables."""
    found = {(core, case): execute(core, case) for core in CORES for case in CASES}
    print("Loops over K: share of the core's peak by its model; by hand: the same in assembly, operands packed")
    print(f"{'core':12} {'loop':14} {'instr':>6} {'multiplies':>10} {'spills':>6} {'of peak':>8} {'by hand':>8}")
    for core in CORES:
        for name, case in (("float32", CASES[0]), ("bytes, SMMLA" if core.matrices else "bytes, SDOT", CASES[4])):
            loop = found[core, case].loop
            spills = sum("[sp" in line for line in loop)
            hand = _share(core, [*arm_yardsticks.LOOPS[name](), *arm_yardsticks.COUNTED])
            print(
                f"{core.model:12} {name:14} {len(loop):6} {multiplies(loop):10} {spills:6} {_share(core, loop):8.1%} {hand:8.1%}"
            )
        hand = _share(core, [*arm_yardsticks.LOOPS["float16"](), *arm_yardsticks.COUNTED])
        print(f"{core.model:12} {'float16':14} {'':6} {'':10} {'':6} {'':>8} {hand:8.1%}")
    print("\nWhole kernels, one panel: share of the peak that the products reach; instructions executed, by qemu")
    print(f"{'core':12} {'epilogue':14} {'M':>4} {'K':>5} {'instr':>8} {'per multiply':>12} {'of peak':>8}")
    for (core, case), executed in found.items():
        share = executed.multiplies / cycles(core.model, executed.instructions) / core.peak
        count = len(executed.instructions)
        print(
            f"{core.model:12} {case.name:14} {case.m:4} {case.k:5} {count:8} {count / executed.multiplies:12.2f} {share:8.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
