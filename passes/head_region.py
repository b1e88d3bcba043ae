"""What follows heads of a product and stays within a head: the nodes that a rotation or a norm by heads is made of. See ``rotary.py``."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge.epilogue.program import EpilogueProgram, Kind, Output, Param
from coda_edge.ir import ELEMENTWISE, Tensor, constant_value, descendants, in_order, same_shape, shape
from coda_edge.symbolic import Dim, same

from .head_sums import WHOLE_HEAD, is_head_sum
from .heads import LEAD, SWAP, Labels, moved
from .region import Refused, program_dtype, shared_rows

WIDEST = 512
"""Columns of a head that is summed, at most: a kernel does whole heads at a time."""


@dataclass(frozen=True)
class Root:
    """The heads: ``output`` of ``gemm``, seen as ``tensor`` by what follows, where axis ``rows`` is S and the other one H."""

    gemm: gs.Node
    program: EpilogueProgram
    output: Output
    stored: gs.Variable
    tensor: gs.Variable
    rows: int

    def lead(self, rows: int) -> tuple[Dim, ...]:
        """The dimensions before those of a head, where axis ``rows`` is S."""
        dims = shape(self.tensor)[:LEAD]
        return dims if rows == self.rows else tuple(dims[i] for i in SWAP)

    @property
    def head(self) -> tuple[int, ...]:
        """The dimensions of a head."""
        return tuple(int(d) for d in shape(self.tensor)[LEAD:])

    @property
    def size(self) -> int:
        """Columns D of a head."""
        return int(np.prod(self.head))

    @property
    def columns(self) -> tuple[int, int]:
        """The Gemm's columns that the heads are."""
        return self.output.columns or (0, int(self.gemm.inputs[1].shape[1]))


@dataclass
class Region:
    """The nodes that join, in order, and why others stay.

    ``depends``: which columns of the head each element of a result depends on. ``rows``: which axis of a result is S.
    """

    nodes: list[gs.Node]
    depends: dict[int, Labels]
    rows: dict[int, int]
    reasons: list[str] = field(default_factory=list)


def grow(graph: gs.Graph, root: Root) -> Region:
    """All that follows the heads and stays within a head."""
    columns = np.empty(root.size, object)
    columns[:] = [frozenset([c]) for c in range(root.size)]
    region = Region([], {id(root.tensor): columns.reshape(root.head)}, {id(root.tensor): root.rows})
    after = descendants(root.gemm)
    for node in in_order(graph):
        if not any(id(t) in region.depends for t in node.inputs):
            continue
        if node.domain and node.op != "RowMoments":
            continue
        try:
            made = _joined(root, region, node, after)
        except Refused as why:
            region.reasons.append(f"{node.op} '{node.name}' stays outside: {why}")
            continue
        if made is not None:
            region.nodes.append(node)
            rows = next(region.rows[id(t)] for t in node.inputs if id(t) in region.rows)
            swaps = node.op == "Transpose" and [int(p) for p in node.attrs["perm"]][:LEAD] == SWAP
            for out in node.outputs:
                region.depends[id(out)] = made
                region.rows[id(out)] = 3 - rows if swaps else rows
    return region


def _joined(root: Root, region: Region, node: gs.Node, after: set[int]) -> Labels | None:
    """What the elements of the node's results depend on; None if the node does not join."""
    if is_head_sum(node):
        if not same_shape(shape(node.inputs[0]), (*root.lead(region.rows[id(node.inputs[0])]), root.size)):
            raise Refused("it sums a part of a head")
        if root.size > WIDEST:
            raise Refused(
                f"it sums over {root.size} columns, which would be one item of the product: {WIDEST} at most leave threads enough of them"
            )
        return WHOLE_HEAD
    if node.op not in ELEMENTWISE:
        return moved(node, [region.depends.get(id(t)) for t in node.inputs])
    out = shape(node.outputs[0])
    inside = [t for t in node.inputs if id(t) in region.depends]
    rows = region.rows[id(inside[0])]
    if any(region.rows[id(t)] != rows for t in inside):
        raise Refused("its operands have their heads on different axes")
    if not same_shape(out[:LEAD], root.lead(rows)) or not all(isinstance(d, int) for d in out[LEAD:]):
        raise Refused("its result is no heads")
    if any(len(shape(t)) != len(out) for t in inside):
        raise Refused("its operands have different ranks")
    for t in node.inputs:
        if id(t) not in region.depends and literal(t) is None:
            if t.inputs and id(t.inputs[0]) in after:
                raise Refused(f"operand '{t.name}' depends on the whole result of the product")
            operand_of(root, rows, t, len(out))
    made = np.empty(tuple(int(d) for d in out[LEAD:]), object)
    arrays = [np.broadcast_to(region.depends[id(t)], made.shape) for t in inside]
    for at in np.ndindex(made.shape):
        made[at] = frozenset().union(*(a[at] for a in arrays))
    return made


def literal(tensor: Tensor) -> float | None:
    """The number that a constant of one float is."""
    value = constant_value(tensor)
    if value is None or value.size != 1 or value.dtype.kind != "f" or np.isnan(value).any():
        return None
    return float(value.reshape(-1)[0])


@dataclass(frozen=True)
class Operand:
    """How an operand lies on heads: ``axes`` of 1 that it does not need, and its dimensions ``head`` behind the heads."""

    param: Param
    axes: tuple[int, ...]
    head: tuple[int, ...]


def operand_of(root: Root, rows: int, tensor: Tensor, rank: int) -> Operand:
    """How ``tensor`` is combined with heads of ``rank`` dimensions of which axis ``rows`` is S."""
    dims = shape(tensor)
    described = f"operand '{tensor.name}' of shape {list(map(str, dims))}"
    padded = (*(1,) * (rank - len(dims)), *dims)
    head = padded[LEAD:]
    if len(dims) > rank or not all(isinstance(d, int) for d in head):
        raise Refused(f"{described} does not lie on heads")
    if not same(padded[3 - rows], 1):
        raise Refused(f"{described} differs from head to head")
    wide = [i for i, d in enumerate(head) if d != 1]
    if len(wide) > 1:
        raise Refused(f"{described} has more than one axis of columns")
    lead = root.lead(rows)
    outer = (padded[0], padded[rows])
    keep = wide[0] if wide else len(head) - 1
    unit = [3 - rows, *(LEAD + i for i in range(len(head)) if i != keep)]
    axes = tuple(a - rank + len(dims) for a in unit if a >= rank - len(dims))
    dtype = program_dtype(tensor)
    sizes = tuple(int(d) for d in head)
    if all(same(d, 1) for d in outer):
        if wide and constant_value(tensor) is None:
            raise Refused(f"{described} is a column, which must be constant")
        return Operand(
            Param((Kind.COL if wide else Kind.SCALAR).value, Kind.COL if wide else Kind.SCALAR, dtype), axes, sizes
        )
    which = shared_rows(outer, (lead[0], lead[rows]))
    if which is None:
        raise Refused(f"{described} does not lie on the rows {list(map(str, lead))}")
    if not wide:
        return Operand(Param(Kind.ROW.value, Kind.ROW, dtype, which), axes, sizes)
    return Operand(Param(Kind.TILE.value, Kind.TILE, dtype, which, root.size // 2), axes, sizes)
