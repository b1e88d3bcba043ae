"""Kernels as C sources that any C11 compiler takes, by TVM's C code generator.

It writes literals with seven digits, which is not enough for a float32, converts bits by casts of pointers, which C forbids, and calls the
mathematics library. So these are replaced by calls of functions of a prelude before it sees them, and the literals among them written
in full afterwards.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from dataclasses import dataclass
from functools import partial

import tvm
from tvm import tirx
from tvm_ffi import StructuralMutator, structural_mutate

from ..lower.abi import STATUS, pipeline
from ..lower.body import Expr
from ..targets import Target
from .compiled import Compiled
from .sources import kernel_name

_PIPELINE = "coda_kernel_for_c"


@dataclass(frozen=True)
class CTarget(Target):
    """C: every vector has one lane, whatever its elements; compilers make vectors of loops themselves."""

    def lanes(self, itemsize: int) -> int:
        """One."""
        return 1


C11 = CTarget(
    name="c11",
    description="C sources for any compiler",
    tvm={"kind": "c"},
    triple="any",
    features=(),
    vector=4,
    registers=16,
    tiles=((4, 4),),
    system="c",
)

_PRELUDE = """\
/* Kernels, made by coda-edge. */
#include <stdbool.h>
#include <stdint.h>

#if defined(__GNUC__)
#define UNUSED __attribute__((unused))
#else
#define UNUSED
#endif

/* Conversions of bits. */
typedef uint16_t half;
typedef union {
  float float32;
  int32_t int32;
  uint32_t uint32;
} word;
static inline UNUSED float coda_float32_of_int32(int32_t x) { return (word){.int32 = x}.float32; }
static inline UNUSED float coda_float32_of_uint32(uint32_t x) { return (word){.uint32 = x}.float32; }
static inline UNUSED int32_t coda_int32_of_float32(float x) { return (word){.float32 = x}.int32; }
static inline UNUSED uint32_t coda_uint32_of_float32(float x) { return (word){.float32 = x}.uint32; }
static inline UNUSED int32_t coda_int32_of_uint32(uint32_t x) { return (word){.uint32 = x}.int32; }
static inline UNUSED uint32_t coda_uint32_of_int32(int32_t x) { return (uint32_t)x; }
static inline UNUSED half coda_float16_of_uint16(uint16_t x) { return x; }
static inline UNUSED uint16_t coda_uint16_of_float16(half x) { return x; }

/* The largest whole number that is not above x; from 2^23 on every float is one. */
static inline UNUSED float coda_floor(float x) {
  if (!(x > -8388608.0f && x < 8388608.0f))
    return x;
  const float whole = (float)(int32_t)x;
  const float result = whole > x ? whole - 1.0f : whole;
  return result == 0.0f ? coda_float32_of_uint32(coda_uint32_of_float32(x) & 0x80000000u) : result;
}

static inline UNUSED float coda_ceil(float x) { return -coda_floor(-x); }

static inline UNUSED float coda_trunc(float x) { return x < 0.0f ? coda_ceil(x) : coda_floor(x); }

/* To the nearest whole number, of two the even one. */
static inline UNUSED float coda_nearbyint(float x) {
  const float low = coda_floor(x), over = x - low;
  if (!(x > -8388608.0f && x < 8388608.0f))
    return x;
  const float result = over < 0.5f || (over == 0.5f && (int32_t)low % 2 == 0) ? low : low + 1.0f;
  return result == 0.0f ? coda_float32_of_uint32(coda_uint32_of_float32(x) & 0x80000000u) : result;
}

/* Newton's method in double precision, whose result rounds to the right float. */
static inline UNUSED float coda_sqrt(float x) {
  if (!(x > 0.0f) || x > 3.4028234663852886e38f)
    return x < 0.0f ? coda_float32_of_uint32(0x7fc00000u) : x;
  const bool small = x < 1.1754943508222875e-38f;
  const float y = small ? x * 16777216.0f : x;
  double r = coda_float32_of_uint32((coda_uint32_of_float32(y) >> 1) + 0x1fbc0000u);
  for (int i = 0; i < 5; i++)
    r = 0.5 * (r + (double)y / r);
  return (float)(small ? r / 4096.0 : r);
}
"""

_CALLS = {
    "tirx.sqrt": "coda_sqrt",
    "tirx.floor": "coda_floor",
    "prim.ceil": "coda_ceil",
    "tirx.trunc": "coda_trunc",
    "tirx.nearbyint": "coda_nearbyint",
}
"""Functions of the mathematics library, and those of the prelude in their place."""


@tirx.transform.prim_func_pass(opt_level=0)
class _ForC:
    """Replaces what the C code generator writes wrongly by calls of the prelude, and leaves prefetches out."""

    def transform_function(
        self, func: tirx.PrimFunc, module: tvm.IRModule, context: tvm.transform.PassContext
    ) -> tirx.PrimFunc:
        """The function for the C code generator."""
        return structural_mutate(func, [(tirx.FloatImm, _literal), (tvm.ir.Call, _call), (tirx.Evaluate, _evaluate)])


def _literal(value: Expr, mutator: StructuralMutator) -> Expr:
    if value.ty.dtype != "float32":
        return value
    (bits,) = struct.unpack("<i", struct.pack("<f", float(value.value)))
    return tirx.call_pure_extern("float32", "coda_literal", tirx.const(bits, "int32"))


def _call(call: Expr, mutator: StructuralMutator) -> Expr:
    name = getattr(call.op, "name", "")
    arguments = [mutator.mutate(argument) for argument in call.args]
    if name in _CALLS:
        return tirx.call_pure_extern("float32", _CALLS[name], *arguments)
    if name == "tirx.reinterpret" and {_dtype(call), _dtype(arguments[0])} <= _SCALARS:
        return tirx.call_pure_extern(_dtype(call), f"coda_{_dtype(call)}_of_{_dtype(arguments[0])}", *arguments)
    return tvm.ir.Call(call.op, arguments, call.attrs, ret_ty=call.ty)


def _dtype(value: Expr) -> str:
    """The type of a number; "" for that of an address."""
    return str(getattr(value.ty, "dtype", ""))


_SCALARS = frozenset({"float32", "int32", "uint32", "float16", "uint16"})


def _evaluate(node: tirx.Stmt, mutator: StructuralMutator) -> tirx.Stmt:
    if getattr(getattr(node.value, "op", None), "name", "") == "tirx.call_llvm_intrin":
        return tirx.Evaluate(tirx.const(0, "int32"))
    return tirx.Evaluate(mutator.mutate(node.value))


tirx.compilation_pipeline.register_tir_pipeline(_PIPELINE, partial(pipeline, False, _ForC()))


def c_source(compiled: Compiled) -> str:
    """All kernels of a model that was compiled for ``C11``, with the names that they have in a program."""
    parts = [_PRELUDE]
    for symbol, kernel in compiled.kernels.items():
        parts.append(_kernel(kernel.func, symbol, kernel_name(compiled, symbol)))
    return "\n".join(parts)


def _kernel(func: tirx.PrimFunc, symbol: str, name: str) -> str:
    """One kernel: what TVM writes, without its headers and variables that nothing reads, in the ABI's types."""
    text = tvm.tirx.build(tvm.IRModule({symbol: func}), target={"kind": "c"}, pipeline=_PIPELINE).inspect_source("c")
    body = text[text.rindex("TVM_DLL int32_t") :].removeprefix("TVM_DLL ")
    body = re.sub(r"coda_literal\((-?\d+)\)", lambda match: _float_text(int(match[1])), body)
    body = re.sub(
        r"= \(\(?([\w ]+)\*\)\(?\(?\1\*\)?\)?\(?buffers\[(\d+|\(int64_t\)\d+)\]\)*;",
        r"= (\1*)(uintptr_t)buffers[\2];",
        body,
    )
    body = re.sub(r"\bint64_t\* (buffers|ints)\b", r"const \1_t *\1", body, count=2)
    body = body.replace("const buffers_t *", "const uint64_t *").replace("const ints_t *", "const int64_t *")
    body = _without_unused(body)
    reports = any(getattr(p, "name", "") == STATUS for p in func.params)
    if not reports:
        return body.replace(f"int32_t {symbol}(", f"int32_t {name}(", 1)
    return f"static {body.replace(symbol + _BODY, name + _BODY, 1)}\n{_WRAPPER.format(name=name, body=name + _BODY)}"


_BODY = "_body"
_WRAPPER = """\
int32_t {name}(const uint64_t *buffers, const int64_t *ints) {{
  int32_t status = 0;
  (void){body}(buffers, ints, &status);
  return status;
}}
"""


def _float_text(bits: int) -> str:
    (value,) = struct.unpack("<f", struct.pack("<i", bits))
    if not math.isfinite(value):
        return f"coda_float32_of_uint32(0x{bits & 0xFFFFFFFF:x}u)"
    return f"({value.hex()}f)" if value < 0 or bits < 0 else f"{value.hex()}f"


def _without_unused(body: str) -> str:
    """``body`` without variables that nothing reads; what they are set to has no effect."""
    while True:
        names = Counter(re.findall(r"[A-Za-z_]\w*", body))
        stores = Counter(match[1] for match in _STORED.finditer(body))
        unread = {name for name in _LOCAL.findall(body) if names[name] == stores[name]}
        kept = _dropped(_VALUE, _dropped(_STORED, body, unread), {name for name, count in names.items() if count == 1})
        if kept == body:
            return body
        body = kept


def _dropped(line: re.Pattern[str], body: str, names: set[str]) -> str:
    return line.sub(lambda match: "" if match[1] in names else match[0], body)


_VALUE = re.compile(r"^ +(?:const )?[\w ]+?\*? ?\b(\w+) = [^;{}]*;\n", re.MULTILINE)
_STORED = re.compile(r"^ +(?:[\w ]+ )?(\w+)\[[^;={}]*\](?: = [^;{}]*)?;\n", re.MULTILINE)
_LOCAL = re.compile(r"^ +[\w ]+ (\w+)\[\d+\];$", re.MULTILINE)
