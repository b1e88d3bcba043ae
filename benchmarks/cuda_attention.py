"""Attention on a GPU: right, and at which part of the memory's and the tensor cores' rates.

``python -m benchmarks.cuda_attention build DIR --arch sm_90`` compiles (TVM and nvcc, no GPU); ``python -m benchmarks.cuda_attention run DIR``
checks and times where the GPU is (numpy, sympy and the driver, no TVM).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from coda_edge.epilogue.program import EpilogueProgram, Kind
from coda_edge.symbolic import symbol

from .cuda_driver import Device
from .cuda_problem import Plan, Step, relative_error

if TYPE_CHECKING:
    from coda_edge.lower.kernel import KernelCall
    from coda_edge.schedule.cuda_attention import CudaAttentionSchedule
    from coda_edge.targets.cuda import CudaTarget

Array = npt.NDArray[Any]
TOLERANCE = 3e-3
"""Relative L2 error against float64."""
_NUMPY = {"f32": np.float32, "f16": np.float16, "bool": np.uint8}
_BANDS = {"causal": (None, 1), "window": (-4, 1)}
"""Bands by name: the first and the last diagonal, the latter without keys - queries - 1."""

SCALED = "(acc: tile f32) -> (y: tile = v0) {\n  v0 = mul acc 0.125\n}"
MASKED = "(acc: tile f32, mask: col f32) -> (y: tile = v1) {\n  v0 = mul acc 0.125\n  v1 = add v0 mask\n}"
BIASED = (
    "(acc: tile f32, bias: tile f16, slope: row f32, keep: col bool) -> (y: tile = v3) {\n"
    "  v0 = mul acc 0.125\n  v1 = add v0 bias\n  v2 = mul v1 slope\n  v3 = where keep v2 -10000.0\n}"
)
CAUSAL = "(acc: tile f32, seen: tile bool) -> (y: tile = v1) {\n  v0 = mul acc 0.125\n  v1 = where seen v0 -inf\n}"
SOFT_CAUSAL = (
    "(acc: tile f32, seen: tile bool, mask: col f32) -> (y: tile = v2) {\n"
    "  v0 = mul acc 0.125\n  v1 = add v0 mask\n  v2 = where seen v1 -10000.0\n}"
)


@dataclass(frozen=True)
class Problem:
    """An attention with random operands. ``varies``: the axes (batch, head, query, key) along which each score operand varies."""

    name: str
    program: str
    batch: int
    heads: int
    queries: int
    keys: int
    depth: int
    columns: int
    group: int = 1
    past: int = 0
    band: str = ""
    sink: bool = False
    guard: bool = False
    varies: tuple[tuple[str, str], ...] = ()
    hidden: int = 0
    """Keys from the first on that a ``mask`` hides."""

    @cached_property
    def parsed(self) -> EpilogueProgram:
        """The score program."""
        return EpilogueProgram.parse(self.program)

    @cached_property
    def given(self) -> dict[str, Array]:
        """Operands by name, as they are stored."""
        rng = np.random.default_rng(0)
        owners = (self.batch, self.heads // self.group)
        new = self.keys - self.past
        shapes: dict[str, tuple[int, ...]] = {
            "q": (self.batch, self.heads, self.queries, self.depth),
            "k": (*owners, new, self.depth),
            "v": (*owners, new, self.columns),
        }
        if self.past:
            shapes |= {"past_k": (*owners, self.past, self.depth), "past_v": (*owners, self.past, self.columns)}
        found: dict[str, Array] = {n: rng.standard_normal(s).astype(np.float16) for n, s in shapes.items()}
        for name, shape in self.operand_shapes().items():
            value = rng.standard_normal(shape)
            param = None if name == "sink" else self.parsed.param(name)
            if name == "mask":
                value = np.where(np.arange(shape[3]) < self.hidden, -1e4, 0.0) + np.zeros(shape)
            dtype = "f32" if param is None else param.dtype
            found[name] = (value > -1).astype(np.uint8) if dtype == "bool" else value.astype(_NUMPY[dtype])
        return found

    def operand_shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """The shape of each score operand, and of the sink."""
        whole = dict(b=self.batch, h=self.heads, q=self.queries, k=self.keys)
        axes = {**dict(self.varies), **({"sink": "h"} if self.sink else {})}
        return {
            name: (
                whole["b"] if "b" in a else 1,
                whole["h"] if "h" in a else 1,
                whole["q"] if "q" in a else 1,
                whole["k"] if "k" in a else 1,
            )
            for name, a in axes.items()
        }

    @cached_property
    def bounds(self) -> tuple[int | None, int | None] | None:
        """The band's first and last diagonal."""
        if not self.band:
            return None
        first, last = _BANDS[self.band]
        offset = self.keys - self.queries - 1
        return (None if first is None else first + offset, None if last is None else last + offset)

    @cached_property
    def expected(self) -> dict[str, Array]:
        """The outputs in float64."""
        given = self.given
        k, v = (np.concatenate([given[f"past_{n}"], given[n]], 2) if self.past else given[n] for n in ("k", "v"))
        wide = {n: np.repeat(t.astype(np.float64), self.group, 1) for n, t in (("k", k), ("v", v))}
        acc = given["q"].astype(np.float64) @ wide["k"].swapaxes(2, 3)
        scores = np.stack([[self._scores(acc[b, h], b, h) for h in range(self.heads)] for b in range(self.batch)])
        if self.sink:
            sink = np.broadcast_to(given["sink"].astype(np.float64), (*scores.shape[:3], 1))
            scores = np.concatenate([scores, sink], 3)
        with np.errstate(invalid="ignore"):
            p = np.exp(scores - scores.max(3, keepdims=True, initial=-np.inf))
            p = p / p.sum(3, keepdims=True)
        p = np.nan_to_num(p, nan=0.0) if self.guard else p
        out = p[..., : self.keys] @ wide["v"]
        found = {"out": out.transpose(0, 2, 1, 3).reshape(self.batch, self.queries, -1)}
        return {
            **found,
            **({"present_k": k.astype(np.float64), "present_v": v.astype(np.float64)} if self.past else {}),
        }

    def _scores(self, acc: Array, b: int, h: int) -> Array:
        operands: dict[str, Array] = {}
        for p in self.parsed.params[1:]:
            if self.bounds is not None and p.name == "seen":
                distance = np.arange(self.keys) - np.arange(self.queries)[:, None]
                first, last = self.bounds
                operands[p.name] = (distance >= (-self.queries if first is None else first)) & (
                    distance <= (self.keys if last is None else last)
                )
                continue
            value = self.given[p.name]
            value = value[min(b, len(value) - 1), min(h, value.shape[1] - 1)]
            value = value.astype(bool) if p.dtype == "bool" else value
            operands[p.name] = (
                value[0] if p.kind is Kind.COL else np.broadcast_to(value, acc.shape) if p.kind is Kind.TILE else value
            )
        output = self.parsed.outputs[0].name
        return np.asarray(self.parsed.reference(acc, operands, None)[output])

    def outputs(self) -> dict[str, Array]:
        """Outputs as they are stored, full of NaN."""
        return {name: np.full(want.shape, np.nan, np.float16) for name, want in self.expected.items()}

    def lower(
        self, target: CudaTarget, schedule: CudaAttentionSchedule | None = None, fixed: bool = False
    ) -> KernelCall:
        """The call, for symbolic sizes unless they are ``fixed``."""
        from coda_edge.attention import Band
        from coda_edge.lower.attention import AttentionSizes, Extras, ScoreOperand
        from coda_edge.lower.cuda import lower_cuda_attention

        sizes = {n: v if fixed or n == "H" else symbol(n) for n, v in self.sizes().items()}
        shapes = {
            name: tuple(1 if d == "1" else sizes[d] for d in axes)
            for name, axes in (
                (n, "".join(a.upper() if a in v else "1" for a in "bhqk")) for n, v in self._axes().items()
            )
        }
        operands = {n: ScoreOperand(n, s) for n, s in shapes.items()}  # type: ignore[arg-type]
        bands: tuple[Band, ...] = ()
        if self.bounds is not None:
            first, last = _BANDS[self.band]
            offset = sizes["K"] - sizes["Q"] - 1
            bands = (Band(None if first is None else first + offset, None if last is None else last + offset),)
        extras = Extras(
            past=("past_k", "past_v") if self.past else None,
            present=("out.present_k", "out.present_v") if self.past else None,
            sink=operands.get("sink"),
            bands=bands,
        )
        return lower_cuda_attention(
            target,
            "attention",
            self.parsed,
            ("q", "k", "v"),
            [operands[p.name] for p in self.parsed.params[1 + len(bands) :]],
            "out.out",
            AttentionSizes(
                sizes["B"],
                sizes["H"],
                sizes["Q"],
                sizes["K"],
                self.depth,
                self.columns,
                self.group,
                sizes["P"] if self.past else 0,
            ),
            self.guard,
            schedule,
            extras,
        )

    def _axes(self) -> dict[str, str]:
        return {**dict(self.varies), **({"sink": "h"} if self.sink else {})}

    def sizes(self) -> dict[str, int]:
        """The symbols' values."""
        return {"B": self.batch, "H": self.heads, "Q": self.queries, "K": self.keys, "P": self.past}

    def plan(self, call: KernelCall) -> Plan:
        """The call at this problem's sizes."""
        return Plan.of(call, self.sizes())

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two products."""
        return 2 * self.batch * self.heads * self.queries * self.keys * (self.depth + self.columns)

    @property
    def bytes(self) -> int:
        """Bytes of q, k, v and the result, once."""
        owners = self.batch * self.heads // self.group
        wide = self.depth + self.columns
        return 2 * wide * (owners * self.keys + self.batch * self.heads * self.queries)


_BIASES = (("bias", "hqk"), ("slope", "bq"), ("keep", "bk"))
MATRIX = (
    Problem("plain", SCALED, 2, 3, 37, 70, 64, 64),
    Problem("masked", MASKED, 3, 2, 130, 130, 64, 64, varies=(("mask", "bk"),), hidden=5),
    Problem("biased", BIASED, 2, 2, 33, 65, 64, 64, varies=_BIASES),
    Problem("causal", CAUSAL, 1, 2, 130, 130, 64, 64, band="causal"),
    Problem("causal with a past", CAUSAL, 2, 4, 7, 200, 64, 64, 2, past=193, band="causal"),
    Problem("window", CAUSAL, 1, 2, 70, 150, 64, 64, band="window"),
    Problem(
        "window of finite scores", SOFT_CAUSAL, 2, 2, 90, 90, 64, 64, band="window", varies=(("mask", "bk"),), hidden=60
    ),
    Problem("one query", MASKED, 3, 8, 1, 700, 64, 64, 4, varies=(("mask", "bk"),), hidden=300),
    Problem("one query with a past", SCALED, 1, 8, 1, 515, 128, 128, 4, past=514),
    Problem("narrow heads", SCALED, 2, 2, 50, 50, 32, 48),
    Problem("odd heads", SCALED, 1, 2, 20, 33, 20, 27, past=13),
    Problem("wide heads", SCALED, 1, 1, 40, 40, 256, 256),
    Problem("sink", SCALED, 2, 4, 1, 300, 64, 64, 2, sink=True),
    Problem("nothing seen", CAUSAL, 1, 2, 20, 7, 64, 64, band="causal", guard=True),
)
"""Every kind of operand, band and size."""
TIMED = (
    Problem("BERT-base 1×128", MASKED, 1, 12, 128, 128, 64, 64, varies=(("mask", "bk"),)),
    Problem("ViT-base 1×197", SCALED, 1, 12, 197, 197, 64, 64),
    Problem("TinyLlama prefill 512", CAUSAL, 1, 32, 512, 512, 64, 64, 8, band="causal"),
    Problem("TinyLlama prefill 4096", CAUSAL, 1, 32, 4096, 4096, 64, 64, 8, band="causal"),
    Problem("TinyLlama decode 1024", SCALED, 1, 32, 1, 1024, 64, 64, 8, past=1023),
)


@dataclass(frozen=True)
class Case:
    """A compiled problem."""

    problem: Problem
    plan: Plan
    registers: int
    spills: int


def build(folder: Path, arch: str, problems: tuple[Problem, ...]) -> list[Case]:
    """Compiles the problems into ``folder``; returns its cases."""
    from coda_edge import targets
    from coda_edge.lower.cuda import CudaKernel
    from coda_edge.targets.cuda import CudaTarget

    target = targets.get(f"cuda-{arch.replace('_', '')}")
    assert isinstance(target, CudaTarget)
    calls = [p.lower(target, fixed=True) for p in problems]
    kernels = [k for call in calls for k in (call.kernel, call.finish) if isinstance(k, CudaKernel)]
    compiled = target.library(kernels)
    cases = []
    for problem, call in zip(problems, calls, strict=True):
        used = compiled.resources[call.kernel.symbol]
        cases.append(Case(problem, problem.plan(call), used.registers, used.spills))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernels.cubin").write_bytes(compiled.cubin)
    (folder / "cases.json").write_text(json.dumps([asdict(c) for c in cases], indent=1))
    return cases


def read(folder: Path) -> Iterator[Case]:
    """The cases that ``build`` wrote."""
    for entry in json.loads((folder / "cases.json").read_text()):
        given = {**entry["problem"], "varies": tuple(tuple(v) for v in entry["problem"]["varies"])}
        steps = tuple(Step(**{**s, "grid": tuple(s["grid"])}) for s in entry["plan"]["steps"])
        plan = Plan(steps, tuple(entry["plan"]["buffers"]), tuple(entry["plan"]["ints"]))
        yield Case(Problem(**given), plan, entry["registers"], entry["spills"])


def run(folder: Path, device: Device, timings: bool) -> Iterator[tuple[Case, float, float | None]]:
    """Each case, its largest relative error of three runs with poisoned outputs, and microseconds."""
    module = device.module((folder / "kernels.cubin").read_bytes())
    for case in read(folder):
        problem, empty = case.problem, case.problem.outputs()
        outputs = {name: device.upload(array) for name, array in empty.items()}
        addresses = {name: device.upload(array) for name, array in problem.given.items()}
        addresses |= {f"out.{name}": address for name, address in outputs.items()}
        buffers = [
            device.upload(np.full(max(1, b // 4), np.nan, np.float32)) if isinstance(b, int) else addresses[b]
            for b in case.plan.buffers
        ]
        launches = [
            device.launcher(
                device.function(module, s.symbol, s.shared), s.grid, s.block, s.shared, buffers, case.plan.ints
            )
            for s in case.plan.steps
        ]

        def call(launches: list = launches) -> None:  # type: ignore[type-arg]
            for launch in launches:
                launch()

        errors = []
        for _ in range(3):
            for name, address in outputs.items():
                device.refill(address, empty[name])
            call()
            device.synchronize()
            actual = {name: device.download(address, empty[name]) for name, address in outputs.items()}
            errors.append(relative_error(actual, problem.expected))
        yield case, float(np.max(errors)), device.microseconds(call) if timings else None


def report(folder: Path) -> int:
    """Checks ``folder/matrix`` and times ``folder/timed``; returns how many cases are wrong."""
    device = Device()
    print(device.name, device.arch)
    wrong = 0
    for part in ("matrix", "timed"):
        for case, error, microseconds in run(folder / part, device, timings=part == "timed"):
            p = case.problem
            wrong += not error <= TOLERANCE
            line = f"{p.name:26} error {error:.1e}  {case.registers} registers, {case.spills} spilled"
            if microseconds is not None:
                line += f"  {microseconds:7.2f} us  {p.flops / microseconds / 1e6:6.1f} TFLOP/s  {p.bytes / microseconds / 1e3:7.0f} GB/s"
            print(line, "" if error <= TOLERANCE else "WRONG")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("build", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="sm_90")
    options = parser.parse_args(arguments)
    if options.what == "run":
        return min(report(options.folder), 125)
    for part, problems in (("matrix", MATRIX), ("timed", TIMED)):
        for case in build(options.folder / part, options.arch, problems):
            print(f"{case.problem.name}: {case.registers} registers, {case.spills} spilled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
