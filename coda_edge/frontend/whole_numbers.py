"""Constants that fold to float32 from whole numbers, factors and zero points keep them: that is what is stored (see ``weights``).

Followed, from a constant of an integer type on: Cast, DequantizeLinear (whatever its axis or blocks), Add, Sub, Mul and Div with another
constant, Concat, and all operators that only move or choose elements. What came of it is compared with the float32 numbers that the nodes
compute; only where these are ``(number - zero) · factor`` to the last bit is it kept. So how an exporter writes a dequantisation is of no
concern, and a rule that does not hold loses nothing but room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import ml_dtypes
import numpy as np
import onnx_graphsurgeon as gs

from .. import ir
from ..weights import SMALLEST, WHOLE, FactoredConstant, Weight, quantised

Evaluate: TypeAlias = "Callable[[Sequence[gs.Node], Sequence[gs.Variable]], list[ir.Array]]"

_MOVES = frozenset(
    {
        "Transpose",
        "Reshape",
        "Squeeze",
        "Unsqueeze",
        "Flatten",
        "Slice",
        "Split",
        "Gather",
        "Expand",
        "Tile",
        "Identity",
    }
)
_NARROW = frozenset(np.dtype(t) for t in (ml_dtypes.int2, ml_dtypes.uint2, ml_dtypes.int4, ml_dtypes.uint4))


@dataclass(frozen=True, eq=False)
class _Form:
    """``(numbers - zero) · factor``, arrays that broadcast to the tensor's shape, which is that of ``numbers``."""

    numbers: ir.Array
    zero: ir.Array | None = None
    factor: ir.Array | None = None

    def arranged(self, arrange: Callable[[ir.Array], ir.Array]) -> _Form:
        """All three with their elements moved alike."""
        parts = (self.zero, self.factor)
        return _Form(
            arrange(self.numbers), *(p if p is None else arrange(np.broadcast_to(p, self.numbers.shape)) for p in parts)
        )


class Followed:
    """The forms of what constant ``nodes`` compute. ``evaluate`` gives the values of some tensors that nodes make of constants."""

    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate
        self._forms: dict[int, _Form | None] = {}

    def weight(self, tensor: gs.Variable, value: ir.Array) -> Weight | None:
        """How ``tensor`` is stored, whose value is float32, if it comes of whole numbers."""
        if value.dtype != np.float32 or value.size < SMALLEST:
            return None
        form = self._form(tensor)
        if form is None or form.numbers.shape != value.shape:
            return None
        return quantised(value, form.numbers, form.zero, form.factor)

    def _form(self, tensor: ir.Tensor) -> _Form | None:
        if id(tensor) not in self._forms:
            node = ir.producer(tensor)
            if isinstance(tensor, gs.Constant):
                self._forms[id(tensor)] = _given(tensor)
            else:
                rule = None if node is None or node.domain else _RULES.get(node.op)
                self._forms[id(tensor)] = None if node is None or rule is None else rule(self, node, tensor)
        return self._forms[id(tensor)]

    def _value(self, tensor: ir.Tensor) -> ir.Array:
        """The value of a tensor that constants alone determine."""
        if isinstance(tensor, gs.Constant):
            return np.asarray(tensor.values)
        return self._evaluate(_ancestors(tensor), [tensor])[0]

    def _cast(self, node: gs.Node, out: ir.Tensor) -> _Form | None:
        return self._form(node.inputs[0])

    def _dequantised(self, node: gs.Node, out: ir.Tensor) -> _Form | None:
        form = self._form(node.inputs[0])
        if form is None or form.zero is not None or form.factor is not None:
            return None
        dims = form.numbers.shape
        axis = int(node.attrs.get("axis", 1)) % max(len(dims), 1)
        size = int(node.attrs.get("block_size", 0))
        scale, *zero = (_along(self._value(t), dims, axis, size) for t in node.inputs[1:] if t.name)
        return _Form(form.numbers, zero[0] if zero else None, scale)

    def _shifted(self, node: gs.Node, out: ir.Tensor) -> _Form | None:
        """``x - z``, ``x + z``: before any factor."""
        form, other = self._operands(node)
        if form is None or other is None or form.factor is not None:
            return None
        if node.op == "Add":
            other = -other
        elif self._form(node.inputs[0]) is not form:
            return None
        return _wide(replace(form, zero=other if form.zero is None else form.zero + other), other)

    def _scaled(self, node: gs.Node, out: ir.Tensor) -> _Form | None:
        form, other = self._operands(node)
        if form is None or other is None:
            return None
        if node.op == "Div":
            if self._form(node.inputs[0]) is not form:
                return None
            with np.errstate(all="ignore"):
                other = np.float32(1) / other
        return _wide(replace(form, factor=other if form.factor is None else form.factor * other), other)

    def _operands(self, node: gs.Node) -> tuple[_Form | None, ir.Array | None]:
        """The operand of more elements that has a form, and the value of the other one."""
        sides = list(node.inputs)
        found = [i for i, t in enumerate(sides) if self._form(t) is not None]
        if not found:
            return None, None
        own = max(found, key=lambda i: self._value(sides[i]).size if len(found) > 1 else 0)
        other = self._value(sides[1 - own])
        return self._form(sides[own]), other.astype(np.float32)

    def _joined(self, node: gs.Node, out: ir.Tensor) -> _Form | None:
        forms = [self._form(t) for t in node.inputs]
        known = [f for f in forms if f is not None]
        if len(known) < len(forms):
            return None
        axis = int(node.attrs["axis"])
        numbers = np.concatenate([f.numbers.astype(np.int64) for f in known], axis)
        parts: list[ir.Array | None] = []
        for default, given in ((0.0, [f.zero for f in known]), (1.0, [f.factor for f in known])):
            if all(p is None for p in given):
                parts.append(None)
                continue
            whole = [
                np.broadcast_to(np.float32(default) if p is None else p, f.numbers.shape)
                for p, f in zip(given, known, strict=True)
            ]
            parts.append(np.concatenate(whole, axis))
        return _Form(numbers, *parts)

    def _moved(self, node: gs.Node, out: ir.Tensor) -> _Form | None:
        form = self._form(node.inputs[0])
        if form is None:
            return None
        # Where each element comes from: what the operator makes of the elements' numbers.
        dims = form.numbers.shape
        places = np.arange(form.numbers.size, dtype=np.int64).reshape(dims)
        inputs = [gs.Constant("places", places)]
        inputs += [
            t if not t.name else gs.Constant(f"operand{i}", self._value(t)) for i, t in enumerate(node.inputs[1:])
        ]
        outputs = [gs.Variable(f"moved{i}") for i in range(len(node.outputs))]
        copy = gs.Node(node.op, "moved", dict(node.attrs), inputs, outputs)
        (moved,) = self._evaluate([copy], [outputs[next(i for i, t in enumerate(node.outputs) if t is out)]])
        return form.arranged(lambda values: values.reshape(-1)[moved])


def _given(tensor: gs.Constant) -> _Form | None:
    """The form of a constant."""
    if isinstance(tensor, FactoredConstant):
        weight = tensor.weight
        if not weight.is_whole or weight.scale is not None or weight.offset is not None:
            return None
        dims = weight.stored.shape
        zero, factor = (b if b is None else b.spread(dims) for b in (weight.zero, weight.quantum))
        return _Form(weight.stored, zero, factor)
    values = np.asarray(tensor.values)
    return _Form(values) if values.dtype.kind in "iu" or values.dtype in (*WHOLE, *_NARROW) else None


def _along(values: ir.Array, dims: tuple[int, ...], axis: int, size: int) -> ir.Array:
    """A scale or zero point of DequantizeLinear so that it broadcasts: one number, a vector along ``axis``, or blocks of ``size``."""
    values = values.astype(np.float32)
    if size:
        return values.take(np.arange(dims[axis]) // size, axis)
    return values.reshape([-1 if i == axis else 1 for i in range(len(dims))]) if values.ndim else values


def _wide(form: _Form, other: ir.Array) -> _Form:
    """``form`` in the shape that it has with ``other``."""
    dims = np.broadcast_shapes(form.numbers.shape, other.shape)
    return form if dims == form.numbers.shape else replace(form, numbers=np.broadcast_to(form.numbers, dims))


def _ancestors(tensor: gs.Variable) -> list[gs.Node]:
    """The nodes that make ``tensor``, in order."""
    order: dict[int, gs.Node] = {}
    stack = [(ir.producer(tensor), False)]
    while stack:
        node, done = stack.pop()
        if node is None or id(node) in order:
            continue
        if done:
            order[id(node)] = node
            continue
        stack.append((node, True))
        stack.extend((ir.producer(t), False) for t in node.inputs)
    return list(order.values())


_RULES: dict[str, Callable[[Followed, gs.Node, ir.Tensor], _Form | None]] = {
    "Cast": Followed._cast,
    "DequantizeLinear": Followed._dequantised,
    "Add": Followed._shifted,
    "Sub": Followed._shifted,
    "Mul": Followed._scaled,
    "Div": Followed._scaled,
    "Concat": Followed._joined,
    **dict.fromkeys(_MOVES, Followed._moved),
}
