"""From the ``coda`` nodes of a graph to operators that stand alone: every size is an expression of the operator's input dimensions.

An operator knows nothing of the graph around it, so nodes that do the same share one. What a node needs beyond its
inputs' shapes, a size that only another node's inputs show, say, leaves it to its function body.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs
import sympy

from .. import ir
from ..bundle.format import DTYPES, MAX_RANK
from ..bundle.plan import ExprTable
from ..epilogue.program import EpilogueProgram
from ..epilogue.tir import depth
from ..errors import CodaError
from ..frontend import Constraint, infer
from ..lower import KERNELS
from ..lower.gemm_shape import GemmShape
from ..lower.kernel import KernelCall, KernelSource, Packed, Workspace
from ..lower.registry import Context
from ..schedule.gemm import choose_gemm
from ..symbolic import Dim, simplify, symbol
from ..targets import Target

# The interpreter's limits; operators.h has the same.
MAX_TENSORS = 48
MAX_OPERANDS = 64
MAX_INTS = 96
MAX_SIZES = 512
_MAX_EMBEDDED = 1 << 20


class _Unsuitable(Exception):
    """Why a node keeps its function body."""


@dataclass(frozen=True)
class Tensor:
    """An input or output: ``dims`` are entries of the size table."""

    name: str
    dtype: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Packing:
    """Weights ``[rows, columns]``, input ``input``, in panels of ``width`` columns, which lie in ``order``; the last in ``last_order``."""

    input: int
    rows: int
    columns: int
    width: int
    order: tuple[int, ...]
    last_order: tuple[int, ...]

    def apply(self, weights: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The packed weights, flat, as the library makes them."""
        panels = []
        for start in range(0, self.columns, self.width):
            order = self.order if start + self.width <= self.columns else self.last_order
            panels.append(weights[:, [start + c for c in order]].ravel())
        return np.concatenate(panels)


@dataclass(frozen=True)
class Operand:
    """A kernel's buffer: ``input``, ``output``, ``workspace`` or ``constant`` of that number, or ``packed``."""

    origin: str
    index: int = 0


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
    """One custom operator. ``symbols``: for each symbol of ``sizes``, the input and axis that it is."""

    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    sizes: ExprTable = field(default_factory=ExprTable)
    workspaces: tuple[int, ...] = ()
    constants: tuple[bytes, ...] = ()
    packing: Packing | None = None
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
        rest = (self.workspaces, self.constants, self.packing, self.steps, self.required)
        text = repr((tensors, sizes, self.sizes.symbols, rest))
        return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Claims:
    """``operators``: by node name, what it becomes. ``left``: by node name, why it stays a function. ``kernels``: to build."""

    operators: dict[str, Operator]
    left: dict[str, str]
    kernels: list[KernelSource]


def claim(graph: gs.Graph, target: Target, constraints: Sequence[Constraint] = ()) -> Claims:
    """The operators of ``graph``, in normal form and after the passes. Node names must be distinct.

    ``constraints`` are asked for by the first operator that knows the sizes they are about.
    """
    info = infer(graph)
    pending = [*constraints, *(c for c in info.constraints if c.relation != "=")]
    claims = Claims({}, {}, [])
    kernels: dict[str, KernelSource] = {}
    for node in ir.in_order(graph):
        if node.domain != ir.DOMAIN:
            continue
        try:
            operator, sources, pending = _Maker(node, target, info.values).make(pending)
        except (_Unsuitable, CodaError) as e:
            claims.left[node.name] = str(e)
            continue
        claims.operators[node.name] = operator
        for source in sources:
            kernels.setdefault(source.symbol, source)
    claims.kernels.extend(kernels.values())
    return claims


class _Maker:
    """One node's operator."""

    def __init__(self, node: gs.Node, target: Target, values: Mapping[str, npt.NDArray[Any]]) -> None:
        self._node = node
        self._target = target
        self._sizes = ExprTable()
        self._bound = _bindings([ir.shape(t) for t in node.inputs])
        self._inputs = {t.name: i for i, t in reversed(list(enumerate(node.inputs)))}
        self._outputs = {t.name: i for i, t in enumerate(node.outputs)}
        self._context = Context(target, {n: v for n, v in values.items() if n in self._inputs and self._knows(v)})
        self._workspaces: list[Workspace] = []
        self._constants: list[bytes] = []
        self._packing: Packing | None = None

    def make(self, constraints: Sequence[Constraint]) -> tuple[Operator, list[KernelSource], list[Constraint]]:
        """The operator, its kernels, and the constraints that it does not ask for."""
        node = self._node
        if not all(t.name for t in (*node.inputs, *node.outputs)):
            raise _Unsuitable("an input or output is left out")
        calls = KERNELS[node.op](node, self._context)
        inputs, outputs = self._tensors(node.inputs), self._tensors(node.outputs)
        steps = tuple(self._step(call) for call in calls)
        workspaces = tuple(self._size(w.size) for w in self._workspaces)
        mine = [c for c in constraints if self._free(c.left, c.right) <= self._bound.keys()]
        required = tuple(r for r in map(self._required, mine) if r is not None)
        operator = Operator(
            inputs, outputs, self._sizes, workspaces, tuple(self._constants), self._packing, steps, required
        )
        _check_limits(operator)
        sources = [s for call in calls for s in (call.kernel, call.finish) if s is not None]
        return operator, sources, [c for c in constraints if c not in mine]

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
            raise _Unsuitable(f"size {', '.join(unknown)} does not follow from its inputs' shapes")
        return self._sizes.add(simplify(dim.subs(self._bound, simultaneous=True)))

    def _tensors(self, tensors: Iterable[ir.Tensor]) -> tuple[Tensor, ...]:
        found = []
        for i, tensor in enumerate(tensors):
            dtype, dims = str(np.dtype(tensor.dtype).name), ir.shape(tensor)
            if dtype not in DTYPES or len(dims) > MAX_RANK:
                raise _Unsuitable(f"'{tensor.name}' is {dtype} of rank {len(dims)}, which kernels do not take")
            found.append(Tensor(tensor.name or str(i), dtype, tuple(self._size(d) for d in dims)))
        return tuple(found)

    def _step(self, call: KernelCall) -> Step:
        return Step(
            name=call.kernel.symbol,
            kernel=call.kernel.symbol,
            finish=call.finish.symbol if call.finish is not None else None,
            operands=tuple(self._operand(b) for b in call.buffers),
            ints=tuple(self._size(d) for d in call.ints),
            items=self._size(call.items),
            scratch=self._size(call.scratch),
            grain=call.grain,
        )

    def _operand(self, buffer: str | Packed | Workspace) -> Operand:
        if isinstance(buffer, Workspace):
            self._workspaces.append(buffer)
            return Operand("workspace", len(self._workspaces) - 1)
        if isinstance(buffer, Packed):
            return self._constant(buffer)
        for origin, tensors in (("output", self._outputs), ("input", self._inputs)):
            if buffer in tensors:
                return Operand(origin, tensors[buffer])
        raise _Unsuitable(f"a kernel reads '{buffer}', which is neither its input nor its output")

    def _constant(self, packed: Packed) -> Operand:
        """A constant is an input of the node, as it is or packed, or else small enough for the library to hold."""
        position = self._inputs.get(packed.name)
        data = np.ascontiguousarray(packed.data)
        if position is not None and _same(self._node.inputs[position], data):
            return Operand("input", position)
        if self._node.op == "Gemm" and self._packing is None:
            packing = _gemm_packing(self._node, self._target)
            weights = np.asarray(self._node.inputs[1].values)
            if np.array_equal(packing.apply(weights).view(np.uint8), data.reshape(-1).view(np.uint8)):
                self._packing = packing
                return Operand("packed")
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


def _gemm_packing(node: gs.Node, target: Target) -> Packing:
    """How the GEMM's kernel wants its weights."""
    k, n = (int(d) for d in node.inputs[1].shape)
    program = EpilogueProgram.parse(node.attrs["epilogue"])
    schedule = choose_gemm(target, n, k, 1 << depth(program))
    shape, rest = GemmShape(program, n, k, schedule), n % schedule.width
    order = tuple(shape.columns(schedule.width).permutation()) if n >= schedule.width else ()
    return Packing(1, k, n, schedule.width, order, tuple(shape.columns(rest).permutation()) if rest else ())


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
