"""The ONNX function body of ``coda.Attention``: what its kernel computes, in basic operators."""

from __future__ import annotations

import onnx_graphsurgeon as gs
import sympy
from onnx import NodeProto, helper

from .attention import KEYS, QUERIES, Band, Operands, bands
from .epilogue.onnx import ONNX_DTYPES, Emitter, emit_onnx
from .epilogue.program import EpilogueProgram
from .ir import Tensor
from .symbolic import Dim

#: Names of the inputs before the operands of the score program, by the attribute that asks for them.
_INPUTS = (("", ("q", "k", "v")), ("past", ("past_k", "past_v")), ("sink", ("sink",)))


def input_names(node: gs.Node) -> list[str]:
    """The names of the inputs before the operands of the score program."""
    return [name for flag, names in _INPUTS if not flag or node.attrs.get(flag, 0) for name in names]


def output_names(node: gs.Node) -> list[str]:
    """The names of the outputs."""
    return ["Y", *(("present_k", "present_v") if node.attrs.get("present", 0) else ())]


def attention_nodes(node: gs.Node, program: EpilogueProgram, inputs: list[str]) -> list[NodeProto]:
    """Y = merge_heads(probability(softmax(score(q @ kᵀ, operands…))) @ v), of ``inputs`` in the node's order."""
    given = Operands.of(node)
    before = Emitter("product_")
    named = dict(zip(input_names(node), inputs, strict=False))
    whole = {t: before.node("Concat", named[f"past_{t}"], named[t], axis=2) if given.past else named[t] for t in "kv"}
    k, v = (_repeated(before, whole[name], given.q, t) for name, t in (("k", given.k), ("v", given.v)))
    product = before.node("MatMul", inputs[0], before.node("Transpose", k, perm=[0, 1, 3, 2]))
    operands = [
        _taking_turns(before, name, product) if given.repeated(tensor) else name
        for name, tensor in zip(inputs[len(named) :], given.scores, strict=True)
    ]
    acc_dtype = program.params[0].dtype
    acc = product if _element_type(given.q) == ONNX_DTYPES[acc_dtype] else before.cast(product, acc_dtype)
    within = [_within(before, band, inputs[0], whole["k"]) for band in bands(node)]
    score = emit_onnx(program, [acc, *within, *operands], ["scores"], "score_")
    middle = Emitter("softmax_")
    dtype = program.dtypes()[program.outputs[0].value]
    p = _softmax(middle, named.get("sink"), given)
    if node.attrs.get("guard", 0):
        p = middle.node("Where", middle.node("IsNaN", p), middle.literal(0.0, dtype), p)
    weights = list(middle.nodes)
    if "probability" in node.attrs:
        rounding = EpilogueProgram.parse(node.attrs["probability"])
        weights = emit_onnx(rounding, [p], ["probabilities"], "probability_", before=weights)
        p = "probabilities"
    after = Emitter("out_")
    if ONNX_DTYPES[dtype] != _element_type(given.v):
        p = after.node("Cast", p, to=_element_type(given.v))
    heads = after.node("Transpose", after.node("MatMul", p, v), perm=[0, 2, 1, 3])
    width = node.outputs[0].shape[-1] if node.outputs[0].shape else -1
    merged = after.node("Reshape", heads, after.ints([0, 0, width if isinstance(width, int) else -1]))
    after.name_results([merged], ["Y"])
    present = zip((whole["k"], whole["v"]), output_names(node)[1:], strict=False)
    copies = [helper.make_node("Identity", [rows], [name]) for rows, name in present]
    return [*before.nodes, *score, *weights, *after.nodes, *copies]


def _softmax(emitter: Emitter, sink: str | None, given: Operands) -> str:
    """The probabilities of ``scores``; those of the sink left out."""
    if sink is None:
        return emitter.node("Softmax", "scores", axis=-1)
    one = emitter.ints([1])
    lead = emitter.node("Shape", "scores", end=-1)
    column = emitter.node("Expand", sink, emitter.node("Concat", lead, one, axis=0))
    p = emitter.node("Softmax", emitter.node("Concat", "scores", column, axis=-1), axis=-1)
    return emitter.node("Slice", p, emitter.ints([0]), emitter.ints([-1]), emitter.ints([-1]))


def _within(emitter: Emitter, band: Band, q: str, k: str) -> str:
    """Whether each key is in the band of each query: bool ``[Sq, Sk]``."""
    sizes = {symbol: emitter.node("Shape", t, start=2, end=3) for symbol, t in ((QUERIES, q), (KEYS, k))}
    axis = emitter.ints([0])
    i, j = (emitter.node("Range", *_ends(emitter, sizes[s], axis)) for s in (QUERIES, KEYS))
    apart = emitter.node("Sub", j, emitter.node("Unsqueeze", i, emitter.ints([1])))
    tests = [
        emitter.node(op, apart, _size(emitter, bound, sizes))
        for op, bound in (("GreaterOrEqual", band.first), ("LessOrEqual", band.last))
        if bound is not None
    ]
    return tests[0] if len(tests) == 1 else emitter.node("And", *tests)


def _ends(emitter: Emitter, size: str, axis: str) -> tuple[str, str, str]:
    zero, one = (emitter.node("Squeeze", emitter.ints([n]), axis) for n in (0, 1))
    return zero, emitter.node("Squeeze", size, axis), one


def _size(emitter: Emitter, dim: Dim, sizes: dict[sympy.Symbol, str]) -> str:
    """A sum of sizes and a number."""
    rest = sympy.sympify(dim)
    total = None
    for symbol, name in sizes.items():
        factor = int(rest.coeff(symbol))
        rest = sympy.expand(rest - factor * symbol)
        if factor:
            term = emitter.node("Mul", name, emitter.ints([factor]))
            total = term if total is None else emitter.node("Add", total, term)
    number = emitter.ints([int(rest)])
    return number if total is None else emitter.node("Add", total, number)


def _taking_turns(emitter: Emitter, operand: str, product: str) -> str:
    """An operand with fewer batch entries than ``product``, repeated."""
    batch, have = (emitter.node("Shape", t, start=0, end=1) for t in (product, operand))
    repeats = emitter.node("Concat", emitter.node("Div", batch, have), emitter.ints([1, 1, 1]), axis=0)
    return emitter.node("Tile", operand, repeats)


def _repeated(emitter: Emitter, name: str, q: Tensor, kv: Tensor) -> str:
    """Keys or values ``[B,Hkv,S,D]`` as ``[B,H,S,D]``: each head once for every query head of its group."""
    heads, kv_heads, depth = q.shape[1], kv.shape[1], kv.shape[3]
    if heads == kv_heads:
        return name
    grouped = emitter.node("Unsqueeze", name, emitter.ints([2]))
    repeated = emitter.node("Expand", grouped, emitter.ints([1, 1, heads // kv_heads, 1, 1]))
    ends = [emitter.ints([0, heads]), emitter.node("Shape", name, start=2, end=3), emitter.ints([depth])]
    return emitter.node("Reshape", repeated, emitter.node("Concat", *ends, axis=0))


def _element_type(tensor: Tensor) -> int:
    return int(helper.np_dtype_to_tensor_dtype(tensor.dtype))
