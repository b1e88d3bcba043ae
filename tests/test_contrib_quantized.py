"""Microsoft's quantised operators, decomposed, give what onnxruntime computes, or the next quantum."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from contrib_nodes import Array, both, contrib_node, normal
from graphs import worst_error


def _bytes(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def _signed(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(-128, 128, shape).astype(np.int8)


A, A_SCALE, A_ZERO = _bytes(2, 5, 7), np.float32(0.02), np.uint8(120)
B, B_SCALE, B_ZERO = _bytes(5, 7, seed=1), np.float32(0.05), np.uint8(100)
OUT = (np.float32(0.03), np.uint8(130))
UNIT = (np.float32(1 / 256), np.uint8(0))
IMAGE = _bytes(2, 5, 7, 6)

# (operator, inputs, attributes, which inputs are constants)
WHOLE: dict[str, tuple[str, list[Any], dict[str, Any], tuple[int, ...]]] = {
    "QLinearAdd": ("QLinearAdd", [A, A_SCALE, A_ZERO, B, B_SCALE, B_ZERO, *OUT], {}, ()),
    "QLinearMul": ("QLinearMul", [A, A_SCALE, A_ZERO, B, B_SCALE, B_ZERO, *OUT], {}, (3,)),
    "QLinearSigmoid": ("QLinearSigmoid", [A, A_SCALE, A_ZERO, *UNIT], {}, ()),
    "QLinearLeakyRelu": ("QLinearLeakyRelu", [A, A_SCALE, A_ZERO, *OUT], {"alpha": 0.2}, ()),
    "QLinearSoftmax": ("QLinearSoftmax", [A, A_SCALE, A_ZERO, *UNIT], {"axis": 1, "opset": 13}, ()),
    "QLinearGlobalAveragePool": ("QLinearGlobalAveragePool", [IMAGE, A_SCALE, A_ZERO, *OUT], {}, ()),
    "QLinearAveragePool": (
        "QLinearAveragePool",
        [IMAGE, A_SCALE, A_ZERO, *OUT],
        {"kernel_shape": [3, 2], "strides": [2, 1], "channels_last": 1},
        (),
    ),
    "NhwcMaxPool": ("NhwcMaxPool", [IMAGE], {"kernel_shape": [3, 2], "strides": [2, 1]}, ()),
    "QLinearConcat": (
        "QLinearConcat",
        [*OUT, A, A_SCALE, A_ZERO, _bytes(2, 5, 3), B_SCALE, B_ZERO],
        {"axis": 2},
        (),
    ),
    "QLinearWhere": ("QLinearWhere", [B > 99, A, A_SCALE, A_ZERO, B, B_SCALE, B_ZERO, *OUT], {}, ()),
    "QLinearConv": (
        "QLinearConv",
        [_bytes(2, 7, 6, 3), A_SCALE, A_ZERO, _bytes(4, 3, 3, 3), B_SCALE, B_ZERO, np.float32(0.5), A_ZERO],
        {"channels_last": 1, "pads": [1, 1, 1, 1]},
        (3,),
    ),
    "QGemm": (
        "QGemm",
        [
            *(_bytes(5, 8), A_SCALE, A_ZERO, _signed(4, 8), B_SCALE, np.int8(0)),
            *(np.array([300, -200, 7, 0], np.int32), np.float32(0.5), B_ZERO),
        ],
        {"transB": 1, "alpha": 0.5},
        (3, 6),
    ),
    "QuantizeLinear": ("QuantizeLinear", [normal(2, 5), A_SCALE, A_ZERO], {}, ()),
}


@pytest.mark.parametrize("case", WHOLE)
def test_quantised_result(case: str) -> None:
    op, inputs, attrs, constants = WHOLE[case]
    (expected,), (got,) = both(*contrib_node(op, inputs, ["y"], attrs, constants, types=[np.uint8]))
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert np.abs(got.astype(int) - expected).max() <= 1


BATCH, LENGTH, WIDTH, HEADS, DEPTH = 3, 5, 16, 4, 6
WEIGHTS, BIAS = _signed(WIDTH, 3 * HEADS * DEPTH, seed=1), normal(3 * HEADS * DEPTH, seed=2)
COLUMNS = np.linspace(0.001, 0.02, BIAS.size).astype(np.float32)
WORDS = np.random.default_rng(0).integers(0, 11, (BATCH, LENGTH)).astype(np.int32)

REAL: dict[str, tuple[str, list[Any], dict[str, Any], tuple[int, ...], list[str]]] = {
    "QAttention": (
        "QAttention",
        [_bytes(BATCH, LENGTH, WIDTH), WEIGHTS, BIAS, A_SCALE, np.float32(0.01), WORDS % 2, A_ZERO, np.int8(3)],
        {"num_heads": HEADS, "unidirectional": 1},
        (1, 2, 3, 4, 6, 7),
        ["y"],
    ),
    "QAttention with a scale for each column and a past": (
        "QAttention",
        [
            *(_bytes(BATCH, LENGTH, WIDTH), WEIGHTS, BIAS, A_SCALE, COLUMNS, None, A_ZERO),
            *(np.arange(BIAS.size).astype(np.int8), normal(2, BATCH, HEADS, 4, DEPTH)),
        ],
        {"num_heads": HEADS},
        (1, 2, 3, 4, 6, 7),
        ["y", "present"],
    ),
    "DequantizeLinear": ("DequantizeLinear", [np.array([[-3000, 7]], np.int16), A_SCALE, np.int16(4)], {}, (), ["y"]),
    "QGemm": ("QGemm", [_bytes(5, 8), A_SCALE, A_ZERO, _signed(8, 4), COLUMNS[:4], WEIGHTS[0, :4]], {}, (3,), ["y"]),
    "QEmbedLayerNormalization": (
        "QEmbedLayerNormalization",
        [
            *(WORDS, WORDS % 2, _bytes(11, 8), _bytes(9, 8), _bytes(2, 8), _bytes(8), _bytes(8, seed=1), WORDS % 2),
            *(A_SCALE, B_SCALE, A_SCALE, B_SCALE, A_SCALE, A_ZERO, B_ZERO, A_ZERO, B_ZERO, A_ZERO),
        ],
        {},
        (),
        ["y", "lengths"],
    ),
}


@pytest.mark.parametrize("case", REAL)
def test_real_result(case: str) -> None:
    op, inputs, attrs, constants, outputs = REAL[case]
    types = [np.float32, np.int32] if "Embed" in op else []
    assert worst_error(*both(*contrib_node(op, inputs, outputs, attrs, constants, types=types))) <= 3e-6


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("columns", [64, 40])
def test_weights_of_few_bits(columns: int, bits: int) -> None:
    rows, size = 7, 16
    blocks = -(-columns // size)
    inputs = [normal(2, 5, columns), _bytes(rows, blocks, size * bits // 8), np.abs(normal(rows * blocks))]
    attrs = {"K": columns, "N": rows, "bits": bits, "block_size": size}
    zeros = _bytes(rows * -(-blocks * bits // 8), seed=5)
    for extra in ([], [zeros, None, normal(rows)]):
        made = contrib_node("MatMulNBits", inputs + extra, ["y"], attrs, (1, 2, 3, 5))
        assert worst_error(*both(*made)) <= 3e-6


@pytest.mark.parametrize("kind", [0, 1])
def test_weights_of_four_bit_floats(kind: int) -> None:
    rows, columns, size = 5, 64, 16
    inputs = [normal(3, columns), _bytes(rows * columns // 2), np.abs(normal(rows * columns // size))]
    attrs = {"K": columns, "N": rows, "block_size": size, "quant_type": kind}
    assert worst_error(*both(*contrib_node("MatMulBnb4", inputs, ["y"], attrs, (1, 2)))) <= 3e-6


NIBBLES = np.random.default_rng(0).integers(-8, 8, (9, 64))


@pytest.mark.parametrize(
    ("table", "zeros", "bits"),
    [
        (_bytes(9, 64), None, 8),
        (_bytes(9, 32), None, 4),
        (_bytes(9, 32), _bytes(9, 2, seed=4), 4),
        ((NIBBLES + 8).astype(ml_dtypes.uint4), None, 4),
        (NIBBLES.astype(ml_dtypes.int4), NIBBLES[:, :4].astype(ml_dtypes.int4), 4),
    ],
)
def test_embeddings_of_few_bits(table: Array, zeros: Array | None, bits: int) -> None:
    inputs = [table, np.array([[3, 8, 0], [1, 1, 5]]), np.abs(normal(9, 4)), zeros]
    attrs = {"block_size": 16, "bits": bits}
    assert worst_error(*both(*contrib_node("GatherBlockQuantized", inputs, ["y"], attrs, (0, 2, 3)))) <= 1e-6
