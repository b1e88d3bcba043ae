"""The kernel ABI: from TIR functions to objects whose symbols are ``int32_t k(const uint64_t *buffers, const int64_t *ints)``.

A kernel is written as an ordinary PrimFunc: buffer parameters, in order, are the entries of ``buffers``; scalar parameters are
those of ``ints``. A parameter buffer named ``status`` (int32, one element) is neither: it is the kernel's result, zero unless
the kernel stores an error code in it. Buffers are aligned to their element only.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import tvm
from tvm import tirx
from tvm.tirx.buffer import buffer_data_pointer_type, is_buffer_var

from .. import _runtime
from .half import ConvertByArithmetic, converts_float16
from .kernel import KernelSource
from .whole import rounding

STATUS = "status"
_BODY = "_body"
_PIPELINES = {True: "coda_kernel", False: "coda_kernel_without_float16"}
"""By whether the processor converts float16."""


_DEBUG = re.compile(r",? !dbg !\d+|^ +#dbg_.*\n|^!llvm\.dbg\.cu = .*\n", re.MULTILINE)
"""What LLVM's text says for debuggers. Libraries are stripped of it, and it takes a fifth of the time of making machine code."""


def compile_each(
    kernels: Sequence[KernelSource], target: Mapping[str, object], progress: Callable[[float], None] | None = None
) -> list[bytes]:
    """A relocatable object for each kernel, as many at a time as there are cores; ``progress`` hears which share is done."""

    def compiled(func: tirx.PrimFunc) -> bytes:
        return compile_kernels([func], target)

    objects: list[bytes] = []
    pool = ThreadPoolExecutor(_runtime.cpu_cores())
    try:
        # Kernels are written by Python, one at a time; TVM and LLVM, which take most of the time, let other threads run.
        futures: list[Future[bytes]] = [pool.submit(compiled, kernel.func) for kernel in kernels]
        for future in futures:
            objects.append(future.result())
            if progress is not None:
                progress(len(objects) / len(futures))
    finally:
        pool.shutdown(cancel_futures=True)
    return objects


def compile_kernels(
    funcs: Sequence[tirx.PrimFunc], target: Mapping[str, object], callers: str = "", hosted: bool = False
) -> bytes:
    """One relocatable object with a symbol for each function's ``global_symbol``, for the TVM target ``target``.

    ``callers``: functions in LLVM's assembly language that go into the same object, to call the kernels. ``hosted``: memcpy and
    memset are left to the program that the object is linked into, which would otherwise use the kernels' own everywhere.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernels.o")
        _generate(funcs, target, callers, hosted).write_to_file(str(path), "o")
        return path.read_bytes()


def assembly(funcs: Sequence[tirx.PrimFunc], target: Mapping[str, object]) -> str:
    """The assembly of what ``compile_kernels`` makes, for a look at its loops."""
    return str(_generate(funcs, target).inspect_source("s"))


def _generate(
    funcs: Sequence[tirx.PrimFunc], target: Mapping[str, object], callers: str = "", hosted: bool = False
) -> tvm.runtime.Module:
    """The kernels as a module of LLVM code."""
    module = tvm.IRModule({str(f.attrs["global_symbol"]): f for f in funcs})
    with_status = [str(f.attrs["global_symbol"]) for f in funcs if _reports_status(f)]
    library = tvm.tirx.build(module, target=dict(target), pipeline=_PIPELINES[converts_float16(target)])
    text = _DEBUG.sub("", library.inspect_source("ll"))
    for name in with_status:
        # TVM's code generator can only return zero: the wrapper gives the body a status word and returns it.
        text = text.replace(
            f"define dllexport noundef i32 @{name}{_BODY}(", f"define internal noundef i32 @{name}{_BODY}("
        )
        text += _WRAPPER.format(name=name, body=name + _BODY)
    # LLVM makes calls of the C library of loops that fill or copy; kernels bring their own.
    memory = "".join(code for name, code in _MEMORY.items() if f"@llvm.{name}." in text)
    if hosted:
        memory, text = "", _without_moves(text)
    text += (memory.replace("i64", "i32") if _NARROW in text else memory) + callers
    text += rounding(text, str(target.get("mtriple", "")))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernels.ll")
        source.write_text(text, encoding="utf-8")
        return tvm.runtime.load_module(str(source))


def _without_moves(text: str) -> str:
    """``text`` with copies where it has moves, as buffers of a kernel do not overlap."""
    declared = set(re.findall(r"^declare void @(llvm\.memcpy\S*)\(", text, re.MULTILINE))
    lines = []
    for line in text.splitlines(keepends=True):
        move = re.match(r"declare void @(llvm\.memmove\S*)\(", line)
        if not (move and move[1].replace("memmove", "memcpy") in declared):
            lines.append(line.replace("@llvm.memmove.", "@llvm.memcpy."))
    return "".join(lines)


_WRAPPER = """
define dllexport i32 @{name}(ptr %buffers, ptr %ints) {{
  %word = alloca i32
  store i32 0, ptr %word
  %ignored = call i32 @{body}(ptr %buffers, ptr %ints, ptr %word)
  %status = load i32, ptr %word
  ret i32 %status
}}
"""


_FILL = """
define weak hidden ptr @memset(ptr %to, i32 %value, i64 %count) {
entry:
  %byte = trunc i32 %value to i8
  %one = insertelement <16 x i8> poison, i8 %byte, i64 0
  %all = shufflevector <16 x i8> %one, <16 x i8> poison, <16 x i32> zeroinitializer
  %wide = and i64 %count, -16
  br label %vectors
vectors:
  %i = phi i64 [ 0, %entry ], [ %i.next, %vector ]
  %more = icmp ult i64 %i, %wide
  br i1 %more, label %vector, label %bytes
vector:
  %at = getelementptr i8, ptr %to, i64 %i
  store <16 x i8> %all, ptr %at, align 1
  %i.next = add i64 %i, 16
  br label %vectors
bytes:
  %j = phi i64 [ %wide, %vectors ], [ %j.next, %one.byte ]
  %left = icmp ult i64 %j, %count
  br i1 %left, label %one.byte, label %done
one.byte:
  %at.byte = getelementptr i8, ptr %to, i64 %j
  store i8 %byte, ptr %at.byte, align 1
  %j.next = add i64 %j, 1
  br label %bytes
done:
  ret ptr %to
}
"""
_COPY = """
define weak hidden ptr @NAME(ptr %to, ptr %from, i64 %count) {
entry:
  %wide = and i64 %count, -16
  br label %vectors
vectors:
  %i = phi i64 [ 0, %entry ], [ %i.next, %vector ]
  %more = icmp ult i64 %i, %wide
  br i1 %more, label %vector, label %bytes
vector:
  %source = getelementptr i8, ptr %from, i64 %i
  %target = getelementptr i8, ptr %to, i64 %i
  %data = load <16 x i8>, ptr %source, align 1
  store <16 x i8> %data, ptr %target, align 1
  %i.next = add i64 %i, 16
  br label %vectors
bytes:
  %j = phi i64 [ %wide, %vectors ], [ %j.next, %one.byte ]
  %left = icmp ult i64 %j, %count
  br i1 %left, label %one.byte, label %done
one.byte:
  %source.byte = getelementptr i8, ptr %from, i64 %j
  %target.byte = getelementptr i8, ptr %to, i64 %j
  %byte = load i8, ptr %source.byte, align 1
  store i8 %byte, ptr %target.byte, align 1
  %j.next = add i64 %j, 1
  br label %bytes
done:
  ret ptr %to
}
"""
_NARROW = "-p:32:32"
"""In LLVM's data layout of machines whose sizes have 32 bits."""
# Buffers of a kernel do not overlap, so that a loop never becomes a memmove of overlapping ranges.
_MEMORY = {"memset": _FILL, "memcpy": _COPY.replace("NAME", "memcpy"), "memmove": _COPY.replace("NAME", "memmove")}


def _reports_status(func: tirx.PrimFunc) -> bool:
    return any(is_buffer_var(p) and p.name == STATUS for p in func.params)


@tirx.transform.prim_func_pass(opt_level=0)
class PointerArrays:
    """Replaces a kernel's parameters by the two arrays of the ABI (and the status word, if it has one)."""

    def transform_function(
        self, func: tirx.PrimFunc, module: tvm.IRModule, context: tvm.transform.PassContext
    ) -> tirx.PrimFunc:
        """The function with parameters ``buffers``, ``ints`` and, for a kernel that reports errors, ``status``."""
        int64 = tvm.ir.PointerType(tvm.ir.PrimType("int64"))
        params = [tirx.Var("buffers", int64), tirx.Var("ints", int64)]
        addresses, sizes = (
            tirx.decl_buffer((len(func.params) + 1,), "int64", data=p, name=f"{p.name}_array") for p in params
        )
        prologue: list[tirx.Stmt] = [
            tirx.DeclBuffer(b, data=p) for b, p in zip((addresses, sizes), params, strict=True)
        ]
        buffer_count = int_count = 0
        symbol = str(func.attrs["global_symbol"])
        for param in func.params:
            if not is_buffer_var(param):
                value = tirx.BufferLoad(sizes, [tirx.const(int_count, "int32")])
                prologue.append(tirx.stmt.Bind(param, value.astype(param.ty.dtype)))
                int_count += 1
                continue
            pointer = buffer_data_pointer_type(param)
            data = tirx.Var(f"{param.name}_data", pointer)
            if param.name == STATUS:
                params.append(data)
                symbol += _BODY
            else:
                address = tirx.BufferLoad(addresses, [tirx.const(buffer_count, "int32")])
                prologue.append(tirx.stmt.Bind(data, tirx.call_intrin(pointer, "tirx.reinterpret", address)))
                buffer_count += 1
            prologue.append(tirx.DeclBuffer(param, data=data))
        zero = tirx.const(0, "int32")
        body = tirx.stmt.AttrStmt("default", "device_type", tirx.const(1, "int32"), func.body)
        body = tirx.stmt.AttrStmt("default", "device_id", zero, body)
        kernel = tirx.PrimFunc(
            params, tirx.SeqStmt([*prologue, body, tirx.Return(zero)]), tvm.ir.PrimType("int32"), func.attrs
        )
        kernel = kernel.with_attr("global_symbol", symbol)
        return kernel.with_attr("tirx.is_entry_func", False).with_attr("calling_conv", 0)


def pipeline(
    float16: bool, *last: tvm.transform.Pass
) -> tuple[tvm.transform.Pass, Callable[[], tvm.transform.Pass], Callable[[], tvm.transform.Pass]]:
    """TVM's default CPU lowering, with the steps that only other devices need left out and our ABI in place of its own.

    Its analysis writes every bound value out at each use, which can grow without limit, and folds ``(x + c) - c`` of floats to
    ``x``: kernels keep such values in stack buffers, which it leaves alone. Buffers have one axis, so that none has to be flattened,
    which for a large kernel would take a third of the time. ``float16``: whether the processor converts it.
    """
    passes = [
        tirx.transform.VectorizeLoop(True),
        tirx.transform.UnrollLoop(),
        tirx.transform.StmtSimplify(),
        *(() if float16 else (ConvertByArithmetic(),)),
        PointerArrays(),
        *last,
    ]
    stages = tirx.compilation_pipeline
    return tvm.ir.transform.Sequential(passes), stages.finalize_host_passes, stages.finalize_device_passes


for _float16, _name in _PIPELINES.items():
    tirx.compilation_pipeline.register_tir_pipeline(_name, partial(pipeline, _float16))
