"""How ``coda.Attention`` is lowered: from a graph node to the arguments of ``attention``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_graphsurgeon as gs

from ..attention import Operands, bands
from ..epilogue.program import EpilogueProgram
from ..ir import Tensor, shape
from ..symbolic import Dim, same
from .attention import AttentionSizes, Extras, ScoreOperand, lower_attention
from .kernel import KernelCall
from .problems import attention_problem
from .registry import Context, kernel


@kernel("Attention")
def lower_attention_node(node: gs.Node, context: Context) -> list[KernelCall]:
    """``coda.Attention``."""
    schedule = context.schedules.attention(attention_problem(node, context.target))
    return [attention_call(node, context.target, lower_attention, schedule)]


def attention_call(node: gs.Node, target: Any, lower: Callable[..., KernelCall], schedule: Any = None) -> KernelCall:
    """The call of a ``coda.Attention`` that ``lower``, of the manner of ``lower_attention``, makes for ``target``."""
    given = Operands.of(node)
    batch, keys = given.batch, given.keys
    _, heads, queries, depth = shape(given.q)
    _, kv_heads, _, columns = shape(given.v)
    parts = (("q", given.q), ("k", given.k), ("v", given.v))
    sizes = AttentionSizes(
        batch,
        heads,
        queries,
        keys,
        int(depth),
        int(columns),
        int(heads) // int(kv_heads),
        0 if given.past is None else shape(given.past[0])[2],
        tuple(name for name, t in parts if not same(shape(t)[0], batch)),
    )
    names = [t.name for t in node.outputs]
    extras = Extras(
        None if given.past is None else (given.past[0].name, given.past[1].name),
        (names[1], names[2]) if node.attrs.get("present", 0) else None,
        None if given.sink is None else _operand(given, given.sink),
        tuple(band.at(queries, keys) for band in bands(node)),
        EpilogueProgram.parse(node.attrs["probability"]) if "probability" in node.attrs else None,
    )
    return lower(
        target,
        node.name,
        EpilogueProgram.parse(node.attrs["score"]),
        (given.q.name, given.k.name, given.v.name),
        [_operand(given, t) for t in given.scores],
        names[0],
        sizes,
        bool(node.attrs["guard"]),
        schedule,
        extras=extras,
        source=tuple(node.attrs.get("source", ())),
    )


def _operand(given: Operands, tensor: Tensor) -> ScoreOperand:
    return ScoreOperand(tensor.name, _four(tensor), given.repeated(tensor))


def _four(tensor: Tensor) -> tuple[Dim, Dim, Dim, Dim]:
    """The shape of a score operand, with leading ones to four dimensions."""
    dims = (*(1,) * (4 - len(shape(tensor))), *shape(tensor))
    return dims[0], dims[1], dims[2], dims[3]
