"""Microsoft's attention operators, decomposed, give what onnxruntime computes, and become one fused attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coda_edge.passes import run_pipeline
from contrib_nodes import Array, both, contrib_node, normal
from graphs import run, worst_error

from coda_edge import export
from coda_edge.errors import UnsupportedOperator
from coda_edge.frontend import load, normalize

BATCH, QUERIES, KEYS, HEADS, DEPTH, WIDTH = 3, 5, 7, 4, 6, 16
ALL = HEADS * DEPTH
X, WEIGHTS, BIAS = normal(BATCH, QUERIES, WIDTH), normal(WIDTH, 3 * ALL, seed=1) / 3, normal(3 * ALL, seed=2)
Q, K, V = normal(BATCH, QUERIES, ALL), normal(BATCH, KEYS, ALL, seed=1), normal(BATCH, KEYS, ALL, seed=2)


def _mask(*shape: int) -> Array:
    return (np.random.default_rng(0).random(shape) < 0.6).astype(np.int32)


def _check(op: str, inputs: list[Any], outputs: list[str] | None = None, dims: Any = None, **kwargs: Any) -> None:
    constants = kwargs.pop("constants", ())
    model, feeds = contrib_node(op, inputs, outputs or ["y"], kwargs, constants, dims)
    expected, got = both(model, feeds)
    assert worst_error(expected, got) <= 3e-6


MASKS: dict[str, Array] = {
    "ends": np.array([3, 5, 1], np.int32),
    "ends and starts": np.array([4, 5, 3, 1, 0, 2], np.int32),
    "ends and sums": np.array([3, 5, 1, 0, 3, 8, 9, 0, 5, 10, 15], np.int32),
    "keys": _mask(BATCH, QUERIES),
    "queries and keys": _mask(BATCH, QUERIES, QUERIES),
}


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("mask", [None, *MASKS])
def test_attention_masks(mask: str | None, causal: int) -> None:
    inputs = [X, WEIGHTS, BIAS, None if mask is None else MASKS[mask]]
    _check("Attention", inputs, constants=(1, 2), num_heads=HEADS, unidirectional=causal, scale=0.3)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("past", [0, 4])
def test_attention_past(past: int, causal: int) -> None:
    before = normal(2, BATCH, HEADS, past, DEPTH, seed=5)
    dims = {0: ("b", "s", WIDTH), 4: (2, "b", HEADS, "p", DEPTH)}
    for mask in (None, _mask(BATCH, past + QUERIES)):
        inputs = [X, WEIGHTS, BIAS, mask, before]
        outputs = ["y", "present"]
        _check("Attention", inputs, outputs, dims, constants=(1, 2), num_heads=HEADS, unidirectional=causal)


def test_attention_forms() -> None:
    _check("Attention", [X, WEIGHTS], constants=(1,), num_heads=HEADS)
    _check("Attention", [X, WEIGHTS, BIAS], num_heads=HEADS)
    bias = normal(1, HEADS, QUERIES, QUERIES)
    _check("Attention", [X, WEIGHTS, BIAS, None, None, bias], constants=(1, 2), num_heads=HEADS)
    widths = [ALL, ALL, 5 * HEADS]
    narrow = [X, WEIGHTS[:, : sum(widths)], BIAS[: sum(widths)]]
    _check("Attention", narrow, constants=(1, 2), num_heads=HEADS, qkv_hidden_sizes=widths)


def test_attention_mask_of_the_longest_sequence() -> None:
    """[B,1,N,N], which onnxruntime has on GPUs only: the same as its rows and columns of these queries and keys."""
    past = normal(2, BATCH, HEADS, 2, DEPTH, seed=5)
    long = _mask(BATCH, 1, 9, 9)
    cut = np.ascontiguousarray(long[:, 0, 2:7, :7])
    results = []
    for mask in (long, cut):
        model, feeds = contrib_node("Attention", [X, WEIGHTS, BIAS, mask, past], ["y", "p"], {"num_heads": HEADS})
        results.append(run(export.to_model(normalize(load(model))), feeds))
    assert worst_error(*results) == 0


@pytest.mark.parametrize("mask", [None, np.array([3, 5, 1], np.int32), _mask(BATCH, KEYS), _mask(BATCH, QUERIES, KEYS)])
def test_multi_head_masks(mask: Array | None) -> None:
    _check("MultiHeadAttention", [Q, K, V, BIAS, mask], constants=(3,), num_heads=HEADS)


def test_multi_head_forms() -> None:
    op = "MultiHeadAttention"
    dims = {0: ("b", "s", ALL), 1: ("b", "t", ALL), 2: ("b", "t", ALL)}
    _check(op, [Q, K, V], dims=dims, num_heads=HEADS)
    _check(op, [Q, K, normal(BATCH, KEYS, 5 * HEADS)], num_heads=HEADS, scale=0.7)
    heads = [normal(BATCH, HEADS, KEYS, DEPTH, seed=i) for i in (1, 2)]
    _check(op, [Q, *heads, BIAS], num_heads=HEADS)
    _check("DecoderMaskedMultiHeadAttention", [Q[:, :1], *heads], num_heads=HEADS)
    bias = normal(BATCH, HEADS, QUERIES, KEYS)
    _check(op, [Q, K, V, None, _mask(BATCH, KEYS), bias], ["y", "", "", "scores"], num_heads=HEADS)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("past", [0, 4])
def test_multi_head_past(past: int, causal: int) -> None:
    before = [normal(BATCH, HEADS, past, DEPTH, seed=i) for i in (6, 7)]
    new = [K[:, :QUERIES], V[:, :QUERIES]]
    inputs = [Q, *new, BIAS, _mask(BATCH, past + QUERIES), None, *before]
    dims = {6: (BATCH, HEADS, "p", DEPTH), 7: (BATCH, HEADS, "p", DEPTH)}
    _check("MultiHeadAttention", inputs, ["y", "k", "v"], dims, num_heads=HEADS, unidirectional=causal)


def test_packed_heads() -> None:
    """q, k and v in one tensor, which onnxruntime has on GPUs only: the same as each by itself."""
    together = normal(BATCH, QUERIES, HEADS, 3, DEPTH)
    q, k, v = (np.ascontiguousarray(together[:, :, :, i].reshape(BATCH, QUERIES, ALL)) for i in range(3))
    pair = np.ascontiguousarray(together[:, :, :, 1:])
    apart, feeds = contrib_node("MultiHeadAttention", [q, k, v], attrs={"num_heads": HEADS})
    expected = run(apart, feeds)
    for inputs in ([together], [q, pair]):
        model, feeds = contrib_node("MultiHeadAttention", inputs, attrs={"num_heads": HEADS})
        assert worst_error(expected, run(export.to_model(normalize(load(model))), feeds)) <= 3e-6


GROUPS, SIDE = 2, 16
COS, SIN = normal(40, SIDE // 2, seed=3), normal(40, SIDE // 2, seed=4)


def _grouped(
    batch: int,
    queries: int,
    buffer: int,
    lengths: list[int],
    packed: bool = False,
    extra: tuple[Any, ...] = (),
    **attrs: Any,
) -> None:
    """Compares the outputs of the queries that are there, and the present keys and values within each sequence's length."""
    heads, total = 6, max(lengths)
    q, k, v = (normal(batch, queries, n * SIDE, seed=i) for i, n in enumerate((heads, GROUPS, GROUPS)))
    past = [normal(batch, GROUPS, buffer, SIDE, seed=i) for i in (5, 6)]
    qkv = [np.concatenate([q, k, v], 2), None, None] if packed else [q, k, v]
    rotary = [COS, SIN] if attrs.get("do_rotary") else [None, None]
    inputs = [*qkv, *past, np.array(lengths, np.int32) - 1, np.array(total, np.int32), *rotary, *extra]
    attrs |= {"num_heads": heads, "kv_num_heads": GROUPS}
    model, feeds = contrib_node("GroupQueryAttention", inputs, ["y", "k", "v"], attrs, constants=(6,))
    expected, got = both(model, feeds)
    assert [a.shape for a in expected] == [a.shape for a in got]
    for b, length in enumerate(lengths):
        used = length if queries == total else queries
        assert np.abs(expected[0][b, :used] - got[0][b, :used]).max() <= 3e-6
        for a, c in zip(expected[1:], got[1:], strict=True):
            np.testing.assert_allclose(c[b, :, :length], a[b, :, :length], atol=1e-6)


@pytest.mark.parametrize("attrs", [{}, {"do_rotary": 1}, {"do_rotary": 1, "rotary_interleaved": 1}])
@pytest.mark.parametrize(
    ("batch", "queries", "buffer", "lengths"),
    [
        (3, 5, 0, [5, 5, 5]),  # a first prompt
        (3, 5, 0, [5, 3, 1]),  # padded on the right
        (3, 1, 6, [7, 7, 7]),  # a token more
        (3, 1, 6, [7, 4, 2]),  # behind pasts of different lengths
        (3, 1, 12, [7, 4, 2]),  # in a buffer that is longer than any
        (1, 4, 6, [10]),  # several tokens more
        (1, 4, 12, [7]),
    ],
)
def test_grouped(batch: int, queries: int, buffer: int, lengths: list[int], attrs: dict[str, int]) -> None:
    _grouped(batch, queries, buffer, lengths, packed=bool(attrs), **attrs)


@pytest.mark.parametrize(
    "attrs",
    [{"softcap": 1.5}, {"scale": 0.7}, {"smooth_softmax": 1}, {"local_window_size": 3}, {"causal": 0}],
)
def test_grouped_attributes(attrs: dict[str, Any]) -> None:
    _grouped(3, 9, 0, [9, 5, 9], **attrs)
    _grouped(3, 1, 9, [10, 9, 4], **attrs)


def test_grouped_extras() -> None:
    _grouped(1, 5, 3, [8], extra=(None, None, normal(6)), softcap=2.0)
    _grouped(3, 5, 0, [5, 5, 5], extra=(None, normal(1, 1, 5, 5)), softcap=1.0)
    _grouped(3, 1, 4, [5, 3, 5], extra=(None, normal(3, 1, 1, 5)))
    _grouped(3, 1, 9, [5, 3, 5], extra=(None, normal(3, 1, 1, 5)))
    _grouped(3, 1, 5, [6, 6, 6], extra=(np.full((3, 1), 3),), do_rotary=1)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("places", [np.array([3]), np.random.default_rng(1).integers(0, 20, (BATCH, QUERIES))])
def test_rotary(places: Array, interleaved: int) -> None:
    cos, sin = normal(20, DEPTH // 2, seed=3), normal(20, DEPTH // 2, seed=4)
    for extra, attrs in ((0, {}), (4, {"num_heads": HEADS, "rotary_embedding_dim": DEPTH})):
        for shape in ((BATCH, QUERIES, HEADS * (DEPTH + extra)), (BATCH, HEADS, QUERIES, DEPTH + extra)):
            inputs = [normal(*shape), places, cos, sin]
            _check("RotaryEmbedding", inputs, interleaved=interleaved, **attrs)


FUSED: dict[str, tuple[str, list[Any], dict[str, Any], tuple[int, ...]]] = {
    "Attention": ("Attention", [X, WEIGHTS, BIAS, MASKS["keys"]], {"num_heads": HEADS}, (1, 2)),
    "causal Attention": ("Attention", [X, WEIGHTS, BIAS], {"num_heads": HEADS, "unidirectional": 1}, (1, 2)),
    "MultiHeadAttention": ("MultiHeadAttention", [Q, K, V, BIAS], {"num_heads": HEADS}, (3,)),
    "GroupQueryAttention": (
        "GroupQueryAttention",
        [
            *(normal(3, 1, n * SIDE, seed=n) for n in (6, 2, 2)),
            *(normal(3, 2, 4, SIDE, seed=i) for i in (5, 6)),
            np.array([4, 2, 4], np.int32),
            np.array(5, np.int32),
            COS,
            SIN,
        ],
        {"num_heads": 6, "kv_num_heads": 2, "do_rotary": 1},
        (6, 7, 8),
    ),
}


@pytest.mark.parametrize("case", FUSED)
def test_becomes_one_attention(case: str) -> None:
    op, inputs, attrs, constants = FUSED[case]
    # onnxruntime reads the past of grouped heads only if the present is wanted.
    outputs = ["y", "k", "v"] if op == "GroupQueryAttention" else ["y"]
    model, feeds = contrib_node(op, inputs, outputs, attrs, constants)
    graph = normalize(load(model))
    run_pipeline(graph, lambda done: None)
    assert [n.op for n in graph.nodes].count("Attention") == 1
    assert worst_error(run(model, feeds), run(export.to_model(graph), feeds)) <= 3e-6


@pytest.mark.parametrize(
    ("op", "inputs", "attrs"),
    [
        ("Attention", [X, WEIGHTS, BIAS], {"num_heads": HEADS, "do_rotary": 1}),
        ("PackedAttention", [X[0], WEIGHTS, BIAS, _mask(3, 5), _mask(4)], {"num_heads": HEADS}),
        (
            "GroupQueryAttention",
            [X, X, X, None, None, _mask(3), _mask(), *[None] * 7, normal(8), normal(8)],
            {"num_heads": 2, "kv_num_heads": 2},
        ),
    ],
)
def test_refused_by_name(op: str, inputs: list[Any], attrs: dict[str, Any]) -> None:
    model, _ = contrib_node(op, inputs, attrs=attrs)
    with pytest.raises(UnsupportedOperator, match=f"com.microsoft::{op}"):
        normalize(load(model))
