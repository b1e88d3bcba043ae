"""x86-64 on Linux, by the microarchitecture levels of the System V psABI (levels v2, v3 and v4), and with what goes beyond."""

from __future__ import annotations

from dataclasses import replace

from .target import Target

_V2 = ("sse3", "ssse3", "sse4_1", "sse4_2", "popcnt")
_V3 = (*_V2, "avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "lzcnt", "movbe")
_V4 = (*_V3, "avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl")
_AVX_VNNI = (*_V3, "avx_vnni")
_VNNI = (*_V4, "avx512_vnni")

# By measurement, best first. With 32 registers 12×2 and 14×2 reach 87 % of what these do.
_TILES = {16: ((4, 3), (6, 2), (12, 1)), 32: ((8, 3), (6, 4))}


def _level(level: str, description: str, features: tuple[str, ...], vector: int, registers: int) -> Target:
    name = f"x86-64-{level}"
    tvm = {"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu", "mcpu": name, "opt-level": 3}
    return Target(name, description, tvm, "x86_64-linux-gnu", features, vector, registers, tiles=_TILES[registers])


def _with_bytes(base: Target, description: str, features: tuple[str, ...], llvm: str, dot: str) -> Target:
    """``base`` on CPUs that have ``dot`` too, LLVM's feature ``llvm``."""
    tvm = {**base.tvm, "mattr": [f"+{llvm}"]}
    name = f"{base.name}-vnni"
    return replace(base, name=name, description=description, features=features, tvm=tvm, dot=dot, base=base.name)


V3 = _level("v3", "AVX2 and FMA: Intel since Haswell, AMD since Excavator and Zen", _V3, 32, 16)
_V4_TARGET = _level("v4", "AVX-512: Intel servers since Skylake, AMD since Zen 4", _V4, 64, 32)
TARGETS = (
    _level("v2", "SSE4.2: any 64-bit PC since 2009", _V2, 16, 16),
    V3,
    _with_bytes(
        V3,
        "AVX2 with products of bytes: Intel since Alder Lake, AMD since Zen 5",
        _AVX_VNNI,
        "avxvnni",
        "vpdpbusd256",
    ),
    _V4_TARGET,
    _with_bytes(
        _V4_TARGET,
        "AVX-512 with products of bytes: Intel since Ice Lake, AMD since Zen 4",
        _VNNI,
        "avx512vnni",
        "vpdpbusd512",
    ),
)

#: What every PC of this kind runs as well as it can; weights lie as most PCs want them.
GROUPS = {"x86-64": ("x86-64-v3", "x86-64-v2", "x86-64-v3-vnni", "x86-64-v4", "x86-64-v4-vnni")}
