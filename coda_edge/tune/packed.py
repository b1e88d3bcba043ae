"""Functions that TVM's runtime can call, for kernels of our own ABI, in LLVM's assembly language.

TVM calls ``int (void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result)`` (tvm-ffi's C ABI, ``tvm/ffi/c_api.h``). An argument
has 16 bytes: a type index, and at byte 8 a pointer, either to a DLTensor or, for an index of 64 and above, to an object that is a
header of 24 bytes and a DLTensor. So the library that is measured holds the kernels as they ship, and depends on nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

REPEAT = "repeat"
PEAK = "peak"
CHAINS = 12
"""Vectors that ``peak`` multiplies and adds to independently, which 16 registers hold besides two operands."""
_PREFIX = "__tvm_ffi_"
"""Of a function that TVM's runtime finds in a library."""


def caller_name(position: int) -> str:
    """What the caller of the ``position``-th kernel call is called."""
    return f"call{position}"


def exported(calls: Sequence[Sequence[str]]) -> list[str]:
    """The symbols of ``callers``."""
    return [_PREFIX + REPEAT, _PREFIX + PEAK, *(_PREFIX + caller_name(i) for i in range(len(calls)))]


def callers(calls: Sequence[Sequence[str]], lanes: int) -> str:
    """A function for each of ``calls``, which are the symbols of a kernel and of its ``finish``: ``(ints, strides, buffers…)``, all of them tensors.

    ``ints`` (int64): what the kernel takes, ``begin`` and ``end`` included. ``strides`` (int64): of each buffer how many bytes it goes on from one
    run to the next, and last the number of runs: with a stride for its weights a kernel reads others each time, as a model's layers
    do. ``repeat (source, target, sizes)`` fills ``target`` with ``sizes[1]`` copies of the first ``sizes[0]`` bytes, a multiple of 8, of ``source``.
    ``peak (sizes, sink)`` does ``sizes[0]`` times ``CHAINS`` multiply-adds of ``lanes`` float32.
    """
    made = [_DATA, _REPEAT.format(name=_PREFIX + REPEAT), _peak(lanes)]
    for position, symbols in enumerate(calls):
        text = "\n".join(
            f"  %status{i} = call i32 @{symbol}(ptr %addresses, ptr %ints)" for i, symbol in enumerate(symbols)
        )
        made.append(_CALLER.format(name=_PREFIX + caller_name(position), kernels=text))
    return "".join(made)


def _peak(lanes: int) -> str:
    vector = f"<{lanes} x float>"
    acc = [f"%acc{i}" for i in range(CHAINS)]
    lines = [f"declare {vector} @llvm.fma.v{lanes}f32({vector}, {vector}, {vector})"]
    lines += [f"define dllexport i32 @{_PREFIX}{PEAK}(ptr %self, ptr %args, i32 %count, ptr %result) {{", "entry:"]
    lines += ["  %sizes = call ptr @coda_tensor_data(ptr %args, i32 0)", "  %steps = load i64, ptr %sizes"]
    lines += ["  %sink = call ptr @coda_tensor_data(ptr %args, i32 1)"]
    lines += [f"  %factor = load volatile {vector}, ptr %sink, align 4", "  br label %step", "step:"]
    lines += ["  %i = phi i64 [ 0, %entry ], [ %i.next, %step ]"]
    lines += [f"  {a} = phi {vector} [ %factor, %entry ], [ {a}.next, %step ]" for a in acc]
    lines += [
        f"  {a}.next = call {vector} @llvm.fma.v{lanes}f32({vector} {a}, {vector} %factor, {vector} %factor)"
        for a in acc
    ]
    lines += ["  %i.next = add i64 %i, 1", "  %more = icmp slt i64 %i.next, %steps"]
    lines += ["  br i1 %more, label %step, label %done", "done:"]
    lines += [f"  store volatile {vector} {a}.next, ptr %sink, align 4" for a in acc]
    return "\n".join([*lines, "  ret i32 0", "}", ""])


_DATA = """
define internal ptr @coda_tensor_data(ptr %args, i32 %position) {
  %at = mul i32 %position, 16
  %argument = getelementptr i8, ptr %args, i32 %at
  %type = load i32, ptr %argument
  %place = getelementptr i8, ptr %argument, i32 8
  %value = load ptr, ptr %place
  %object = icmp sge i32 %type, 64
  %header = select i1 %object, i32 24, i32 0
  %tensor = getelementptr i8, ptr %value, i32 %header
  %data = load ptr, ptr %tensor
  ret ptr %data
}
"""
_CALLER = """
define dllexport i32 @{name}(ptr %self, ptr %args, i32 %count, ptr %result) {{
entry:
  %buffers = sub i32 %count, 2
  %addresses = alloca i64, i32 %buffers, align 8
  %ints = call ptr @coda_tensor_data(ptr %args, i32 0)
  %strides = call ptr @coda_tensor_data(ptr %args, i32 1)
  %last = getelementptr i64, ptr %strides, i32 %buffers
  %runs = load i64, ptr %last
  br label %run
run:
  %step = phi i64 [ 0, %entry ], [ %step.next, %called ]
  %more = icmp slt i64 %step, %runs
  br i1 %more, label %buffer, label %done
buffer:
  %i = phi i32 [ 0, %run ], [ %i.next, %address ]
  %left = icmp slt i32 %i, %buffers
  br i1 %left, label %address, label %called
address:
  %argument = add i32 %i, 2
  %data = call ptr @coda_tensor_data(ptr %args, i32 %argument)
  %base = ptrtoint ptr %data to i64
  %stride.at = getelementptr i64, ptr %strides, i32 %i
  %stride = load i64, ptr %stride.at
  %offset = mul i64 %stride, %step
  %moved = add i64 %base, %offset
  %slot = getelementptr i64, ptr %addresses, i32 %i
  store i64 %moved, ptr %slot
  %i.next = add i32 %i, 1
  br label %buffer
called:
{kernels}
  %step.next = add i64 %step, 1
  br label %run
done:
  ret i32 0
}}
"""
_REPEAT = """
define dllexport i32 @{name}(ptr %self, ptr %args, i32 %count, ptr %result) {{
entry:
  %source = call ptr @coda_tensor_data(ptr %args, i32 0)
  %target = call ptr @coda_tensor_data(ptr %args, i32 1)
  %sizes = call ptr @coda_tensor_data(ptr %args, i32 2)
  %bytes = load i64, ptr %sizes
  %copies.at = getelementptr i64, ptr %sizes, i32 1
  %copies = load i64, ptr %copies.at
  %words = lshr i64 %bytes, 3
  br label %copy
copy:
  %c = phi i64 [ 0, %entry ], [ %c.next, %copied ]
  %more = icmp slt i64 %c, %copies
  br i1 %more, label %word, label %done
word:
  %w = phi i64 [ 0, %copy ], [ %w.next, %store ]
  %left = icmp slt i64 %w, %words
  br i1 %left, label %store, label %copied
store:
  %from = getelementptr i64, ptr %source, i64 %w
  %value = load i64, ptr %from
  %start = mul i64 %c, %words
  %at = add i64 %start, %w
  %to = getelementptr i64, ptr %target, i64 %at
  store i64 %value, ptr %to
  %w.next = add i64 %w, 1
  br label %word
copied:
  %c.next = add i64 %c, 1
  br label %copy
done:
  ret i32 0
}}
"""
