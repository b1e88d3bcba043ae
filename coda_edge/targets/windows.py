"""Windows: objects of kernels that the program's linker takes in."""

from __future__ import annotations

from dataclasses import replace

from .x86_64 import V3

TARGETS = (
    replace(
        V3,
        name="x86-64-windows",
        description="PCs with AVX2, Windows: an object to link",
        tvm={**V3.tvm, "mtriple": "x86_64-pc-windows-gnu"},
        triple="x86_64-windows-gnu",
        system="windows",
    ),
)
