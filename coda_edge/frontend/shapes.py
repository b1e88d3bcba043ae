"""Symbolic shape and value inference: every tensor's dtype and dimensions, as expressions in the inputs' sizes.

``infer`` walks a graph once, with one function per operator (``shape_rules``, ``coda_rules``); integer tensors that
shapes alone determine are evaluated too (``value_rules``), which is what makes ``Reshape`` targets known. Where a size is
needed that data decides, it gets a symbol of its own, and ``SymbolicInfo.data`` tells which element of which tensor it is. An
operator without a rule is asked of ``onnx.shape_inference``, one node at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from keyword import iskeyword
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
import sympy

from .. import ir
from ..errors import InvalidModel, ShapeError
from ..symbolic import Dim, evaluate, format_dim, nonnegative, parse_dim, same, simplify, symbol
from .equalities import Equalities, Known

#: An object array of ints, floats, bools and sympy expressions.
Values: TypeAlias = npt.NDArray[np.object_]
#: A tensor's NumPy dtype and dimensions.
Type: TypeAlias = "tuple[Any, tuple[Dim, ...]]"

# Values are followed for tensors of at most this many elements: more never is a shape.
_MOST_VALUES = 256
#: The same for floats, which are scales of sizes: what has more is positions, whose arithmetic is no size.
MOST_FLOATS = 8


@dataclass(frozen=True)
class Constraint:
    """What inference had to assume of the inputs' sizes at ``node``: ``left relation right``.

    The relation is ``=``, ``<=`` or ``divisible by``. ``reason`` says in words what would go wrong, as in
    ``axis 0 of 'positions'``. An equality has been put in wherever its symbol occurred, the inputs included.
    """

    left: Dim
    relation: str
    right: Dim
    node: str
    reason: str = ""

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """The sizes that it is about."""
        return {s for d in (self.left, self.right) if not isinstance(d, int) for s in d.free_symbols}

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it is true at ``sizes``, which name every symbol."""
        left, right = evaluate(self.left, sizes), evaluate(self.right, sizes)
        if self.relation == "divisible by":
            return right != 0 and left % right == 0
        return left == right if self.relation == "=" else left <= right

    def resolved(self, equal: Equalities) -> Constraint:
        """The same with ``equal`` put in; an equality stays as it was found."""
        if self.relation == "=":
            return self
        return replace(self, left=equal.rename(self.left), right=equal.rename(self.right))

    def __str__(self) -> str:
        return f"{self.left} {self.relation} {self.right} (node '{self.node}')"


@dataclass(frozen=True)
class DataSize:
    """Where a size that data decides is found: an element of a tensor, or how many columns the tensor has (``element`` None)."""

    tensor: str
    element: int | None


@dataclass
class SymbolicInfo:
    """What ``infer`` found. ``values`` holds the tensors, by name, that sizes alone determine (at most 256 elements).

    ``data``: the sizes that data decides, by name; ``sources``: the tensors whose elements they are, as such sizes. A source is
    computed like any tensor, and known later than the shapes. ``equal``: the equalities among ``constraints``, solved. ``apart``: by the first
    result of an If, the sizes that are others in its one branch, and in its other.
    """

    shapes: dict[str, tuple[Dim, ...]] = field(default_factory=dict)
    values: dict[str, Values] = field(default_factory=dict)
    data: dict[str, DataSize] = field(default_factory=dict)
    sources: dict[str, Values] = field(default_factory=dict)
    constraints: list[Constraint] = field(default_factory=list)
    equal: Equalities = field(default_factory=lambda: Equalities(()))
    apart: dict[str, tuple[Known, Known]] = field(default_factory=dict)


class Call:
    """One node, as a rule sees it."""

    def __init__(self, node: gs.Node, opset: int, types: dict[str, Type], state: _State) -> None:
        self.node = node
        self.opset = opset
        self.types = types
        self.state = state

    @property
    def name(self) -> str:
        """The node's name, or its output's if it has none."""
        return str(self.node.name or self.node.outputs[0].name)

    def __len__(self) -> int:
        return len(self.node.inputs)

    def has(self, index: int) -> bool:
        """Whether the input is given."""
        return index < len(self.node.inputs) and bool(self.node.inputs[index].name)

    def dtype(self, index: int = 0) -> Any:
        """The dtype of an input."""
        return self.types[self.node.inputs[index].name][0]

    def shape(self, index: int = 0) -> tuple[Dim, ...]:
        """The dimensions of an input."""
        return tuple(map(self.state.equal.resolve, self.types[self.node.inputs[index].name][1]))

    def value(self, index: int) -> Values | None:
        """The value of an input, if constants or shapes determine it."""
        if not self.has(index):
            return None
        tensor = self.node.inputs[index]
        if isinstance(tensor, gs.Constant):
            # Small constants only: the data of a large one may not even be loaded yet.
            return np.asarray(tensor.values).astype(object) if np.prod(tensor.shape) <= _MOST_VALUES else None
        value = self.state.info.values.get(tensor.name)
        if value is None:
            value = self.state.info.sources.get(tensor.name)
        if value is None or not self.state.equal.known:
            return value
        resolved = [self.state.equal.resolve(v) if isinstance(v, sympy.Expr) else v for v in value.flat]
        return objects(resolved, value.shape)

    def sizes(self, index: int) -> Values | None:
        """The value of an input that sizes are made of: where data decides it, in sizes of their own."""
        value = self.value(index)
        if value is None and self.has(index):
            self.state.demand(self.node.inputs[index], self.opset, self.types)
            value = self.value(index)
        return value

    def ints(self, index: int) -> list[int] | None:
        """The elements of a value, if all are plain integers."""
        value = self.value(index)
        if value is None or not all(isinstance(v, int) for v in value.flat):
            return None
        return [int(v) for v in value.flat]

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute's value."""
        return self.node.attrs.get(name, default)

    def axis(self, axis: int, rank: int) -> int:
        """A possibly negative axis, made non-negative."""
        if not -rank <= axis < rank:
            raise self.error(f"axis {axis} is out of range for {rank} dimensions")
        return axis % rank

    def equate(self, a: Dim, b: Dim) -> Dim:
        """``a``, after assuming that it equals ``b``. Raises ShapeError if they cannot be equal."""
        equal = self.state.equal
        a, b = equal.resolve(a), equal.resolve(b)
        if same(a, b):
            return a
        if self.state.of_data(a) or self.state.of_data(b):
            return self._equate_data(a, b)
        known = set(equal.known)
        if sympy.sympify(a - b).is_zero is False or not equal.equate(a, b):
            raise self.error(f"sizes {a} and {b} would have to be equal")
        terms = {k: v for k, v in equal.known.items() if k not in known and not isinstance(k, sympy.Symbol)}
        if not terms:
            self.state.info.constraints.append(Constraint(a, "=", b, self.name))
        for term, value in terms.items():
            if isinstance(term, sympy.Max | sympy.Min) and value in term.args:
                for other in term.args:
                    low, high = (other, value) if isinstance(term, sympy.Max) else (value, other)
                    self.at_most(low, high, "a dimension that the node needs to be the larger or smaller of two")
                continue
            if not value.is_Integer:
                numerator, denominator = sympy.fraction(sympy.together(value))
                self.divisible(numerator, denominator, "a quotient that the node needs to be whole")
                continue
            # The inputs' sizes don't tell it, so it must be checked when they are known: as two bounds.
            reason = f"a dimension that the node needs to be {value}"
            self.state.info.constraints.append(Constraint(term, "<=", value, self.name, reason))
            self.state.info.constraints.append(Constraint(value, "<=", term, self.name, reason))
        return equal.resolve(a)

    def _equate_data(self, a: Dim, b: Dim) -> Dim:
        """Two sizes of which data decides one: which they are is seen when both are known, so no symbol is put in for another."""
        if sympy.sympify(a - b).is_zero is False:
            raise self.error(f"sizes {a} and {b} would have to be equal")
        for low, high in ((a, b), (b, a)):
            self.state.info.constraints.append(
                Constraint(low, "<=", high, self.name, "two dimensions that must be equal")
            )
        return b if self.state.of_data(a) else a

    def at_most(self, a: Dim, b: Dim, reason: str) -> None:
        """Assumes ``a <= b``. Raises ShapeError if it never holds."""
        room = simplify(sympy.sympify(self.state.equal.resolve(b)) - sympy.sympify(self.state.equal.resolve(a)))
        if nonnegative(room):
            return
        if isinstance(room, int) or room.is_negative:
            raise self.error(f"{a} would have to be at most {b}: {reason}")
        self.state.info.constraints.append(Constraint(a, "<=", b, self.name, reason))

    def divisible(self, a: Dim, b: Dim, reason: str) -> None:
        """Assumes that ``b`` divides ``a``."""
        self.state.info.constraints.append(Constraint(a, "divisible by", b, self.name, reason))

    def axis_of(self, axis: int, index: int = 0) -> str:
        """An axis of an input in words."""
        place = "rows" if axis == 0 and len(self.shape(index)) == 2 else f"axis {axis}"
        return f"{place} of '{self.node.inputs[index].name}'"

    def fresh(self, axis: int, output: int = 0) -> Dim:
        """A new symbol for a dimension that only the data determines, no element of a tensor."""
        return symbol(f"{self.node.outputs[output].name}_{axis}".replace("/", "_").replace(".", "_"))

    def counted(self) -> Dim:
        """How many columns the output has, which its kernel counts first."""
        return self.state.data_size(DataSize(self.node.outputs[0].name, None), self.node.outputs[0].name)

    def of_data(self, dim: Dim) -> bool:
        """Whether data decides ``dim``."""
        return self.state.of_data(dim)

    def error(self, message: str) -> ShapeError:
        """A ShapeError that names the node and its operands."""
        shapes = ", ".join(
            f"{t.name}{list(self.types[t.name][1])}" for t in self.node.inputs if t.name and t.name in self.types
        )
        return ShapeError(f"{self.node.op} (node '{self.name}'): {message}; its inputs are {shapes}")

    def infer_body(self, graph: gs.Graph) -> list[Type]:
        """Infers a nested graph, whose inputs are the node's, and returns its outputs' types."""
        known = {}
        for index, tensor in enumerate(graph.inputs):
            tensor.dtype = self.dtype(index)
            tensor.shape = [format_dim(d) for d in self.shape(index)]
            value = self.value(index)
            if value is not None:
                known[tensor.name] = value
        info = _infer(graph, known, self.state.decided)
        # What the body makes sizes of may follow, outside, from sizes that others are made of too.
        inside = {source.tensor for source in info.data.values()}
        wanted = {
            t.name: v for i, t in enumerate(graph.inputs) if t.name in inside and (v := self.sizes(i)) is not None
        }
        if wanted:
            info = _infer(graph, known | wanted, self.state.decided)
        self.state.info.constraints.extend(info.constraints)
        self.state.info.data.update(info.data)
        return [(t.dtype, info.shapes[t.name]) for t in graph.outputs]


ShapeRule: TypeAlias = Callable[[Call], "list[Type]"]
ValueRule: TypeAlias = Callable[[Call, "list[Type]"], "Values | list[Values] | None"]

SHAPE_RULES: dict[tuple[str, str], ShapeRule] = {}
VALUE_RULES: dict[str, ValueRule] = {}


def shape_rule(*ops: str, domain: str = "") -> Callable[[ShapeRule], ShapeRule]:
    """Registers a function that gives the types of the outputs of ``ops``."""

    def register(rule: ShapeRule) -> ShapeRule:
        SHAPE_RULES.update({(domain, op): rule for op in ops})
        return rule

    return register


def value_rule(*ops: str) -> Callable[[ValueRule], ValueRule]:
    """Registers a function that gives the value of each output of ``ops`` (of the first alone, not in a list), or None if data is needed."""

    def register(rule: ValueRule) -> ValueRule:
        VALUE_RULES.update(dict.fromkeys(ops, rule))
        return rule

    return register


def objects(values: Sequence[Any], dims: Sequence[int]) -> Values:
    """An object array of ``values`` in the shape ``dims``."""
    array = np.empty(len(values), object)
    array[:] = values
    return array.reshape(dims)


def constant_of(node: gs.Node) -> ir.Array:
    """The value of a Constant node."""
    name, data = next(iter(node.attrs.items()))
    if name == "value":
        return np.asarray(data.values)
    if "string" in name:
        raise InvalidModel(f"Constant '{node.name}' holds text: only numbers and bool are supported")
    return np.asarray(data, np.float32 if "float" in name else np.int64)


# Sizes are made of at most this many elements that data decides.
_MOST_DATA = 8
# Operators through which a size is followed back to the element that decides it, so that equal sizes get equal symbols.
_FOLLOWED = frozenset(
    {"Add", "Sub", "Mul", "Div", "Neg", "Min", "Max", "Cast", "Identity", "Concat", "Gather", "Slice", "Expand"}
    | {"Reshape", "Squeeze", "Unsqueeze", "Flatten"}
)


@dataclass
class _State:
    info: SymbolicInfo
    equal: Equalities
    taken: frozenset[str] = frozenset()  # names of the inputs' sizes
    given: frozenset[str] = frozenset()  # names of sizes that data decides outside

    @property
    def decided(self) -> frozenset[str]:
        """The names of all sizes that data decides."""
        return self.given.union(self.info.data)

    def of_data(self, dim: Dim) -> bool:
        """Whether data decides ``dim``."""
        data = self.info.data
        if isinstance(dim, int) or not (data or self.given):
            return False
        return any(s.name in data or s.name in self.given for s in dim.free_symbols)

    def data_size(self, source: DataSize, base: str) -> Dim:
        """The symbol of ``source``, named after ``base``. A run in which it is negative is refused."""
        name = re.sub(r"\W", "_", base).strip("_")
        name = f"size_{name}" if not name.isidentifier() or iskeyword(name) else name
        while name in self.taken or self.info.data.get(name, source) != source:
            name += "_"
        self.info.data[name] = source
        return symbol(name)

    def demand(self, tensor: ir.Tensor, opset: int, types: dict[str, Type]) -> bool:
        """Makes the elements of an integer tensor known, as expressions in sizes that data decides; whether it could."""
        info = self.info
        if isinstance(tensor, gs.Constant) or tensor.name in info.values or tensor.name in info.sources:
            return True
        dtype, dims = types[tensor.name]
        if not all(isinstance(d, int) for d in dims) or np.prod(dims, dtype=np.int64) > _MOST_DATA:
            return False
        node = ir.producer(tensor)
        if node is not None and not node.domain and node.op in _FOLLOWED:
            before = dict(info.data), dict(info.sources), dict(info.values), list(info.constraints)
            if all(self.demand(t, opset, types) for t in node.inputs if t.name):
                value = VALUE_RULES[node.op](Call(node, opset, types, self), [types[tensor.name]])
                if isinstance(value, np.ndarray):
                    info.values[tensor.name] = value
                    return True
            info.data, info.sources, info.values, info.constraints = before
        if np.dtype(dtype) not in (np.int64, np.int32):
            return False
        count = int(np.prod(dims, dtype=np.int64))
        names = [tensor.name] if count == 1 else [f"{tensor.name}_{i}" for i in range(count)]
        symbols = [self.data_size(DataSize(tensor.name, i), name) for i, name in enumerate(names)]
        info.sources[tensor.name] = objects(symbols, [int(d) for d in dims])
        return True


def infer(
    graph: gs.Graph, known: Mapping[str, Values] | None = None, decided: frozenset[str] = frozenset()
) -> SymbolicInfo:
    """Annotates every variable of ``graph`` with dtype and shape (ints and strings) and returns what it found.

    Two different sizes that an operator needs to be equal are assumed so: the later symbol (in order of the graph's
    inputs) is replaced by the earlier one everywhere, the inputs included, and ``constraints`` records it, as it does
    bounds that sizes must keep. ``known``: the values of some inputs, which a nested graph has from outside, and ``decided`` the
    names of the sizes in them that data decides.

    Raises ShapeError, naming the node, if shapes contradict each other or a rank cannot be found.
    """
    return _infer(graph, known or {}, decided)


def _infer(graph: gs.Graph, known: Mapping[str, Values], decided: frozenset[str]) -> SymbolicInfo:
    """``infer``, with the values of some inputs given, and the names of the sizes in them that data decides."""
    types: dict[str, Type] = {}
    for tensor in graph.inputs:
        if tensor.shape is None:
            raise ShapeError(f"input '{tensor.name}' has no shape: give one, as in --shape {tensor.name}=1x128")
        types[tensor.name] = (numpy_dtype(tensor.dtype), ir.shape(tensor))
    symbols = [s for t in graph.inputs for d in types[t.name][1] if not isinstance(d, int) for s in _in_order(d)]
    equal = Equalities(symbols)
    taken = frozenset(s.name for s in symbols)
    state = _State(SymbolicInfo(values=dict(known), equal=equal), equal, taken, decided)
    opset = graph.opset or 18
    for node in ir.in_order(graph):
        for tensor in node.inputs:
            if isinstance(tensor, gs.Constant):
                types.setdefault(tensor.name, (numpy_dtype(tensor.dtype), ir.shape(tensor)))
            elif tensor.name and tensor.name not in types:
                raise ShapeError(f"{node.op} (node '{node.name}') reads '{tensor.name}', which nothing computes")
        _visit(Call(node, opset, types, state), types, state)
    _finish(graph, types, state)
    return state.info


def _in_order(dim: sympy.Expr) -> list[sympy.Symbol]:
    """The symbols of an input's dimension; a plain one before those of an expression."""
    return sorted(dim.free_symbols, key=lambda s: s.name)


def _visit(call: Call, types: dict[str, Type], state: _State) -> None:
    node = call.node
    rule = SHAPE_RULES.get((node.domain or "", node.op), ask_onnx)
    found = rule(call)
    for tensor, (dtype, dims) in zip(node.outputs, found, strict=False):
        types[tensor.name] = (dtype, dims)
        for axis, dim in enumerate(dims):
            if state.of_data(dim) and not nonnegative(dim):
                call.at_most(0, dim, f"axis {axis} of '{tensor.name}'")
    for tensor in node.outputs[len(found) :]:
        if tensor.name:
            raise call.error(f"output '{tensor.name}' is more than the operator has")
    if node.domain or node.op not in VALUE_RULES:
        return
    if all(isinstance(d, int) for _, dims in found for d in dims):
        most = max(np.prod(dims, dtype=np.int64) for _, dims in found)
        limit = MOST_FLOATS if any(np.dtype(dtype).kind == "f" for dtype, _ in found) else _MOST_VALUES
        value = VALUE_RULES[node.op](call, found) if most <= limit else None
        if value is not None:
            values = value if isinstance(value, list) else [value]
            state.info.values.update(zip((t.name for t in node.outputs), values, strict=False))


def _finish(graph: gs.Graph, types: dict[str, Type], state: _State) -> None:
    """Puts the equalities in everywhere and writes dtypes and shapes to the graph's variables."""
    resolve = state.equal.resolve
    state.info.constraints = [c.resolved(state.equal) for c in state.info.constraints]
    if state.equal.known:
        types = {name: (dtype, tuple(map(resolve, dims))) for name, (dtype, dims) in types.items()}
        state.info.values = {
            name: objects([resolve(v) if isinstance(v, sympy.Expr) else v for v in value.flat], value.shape)
            for name, value in state.info.values.items()
        }
    state.info.shapes = {name: dims for name, (_, dims) in types.items()}
    for tensor in [*graph.inputs, *(t for n in graph.nodes for t in n.outputs)]:
        if isinstance(tensor, gs.Variable) and tensor.name in types:
            dtype, dims = types[tensor.name]
            tensor.dtype = dtype
            tensor.shape = [format_dim(d) for d in dims]


def infer_nested(call: Call, graph: gs.Graph) -> list[Type]:
    """Infers a subgraph of ``call``'s node, which reads the outer graph's tensors, and returns its outputs' types."""
    types = call.types
    constants = {t.name: t for n in graph.nodes for t in n.inputs if isinstance(t, gs.Constant)}
    constants |= {t.name: t for t in graph.outputs if isinstance(t, gs.Constant)}
    # Constants of a subgraph may have names that others have outside.
    outside = {name: types[name] for name in constants if name in types}
    types.update({name: (numpy_dtype(t.dtype), ir.shape(t)) for name, t in constants.items()})
    for node in ir.in_order(graph):
        for tensor in node.outputs:
            call.state.info.values.pop(tensor.name, None)  # of the turn before, in a loop
        _visit(Call(node, call.opset, types, call.state), types, call.state)
    found = [types[t.name] for t in graph.outputs]
    for name in constants:
        types.pop(name, None)
    types.update(outside)
    return found


def ask_onnx(call: Call) -> list[Type]:
    """The types that ``onnx.shape_inference`` gives for one node, or those that the model declares."""
    node = call.node
    declared = [(t.dtype, t.shape) for t in node.outputs]
    value_infos = {}
    constants = []
    for tensor in node.inputs:
        if isinstance(tensor, gs.Constant) and np.prod(tensor.shape) <= _MOST_VALUES:
            constants.append(onnx.numpy_helper.from_array(np.asarray(tensor.values), tensor.name))
        elif tensor.name:
            dtype, dims = call.types[tensor.name]
            value_infos[tensor.name] = onnx.helper.make_tensor_value_info(
                tensor.name, onnx.helper.np_dtype_to_tensor_dtype(dtype), [format_dim(d) for d in dims]
            )
    bare = gs.Node(
        op=node.op,
        name=node.name,
        attrs=node.attrs,
        inputs=[gs.Variable(t.name) for t in node.inputs],
        outputs=[gs.Variable(t.name) for t in node.outputs],
        domain=node.domain,
    )
    proto = gs.exporters.onnx_exporter.OnnxExporter.export_node(bare)
    outputs = [onnx.helper.make_empty_tensor_value_info(t.name) for t in node.outputs if t.name]
    one = onnx.helper.make_graph([proto], "one", list(value_infos.values()), outputs, constants)
    opsets = [onnx.helper.make_opsetid("", call.opset)]
    if node.domain:
        opsets.append(onnx.helper.make_opsetid(node.domain, 1))
    inferred = onnx.shape_inference.infer_shapes(onnx.helper.make_model(one, opset_imports=opsets)).graph.output
    by_name = {o.name: o.type.tensor_type for o in inferred}
    found: list[Type] = []
    for index, tensor in enumerate(node.outputs):
        proto_type = by_name.get(tensor.name)
        if proto_type is not None and proto_type.HasField("shape"):
            dims = tuple(
                d.dim_value
                if d.HasField("dim_value")
                else parse_dim(d.dim_param)
                if d.dim_param
                else call.fresh(i, index)
                for i, d in enumerate(proto_type.shape.dim)
            )
            found.append((onnx.helper.tensor_dtype_to_np_dtype(proto_type.elem_type), dims))
        elif declared[index][1] is not None and declared[index][0] is not None:
            found.append((numpy_dtype(declared[index][0]), tuple(parse_dim(d) for d in declared[index][1])))
        elif tensor.name:
            raise call.error(
                f"no shape is known for output '{tensor.name}' of operator {node.domain or 'ai.onnx'}::{node.op}; "
                "export the model with its value_info, or without this operator"
            )
        else:
            found.append((None, ()))
    return found


def numpy_dtype(dtype: Any) -> Any:
    """A dtype as NumPy has it, from either NumPy's or ONNX's number for one."""
    return onnx.helper.tensor_dtype_to_np_dtype(dtype) if isinstance(dtype, int) else np.dtype(dtype)
