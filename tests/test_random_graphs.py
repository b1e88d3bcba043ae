"""Random graphs, whatever passes make of them and whichever of their tensors are returned, give what onnxruntime gives."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from rewriting import Array, normal, run

import coda_edge
from coda_edge.bundle import to_bytes

_INPUTS: dict[str, tuple[int | str, ...]] = {
    "x": ("B", "S", 8),
    "y": ("B", "S", 4),
    "row": ("B", "S", 1),
    "position": (1, "S", 8),
    "batch": ("B", 1, 8),
}


class _Graph:
    """A graph that grows by random nodes. Its tensors are ``[B|1, S|1, columns]``, by name with their shape."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}
        self.tensors: dict[str, tuple[int | str, ...]] = dict(_INPUTS)

    def constant(self, value: Array) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def weights(self, *shape: int) -> str:
        return self.constant(self.numbers.standard_normal(shape).astype(np.float32) / 2)

    def node(self, op: str, inputs: list[str], shape: tuple[int | str, ...], **attrs: object) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=f"n{name}", **attrs))
        self.tensors[name] = shape
        return name

    def pick(self, fits: Callable[[tuple[int | str, ...]], bool] = lambda _: True) -> str:
        return self.random.choice([n for n, s in self.tensors.items() if len(s) == 3 and fits(s)])

    def grow(self) -> None:
        """Adds one random operation."""
        t = self.pick()
        shape = self.tensors[t]
        columns = int(shape[-1])
        match self.random.randrange(8):
            case 0 | 1:
                n = self.random.choice([1, 4, 8, 12])
                self.node("MatMul", [t, self.weights(columns, n)], (*shape[:-1], n))
            case 2:
                self.node(self.random.choice(["Tanh", "Sigmoid", "Neg", "Relu", "Erf"]), [t], shape)
            case 3:
                other = self.pick(lambda s: all(a == b or 1 in (a, b) for a, b in zip(s, shape, strict=True)))
                broad = tuple(b if a == 1 else a for a, b in zip(shape, self.tensors[other], strict=True))
                self.node(self.random.choice(["Add", "Mul", "Sub", "Max"]), [t, other], broad)
            case 4:
                last = self.constant(np.array([-1]))
                self.node(self.random.choice(["ReduceMean", "ReduceSum", "ReduceMax"]), [t, last], (*shape[:-1], 1))
            case 5:
                self.node("LayerNormalization", [t, self.weights(columns), self.weights(columns)], shape, axis=-1)
            case 6:
                half = [self.constant(np.array([v])) for v in (columns // 2, columns, 2)]
                self.node("Slice", [t, *half], (*shape[:-1], columns - columns // 2))
            case _:
                if columns % 4 == 0:
                    split = self.constant(np.array([0, 0, 2, columns // 2]))
                    heads = self.node("Reshape", [t, split], (*shape[:2], 2, columns // 2))
                    self.node("Transpose", [heads], (shape[0], 2, shape[1], columns // 2), perm=[0, 2, 1, 3])

    def model(self) -> onnx.ModelProto:
        """The model, which returns its last tensor and a few others."""
        made = [n for n in self.tensors if n not in _INPUTS]
        returned = dict.fromkeys([made[-1], *self.random.sample(made, min(2, len(made)))])
        graph = helper.make_graph(
            self.nodes,
            "random",
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in _INPUTS.items()],
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None] * len(self.tensors[n])) for n in returned],
            [numpy_helper.from_array(v, n) for n, v in self.constants.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("seed", range(12))
def test_random_graph(seed: int) -> None:
    graph = _Graph(seed)
    for _ in range(12):
        graph.grow()
    m = graph.model()
    optimized = coda_edge.optimize(m, verify=False)
    with coda_edge.Session(to_bytes(optimized.bundle), threads=2) as session:
        for b, s in ((2, 3), (1, 1), (3, 17)):
            sizes = {"B": b, "S": s}
            feeds = {n: normal(*(sizes.get(str(d), d) for d in dims)) for n, dims in _INPUTS.items()}
            for found in (session.run(None, feeds), run(optimized.model, feeds)):
                for ours, expected in zip(found, run(m, feeds), strict=True):
                    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4 * (np.abs(expected).max() or 1))
