"""Rounding to whole numbers for processors that have no instruction for it, where LLVM would call the C library: Armv7 and RISC-V.

Functions in LLVM's assembly language, by the name of the intrinsic that becomes a call of them. A magnitude below 2²³ is rounded to the
nearest whole number, ties to even, by adding and subtracting 2²³; the others follow from that. Signs, infinities and NaN stay.
"""

from __future__ import annotations

_FUNCTION = """
define weak hidden float @{name}f(float %x) {{
  %bits = bitcast float %x to i32
  %sign = and i32 %bits, -2147483648
  %negative = icmp slt i32 %bits, 0
  %unsigned = and i32 %bits, 2147483647
  %m = bitcast i32 %unsigned to float
  %sum = fadd float %m, 8388608.0
  %near = fsub float %sum, 8388608.0
  %above = fcmp ogt float %near, %m
  %one.less = fsub float %near, 1.0
  %down = select i1 %above, float %one.less, float %near
  %below = fcmp olt float %near, %m
  %one.more = fadd float %near, 1.0
  %up = select i1 %below, float %one.more, float %near
  %part = fsub float %m, %down
  %half = fcmp oge float %part, 0.5
  %next = fadd float %down, 1.0
  %away = select i1 %half, float %next, float %down
  %chosen = select i1 {condition}, float {if_so}, float {otherwise}
  %fraction = fcmp olt float %m, 8388608.0
  %kept = select i1 %fraction, float %chosen, float %m
  %kept.bits = bitcast float %kept to i32
  %result.bits = or i32 %kept.bits, %sign
  %result = bitcast i32 %result.bits to float
  ret float %result
}}
"""
_CHOICES = {
    "nearbyint": ("true", "%near", "%near"),
    "rint": ("true", "%near", "%near"),
    "roundeven": ("true", "%near", "%near"),
    "round": ("true", "%away", "%away"),
    "trunc": ("true", "%down", "%down"),
    "floor": ("%negative", "%up", "%down"),
    "ceil": ("%negative", "%down", "%up"),
}
"""By intrinsic: a condition, and which magnitude is taken if it holds and if not."""

WHOLE = {
    name: _FUNCTION.format(name=name, condition=condition, if_so=if_so, otherwise=otherwise)
    for name, (condition, if_so, otherwise) in _CHOICES.items()
}
_ROUNDS = ("aarch64", "arm64", "x86_64")
"""Machines with such instructions; of x86-64 all that kernels are built for have SSE4.1."""


def rounding(text: str, triple: str) -> str:
    """The functions that a module's ``text`` has use for on the machine of ``triple``."""
    if triple.startswith(_ROUNDS):
        return ""
    return "".join(code for name, code in WHOLE.items() if f"@llvm.{name}." in text)
