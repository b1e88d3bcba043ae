"""Conversions of float16 by arithmetic, for processors that have no instruction for them."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import tirx
from tvm.target import codegen
from tvm_ffi import StructuralMutator, structural_mutate

from . import intrinsics
from .body import Expr, lanes

# LLVM's names of what converts a vector of float16: x86's F16C, ARMv7's half-precision extension. AArch64 always does.
_FEATURES = ("f16c", "fp16")


def converts_float16(target: Mapping[str, object]) -> bool:
    """Whether processors of a TVM target convert between float16 and float32 by themselves."""
    described = tvm.target.Target(dict(target))
    return str(target.get("mtriple", "")).startswith("aarch64") or any(
        codegen.target_has_features([feature], described) for feature in _FEATURES
    )


@tirx.transform.prim_func_pass(opt_level=0)
class ConvertByArithmetic:
    """Replaces casts from and to float16 by integer operations on its bits."""

    def transform_function(
        self, func: tirx.PrimFunc, module: tvm.IRModule, context: tvm.transform.PassContext
    ) -> tirx.PrimFunc:
        """The function without such casts."""
        return structural_mutate(func, [(tirx.Cast, _converted)])


def _converted(cast: Expr, mutator: StructuralMutator) -> Expr:
    value = mutator.mutate(cast.value)
    source, wanted = value.ty.dtype, cast.ty.dtype
    if source.with_lanes(1) == "float16" and wanted.with_lanes(1) != "float16":
        return intrinsics.widen_float16(tirx.reinterpret(_typed("uint16", value), value)).astype(wanted)
    if wanted.with_lanes(1) == "float16" and source.with_lanes(1) != "float16":
        return tirx.reinterpret(wanted, intrinsics.narrow_float16(value.astype(_typed("float32", value))))
    return value.astype(wanted)


def _typed(dtype: str, like: Expr) -> str:
    return dtype if lanes(like) == 1 else f"{dtype}x{lanes(like)}"
