"""Symbolic shapes and values: what ``infer`` says, evaluated at sizes, is what onnxruntime makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
import sympy
from graphs import fixture_names, load_fixture, random_inputs
from onnx import helper, parser

from coda_edge.errors import ShapeError
from coda_edge.frontend import SymbolicInfo, infer, load
from coda_edge.frontend.fold import inline_constants
from coda_edge.inputs import input_specs
from coda_edge.symbolic import evaluate, parse_dim, same


def _graph(body: str, opset: int = 18) -> gs.Graph:
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}]> g {body}')
    graph = gs.import_onnx(model)
    inline_constants(graph)
    return graph


def _info(body: str, opset: int = 18) -> SymbolicInfo:
    return infer(_graph(body, opset))


def _shape(body: str, opset: int = 18) -> list[int | str]:
    graph = _graph(body, opset)
    infer(graph)
    return list(graph.outputs[0].shape)


@pytest.mark.parametrize("name", [n for n in fixture_names() if not n.startswith(("unit.", "llama"))])
def test_every_tensor_of_an_export(name: str) -> None:
    """All intermediate shapes and values of an export equal those of a run."""
    model = load(load_fixture(name))
    graph = gs.import_onnx(model)
    inline_constants(graph)
    info = infer(graph)
    # Sizes are given by the inputs as inference has named them: those that must be equal are one.
    sizes = {"batch": 2, "seq": 5}
    for tensor in graph.inputs:
        for axis, dim in enumerate(tensor.shape):
            if isinstance(dim, str):
                sizes.setdefault(dim, 2 if axis == 0 else 5)
    made = [t for n in graph.nodes for t in n.outputs if t.name]
    everything = onnx.ModelProto()
    everything.CopyFrom(model)
    del everything.graph.output[:]
    constants = {n.output[0] for n in model.graph.node if n.op_type == "Constant"}
    everything.graph.output.extend(helper.make_empty_tensor_value_info(t.name) for t in made if t.name not in constants)
    everything_sizes = {s: sizes.get(s, 2 if axis == 0 else 5) for s, axis in _symbols(model)}
    got = _run_all(everything, random_inputs(model, everything_sizes))
    for tensor in made:
        expected = got[tensor.name]
        assert tuple(evaluate(d, sizes) for d in info.shapes[tensor.name]) == expected.shape
        assert np.dtype(tensor.dtype) == expected.dtype
        if tensor.name in info.values:
            value = [evaluate(v, sizes) if isinstance(v, sympy.Expr) else v for v in info.values[tensor.name].flat]
            np.testing.assert_array_equal(np.asarray(value).reshape(expected.shape), expected)


def _symbols(model: onnx.ModelProto) -> list[tuple[str, int]]:
    return [
        (s.name, axis)
        for spec in input_specs(model)
        for axis, d in enumerate(spec.shape)
        if not isinstance(d, int)
        for s in d.free_symbols
    ]


def _run_all(model: onnx.ModelProto, feeds: dict[str, Any]) -> dict[str, Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


# (graph, the shape of its first output)
SHAPES: dict[str, tuple[str, list[int | str]]] = {
    "broadcast": ("(float[B, 1, S] x, float[H, 1] y) => (float z) { z = Add(x, y) }", ["B", "H", "S"]),
    "matmul": ("(float[B, S, 4] x, float[4, 3] y) => (float z) { z = MatMul(x, y) }", ["B", "S", 3]),
    "matmul of vectors": ("(float[4] x, float[B, 4, 3] y) => (float z) { z = MatMul(x, y) }", ["B", 3]),
    "reshape with 0 and -1": (
        "(float[B, S, 12] x) => (float z) { t = Constant <value_ints = [0, 0, 3, -1]> () z = Reshape(x, t) }",
        ["B", "S", 3, 4],
    ),
    "reshape that merges": (
        "(float[B, S, 12] x) => (float z) { t = Constant <value_ints = [-1, 12]> () z = Reshape(x, t) }",
        ["B*S", 12],
    ),
    "reshape to a shape": (
        "(float[B, S, 12] x, float[B, S, 3, 4] y) => (float z) { t = Shape(y) z = Reshape(x, t) }",
        ["B", "S", 3, 4],
    ),
    "flatten": ("(float[B, S, 4] x) => (float z) { z = Flatten <axis = 2> (x) }", ["B*S", 4]),
    "transpose": ("(float[B, S, 4] x) => (float z) { z = Transpose(x) }", [4, "S", "B"]),
    "squeeze all": ("(float[1, S, 1] x) => (float z) { z = Squeeze(x) }", ["S"]),
    "unsqueeze": (
        "(float[S] x) => (float z) { a = Constant <value_ints = [0, -1]> () z = Unsqueeze(x, a) }",
        [1, "S", 1],
    ),
    "concat": ("(float[B, S] x, float[B, T] y) => (float z) { z = Concat <axis = -1> (x, y) }", ["B", "S + T"]),
    "split": ("(float[B, 6] x) => (float y, float z) { y, z = Split <axis = 1, num_outputs = 2> (x) }", ["B", 3]),
    "gather": ("(float[9, 4] x, int64[B, S] i) => (float z) { z = Gather(x, i) }", ["B", "S", 4]),
    "gather nd": ("(float[B, S, 4] x, int64[K, 2] i) => (float z) { z = GatherND(x, i) }", ["K", 4]),
    "slice to the end": (
        "(float[B, S] x) => (float z) { s = Constant <value_ints = [1]> () "
        "e = Constant <value_ints = [9223372036854775807]> () z = Slice(x, s, e, s) }",
        ["B", "S - 1"],
    ),
    "slice backwards": (
        "(float[S] x) => (float z) { s = Constant <value_ints = [-1]> () a = Constant <value_ints = [0]> () "
        "e = Constant <value_ints = [-9223372036854775808]> () z = Slice(x, s, e, a, s) }",
        ["S"],
    ),
    "slice by steps": (
        "(float[S] x) => (float z) { s = Constant <value_ints = [0]> () t = Constant <value_ints = [2]> () "
        "e = Constant <value_ints = [9223372036854775807]> () z = Slice(x, s, e, s, t) }",
        ["floor(S/2 + 1/2)"],
    ),
    "expand": (
        "(float[B, 1, S] x, float[4, S] y) => (float z) { t = Shape(y) z = Expand(x, t) }",
        ["B", 4, "S"],
    ),
    "tile": ("(float[B, S] x) => (float z) { t = Constant <value_ints = [1, 3]> () z = Tile(x, t) }", ["B", "3*S"]),
    "range": (
        "(float[B, S] x) => (int64 z) { t = Shape <start = 1> (x) a = Constant <value_ints = [0]> () "
        "n = Squeeze(t, a) o = Constant <value_int = 0> () d = Constant <value_int = 1> () z = Range(o, n, d) }",
        ["S"],
    ),
    "reduce": (
        "(float[B, S, 4] x) => (float z) { a = Constant <value_ints = [-1]> () z = ReduceMax <keepdims = 0> (x, a) }",
        ["B", "S"],
    ),
    "argmax": ("(float[B, S, 4] x) => (int64 z) { z = ArgMax <axis = -1, keepdims = 0> (x) }", ["B", "S"]),
    "top k": (
        "(float[B, S] x) => (float z, int64 i) { k = Constant <value_ints = [5]> () z, i = TopK(x, k) }",
        ["B", 5],
    ),
    "pad": (
        "(float[B, S] x) => (float z) { p = Constant <value_ints = [0, 1, 0, 2]> () z = Pad(x, p) }",
        ["B", "S + 3"],
    ),
    "convolution": (
        "(float[B, 3, H, 32] x, float[8, 3, 4, 4] w) => (float z) { z = Conv <strides = [4, 4]> (x, w) }",
        ["B", 8, "floor(H/4)", 8],
    ),
    "pooling": (
        "(float[B, 3, 9, 9] x) => (float z) "
        "{ z = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (x) }",
        ["B", 3, 5, 5],
    ),
    "resize": (
        "(float[B, 3, H, 8] x) => (float z) { r = Constant <value_floats = [1.0, 1.0, 2.0, 0.5]> () z = Resize(x, , r) }",
        ["B", 3, "2*H", 4],
    ),
    "one hot": (
        "(int64[B, S] x) => (float z) { d = Constant <value_int = 7> () v = Constant <value_floats = [0.0, 1.0]> () "
        "z = OneHot(x, d, v) }",
        ["B", "S", 7],
    ),
    "cumulative sum": ("(float[B, S] x, int64 a) => (float z) { z = CumSum(x, a) }", ["B", "S"]),
    "lstm": (
        "(float[S, B, 8] x, float[1, 20, 8] w, float[1, 20, 5] r) => (float y, float h, float c) "
        "{ y, h, c = LSTM <hidden_size = 5> (x, w, r) }",
        ["S", 1, "B", 5],
    ),
    "einsum": (
        '(float[B, S, 8] x, float[8, 5] y) => (float z) { z = Einsum <equation = "bsk,kn->bsn"> (x, y) }',
        ["B", "S", 5],
    ),
    "an operator without a rule": (
        "(float[B, 3, 8, 8] x) => (float z) { z = DepthToSpace <blocksize = 1> (x) }",
        ["B", 3, 8, 8],
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes(case: str) -> None:
    body, expected = SHAPES[case]
    graph = gs.import_onnx(parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g {body}'))
    inline_constants(graph)
    infer(graph)
    assert list(graph.outputs[0].shape) == expected


def test_values_of_shape_arithmetic() -> None:
    info = _info(
        """(float[B, S, 64] x) => (int64 z) {
        s = Shape(x)
        b = Gather(s, zero)
        n = Gather(s, one)
        h = Constant <value_int = 4> ()
        w = Gather(s, two)
        d = Div(w, h)
        half = Div(n, h)
        bh = Mul(b, h)
        a = Constant <value_ints = [0]> ()
        ub = Unsqueeze(bh, a) un = Unsqueeze(n, a) ud = Unsqueeze(d, a) uh = Unsqueeze(half, a)
        z = Concat <axis = 0> (ub, un, ud, uh)
    }""".replace(
            "s = Shape(x)",
            "zero = Constant <value_int = 0> () one = Constant <value_int = 1> () "
            "two = Constant <value_int = 2> () s = Shape(x)",
        )
    )
    assert [str(v) for v in info.values["z"]] == ["4*B", "S", "16", "floor(S/4)"]


def test_comparisons_are_decided_where_they_can_be() -> None:
    info = _info("""(float[B, S] x) => (bool y, bool z) {
        s = Shape(x)
        minus = Constant <value_ints = [-1, -1]> ()
        y = Equal(s, minus)
        two = Constant <value_ints = [2, 2]> ()
        z = Equal(s, two)
    }""")
    assert info.values["y"].tolist() == [False, False]
    assert "z" not in info.values


def test_two_names_of_one_size() -> None:
    graph = _graph("(float[A, S] x, float[B, T] y) => (float z) { z = Add(x, y) }")
    info = infer(graph)
    assert [str(c).partition(" (")[0] for c in info.constraints] == ["A = B", "S = T"]
    assert [t.shape for t in (*graph.inputs, *graph.outputs)] == [["A", "S"]] * 3


def test_a_sum_of_sizes_has_one_name() -> None:
    graph = _graph(
        "(float[T] mask, float[P, 4] past, float[S, 4] now, float[4] q) => (float z) "
        "{ k = Concat <axis = 0> (past, now) s = MatMul(k, q) z = Add(s, mask) }"
    )
    infer(graph)
    assert [t.shape for t in graph.inputs] == [["P + S"], ["P", 4], ["S", 4], [4]]
    assert graph.outputs[0].shape == ["P + S"]


CONTRADICTIONS = {
    "MatMul (node 'n'): sizes 4 and 5": "(float[B, 4] x, float[5, 3] y) => (float z) { [n] z = MatMul(x, y) }",
    "cannot be reshaped to [5, -1]": (
        "(float[3, 4] x) => (float z) { t = Constant <value_ints = [5, -1]> () [n] z = Reshape(x, t) }"
    ),
    "axis 2 is out of range": "(float[B, S] x, float[B, S] y) => (float z) { [n] z = Concat <axis = 2> (x, y) }",
    "does not permute": "(float[B, S] x) => (float z) { [n] z = Transpose <perm = [0, 0]> (x) }",
    "the length of the target shape is not known": "(float[B] x, int64[N] t) => (float z) { [n] z = Reshape(x, t) }",
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_contradictions_name_the_node(message: str) -> None:
    with pytest.raises(ShapeError) as error:
        _info(CONTRADICTIONS[message])
    assert message in str(error.value)
    assert "(node 'n')" in str(error.value)


def test_an_unknown_operator_of_another_domain() -> None:
    x, y = gs.Variable("x", np.float32, ["B", 4]), gs.Variable("y")
    graph = gs.Graph([gs.Node("Thing", "n", {}, [x], [y], domain="elsewhere")], [x], [y], opset=18)
    with pytest.raises(ShapeError, match=r"no shape is known for output 'y' of operator elsewhere::Thing"):
        infer(graph)
    y.dtype, y.shape = np.dtype(np.float32), ["B", 7]
    assert infer(graph).shapes["y"][1] == 7


def test_transforms_of_two_kinds_after_each_other() -> None:
    """Each is inferred from matrices of its own, which have the same name."""
    dims = _shape(
        """(float[B, 8, 6, 1] x) => (float[B, M, N, O] y) <int64 two = {2}, int64 one = {1}> {
            h = DFT <onesided = 1> (x, , two) y = DFT (h, , one) }""",
        20,
    )
    assert dims == ["B", 8, 4, 2]


@pytest.mark.parametrize(
    ("nested", "once"),
    [
        ("floor(floor(floor(t/5)/2)/2) - 1", "floor(t/20) - 1"),
        ("floor((floor(a/2) + b)/3)", "floor((a + 2*b)/6)"),
        ("ceiling(floor(t/2)/2)", "floor((t + 2)/4)"),
        ("floor(1/2 - t/2)", "-floor(t/2)"),
        ("floor(a - t/3)", "a - floor(t/3 + 2/3)"),
    ],
)
def test_rounded_quotients_of_rounded_quotients_are_one(nested: str, once: str) -> None:
    dim = parse_dim(nested)
    assert same(dim, parse_dim(once))
    for t in range(60):
        sizes = {"t": t, "a": t, "b": t % 7}
        assert evaluate(dim, sizes) == evaluate(parse_dim(once), sizes)


@pytest.mark.parametrize("factor", [2, 3])
def test_a_quotient_is_not_rounded_once_where_that_differs(factor: int) -> None:
    dim = parse_dim(f"floor(floor(t/5)*{factor}/7)")
    assert [evaluate(dim, {"t": t}) for t in range(99)] == [t // 5 * factor // 7 for t in range(99)]


def test_a_count_that_has_to_be_what_it_counts() -> None:
    """2·S - 1 positions, as relative ones have: at least none, which is a constraint and no contradiction."""
    info = _info("""(float[B, S] x) => (float z) <int64 at = {1}, int64 one = {1}, int64 step = {-1}> {
        s = Shape (x) n = Gather (s, at) first = Sub (n, one) last = Neg (n) r = Range (first, last, step)
        twice = Add (n, n) count = Sub (twice, one) axis = Constant <value_ints = [0]> () t = Unsqueeze (count, axis)
        f = Cast <to = 1> (r) e = ConstantOfShape (t) z = Add (f, e) }""")
    assert [evaluate(d, {"B": 2, "S": 4}) for d in info.shapes["z"]] == [7]
    assert all(c.holds({"B": 2, "S": 1}) for c in info.constraints)
    assert not all(c.holds({"B": 2, "S": 0}) for c in info.constraints)


@pytest.mark.parametrize(("less", "by", "at"), [(1, 2, 0), (511, 384, 511)])
def test_a_quotient_of_a_difference(less: int, by: int, at: int) -> None:
    """Rounded to zero: of -1 it is 0; what is further below is assumed not to be."""
    info = _info(f"""(float[S] x) => (float z) <int64 less = {{{less}}}, int64 by = {{{by}}}, int64[1] axis = {{0}}> {{
        s = Shape (x) i = Squeeze (s, axis) d = Sub (i, less) q = Div (d, by) t = Unsqueeze (q, axis) z = ConstantOfShape (t) }}""")
    for size in (at, 700, 2000):
        assert all(c.holds({"S": size}) for c in info.constraints)
        assert evaluate(info.shapes["z"][0], {"S": size}) == int((size - less) / by)
    assert not info.data
