"""Bundles made by hand: plans whose kernels are small C functions, for tests of the runtime."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from coda_edge import Session
from coda_edge.bundle import (
    Buffer,
    BufferKind,
    Bundle,
    Constraint,
    ExecutionPlan,
    Level,
    PlanStep,
    Read,
    Relation,
    TensorInfo,
)
from coda_edge.bundle.levels import LevelParts, StoredConstant, combine
from coda_edge.symbolic import Dim, parse_dim

#: Operations that a step claims to do, whatever it does: it is worth sharing out.
FLOPS = 1 << 28

# Each kernel has the signature of docs/architecture.md: sizes are ints[0], ints[1], ..., and last begin and end.
KERNELS = r"""
#include <stdint.h>
#define KERNEL(name) int32_t name(const uint64_t *b, const int64_t *n)
#define AT(type, k) ((type *)(uintptr_t)b[k])

/* y[i] = factor * x[i] + z[i % size]; buffers x, z, y; ints factor, size */
KERNEL(scale_add) {
  for (int64_t i = n[2]; i < n[3]; i++) AT(float, 2)[i] = (float)n[0] * AT(const float, 0)[i] + AT(const float, 1)[i % n[1]];
  return 0;
}

/* y[i] = factor * x[i % nx] + z[i % nz], modulo 2^64; buffers x, z, y; ints factor, nx, nz */
KERNEL(mix) {
  for (int64_t i = n[3]; i < n[4]; i++)
    AT(uint64_t, 2)[i] = (uint64_t)n[0] * AT(const uint64_t, 0)[i % n[1]] + AT(const uint64_t, 1)[i % n[2]];
  return 0;
}

/* rows of a table; buffers table, ids, y; ints rows, width */
KERNEL(gather) {
  for (int64_t i = n[2]; i < n[3]; i++) {
    int64_t id = AT(const int64_t, 1)[i];
    if (id < 0 || id >= n[0]) return 1;
    for (int64_t k = 0; k < n[1]; k++) AT(float, 2)[i * n[1] + k] = AT(const float, 0)[id * n[1] + k];
  }
  return 0;
}

/* the same of a table in panels; buffers table, ids, y; ints rows, width, width of a panel */
KERNEL(gather_panels) {
  for (int64_t i = n[3]; i < n[4]; i++) {
    int64_t id = AT(const int64_t, 1)[i];
    if (id < 0 || id >= n[0]) return 1;
    for (int64_t k = 0; k < n[1]; k++) {
      int64_t first = k / n[2] * n[2], width = n[1] - first < n[2] ? n[1] - first : n[2];
      AT(float, 2)[i * n[1] + k] = AT(const float, 0)[first * n[0] + id * width + k - first];
    }
  }
  return 0;
}

/* sums of panels of 4 columns, merged by row_sum_finish; buffers x, partial, y; ints rows, width */
KERNEL(row_sum) {
  for (int64_t p = n[2]; p < n[3]; p++)
    for (int64_t r = 0; r < n[0]; r++) {
      float sum = 0;
      for (int64_t k = 4 * p; k < 4 * p + 4 && k < n[1]; k++) sum += AT(const float, 0)[r * n[1] + k];
      AT(float, 1)[p * n[0] + r] = sum;
    }
  return 0;
}
KERNEL(row_sum_finish) {
  if (n[2] != 0 || n[3] != (n[1] + 3) / 4) return 3;
  for (int64_t r = 0; r < n[0]; r++) {
    AT(float, 2)[r] = 0;
    for (int64_t p = 0; p < n[3]; p++) AT(float, 2)[r] += AT(const float, 1)[p * n[0] + r];
  }
  return 0;
}

/* fills its scratch and finds it as it left it; buffers y; ints scratch bytes */
KERNEL(use_scratch) {
  volatile uint8_t *scratch = AT(volatile uint8_t, 1);
  if (b[1] % 64) return 4;
  for (int64_t i = n[1]; i < n[2]; i++) {
    for (int64_t k = 0; k < n[0]; k++) scratch[k] = (uint8_t)(i + k);
    for (int64_t k = 0; k < n[0]; k++) if (scratch[k] != (uint8_t)(i + k)) return 2;
    AT(int32_t, 0)[i] = (int32_t)(i * i);
  }
  return 0;
}

/* y[i] = (how often i was done, whether its chunk is no multiple of the grain); buffers x, y; ints grain, items */
KERNEL(count_items) {
  for (int64_t i = n[2]; i < n[3]; i++) {
    AT(int32_t, 1)[2 * i] = AT(const int8_t, 0)[i] + 1;
    AT(int32_t, 1)[2 * i + 1] = n[3] != n[1] && (n[3] - n[2]) % n[0] != 0;
  }
  return 0;
}

/* buffers x, y; items are bytes */
KERNEL(copy_bytes) {
  for (int64_t i = n[0]; i < n[1]; i++) AT(uint8_t, 1)[i] = AT(const uint8_t, 0)[i];
  return 0;
}

/* y[0] = how many of x are not zero; buffers x, y; ints size */
KERNEL(count) {
  AT(int64_t, 1)[0] = 0;
  for (int64_t i = 0; i < n[0]; i++) AT(int64_t, 1)[0] += AT(const int64_t, 0)[i] != 0;
  return 0;
}

/* where x is not zero, and the run's number; buffers x, y, run; ints size, run */
KERNEL(nonzero) {
  int64_t found = 0;
  for (int64_t i = 0; i < n[0]; i++) if (AT(const int64_t, 0)[i]) AT(int64_t, 1)[found++] = i;
  AT(int64_t, 2)[0] = n[1];
  return 0;
}

KERNEL(fail) { (void)b; (void)n; return 42; }
"""


@cache
def compile_library(source: str = KERNELS) -> bytes:
    """A shared object of kernels written in C, without libc."""
    compiler = [shutil.which("cc")] if shutil.which("cc") else [sys.executable, "-m", "ziglang", "cc"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "kernels.c").write_text(source)
        command = [*compiler, "-O2", "-ffreestanding", "-fPIC", "-shared", "-nostdlib", "-o", "kernels.so", "kernels.c"]
        subprocess.run([str(word) for word in command], cwd=path, check=True)
        return (path / "kernels.so").read_bytes()


@dataclass
class HandPlan:
    """Builds a plan step by step. Dimensions and sizes are ints or strings such as ``"batch*4"``."""

    plan: ExecutionPlan = field(default_factory=ExecutionPlan)
    constants: bytes = b""

    def size(self, dim: int | str) -> int:
        """The table entry of ``dim``."""
        return self.plan.exprs.add(parse_dim(dim))

    def input(self, name: str, dtype: str, *dims: int | str) -> int:
        """A new input; returns its buffer."""
        self.plan.inputs.append(TensorInfo(name, dtype, tuple(self.size(d) for d in dims)))
        return self._buffer(BufferKind.INPUT, _bytes(dtype, dims), len(self.plan.inputs) - 1)

    def output(self, name: str, dtype: str, *dims: int | str) -> int:
        """A new output; returns its buffer."""
        self.plan.outputs.append(TensorInfo(name, dtype, tuple(self.size(d) for d in dims)))
        return self._buffer(BufferKind.OUTPUT, _bytes(dtype, dims), len(self.plan.outputs) - 1)

    def constant(self, array: np.ndarray) -> int:
        """A new constant; returns its buffer."""
        self.constants += bytes(-len(self.constants) % 64)
        buffer = self._buffer(BufferKind.CONSTANT, array.nbytes, len(self.constants))
        self.constants += array.tobytes()
        return buffer

    def arena(self, dtype: str, *dims: int | str) -> int:
        """A new arena buffer, alive from the first step that uses it to the last; returns its number."""
        return self._buffer(BufferKind.ARENA, _bytes(dtype, dims), 0)

    def step(
        self,
        kernel: str,
        buffers: list[int],
        ints: list[int | str],
        items: int | str,
        finish: str | None = None,
        grain: int = 1,
        scratch: int | str = 0,
        source: str = "",
        flops: int | str | None = None,
    ) -> None:
        """A new kernel call, named after its number and kernel.

        Its flops are by default so many that all threads share it; its bytes are twice its items.
        """
        number = len(self.plan.steps)
        for b in buffers:
            old = self.plan.buffers[b]
            if old.kind == BufferKind.ARENA:
                used = any(b in s.buffers for s in self.plan.steps)
                first = old.first if used else number
                self.plan.buffers[b] = Buffer(old.kind, old.size, 0, first, number)
        self.plan.steps.append(
            PlanStep(
                name=f"{number}:{kernel}",
                kernel=self._kernel(kernel),
                finish=-1 if finish is None else self._kernel(finish),
                buffers=tuple(buffers),
                ints=tuple(self.size(i) for i in ints),
                items=self.size(items),
                grain=grain,
                scratch=self.size(scratch),
                flops=self.size(FLOPS if flops is None else flops),
                bytes=self.size(f"2*({items})"),
                source=source,
            )
        )

    def read(self, name: str, buffer: int, dtype: str = "int64", element: int = 0) -> None:
        """From the next step on, size ``name`` is an element of ``buffer``."""
        self.plan.exprs.data.append(name)
        self.plan.reads.append(Read(name, len(self.plan.steps), buffer, dtype, element))

    def require(self, left: int | str, relation: Relation, right: int | str, text: str) -> None:
        """A new constraint."""
        self.plan.constraints.append(Constraint(relation, self.size(left), self.size(right), text))

    def bundle(self, features: tuple[str, ...] = (), library: bytes | None = None) -> Bundle:
        """The bundle of this plan."""
        return Bundle(
            levels=(Level("test", features, self.plan, compile_library() if library is None else library),),
            constants=np.frombuffer(self.constants, np.uint8),
            metadata={"producer": "handmade", "target": "test"},
        )

    def _buffer(self, kind: BufferKind, size: Dim, index: int) -> int:
        self.plan.buffers.append(Buffer(kind, self.plan.exprs.add(size), index))
        return len(self.plan.buffers) - 1

    def _kernel(self, name: str) -> int:
        if name not in self.plan.kernels:
            self.plan.kernels.append(name)
        return self.plan.kernels.index(name)


def _bytes(dtype: str, dims: tuple[int | str, ...]) -> Dim:
    size: Dim = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    for d in dims:
        size = size * parse_dim(d)
    return size


def encoder(panel: int = 0) -> HandPlan:
    """A small model with every kind of buffer: y = row sums of 3 * table[ids] + bias, and the hidden tensor itself.

    ids int64 [batch, seq], bias float32 [6]; hidden float32 [batch, seq, 6], total float32 [batch, seq]; seq <= 4096.
    ``panel``: the table lies in panels of so many columns.
    """
    p = HandPlan()
    ids = p.input("ids", "int64", "batch", "seq")
    bias = p.input("bias", "float32", 6)
    table = p.constant(np.concatenate([encoder_table()[:, c].reshape(-1) for c in columns(panel or 6)]))
    hidden = p.output("hidden", "float32", "batch", "seq", 6)
    total = p.output("total", "float32", "batch", "seq")
    rows = p.arena("float32", "batch*seq", 6)
    partial = p.arena("float32", 2, "batch*seq")
    if panel:
        p.step("gather_panels", [table, ids, rows], [11, 6, panel], "batch*seq", source="/embed/Gather")
    else:
        p.step("gather", [table, ids, rows], [11, 6], "batch*seq", source="/embed/Gather")
    p.step("scale_add", [rows, bias, hidden], [3, 6], "batch*seq*6", grain=4, flops=f"{FLOPS}*batch*seq")
    p.step("row_sum", [hidden, partial, total], ["batch*seq", 6], 2, finish="row_sum_finish")
    p.require("seq", Relation.AT_MOST, 4096, "positions of the encoder (node '/embed/Gather')")
    return p


def columns(panel: int, width: int = 6) -> list[list[int]]:
    """The columns of each panel of a matrix of ``width`` columns."""
    return [list(range(first, min(first + panel, width))) for first in range(0, width, panel)]


def level(target: str, features: tuple[str, ...], panel: int, library: bytes | None = None) -> LevelParts:
    """The encoder for a target whose kernels want panels of ``panel`` columns."""
    p = encoder(panel)
    constants = np.frombuffer(p.constants, np.uint8)
    stored = StoredConstant(0, constants[: 11 * 6 * 4].view(np.float32), columns(panel))
    return LevelParts(
        Level(target, features, p.plan, compile_library() if library is None else library), constants, [stored]
    )


def levels(library: bytes | None = None) -> Bundle:
    """The encoder for three targets: panels of 4, 3 and 5 columns. What is stored is that of ``middle``."""
    parts = [level(name, (), panel, library) for name, panel in (("middle", 3), ("least", 4), ("most", 5))]
    return combine(parts, ["least", "middle", "most"], {"producer": "handmade"})


def encoder_table() -> np.ndarray:
    """The table of ``encoder``: float32 [11, 6]."""
    return (np.arange(66, dtype=np.float32).reshape(11, 6) - 30) / 4


def encoder_reference(ids: np.ndarray, bias: np.ndarray) -> list[np.ndarray]:
    """What ``encoder`` computes."""
    hidden = 3 * encoder_table()[ids] + bias
    return [hidden, hidden.sum(-1, dtype=np.float32)]


def run_encoder(data: bytes) -> None:
    """Opens a bundle of the encoder and runs it once: the first run verifies the constants."""
    with Session(data, threads=1) as session:
        session.run(None, {"ids": np.ones((1, 3), np.int64), "bias": np.zeros(6, np.float32)})


def places() -> HandPlan:
    """y = where x is not zero, scaled by 3 in two steps; number = the run's; x int64 [n], y int64 [found], number int64 [1]."""
    p = HandPlan()
    x = p.input("x", "int64", "n")
    number = p.output("number", "int64", 1)
    found = p.arena("int64", 1)
    p.step("count", [x, found], ["n"], 1)
    p.read("found", found)
    y = p.output("y", "int64", "found")
    where, twice = p.arena("int64", "found"), p.arena("int64", "found")
    p.step("nonzero", [x, where, number], ["n", "run number"], 1)
    p.step("mix", [where, where, twice], [1, "found", "found"], "found")
    p.step("mix", [twice, where, y], [1, "found", "found"], "found")
    return p
