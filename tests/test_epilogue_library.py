"""Every ready epilogue against numpy written by hand, and its ONNX form in onnxruntime against its reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
from epilogues import assert_close, random_feeds, run_onnx, split_acc

from coda_edge.epilogue import Epilogue, library

LEADS = [(1,), (7,), (130,), (2, 3)]
phi = np.vectorize(lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2))), otypes=[np.float64])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def rotate(acc, cos, sin):
    pairs = acc.reshape(*acc.shape[:-1], -1, 2)
    z = (pairs[..., 0] + 1j * pairs[..., 1]) * (cos + 1j * sin)
    return np.stack([z.real, z.imag], -1).reshape(acc.shape)


def residual_moments(acc, bias, residual):
    y = acc + bias + residual
    return {"y": y, "mean": y.mean(-1, keepdims=True), "var": y.var(-1, keepdims=True)}


def heads(acc, bias):
    y = acc + bias
    return y.reshape(*y.shape[:2], -1, 2).transpose(0, 2, 1, 3)


def gate(x):
    return x[..., 0::2]


def up(x):
    return x[..., 1::2]


def normed(acc, var, eps=1e-5):
    return acc / np.sqrt(var + eps)


EVEN, ANY = 6, 5
CASES = {
    "bias": (library.bias, ANY, lambda a, b: a + b),
    "bias_gelu": (library.bias_gelu, ANY, lambda a, b: (a + b) * phi(a + b)),
    "bias_gelu_tanh": (library.bias_gelu_tanh, ANY, lambda a, b: gelu_tanh(a + b)),
    "bias_silu": (library.bias_silu, ANY, lambda a, b: (a + b) * sigmoid(a + b)),
    "bias_relu": (library.bias_relu, ANY, lambda a, b: np.where(a + b > 0, a + b, 0)),
    "bias_residual": (library.bias_residual, ANY, lambda a, b, r: a + b + r),
    "bias_residual_moments": (library.bias_residual_moments, ANY, residual_moments),
    "bias_heads": (library.bias_heads.specialize(heads=2), EVEN, heads),
    "norm_bias": (library.norm_bias, ANY, lambda a, v, b: normed(a, v) + b),
    "norm_bias_gelu": (library.norm_bias_gelu, ANY, lambda a, v, b: (normed(a, v) + b) * phi(normed(a, v) + b)),
    "swiglu": (library.swiglu, EVEN, lambda a: gate(a) * sigmoid(gate(a)) * up(a)),
    "geglu": (library.geglu, EVEN, lambda a: gate(a) * phi(gate(a)) * up(a)),
    "norm_swiglu": (
        library.norm_swiglu.specialize(eps=1e-6),
        EVEN,
        lambda a, v: gate(normed(a, v, 1e-6)) * sigmoid(gate(normed(a, v, 1e-6))) * up(normed(a, v, 1e-6)),
    ),
    "rope": (library.rope, EVEN, rotate),
    "softcap": (library.softcap.specialize(cap=3.0), ANY, lambda a: 3 * np.tanh(a / 3)),
    "scale_mask": (library.scale_mask.specialize(scale=0.125), ANY, lambda a, m: a * 0.125 + m),
    "scale_mask_tile": (library.scale_mask_tile.specialize(scale=0.125), ANY, lambda a, m: a * 0.125 + m),
    "bias_row_max": (library.bias_row_max, ANY, lambda a, b: {"y": a + b, "max": (a + b).max(-1, keepdims=True)}),
    "bias_row_sumexp": (
        library.bias_row_sumexp,
        ANY,
        lambda a, b, s: {"y": a + b, "sumexp": np.exp(a + b - s).sum(-1, keepdims=True)},
    ),
}


def test_every_ready_epilogue_has_a_case():
    assert set(CASES) == {name for name, value in vars(library).items() if isinstance(value, Epilogue)}


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_reference_and_onnx(name, lead):
    ready, n, by_hand = CASES[name]
    if name == "bias_heads" and len(lead) != 2:
        lead = (1, *lead)
    feeds = random_feeds(ready.program, lead, n, seed=len(lead))
    if "var" in feeds:
        feeds["var"] = np.abs(feeds["var"])
    acc, operands = split_acc(ready.program, feeds)
    expected = by_hand(*(a.astype(np.float64) for a in (acc, *operands.values())))
    expected = expected if isinstance(expected, dict) else {"y": expected}
    reference = ready.reference(acc, operands)
    assert_close(reference, expected, 1e-12)
    assert_close(run_onnx(ready.program, feeds), reference)
    if lead == (2, 3):
        assert_close(run_onnx(ready.program, feeds, reference=True), reference)


def test_heads_of_flat_rows():
    acc = np.arange(24.0).reshape(4, 6)
    y = library.bias_heads.specialize(heads=3).reference(acc, {"bias": np.zeros(6)}, rows_per_batch=2)["y"]
    assert y.shape == (2, 2, 2, 3)
    np.testing.assert_array_equal(y[1, 0], acc[2:, :3])
