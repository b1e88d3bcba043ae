"""What is measured: one node of an optimized graph on its own, with each of the schedules that it may have.

A ``NodeSpec`` is that node as plain data, which other processes can be handed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from ..dtypes import is_float, numpy_dtype
from ..ir import shape
from ..lower.kernel import KernelCall, KernelSource
from ..lower.problems import problem_of
from ..lower.registry import KERNELS, Context
from ..schedule import AnySchedule, Problem, fixed
from ..symbolic import evaluate
from ..targets.target import Target
from ..weights import FactoredConstant, Weight

Array = npt.NDArray[Any]


class Spec(Protocol):
    """What is built for a case."""

    def kernels(self, target: Target, problem: Problem, schedule: AnySchedule) -> list[tuple[KernelSource, ...]]:
        """Of each kernel call in order the kernel, and the one that finishes, if there is one."""


@dataclass(frozen=True, eq=False)
class TensorSpec:
    """A tensor: ``values`` of a constant, ``weight`` of one that is stored in factors, ``shape`` as graphsurgeon writes it."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    values: Array | None = None
    weight: Weight | None = None

    @staticmethod
    def of(tensor: gs.Variable | gs.Constant) -> TensorSpec:
        """``tensor`` as data."""
        dtype = np.dtype(tensor.dtype).name
        if not isinstance(tensor, gs.Constant):
            return TensorSpec(tensor.name, dtype, tuple(tensor.shape))
        weight = tensor.weight if isinstance(tensor, FactoredConstant) else None
        values = np.asarray(tensor.values)
        return TensorSpec(tensor.name, dtype, values.shape, values, weight)

    def tensor(self) -> gs.Variable | gs.Constant:
        """A new tensor of this description."""
        if self.values is None:
            return gs.Variable(self.name, numpy_dtype(self.dtype), list(self.shape))
        if self.weight is not None:
            return FactoredConstant(self.name, self.values, self.weight)
        return gs.Constant(self.name, self.values)


@dataclass(frozen=True, eq=False)
class NodeSpec:
    """A node with its tensors."""

    op: str
    name: str
    domain: str
    attrs: Mapping[str, Any]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    opset: int

    @staticmethod
    def of(node: gs.Node, opset: int) -> NodeSpec:
        """``node`` as data."""
        inputs, outputs = (tuple(map(TensorSpec.of, tensors)) for tensors in (node.inputs, node.outputs))
        return NodeSpec(node.op, node.name, node.domain or "", dict(node.attrs), inputs, outputs, opset)

    def graph(self) -> gs.Graph:
        """A graph of the node alone; its inputs are those of the node that are not constants."""
        tensors = {t.name: t.tensor() for t in (*self.inputs, *self.outputs)}
        inputs, outputs = ([tensors[t.name] for t in some] for some in (self.inputs, self.outputs))
        node = gs.Node(self.op, self.name, dict(self.attrs), inputs, outputs, domain=self.domain)
        free = list({t.name: t for t in inputs if isinstance(t, gs.Variable) and t.name}.values())
        return gs.Graph([node], free, outputs, opset=self.opset)

    def lower(self, target: Target, problem: Problem, schedule: AnySchedule) -> list[KernelCall]:
        """The kernel calls of the node, with ``schedule`` for its ``problem``."""
        (node,) = self.graph().nodes
        return KERNELS[self.op](node, Context(target, narrow=True, schedules=fixed(problem, schedule)))

    def kernels(self, target: Target, problem: Problem, schedule: AnySchedule) -> list[tuple[KernelSource, ...]]:
        """As ``Spec`` says."""
        calls = self.lower(target, problem, schedule)
        return [(call.kernel, *([call.finish] if call.finish is not None else [])) for call in calls]

    def feeds(self, sizes: Mapping[str, int]) -> dict[str, Array]:
        """Inputs of the node at ``sizes``: positive floats, so that variances may be among them; true or false; zeros."""
        rng = np.random.default_rng(0)
        made: dict[str, Array] = {}
        for spec in self.inputs:
            if spec.values is not None or not spec.name:
                continue
            dims = [evaluate(d, sizes) for d in shape(spec.tensor())]
            if is_float(spec.dtype):
                made[spec.name] = rng.uniform(0.25, 1.0, dims).astype(numpy_dtype(spec.dtype))
            elif spec.dtype == "bool":
                made[spec.name] = rng.random(dims) < 0.9
            else:
                made[spec.name] = np.zeros(dims, spec.dtype)
        return made

    def constant(self, name: str) -> Array:
        """The value of a constant operand."""
        return next(spec.values for spec in self.inputs if spec.name == name and spec.values is not None)

    def results(self, sizes: Mapping[str, int]) -> dict[str, Array]:
        """Arrays of the shapes and dtypes of the outputs at ``sizes``."""
        return {
            spec.name: np.zeros([evaluate(d, sizes) for d in shape(spec.tensor())], numpy_dtype(spec.dtype))
            for spec in self.outputs
        }

    def expected(self, sizes: Mapping[str, int]) -> dict[str, Array]:
        """What the node computes of ``feeds``, by its ONNX function in onnxruntime."""
        session, feeds = self._reference, self.feeds(sizes)
        names = [spec.name for spec in self.outputs]
        return dict(zip(names, session.run(names, feeds), strict=True))

    @cached_property
    def _reference(self) -> Any:
        from ..export import to_model
        from ..verify import ort_session

        return ort_session(to_model(self.graph()), threads=1, plain=True)


@dataclass(frozen=True, eq=False)
class Case:
    """A distinct problem of a model.

    ``sizes``: the sets of sizes that it is measured at, by what they are called; ``count``: how many nodes of the model have it; ``space``:
    the schedules to choose from, the heuristic's first. ``resident``: bytes of all the model's weights, of which these are some.
    """

    problem: Problem
    spec: Spec
    sizes: Mapping[str, Mapping[str, int]]
    space: tuple[AnySchedule, ...]
    count: int = 1
    resident: int = 0


_DECIDED = 64
"""What sizes that data decides are taken to be."""


def cases_of(
    graph: gs.Graph,
    target: Target,
    sizes: Mapping[str, Mapping[str, int]],
    space: Callable[[Problem, gs.Node, Target], Sequence[AnySchedule]],
) -> list[Case]:
    """The distinct problems of ``graph``, in its order; ``space(problem, node, target)`` gives their schedules."""
    found: dict[Problem, list[gs.Node]] = {}
    for node in graph.nodes:
        problem = problem_of(node, target)
        if problem is not None:
            found.setdefault(problem, []).append(node)
    constants = {id(t): t for nodes in found.values() for n in nodes for t in n.inputs if isinstance(t, gs.Constant)}
    resident = sum(int(np.asarray(t.values).nbytes) for t in constants.values())
    cases = []
    for problem, nodes in found.items():
        schedules = space(problem, nodes[0], target)
        dims = [d for t in (*nodes[0].inputs, *nodes[0].outputs) if t.name for d in shape(t) if not isinstance(d, int)]
        decided = {s.name: _DECIDED for d in dims for s in d.free_symbols}
        bound = {label: {**decided, **known} for label, known in sizes.items()}
        cases.append(Case(problem, NodeSpec.of(nodes[0], graph.opset), bound, tuple(schedules), len(nodes), resident))
    return cases
