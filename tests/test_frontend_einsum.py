"""Einsum, written in basic operators, gives what numpy computes."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import one_node, run, to_model

from coda_edge.errors import CodaError
from coda_edge.frontend import load, normalize

SIZES = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 6, "f": 7}
EQUATIONS = (
    # Dense layers and attention as they are written with einsum: q, k, v; scores; context; projection.
    "abc,cde->abde",
    "abde,dec->abc",
    "aecd,abcd->acbe",
    "acbe,aecd->abcd",
    "abcd,abed->abce",
    "abc,dc->abd",
    "ab,bc",
    "ab,cb->ca",
    "ab,b->a",
    "a,ab->b",
    "b,b->",
    "ab,ab->ab",
    "ab,cd->dacb",
    "a,b->ab",
    "abc,cd->ad",
    "abc->ca",
    "abc->b",
    "ab,bc,cd->ad",
    "ab,ac,ad->bcd",
    "abcd,cdef->abef",
    "abcd,abef->cdef",
)


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("symbolic", [False, True])
def test_equal_to_numpy(equation: str, symbolic: bool) -> None:
    terms = equation.partition("->")[0].split(",")
    rng = np.random.default_rng(len(equation))
    feeds = {f"x{i}": rng.standard_normal([SIZES[c] for c in term]).astype(np.float32) for i, term in enumerate(terms)}
    dims = {f"x{i}": [c if c in "ab" else SIZES[c] for c in term] for i, term in enumerate(terms)}
    model = one_node("Einsum", feeds, dims=dims if symbolic else None, equation=equation)
    expected = np.einsum(equation, *feeds.values())
    try:
        graph = normalize(load(model))
    except CodaError:
        # Two open sizes in one reshape, which no constant target says.
        assert symbolic
        return
    normal = to_model(graph)
    if not symbolic:
        assert "Einsum" not in {n.op_type for n in normal.graph.node}
    (got,) = run(normal, feeds)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("equation", ["abef,def->aebd", "aebf,def->eabd", "def,abef->eadb"])
def test_rows_of_two_dynamic_sizes_stay_axes(equation: str) -> None:
    """Positions in relation to each other: the heads are batch entries, and the rows those of a batch and a sequence."""
    rng = np.random.default_rng(2)
    terms = equation.partition("->")[0].split(",")
    feeds = {f"x{i}": rng.standard_normal([SIZES[c] for c in term]).astype(np.float32) for i, term in enumerate(terms)}
    dims = {f"x{i}": [c if c in "ab" else SIZES[c] for c in term] for i, term in enumerate(terms)}
    normal = to_model(normalize(load(one_node("Einsum", feeds, dims=dims, equation=equation))))
    assert [n.op_type for n in normal.graph.node].count("MatMul") == 1 and "Einsum" not in {
        n.op_type for n in normal.graph.node
    }
    np.testing.assert_allclose(run(normal, feeds)[0], np.einsum(equation, *feeds.values()), rtol=1e-5, atol=1e-5)


def test_an_ellipsis_stands_for_leading_axes() -> None:
    rng = np.random.default_rng(1)
    for equation, shapes in (("...ij,jk->...ik", [(2, 3, 4, 5), (5, 6)]), ("...ij,...jk", [(2, 4, 5), (2, 5, 6)])):
        feeds = {f"x{i}": rng.standard_normal(s).astype(np.float32) for i, s in enumerate(shapes)}
        normal = to_model(normalize(load(one_node("Einsum", feeds, equation=equation))))
        assert "Einsum" not in {n.op_type for n in normal.graph.node}
        np.testing.assert_allclose(run(normal, feeds)[0], np.einsum(equation, *feeds.values()), rtol=1e-5, atol=1e-5)
