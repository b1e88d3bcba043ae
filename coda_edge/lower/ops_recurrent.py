"""LSTM, GRU and RNN (opset 14, layout 0): one item for each direction and sequence, which goes through its time steps.

A step computes the rows of each gate, ``W x + R h``, into scratch, then the units' new states. Sequences may have lengths of
their own: behind its end a sequence's outputs are 0 and its state stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs
from tvm import tirx

from .. import ir
from ..errors import UnsupportedOperator
from . import intrinsics
from .emit import SUM, Emitter, Expr, int64
from .kernel import KernelCall
from .ops_math import maximum, minimum
from .pointwise import attempt, product
from .registry import Context, View, constant, dtype_name, kernel, leaf

Function = Callable[[Expr], Expr]


def _number(value: float) -> Expr:
    return constant(value, "float32")


_ACTIVATIONS: dict[str, Function] = {
    "sigmoid": intrinsics.sigmoid,
    "tanh": intrinsics.tanh,
    "relu": lambda x: maximum(x, _number(0)),
    "hardsigmoid": lambda x: maximum(_number(0), minimum(_number(1), x * _number(0.2) + _number(0.5))),
    "softsign": lambda x: x / (_number(1) + tirx.abs(x)),
}
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_DEFAULTS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}


def _activations(node: gs.Node, directions: int) -> list[Function]:
    names = list(node.attrs.get("activations", None) or _DEFAULTS[node.op] * directions)
    count = len(_DEFAULTS[node.op])
    first = [n.lower() for n in names[:count]]
    same = all([n.lower() for n in names[i : i + count]] == first for i in range(0, len(names), count))
    scaled = any(node.attrs.get(a) for a in ("activation_alpha", "activation_beta"))
    if not same or any(n not in _ACTIVATIONS for n in first) or scaled:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedOperator(
            node.op,
            node.name,
            f"its activations are {names}; expected, for both directions alike, {known}, without alpha and beta",
        )
    clip = node.attrs.get("clip", None)
    functions = [_ACTIVATIONS[n] for n in first]
    if clip is None:
        return functions
    limit = float(clip)

    def clipped(function: Function) -> Function:
        return lambda x: function(maximum(minimum(x, _number(limit)), _number(-limit)))

    # What a gate is made of is clipped, as in onnxruntime; not an LSTM's cell, of which its third function makes the state.
    return [f if i == 2 else clipped(f) for i, f in enumerate(functions)]


@dataclass
class _Step:
    """One step of one sequence: where it is in the operands, and its scratch."""

    emit: Emitter
    views: dict[str, View]
    direction: Expr
    hidden: int
    scratch: tirx.Buffer

    def bias(self, row: Expr) -> Expr:
        """A bias: the first half is of the inputs, the second of the state; 0 without one."""
        return self.views["B"].at([self.direction, row]) if "B" in self.views else _number(0)

    def scratch_at(self, part: int, unit: Expr) -> Expr:
        """Element ``unit`` of the ``part``-th vector of scratch."""
        return tirx.BufferLoad(self.scratch, [int64(part * self.hidden) + unit])

    def keep(self, part: int, unit: Expr, value: Expr) -> None:
        """Writes it."""
        self.emit.store(self.scratch, int64(part * self.hidden) + unit, value)

    def dot(self, matrix: str, row: Expr, width: Expr, vector: Callable[[Expr], Expr]) -> Expr:
        """A row of W or R times a vector."""
        with self.emit.reduction(SUM, "float32") as total:
            self.emit.span(
                width,
                lambda at, lane, _: total.add(self.views[matrix].at([self.direction, row, at]) * vector(at), lane),
            )
        return total.result


@kernel("LSTM", "GRU", "RNN")
def lower_recurrent(node: gs.Node, context: Context) -> list[KernelCall]:
    """All three, float32: gates in ONNX's order (LSTM: i o f c; GRU: z r h)."""
    names = ("X", "W", "R", "B", "lengths", "h0", "c0", "P")
    given = {n: t for n, t in zip(names, node.inputs, strict=False) if t.name}
    time, batch, inputs = ir.shape(given["X"])
    directions, hidden = ir.shape(given["R"])[0], ir.shape(given["R"])[2]
    if not isinstance(hidden, int) or not isinstance(directions, int) or dtype_name(given["X"]) != "float32":
        raise UnsupportedOperator(node.op, node.name, "it must be of float32, its hidden size fixed")
    gates = _GATES[node.op]
    functions = _activations(node, directions)
    backward = str(node.attrs.get("direction", "forward"))
    outputs = [t.name if t.name else None for t in node.outputs] + [None] * 3
    # Of scratch: the gates' rows, the state, the cell (or what a gate made of the state).
    state, cell = gates, gates + 1

    def build(emit: Emitter) -> KernelCall:
        views = {n: leaf(t, emit, context) for n, t in given.items()}
        scratch = emit.scratch("float32")
        results = [None if name is None else emit.buffer(name, "float32") for name in outputs]
        units = emit.size(hidden)
        with emit.items() as item:
            direction, sequence = emit.divmod(item, emit.size(batch))
            step = _Step(emit, views, direction, hidden, scratch)
            with emit.loop(units) as unit:
                for part, start in ((state, "h0"), (cell, "c0")):
                    first = views[start].at([direction, sequence, unit]) if start in views else _number(0)
                    step.keep(part, unit, first)
            whole = emit.size(time)
            end = whole
            if "lengths" in views:
                end = emit.bind(tirx.Cast("int64", views["lengths"].at([sequence])))
                emit.require(tirx.all(end >= int64(0), end <= whole))
            with emit.loop(end) as count:
                turned = end - int64(1) - count
                at = {"forward": count, "reverse": turned}.get(
                    backward, tirx.Select(direction.equal(int64(1)), turned, count)
                )
                at = emit.bind(at)
                _STEPS[node.op](node, step, functions, emit.size(inputs), lambda k: views["X"].at([at, sequence, k]))
                if results[0] is not None:
                    with emit.loop(units) as unit:
                        place = emit.ravel([at, direction, sequence, unit], (time, directions, batch, hidden))
                        emit.store(results[0], place, step.scratch_at(state, unit))
            if results[0] is not None and "lengths" in views:
                with emit.loop(emit.bind(whole - end)) as rest, emit.loop(units) as unit:
                    place = emit.ravel([end + rest, direction, sequence, unit], (time, directions, batch, hidden))
                    emit.store(results[0], place, _number(0))
            for result, part in zip(results[1:], (state, cell), strict=False):
                if result is not None:
                    with emit.loop(units) as unit:
                        emit.store(result, item * units + unit, step.scratch_at(part, unit))
        return emit.call(
            node.op.lower(),
            product([directions, batch]),
            [n for n in outputs if n],
            scratch=(gates + 2) * hidden * 4,
            flops=product([2 * gates * hidden, directions, batch, time, inputs + hidden]),
            source=(node.name,),
        )

    return [attempt(build, context.lanes)]


def _rows(step: _Step, first: int, count: int, inputs: Expr, x: Function) -> None:
    """The rows of ``count`` gates: ``W x + R h``, biases included."""
    emit, hidden = step.emit, step.hidden
    state = int64(step.hidden) * int64(_state(step))
    with emit.loop(int64(count * hidden)) as at:
        row = int64(first * hidden) + at
        total = step.dot("W", row, inputs, x)
        total = total + step.dot("R", row, int64(hidden), lambda k: tirx.BufferLoad(step.scratch, [state + k]))
        biases = step.bias(row) + step.bias(int64(_gates(step) * hidden) + row)
        emit.store(step.scratch, row, total + biases)


def _gates(step: _Step) -> int:
    rows = step.views["R"].shape[1]
    assert isinstance(rows, int)
    return rows // step.hidden


_state = _gates  # the state lies behind the gates


def _lstm(node: gs.Node, step: _Step, functions: Sequence[Function], inputs: Expr, x: Function) -> None:
    emit, (f, g, h) = step.emit, functions
    _rows(step, 0, 4, inputs, x)
    with emit.loop(int64(step.hidden)) as unit:

        def gate(index: int, peephole: int | None, cell: Expr) -> Expr:
            value = step.scratch_at(index, unit)
            if "P" in step.views and peephole is not None:
                weight = step.views["P"].at([step.direction, int64(peephole * step.hidden) + unit])
                value = value + weight * cell
            return value

        before = emit.bind(step.scratch_at(5, unit))
        i = emit.bind(f(gate(0, 0, before)))
        kept = _number(1) - i if node.attrs.get("input_forget", 0) else emit.bind(f(gate(2, 2, before)))
        cell = emit.bind(kept * before + i * emit.bind(g(gate(3, None, before))))
        step.keep(5, unit, cell)
        step.keep(4, unit, emit.bind(f(gate(1, 1, cell))) * emit.bind(h(cell)))


def _gru(node: gs.Node, step: _Step, functions: Sequence[Function], inputs: Expr, x: Function) -> None:
    emit, hidden, (f, g) = step.emit, step.hidden, functions
    _rows(step, 0, 2, inputs, x)
    late = bool(node.attrs.get("linear_before_reset", 0))
    with emit.loop(int64(hidden)) as unit:
        step.keep(1, unit, emit.bind(f(step.scratch_at(1, unit))))
        reset = step.scratch_at(3, unit) if late else step.scratch_at(1, unit) * step.scratch_at(3, unit)
        step.keep(4, unit, reset)
    with emit.loop(int64(hidden)) as unit:
        row = int64(2 * hidden) + unit
        from_input = step.dot("W", row, inputs, x) + step.bias(row)
        from_state = step.dot("R", row, int64(hidden), lambda k: step.scratch_at(4, k)) + step.bias(
            int64(3 * hidden) + row
        )
        step.keep(2, unit, from_input + (step.scratch_at(1, unit) * from_state if late else from_state))
    with emit.loop(int64(hidden)) as unit:
        z = emit.bind(f(step.scratch_at(0, unit)))
        made = emit.bind(g(step.scratch_at(2, unit)))
        step.keep(3, unit, (_number(1) - z) * made + z * step.scratch_at(3, unit))


def _rnn(node: gs.Node, step: _Step, functions: Sequence[Function], inputs: Expr, x: Function) -> None:
    _rows(step, 0, 1, inputs, x)
    with step.emit.loop(int64(step.hidden)) as unit:
        step.keep(1, unit, functions[0](step.scratch_at(0, unit)))


_STEPS = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}
