"""Attention and RotaryEmbedding of opsets 23 and 24, decomposed, give what onnxruntime computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from graphs import one_node, run, to_model, worst_error

from coda_edge.frontend import load, normalize

Array = npt.NDArray[Any]

ORDER = ("q", "k", "v", "mask", "past_k", "past_v", "lengths")


def _normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _inputs(**given: Array) -> dict[str, Array]:
    """Attention's inputs in order, those not given left out."""
    last = max(i for i, n in enumerate(ORDER) if n in given)
    return {n if n in given else f"_{n}": given.get(n, np.zeros(0)) for n in ORDER[: last + 1]}


def _check(inputs: dict[str, Array], outputs: int = 1, opset: int = 23, **attrs: Any) -> None:
    dims = {"q": ("b", *inputs["q"].shape[1:])}
    model = one_node("Attention", inputs, outputs, opset, (), dims, **attrs)
    feeds = {n: v for n, v in inputs.items() if not n.startswith("_")}
    normal = to_model(normalize(load(model)))
    onnx.checker.check_model(normal)
    assert "Attention" not in {n.op_type for n in normal.graph.node}
    assert worst_error(run(model, feeds), run(normal, feeds)) <= 2e-6


Q, K, V = _normal(2, 4, 5, 8), _normal(2, 4, 7, 8, seed=1), _normal(2, 4, 7, 6, seed=2)
GQA = _normal(2, 2, 7, 8, seed=3), _normal(2, 2, 7, 6, seed=4)
KEEP = np.random.default_rng(5).random((2, 1, 5, 7)) < 0.6


def _holes() -> Array:
    keep = KEEP.copy()
    keep[0, 0, 2] = False  # a query that may attend to nothing
    return keep


MASKS = {
    "bool": _holes(),
    "bool of two axes": _holes()[0, 0],
    "bool by head": np.repeat(_holes(), 4, axis=1),
    "float": np.where(KEEP, _normal(2, 1, 5, 7, seed=6), -1e4).astype(np.float32),
    "float with infinities": np.where(KEEP, 0, -np.inf).astype(np.float32),
}


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, opset: int) -> None:
    _check(_inputs(q=Q, k=K, v=V, mask=MASKS[mask]), opset=opset)


@pytest.mark.parametrize(
    "attrs", [{"is_causal": 1}, {"scale": 0.3}, {"softcap": 2.0}, {"is_causal": 1, "softcap": 1.5}]
)
def test_attributes(attrs: dict[str, Any]) -> None:
    _check(_inputs(q=Q, k=K, v=V), **attrs)
    _check(_inputs(q=Q, k=K, v=V, mask=MASKS["bool"]), **attrs)
    _check(_inputs(q=Q, k=K, v=V, mask=MASKS["float"]), **attrs)


def test_grouped_heads() -> None:
    _check(_inputs(q=Q, k=GQA[0], v=GQA[1]))
    _check(_inputs(q=Q, k=GQA[0], v=GQA[1], mask=MASKS["bool"]), is_causal=1)


@pytest.mark.parametrize("heads", [4, 2])
def test_flat_heads(heads: int) -> None:
    k, v = (K, V) if heads == 4 else GQA
    flat = {n: x.transpose(0, 2, 1, 3).reshape(2, x.shape[2], -1) for n, x in (("q", Q), ("k", k), ("v", v))}
    _check(_inputs(**flat), q_num_heads=4, kv_num_heads=heads)
    _check(_inputs(**flat, mask=MASKS["bool"]), q_num_heads=4, kv_num_heads=heads, is_causal=1)


@pytest.mark.parametrize("causal", [0, 1])
def test_past(causal: int) -> None:
    past = {"past_k": _normal(2, 4, 3, 8, seed=7), "past_v": _normal(2, 4, 3, 6, seed=8)}
    _check(_inputs(q=Q, k=K, v=V, **past), outputs=3, is_causal=causal)
    mask = np.random.default_rng(9).random((5, 10)) < 0.7
    _check(_inputs(q=Q, k=K, v=V, mask=mask, **past), outputs=3, is_causal=causal)


@pytest.mark.parametrize("mode", [0, 3])
def test_scores_as_output(mode: int) -> None:
    _check(_inputs(q=Q, k=K, v=V, mask=KEEP), outputs=4, qk_matmul_output_mode=mode)


@pytest.mark.parametrize("causal", [0, 1])
def test_lengths(causal: int) -> None:
    _check(_inputs(q=Q, k=K, v=V, lengths=np.array([6, 7])), opset=24, is_causal=causal)


COS, SIN = np.cos(_normal(20, 4)), np.sin(_normal(20, 4))
POSITIONS = np.random.default_rng(1).integers(0, 20, (2, 5))


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("width", [8, 12])
def test_rotary(interleaved: int, width: int) -> None:
    """Whole and partial rotation, positions given or not, heads as an axis or flat."""
    attrs = {"interleaved": interleaved, "rotary_embedding_dim": 0 if width == 8 else 8}
    x = _normal(2, 3, 5, width)
    _rotary({"x": x, "cos": COS, "sin": SIN, "p": POSITIONS}, attrs)
    _rotary({"x": x, "cos": COS[POSITIONS], "sin": SIN[POSITIONS]}, attrs)
    flat = x.transpose(0, 2, 1, 3).reshape(2, 5, -1)
    _rotary({"x": flat, "cos": COS, "sin": SIN, "p": POSITIONS}, attrs | {"num_heads": 3})


def _rotary(inputs: dict[str, Array], attrs: dict[str, int]) -> None:
    model = one_node("RotaryEmbedding", inputs, 1, 23, (), **attrs)
    normal = to_model(normalize(load(model)))
    assert "RotaryEmbedding" not in {n.op_type for n in normal.graph.node}
    assert worst_error(run(model, inputs), run(normal, inputs)) <= 1e-6
