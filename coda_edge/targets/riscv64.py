"""64-bit RISC-V on Linux: RV64GC, which has no vectors. LLVM makes scalar code of the kernels' vectors, here as wide as a number."""

from __future__ import annotations

from .target import Target

TARGETS = (
    Target(
        name="riscv64-linux",
        description="RV64GC: any RISC-V board that runs Linux",
        tvm={
            "kind": "llvm",
            "mtriple": "riscv64-unknown-linux-gnu",
            "mcpu": "generic-rv64",
            "mattr": ["+m", "+a", "+f", "+d", "+c"],
            "mabi": "lp64d",
            "opt-level": 3,
        },
        triple="riscv64-linux-gnu",
        features=("m", "a", "f", "d", "c"),
        vector=4,
        registers=32,
        tiles=((4, 5),),
    ),
)
