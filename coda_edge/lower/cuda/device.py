"""Writing a GPU kernel: threads, shared memory, and the instructions that TIR has no word for.

A kernel's parameters are the call's buffers, then its sizes (int64), in that order. Pointers are 16-byte aligned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.script import tirx as script
from tvm.tirx.buffer import buffer_data_pointer_type, is_buffer_var

from ...symbolic import Dim
from ..body import Body, Buffer, Expr, Index
from ..kernel import KernelSource

_PTX = "__forceinline__ __device__"

MATH: dict[str, str] = {
    "coda_exp": f"{_PTX} float coda_exp(float x) {{ return __expf(x); }}",
    "coda_reciprocal": f"{_PTX} float coda_reciprocal(float x) {{ return __fdividef(1.0f, x); }}",
    "coda_rsqrt": f"{_PTX} float coda_rsqrt(float x) {{ return rsqrtf(x); }}",
    "coda_sigmoid": f"{_PTX} float coda_sigmoid(float x) {{ return __fdividef(1.0f, 1.0f + __expf(-x)); }}",
    "coda_tanh": f"{_PTX} float coda_tanh(float x) {{ return 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * x)); }}",
    "coda_larger": f"{_PTX} float coda_larger(float a, float b) {{ return a > b || a != a ? a : b; }}",
    "coda_smaller": f"{_PTX} float coda_smaller(float a, float b) {{ return a < b || a != a ? a : b; }}",
    "coda_erf": f"""{_PTX} float coda_erf(float x) {{
  float t = __fdividef(1.0f, fmaf(0.3275911f, fabsf(x), 1.0f));
  float p = fmaf(fmaf(fmaf(fmaf(1.061405429f, t, -1.453152027f), t, 1.421413741f), t, -0.284496736f), t, 0.254829592f);
  return copysignf(fmaf(-p * t, __expf(-x * x), 1.0f), x);
}}""",
}
"""Elementary functions of floats without branches (the larger and the smaller one of two are NaN if either is), on the special function unit (CUDA C Programming Guide, intrinsic functions).

Absolute error of ``erf`` (Abramowitz & Stegun 7.1.26), ``tanh`` and ``sigmoid``: 5e-7; relative error of ``exp``: 2e-7·(1 + |x|).
"""

NATIVE = {name.removeprefix("coda_"): name for name in MATH}
"""The function for each epilogue operator that has one."""

MAX_STAGES = 16
"""Tiles of a pipeline, at most."""

INSTRUCTIONS: dict[str, str] = {
    # D = A·B + D for one 16×8×16 product of halves, float accumulators.
    "coda_mma": f"""{_PTX} void coda_mma(float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2,
    unsigned a3, unsigned b0, unsigned b1) {{
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%0,%1,%2,%3}}, {{%4,%5,%6,%7}}, {{%8,%9}}, {{%0,%1,%2,%3}};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}}""",
    # Four 8×8 matrices of halves from shared memory; each lane gives the address of one row.
    "coda_ldmatrix": f"""{_PTX} void coda_ldmatrix(unsigned& d0, unsigned& d1, unsigned& d2, unsigned& d3, const void* row) {{
  unsigned at = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%0,%1,%2,%3}}, [%4];"
      : "=r"(d0), "=r"(d1), "=r"(d2), "=r"(d3) : "r"(at) : "memory");
}}""",
    # The same, each matrix turned.
    "coda_ldmatrix_turned": f"""{_PTX} void coda_ldmatrix_turned(unsigned& d0, unsigned& d1, unsigned& d2, unsigned& d3,
    const void* row) {{
  unsigned at = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{%0,%1,%2,%3}}, [%4];"
      : "=r"(d0), "=r"(d1), "=r"(d2), "=r"(d3) : "r"(at) : "memory");
}}""",
    # Two floats rounded to halves, the first one in the low bits.
    "coda_halves": f"""{_PTX} unsigned coda_halves(float low, float high) {{
  half2 both = __floats2half2_rn(low, high);
  return *(unsigned*)&both;
}}""",
    # 16 bytes to shared memory, asynchronously; the bytes from `count` on become zero.
    "coda_copy": f"""{_PTX} void coda_copy(void* to, const void* from, int count) {{
  unsigned at = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(count) : "memory");
}}""",
    # Eight halves to shared memory from an address that is aligned to one; those from `count` on become zero.
    "coda_gather": f"""{_PTX} void coda_gather(void* to, const half* from, int count) {{
  const unsigned short* halves = (const unsigned short*)from;
  unsigned words[4];
  #pragma unroll
  for (int i = 0; i < 4; ++i) {{
    unsigned low = 2 * i < count ? halves[2 * i] : 0, high = 2 * i + 1 < count ? halves[2 * i + 1] : 0;
    words[i] = low | high << 16;
  }}
  *(uint4*)to = make_uint4(words[0], words[1], words[2], words[3]);
}}""",
    "coda_commit": f"""{_PTX} void coda_commit() {{ asm volatile("cp.async.commit_group;" ::: "memory"); }}""",
    # Waits until at most `pending`, a constant, groups of copies are under way.
    "coda_wait": f"{_PTX} void coda_wait(int pending) {{\n  switch (pending) {{\n"
    + "".join(
        f'    case {n}: asm volatile("cp.async.wait_group {n};" ::: "memory"); break;\n' for n in range(MAX_STAGES)
    )
    + "  }\n}",
    "coda_barrier": f"""{_PTX} void coda_barrier() {{ __syncthreads(); }}""",
    "coda_put": f"""{_PTX} void coda_put(void* to, float a, float b, float c, float d) {{
  *(float4*)to = make_float4(a, b, c, d);
}}""",
    "coda_take": f"""{_PTX} void coda_take(const void* from, float& a, float& b, float& c, float& d) {{
  float4 v = *(const float4*)from;
  a += v.x; b += v.y; c += v.z; d += v.w;
}}""",
    # 16 bytes from memory to memory.
    "coda_move": f"""{_PTX} void coda_move(void* to, const void* from) {{ *(uint4*)to = *(const uint4*)from; }}""",
    # Whether any thread of the block says so; a barrier.
    "coda_any": f"""{_PTX} int coda_any(int mine) {{ return __syncthreads_or(mine); }}""",
    # The sum of what all threads of the block give; barriers.
    "coda_block_sum": f"""{_PTX} float coda_block_sum(float x) {{
  __shared__ float parts[32];
  for (int mask = 16; mask; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0.0f;
  for (unsigned i = 0; i < blockDim.x / 32; ++i) total += parts[i];
  __syncthreads();
  return total;
}}""",
    # From here on the next kernel may start: what it reads of this one, it reads behind its own `coda_follow`.
    "coda_precede": f"""{_PTX} void coda_precede() {{
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}}""",
    # Waits until all that the kernels before this one wrote is there.
    "coda_follow": f"""{_PTX} void coda_follow() {{
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}}""",
    # The end of the thread.
    "coda_leave": f"""{_PTX} void coda_leave() {{ asm volatile("exit;"); }}""",
    # The value of the lane whose number differs in the bits of `mask`.
    "coda_exchange": f"""{_PTX} float coda_exchange(float x, int mask) {{
  return __shfl_xor_sync(0xffffffffu, x, mask);
}}""",
}
"""Device functions by name (PTX ISA 8.0, sections on ``mma``, ``ldmatrix`` and ``cp.async``; sm_80 on)."""


@dataclass(frozen=True)
class Launch:
    """How a kernel is started: ``grid`` in blocks (sizes of the run), ``block`` threads, ``shared`` bytes of dynamic shared memory.

    ``shared`` above 48 KiB must be allowed by ``CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`` first.
    """

    grid: tuple[Dim, Dim, Dim]
    block: int
    shared: int = 0


@dataclass(frozen=True)
class CudaKernel(KernelSource):
    """A kernel for a GPU, and its launch."""

    launch: Launch = Launch((1, 1, 1), 1)

    @property
    def sizes(self) -> tuple[Dim, ...]:
        """The grid, the threads of a block, the bytes of shared memory."""
        return (*self.launch.grid, self.launch.block, self.launch.shared)


class DeviceBody(Body):
    """``Body`` as one thread of a GPU runs it."""

    def __init__(self) -> None:
        super().__init__()
        self._threads: list[tuple[Expr, Expr]] = []

    def thread(self, tag: str, extent: Index) -> Expr:
        """The int32 index ``tag`` (``threadIdx.x``, ``blockIdx.y``, …) of a launch with ``extent`` of them."""
        variable = tirx.Var(tag.replace(".", "_"), "int32")
        extent = int32(extent)
        self._threads.append((tirx.IterVar(tvm.ir.Range(int32(0), extent), variable, 1, tag), extent))
        return variable

    def let(self, value: Index, name: str = "x") -> Expr:
        """A variable bound to ``value``; literals and variables stay as they are."""
        value = int32(value)
        if isinstance(value, (tirx.Var, tirx.IntImm, tirx.FloatImm)):
            return value
        variable = tirx.Var(name, value.ty)
        self.emit(tirx.stmt.Bind(variable, value))
        return variable

    def alloc(self, count: int, dtype: str = "float32", name: str = "local") -> Buffer:
        """A thread's own flat buffer: registers, if every index to it is constant once loops are unrolled."""
        buffer = tirx.decl_buffer((count,), dtype, name=name, scope="local")
        self.emit(tirx.AllocBuffer(buffer))
        return buffer

    def shared(self, size: int) -> Buffer:
        """The block's dynamic shared memory, as bytes."""
        buffer = tirx.decl_buffer((size,), "uint8", name="shared", scope="shared.dyn", data_alignment=128)
        self.emit(tirx.AllocBuffer(buffer))
        return buffer

    def do(self, instruction: str, *args: Expr) -> None:
        """One of ``INSTRUCTIONS``, for its effect; an argument it writes to is an element of a buffer."""
        self.emit(tirx.Evaluate(self.call(instruction, "void", *args)))

    def call(self, instruction: str, dtype: str, *args: Expr) -> Expr:
        """The value of one of ``INSTRUCTIONS`` or ``MATH``."""
        given = (int32(a) if isinstance(a, int) else a for a in args)
        source = MATH.get(instruction) or INSTRUCTIONS[instruction]
        return script.cuda.func_call(instruction, *given, source_code=source, return_type=dtype)

    @contextmanager
    def repeat(self, count: int, unroll: bool, name: str = "i") -> Iterator[Expr]:
        """A loop over ``0 ≤ i < count``, an int32; the compiler leaves none of it if it is to ``unroll``."""
        variable = tirx.Var(name, "int32")
        self._blocks.append([])
        yield variable
        block = self._close()
        if block is not None and count:
            kind = tirx.ForKind.UNROLLED if unroll else tirx.ForKind.SERIAL
            self.emit(tirx.For(variable, int32(0), int32(count), kind, block))

    def device_function(self, symbol: str, params: Sequence[Expr], follows: bool = False) -> tirx.PrimFunc:
        """The kernel of all that was written.

        ``follows``: it has ``coda_follow`` where it first needs what other kernels wrote; otherwise that is its first instruction.
        """
        body = self._close()
        for iterator, extent in reversed(self._threads):
            body = tirx.AttrStmt(iterator, "thread_extent", extent, body)
        tags = [str(iterator.thread_tag) for iterator, _ in self._threads]
        return _entry(symbol, params, body, [*tags, "tirx.use_dyn_shared_memory"], follows)


def device_kernel(
    symbol: str, params: Sequence[Expr], body: Expr, threads: Mapping[str, Expr], block: int
) -> tirx.PrimFunc:
    """The kernel that does ``body``, in which ``threads`` stand for the indices of those names; ``block`` threads make a block."""
    for tag, variable in threads.items():
        extent = int32(block if tag.startswith("thread") else _MOST_BLOCKS)
        iterator = tirx.IterVar(tvm.ir.Range(int32(0), extent), variable, 1, tag)
        body = tirx.AttrStmt(iterator, "thread_extent", extent, body)
    return _entry(symbol, params, body, list(threads))


_MOST_BLOCKS = 2**31 - 1


def _entry(symbol: str, params: Sequence[Expr], body: Expr, launch: list[str], follows: bool = False) -> tirx.PrimFunc:
    pointers: list[Expr] = []
    declared: list[tirx.Stmt] = []
    for param in params:
        if is_buffer_var(param):
            pointer = tirx.Var(f"{param.name}_data", buffer_data_pointer_type(param))
            declared.append(tirx.DeclBuffer(param, data=pointer))
            pointers.append(pointer)
        else:
            pointers.append(param)
    start = [] if follows else [_instruction("coda_follow"), _instruction("coda_precede")]
    func = tirx.PrimFunc(pointers, tirx.SeqStmt([*declared, *start, body]), None).with_attr("global_symbol", symbol)
    func = func.with_attr("calling_conv", 2).with_attr("tirx.is_global_func", True).with_attr("tirx.noalias", True)
    return func.with_attr("tirx.kernel_launch_params", launch)


def _instruction(name: str) -> tirx.Stmt:
    return tirx.Evaluate(script.cuda.func_call(name, source_code=INSTRUCTIONS[name], return_type="void"))


def int32(value: Index) -> Expr:
    """An int32 index."""
    return tirx.const(value, "int32") if isinstance(value, int) else value


def int64(value: Index) -> Expr:
    """An int64 index."""
    return tirx.const(value, "int64") if isinstance(value, int) else value.astype("int64")


def quotient(a: Expr, b: int) -> Expr:
    """a / b of a non-negative ``a``."""
    return tirx.truncdiv(a, tirx.const(b, a.ty.dtype)) if b != 1 else a


def remainder(a: Expr, b: int) -> Expr:
    """a mod b of a non-negative ``a``."""
    return tirx.truncmod(a, tirx.const(b, a.ty.dtype))


def address(buffer: Buffer, at: Index) -> Expr:
    """The address of element ``at``."""
    return tirx.address_of(tirx.BufferLoad(buffer, [int32(at)]))


def element(buffer: Buffer, at: int) -> Expr:
    """Element ``at`` of a thread's buffer, as an instruction reads or writes it."""
    return tirx.BufferLoad(buffer, [int32(at)])
