"""x86-64 on Linux, by the microarchitecture levels of the System V psABI (levels v2, v3 and v4)."""

from __future__ import annotations

from .target import Target

_V2 = ("sse3", "ssse3", "sse4_1", "sse4_2", "popcnt")
_V3 = (*_V2, "avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "lzcnt", "movbe")
_V4 = (*_V3, "avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl")

# By measurement, best first. With 32 registers 12×2 and 14×2 reach 87 % of what these do.
_TILES = {16: ((4, 3), (6, 2), (12, 1)), 32: ((8, 3), (6, 4))}


def _level(level: str, description: str, features: tuple[str, ...], vector: int, registers: int) -> Target:
    name = f"x86-64-{level}"
    tvm = {"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu", "mcpu": name, "opt-level": 3}
    return Target(name, description, tvm, "x86_64-linux-gnu", features, vector, registers, tiles=_TILES[registers])


TARGETS = (
    _level("v2", "SSE4.2: any 64-bit PC since 2009", _V2, 16, 16),
    _level("v3", "AVX2 and FMA: Intel since Haswell, AMD since Excavator and Zen", _V3, 32, 16),
    _level("v4", "AVX-512: Intel servers since Skylake, AMD since Zen 4", _V4, 64, 32),
)

#: What every PC of this kind runs as well as it can; weights lie as most PCs want them.
GROUPS = {"x86-64": ("x86-64-v3", "x86-64-v2", "x86-64-v4")}
