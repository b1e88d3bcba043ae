"""Models that draw random numbers: they are judged with the numbers that our sessions draw, put in as constants.

An element of a random tensor is a function of its place, its operator and the number of the run (``lower.ops_random``). So NumPy makes
the same, whatever size data gives the tensor: the first so many of one long vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import onnx

    from .session import Session

#: What sessions are given before each run that is compared.
SEED = 1
# Elements of a random tensor that are made.
_LONGEST = 1 << 20
_LIKE = frozenset({"RandomNormalLike", "RandomUniformLike", "Bernoulli"})
_FREE = frozenset({"RandomNormal", "RandomUniform"})


def draws(model: onnx.ModelProto) -> bool:
    """Whether a node of ``model`` makes random numbers."""
    return any(node.op_type in _LIKE | _FREE and not node.domain for node in model.graph.node)


def seeded(session: Session) -> Callable[[Sequence[str], Mapping[str, npt.NDArray[Any]]], list[npt.NDArray[Any]]]:
    """``session.run``, which draws the same each time: what ``with_noise`` puts in."""

    def run(names: Sequence[str], feeds: Mapping[str, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        session.seed(SEED)
        return session.run(names, feeds)

    return run


def with_noise(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` (from ``frontend.load``) with the numbers that a session draws in its first run after ``SEED``."""
    import onnx

    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:]
    for node in model.graph.node:
        drawing = node.op_type in _LIKE | _FREE and not node.domain
        made.graph.node.extend(_drawn(node, made.graph) if drawing else [node])
    return made


def _drawn(node: onnx.NodeProto, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Nodes that make what ``node`` would, from a vector that is added to ``graph``."""
    from onnx import TensorProto, helper, numpy_helper

    from .lower.ops_random import reference

    attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    out, op = node.output[0], node.op_type
    name, drawn = (f"{out}.RandomUniformLike", "RandomUniformLike") if op == "Bernoulli" else (out, op)
    count = int(np.prod(attrs["shape"])) if op in _FREE else _LONGEST
    values = reference(drawn, name, attrs, _first_number(SEED), count).astype(np.float32)
    part = {key: f"{out}.{key}" for key in ("drawn", "zero", "shape", "count", "flat", "all", "limit", "less", "like")}

    def constant(key: str, value: npt.NDArray[Any]) -> None:
        graph.initializer.append(numpy_helper.from_array(value, part[key]))

    def make(kind: str, inputs: Sequence[str], output: str, **options: Any) -> onnx.NodeProto:
        return helper.make_node(kind, list(inputs), [output], **options)

    constant("drawn", values)
    to = attrs.get("dtype", 0)
    if op in _FREE:
        constant("shape", np.asarray(attrs["shape"], np.int64))
        whole = [make("Reshape", [part["drawn"], part["shape"]], part["all"])]
        return [*whole, make("Cast", [part["all"]], out, to=to or TensorProto.FLOAT)]
    source = node.input[0]
    constant("zero", np.zeros(1, np.int64))
    nodes = [
        make("Shape", [source], part["shape"]),
        make("ReduceProd", [part["shape"]], part["count"]),
        make("Slice", [part["drawn"], part["zero"], part["count"]], part["flat"]),
        make("Reshape", [part["flat"], part["shape"]], part["all"]),
    ]
    result = part["all"]
    if op == "Bernoulli":
        nodes.append(make("Cast", [source], part["limit"], to=TensorProto.FLOAT))
        nodes.append(make("Less", [part["all"], part["limit"]], part["less"]))
        result = part["less"]
    return [*nodes, make("Cast", [result], out, to=to) if to else make("CastLike", [result, source], out)]


def _first_number(seed: int) -> int:
    """What a session draws for its first run after it was given ``seed`` (SplitMix64)."""
    x = (seed + 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift)) * factor % 2**64
    return x ^ (x >> 31)
