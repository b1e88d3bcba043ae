"""The operator registry: one table from ONNX operator to how it is lowered.

A *pointwise* operator is a function from input views to an output view: a view knows its shape, its dtype, and the
expression of its element at given indices. Nothing is stored between pointwise operators, so any chain of them is one
kernel. Every other operator has a *kernel* function, which writes a whole kernel. ``docs/operators.md`` shows how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs
import sympy
from tvm import tirx

from .. import ir
from ..errors import UnsupportedOperator
from ..ir import Tensor
from ..schedule.database import Schedules
from ..symbolic import Dim, same
from ..weights import FactoredConstant, narrowest
from .emit import Emitter, Expr, as_int, int64, register
from .kernel import KernelCall, Packed
from .tables import element, readable

if TYPE_CHECKING:
    from ..targets import Target

#: Integer tensors of at most this many elements that shapes alone determine are written into the kernels that read them.
MAX_INLINE = 16


@dataclass(frozen=True)
class View:
    """A tensor as an expression: ``at(indices)`` is its element, for one int64 index per dimension."""

    shape: tuple[Dim, ...]
    dtype: str
    at: Callable[[Sequence[Expr]], Expr]


@dataclass(frozen=True)
class Context:
    """What lowering knows besides the graph: the target, the values that sizes determine, and the tensors that sizes are read from.

    ``narrow``: constants may be stored in half precision where that is exact. ``schedules``: the measured ones that are known. ``decided``: the
    names of the sizes that data decides. ``emitter``: what pointwise kernels are written by.
    """

    target: Target
    values: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    sources: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    narrow: bool = False
    schedules: Schedules = field(default_factory=Schedules)
    decided: frozenset[str] = frozenset()
    emitter: type[Emitter] = Emitter

    @property
    def lanes(self) -> int:
        """float32 elements of a vector."""
        return self.target.lanes(4)


@dataclass(frozen=True)
class Application:
    """One use of a pointwise operator: its node, the views of its inputs (None where omitted), and its output."""

    node: gs.Node
    emit: Emitter
    inputs: tuple[View | None, ...]
    shape: tuple[Dim, ...]
    dtype: str

    def view(self, position: int) -> View:
        """Input ``position``, which the operator requires."""
        view = self.inputs[position] if position < len(self.inputs) else None
        if view is None:
            raise UnsupportedOperator(self.node.op, self.node.name, f"input {position} is missing")
        return view

    def optional(self, position: int) -> View | None:
        """Input ``position`` if it is given."""
        return self.inputs[position] if position < len(self.inputs) else None

    def attribute(self, name: str, default: Any) -> Any:
        """An attribute of the node."""
        return self.node.attrs.get(name, default)

    def constants(self, position: int, default: Sequence[int] | None = None) -> list[int]:
        """The elements of an input that must be a constant vector (axes, steps, …)."""
        view = self.optional(position)
        if view is None and default is not None:
            return list(default)
        values = [as_int(e) for e in elements(self.view(position))]
        if any(v is None for v in values):
            raise UnsupportedOperator(
                self.node.op, self.node.name, f"input {position} must be constant: fold it, or bind shapes with --shape"
            )
        return [v for v in values if v is not None]

    def result(self, at: Callable[[Sequence[Expr]], Expr]) -> View:
        """The output as a view."""
        return View(self.shape, self.dtype, at)


PointwiseRule: TypeAlias = Callable[[Application], View]
KernelRule: TypeAlias = Callable[[gs.Node, Context], "list[KernelCall]"]

Fold: TypeAlias = Callable[[Sequence[Dim]], "tuple[Dim, ...]"]

POINTWISE: dict[str, PointwiseRule] = {}
#: The pointwise operators that apply a function to elements of inputs which broadcast.
ELEMENTWISE: set[str] = set()
KERNELS: dict[str, KernelRule] = {}


def pointwise(*ops: str) -> Callable[[PointwiseRule], PointwiseRule]:
    """Registers a function as the lowering of pointwise operators ``ops``."""

    def register(rule: PointwiseRule) -> PointwiseRule:
        POINTWISE.update(dict.fromkeys(ops, rule))
        return rule

    return register


def kernel(*ops: str) -> Callable[[KernelRule], KernelRule]:
    """Registers a function as the lowering of operators ``ops``, which have kernels of their own."""

    def register(rule: KernelRule) -> KernelRule:
        KERNELS.update(dict.fromkeys(ops, rule))
        return rule

    return register


def elementwise(apply: Callable[..., Expr]) -> PointwiseRule:
    """The rule of an operator that applies ``apply`` to elements of its inputs, which broadcast."""

    def rule(op: Application) -> View:
        views = [v for v in op.inputs if v is not None]
        return op.result(lambda idx: apply(*(v.at(broadcast(idx, v.shape)) for v in views)))

    return rule


def broadcast(indices: Sequence[Expr], shape: Sequence[Dim]) -> list[Expr]:
    """The indices of the element of a tensor of ``shape`` that broadcasts to ``indices``."""
    tail = indices[len(indices) - len(shape) :]
    return [int64(0) if dim == 1 else index for index, dim in zip(tail, shape, strict=True)]


def elements(view: View) -> list[Expr]:
    """The elements of a vector (or scalar) of static length."""
    if not view.shape:
        return [view.at([])]
    count = view.shape[0]
    if len(view.shape) > 1 or not isinstance(count, int):
        raise ValueError(f"expected a vector of static length, found shape {view.shape}")
    return [view.at([int64(i)]) for i in range(count)]


def constant(value: Any, dtype: str) -> Expr:
    """A literal of a numpy dtype."""
    return tirx.const(value if dtype != "bool" else bool(value), register(dtype))


def dtype_name(tensor: Tensor) -> str:
    """The numpy dtype name of a tensor."""
    return str(np.dtype(tensor.dtype).name)


def inlined(tensor: Tensor, context: Context) -> bool:
    """Whether ``tensor`` reads as an expression of sizes, so that no buffer is needed for it."""
    value = context.values.get(tensor.name)
    return value is not None and value.size <= MAX_INLINE


def leaf(tensor: Tensor, emit: Emitter, context: Context, fold: Fold = tuple) -> View:
    """The view of a tensor that a kernel reads: literals, an expression of sizes, or a load from its buffer.

    ``fold`` merges axes of the shape where the kernel treats them as one.
    """
    shape, dtype = fold(ir.shape(tensor)), dtype_name(tensor)
    operand: str | Packed = tensor.name
    if isinstance(tensor, gs.Constant):
        data = np.asarray(tensor.values)
        if data.size and (data.size == 1 or (data.dtype.kind in "iub" and data.size <= MAX_INLINE)):
            return literal(data, shape, dtype, emit)
        if data.size and bool(np.all(data == data.flat[0])):
            return View(shape, dtype, lambda _: constant(data.flat[0].item(), dtype))
        if context.narrow and isinstance(tensor, FactoredConstant) and readable(tensor.weight):
            weight, dims = tensor.weight, data.shape
            return View(shape, dtype, lambda idx: element(tensor.name, weight, emit, _axes(idx, shape, dims, emit)))
        stored = narrowest(data) if context.narrow else data
        operand = Packed(tensor.name, stored)
        return View(shape, dtype, lambda idx: emit.load(operand, stored.dtype.name, emit.ravel(idx, shape)))
    elif inlined(tensor, context):
        return literal(context.values[tensor.name], shape, dtype, emit)
    return View(shape, dtype, lambda idx: emit.load(operand, dtype, emit.ravel(idx, shape)))


def _axes(indices: Sequence[Expr], folded: Sequence[Dim], dims: Sequence[int], emit: Emitter) -> Sequence[Expr]:
    """The indices along ``dims``, of which some may have been merged in ``folded``."""
    return indices if identical(folded, dims) else emit.unravel(emit.ravel(indices, folded), dims)


def literal(data: npt.NDArray[Any], shape: tuple[Dim, ...], dtype: str, emit: Emitter) -> View:
    """A small tensor whose elements are numbers or expressions of sizes."""

    def element(value: Any) -> Expr:
        if isinstance(value, sympy.Expr) and not value.is_number:
            if dtype == "int64":
                return emit.size(value)
            over, under = sympy.fraction(sympy.together(value))
            result = tirx.Cast(dtype, emit.size(over))
            return result if under == 1 else result / tirx.Cast(dtype, emit.size(under))
        plain = value.item() if isinstance(value, np.generic) else value
        return constant(float(plain) if np.dtype(dtype).kind == "f" else int(plain), dtype)

    def at(indices: Sequence[Expr]) -> Expr:
        position = emit.ravel(indices, shape)
        known = as_int(position)
        if known is not None:
            return element(data.flat[known])
        result = element(data.flat[-1])
        for i in range(data.size - 1):
            result = tirx.Select(position.equal(int64(i)), element(data.flat[i]), result)
        return emit.bind(result)

    return View(shape, dtype, at)


def shared(name: str, view: View, emit: Emitter) -> View:
    """``view`` of the tensor ``name``, with each element that it is asked for computed once."""

    def at(indices: Sequence[Expr]) -> Expr:
        return emit.once(f"{name} at {[str(i) for i in indices]}", lambda: view.at(indices))

    return View(view.shape, view.dtype, at)


def apply(
    nodes: Sequence[gs.Node], views: dict[str, View], emit: Emitter, context: Context, fold: Fold = tuple
) -> None:
    """Adds to ``views`` the views of all outputs of pointwise ``nodes``, which are in topological order."""
    for node in nodes:
        if inlined(node.outputs[0], context):
            continue
        rule = POINTWISE.get(node.op)
        if rule is None:
            raise UnsupportedOperator(node.op, node.name, choices())
        inputs: list[View | None] = []
        for tensor in node.inputs:
            if tensor.name and tensor.name not in views:
                views[tensor.name] = leaf(tensor, emit, context, fold)
            inputs.append(views[tensor.name] if tensor.name else None)
        out = node.outputs[0]
        application = Application(node, emit, tuple(inputs), fold(ir.shape(out)), dtype_name(out))
        views[out.name] = shared(out.name, rule(application), emit)


def choices() -> str:
    """What a user can do about an operator that is not lowered."""
    known = ", ".join(sorted({*POINTWISE, *KERNELS}))
    return f"rewrite the model in the operators that are ({known}), or add one as docs/operators.md shows"


def identical(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether two shapes are the same for all sizes."""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
