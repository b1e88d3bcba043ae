"""Graphs that grow by random operations, each with its value in float64: projections, norms in many spellings, residuals, layouts.

Magnitudes stay near 1: weights are scaled by the width, and every root has a bound away from zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from rewriting import Array

Dims: TypeAlias = tuple[int | str, ...]
Values: TypeAlias = dict[str, Array]
Draw: TypeAlias = Callable[[st.SearchStrategy], object]

INPUTS: dict[str, Dims] = {
    "x": ("B", "S", 8),
    "y": ("B", "S", 4),
    "row": ("B", "S", 1),
    "position": (1, "S", 8),
    "batch": ("B", 1, 8),
}
_EPSILON = 1e-2
_erf = np.vectorize(math.erf, otypes=[np.float64])
_UNARY: dict[str, Callable[[Array], Array]] = {
    "Tanh": np.tanh,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Neg": np.negative,
    "Relu": lambda x: np.maximum(x, 0),
    "Erf": _erf,
    "Identity": lambda x: x,
}
_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "Add": np.add,
    "Mul": np.multiply,
    "Sub": np.subtract,
    "Max": np.maximum,
}
_REDUCE: dict[str, Callable[..., Array]] = {
    "ReduceMean": np.mean,
    "ReduceSum": np.sum,
    "ReduceMax": np.max,
    "ReduceL2": lambda x, axis, keepdims: np.sqrt(np.sum(x * x, axis=axis, keepdims=keepdims)),
}


@dataclass
class Graph:
    """A graph that grows. ``draw`` decides; ``dims`` are the tensors so far, ``steps`` how float64 makes each."""

    draw: Draw
    dims: dict[str, Dims] = field(default_factory=lambda: dict(INPUTS))
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)
    steps: list[tuple[str, Callable[[Values], Array]]] = field(default_factory=list)

    def grow(self) -> None:
        """Adds one random operation, if one that is drawn fits."""
        self.pick(list(_OPERATIONS))(self)

    def pick(self, options: Sequence):  # type: ignore[no-untyped-def,type-arg]
        """One of ``options``."""
        return self.draw(st.sampled_from(options))

    def tensor(self, fits: Callable[[Dims], bool] = lambda _: True, latest: int = 2) -> str:
        """One of the ``latest`` tensors whose dimensions fit, so that operations follow each other; an input always fits."""
        return self.pick([n for n, d in self.dims.items() if fits(d)][::-1][:latest])

    def constant(self, value: Array) -> str:
        """A new constant."""
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def numbers(self, *dims: int, scale: float = 1.0, around: float = 0.0) -> str:
        """A new constant of normal numbers, the same ones for the same place in the graph."""
        value = np.random.default_rng(len(self.constants)).standard_normal(dims) * scale + around
        return self.constant(value.astype(np.float32))

    def ints(self, *values: int) -> str:
        """A new constant int64 vector."""
        return self.constant(np.array(values, np.int64))

    def node(self, op: str, inputs: Sequence[str], dims: Dims, value: Callable[..., Array], **attrs: object) -> str:
        """A new node; ``value`` gives its result from its float inputs in float64."""
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=f"n{name}", **attrs))
        self.dims[name] = dims
        floats = [i for i in inputs if i not in self.constants or self.constants[i].dtype == np.float32]
        self.steps.append((name, lambda values: value(*(self._float64(values, i) for i in floats))))
        return name

    def _float64(self, values: Values, name: str) -> Array:
        return values[name] if name in values else self.constants[name].astype(np.float64)

    def returned(self) -> list[str]:
        """The names of the outputs: the last tensor and up to two others."""
        made = [name for name, _ in self.steps]
        others = [self.pick(made) for _ in range(self.pick([0, 1, 2]))]
        return list(dict.fromkeys([made[-1], *others]))

    def model(self, outputs: Sequence[str]) -> onnx.ModelProto:
        """The graph as a model that returns ``outputs``."""
        graph = helper.make_graph(
            self.nodes,
            "random",
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, d) for n, d in INPUTS.items()],
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None] * len(self.dims[n])) for n in outputs],
            [numpy_helper.from_array(v, n) for n, v in self.constants.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)

    def evaluate(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """The outputs in float64."""
        values: Values = {name: value.astype(np.float64) for name, value in feeds.items()}
        for name, step in self.steps:
            values[name] = step(values)
        return [values[name] for name in outputs]


def _width(dims: Dims) -> int:
    return int(dims[-1])


def _columns(dims: Dims) -> bool:
    return isinstance(dims[-1], int)


def _project(g: Graph) -> None:
    t = g.tensor(_columns)
    k, n = _width(g.dims[t]), g.pick([8, 4, 12, 1])
    g.node("MatMul", [t, g.numbers(k, n, scale=k**-0.5)], (*g.dims[t][:-1], n), np.matmul)


def _unary(g: Graph) -> None:
    t, op = g.tensor(), g.pick(list(_UNARY))
    g.node(op, [t], g.dims[t], _UNARY[op])


def _binary(g: Graph) -> None:
    t = g.tensor()
    mine = g.dims[t]
    other = g.tensor(
        lambda d: len(d) == len(mine) and all(a == b or 1 in (a, b) for a, b in zip(d, mine, strict=True)), 8
    )
    op = g.pick(list(_BINARY))
    dims = tuple(b if a == 1 else a for a, b in zip(mine, g.dims[other], strict=True))
    g.node(op, [t, other], dims, _BINARY[op])


def _column(g: Graph) -> None:
    t, op = g.tensor(_columns), g.pick(["Add", "Mul", "Sub"])
    operands = [t, g.numbers(_width(g.dims[t]), scale=0.3, around=1.0)]
    g.node(op, operands if g.pick([True, False]) else operands[::-1], g.dims[t], _BINARY[op])


def _reduce(g: Graph) -> None:
    t, op = g.tensor(lambda d: _columns(d) and len(d) == 3), g.pick(list(_REDUCE))
    _statistic(g, op, t, g.pick([True, False]))


def _statistic(g: Graph, op: str, t: str, keep: bool) -> str:
    """A statistic of t's rows, kept as an axis of 1 at once or by an Unsqueeze."""
    last = len(g.dims[t]) - 1
    kept = (*g.dims[t][:-1], 1)
    if keep:
        return g.node(op, [t, g.ints(-1)], kept, lambda x: _REDUCE[op](x, axis=-1, keepdims=True))
    bare = g.node(op, [t, g.ints(last)], kept[:-1], lambda x: _REDUCE[op](x, axis=-1, keepdims=False), keepdims=0)
    return g.node("Unsqueeze", [bare, g.ints(last)], kept, lambda x: x[..., None])


def _norm(g: Graph) -> None:
    _normalize(g, g.tensor(lambda d: _columns(d) and _width(d) > 1))


def _normalize(g: Graph, t: str) -> str:
    """LayerNorm or RMSNorm of the rows, spelled at random, or L2 with a bound."""
    dims = g.dims[t]
    rows = (*dims[:-1], 1)
    keep, sums = g.pick([True, False]), g.pick([False, True])

    def mean(x: str) -> str:
        if not sums:
            return _statistic(g, "ReduceMean", x, keep)
        share = g.constant(np.array(1 / _width(dims), np.float32))
        return g.node("Mul", [_statistic(g, "ReduceSum", x, keep), share], rows, np.multiply)

    def square(x: str) -> str:
        return g.node("Mul", [x, x], g.dims[x], np.multiply)

    kind = g.pick(["operator", "deviation", "squares", "rms", "l2"])
    gain = g.numbers(_width(dims), scale=0.2, around=1.0)
    if kind == "operator":
        bias = g.numbers(_width(dims))
        inputs = [t, gain, bias]
        return g.node("LayerNormalization", inputs, dims, _layer_norm, axis=-1, epsilon=_EPSILON)
    centred = t
    if kind in ("deviation", "squares"):
        m = mean(t)
        centred = g.node("Sub", [t, m], dims, np.subtract)
    if kind == "squares":
        variance = g.node("Sub", [mean(square(t)), square(m)], rows, np.subtract)
    else:
        variance = mean(square(centred)) if kind != "l2" else square(_statistic(g, "ReduceL2", t, keep))
    epsilon = g.constant(np.array(_EPSILON, np.float32))
    bounded = g.node(
        "Max" if kind == "l2" else "Add", [variance, epsilon], rows, np.maximum if kind == "l2" else np.add
    )
    root = g.node("Sqrt", [bounded], rows, np.sqrt)
    if g.pick([True, False]):
        y = g.node("Div", [centred, root], dims, np.divide)
    else:
        inverse = g.node("Reciprocal", [root], rows, np.reciprocal)
        y = g.node("Mul", [inverse, centred], dims, np.multiply)
    return g.node("Mul", [y, gain], dims, np.multiply)


def _layer(g: Graph) -> None:
    """A feed-forward layer: norm, projection, bias, activation, projection, residual; norm behind, perhaps; flattened, perhaps."""
    t = g.tensor(lambda d: d[:2] == ("B", "S") and len(d) == 3 and _columns(d) and _width(d) > 1)
    dims = g.dims[t]
    k = _width(dims)
    flat = g.pick([False, True])
    x = g.node("Reshape", [t, g.ints(-1, k)], ("BS", k), lambda v: v.reshape(-1, k)) if flat else t
    x = x if g.pick([False, True]) else _normalize(g, x)
    wide = (*g.dims[x][:-1], 12)
    x = g.node("MatMul", [x, g.numbers(k, 12, scale=k**-0.5)], wide, np.matmul)
    x = g.node("Add", [x, g.numbers(12)], wide, np.add)
    op = g.pick(list(_UNARY))
    x = g.node(op, [x], wide, _UNARY[op])
    x = g.node("MatMul", [x, g.numbers(12, k, scale=12**-0.5)], (*wide[:-1], k), np.matmul)
    if flat:
        shape = g.node("Shape", [t], (3,), lambda v: np.array(v.shape))
        x = g.node("Reshape", [x, shape], dims, lambda v, s: v.reshape(*s))
    x = g.node("Add", [x, t], dims, np.add)
    if g.pick([False, True]):
        _normalize(g, x)


def _layer_norm(x: Array, gain: Array, bias: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + _EPSILON) * gain + bias


def _softmax(g: Graph) -> None:
    t = g.tensor(_columns)

    def softmax(x: Array) -> Array:
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    g.node("Softmax", [t], g.dims[t], softmax, axis=-1)


def _slice(g: Graph) -> None:
    t = g.tensor(lambda d: _columns(d) and _width(d) > 1)
    width = _width(g.dims[t])
    start = width // 2
    bounds = [g.ints(start), g.ints(width), g.ints(len(g.dims[t]) - 1)]
    g.node("Slice", [t, *bounds], (*g.dims[t][:-1], width - start), lambda x: x[..., start:])


def _token(g: Graph) -> None:
    """The first or last position."""
    t = g.tensor(lambda d: len(d) == 3 and d[1] == "S")
    at = g.pick([0, -1])
    bounds = [g.ints(at), g.ints(1 if at == 0 else 2**40), g.ints(1)]
    dims = (g.dims[t][0], 1, g.dims[t][2])
    g.node("Slice", [t, *bounds], dims, lambda x: x[:, :1] if at == 0 else x[:, -1:])


def _concat(g: Graph) -> None:
    t = g.tensor(_columns)
    other = g.tensor(lambda d: _columns(d) and d[:-1] == g.dims[t][:-1], 8)
    dims = (*g.dims[t][:-1], _width(g.dims[t]) + _width(g.dims[other]))
    g.node("Concat", [t, other], dims, lambda a, b: np.concatenate([a, b], -1), axis=-1)


def _flatten(g: Graph) -> None:
    t = g.tensor(lambda d: d[:2] == ("B", "S") and len(d) == 3 and _columns(d))
    n = _width(g.dims[t])
    g.node("Reshape", [t, g.ints(-1, n)], ("BS", n), lambda x: x.reshape(-1, n))


def _transpose(g: Graph) -> None:
    t = g.tensor(lambda d: len(d) == 3)
    perm = g.pick([(0, 2, 1), (1, 0, 2)])
    g.node("Transpose", [t], tuple(g.dims[t][p] for p in perm), lambda x: x.transpose(perm), perm=perm)


def _heads(g: Graph) -> None:
    """The columns split into two heads, and a norm or nothing within them, and joined again."""
    t = g.tensor(lambda d: d[:2] == ("B", "S") and len(d) == 3 and _columns(d) and _width(d) % 4 == 0)
    n = _width(g.dims[t])
    split: Dims = (*g.dims[t][:2], 2, n // 2)
    heads = g.node("Reshape", [t, g.ints(0, 0, 2, n // 2)], split, lambda x: x.reshape(*x.shape[:2], 2, n // 2))
    if g.pick([True, False]):
        gain, bias = g.numbers(n // 2, around=1.0), g.numbers(n // 2)
        heads = g.node("LayerNormalization", [heads, gain, bias], split, _layer_norm, axis=-1, epsilon=_EPSILON)
    if g.pick([True, False]):
        g.node("Reshape", [heads, g.ints(0, 0, n)], g.dims[t], lambda x: x.reshape(*x.shape[:2], n))
        return
    g.node("Transpose", [heads], ("B", 2, "S", n // 2), lambda x: x.transpose(0, 2, 1, 3), perm=[0, 2, 1, 3])


_OPERATIONS = (
    _layer,
    _project,
    _norm,
    _column,
    _binary,
    _unary,
    _reduce,
    _slice,
    _token,
    _concat,
    _flatten,
    _transpose,
    _heads,
    _softmax,
)
