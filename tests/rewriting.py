"""Running passes on small models written as ONNX text, and comparing what comes out with onnxruntime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnx_graphsurgeon as gs
import onnxruntime
from coda_edge.passes import Pass, PassLog
from onnx import numpy_helper

from coda_edge import export, frontend

Array = npt.NDArray[Any]


@dataclass
class Rewritten:
    """A model, its graph after some passes, and the passes' log."""

    model: onnx.ModelProto
    graph: gs.Graph
    log: PassLog

    def ops(self) -> Counter[str]:
        """How often each operator occurs."""
        return Counter(n.op for n in self.graph.nodes)

    def node(self, op: str) -> gs.Node:
        """The only node of operator ``op``."""
        (node,) = [n for n in self.graph.nodes if n.op == op]
        return node

    def outputs(self, feeds: Mapping[str, Array]) -> list[Array]:
        """What the rewritten graph gives in onnxruntime."""
        return run(export.to_model(self.graph), feeds)

    def error(self, feeds: Mapping[str, Array]) -> float:
        """Worst |difference| of the rewritten graph to the model, both in onnxruntime, over the largest |output|."""
        expected = run(self.model, feeds)
        found = self.outputs(feeds)
        return max(
            float(np.abs(a.astype(np.float64) - b).max()) / (float(np.abs(b).max()) or 1.0)
            for a, b in zip(found, expected, strict=True)
        )


def model(
    text: str,
    constants: Mapping[str, Array] | None = None,
    opset: int = 20,
    domains: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """The model whose graph is ``text`` in ONNX's own syntax, with float32 or int64 ``constants`` as initializers.

    ``domains``: versions of other domains than ONNX's own.
    """
    imports = ", ".join(f'"{name}" : {version}' for name, version in {"": opset, **(domains or {})}.items())
    made = onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]>\n{text}")
    for name, value in (constants or {}).items():
        made.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    onnx.checker.check_model(made)
    return made


def rewrite(m: onnx.ModelProto, passes: Sequence[Pass]) -> Rewritten:
    """``m`` in normal form, after ``passes``."""
    graph = frontend.normalize(m, None)
    log = PassLog()
    for p in passes:
        log.rewrites[p.name] = p.run(graph, log)
        frontend.infer(graph)
    return Rewritten(m, graph, log)


def run(m: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """The outputs of ``m`` in onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(m.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(o) for o in session.run(None, dict(feeds))]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> npt.NDArray[np.float32]:
    """Normal float32 numbers from a seed."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)
