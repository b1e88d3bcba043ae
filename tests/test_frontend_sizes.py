"""Sizes: their text form, exact division, and their computation in a graph."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from graphs import run, to_model

from coda_edge.errors import ShapeError
from coda_edge.frontend import SymbolicInfo, infer
from coda_edge.frontend.sizes import SizeEmitter, expand_target, reshape_target
from coda_edge.symbolic import divide, evaluate, format_dim, parse_dim, product, same

SIZES = {"B": 3, "S": 7, "P": 5}
TEXTS = [
    *("B", "B + S", "4*B*S", "S - 1", "floor(S/2)", "floor(S/4 + 3/4)", "Max(B, S)", "Min(16, S)", "Mod(S, 4)", "S**2"),
    *("-P + S", "2*S + 3*floor(B/2)", "ceiling(S/3)"),
    *("floor(S/2 - 1/2)", "floor(floor(S/2 - 1/2)/2 - 1/2)", "ceiling(S/4 - 5/2)", "floor((B*S + 1)/B)"),
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_exact(text: str) -> None:
    dim = parse_dim(text)
    assert same(parse_dim(format_dim(dim)), dim)


@pytest.mark.parametrize("text", TEXTS)
def test_computed_in_a_graph(text: str) -> None:
    """The emitted operators give the size, for a vector and for a scalar."""
    dim = parse_dim(text)
    x, p = gs.Variable("x", np.float32, ["B", 4, "S"]), gs.Variable("p", np.float32, ["P"])
    graph = gs.Graph([], [x, p], [], opset=18)
    emitter = SizeEmitter(graph, SymbolicInfo())
    vector, scalar = emitter.vector([2, dim, parse_dim("B")]), emitter.scalar(dim)
    graph.outputs = [vector, scalar]
    info = infer(graph)
    assert info.values.keys() >= {vector.name, scalar.name}
    assert same(info.values[scalar.name].item(), dim)
    feeds = {"x": np.zeros((3, 4, 7), np.float32), "p": np.zeros(5, np.float32)}
    got = run(to_model(graph), feeds)
    assert got[0].tolist() == [2, evaluate(dim, SIZES), 3]
    assert got[1].tolist() == evaluate(dim, SIZES)


def test_a_size_that_no_tensor_has() -> None:
    graph = gs.Graph([], [gs.Variable("x", np.float32, ["B"])], [], opset=18)
    with pytest.raises(ShapeError, match="size 'Q' is no tensor's dimension"):
        SizeEmitter(graph, SymbolicInfo()).vector([parse_dim("Q")])


@pytest.mark.parametrize(
    ("a", "b", "quotient"),
    [
        ("4*B*S", "2*S", "2*B"),
        ("B*(S + 1)*8", "B*S + B", 8),
        ("S**2 - 1", "S + 1", "S - 1"),
        ("S", 2, None),
        ("B", "S", None),
        (12, 4, 3),
        (12, 5, None),
    ],
)
def test_exact_division(a: str | int, b: str | int, quotient: str | int | None) -> None:
    found = divide(parse_dim(a), parse_dim(b))
    assert (found is None) if quotient is None else same(found, parse_dim(quotient))


def test_products() -> None:
    assert product([]) == 1
    assert product([2, 3]) == 6
    assert same(product([2, parse_dim("B"), 3, parse_dim("S")]), parse_dim("6*B*S"))


def test_targets() -> None:
    b, s = parse_dim("B"), parse_dim("S")
    assert reshape_target([b, s, 64], [b, s, 4, 16]) == [0, 0, 4, 16]
    assert reshape_target([b, s, 64], [product([b, s]), 64]) == [-1, 64]
    assert reshape_target([product([b, s]), 64], [b, s, 64]) is None
    assert reshape_target([b, 64], [b, 0]) is None
    assert expand_target([1, s], [b, 4, s]) == [b, 4, 1]
