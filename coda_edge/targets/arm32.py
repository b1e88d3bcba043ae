"""32-bit Arm on Linux: Armv7-A with NEON and fused multiply-add (VFPv4), hard-float calls.

NEON takes subnormal numbers for zero there. Offsets are 64 bits wide in all kernels, which costs this target some speed.
"""

from __future__ import annotations

from .target import Target

TARGETS = (
    Target(
        name="armv7-linux",
        description="Armv7-A with NEON and VFPv4: Cortex-A7, A15, A17; newer cores in 32-bit mode",
        tvm={
            "kind": "llvm",
            "mtriple": "armv7a-unknown-linux-gnueabihf",
            # Of the cores with these instructions one for which LLVM fuses multiply and add: for Cortex-A7 it does not.
            "mcpu": "cortex-a15",
            "mattr": ["+neon", "+vfp4"],
            "opt-level": 3,
        },
        triple="arm-linux-gnueabihf",
        features=("neon", "vfpv4"),
        vector=16,
        registers=16,
        tiles=((4, 2), (6, 1)),
    ),
)
