"""From the ``coda`` nodes of a graph to operators that stand alone: every size is an expression of the operator's input dimensions.

An operator knows nothing of the graph around it, so nodes that do the same share one. What a node needs beyond its
inputs' shapes, a size that only another node's inputs show, say, leaves it to its function body.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs
import sympy

from .. import ir
from ..bundle.format import DTYPES, MAX_RANK
from ..bundle.plan import ExprTable
from ..errors import CodaError
from ..frontend import Constraint, infer
from ..ir import Array
from ..lower import KERNELS
from ..lower.kernel import KernelCall, KernelSource, Packed, Workspace
from ..lower.registry import Context
from ..schedule import Schedules
from ..symbolic import Dim, simplify, symbol
from ..targets import Target
from .constants import Layout, part_of

# The interpreter's limits; operators.h has the same.
MAX_TENSORS = 48
MAX_OPERANDS = 64
MAX_INTS = 96
MAX_SIZES = 512
_MAX_EMBEDDED = 1 << 20


# What a kernel reads of a node: an input, or a part of one that is stored otherwise.
_Place: TypeAlias = "int | tuple[int, str]"


class _Unsuitable(Exception):
    """Why a node keeps its function body."""


class _Unknown(_Unsuitable):
    """Sizes, by the names of their symbols, that the operator's inputs do not tell."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"size {', '.join(names)} follows neither from its inputs' shapes nor from those of the model's"
        )
        self.names = names


@dataclass(frozen=True)
class Tensor:
    """An input or output: ``dims`` are entries of the size table."""

    name: str
    dtype: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Operand:
    """A kernel's buffer: ``input``, ``output``, ``workspace``, ``constant`` or ``weight`` of that number."""

    origin: str
    index: int


@dataclass(frozen=True)
class Step:
    """One kernel call; ``ints``, ``items`` and ``scratch`` are entries of the size table."""

    name: str
    kernel: str
    finish: str | None
    operands: tuple[Operand, ...]
    ints: tuple[int, ...]
    items: int
    scratch: int
    grain: int


@dataclass(frozen=True)
class Required:
    """What sizes must satisfy: entries of the size table, compared."""

    equal: bool
    left: int
    right: int
    text: str


@dataclass(eq=False)
class Operator:
    """One custom operator. ``symbols``: for each symbol of ``sizes``, the input and axis that it is.

    ``constants`` are its own, ``weights`` those that the library has for each node: how many bytes each has.
    """

    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    sizes: ExprTable = field(default_factory=ExprTable)
    workspaces: tuple[int, ...] = ()
    constants: tuple[bytes, ...] = ()
    weights: tuple[int, ...] = ()
    steps: tuple[Step, ...] = ()
    required: tuple[Required, ...] = ()

    @property
    def symbols(self) -> list[tuple[int, int]]:
        """Input and axis of each symbol."""
        return [_place(name) for name in self.sizes.symbols]

    def key(self) -> str:
        """Eight hex digits of all that the operator does; the names of its tensors are not part of that."""
        tensors = [[(t.dtype, t.dims) for t in side] for side in (self.inputs, self.outputs)]
        sizes = [(int(e.op), e.a, e.b) for e in self.sizes.entries]
        rest = (self.workspaces, self.constants, self.weights, self.steps, self.required)
        text = repr((tensors, sizes, self.sizes.symbols, rest))
        return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Call:
    """How a node calls its operator: with ``sized``, those of its inputs that are ``kept``, then the parts of ``layouts``, by input.

    ``sized``: inputs of the model, of which only sizes are read. ``weights``: what the library holds for the node.
    """

    operator: Operator
    sized: tuple[str, ...]
    kept: tuple[int, ...]
    layouts: dict[int, Layout]
    weights: tuple[Array, ...]


@dataclass(frozen=True)
class Claims:
    """``calls``: by node name, what it becomes. ``left``: by node name, why it stays a function. ``kernels``: to build."""

    calls: dict[str, Call]
    left: dict[str, str]
    kernels: list[KernelSource]

    @property
    def operators(self) -> dict[str, Operator]:
        """By node name, its operator."""
        return {name: call.operator for name, call in self.calls.items()}


def claim(
    graph: gs.Graph,
    target: Target,
    constraints: Sequence[Constraint] = (),
    schedules: Schedules | None = None,
    in_library: bool = False,
) -> Claims:
    """The operators of ``graph``, in normal form and after the passes. Node names must be distinct.

    ``constraints`` are asked for by the first operator that knows the sizes they are about. ``schedules``: where measured ones are
    looked up. ``in_library``: the library has the constants, which are no inputs then.
    """
    info = infer(graph)
    pending = [*constraints, *(c for c in info.constraints if c.relation != "=")]
    claims = Claims({}, {}, [])
    kernels: dict[str, KernelSource] = {}
    known = Schedules.packaged() if schedules is None else schedules
    for node in ir.in_order(graph):
        if node.domain != ir.DOMAIN:
            continue
        try:
            call, sources, pending = _make(graph, node, target, info.values, known, in_library, pending)
        except (_Unsuitable, CodaError) as e:
            claims.left[node.name] = str(e)
            continue
        claims.calls[node.name] = call
        for source in sources:
            kernels.setdefault(source.symbol, source)
    claims.kernels.extend(kernels.values())
    return claims


_Made: TypeAlias = "tuple[Call, list[KernelSource], list[Constraint]]"


def _make(
    graph: gs.Graph,
    node: gs.Node,
    target: Target,
    values: Mapping[str, npt.NDArray[Any]],
    schedules: Schedules,
    in_library: bool,
    constraints: Sequence[Constraint],
) -> _Made:
    """What ``_Maker.make`` makes of ``node``, which is given inputs of the model for the sizes that its own do not tell."""
    sized: list[gs.Variable] = []
    while True:
        try:
            return _Maker(node, target, values, schedules, in_library, sized).make(constraints)
        except _Unknown as error:
            wanted = {symbol(name) for name in error.names}
            own = {id(t) for t in (*node.inputs, *sized)}
            more = next((t for t in graph.inputs if id(t) not in own and wanted.intersection(ir.shape(t))), None)
            if more is None:
                raise
            sized.append(more)


class _Maker:
    """One node's operator. Its inputs are those for sizes, the node's variables, plain constants, and parts of constants in the kernels' layout."""

    def __init__(
        self,
        node: gs.Node,
        target: Target,
        values: Mapping[str, npt.NDArray[Any]],
        schedules: Schedules,
        in_library: bool,
        sized: Sequence[gs.Variable] = (),
    ) -> None:
        self._node = node
        self._sized = sized
        self._in_library = in_library
        self._sizes = ExprTable()
        self._variables = [i for i, t in enumerate(node.inputs) if not isinstance(t, gs.Constant)]
        self._bound = _bindings([ir.shape(t) for t in (*sized, *(node.inputs[i] for i in self._variables))])
        self._inputs = {t.name: i for i, t in reversed(list(enumerate(node.inputs)))}
        self._outputs = {t.name: i for i, t in enumerate(node.outputs)}
        known = {n: v for n, v in values.items() if n in self._inputs and self._knows(v)}
        self._context = Context(target, known, narrow=True, schedules=schedules)
        self._workspaces: list[Workspace] = []
        self._constants: list[bytes] = []
        self._layouts: dict[int, Layout] = {}
        self._plain: set[int] = set()

    def make(self, constraints: Sequence[Constraint]) -> _Made:
        """The call of the operator, its kernels, and the constraints that it does not ask for."""
        node = self._node
        if not all(t.name for t in (*node.inputs, *node.outputs)):
            raise _Unsuitable("an input or output is left out")
        calls = KERNELS[node.op](node, self._context)
        found = [[self._operand(b) for b in call.buffers] for call in calls]
        kept, places, inputs, weights = self._places()
        outputs = tuple(self._tensor(t.name, t.dtype, ir.shape(t)) for t in node.outputs)
        steps = tuple(
            self._step(call, tuple(o if isinstance(o, Operand) else places[o] for o in operands))
            for call, operands in zip(calls, found, strict=True)
        )
        workspaces = tuple(self._size(w.size) for w in self._workspaces)
        mine = [c for c in constraints if self._free(c.left, c.right) <= self._bound.keys()]
        required = tuple(r for r in map(self._required, mine) if r is not None)
        sizes = tuple(w.nbytes for w in weights)
        operator = Operator(inputs, outputs, self._sizes, workspaces, tuple(self._constants), sizes, steps, required)
        _check_limits(operator)
        sources = [s for call in calls for s in (call.kernel, call.finish) if s is not None]
        layouts = {} if self._in_library else self._layouts
        return (
            Call(operator, tuple(t.name for t in self._sized), kept, layouts, weights),
            sources,
            [c for c in constraints if c not in mine],
        )

    def _places(self) -> tuple[tuple[int, ...], dict[_Place, Operand], tuple[Tensor, ...], tuple[Array, ...]]:
        """The node's inputs that are kept, where everything that kernels read of it is, the operator's inputs, and the library's weights."""
        node = self._node
        constants = [i for i, t in enumerate(node.inputs) if isinstance(t, gs.Constant) and i not in self._layouts]
        kept = [*self._variables, *(() if self._in_library else sorted({*constants, *self._plain}))]
        given = (*self._sized, *(node.inputs[i] for i in kept))
        inputs = [self._tensor(t.name, t.dtype, ir.shape(t)) for t in given]
        places: dict[_Place, Operand] = {i: Operand("input", at + len(self._sized)) for at, i in enumerate(kept)}
        weights: list[Array] = []
        if self._in_library:
            for i in sorted(self._plain - places.keys()):
                places[i] = Operand("weight", len(weights))
                weights.append(np.ascontiguousarray(node.inputs[i].values))
        for i, layout in self._layouts.items():
            for part, data in layout.parts.items():
                if self._in_library:
                    places[i, part] = Operand("weight", len(weights))
                    weights.append(data)
                    continue
                places[i, part] = Operand("input", len(inputs))
                name = ".".join(filter(None, (node.inputs[i].name, part)))
                inputs.append(self._tensor(name, data.dtype, data.shape))
        return tuple(kept), places, tuple(inputs), tuple(weights)

    def _knows(self, values: npt.NDArray[Any]) -> bool:
        return self._free(*values.reshape(-1)) <= self._bound.keys()

    @staticmethod
    def _free(*dims: Any) -> set[sympy.Symbol]:
        return {s for d in dims if isinstance(d, sympy.Expr) for s in d.free_symbols}

    def _size(self, dim: Dim) -> int:
        if isinstance(dim, int):
            return self._sizes.add(dim)
        unknown = sorted(s.name for s in self._free(dim) - self._bound.keys())
        if unknown:
            raise _Unknown(unknown)
        return self._sizes.add(simplify(dim.subs(self._bound, simultaneous=True)))

    def _tensor(self, name: str, dtype: npt.DTypeLike, dims: Sequence[Dim]) -> Tensor:
        spelled = np.dtype(dtype).name
        if spelled not in DTYPES or len(dims) > MAX_RANK:
            raise _Unsuitable(f"'{name}' is {spelled} of rank {len(dims)}, which kernels do not take")
        return Tensor(name, spelled, tuple(self._size(d) for d in dims))

    def _step(self, call: KernelCall, operands: tuple[Operand, ...]) -> Step:
        return Step(
            name=call.kernel.symbol,
            kernel=call.kernel.symbol,
            finish=call.finish.symbol if call.finish is not None else None,
            operands=operands,
            ints=tuple(self._size(d) for d in call.ints),
            items=self._size(call.items),
            scratch=self._size(call.scratch),
            grain=call.grain,
        )

    def _operand(self, buffer: str | Packed | Workspace) -> Operand | _Place:
        if isinstance(buffer, Workspace):
            self._workspaces.append(buffer)
            return Operand("workspace", len(self._workspaces) - 1)
        if isinstance(buffer, Packed):
            return self._constant(buffer)
        if buffer in self._outputs:
            return Operand("output", self._outputs[buffer])
        if buffer not in self._inputs:
            raise _Unsuitable(f"a kernel reads '{buffer}', which is neither its input nor its output")
        return self._input(self._inputs[buffer])

    def _input(self, position: int) -> _Place:
        if isinstance(self._node.inputs[position], gs.Constant):
            self._plain.add(position)
        return position

    def _constant(self, packed: Packed) -> Operand | _Place:
        """A constant of an input, as that is or in a layout of its own, or else small enough for the library to hold."""
        data = np.ascontiguousarray(packed.data)
        found = part_of(packed, self._node)
        position = found[0] if found is not None else self._inputs.get(packed.name)
        if position is not None and _same(self._node.inputs[position], data):
            return self._input(position)
        if found is not None:
            position, part = found
            new = Layout(self._node.inputs[position], {}, packed.columns if not part else ())
            layout = self._layouts.setdefault(position, new)
            if np.array_equal(layout.parts.setdefault(part, data).view(np.uint8), data.view(np.uint8)):
                return position, part
        if data.nbytes > _MAX_EMBEDDED:
            raise _Unsuitable(f"constant '{packed.name}' of {data.nbytes} bytes is in a layout of its own")
        self._constants.append(data.tobytes())
        return Operand("constant", len(self._constants) - 1)

    def _required(self, constraint: Constraint) -> Required | None:
        text = f"{constraint.reason} (node '{constraint.node}')"
        if constraint.relation == "divisible by":
            rest = simplify(sympy.Mod(constraint.left, constraint.right))
            return None if rest == 0 else Required(True, self._size(rest), self._size(0), text)
        if (sympy.sympify(constraint.right) - sympy.sympify(constraint.left)).is_nonnegative:
            return None
        return Required(False, self._size(constraint.left), self._size(constraint.right), text)


def _place(name: str) -> tuple[int, int]:
    """Input and axis of the symbol called ``name``."""
    given, axis = name.removeprefix("in").split("_")
    return int(given), int(axis)


def _bindings(shapes: Sequence[tuple[Dim, ...]]) -> dict[sympy.Symbol, Dim]:
    """For each symbol that shapes determine, its value as an expression of the dimensions ``in<input>_<axis>``."""
    places = {(i, axis): dim for i, dims in enumerate(shapes) for axis, dim in enumerate(dims)}
    bound: dict[sympy.Symbol, Dim] = {}
    for (i, axis), dim in places.items():
        if not isinstance(dim, int) and dim.is_Symbol:
            bound.setdefault(dim, symbol(f"in{i}_{axis}"))
    progress = True
    while progress:
        progress = False
        for (i, axis), dim in places.items():
            if isinstance(dim, int):
                continue
            left = [s for s in dim.free_symbols if s not in bound]
            if len(left) != 1:
                continue
            factor, rest = dim.coeff(left[0], 1), dim.coeff(left[0], 0)
            if factor.is_Integer and factor > 0 and simplify(factor * left[0] + rest - dim) == 0:
                known = sympy.sympify(rest).subs(bound, simultaneous=True)
                bound[left[0]] = simplify((symbol(f"in{i}_{axis}") - known) / factor)
                progress = True
    return bound


def _same(tensor: ir.Tensor, data: npt.NDArray[Any]) -> bool:
    """Whether ``tensor`` is a constant with the bytes of ``data``."""
    value = ir.constant_value(tensor)
    if value is None or value.dtype != data.dtype or value.size != data.size:
        return False
    return np.array_equal(np.ascontiguousarray(value).reshape(-1).view(np.uint8), data.reshape(-1).view(np.uint8))


def _check_limits(operator: Operator) -> None:
    """What the library's interpreter has room for."""
    limits = (
        ("inputs", len(operator.inputs), MAX_TENSORS),
        ("outputs", len(operator.outputs), MAX_TENSORS),
        ("sizes", max(len(operator.sizes.entries), len(operator.sizes.symbols)), MAX_SIZES),
        *(("buffers", len(s.operands), MAX_OPERANDS) for s in operator.steps),
        *(("ints", len(s.ints), MAX_INTS) for s in operator.steps),
    )
    for what, count, most in limits:
        if count > most:
            raise _Unsuitable(f"it has {count} {what}, more than {most}")
