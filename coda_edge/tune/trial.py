"""A candidate on the device: its arguments there, whether it computes the right thing, how long it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..lower.kernel import KernelCall, Packed, Workspace
from ..schedule import AnySchedule
from ..symbolic import evaluate
from ..targets.target import Target
from .case import Case
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


@dataclass
class Bench:
    """A case at one set of sizes on a device, with the tensors that all its candidates share.

    A candidate is checked with its own weights. It is timed with those of the first one: a packed weight takes as many bytes whatever its
    layout, and a device may not have room for all of them.
    """

    case: Case
    target: Target
    device: Device
    sizes: Mapping[str, int]
    _inputs: dict[str, Any] = field(default_factory=dict)
    _outputs: dict[str, Any] = field(default_factory=dict)
    _shared: dict[tuple[str, int], tuple[Any, int]] = field(default_factory=dict)
    _expected: dict[str, Array] | None = None

    def __post_init__(self) -> None:
        self._inputs = {name: self.device.put(array) for name, array in self.case.feeds(self.sizes).items()}
        self._outputs = {name: self.device.put(array) for name, array in self.case.outputs(self.sizes).items()}

    def calls(self, schedule: AnySchedule) -> list[KernelCall]:
        """The kernel calls of a candidate."""
        return self.case.spec.lower(self.target, self.case.problem, schedule)

    def check(self, module: Any, schedule: AnySchedule) -> float:
        """The largest error of a candidate's outputs, over their largest value. Raises DeviceError beyond ``TOLERANCE``."""
        for name, like in self.case.outputs(self.sizes).items():
            self._outputs[name] = self.device.put(np.full_like(like, 0 if like.dtype.kind in "iub" else np.nan))
        for i, call in enumerate(self.calls(schedule)):
            packed = {b.name: (self.device.put(b.data), 0) for b in call.buffers if isinstance(b, Packed)}
            self.device.call(module, caller_name(i), self._arguments(call, packed, 1))
        if self._expected is None:
            self._expected = self.case.expected(self.sizes)
        worst = 0.0
        for name, expected in self._expected.items():
            found = self.device.get(self._outputs[name], expected)
            scale = float(np.max(np.abs(expected), initial=0.0)) or 1.0
            error = float(np.max(np.abs(found.astype(np.float64) - expected), initial=0.0)) / scale
            worst = max(worst, math.inf if math.isnan(error) else error)
        if worst > TOLERANCE:
            raise DeviceError(f"{schedule} gives a result that is off by {worst:.1e} of its largest value")
        return worst

    def time(self, module: Any, schedule: AnySchedule) -> float:
        """Seconds that the node's kernels take with a candidate, one after another on one thread."""
        total = 0.0
        for i, call in enumerate(self.calls(schedule)):
            runs, number = self._runs(call)
            packed = {b.name: self._weights(module, b, runs) for b in call.buffers if isinstance(b, Packed)}
            arguments = self._arguments(call, packed, runs)
            total += self.device.time(module, caller_name(i), arguments, _REPEAT, number) / runs
        return total

    def flops(self, schedule: AnySchedule) -> int:
        """Arithmetic of the node."""
        return sum(evaluate(call.flops, self.sizes) for call in self.calls(schedule))

    def balance(self, schedule: AnySchedule, threads: int) -> float:
        """How much longer ``threads`` threads take than their number promises, since items are not divided."""
        items = [max(evaluate(call.items, self.sizes), 1) for call in self.calls(schedule)]
        return max(-(-count // threads) * threads / count for count in items)

    def _runs(self, call: KernelCall) -> tuple[int, int]:
        """How many weights one call goes through, and how many calls are timed together."""
        flops = max(evaluate(call.flops, self.sizes), 1)
        weights = sum(b.data.nbytes for b in call.buffers if isinstance(b, Packed))
        runs = -(-min(_STREAMED, self.case.resident) // weights) if weights else 1
        runs = max(1, min(runs, _MOST_FLOPS // flops))
        return runs, max(1, min(_MOST_CALLS, _LEAST_FLOPS // (runs * flops)))

    def _weights(self, module: Any, constant: Packed, runs: int) -> tuple[Any, int]:
        key = (constant.name, constant.data.nbytes * runs)
        if key not in self._shared:
            self._shared[key] = self.device.repeated(module, constant.data, runs)
        return self._shared[key]

    def _arguments(self, call: KernelCall, packed: Mapping[str, tuple[Any, int]], runs: int) -> list[Any]:
        ints = [evaluate(d, self.sizes) for d in call.ints]
        buffers = [self._buffer(b, packed) for b in call.buffers]
        buffers.append((self._scratch("scratch", evaluate(call.scratch, self.sizes)), 0))
        strides = [stride for _, stride in buffers]
        numbers = ([*ints, 0, evaluate(call.items, self.sizes)], [*strides, runs])
        return [*(self.device.put(np.array(n, np.int64)) for n in numbers), *(tensor for tensor, _ in buffers)]

    def _buffer(self, buffer: str | Packed | Workspace, packed: Mapping[str, tuple[Any, int]]) -> tuple[Any, int]:
        if isinstance(buffer, Packed):
            return packed[buffer.name]
        if isinstance(buffer, Workspace):
            return self._scratch(buffer.name, evaluate(buffer.size, self.sizes)), 0
        if buffer in self._outputs:
            return self._outputs[buffer], 0
        if buffer not in self._inputs:
            self._inputs[buffer] = self.device.put(self.case.constant(buffer))
        return self._inputs[buffer], 0

    def _scratch(self, name: str, size: int) -> Any:
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
