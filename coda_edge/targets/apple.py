"""iOS and macOS: objects of kernels that the app's linker takes in. iOS forbids to load code, so that there are no libraries."""

from __future__ import annotations

from dataclasses import replace

from .target import Target
from .x86_64 import V3

# Their large cores start four 128-bit multiply-adds a cycle, as Cortex-X1 does.
_TILES = ((6, 4), (12, 2))
_DARWIN = "darwin"


def _arm(system: str, version: str, mcpu: str, features: tuple[str, ...], description: str) -> Target:
    tvm = {"kind": "llvm", "mtriple": f"arm64-apple-{system}{version}", "mcpu": mcpu, "opt-level": 3}
    return Target(
        f"arm64-apple-{system}",
        description,
        tvm,
        f"aarch64-{system}",
        ("asimd", *features),
        vector=16,
        registers=32,
        l1=64 << 10,
        l2=2 << 20,
        tiles=_TILES,
        dot="sdot128" if "dotprod" in features else "",
        system=_DARWIN,
    )


TARGETS = (
    _arm("ios", "14.0", "apple-a12", ("fp16",), "iPhones since the XS (A12), iOS 14: an object to link"),
    _arm("macos", "11.0", "apple-m1", ("fp16", "dotprod"), "Macs since the M1, macOS 11: an object to link"),
    replace(
        V3,
        name="x86-64-macos",
        description="Intel Macs with AVX2, macOS 11: an object to link",
        tvm={**V3.tvm, "mtriple": "x86_64-apple-macosx11.0"},
        triple="x86_64-macos",
        system=_DARWIN,
    ),
)
