"""What a model packs into one product, in any order of columns, is what it would be as products of its own."""

from __future__ import annotations

import numpy as np
import pytest
from coda_edge.passes import PIPELINE, split_columns
from rewriting import Array, model, normal, rewrite

from coda_edge.epilogue.program import EpilogueProgram


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


_CONSTANTS: dict[str, Array] = {
    "w": normal(12, 48, seed=1),
    "b": normal(48, seed=2),
    "last": ints(-1),
    "from0": ints(0),
    "from1": ints(1),
    "to4": ints(4),
    "to5": ints(5),
    "to6": ints(6),
    "to24": ints(24),
    "end": ints(np.iinfo(np.int64).max),
    "two": ints(2),
    "three": ints(3),
    "halves": ints(24, 24),
    "thirds": ints(4, 4, 4),
    "pairs": ints(0, 0, 24, 2),
    "heads": ints(0, 0, 4, 12),
    "by_head": ints(0, 0, 4, 3, 4),
    "by_kind": ints(0, 0, 3, 4, 4),
    "grouped": ints(0, 0, 2, 6, 4),
    **{f"n{i}": np.array(i, np.int64) for i in range(3)},
    "limit": np.float32(0.7),
    "alpha": np.float32(1.702),
    "one": np.float32(1),
}
_X = {"x": normal(3, 7, 12, seed=3)}
_PACKED = "p0 = MatMul(x, w) p = Add(p0, b)"
_GATE = "s = Sigmoid(g) a = Mul(g, s) y = Mul(u, a)"

_GATES = {
    "halves": f"g, u = Split <axis = -1> (p, halves) {_GATE}",
    "the other half is the gate": f"u, g = Split <axis = -1> (p, halves) {_GATE}",
    "every second column": f"g = Slice(p, from0, end, last, two) u = Slice(p, from1, end, last, two) {_GATE}",
    "pairs": f"r = Reshape(p, pairs) g = Gather <axis = -1> (r, n0) u = Gather <axis = -1> (r, n1) {_GATE}",
    "clamped": "g0, u0 = Split <axis = -1> (p, halves) g = Min(g0, limit) u1 = Min(u0, limit) u = Add(u1, one) "
    "z = Mul(g, alpha) s = Sigmoid(z) a = Mul(g, s) y = Mul(u, a)",
}


@pytest.mark.parametrize("case", _GATES)
def test_packed_gates_are_one_pairwise_epilogue(case: str) -> None:
    m = model(f"g (float[B, S, 12] x) => (float[B, S, 24] y) {{ {_PACKED} {_GATES[case]} }}", _CONSTANTS)
    done = rewrite(m, PIPELINE)
    assert done.ops() == {"Gemm": 1}
    assert {"even", "odd"} <= {s.op for s in EpilogueProgram.parse(done.node("Gemm").attrs["epilogue"]).steps}
    assert done.error(_X) < 2e-6


_MOVED = "{n} = Transpose <perm = [0, 2, 1, 3]> ({n}0)"
_EACH = " ".join(_MOVED.format(n=n) for n in "qkv")
_HEADS = {
    "q, k and v in each head": "r = Reshape(p, heads) t = Transpose <perm = [0, 2, 1, 3]> (r) q, k, v = Split <axis = -1> (t, thirds)",
    "q, k and v as an axis behind the heads": "r = Reshape(p, by_head) q0 = Gather <axis = 3> (r, n0) "
    f"k0 = Gather <axis = 3> (r, n1) v0 = Gather <axis = 3> (r, n2) {_EACH}",
    "q, k and v as an axis that comes first": "r = Reshape(p, by_kind) t = Transpose <perm = [2, 0, 3, 1, 4]> (r) "
    "q = Gather <axis = 0> (t, n0) k = Gather <axis = 0> (t, n1) v = Gather <axis = 0> (t, n2)",
}


@pytest.mark.parametrize("case", _HEADS)
def test_packed_heads_are_stored_as_heads(case: str) -> None:
    out = ", ".join(f"float[B, 4, S, 4] {n}" for n in "qkv")
    m = model(f"g (float[B, S, 12] x) => ({out}) {{ {_PACKED} {_HEADS[case]} }}", _CONSTANTS)
    done = rewrite(m, PIPELINE)
    assert done.ops() == {"Gemm": 1}
    assert [o.heads for o in EpilogueProgram.parse(done.node("Gemm").attrs["epilogue"]).outputs] == [4, 4, 4]
    assert done.error(_X) < 2e-6


def test_groups_of_queries_with_their_key_and_value() -> None:
    m = model(
        """g (float[B, S, 12] x) => (float[B, S, 2, 4, 4] q, float[B, S, 2, 1, 4] k, float[B, S, 2, 1, 4] v) {
            p = MatMul(x, w) r = Reshape(p, grouped) q = Slice(r, from0, to4, three) k = Slice(r, to4, to5, three)
            v = Slice(r, to5, to6, three) }""",
        _CONSTANTS,
    )
    done = rewrite(m, PIPELINE)
    assert done.ops() == {"Gemm": 1, "Reshape": 3}
    assert done.error(_X) < 2e-6


def test_columns_that_nobody_reads_are_not_computed() -> None:
    m = model(
        f"g (float[B, S, 12] x) => (float[B, S, 24] y) {{ {_PACKED} y = Slice(p, from0, to24, last) }}", _CONSTANTS
    )
    done = rewrite(m, PIPELINE)
    assert done.ops() == {"Gemm": 1}
    assert done.node("Gemm").inputs[1].shape == (12, 24)
    assert done.error(_X) < 2e-6


_KEPT = {
    "read whole": ("y = Slice(p, from0, to24, last)", "float[B, S, 24] y, float[B, S, 48] p"),
    "choices overlap": (
        "y = Slice(p, from0, to6, last) z = Slice(p, to4, to24, last)",
        "float[B, S, 6] y, float[B, S, 20] z",
    ),
    "rows are chosen": ("y = Slice(p, from0, to4, from1)", "float[B, T, 48] y"),
    "parts of one tensor": (
        "k = Slice(p, from0, to24, last) l = Slice(p, to24, end, last) n = Neg(l) y = Concat <axis = -1> (k, n)",
        "float[B, S, 48] y",
    ),
}


@pytest.mark.parametrize("case", _KEPT)
def test_products_that_stay_whole(case: str) -> None:
    body, out = _KEPT[case]
    done = rewrite(model(f"g (float[B, S, 12] x) => ({out}) {{ {_PACKED} {body} }}", _CONSTANTS), [split_columns.PASS])
    assert done.log.rewrites == {"split_columns": 0}
    assert done.ops()["MatMul"] == 1
    assert done.error(_X) < 2e-6
