"""Tensors of a graph as they are on made-up inputs: what a rewrite asks for whose accuracy depends on the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs
from onnx import helper

from . import export
from .ir import Tensor
from .passes import Measure
from .verify import ort_session, run_session

Feeds = Mapping[str, npt.NDArray[Any]]


def measure_on(cases: Sequence[Feeds]) -> Measure:
    """What gives the values of tensors of a graph for each of ``cases``, computed by onnxruntime."""

    def measure(graph: gs.Graph, tensors: Sequence[Tensor]) -> list[list[npt.NDArray[Any]]]:
        model = export.to_model(graph)
        given, returned = ({v.name for v in values} for values in (model.graph.input, model.graph.output))
        names = list(dict.fromkeys(t.name for t in tensors if t.name not in given))
        model.graph.output.extend(helper.make_empty_tensor_value_info(n) for n in names if n not in returned)
        session = ort_session(model, lean=True)
        del model
        results = []
        for feeds in cases:
            values = dict(feeds) | dict(zip(names, run_session(session, names, feeds), strict=True))
            results.append([np.asarray(values[t.name]) for t in tensors])
        return results

    return measure
