"""What becomes of an attention's probabilities before they meet the values, in a quantised model: scaled, rounded, limited.

Rule: operators with numbers alone, one after another, each the only reader of what it reads, one of them a Round. All together leave 0
as it is, so that keys with no probability add nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge.epilogue.program import EpilogueProgram
from coda_edge.ir import GraphEditor, Tensor, constant_value, same_shape, scalar_value, shape, sole_consumer

from .region import Region, score_kind

_STEPS: dict[str, Callable[..., float]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Min": np.minimum,
    "Max": np.maximum,
    "Round": np.round,
}


def rounding_steps(graph: gs.Graph, p: Tensor) -> list[gs.Node]:
    """The steps that ``p`` goes through; none unless they are as the rule says."""
    steps: list[gs.Node] = []
    zero = 0.0
    while (user := sole_consumer(graph, p)) is not None and user.op in _STEPS:
        given = [zero if t is p else scalar_value(t) for t in user.inputs]
        if any(n is None for n in given) or not same_shape(shape(user.outputs[0]), shape(p)):
            break
        zero = float(_STEPS[user.op](*given))
        steps.append(user)
        p = user.outputs[0]
    return steps if zero == 0.0 and any(s.op == "Round" for s in steps) else []


def rounding_program(editor: GraphEditor, steps: list[gs.Node]) -> EpilogueProgram:
    """``steps`` as a program over a tile of probabilities."""
    p = next(t for t in steps[0].inputs if constant_value(t) is None)
    region = Region(editor, p, shape(p), score_kind, inline=False)
    for step in steps:
        region.add(step)
    region.builder.output("p", region.value(steps[-1].outputs[0]))
    return region.build()[0]
