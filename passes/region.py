"""From a region of elementwise ONNX nodes over one tile to an epilogue program and its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from coda_edge.epilogue.builder import Builder
from coda_edge.epilogue.ops import OPERATORS
from coda_edge.epilogue.program import Argument, EpilogueProgram, Kind, Param, Rows
from coda_edge.errors import ShapeError
from coda_edge.ir import (
    ELEMENTWISE,
    VIEWS,
    GraphEditor,
    Tensor,
    constant_value,
    consumers,
    descendants,
    is_output,
    made_by,
    producer,
    shape,
)
from coda_edge.symbolic import Dim, same

Dims: TypeAlias = Sequence[Dim]
PlacementRule: TypeAlias = Callable[[Dims, Dims], "Placement | None"]

DTYPES = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int8": "i8",
    "uint8": "u8",
    "int32": "i32",
    "int64": "i64",
    "bool": "bool",
}


@dataclass(frozen=True)
class Placement:
    """How an operand lies on a tile: what it varies over, and which rows it has."""

    kind: Kind
    rows: Rows = Rows.ALL


class Refused(Exception):
    """Why a node cannot join a region, in one line."""


def program_dtype(tensor: Tensor) -> str:
    """The dtype of ``tensor`` as epilogue programs spell it."""
    name = np.dtype(tensor.dtype).name
    if name not in DTYPES:
        raise Refused(f"tensor '{tensor.name}' is {name}, which no epilogue computes in")
    return DTYPES[name]


def row_kind(dims: Dims, tile: Dims) -> Placement | None:
    """How an operand of shape ``dims`` lies on a tile whose rows are all leading dimensions of ``tile`` together."""
    padded = _padded(dims, tile)
    if padded is None or not (same(padded[-1], 1) or same(padded[-1], tile[-1])):
        return None
    narrow = same(padded[-1], 1)
    if all(same(d, 1) for d in padded[:-1]) and (narrow or not all(same(t, 1) for t in tile[:-1])):
        return Placement(Kind.SCALAR if narrow else Kind.COL)
    rows = shared_rows(padded[:-1], tile[:-1])
    return None if rows is None else Placement(Kind.ROW if narrow else Kind.TILE, rows)


def shared_rows(dims: Dims, lead: Dims) -> Rows | None:
    """Which rows an operand with leading dimensions ``dims`` has, where the tile has ``lead``: ``[B, …]`` if some are shared."""
    whole = [same(d, t) for d, t in zip(dims, lead, strict=True)]
    if all(whole):
        return Rows.ALL
    if len(lead) < 2:
        return None
    if all(whole[1:]) and same(dims[0], 1):
        return Rows.POSITION
    return Rows.BATCH if whole[0] and all(same(d, 1) for d in dims[1:]) else None


def score_kind(dims: Dims, tile: Dims) -> Placement | None:
    """How an operand lies on a score tile ``[Sq, Sk]``: the dimensions before may each be whole or 1."""
    padded = _padded(dims, tile)
    if padded is None or not all(same(d, t) or same(d, 1) for d, t in zip(padded, tile, strict=True)):
        return None
    rows, cols = (not same(d, 1) for d in padded[-2:])
    if rows:
        return Placement(Kind.TILE if cols else Kind.ROW)
    return Placement(Kind.COL if cols or any(not same(d, 1) for d in padded[:-2]) else Kind.SCALAR)


def _padded(dims: Dims, tile: Dims) -> tuple[Dim, ...] | None:
    return (*(1,) * (len(tile) - len(dims)), *dims) if len(dims) <= len(tile) else None


def _is_single(tensor: Tensor) -> bool:
    return all(same(d, 1) for d in shape(tensor))


class Region:
    """A growing epilogue program over the tile ``acc`` of shape ``tile``.

    With ``inline``, an operand that elementwise nodes compute is computed in the epilogue again from what they read, where that
    reads no more than the operand itself; one that batch entries or positions share is computed once, outside. What depends on the accumulator's producer by another way can't be an operand.
    """

    def __init__(
        self, editor: GraphEditor, acc: gs.Variable, tile: Dims, placement: PlacementRule, inline: bool
    ) -> None:
        self.graph = editor.graph
        self._editor = editor
        self.tile = tuple(tile)
        self.builder = Builder(params=[Param("acc", Kind.TILE, program_dtype(acc))])
        self._operands: dict[str, Tensor] = {}
        self._placement = placement
        self._inline = inline
        self._values: dict[int, Argument] = {id(acc): "acc"}
        self._after = descendants(acc.inputs[0])
        self._recomputed: list[gs.Node] = []

    @property
    def recomputed(self) -> list[gs.Node]:
        """The nodes outside the region that it computes again."""
        return list(self._recomputed)

    def build(self) -> tuple[EpilogueProgram, list[Tensor]]:
        """The program, and the tensors of its parameters behind the accumulator."""
        program = self.builder.build(drop_unused_params=True)
        return program, [self._operands[p.name] for p in program.params[1:]]

    def value(self, tensor: Tensor) -> str:
        """The name of a tensor computed in the region."""
        return str(self._values[id(tensor)])

    def set(self, tensor: Tensor, value: str) -> None:
        """Says that ``tensor`` is ``value``."""
        self._values[id(tensor)] = value

    def add(self, node: gs.Node) -> None:
        """Appends an elementwise node. Raises Refused, with nothing changed that matters, if an operand does not fit."""
        args = [self.argument(t) for t in node.inputs]
        op = ELEMENTWISE[node.op]
        try:
            self._values[id(node.outputs[0])] = self._step(node, op, args)
        except ShapeError as e:
            raise Refused(str(e)) from e

    def _step(self, node: gs.Node, op: str, args: list[Argument]) -> str:
        if op == "cast":
            target = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(node.attrs["to"])).name
            if target not in DTYPES:
                raise Refused(f"a cast to {target} is not done in an epilogue")
            return self.builder.add(op, args[0], to=DTYPES[target])
        if OPERATORS[op].commutes:
            args.sort(key=self._rank)
        if node.op not in ("Min", "Max"):
            return self.builder.add(op, *args)
        value = args[0]
        for arg in args[1:]:
            value = self.builder.add(op, value, arg)
        return str(value)

    def _rank(self, arg: Argument) -> int:
        """One order for the operands of commuting operators, so that equal epilogues have equal text."""
        return 2 if isinstance(arg, float) else int(arg in self._operands)

    def argument(self, tensor: Tensor) -> Argument:
        """The value, literal or operand that stands for ``tensor``."""
        if id(tensor) in self._values:
            return self._values[id(tensor)]
        constant = constant_value(tensor)
        if constant is not None and constant.size == 1 and constant.dtype.kind == "f" and not np.isnan(constant).any():
            return float(constant.reshape(-1)[0])
        view = made_by(tensor, *VIEWS) if self._inline and _is_single(tensor) else None
        if view is not None and _is_single(view.inputs[0]) and len(shape(view.inputs[0])) <= len(self.tile):
            return self.argument(view.inputs[0])
        if self._inline and constant is None and self._recomputable(tensor):
            source = producer(tensor)
            assert source is not None
            self.add(source)
            self._recomputed.append(source)
            return self._values[id(tensor)]
        source = producer(tensor)
        if source is not None and id(source) in self._after:
            raise Refused(
                f"operand '{tensor.name}' depends on the whole result of the product, which is not known in a tile"
            )
        lies = self._placement(shape(tensor), self.tile)
        if lies is None:
            raise Refused(
                f"operand '{tensor.name}' of shape {list(map(str, shape(tensor)))} does not lie on the tile "
                f"{list(map(str, self.tile))} as a row, a column, a scalar or a whole tensor"
            )
        operand, kind = tensor, lies.kind
        if kind is Kind.COL and constant is not None and self._placement is row_kind:
            operand = self._editor.constant(f"{tensor.name}.col", constant.reshape(-1))
        name = self.builder.param(f"{kind.value}{len(self._operands)}", kind, program_dtype(tensor), lies.rows)
        self._operands[name] = operand
        self._values[id(tensor)] = name
        return name

    def _recomputable(self, tensor: Tensor) -> bool:
        """Whether computing ``tensor`` here again beats reading it: a row, or what at most one whole tensor makes."""
        node = producer(tensor)
        if node is None or node.domain or node.op not in ELEMENTWISE or is_output(self.graph, tensor):
            return False
        lies = self._placement(shape(tensor), self.tile)
        if _is_single(tensor):
            return all(_is_single(t) for t in node.inputs)
        if lies is not None and lies.kind is Kind.ROW:
            return all(self._placement(shape(t), self.tile) is not None for t in node.inputs)
        if lies is not None and lies.rows is not Rows.ALL:
            return False
        if any(u.op not in ELEMENTWISE or u.domain for u in consumers(tensor)):
            return False
        leaves = self._leaves(tensor, {})
        return leaves is not None and len(leaves) <= 1

    def _leaves(self, tensor: Tensor, seen: dict[int, Tensor]) -> dict[int, Tensor] | None:
        """The stored whole tensors that ``tensor`` is computed from; None if one does not lie on the tile."""
        lies = self._placement(shape(tensor), self.tile)
        if lies is None:
            return None
        if lies.kind is not Kind.TILE or id(tensor) in self._values:
            return seen
        node = made_by(tensor, *ELEMENTWISE) if lies.rows is Rows.ALL else None
        plain = node is not None and all(u.op in ELEMENTWISE for u in consumers(tensor))
        if node is None or not plain or is_output(self.graph, tensor):
            seen[id(tensor)] = tensor
            return seen
        for t in node.inputs:
            found = self._leaves(t, seen)
            if found is None:
                return None
        return seen
