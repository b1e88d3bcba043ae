"""A softmax in basic operators is found, and nothing else is taken for one."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import run, to_model, worst_error
from rewriting import model, normal

from coda_edge.frontend import load, normalize

CONSTANTS = {"last": np.array([-1]), "first": np.array([1])}
FEEDS = {"x": normal(3, 5, 7, seed=1) * 4}


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("m = ReduceMax(x, last) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, last) y = Div(e, s)", True),
        ("m = ReduceMax(x, first) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, first) y = Div(e, s)", True),
        (
            "m = ReduceMax(x, last) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, last) r = Reciprocal(s) y = Mul(r, e)",
            True,
        ),
        ("l = LogSoftmax(x) y = Exp(l)", True),
        ("l = LogSoftmax <axis = 1> (x) y = Exp(l)", True),
        ("m = ReduceMax(x, last) d = Sub(x, m) y = Softmax(d)", True),
        ("m = ReduceMax(x, first) d = Sub(x, m) y = Softmax(d)", False),
        ("m = ReduceMax(x, first) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, last) y = Div(e, s)", False),
        ("e = Exp(x) s = ReduceSum(e, last) y = Div(e, s)", False),
        ("m = ReduceMax(x, last) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, last) y = Div(s, e)", False),
    ],
)
def test_softmax(body: str, found: bool) -> None:
    m = model(f"g (float[B, 5, 7] x) => (float[B, 5, 7] y) {{ {body} }}", CONSTANTS)
    graph = normalize(load(m))
    assert ([n.op for n in graph.nodes] == ["Softmax"]) == found
    assert worst_error(run(m, FEEDS), run(to_model(graph), FEEDS)) < 1e-6
