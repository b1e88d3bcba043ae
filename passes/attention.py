"""softmax(A·B + …)·C is one ``Attention``: scores never reach memory.

Rule: a Softmax over the last axis, whose input is a graph of elementwise operators and views over one MatMul ``[…,Sq,D] @ […,D,Sk]``,
and whose result only feeds a MatMul with ``[…,Sk,Dv]``, perhaps through a guard that turns NaN into 0 and behind a score of a key without
a value (a sink: a column joined to the scores and cut off again). What stands between the MatMul and the Softmax becomes the score
program, and the bands of keys in it (causal, a window) attributes: see ``scores`` and ``score_terms``.

1. Constant scales of q and k, wherever the exporter put them, go into the score program: (s·q)·(t·k) = s·t·(q·k).
2. Leading dimensions, however many, are seen as batch entries and heads; where a tensor has both in one dimension, by the way it was made.
3. Keys and values repeated for groups of query heads, in any spelling, are handed over unrepeated (``attention_operands``).
4. Rows joined behind past rows, ``Concat(past, new)``, are handed over apart; the joined rows are outputs of the Attention if anyone reads them.
5. Probabilities times a factor of heads and keys are a product with values that are multiplied: (p·w)·v = p·(w·v).
6. Of several products that are added up, the first of the widest is the product; the others are operands of the scores.
7. Steps by numbers alone that round the probabilities, as a quantised model has them, are a program of their own (``rounding``).

The result is ``[B,Sq,H·Dv]``, so the head merge behind it disappears.

Conditions: H, D and Dv are numbers; k and v have as many heads, H or a divisor; no score or probability is read by anyone else.
Refused, with the node named: probabilities that are an output or are read twice, since then they have to be in memory anyway and a
second computation saves nothing; operands that do not broadcast to the scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from coda_edge import frontend
from coda_edge.attention import bands_text
from coda_edge.frontend.movement import compose_movement, trace
from coda_edge.frontend.sizes import SizeEmitter
from coda_edge.ir import (
    DOMAIN,
    ELEMENTWISE,
    VIEWS,
    Tensor,
    constant_value,
    consumers,
    in_order,
    is_output,
    made_by,
    producer,
    remove_dead,
    same_shape,
    scalar_value,
    shape,
    sole_consumer,
    sort,
)
from coda_edge.symbolic import Dim, product, same, simplify

from .attention_operands import HEADS, appended, shared, transposed, unscaled
from .bands import Bands
from .base import Pass, PassLog, sources
from .region import Refused
from .rounding import rounding_program, rounding_steps
from .score_terms import Number, make
from .scores import Scores, Written, regrouped, viewed, write


@dataclass(frozen=True)
class _Match:
    product: gs.Node  # q·kᵀ
    scores: Tensor  # the Softmax's input, without the sink
    between: list[gs.Node]  # from the product to the scores, in order
    output: gs.Node  # p·v
    v: Tensor
    guard: bool
    sink: Tensor | None
    weights: list[Tensor]  # what the probabilities are multiplied with
    rounding: list[gs.Node]  # what becomes of them before they are multiplied with the values


def run(graph: gs.Graph, log: PassLog) -> int:
    """Fuses every attention; returns how many."""
    info = frontend.infer(graph)
    emitter = SizeEmitter(graph, info)
    bands = Bands(graph, info)
    count = moved = 0
    for node in in_order(graph):
        if node.op != "Softmax" or node.domain:
            continue
        try:
            match = _match(graph, node)
            _Rewriter(graph, emitter, bands, node, match).rewrite()
            count += 1
            moved += len(shape(match.product.outputs[0])) != 4
        except Refused as why:
            log.refuse(PASS.name, node, str(why))
    remove_dead(graph)  # also what was made for one that was refused
    sort(graph)
    if moved and compose_movement(graph, info):
        remove_dead(graph)
        sort(graph)
    return count


def _match(graph: gs.Graph, softmax: gs.Node) -> _Match:
    scores = softmax.inputs[0]
    rank = len(shape(scores))
    if int(softmax.attrs.get("axis", -1)) % rank != rank - 1:
        raise Refused("the softmax is not over the last axis")
    scores, sink = _without_sink(graph, scores)
    output, guard, weights, rounding = _consumer(graph, softmax.outputs[0], sink is not None)
    probabilities, v = output.inputs
    if producer(probabilities) is producer(v) and producer(v) is not None:
        raise Refused("the probabilities multiply themselves, expected a tensor of values")
    found, between = _product(graph, scores, softmax)
    return _Match(found, scores, between, output, v, guard, sink, weights, rounding)


def _without_sink(graph: gs.Graph, scores: Tensor) -> tuple[Tensor, Tensor | None]:
    """The scores without a last column that was joined to them, and that column."""
    node = made_by(scores, "Concat")
    rank = len(shape(scores))
    if node is None or len(node.inputs) != 2 or int(node.attrs["axis"]) % rank != rank - 1:
        return scores, None
    rest, column = node.inputs
    if not same(shape(column)[-1], 1) or sole_consumer(graph, scores) is None:
        return scores, None
    return rest, column


def _consumer(graph: gs.Graph, p: Tensor, sunk: bool) -> tuple[gs.Node, bool, list[Tensor], list[gs.Node]]:
    """The MatMul that reads the probabilities, whether a NaN guard stands before it, and how they are multiplied and rounded."""
    guard = False
    weights: list[Tensor] = []
    while True:
        if is_output(graph, p):
            raise Refused("the probabilities are read outside: they are an output of the graph")
        user = sole_consumer(graph, p)
        if sunk and user is not None:
            if user.op != "Slice" or not _cuts_last(user):
                break
            p, sunk = user.outputs[0], False
            continue
        if user is None:
            where = _guard(p)
            if where is None:
                break
            p, guard = where.outputs[0], True
        elif user.op == "MatMul" and user.inputs[0] is p and user.inputs[1] is not p:
            return user, guard, weights, []
        elif (rounding := rounding_steps(graph, p)) and not weights:
            user = sole_consumer(graph, rounding[-1].outputs[0])
            if user is None or user.op != "MatMul" or user.inputs[0] is not rounding[-1].outputs[0]:
                break
            return user, guard, weights, rounding
        elif user.op in VIEWS and same_shape(shape(user.outputs[0])[-2:], shape(p)[-2:]) and not weights:
            p = user.outputs[0]
        elif user.op == "Mul" and same_shape(shape(user.outputs[0]), shape(p)):
            (weight,) = [t for t in user.inputs if t is not p] or [p]
            if weight is p or (len(shape(weight)) > 1 and not same(shape(weight)[-2], 1)):
                break
            weights.append(weight)
            p = user.outputs[0]
        else:
            break
    raise Refused("the probabilities are read by something else than one MatMul with the values")


def _cuts_last(node: gs.Node) -> bool:
    """Whether a Slice leaves out the last column."""
    width = shape(node.inputs[0])[-1]
    rest = shape(node.outputs[0])[-1]
    starts = constant_value(node.inputs[1])
    from_first = starts is not None and starts.size == 1 and not starts.any()
    return from_first and same(simplify(rest + 1), width)


def _guard(p: Tensor) -> gs.Node | None:
    """The Where that makes NaN probabilities 0, if it and its test are all that read them."""
    for where in (u for u in p.outputs if u.op == "Where"):
        test = made_by(where.inputs[0], "IsNaN")
        if test is None or test.inputs[0] is not p or scalar_value(where.inputs[1]) != 0.0:
            continue
        if where.inputs[2] is p and len({id(u) for u in p.outputs}) == 2:
            return where
    return None


def _product(graph: gs.Graph, scores: Tensor, softmax: gs.Node) -> tuple[gs.Node, list[gs.Node]]:
    """The MatMul q·kᵀ, and the nodes from it to ``scores``."""
    size = shape(scores)[-2:]
    region: dict[int, gs.Node] = {}
    products: dict[int, gs.Node] = {}
    stack = [scores]
    while stack:
        tensor = stack.pop()
        node = producer(tensor)
        if node is None or id(node) in region or not same_shape(shape(tensor)[-2:], size):
            continue
        if node.op == "MatMul" and not node.domain and any(constant_value(t) is None for t in node.inputs):
            products[id(node)] = node
        elif node.op in VIEWS or (node.op in ELEMENTWISE and _as_many(tensor, scores)):
            region[id(node)] = node
            stack.extend(node.inputs)
    if not products:
        raise Refused("the softmax's input comes from no product of run-time tensors")
    reasons = []
    # A mask may be a product as well, of columns with rows.
    order = sorted((n for n in in_order(graph) if id(n) in products), key=_width, reverse=True)
    for found in order:
        try:
            return found, _between(graph, found, scores, region)
        except Refused as why:
            reasons.append(str(why))
    raise Refused(reasons[0])


def _width(node: gs.Node) -> int:
    depth = shape(node.inputs[0])[-1]
    return depth if isinstance(depth, int) else 0


def _as_many(tensor: Tensor, scores: Tensor) -> bool:
    return same(product(shape(tensor)), product(shape(scores)))


def _between(graph: gs.Graph, found: gs.Node, scores: Tensor, region: dict[int, gs.Node]) -> list[gs.Node]:
    """The nodes of ``region`` that depend on the product, in order. Raises Refused if others read any of them."""
    if not _as_many(found.outputs[0], scores):
        raise Refused(f"the product '{found.outputs[0].name}' is repeated for the scores")
    reached = {id(found)}
    order: list[gs.Node] = []
    for node in in_order(graph):
        if id(node) in region and any(id(producer(t)) in reached for t in node.inputs):
            reached.add(id(node))
            order.append(node)
    for node in (found, *order):
        for out in node.outputs:
            outside = out is not scores and any(id(u) not in reached for u in out.outputs)
            if is_output(graph, out) or outside or (out is scores and len(consumers(out)) != 1):
                raise Refused(f"the scores are also read outside (tensor '{out.name}')")
    return order


class _Rewriter:
    """The writing of one Attention."""

    def __init__(self, graph: gs.Graph, emitter: SizeEmitter, bands: Bands, softmax: gs.Node, match: _Match) -> None:
        self.graph = graph
        self.emitter = emitter
        self.editor = emitter.editor
        self.bands = bands
        self.softmax = softmax
        self.match = match
        self.lead = shape(match.product.outputs[0])[:-2]
        self.base = _batch_and_heads(graph, match, self.lead)

    def rewrite(self) -> None:
        """Writes it. Raises Refused if anything does not fit."""
        match, editor = self.match, self.editor
        q, q_scale = unscaled(match.product.inputs[0])
        kt, k_scale = unscaled(match.product.inputs[1])
        v = self._weighted(match.v)
        q = self._viewed(q, self.lead, "queries")
        k = self._viewed(transposed(editor, kt), self.lead, "keys", grouped=True)
        v = self._viewed(v, shape(match.output.outputs[0])[:-2], "values", grouped=True)
        k, v = shared(self.emitter, k, v)
        self._check(q, k, v)
        written = self._program(q_scale * k_scale)
        inputs, attrs = [q, k, v], dict[str, object]()
        outputs: list[gs.Variable] = []
        joined = [appended(t) for t in (k, v)]
        if joined[0] is not None and joined[1] is not None and self._alike(joined[0], joined[1]):
            inputs = [q, joined[0].inputs[1], joined[1].inputs[1], joined[0].inputs[0], joined[1].inputs[0]]
            attrs["past"] = 1
            if any(is_output(self.graph, t) or self._also_read(t) for t in (k, v)):
                attrs["present"] = 1
        if match.sink is not None:
            inputs.append(self._sink(match.sink))
            attrs["sink"] = 1
        if written.bands:
            attrs["bands"] = bands_text(written.bands)
        if match.rounding:
            attrs["probability"] = str(rounding_program(editor, match.rounding))
        heads, queries, depth = shape(q)[1], shape(q)[2], shape(v)[3]
        base = match.output.name or match.output.outputs[0].name
        merged = editor.variable(f"{base}.attention", q.dtype, (self.base[0], queries, heads * depth))
        if "present" in attrs:
            for part, node in (("k", joined[0]), ("v", joined[1])):
                assert node is not None
                outputs.append(self._present(node, f"{base}.present_{part}"))
        editor.node(
            "Attention",
            [*inputs, *written.operands],
            [merged, *outputs],
            f"{base}.attention",
            domain=DOMAIN,
            score=str(written.program),
            guard=int(match.guard),
            source=sources([match.product, *match.between, self.softmax, *match.rounding, match.output]),
            **attrs,
        )
        self._connect(match.output.outputs[0], merged, base)

    def _program(self, scale: float) -> Written:
        match = self.match
        out = match.product.outputs[0]
        queries, keys = shape(out)[-2:]
        scores = Scores(self.emitter, self.bands, out, (*self.base, queries, keys), scale)
        term = scores.of(match.scores, shape(match.scores)[:-2])
        if isinstance(term, Number):
            raise Refused("the scores do not depend on their product")
        return write(scores, make("add", term, Number(0.0, term.dtype)))

    def _viewed(self, tensor: Tensor, lead: tuple[Dim, ...], what: str, grouped: bool = False) -> Tensor:
        """``tensor`` ``[…, rows, columns]`` in four dimensions."""
        have = shape(tensor)
        padded = (*(1,) * (len(lead) + 2 - len(have)), *have)
        placed = regrouped(padded[:-2], lead, self.base, grouped)
        if placed is None or (not same(placed[0], 1) and not same(placed[0], self.base[0])):
            raise Refused(f"the {what} have dimensions {have[:-2]}, the product {lead}")
        return viewed(self.emitter, tensor, (*placed, *have[-2:]))

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        heads = self.base[1]
        if not all(isinstance(d, int) for d in (heads, shape(q)[3], shape(v)[3])):
            raise Refused(f"heads and depths must be numbers, found {heads}, {shape(q)[3]}, {shape(v)[3]}")
        if not same(shape(q)[1], heads):
            raise Refused(f"the queries have {shape(q)[1]} heads, their product {heads}")
        for name, t in (("keys", k), ("values", v)):
            kv_heads = shape(t)[1]
            if not isinstance(kv_heads, int) or not isinstance(heads, int) or heads % kv_heads:
                raise Refused(f"the {name} have {kv_heads} heads, the queries {heads}")
        if not same(shape(k)[1], shape(v)[1]):
            raise Refused(f"the keys have {shape(k)[1]} heads, the values {shape(v)[1]}")
        if not same(shape(k)[2], shape(v)[2]):
            raise Refused(f"there are {shape(k)[2]} keys and {shape(v)[2]} values")
        if not any(same(shape(t)[0], self.base[0]) for t in (q, k, v)):
            raise Refused(f"neither queries, keys nor values have the {self.base[0]} batch entries of their product")

    def _alike(self, k: gs.Node, v: gs.Node) -> bool:
        """Whether past keys and values are as many, and as many new ones, for each batch entry."""
        rows = [[shape(t)[2] for t in node.inputs] for node in (k, v)]
        whole = all(same(shape(t)[0], self.base[0]) for node in (k, v) for t in node.inputs)
        return whole and same_shape(rows[0], rows[1])

    def _also_read(self, tensor: Tensor) -> bool:
        """Whether others than this attention read joined rows."""
        mine = {id(n) for n in self._until(tensor)}
        return any(id(u) not in mine for u in consumers(tensor))

    def _until(self, tensor: Tensor) -> list[gs.Node]:
        """What only this attention needs of what is made of ``tensor``."""
        ends = {id(self.match.product), id(self.match.output)}
        found: list[gs.Node] = []
        for user in consumers(tensor):
            inner = [] if id(user) in ends else [n for out in user.outputs for n in self._until(out)]
            readers = [u for out in user.outputs for u in consumers(out)]
            dead = not readers and not any(is_output(self.graph, out) for out in user.outputs)
            whole = readers and {id(u) for u in readers} <= {id(n) for n in inner}
            if id(user) in ends or dead or (whole and not any(is_output(self.graph, o) for o in user.outputs)):
                found += [user, *inner]
        return found

    def _present(self, join: gs.Node, base: str) -> gs.Variable:
        """The joined rows, which the Attention writes in place of ``join``."""
        old = join.outputs[0]
        join.outputs.clear()
        if is_output(self.graph, old):
            return old
        new = self.editor.variable(base, old.dtype, shape(old))
        self.editor.replace(old, new)
        return new

    def _sink(self, column: Tensor) -> Tensor:
        """The sink's scores ``[B|1, H|1, Sq|1, 1]``, unrepeated."""
        expand = made_by(column, "Expand")
        column = expand.inputs[0] if expand is not None else column
        lead = shape(self.match.scores)[:-2]
        have = shape(column)
        padded = (*(1,) * (len(lead) + 2 - len(have)), *have)
        placed = regrouped(padded[:-2], lead, self.base)
        if placed is None or np.dtype(column.dtype) != np.float32:
            raise Refused(f"the column '{column.name}' joined to the scores has shape {have}")
        return viewed(self.emitter, column, (*placed, *padded[-2:]))

    def _weighted(self, v: Tensor) -> Tensor:
        """The values times what the probabilities are multiplied with."""
        for weight in self.match.weights:
            dims = shape(weight)
            if len(dims) > 1 or not all(same(d, 1) for d in dims):
                lead = (*(1,) * (2 - len(dims)), *dims)
                weight = viewed(self.emitter, weight, (*lead[:-2], lead[-1], 1))
            have = shape(v)
            if len(shape(weight)) > len(have):
                raise Refused(f"the probabilities are multiplied with '{weight.name}', which has more dimensions")
            for w, d in zip(shape(weight)[::-1], have[::-1], strict=False):
                if not same(w, 1) and not same(w, d):
                    raise Refused(f"the probabilities are multiplied with '{weight.name}', which repeats the values")
            v = self.editor.apply("Mul", [v, weight], have, f"{v.name}.weighted")
        return v

    def _connect(self, out: gs.Variable, merged: gs.Variable, base: str) -> None:
        """Hands ``merged`` to the readers of ``out`` ``[…,Sq,Dv]``: to a head merge as it is, to others with the heads split again."""
        queries, depth = shape(out)[-2:]
        batch, heads = self.base
        if same_shape(shape(out), shape(merged)):
            self.editor.replace(out, merged)
            return
        split = viewed(self.emitter, merged, (batch, queries, heads, depth))
        rank4 = same_shape(shape(out), (batch, heads, queries, depth))
        merge = sole_consumer(self.graph, out) if rank4 else None
        if merge is None or merge.op != "Transpose" or tuple(merge.attrs["perm"]) != HEADS:
            assert isinstance(split, gs.Variable)
            dims = (batch, heads, queries, depth)
            apart = self.editor.apply("Transpose", [split], dims, f"{base}.heads", perm=list(HEADS))
            whole = viewed(self.emitter, apart, shape(out))
            assert isinstance(whole, gs.Variable)
            self.editor.replace(out, whole)
            return
        after = sole_consumer(self.graph, merge.outputs[0])
        if after is not None and after.op == "Reshape" and same_shape(shape(after.outputs[0]), shape(merged)):
            self.editor.replace(after.outputs[0], merged)
        else:
            assert isinstance(split, gs.Variable)
            self.editor.replace(merge.outputs[0], split)


def _batch_and_heads(graph: gs.Graph, match: _Match, lead: tuple[Dim, ...]) -> tuple[Dim, Dim]:
    """The leading dimensions of the product as batch entries and heads."""
    if len(lead) == 2:
        return lead[0], lead[1]
    if len(lead) == 3:
        k = shape(match.product.inputs[1])
        if len(k) == 5 and same(k[2], 1) and not same(lead[2], 1):
            return lead[0], simplify(lead[1] * lead[2])
        return simplify(lead[0] * lead[1]), lead[2]
    if len(lead) > 3:
        raise Refused(f"scores have {len(lead) + 2} dimensions, expected up to 5")
    if not lead:
        return 1, 1
    for node in match.between:
        dims = shape(node.outputs[0])
        if len(dims) == 4 and isinstance(dims[1], int):
            return dims[0], dims[1]
    views = trace(graph)
    for tensor in (*match.product.inputs, match.v):
        view = views.get(tensor.name)
        atoms = [] if view is None else view.axes[0]
        if len(atoms) == 2 and isinstance(atoms[1].size, int) and same(atoms[0].size * atoms[1].size, lead[0]):
            return atoms[0].size, atoms[1].size
    return lead[0], 1


PASS = Pass("attention", run)
