"""64-bit Arm (AArch64) on Linux and Android, by the core that instructions are scheduled for.

The kernels of all systems are alike: they call nothing. A target without a core's name runs on every 64-bit Arm CPU.
"""

from __future__ import annotations

from .target import Target

_V8_0 = ("asimd",)
_V8_2 = (*_V8_0, "fp16", "dotprod")
_V8_4 = (*_V8_2, "i8mm", "bf16", "sve")
_V9 = (*_V8_4, "sve2")

# Of the tiles that 32 registers hold, those whose loops come nearest to the peak by LLVM's models (benchmarks/arm_mca.py).
_TILES = ((8, 3), (12, 2))
_WIDE_CORE_TILES = ((6, 4), (12, 2))
_IN_ORDER = 64
"""K steps between requests for weights ahead on older in-order cores, where each stops the multiply-adds (benchmarks/arm_mca.py): of 16, 32, 64
and 96, those with which whole kernels of 768 steps come nearest to the peak."""


def _core(
    name: str,
    description: str,
    features: tuple[str, ...],
    mcpu: str,
    system: str = "linux-gnu",
    tiles: tuple[tuple[int, int], ...] = _TILES,
    stride: int = 0,
) -> Target:
    tvm = {"kind": "llvm", "mtriple": f"aarch64-unknown-{system}", "mcpu": mcpu, "opt-level": 3}
    dot = "smmla128" if "i8mm" in features else "sdot128" if "dotprod" in features else ""
    return Target(name, description, tvm, f"aarch64-{system}", features, 16, 32, tiles=tiles, stride=stride, dot=dot)


TARGETS = (
    _core("arm64-linux-a53", "Cortex-A53, A35: in-order, as in Raspberry Pi 3", _V8_0, "cortex-a53", stride=_IN_ORDER),
    _core("arm64-linux-a55", "Cortex-A55: in-order, Armv8.2", _V8_2, "cortex-a55", stride=_IN_ORDER),
    _core("arm64-linux-a510", "Cortex-A510, A520: in-order, Armv9", _V9, "cortex-a510"),
    _core("arm64-android", "any 64-bit Android device", _V8_0, "cortex-a72", "linux-android"),
    _core("arm64-linux-musl", "any 64-bit Arm CPU, musl", _V8_0, "cortex-a72", "linux-musl"),
    _core("arm64-linux", "any 64-bit Arm CPU; Cortex-A72, as in Raspberry Pi 4", _V8_0, "cortex-a72"),
    _core("arm64-linux-x1", "Cortex-X1", _V8_2, "cortex-x1", tiles=_WIDE_CORE_TILES),
    _core("arm64-linux-a76", "Cortex-A76 and later, Neoverse N1, Raspberry Pi 5", _V8_2, "neoverse-n1"),
    _core("arm64-linux-v1", "Neoverse V1 (Graviton 3)", _V8_4, "neoverse-v1", tiles=_WIDE_CORE_TILES),
    _core("arm64-linux-n2", "Armv9: Neoverse N2, Cortex-A710, X2 and later", _V9, "neoverse-n2"),
)
