"""The frontend's rewrites one by one: folding, movement, indexing, lazy Expand, identities. Results are onnxruntime's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
import pytest
from graphs import run, to_model, worst_error
from onnx import parser

from coda_edge import ir
from coda_edge.errors import UnsupportedOperator
from coda_edge.frontend import load, normalize, to_normal_form, transposes
from coda_edge.inputs import input_specs

Array = npt.NDArray[Any]


def _parse(body: str, opset: int = 18) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}]> g {body}')


def _feeds(model: onnx.ModelProto, sizes: dict[str, int]) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    feeds: dict[str, Array] = {}
    for spec in input_specs(model):
        dims = [d if isinstance(d, int) else sizes[str(d)] for d in spec.shape]
        kind = np.dtype(spec.dtype).kind
        feeds[spec.name] = (rng.random(dims) < 0.5 if kind == "b" else rng.standard_normal(dims) * 3).astype(spec.dtype)
    return feeds


def _check(body: str, opset: int = 18, tolerance: float = 0.0, **sizes: int) -> gs.Graph:
    """Normalises, compares with the original at two sizes, and returns the graph."""
    model = _parse(body, opset)
    graph = normalize(load(model))
    normal = to_model(graph)
    onnx.checker.check_model(normal)
    sizes = {"B": 2, "S": 5, "T": 4, **sizes}
    for more in (0, 1):
        feeds = _feeds(model, {n: s + more for n, s in sizes.items()})
        assert worst_error(run(model, feeds), run(normal, feeds)) <= tolerance
    return graph


def _ops(graph: gs.Graph) -> Counter[str]:
    return Counter(n.op for n in graph.nodes)


# Folding


def test_weight_only_int8_becomes_float() -> None:
    graph = _check("""(float[B, 3] x) => (float[B, 2] y)
        <int8[3, 2] q = {1, -2, 3, -4, 5, -6}, float[1, 2] s = {0.5, 0.25}> { f = Cast <to = 1> (q) w = Mul(f, s) y = MatMul(x, w) }""")
    assert _ops(graph) == {"MatMul": 1}
    np.testing.assert_array_equal(graph.nodes[0].inputs[1].values, [[0.5, -0.5], [1.5, -1.0], [2.5, -1.5]])


def test_dequantized_weights_become_float() -> None:
    graph = _check("""(float[B, 3] x) => (float[B, 2] y)
        <int8[3, 2] q = {1, -2, 3, -4, 5, -6}, float[2] s = {0.5, 0.25}, int8[2] z = {1, 0}>
        { w = DequantizeLinear <axis = 1> (q, s, z) y = MatMul(x, w) }""")
    assert _ops(graph) == {"MatMul": 1}
    np.testing.assert_array_equal(graph.nodes[0].inputs[1].values, [[0, -0.5], [1, -1.0], [2, -1.5]])


def test_a_spread_constant_stays_small() -> None:
    graph = _check("""(float[40, 50] x) => (float[40, 50] y) {
        t = Constant <value_ints = [40, 50]> () z = ConstantOfShape <value = float[1] {0.5}> (t) y = Mul(x, z)
    }""")
    assert graph.nodes[0].inputs[1].values.size == 1


def test_equal_constants_and_nodes_are_one() -> None:
    graph = _check("""(float[B, 2] x) => (float[B, 2] y, float[B, 2] z)
        <float[2] a = {1, 2}, float[2] b = {1, 2}, float[2] c = {3, 4}>
        { p = Add(x, a) q = Add(x, b) y = Mul(p, c) t = Sub(p, q) z = Add(t, y) }""")
    assert _ops(graph) == {"Add": 2, "Mul": 1, "Sub": 1}


def test_what_sizes_decide_is_constant() -> None:
    graph = _check("""(float[B, S, 16] x) => (float[B, S, 16] y) {
        s = Shape <start = 2> (x) f = Cast <to = 1> (s) r = Sqrt(f) y = Div(x, r)
    }""")
    assert _ops(graph) == {"Div": 1}
    assert ir.scalar_value(graph.nodes[0].inputs[1]) == 4.0


def test_a_constant_output_stays() -> None:
    model = _parse("(float[B] x) => (float[2] y, float[B] z) <float[2] a = {1, 2}> { y = Add(a, a) z = Relu(x) }")
    feeds = {"x": np.float32([1, -1])}
    assert worst_error(run(model, feeds), run(to_model(normalize(load(model))), feeds)) == 0


def test_an_initializer_may_be_read_and_returned() -> None:
    model = _parse("(float[B, 2] x) => (float[2] a, float[B, 2] z) <float[2] a = {1, 2}> { z = Add(x, a) }")
    graph = normalize(load(model))
    feeds = {"x": np.float32([[1, -1]])}
    assert [n.op for n in graph.nodes if graph.outputs[0] in n.outputs] == ["Identity"]
    assert worst_error(run(model, feeds), run(to_model(graph), feeds)) == 0


def test_an_operator_that_onnxruntime_lacks_is_folded_too() -> None:
    body = (
        "(float[B, 2] x) => (float[B, 2] y) <int8[2] a = {3, 4}> { n = Add(a, a) f = Cast <to = 1> (n) y = Mul(x, f) }"
    )
    graph = normalize(load(_parse(body)))
    assert _ops(graph) == {"Mul": 1}
    np.testing.assert_array_equal(graph.nodes[0].inputs[1].values, [6, 8])


def test_bfloat16_is_carried() -> None:
    graph = to_normal_form(
        load(_parse("(bfloat16[B] x) => (float[B] y) { h = Neg(x) y = Cast <to = 1> (h) }")), keep_half=True
    ).graph
    assert [str(np.dtype(n.outputs[0].dtype)) for n in graph.nodes] == ["bfloat16", "float32"]


# Movement. Each case: the operators between x and y, and what is left of them.

MOVEMENT: dict[str, tuple[str, dict[str, int]]] = {
    "a key transposed by reshapes": (
        """(float[B, S, 12] x) => (float[B, 3, 4, S] y) {
            t4 = Constant <value_ints = [0, 0, 3, 4]> () a = Reshape(x, t4)
            b = Transpose <perm = [0, 2, 1, 3]> (a)
            n = Shape <start = 1, end = 2> (x) m = Constant <value_ints = [-1]> () d = Constant <value_ints = [4]> ()
            t3 = Concat <axis = 0> (m, n, d) c = Reshape(b, t3)
            e = Transpose <perm = [0, 2, 1]> (c)
            p = Shape <end = 1> (x) h = Constant <value_ints = [3]> ()
            t5 = Concat <axis = 0> (p, h, d, n) y = Reshape(e, t5)
        }""",
        {"Reshape": 1, "Transpose": 1},
    ),
    "there and back": (
        """(float[B, S, 12] x) => (float[B, S, 12] y) {
            t4 = Constant <value_ints = [0, 0, 3, 4]> () a = Reshape(x, t4)
            b = Transpose <perm = [0, 2, 1, 3]> (a) c = Transpose <perm = [0, 2, 1, 3]> (b)
            t3 = Constant <value_ints = [0, 0, 12]> () d = Reshape(c, t3) y = Relu(d)
        }""",
        {"Relu": 1},
    ),
    "a scalar in between": (
        """(float[B, S, 12] x) => (float[B, 12, S] y) {
            h = Constant <value_float = 0.5> ()
            a = Transpose <perm = [2, 0, 1]> (x) b = Mul(a, h) y = Transpose <perm = [1, 0, 2]> (b)
        }""",
        {"Transpose": 1, "Mul": 1},
    ),
    "unit axes": (
        """(float[B, S] x) => (float[B, S] y) {
            a = Constant <value_ints = [1, 2]> () u = Unsqueeze(x, a) t = Transpose <perm = [0, 2, 1, 3]> (u)
            z = Squeeze(t, a) y = Relu(z)
        }""",
        {"Relu": 1},
    ),
    "merged and split otherwise": (
        """(float[B, 6, 4] x) => (float[B, 3, 8] y) {
            t1 = Constant <value_ints = [0, 24]> () a = Reshape(x, t1)
            t2 = Constant <value_ints = [0, 3, 8]> () y = Reshape(a, t2)
        }""",
        {"Reshape": 1},
    ),
    "a middle that cannot be told apart": (
        """(float[B, 6, 4] x) => (float[B, 8, 3] y) {
            a = Transpose <perm = [0, 2, 1]> (x)
            t = Constant <value_ints = [0, 8, 3]> () y = Reshape(a, t)
        }""",
        {"Transpose": 1, "Reshape": 1},
    ),
    "packed projections": (
        """(float[B, S, 24] x) => (float[B, S, 8] y) {
            t = Constant <value_ints = [0, 0, 3, 8]> () a = Reshape(x, t)
            b = Transpose <perm = [2, 0, 1, 3]> (a)
            i = Constant <value_int = 1> () y = Gather(b, i)
        }""",
        {"Slice": 1},
    ),
    "parts of a part": (
        """(float[B, S, 40] x) => (float[B, S, 8] y, float[B, S, 8] z) {
            one = Constant <value_ints = [1]> () two = Constant <value_ints = [2]> () four = Constant <value_ints = [4]> ()
            t = Constant <value_ints = [0, 0, 5, 8]> () a = Reshape(x, t) m = Slice(a, one, four, two)
            u = Constant <value_ints = [0, 0, 24]> () n = Reshape(m, u) v = Constant <value_ints = [0, 0, 3, 8]> () p = Reshape(n, v)
            f = Slice(p, one, two, two) y = Squeeze(f, two)
            three = Constant <value_ints = [3]> () l = Slice(p, two, three, two) z = Squeeze(l, two)
        }""",
        {"Slice": 3},
    ),
    "an output that takes the place of its source": (
        """(float[B, S, 6] x) => (float[B, S, 1] y, float[B, 1, S] z) {
            a = Constant <value_ints = [2]> () r = ReduceMax (x, a) b = Squeeze(r, a) y = Unsqueeze(b, a)
            z = Transpose <perm = [0, 2, 1]> (y)
        }""",
        {"ReduceMax": 1, "Transpose": 1},
    ),
    "a transposed matrix product": (
        """(float[S, B, 6] x) => (float[S, 2, B, 3] y) {
            a = Transpose <perm = [1, 0, 2]> (x) t = Constant <value_ints = [0, 0, 2, 3]> () b = Reshape(a, t)
            y = Transpose <perm = [1, 2, 0, 3]> (b)
        }""",
        {"Reshape": 1, "Transpose": 1},
    ),
}


@pytest.mark.parametrize("case", MOVEMENT)
def test_movement(case: str) -> None:
    body, left = MOVEMENT[case]
    assert _ops(_check(body)) == left


@pytest.mark.parametrize("seed", range(20))
def test_random_chains(seed: int) -> None:
    """Any chain of transposes and reshapes over axes that factor is right, and at most three operators."""
    rng = np.random.default_rng(seed)
    dims, lines, name = [2, 3, 4, 5, 6], [], "x"
    for step in range(6):
        if rng.random() < 0.5:
            perm = rng.permutation(len(dims)).tolist()
            dims = [dims[p] for p in perm]
            lines.append(f"v{step} = Transpose <perm = {perm}> ({name})")
        else:
            cuts = sorted(rng.choice(np.arange(1, len(dims)), rng.integers(0, len(dims)), replace=False).tolist())
            groups = [dims[a:b] for a, b in zip([0, *cuts], [*cuts, len(dims)], strict=True)]
            dims = [int(np.prod(g)) for g in groups] if rng.random() < 0.7 else [d for g in groups for d in (1, *g)]
            lines.append(f"t{step} = Constant <value_ints = {dims}> () v{step} = Reshape({name}, t{step})")
        name = f"v{step}"
    shape = ", ".join(map(str, dims))
    graph = _check(f"(float[2, 3, 4, 5, 6] x) => (float[{shape}] y) {{ {' '.join(lines)} y = Neg({name}) }}")
    moves = _ops(graph)
    assert moves["Transpose"] <= 1
    assert moves["Reshape"] <= 2


def test_rows_are_rearranged_behind_a_projection() -> None:
    weight = ", ".join(str(i / 8) for i in range(-6, 6))
    graph = _check(
        f"(float[B, S, 4] x, float[B, S, 3] r) => (float[B, S, 3] y) <float[4, 3] w = {{{weight}}}, float[3] b = {{1, 2, 3}}> "
        "{ t = Transpose <perm = [1, 0, 2]> (x) n = Constant <value_ints = [-1, 4]> () f = Reshape(t, n) "
        "m = MatMul(f, w) a = Add(b, m) s = Shape(t) h = Constant <value_ints = [-1]> () i = Constant <value_ints = [0]> () "
        "two = Constant <value_ints = [2]> () l = Slice(s, i, two) c = Concat <axis = 0> (l, h) "
        "u = Reshape(a, c) v = Transpose <perm = [1, 0, 2]> (u) y = Add(v, r) }",
        tolerance=1e-6,
    )
    assert _ops(graph) == {"MatMul": 1, "Add": 2}


# Counted indices

COUNT = """n = Shape <start = {axis}, end = {end}> ({of}) z = Constant <value_ints = [0]> () l = Squeeze(n, z)
    o = Constant <value_int = 0> () d = Constant <value_int = 1> () c = Range(o, l, d)"""


def test_a_position_table_is_sliced() -> None:
    graph = _check(
        "(float[B, S, 4] x) => (float[B, S, 4] y) <float[9, 4] w = {"
        + ", ".join(map(str, range(36)))
        + "}> { "
        + COUNT.format(axis=1, end=2, of="x")
        + " u = Unsqueeze(c, z) e = Gather(w, u) y = Add(x, e) }"
    )
    assert _ops(graph) == {"Shape": 1, "Slice": 1, "Reshape": 1, "Add": 1}


def test_positions_from_an_offset() -> None:
    """OPT's positions begin at 2."""
    graph = _check(
        "(float[B, S, 2] x) => (float[B, S, 2] y) <float[9, 2] w = {"
        + ", ".join(map(str, range(18)))
        + "}, int64 two = {2}> { "
        + COUNT.format(axis=1, end=2, of="x")
        + " p = Add(c, two) e = Gather(w, p) y = Add(x, e) }"
    )
    assert _ops(graph)["Gather"] == 0
    assert _ops(graph)["Slice"] == 1


def test_a_mask_gathered_from_its_flattening() -> None:
    graph = _check("""(bool[B, S] m) => (bool[B, 1, 1, S] y) {
        s = Shape(m) zero = Constant <value_int = 0> () one = Constant <value_int = 1> ()
        b = Gather(s, zero) n = Gather(s, one)
        rb = Range(zero, b, one) rs = Range(zero, n, one)
        ab = Constant <value_ints = [1, 2, 3]> () ub = Unsqueeze(rb, ab)
        as = Constant <value_ints = [0, 1, 2]> () us = Unsqueeze(rs, as)
        row = Mul(ub, n) i = Add(us, row)
        minus = Constant <value_ints = [-1]> () f = Reshape(m, minus)
        y = Gather(f, i)
    }""")
    assert _ops(graph) == {"Reshape": 1}


def test_indices_that_are_data_stay_a_gather() -> None:
    model = _parse("(float[B, 4] x, int64[S] i) => (float[S, 4] y) { y = Gather(x, i) }")
    graph = normalize(load(model))
    assert _ops(graph) == {"Gather": 1}


def test_a_comparison_with_one_answer_is_constant() -> None:
    graph = _check(
        "(bool[B, S] m) => (bool[B, S] y) { "
        + COUNT.format(axis=1, end=2, of="m")
        + " g = GreaterOrEqual(c, o) y = And(g, m) }"
    )
    assert _ops(graph) == {"Identity": 1}


def test_a_causal_comparison_stays() -> None:
    graph = _check(
        "(float[B, S] x) => (bool[S, S] y) { "
        + COUNT.format(axis=1, end=2, of="x")
        + " a = Constant <value_ints = [1]> () r = Unsqueeze(c, a) y = LessOrEqual(c, r) }"
    )
    assert _ops(graph)["LessOrEqual"] == 1


# Lazy Expand

EXPAND: dict[str, tuple[str, dict[str, int]]] = {
    "absorbed by an addition": (
        "(float[B, 1, S] x, float[B, 4, S] w) => (float[B, 4, S] y) { t = Shape(w) e = Expand(x, t) y = Add(e, w) }",
        {"Add": 1},
    ),
    "carried through a mask's arithmetic": (
        """(bool[B, S] m, float[B, 2, S, S] w) => (float[B, 2, S, S] y) <float lo = {-10000.0}, float no = {0.0}> {
            a = Constant <value_ints = [1, 2]> () u = Unsqueeze(m, a)
            b = Shape <end = 1> (w) n = Shape <start = 3> (w) one = Constant <value_ints = [1]> ()
            t = Concat <axis = 0> (b, one, n, n) e = Expand(u, t)
            v = Not(e) k = Where(v, lo, no) y = Add(w, k)
        }""",
        {"Unsqueeze": 1, "Not": 1, "Where": 1, "Add": 1},
    ),
    "absorbed by a matrix product's batch": (
        "(float[1, 3, 4] x, float[B, 4, 3] w) => (float[B, 3, 3] y) "
        "{ b = Shape <end = 1> (w) n = Constant <value_ints = [3, 4]> () t = Concat <axis = 0> (b, n) "
        "e = Expand(x, t) y = MatMul(e, w) }",
        {"MatMul": 1},
    ),
    "behind a transpose": (
        "(float[B, 1, S] x, float[S, 4, B] w) => (float[S, 4, B] y) "
        "{ t = Constant <value_ints = [1, 4, 1]> () e = Expand(x, t) r = Transpose(e) y = Mul(r, w) }",
        {"Transpose": 1, "Mul": 1},
    ),
    "needed by an output": (
        "(float[B, 1, S] x) => (float[B, 4, S] y) "
        "{ t = Constant <value_ints = [1, 4, 1]> () e = Expand(x, t) y = Exp(e) }",
        {"Exp": 1, "Expand": 1},
    ),
    "of a constant of a shape": (
        "(float[B, S] x) => (float[B, S] y) { t = Shape(x) o = ConstantOfShape <value = float[1] {1}> (t) "
        "z = ConstantOfShape(t) a = Mul(x, o) b = Add(a, z) y = Relu(b) }",
        {"Relu": 1},
    ),
}


@pytest.mark.parametrize("case", EXPAND)
def test_lazy_expand(case: str) -> None:
    body, left = EXPAND[case]
    graph = _check(body)
    assert _ops(graph) == left
    for node in graph.nodes:
        if node.op == "Exp":
            assert ir.shape(node.outputs[0])[1] == 1


# Identities

IDENTITIES: dict[str, tuple[str, dict[str, int]]] = {
    "neutral operands": (
        "(float[B, 3] x) => (float[B, 3] y) <float zero = {0}, float[3] one = {1, 1, 1}> "
        "{ a = Add(zero, x) b = Mul(a, one) c = Div(b, one) d = Sub(c, zero) y = Relu(d) }",
        {"Relu": 1},
    ),
    "a neutral operand that broadcasts": (
        "(float[3] x) => (float[2, 3] y) <float[2, 1] one = {1, 1}> { y = Mul(x, one) }",
        {"Mul": 1},
    ),
    "twice not": ("(bool[B] x) => (bool[B] y) { a = Not(x) b = Not(a) c = Not(b) y = Not(c) }", {"Identity": 1}),
    "an infinity of a widened float": (
        "(float[B] x) => (bool[B] y, bool[B] z) "
        "{ w = Cast <to = 11> (x) y = IsInf <detect_negative = 0> (w) z = IsNaN(w) }",
        {"IsInf": 1, "IsNaN": 1},
    ),
    "an infinity of a narrowed float": (
        "(double[B] x) => (bool[B] y) { w = Cast <to = 1> (x) y = IsInf(w) }",
        {"Cast": 1, "IsInf": 1},
    ),
    "a reciprocal": ("(float[B] x, float[B] w) => (float[B] y) { r = Reciprocal(w) y = Mul(r, x) }", {"Div": 1}),
    "a choice that is made": (
        "(float[B] x, float[B] w) => (float[B] y) <bool c = {1}> { a = Where(c, x, w) y = Relu(a) }",
        {"Relu": 1},
    ),
    "whole slices": (
        "(float[B, 6] x) => (float[B, 6] y) <int64[2] s = {0, 0}, int64[2] e = {9223372036854775807, 99}> "
        "{ a = Slice(x, s, e) y = Relu(a) }",
        {"Relu": 1},
    ),
}


@pytest.mark.parametrize("case", IDENTITIES)
def test_identities(case: str) -> None:
    body, left = IDENTITIES[case]
    assert _ops(_check(body, tolerance=1e-6)) == left


def test_sizes_that_only_arithmetic_gives() -> None:
    """A reshape that 0 and −1 cannot say reads sizes from the inputs."""
    graph = _check("""(float[B, S, 6] x) => (float[S, B, 6] y) {
        s = Shape(x) zero = Constant <value_ints = [0]> () one = Constant <value_ints = [1]> () m = Constant <value_ints = [-1]> ()
        b = Gather(s, zero) n = Gather(s, one) t = Concat <axis = 0> (n, b, m) y = Reshape(x, t)
    }""")
    assert _ops(graph) == {"Shape": 2, "Concat": 1, "Reshape": 1}
    assert all(n.inputs[0].name == "x" for n in graph.nodes if n.op == "Shape")


# Control flow

BRANCH = """(float[B, {size}] x) => (float y) {{
    s = Shape(x) i = Constant <value_int = 1> () n = Gather(s, i) three = Constant <value_int = 3> () c = Equal(n, three)
    z = If (c) <
        then_branch = t () => (float tr) {{ a = Constant <value_ints = [1]> () r = ReduceSum <keepdims = 0> (x, a) tr = Neg(r) }},
        else_branch = e () => (float er) {{ er = Relu(x) }}
    >
    y = Exp(z)
}}"""


@pytest.mark.parametrize(("size", "left"), [(3, {"ReduceSum", "Squeeze", "Neg", "Exp"}), (4, {"Relu", "Exp"})])
def test_a_branch_that_sizes_decide(size: int, left: set[str]) -> None:
    assert set(_ops(_check(BRANCH.format(size=size)))) == left


def test_branches_of_other_shapes_are_refused() -> None:
    with pytest.raises(UnsupportedOperator, match=r"operator If .*data decides between results of float32"):
        normalize(load(_parse(BRANCH.format(size="S"))))


CHOICE = """(float[B, 6] x, bool c) => (float[B, 6] y) {{
    k = Constant <value_float = 2.0> ()
    y = If (c) <
        then_branch = t () => (float[B, 6] a) {{ n = Constant <value_float = 3.0> () z = Mul(x, n) a = Exp(z) }},
        else_branch = e () => (float[B, 6] b) {{ n = Constant <value_float = 5.0> () z = Mul(x, n) w = {last} b = Neg(w) }}
    >
}}"""


def test_branches_that_data_decides_are_both_computed() -> None:
    """Names that both branches have, and a constant from outside."""
    model = _parse(CHOICE.format(last="Add(z, k)"))
    graph = normalize(load(model))
    assert "If" not in _ops(graph) and _ops(graph)["Where"] == 1
    for taken in (True, False):
        feeds = {"x": np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32), "c": np.array(taken)}
        assert worst_error(run(model, feeds), run(to_model(graph), feeds)) <= 1e-6


def test_a_branch_that_may_fail_or_draw_numbers_is_refused() -> None:
    """Where no dynamic size can be nothing for the branch that is not taken."""
    with pytest.raises(UnsupportedOperator, match=r"operator If .*data decides whether RandomUniformLike"):
        normalize(load(_parse(CHOICE.format(last="RandomUniformLike(z)").replace("[B, 6]", "[2, 6]"))))


def test_a_branch_within_a_branch_may_not_fail_either() -> None:
    inner = "If (k) < then_branch = i () => (float[1, 6] p) { p = Gather(x, j) }, else_branch = o () => (float[1, 6] q) { q = Slice(x, z, l) } >"
    model = _parse(f"""(float[B, 6] x, int64[1] j, bool c) => (float[1, 6] y) <bool k = {{1}}, int64[1] z = {{0}}, int64[1] l = {{1}}> {{
        y = If (c) < then_branch = t () => (float[1, 6] a) {{ a = {inner} }},
            else_branch = e () => (float[1, 6] b) {{ b = Slice(x, z, l) }} > }}""")
    with pytest.raises(UnsupportedOperator, match=r"data decides whether Gather"):
        normalize(load(model))


LOOP = """(float[B, 6] x, int64 m) => (float[B, 6] y) {
    t = Constant <value = bool {1}> ()
    y = Loop (m, t, x) < body = b (int64 i, bool go, float[B, 6] s) => (bool on, float[B, 6] r) { on = Identity(go) r = Exp(s) } >
}"""


def test_a_loop_that_data_decides_is_refused() -> None:
    with pytest.raises(UnsupportedOperator, match=r"operator Loop .*how often its body runs"):
        normalize(load(_parse(LOOP)))


def test_a_bool_of_a_position_is_no_position() -> None:
    graph = _check("""(float[S, 3] x) => (float[S, 3] y) <int64 zero = {0}, int64 one = {1}> {
        s = Shape(x) n = Gather(s, zero) r = Range(zero, n, one) b = Cast <to = 9> (r) i = Cast <to = 7> (b) y = Gather(x, i) }""")
    assert _ops(graph)["Gather"] == 1


def test_a_chain_of_diamonds_is_searched_for_transposes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = "".join(
        f"p{i} = Neg(d{i}) q{i} = Abs(d{i}) s{i} = Add(p{i}, q{i}) t{i} = Add(s{i}, x) d{i + 1} = ReduceMax(t{i}, axes) "
        for i in range(10)
    )
    body = f"(float[N, 4, 5] x, float[N, 1, 1] d0) => (float[N, 1, 1] d10) <int64[2] axes = {{1, 2}}> {{ {levels} }}"
    graph = normalize(load(_parse(body)))
    asked: list[str] = []
    turns = transposes._turns
    monkeypatch.setattr(transposes, "_turns", lambda node, *rest: asked.append(node.name) or turns(node, *rest))
    assert transposes._tree(graph.nodes[-1], [0, 2, 1]) is None
    assert len(asked) < 60, "each of 50 nodes about once"
