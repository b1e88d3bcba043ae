"""A candidate on the device: its arguments there, whether it computes the right thing, how long it takes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..lower.kernel import KernelCall, Packed, Workspace
from ..schedule import AnySchedule, Problem
from ..symbolic import evaluate
from ..targets.target import Target
from .case import NodeSpec
from .device import Device, DeviceError
from .packed import CHAINS, PEAK, caller_name

Array = npt.NDArray[Any]

TOLERANCE = 1e-4
"""The largest error of an output, over its largest value, as everywhere."""
_STREAMED = 16 << 20
"""Bytes of weights that one timed call goes through, if the model has as many: more than a second-level cache."""
_MOST_FLOPS = 2_000_000_000
_LEAST_FLOPS = 50_000_000
"""Operations of what is timed at once: a millisecond to tens of them."""
_MOST_CALLS = 100
_REPEAT = 2
_PEAK_STEPS = 2_000_000


@dataclass(frozen=True)
class Step:
    """A kernel call on the device: its numbers, and of each buffer the tensor and how far it goes on from one run to the next."""

    ints: tuple[int, ...]
    buffers: tuple[tuple[Any, int], ...]
    items: int
    flops: int
    runs: int = 1
    """How many weights one call goes through."""

    @property
    def number(self) -> int:
        """How many calls are timed together."""
        return max(1, min(_MOST_CALLS, _LEAST_FLOPS // (self.runs * max(self.flops, 1))))

    def arguments(self, device: Device) -> list[Any]:
        """What the caller of the kernel takes."""
        numbers = ([*self.ints, 0, self.items], [*(stride for _, stride in self.buffers), self.runs])
        return [*(device.put(np.array(n, np.int64)) for n in numbers), *(tensor for tensor, _ in self.buffers)]


class Bench(ABC):
    """A case at one set of sizes on a device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._expected: dict[str, Array] | None = None

    @abstractmethod
    def steps(self, module: Any, schedule: AnySchedule, checked: bool) -> list[Step]:
        """The calls of a candidate; ``checked``: for a run whose outputs count, so with its own weights and nothing in the outputs."""

    @abstractmethod
    def expected(self) -> dict[str, Array]:
        """The outputs as they should be."""

    @abstractmethod
    def found(self, schedule: AnySchedule, name: str, like: Array) -> Array:
        """The output ``name`` of the run that was checked last, which was with ``schedule``."""

    def check(self, module: Any, schedule: AnySchedule) -> float:
        """The largest error of a candidate's outputs, over their largest value. Raises DeviceError beyond ``TOLERANCE``."""
        for i, step in enumerate(self.steps(module, schedule, checked=True)):
            self.device.call(module, caller_name(i), step.arguments(self.device))
        if self._expected is None:
            self._expected = self.expected()
        worst = 0.0
        for name, expected in self._expected.items():
            found = self.found(schedule, name, expected)
            scale = float(np.max(np.abs(expected), initial=0.0)) or 1.0
            error = float(np.max(np.abs(found.astype(np.float64) - expected), initial=0.0)) / scale
            worst = max(worst, math.inf if math.isnan(error) else error)
        if worst > TOLERANCE:
            raise DeviceError(f"{schedule} gives a result that is off by {worst:.1e} of its largest value")
        return worst

    def time(self, module: Any, schedule: AnySchedule) -> float:
        """Seconds that the kernels take with a candidate, one after another on one thread."""
        steps = self.steps(module, schedule, checked=False)
        return sum(
            self.device.time(module, caller_name(i), s.arguments(self.device), _REPEAT, s.number) / s.runs
            for i, s in enumerate(steps)
        )

    def flops(self, module: Any, schedule: AnySchedule) -> int:
        """Arithmetic of the kernels."""
        return sum(step.flops for step in self.steps(module, schedule, checked=False))

    def balance(self, module: Any, schedule: AnySchedule, threads: int) -> float:
        """How much longer ``threads`` threads take than their number promises, since items are not divided."""
        steps = self.steps(module, schedule, checked=False)
        waiting = sum(s.flops * (-(-s.items // threads) * threads / max(s.items, 1)) for s in steps)
        return waiting / max(sum(s.flops for s in steps), 1)


class NodeBench(Bench):
    """A node, of a model that has ``resident`` bytes of weights.

    A candidate is checked with its own weights. It is timed with those of the first one: a packed weight takes as many bytes whatever its
    layout, and a device may not have room for all of them.
    """

    def __init__(
        self,
        spec: NodeSpec,
        problem: Problem,
        resident: int,
        target: Target,
        device: Device,
        sizes: Mapping[str, int],
    ) -> None:
        super().__init__(device)
        self._spec, self._problem, self._resident = spec, problem, resident
        self._target, self._sizes = target, sizes
        self._tensors = {name: device.put(array) for name, array in spec.feeds(sizes).items()}
        self._results: dict[str, Any] = {}
        self._shared: dict[tuple[str, int], tuple[Any, int]] = {}
        self._timed: dict[AnySchedule, list[Step]] = {}

    def steps(self, module: Any, schedule: AnySchedule, checked: bool) -> list[Step]:
        """As ``Bench`` says."""
        if checked or not self._results:
            for name, like in self._spec.results(self._sizes).items():
                self._results[name] = self.device.put(np.full_like(like, 0 if like.dtype.kind in "iub" else np.nan))
        if not checked and schedule in self._timed:
            return self._timed[schedule]
        calls = self._spec.lower(self._target, self._problem, schedule)
        made = [self._step(module, call, checked) for call in calls]
        if not checked:
            self._timed[schedule] = made
        return made

    def expected(self) -> dict[str, Array]:
        """As ``Bench`` says."""
        return self._spec.expected(self._sizes)

    def found(self, schedule: AnySchedule, name: str, like: Array) -> Array:
        """As ``Bench`` says."""
        return self.device.get(self._results[name], like)

    def _step(self, module: Any, call: KernelCall, checked: bool) -> Step:
        flops = evaluate(call.flops, self._sizes)
        weights = sum(b.data.nbytes for b in call.buffers if isinstance(b, Packed))
        runs = 1
        if weights and not checked:
            runs = max(1, min(-(-min(_STREAMED, self._resident) // weights), _MOST_FLOPS // max(flops, 1)))
        buffers = [self._buffer(module, b, runs, checked) for b in call.buffers]
        buffers.append((self._space("scratch", evaluate(call.scratch, self._sizes)), 0))
        ints = tuple(evaluate(d, self._sizes) for d in call.ints)
        return Step(ints, tuple(buffers), evaluate(call.items, self._sizes), flops, runs)

    def _buffer(self, module: Any, buffer: str | Packed | Workspace, runs: int, checked: bool) -> tuple[Any, int]:
        if isinstance(buffer, Packed):
            if checked:
                return self.device.put(buffer.data), 0
            key = (buffer.name, buffer.data.nbytes * runs)
            if key not in self._shared:
                self._shared[key] = self.device.repeated(module, buffer.data, runs)
            return self._shared[key]
        if isinstance(buffer, Workspace):
            return self._space(buffer.name, evaluate(buffer.size, self._sizes)), 0
        if buffer in self._results:
            return self._results[buffer], 0
        if buffer not in self._tensors:
            self._tensors[buffer] = self.device.put(self._spec.constant(buffer))
        return self._tensors[buffer], 0

    def _space(self, name: str, size: int) -> Any:
        key = (name, size)
        if key not in self._shared:
            self._shared[key] = self.device.put(np.zeros(max(size, 1), np.uint8)), 0
        return self._shared[key][0]


def peak(device: Device, module: Any, target: Target) -> float:
    """FLOP/s of multiply-adds on float32 vectors of ``target``, on one thread of the device; ``module`` is any candidate's library."""
    lanes = target.lanes(4)
    sizes, sink = np.array([_PEAK_STEPS], np.int64), np.full(lanes, 0.5, np.float32)
    seconds = device.time(module, PEAK, [device.put(sizes), device.put(sink)], 2 * _REPEAT)
    return 2.0 * lanes * CHAINS * _PEAK_STEPS / seconds


def labels(sizes: Sequence[Mapping[str, int]]) -> dict[str, Mapping[str, int]]:
    """The sets of sizes by what they are called in a database."""
    return {",".join(f"{name}={value}" for name, value in sorted(s.items())) or "fixed": s for s in sizes}
