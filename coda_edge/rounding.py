"""What can be said of a quantised model, which turns differences that float32 cannot express into whole quanta.

An activation on the border of two quanta becomes the one or the other by the order of a sum; every later layer sees that, and rounds
otherwise itself. So such a model has no one right output, and onnxruntime differs from itself: with its optimisations, which compute some
quantised operators another way, or with each weight moved by a rounding. The judge is onnxruntime without optimisations, which does operator
by operator what ONNX defines. But which activations lie on a border is chance: where none does, all ways to compute the model agree, while
a wrong scale, zero point, range or rounding shows on every input.

So a candidate must agree with onnxruntime as any other does, on some inputs at least, most of which are small to that end, and elsewhere
differ by no more than onnxruntime differs from itself. If it agrees on too few, that is not enough: 5 % of the output's scale is all that
it may differ by.

A model that puts scores in order (TopK) turns a rounding into another order where scores are as good as equal, and so into another order of
everything behind. An output that onnxruntime itself changes when weights are moved by a rounding is then compared by its values in ascending order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import onnx

#: More inputs for a quantised model: batch and length. In small ones there is less to be on a border.
SMALL_CASES = ((1, 1), (1, 2), (1, 3), (2, 2), (1, 5), (1, 8), (2, 5), (1, 13))

_QUANTISING = frozenset(
    {
        *("QuantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"),
        *("QLinearMatMul", "QLinearConv", "QGemm", "QLinearAdd", "QLinearMul", "QLinearSoftmax", "QLinearSigmoid"),
    }
)
_ORDERING = frozenset({"TopK"})
# How often, and by how much of a weight, weights are moved: float32 rounds by 6e-8, a sum of a thousand products by some 1e-6.
_NUDGES = 3
_NUDGE = 1e-6
# How much more than onnxruntime from itself may we differ; and how many of the cases in which it agrees with itself may we miss.
_MARGIN = 3.0
_LOOSEST = 0.05
_SHARE = 4

#: What each output of one run differs by from the reference.
Errors = Mapping[str, float]


def quantises(model: onnx.ModelProto) -> bool:
    """Whether a node of ``model`` rounds to few values."""
    return any(node.op_type in _QUANTISING for node in model.graph.node)


def orders(model: onnx.ModelProto) -> bool:
    """Whether a node of ``model`` puts values in order."""
    return any(node.op_type in _ORDERING for node in model.graph.node)


def nudged(model: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """``model`` with each float32 weight moved at random by about a rounding, a few times."""
    import onnx

    for seed in range(_NUDGES):
        rng = np.random.default_rng(seed)
        moved = onnx.ModelProto()
        moved.CopyFrom(model)
        for tensor in moved.graph.initializer:
            if tensor.data_type == onnx.TensorProto.FLOAT:
                value = onnx.numpy_helper.to_array(tensor)
                noise = rng.standard_normal(value.shape).astype(np.float32) * np.float32(_NUDGE)
                tensor.CopyFrom(onnx.numpy_helper.from_array(value * (1 + noise), tensor.name))
        yield moved


def share_unequal(ours: npt.NDArray[Any], reference: npt.NDArray[Any]) -> float:
    """How many of the elements differ, of all: what tells for labels, whose distance says nothing. Infinite for another shape."""
    if ours.shape != reference.shape:
        return inf
    return float(np.mean(ours != reference)) if ours.size else 0.0


@dataclass(frozen=True)
class Spread:
    """How far onnxruntime is from itself. ``outputs``: the most that each differs by; ``agreeing``: in how many of the cases none does."""

    outputs: Errors
    agreeing: float

    @staticmethod
    def of(variants: Sequence[Sequence[Errors]], tolerances: Errors) -> Spread:
        """``variants``: for each other way to compute the model, what the outputs differ by in each case."""
        worst = {name: max((c[name] for cases in variants for c in cases), default=0.0) for name in tolerances}
        return Spread(worst, sum(agreeing(cases, tolerances) for cases in variants) / max(len(variants), 1))

    def allowed(self, found: Sequence[Errors], tolerances: Errors) -> dict[str, float]:
        """What each output may differ by, given what the candidate's differ by in each case."""
        enough = agreeing(found, tolerances) >= max(1, ceil(self.agreeing / _SHARE))
        most = inf if enough else _LOOSEST
        return {name: max(t, min(_MARGIN * self.outputs[name], most)) for name, t in tolerances.items()}

    def notes(self, found: Sequence[Errors], tolerances: Errors) -> list[str]:
        """What the candidate's differences amount to, in words; nothing where it agrees in all cases."""
        agree = agreeing(found, tolerances)
        if agree == len(found):
            return []
        worst = {name: max(case[name] for case in found) for name in tolerances}
        name = max(worst, key=lambda n: worst[n])
        return [
            f"quantised model: {agree} of {len(found)} cases agree with onnxruntime, {self.agreeing:.0f} of its own when "
            f"optimised or with weights moved by {_NUDGE:.0e}; where roundings fall otherwise, output '{name}' differs by up to {worst[name]:.1e} of its "
            f"scale, and onnxruntime from itself by {self.outputs[name]:.1e}"
        ]


def agreeing(cases: Sequence[Errors], tolerances: Errors) -> int:
    """In how many cases every output is within its tolerance."""
    return sum(all(case[name] <= t for name, t in tolerances.items()) for case in cases)
