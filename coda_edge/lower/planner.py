"""From a graph to an execution plan: which kernels run in which order, and where every tensor lives.

Views (Reshape and its kin) cost nothing: their output is their input's buffer. A tensor whose elements shapes alone
determine has no buffer either: the kernels that read it have it as an expression.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs
import sympy

from .. import ir
from ..bundle.levels import StoredConstant
from ..bundle.plan import Buffer, BufferKind, Constraint, ExecutionPlan, ExprOp, PlanStep, Read, Relation, TensorInfo
from ..errors import ShapeError, TargetError, UnsupportedOperator
from ..frontend import Constraint as Assumed
from ..frontend import ConstraintSet, SymbolicInfo, infer
from ..frontend.constraints import known_symbols
from ..frontend.shapes import DataSize
from ..ir import Tensor
from ..schedule.database import Schedules
from ..symbolic import Dim, simplify, symbol
from ..targets.cuda import CudaTarget
from .cuda.half_form import half_form
from .cuda.node import cuda_rule, emitter_for
from .integer_form import integer_form
from .kernel import KernelCall, KernelSource, Packed, Workspace, count_name
from .pointwise import lower_copy, lower_node, product
from .registry import KERNELS, POINTWISE, Context, choices, identical, inlined

if TYPE_CHECKING:
    from ..targets import Target

ALIGNMENT = 64
_DOMAINS = frozenset({"", "ai.onnx", ir.DOMAIN})
#: Operators whose kernels read buffers only.
_READ_BUFFERS = frozenset({"Gemm", "GroupedConv", "Attention"})


_BY_SIZES = "every size must follow from the inputs' shapes, or be an element of an integer tensor; export the model so that it does"


@dataclass(frozen=True)
class Lowered:
    """A lowered graph: what the runtime does, the constants section, and the kernels to build."""

    plan: ExecutionPlan
    constants: npt.NDArray[np.uint8]
    kernels: list[KernelSource]
    stored: list[StoredConstant] = field(default_factory=list)
    """What the constants section holds."""

    def arena_bytes(self, sizes: Mapping[str, int]) -> int:
        """The most bytes that intermediate tensors take at one time, for the ``sizes`` of the inputs' symbols."""
        values = self.plan.exprs.evaluate(sizes)
        live = [0] * (len(self.plan.steps) + 1)
        for buffer in self.plan.buffers:
            if buffer.kind == BufferKind.ARENA:
                for step in range(buffer.first, buffer.last + 1):
                    live[step] += -(-values[buffer.size] // ALIGNMENT) * ALIGNMENT
        return max(live)


def lower(
    graph: gs.Graph, target: Target, constraints: Sequence[Assumed] = (), schedules: Schedules | None = None
) -> Lowered:
    """The plan of ``graph``, in normal form and after the passes, for ``target``.

    ``constraints``: what was assumed of sizes before; the plan asks for them and for those that ``graph`` needs still.
    ``schedules``: where measured schedules are looked up; by default in what the package brings.

    Raises UnsupportedOperator for an operator that neither the registry nor a template covers, ShapeError for a size that
    neither an input's shape nor an element of a tensor determines.
    """
    graph = half_form(integer_form(graph, target), target)
    info = infer(graph)
    known = known_symbols(graph, info)
    for c in info.constraints:
        if not c.symbols <= known:
            raise ShapeError(f"{c} is assumed, but data decides it: {_BY_SIZES}")
    assumed = ConstraintSet()
    assumed.add(SymbolicInfo(constraints=list(constraints)))
    assumed.add(info)
    known_schedules = Schedules.packaged() if schedules is None else schedules
    context = Context(
        target, info.values, info.sources, True, known_schedules, frozenset(info.data), emitter_for(target)
    )
    calls, roots, stored = _calls(graph, context)
    lowered = _Planner(graph, roots, stored, info.data).plan(calls, assumed.known_by(graph, info))
    if isinstance(target, CudaTarget) and lowered.plan.reads:
        raise TargetError(
            f"size '{lowered.plan.reads[0].name}' is decided by data, which {target.name} does not run yet: name a CPU target, "
            "or bind the size with --shape"
        )
    return lowered


def _calls(graph: gs.Graph, context: Context) -> tuple[deque[KernelCall], dict[str, str], dict[str, Tensor]]:
    """The kernel calls in order; for each tensor without a buffer of its own the tensor whose buffer it shares; the outputs.

    An output that no step makes as it is (a view of an input or of another output, an input, known values) is copied at the end, and
    until then is read where it comes from: its buffer has a name of its own. The outputs are given by the names of their buffers.
    """
    roots: dict[str, str] = {}
    calls: deque[KernelCall] = deque()
    outputs = {t.name for t in graph.outputs}
    for node in ir.in_order(graph):
        if all(inlined(t, context) for t in node.outputs):
            if any(u.op in _READ_BUFFERS and u.domain == ir.DOMAIN for u in ir.consumers(node.outputs[0])):
                calls.append(lower_copy(node.outputs[0], node.outputs[0].name, context))
            continue
        if _is_view(node):
            source = node.inputs[0].name
            roots[node.outputs[0].name] = roots.get(source, source)
            continue
        calls.extend(_lower_node(node, context))
    taken: set[str] = {t.name for t in graph.inputs}
    names, stored = ir.Names(graph), dict[str, Tensor]()
    for out in graph.outputs:
        root = roots.get(out.name, out.name)
        buffer = out.name
        computed = out.inputs and not inlined(out, context)
        if computed and root not in taken and (root == out.name or root not in outputs):
            roots[root] = out.name
            roots.update({name: out.name for name, r in roots.items() if r == root})
            taken.update((root, out.name))
        else:
            buffer = names.fresh(out.name)
            calls.append(lower_copy(_renamed(out, root), buffer, context))
        stored[buffer] = out
    return calls, {name: root for name, root in roots.items() if name != root}, stored


def _renamed(tensor: Tensor, name: str) -> Tensor:
    if isinstance(tensor, gs.Constant) or tensor.name == name:
        return tensor
    return gs.Variable(name, dtype=tensor.dtype, shape=tensor.shape)


def _is_view(node: gs.Node) -> bool:
    """Whether the output of ``node`` is its input's elements in the same order, so that it needs no kernel."""
    if node.domain == ir.DOMAIN or not node.inputs or isinstance(node.inputs[0], gs.Constant):
        return False
    source, out = node.inputs[0], node.outputs[0]
    if np.dtype(source.dtype) != np.dtype(out.dtype):
        return False
    if node.op in ir.VIEWS or node.op == "Identity":
        return True
    before, after = ir.shape(source), ir.shape(out)
    if node.op in ("Slice", "Expand", "Tile", "Cast"):
        return identical(before, after) and not (node.op == "Slice" and len(node.inputs) > 4 and _steps(node))
    if node.op == "Transpose":
        moved = [axis for axis in node.attrs.get("perm", range(len(before))[::-1]) if before[axis] != 1]
        return moved == sorted(moved)
    return False


def _steps(node: gs.Node) -> bool:
    steps = ir.constant_value(node.inputs[4])
    return steps is None or bool(np.any(steps != 1))


def _lower_node(node: gs.Node, context: Context) -> list[KernelCall]:
    rule = KERNELS.get(node.op)
    if (node.domain or "") not in _DOMAINS:
        raise UnsupportedOperator(f"{node.domain}::{node.op}", node.name, choices())
    if isinstance(context.target, CudaTarget):
        rule = cuda_rule(node, rule)
    if rule is not None:
        return rule(node, context)
    if node.op in POINTWISE:
        return lower_node(node, context)
    raise UnsupportedOperator(node.op, node.name, choices())


class _Constants:
    """The constants section while it is filled: 64-aligned, in order of use, equal arrays once. ``room``: its bytes at most."""

    def __init__(self, room: int) -> None:
        self._section = np.zeros(room, np.uint8)
        self._size = 0
        self._offsets: dict[bytes, int] = {}
        self.stored: list[StoredConstant] = []

    def add(self, constant: Packed) -> int:
        """The byte offset of ``constant``, which is copied."""
        flat = np.ascontiguousarray(constant.data).reshape(-1).view(np.uint8)
        key = hashlib.sha256(flat.data).digest()
        if key not in self._offsets:
            offset = self._offsets[key] = self._size + -self._size % ALIGNMENT
            self._size = offset + flat.size
            copy = self._section[offset : self._size]
            copy[:] = flat
            data = copy.view(constant.data.dtype).reshape(constant.data.shape)
            self.stored.append(StoredConstant(offset, data, constant.columns))
        return self._offsets[key]

    def bytes(self) -> npt.NDArray[np.uint8]:
        """The section."""
        return self._section[: self._size]


class _Planner:
    """Numbers for everything that kernel calls name."""

    def __init__(
        self, graph: gs.Graph, roots: Mapping[str, str], stored: Mapping[str, Tensor], data: Mapping[str, DataSize]
    ) -> None:
        self._graph = graph
        self._roots = roots
        self._tensors: dict[str, Tensor] = {**graph.tensors(), **stored}
        self._data = data
        counts = [count_name(source.tensor) for source in data.values() if source.element is None]
        self._tensors |= {name: gs.Variable(name, np.dtype(np.int64), [1]) for name in counts}
        self._io = {name: (BufferKind.OUTPUT, i) for i, name in enumerate(stored)}
        self._io |= {t.name: (BufferKind.INPUT, i) for i, t in enumerate(graph.inputs)}
        self._constants = _Constants(0)
        self._plan = ExecutionPlan()
        self._buffers: dict[tuple[BufferKind, object], int] = {}

    def plan(self, calls: deque[KernelCall], assumed: Sequence[Assumed]) -> Lowered:
        """The plan that makes ``calls`` in order, for sizes that keep to what is ``assumed``.

        Each call is taken from ``calls`` when its constants have been copied, so that there are never two of all weights.
        """
        plan = self._plan
        reads = self._schedule(calls, assumed)
        arrays = {
            id(c.data): c.data.nbytes for call in calls for c in map(self._constant, call.buffers) if c is not None
        }
        self._constants = _Constants(sum(ALIGNMENT + size for size in arrays.values()))
        plan.exprs.data = [name for name, _ in reads]
        for infos, tensors in ((plan.inputs, self._graph.inputs), (plan.outputs, self._graph.outputs)):
            infos.extend(self._info(t) for t in tensors)
        kernels: dict[str, KernelSource] = {}
        while calls:
            call = calls.popleft()
            for source in (call.kernel, call.finish):
                if source is not None:
                    kernels.setdefault(source.symbol, source)
            plan.kernels[:] = list(kernels)
            plan.steps.append(self._step(len(plan.steps), call))
        plan.reads = [self._read(name, step) for name, step in reads]
        known = {symbol(name) for name in self._data} - {symbol(name) for name in plan.exprs.data}
        assumed = [c for c in assumed if not c.symbols & known]
        plan.constraints.extend(c for c in map(self._constraint, assumed) if c is not None)
        self._check_symbols()
        return Lowered(plan, self._constants.bytes(), list(kernels.values()), self._constants.stored)

    def _schedule(self, calls: Sequence[KernelCall], assumed: Sequence[Assumed]) -> list[tuple[str, int]]:
        """When each size that data decides is read: before the first step that needs it, or another that is known no earlier."""
        made: dict[str, int] = {}
        needs: list[set[str]] = []
        for step, call in enumerate(calls):
            operands = {self._roots.get(o, o) for o in call.buffers if isinstance(o, str)}
            made |= {name: step for name in operands - made.keys()}
            dims = [*call.ints, call.items, call.scratch, call.flops, call.bytes]
            dims += [self._size(o) for o in call.buffers if not isinstance(o, Packed)]
            needs.append({s.name for d in dims if not isinstance(d, int) for s in d.free_symbols} & self._data.keys())
        # A constraint on it is checked as well, though no step may need it.
        wanted = set().union(*needs, {s.name for c in assumed for s in c.symbols} & self._data.keys())
        ready = {name: self._made(name, made) + 1 for name in wanted}
        reads: dict[str, int] = {}
        for step, names in enumerate(needs):
            late = [name for name in names if ready[name] > step]
            if late:
                raise ShapeError(
                    f"size '{late[0]}' is needed by '{calls[step].name}', of {', '.join(calls[step].source)}, which it depends on"
                )
            if names - reads.keys():
                reads |= {name: step for name in sorted(wanted - reads.keys()) if ready[name] <= step}
        for name in sorted(wanted - reads.keys(), key=lambda name: (ready[name], name)):
            if ready[name] < len(calls):
                reads[name] = max(ready[name], *reads.values(), 0)
        return sorted(reads.items(), key=lambda read: read[1])

    def _made(self, name: str, made: Mapping[str, int]) -> int:
        """The step that computes a size; −1 for an element of an input."""
        source = self._source(name)
        kind, _ = self._io.get(source, (BufferKind.ARENA, 0))
        return -1 if kind == BufferKind.INPUT else made[source]

    def _source(self, name: str) -> str:
        """The tensor whose buffer holds a size."""
        source = self._data[name]
        tensor = count_name(source.tensor) if source.element is None else source.tensor
        return self._roots.get(tensor, tensor)

    def _read(self, name: str, step: int) -> Read:
        """The read of a size; its buffer lives until then."""
        source, tensor = self._data[name], self._source(name)
        kind, position = self._io.get(tensor, (BufferKind.ARENA, 0))
        number = self._buffers.get((kind, tensor if kind == BufferKind.ARENA else position))
        if number is None:
            number = self._add(kind, position, self._size(tensor), position)
        buffer = self._plan.buffers[number]
        if kind == BufferKind.ARENA:
            self._plan.buffers[number] = replace(buffer, last=max(buffer.last, step - 1))
        return Read(name, step, number, np.dtype(self._tensors[tensor].dtype).name, source.element or 0)

    def _info(self, tensor: Tensor) -> TensorInfo:
        dims = tuple(self._plan.exprs.add(d) for d in ir.shape(tensor))
        return TensorInfo(tensor.name, np.dtype(tensor.dtype).name, dims)

    def _step(self, number: int, call: KernelCall) -> PlanStep:
        buffers = tuple(self._buffer(operand, number) for operand in call.buffers)
        add, kernels = self._plan.exprs.add, self._plan.kernels
        launch = [d for k in (call.kernel, call.finish) if k is not None for d in k.sizes]
        return PlanStep(
            name=call.name,
            kernel=kernels.index(call.kernel.symbol),
            finish=kernels.index(call.finish.symbol) if call.finish is not None else -1,
            buffers=buffers,
            ints=tuple(add(d) for d in (*call.ints, *launch)),
            items=add(call.items),
            grain=call.grain,
            scratch=add(call.scratch),
            flops=add(call.flops),
            bytes=add(call.bytes if call.bytes != 0 else self._traffic(call)),
            source=", ".join(call.source),
        )

    def _constraint(self, assumed: Assumed) -> Constraint | None:
        """The plan's form of a constraint, without differences where it can be; None if it holds for all sizes."""
        add = self._plan.exprs.add
        text = f"{assumed.reason} (node '{assumed.node}')"
        if assumed.relation == "divisible by":
            rest = simplify(sympy.Mod(assumed.left, assumed.right))
            return None if rest == 0 else Constraint(Relation.EQUAL, add(rest), add(0), text)
        room = sympy.expand(sympy.sympify(assumed.right) - sympy.sympify(assumed.left))
        if room.is_nonnegative:
            return None
        if room.is_negative:
            raise ShapeError(f"{assumed} holds for no sizes: {assumed.reason}")
        less = [-term for term in sympy.Add.make_args(room) if term.could_extract_minus_sign()]
        more = room + sympy.Add(*less)
        return Constraint(Relation.AT_MOST, add(sympy.Add(*less)), add(more), text)

    def _check_symbols(self) -> None:
        """Raises ShapeError for a size that is neither a dimension of an input nor read."""
        exprs = self._plan.exprs
        entries = [exprs.entries[d] for t in self._plan.inputs for d in t.dims]
        bound = {exprs.symbols[e.a] for e in entries if e.op == ExprOp.SYMBOL}
        for name in exprs.symbols:
            if name not in bound:
                shapes = ", ".join(f"{t.name}{list(t.shape)}" for t in self._graph.inputs)
                raise ShapeError(f"size '{name}' is no dimension of an input ({shapes}): {_BY_SIZES}")

    def _traffic(self, call: KernelCall) -> Dim:
        total: Dim = 0
        for operand in call.buffers:
            total += operand.data.nbytes if isinstance(operand, Packed) else self._size(operand)
        return total

    def _size(self, operand: str | Workspace) -> Dim:
        if isinstance(operand, Workspace):
            return operand.size
        tensor = self._tensors[operand]
        return product(ir.shape(tensor)) * int(np.dtype(tensor.dtype).itemsize)

    def _constant(self, operand: str | Packed | Workspace) -> Packed | None:
        """``operand``, if it is a constant."""
        if isinstance(operand, str) and operand not in self._io and isinstance(self._tensors.get(operand), gs.Constant):
            return Packed(operand, np.asarray(self._tensors[operand].values))
        return operand if isinstance(operand, Packed) else None

    def _buffer(self, operand: str | Packed | Workspace, step: int) -> int:
        operand = self._constant(operand) or operand
        if isinstance(operand, Packed):
            offset = self._constants.add(operand)
            return self._add(BufferKind.CONSTANT, offset, operand.data.nbytes, offset)
        if isinstance(operand, Workspace):
            return self._add(BufferKind.ARENA, (step, operand.name), operand.size, 0, step)
        name = self._roots.get(operand, operand)
        if name in self._io:
            kind, position = self._io[name]
            return self._add(kind, position, self._size(name), position)
        return self._add(BufferKind.ARENA, name, self._size(name), 0, step)

    def _add(self, kind: BufferKind, key: object, size: Dim, index: int, step: int = 0) -> int:
        """The number of a buffer; an arena buffer lives at least until ``step``."""
        buffers = self._plan.buffers
        number = self._buffers.get((kind, key))
        if number is None:
            number = self._buffers[kind, key] = len(buffers)
            buffers.append(Buffer(kind, self._plan.exprs.add(size), index, step, step))
        elif kind == BufferKind.ARENA:
            old = buffers[number]
            buffers[number] = Buffer(kind, old.size, old.index, old.first, step)
        return number
