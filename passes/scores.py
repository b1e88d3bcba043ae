"""From the graph between q·kᵀ and the softmax to a score program, its operands and its bands of keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from coda_edge.attention import Band
from coda_edge.epilogue.builder import Builder
from coda_edge.epilogue.ops import OPERATORS
from coda_edge.epilogue.program import Argument, EpilogueProgram, Kind, Param
from coda_edge.errors import ShapeError
from coda_edge.frontend.movement import reshape
from coda_edge.frontend.sizes import SizeEmitter
from coda_edge.ir import (
    ELEMENTWISE,
    VIEWS,
    Tensor,
    constant_value,
    descendants,
    made_by,
    producer,
    same_shape,
    shape,
)
from coda_edge.symbolic import Dim, product, same

from .bands import Bands, trimmed
from .region import DTYPES, Refused, program_dtype
from .score_terms import TRUE, Number, Operand, Product, Step, Term, Within, make

Dims: TypeAlias = "tuple[Dim, ...]"

#: Operators that are computed for every score again rather than read from a tensor that has been computed for all.
_CHEAP = frozenset(
    {"Add", "Sub", "Mul", "Neg", "Min", "Max", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}
    | {"And", "Or", "Not", "Where", "Cast"}
)
_MOST_STEPS = 12


@dataclass
class Scores:
    """Terms over the scores of one product, ``[batch, heads, queries, keys]`` however many dimensions the graph's tensors have."""

    emitter: SizeEmitter
    bands: Bands
    product: gs.Variable
    dims: Dims
    scale: float = 1.0
    _memo: dict[tuple[int, Dims], Term] = field(default_factory=dict)
    _leaves: dict[tuple[int, Dims], Term] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._after = descendants(self.product.inputs[0])
        self._acc = Product(program_dtype(self.product))
        self._scaled = make("mul", self._acc, Number(self.scale, self._acc.dtype))

    def of(self, tensor: Tensor, lead: Dims) -> Term:
        """The term of ``tensor``, which broadcasts to ``[*lead, queries, keys]``. Raises Refused if it is none."""
        key = (id(tensor), lead)
        if key not in self._memo:
            self._memo[key] = self._read(tensor, lead)
        return self._memo[key]

    def _read(self, tensor: Tensor, lead: Dims) -> Term:
        if tensor is self.product:
            return self._scaled
        value = constant_value(tensor)
        if value is not None and value.size == 1 and value.dtype.kind in "fbiu" and not np.isnan(value).any():
            return Number(float(value.reshape(-1)[0]), program_dtype(tensor))
        node = producer(tensor)
        if node is not None and id(node) in self._after:
            return self._computed(node, tensor, lead)
        known = self._band(tensor)
        if known is not None:
            return known
        if node is None or node.domain or not self._varies(tensor):
            return self._operand(tensor, lead)
        term = self._masking(node, tensor, lead)
        if term is None:
            return self._operand(tensor, lead)
        plain = not term.banded and (Kind.TILE in term.kinds or term.size > _MOST_STEPS)
        return self._operand(tensor, lead) if plain and not isinstance(term, Number) else term

    def _computed(self, node: gs.Node, tensor: Tensor, lead: Dims) -> Term:
        """What depends on the product: elementwise operators, views that split or join batch entries and heads."""
        dims = shape(tensor)
        whole = len(dims) >= 2 and same_shape(dims[-2:], self.dims[2:])
        if node.domain or not whole or not same(product(dims[:-2]), self.dims[0] * self.dims[1]):
            raise Refused(
                f"operand '{tensor.name}' depends on the whole result of the product, which is not known in a tile"
            )
        if node.op in VIEWS:
            return self.of(node.inputs[0], shape(node.inputs[0])[:-2])
        if node.op not in ELEMENTWISE:
            raise Refused(f"the scores go through {node.op} (tensor '{tensor.name}')")
        return self._step(node, [self.of(t, dims[:-2]) for t in node.inputs])

    def _masking(self, node: gs.Node, tensor: Tensor, lead: Dims) -> Term | None:
        """What is computed again: cheap operators, behind which is a band or no tensor as large as the scores."""
        if node.op == "Expand":
            return self.of(node.inputs[0], lead)
        if node.op in VIEWS and _only_leads(shape(node.inputs[0]), shape(tensor)):
            return self.of(node.inputs[0], lead)
        if node.op == "Trilu":
            return self._triangle(node, lead)
        if node.op not in _CHEAP:
            return None
        try:
            return self._step(node, [self.of(t, lead) for t in node.inputs])
        except Refused:
            return None

    def _triangle(self, node: gs.Node, lead: Dims) -> Term | None:
        x = self.of(node.inputs[0], lead)
        diagonal = 0.0 if len(node.inputs) < 2 else constant_value(node.inputs[1])
        if diagonal is None or not same_shape(shape(node.inputs[0])[-2:], self.dims[2:]):
            return None
        place = int(np.asarray(diagonal).reshape(-1)[0])
        band = Band(place, None) if node.attrs.get("upper", 1) else Band(None, place)
        return make("where", self._within(band), x, Number(0.0, x.dtype))

    def _step(self, node: gs.Node, args: list[Term]) -> Term:
        op = ELEMENTWISE[node.op]
        if op == "cast":
            to = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(node.attrs["to"])).name
            if to not in DTYPES:
                raise Refused(f"a cast to {to} is not done in a score program")
            return make(op, args[0], to=DTYPES[to])
        if len(args) < 2 or len(args) == OPERATORS[op].arity:
            return make(op, *args) if len(args) == OPERATORS[op].arity else args[0]
        term = args[0]
        for arg in args[1:]:
            term = make(op, term, arg)
        return term

    def _band(self, tensor: Tensor) -> Term | None:
        """A band, or a table of two values by one."""
        dims = shape(tensor)
        if len(dims) < 2 or not same_shape(dims[-2:], self.dims[2:]):
            return None
        queries, keys = self.dims[2:]
        compared = self.bands.compared(tensor, queries, keys)
        if compared is not None:
            band, there = compared
            if band.of_node(queries, keys) is None:
                return None
            return self._within(band) if there else make("not", self._within(band))
        table = self.bands.table(tensor, queries, keys)
        if table is None or table.band.of_node(queries, keys) is None:
            return None
        dtype = program_dtype(tensor)
        return make("where", self._within(table.band), Number(table.inside, dtype), Number(table.outside, dtype))

    def _within(self, band: Band) -> Term:
        band = trimmed(band, *self.dims[2:])
        return TRUE if band == Band(None, None) else Within(band)

    def _varies(self, tensor: Tensor) -> bool:
        """Whether a tensor varies over queries and keys."""
        dims = shape(tensor)
        return len(dims) >= 2 and not same(dims[-1], 1) and not same(dims[-2], 1)

    def _operand(self, tensor: Tensor, lead: Dims) -> Term:
        key = (id(tensor), lead)
        if key not in self._leaves:
            self._leaves[key] = self._leaf(tensor, lead)
        return self._leaves[key]

    def _leaf(self, tensor: Tensor, lead: Dims) -> Term:
        have = shape(tensor)
        padded = (*(1,) * (len(lead) + 2 - len(have)), *have)
        placed = regrouped(padded[:-2], lead, self.dims[:2]) if len(padded) == len(lead) + 2 else None
        inner = padded[-2:]
        if placed is None or not all(same(d, 1) or same(d, w) for d, w in zip(inner, self.dims[2:], strict=True)):
            raise Refused(
                f"operand '{tensor.name}' of shape {list(map(str, have))} does not lie on the scores "
                f"{list(map(str, self.dims))}"
            )
        rows, columns = (not same(d, 1) for d in inner)
        kind = Kind.TILE if rows and columns else Kind.ROW if rows else Kind.COL
        if kind is Kind.COL and not columns and all(same(d, 1) for d in placed):
            kind = Kind.SCALAR
        return Operand(tensor, (*placed, *inner), kind, program_dtype(tensor))


def _only_leads(before: Dims, after: Dims) -> bool:
    """Whether a view only adds or drops leading dimensions of 1."""
    short, long = sorted((before, after), key=len)
    return all(same(d, 1) for d in long[: len(long) - len(short)]) and same_shape(long[len(long) - len(short) :], short)


def regrouped(dims: Dims, lead: Dims, base: Dims, grouped: bool = False) -> Dims | None:
    """``dims``, each whole or 1 of ``lead``, as dimensions of ``base``, which has as many elements.

    The first may come out as a divisor: there are fewer entries, which take turns. With ``grouped``, so may the last: entries of which
    each is for some neighbours. None if there are no such dimensions.
    """
    if not all(same(d, 1) or same(d, w) for d, w in zip(dims, lead, strict=True)):
        return None
    if same_shape(lead, base):
        return dims
    at, result = 0, list[Dim]()
    for axis, need in enumerate(base):
        ends = range(at, len(lead) + 1)
        end = next((e for e in ends if same(product(lead[at:e]), need)), None)
        if end is None:
            # Batch entries and heads in one dimension.
            rest = base[axis:]
            joint = at == len(lead) - 1 and same(lead[at], product(rest))
            return (*result, *((1,) * len(rest) if same(dims[at], 1) else rest)) if joint else None
        whole = [not same(dims[i], 1) for i in range(at, end) if not same(lead[i], 1)]
        if not any(whole):
            result.append(1)
        elif all(whole):
            result.append(need)
        elif (axis == 0 and whole == sorted(whole)) or (grouped and axis and whole == sorted(whole, reverse=True)):
            result.append(product(dims[at:end]))
        else:
            return None
        at = end
    return tuple(result) if all(same(lead[i], 1) for i in range(at, len(lead))) else None


@dataclass
class Written:
    """A score program with what it reads."""

    program: EpilogueProgram
    operands: list[Tensor]
    bands: tuple[Band, ...]


def write(scores: Scores, term: Term) -> Written:
    """The program of ``term``."""
    return _Writer(scores).written(term)


class _Writer:
    def __init__(self, scores: Scores) -> None:
        self._scores = scores
        self._builder = Builder(params=[Param("acc", Kind.TILE, scores._acc.dtype)])
        self._bands: dict[Band, str] = {}
        self._operands: dict[int, tuple[str, Operand]] = {}
        self._values: dict[Term, str] = {}

    def written(self, term: Term) -> Written:
        for within in _bands_of(term):
            if within.band not in self._bands:
                name = self._builder.param(f"band{len(self._bands)}", Kind.TILE, "bool")
                self._bands[within.band] = name
        try:
            self._builder.output("scores", str(self._value(term)))
            program = self._builder.build(drop_unused_params=True)
        except ShapeError as e:
            raise Refused(str(e)) from e
        queries, keys = self._scores.dims[2:]
        bands = [band.of_node(queries, keys) for band in self._bands]
        operands = {name: operand for name, operand in self._operands.values()}
        read = [p.name for p in program.params[1:] if p.name in operands]
        return Written(
            program, [self._placed(operands[name]) for name in read], tuple(b for b in bands if b is not None)
        )

    def _value(self, term: Term) -> Argument:
        if isinstance(term, Number):
            if term.dtype == "bool":
                raise Refused("a mask is the same for all keys")
            return term.value
        if term not in self._values:
            self._values[term] = self._new(term)
        return self._values[term]

    def _new(self, term: Term) -> str:
        if isinstance(term, Product):
            return "acc"
        if isinstance(term, Within):
            return self._bands[term.band]
        if isinstance(term, Operand):
            name = self._builder.param(f"{term.kind.value}{len(self._operands)}", term.kind, term.dtype)
            self._operands[id(term)] = (name, term)
            return name
        assert isinstance(term, Step)
        args = [self._value(a) for a in term.args]
        if OPERATORS[term.op].commutes:
            taken = {name for name, _ in self._operands.values()}
            args.sort(key=lambda a: 2 if isinstance(a, float) else int(a in taken))
        return self._builder.add(term.op, *args, **({"to": term.to} if term.to else {}))

    def _placed(self, operand: Operand) -> Tensor:
        """The operand's tensor in the scores' dimensions: as it is where only leading ones are missing."""
        tensor, have = operand.tensor, shape(operand.tensor)
        if len(have) <= 4 and same_shape((*(1,) * (4 - len(have)), *have), operand.dims):
            return tensor
        return viewed(self._scores.emitter, tensor, operand.dims)


def viewed(emitter: SizeEmitter, tensor: Tensor, dims: Sequence[Dim]) -> Tensor:
    """``tensor`` in the shape ``dims``, of as many elements."""
    value = constant_value(tensor)
    source: Tensor | None = tensor
    while source is not None:
        # A view of a view that gives the first one's shape is that.
        if same_shape(shape(source), dims):
            return source
        view = made_by(source, *VIEWS)
        source = view.inputs[0] if view is not None else None
    if value is not None:
        return emitter.editor.constant(f"{tensor.name}.scores", value.reshape([int(d) for d in dims]))
    return reshape(emitter, tensor, dims, f"{tensor.name}.scores")


def _bands_of(term: Term) -> list[Within]:
    return [term] if isinstance(term, Within) else [b for a in term.parts for b in _bands_of(a)]
