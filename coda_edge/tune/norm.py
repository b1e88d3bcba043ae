"""A norm between two GEMMs as something to measure: with each of its forms, all the kernels that it takes.

``h = x W + r``, ``y = norm(h) V + c``, and both are wanted, as in a layer of a Transformer. Whether y's product does the norm, or a kernel of
its own, changes the weights, the epilogues and what is stored; so whole plans are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser

from .. import frontend
from ..bundle.plan import BufferKind
from ..lower import Lowered, lower
from ..lower.kernel import KernelSource
from ..passes import run_pipeline
from ..schedule import AnySchedule, NormForm, Problem, Schedules, norm_problem
from ..targets.target import Target
from .case import Array, Case
from .device import Device
from .trial import Bench, Step, labels

SPACE = (NormForm(True), NormForm(False))
_NORMS = {
    True: "n = LayerNormalization <axis = -1, epsilon = 1e-5> (h, g, b)",
    False: "s = Mul(h, h) m = ReduceMean <keepdims = 1> (s, axes) e = Add(m, tiny) d = Sqrt(e) q = Div(h, d) n = Mul(q, g)",
}


@dataclass(frozen=True)
class NormSpec:
    """A norm over ``k`` columns ahead of ``n``; ``centred``: whether it takes off a mean."""

    k: int
    n: int
    centred: bool

    def kernels(self, target: Target, problem: Problem, schedule: AnySchedule) -> list[tuple[KernelSource, ...]]:
        """As ``Spec`` says."""
        lowered = self.lowered(target, schedule)
        return [
            (lowered.kernels[s.kernel], *([lowered.kernels[s.finish]] if s.finish >= 0 else []))
            for s in lowered.plan.steps
        ]

    def lowered(self, target: Target, schedule: AnySchedule) -> Lowered:
        """The plan with a form of the norm; its GEMMs have the heuristics' schedules."""
        normal = frontend.to_normal_form(self.model(), None)
        absorbed = isinstance(schedule, NormForm) and schedule.absorbed
        run_pipeline(normal.graph, absorbs=lambda k, n, centred: absorbed)
        return lower(normal.graph, target, normal.constraints, Schedules())

    def model(self) -> onnx.ModelProto:
        """The two products, for any number of ``rows``."""
        text = f"""<ir_version: 10, opset_import: ["" : 20]>
            norm (float[rows, {self.k}] x, float[rows, {self.k}] r) => (float[rows, {self.n}] y, float[rows, {self.k}] h) {{
            p = MatMul(x, w) h = Add(p, r) {_NORMS[self.centred]} z = MatMul(n, v) y = Add(z, c) }}"""
        made = parser.parse_model(text)
        rng = np.random.default_rng(0)
        constants = {
            "w": rng.standard_normal((self.k, self.k)) / np.sqrt(self.k),
            "v": rng.standard_normal((self.k, self.n)) / np.sqrt(self.k),
            "g": rng.uniform(0.5, 1.5, self.k),
            "b": rng.standard_normal(self.k),
            "c": rng.standard_normal(self.n),
            "tiny": np.array(1e-5),
        }
        used = {name for node in made.graph.node for name in node.input}
        arrays = {name: value.astype(np.float32) for name, value in constants.items()} | {"axes": np.array([-1])}
        made.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in arrays.items() if name in used)
        return made


def norm_cases(norms: Mapping[NormSpec, int], target: Target, lengths: Sequence[int]) -> list[Case]:
    """``norms``, of each of which a model has so many, at each of ``lengths`` as the number of rows."""
    sizes = labels([{"rows": length} for length in lengths])
    return [
        Case(norm_problem(target.measured_as, s.k, s.n, s.centred), s, sizes, SPACE, count)
        for s, count in norms.items()
    ]


class PlanBench(Bench):
    """A norm with the kernels around it, at one number of rows; each plan has buffers of its own."""

    def __init__(self, spec: NormSpec, target: Target, device: Device, sizes: Mapping[str, int]) -> None:
        super().__init__(device)
        self._spec, self._target, self._sizes = spec, target, sizes
        self._made: dict[AnySchedule, tuple[list[Step], dict[str, Any]]] = {}

    def steps(self, module: Any, schedule: AnySchedule, checked: bool) -> list[Step]:
        """As ``Bench`` says."""
        return self._plan(schedule)[0]

    def expected(self) -> dict[str, Array]:
        """As ``Bench`` says."""
        from ..verify import ort_session

        session = ort_session(self._spec.model(), threads=1, plain=True)
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, self._feeds), strict=True))

    def found(self, schedule: AnySchedule, name: str, like: Array) -> Array:
        """As ``Bench`` says."""
        return self.device.get(self._plan(schedule)[1][name], like)

    @cached_property
    def _feeds(self) -> dict[str, Array]:
        rng = np.random.default_rng(1)
        shape = (self._sizes["rows"], self._spec.k)
        return {name: rng.standard_normal(shape).astype(np.float32) for name in ("x", "r")}

    def _plan(self, schedule: AnySchedule) -> tuple[list[Step], dict[str, Any]]:
        """The steps of a form, and its outputs."""
        if schedule not in self._made:
            lowered = self._spec.lowered(self._target, schedule)
            plan, values = lowered.plan, lowered.plan.exprs.evaluate(self._sizes)
            tensors, outputs = [], {}
            for buffer in plan.buffers:
                size = values[buffer.size]
                if buffer.kind == BufferKind.CONSTANT:
                    tensors.append(self.device.put(lowered.constants[buffer.index : buffer.index + size]))
                elif buffer.kind == BufferKind.INPUT:
                    tensors.append(self.device.put(self._feeds[plan.inputs[buffer.index].name]))
                else:
                    tensors.append(self.device.put(np.zeros(size, np.uint8)))
                if buffer.kind == BufferKind.OUTPUT:
                    outputs[plan.outputs[buffer.index].name] = tensors[-1]
            steps = []
            for s in plan.steps:
                scratch = self.device.put(np.zeros(values[s.scratch], np.uint8))
                buffers = [*(tensors[b] for b in s.buffers), scratch]
                ints = tuple(values[i] for i in s.ints)
                steps.append(Step(ints, tuple((b, 0) for b in buffers), values[s.items], values[s.flops]))
            self._made[schedule] = steps, outputs
        return self._made[schedule]
