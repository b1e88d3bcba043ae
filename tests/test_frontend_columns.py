"""Constants of heads apply before the columns are split, where they are part of a product."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import run, to_model, worst_error
from rewriting import model, normal

from coda_edge.frontend import load, normalize

CONSTANTS = {
    "w": normal(12, 24, seed=1),
    "heads": np.array([0, 0, 4, 6]),
    "full": normal(4, 6, seed=2),
    "depth": normal(6, seed=3),
    "head": normal(1, 1, 4, 1, seed=4),
    "position": normal(7, 1, 1, seed=5),
}


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize(("operands", "moves"), [("r, full", 1), ("depth, r", 1), ("r, head", 1), ("r, position", 0)])
def test_moves_before_the_split(op: str, operands: str, moves: bool) -> None:
    m = model(
        f"g (float[B, 7, 12] x) => (float[B, 7, 4, 6] y) {{ p = MatMul(x, w) r = Reshape(p, heads) y = {op}({operands}) }}",
        CONSTANTS,
    )
    graph = normalize(load(m))
    assert [n.op for n in graph.nodes] == (["MatMul", op, "Reshape"] if moves else ["MatMul", "Reshape", op])
    feeds = {"x": normal(3, 7, 12)}
    assert worst_error(run(m, feeds), run(to_model(graph), feeds)) < 1e-6


def test_a_reshape_that_others_read_stays() -> None:
    m = model(
        "g (float[B, 7, 24] x) => (float[B, 7, 4, 6] y, float[B, 7, 4, 6] r) { r = Reshape(x, heads) y = Add(r, full) }",
        CONSTANTS,
    )
    assert [n.op for n in normalize(load(m)).nodes] == ["Reshape", "Add"]
