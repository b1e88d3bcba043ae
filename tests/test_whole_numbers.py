"""Weights of whole numbers: kept from however a model dequantises them to the bundle and the exported graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from contrib_nodes import contrib_node
from onnx import numpy_helper
from rewriting import Array, model, normal, run

from coda_edge.driver import optimize
from coda_edge.export import to_model
from coda_edge.frontend import load, normalize
from coda_edge.inputs import input_specs
from coda_edge.session import Session
from coda_edge.verify import Verifier, ort_session
from coda_edge.weights import FactoredConstant, Weight

_INT4, _UINT4 = np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4)
# Not round: K is no multiple of a block, N none of a vector.
K, N = 50, 37


def whole(*shape: int, low: int = -127, high: int = 128, seed: int = 0) -> Array:
    """Whole numbers that fill their range."""
    return np.random.default_rng(seed).integers(low, high, shape)


def scales(*shape: int, seed: int = 1) -> Array:
    """Positive float32 numbers."""
    return (np.abs(normal(*shape, seed=seed)) / 100 + 0.001).astype(np.float32)


BYTES = whole(K, N).astype(np.int8)
HEAD = "g (float[s, 50] x) => (float[s, 37] y)"

SPELLED: dict[str, tuple[str, dict[str, Array], int, tuple[np.dtype, tuple[int, ...] | None, bool]]] = {
    "cast, scale of columns": (
        HEAD + " { f = Cast <to = 1> (q) w = Mul (f, s) y = MatMul (x, w) }",
        {"q": BYTES, "s": scales(N)},
        17,
        (np.dtype(np.int8), None, False),
    ),
    "cast, scale of rows": (
        HEAD + " { f = Cast <to = 1> (q) w = Mul (s, f) y = MatMul (x, w) }",
        {"q": BYTES, "s": scales(K, 1)},
        17,
        (np.dtype(np.int8), (1, N), False),
    ),
    "cast, zero points, one scale, turned": (
        HEAD
        + " { f = Cast <to = 1> (q) c = Sub (f, z) w = Mul (c, s) t = Transpose <perm = [1, 0]> (w) y = MatMul (x, t) }",
        {
            "q": whole(N, K, low=0, high=256).astype(np.uint8),
            "z": np.float32(whole(N, 1, low=3, high=250)),
            "s": scales(),
        },
        17,
        (np.dtype(np.uint8), None, True),
    ),
    "cast, one zero point": (
        HEAD + " { f = Cast <to = 1> (q) c = Add (f, z) w = Mul (c, s) y = MatMul (x, w) }",
        {"q": whole(K, N, low=0, high=256).astype(np.uint8), "z": np.float32(-128), "s": scales(N)},
        17,
        (np.dtype(np.int8), None, False),
    ),
    "dequantised whole, as in opset 10": (
        HEAD + " { w = DequantizeLinear (q, s, z) y = MatMul (x, w) }",
        {"q": BYTES, "s": scales(), "z": np.int8(5)},
        12,
        (np.dtype(np.int8), None, True),
    ),
    "dequantised along columns": (
        HEAD + " { w = DequantizeLinear <axis = 1> (q, s) y = MatMul (x, w) }",
        {"q": BYTES, "s": scales(N)},
        13,
        (np.dtype(np.int8), None, False),
    ),
    "dequantised along rows, in Gemm": (
        HEAD + " { w = DequantizeLinear <axis = 0> (q, s, z) y = Gemm <transB = 1> (x, w) }",
        {"q": BYTES.T.copy(), "s": scales(N), "z": whole(N, seed=2).astype(np.int8)},
        13,
        (np.dtype(np.int8), None, True),
    ),
    "dequantised in blocks": (
        HEAD + " { w = DequantizeLinear <axis = 0, block_size = 16> (q, s) y = MatMul (x, w) }",
        {"q": BYTES, "s": scales(4, N)},
        21,
        (np.dtype(np.int8), (16, 1), False),
    ),
    "dequantised in blocks of 4 bits with zero points": (
        HEAD + " { w = DequantizeLinear <axis = 0, block_size = 16> (q, s, z) y = MatMul (x, w) }",
        {
            "q": whole(K, N, low=0, high=16).astype(_UINT4),
            "s": scales(4, N),
            "z": whole(4, N, low=0, high=16, seed=2).astype(_UINT4),
        },
        21,
        (_UINT4, (16, 1), True),
    ),
    "dequantised in blocks of signed 4 bits, turned": (
        HEAD
        + " { w = DequantizeLinear <axis = 1, block_size = 16> (q, s) t = Transpose <perm = [1, 0]> (w) y = MatMul (x, t) }",
        {"q": whole(N, K, low=-8, high=8).astype(_INT4), "s": scales(N, 4)},
        21,
        (_INT4, (16, 1), False),
    ),
    "blocks by reshaping": (
        HEAD
        + """ {
            f = Cast <to = 1> (q) w = Mul (f, s) t = Reshape (w, shape) u = Slice (t, zero, k, zero) y = MatMul (x, u)
        }""",
        {
            "q": whole(4, 16, N, low=-8, high=8).astype(np.int8),
            "s": scales(4, 1, N),
            **{"shape": np.array([64, N]), "zero": np.array([0]), "k": np.array([K])},
        },
        17,
        (_INT4, (16, 1), False),
    ),
    "parts side by side": (
        HEAD
        + """ {
            f = Cast <to = 1> (q) v = Mul (f, s) e = DequantizeLinear <axis = 1> (r, t) w = Concat <axis = 1> (v, e) y = MatMul (x, w)
        }""",
        {"q": BYTES[:, :20].copy(), "s": scales(20), "r": BYTES[:, 20:].copy(), "t": scales(17, seed=3)},
        17,
        (np.dtype(np.int8), None, False),
    ),
    "divided by a power of two": (
        HEAD + " { f = Cast <to = 1> (q) w = Div (f, s) y = MatMul (x, w) }",
        {"q": BYTES, "s": np.float32(64)},
        17,
        (np.dtype(np.int8), None, False),
    ),
}


def _weight(m: onnx.ModelProto) -> Weight:
    """The only factored constant of the model in normal form. Its value is that of the constant to the last bit."""
    (found,) = [t for t in normalize(load(m)).tensors().values() if isinstance(t, FactoredConstant)]
    assert np.array_equal(found.weight.value(), found.values)
    return found.weight


@pytest.mark.parametrize("spelling", SPELLED)
def test_whole_numbers_are_found_however_they_are_dequantised(spelling: str) -> None:
    text, constants, opset, (dtype, blocks, shifted) = SPELLED[spelling]
    weight = _weight(model(text, constants, opset))
    assert weight.stored.dtype == dtype
    assert (None if weight.quantum is None else weight.quantum.sizes) == blocks
    assert (weight.zero is not None) == shifted


@pytest.mark.parametrize(
    ("bits", "size", "extra", "dtype"),
    [
        (4, 16, "", _INT4),
        (4, 32, "zeros", _UINT4),
        (4, 16, "float zeros", _UINT4),
        (8, 16, "", np.dtype(np.int8)),
        (8, 64, "zeros bias", np.dtype(np.uint8)),
    ],
)
def test_blocks_of_few_bits_of_microsofts_operator(bits: int, size: int, extra: str, dtype: np.dtype) -> None:
    made, _ = _few_bits(bits, size, extra)
    weight = _weight(made)
    assert weight.stored.dtype == dtype
    if weight.quantum is not None:  # one block for all of K is a factor behind the product
        assert weight.quantum.sizes == (size, 1)
    assert (weight.zero is not None) == bool(extra)


def _few_bits(bits: int, size: int, extra: str) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """MatMulNBits of ``[K, N]`` and its feeds."""
    blocks = -(-K // size)
    packed = whole(N, blocks, size * bits // 8, low=0, high=256).astype(np.uint8)
    inputs: list[Array | None] = [normal(3, 7, K), packed, scales(N * blocks)]
    if extra:
        row = -(-blocks * bits // 8)
        zeros = whole(N * row, low=0, high=256, seed=3).astype(np.uint8)
        floats = np.float32(whole(N, blocks, low=0, high=31, seed=3) / 2)
        inputs += [floats if "float" in extra else zeros, None, normal(N) if "bias" in extra else None]
    attrs = {"K": K, "N": N, "bits": bits, "block_size": size}
    return contrib_node("MatMulNBits", inputs, ["y"], attrs, (1, 2, 3, 5), {0: ["b", "s", K]})


def _both(m: onnx.ModelProto, feeds: Mapping[str, Array], tmp_path, packed: int) -> None:
    """Bundle and exported graph against the model in onnxruntime; constants within ``packed`` bytes."""
    optimized = optimize(m, verify=False)
    assert len(optimized.bundle.constants) <= packed + 64 * 8
    assert sum(i.ByteSize() for i in optimized.model.graph.initializer) <= packed + 2000
    optimized.save(tmp_path / "m.coda")
    expected = ort_session(m).run(None, dict(feeds))
    with Session(str(tmp_path / "m.coda")) as session:
        got = session.run(None, dict(feeds))
    for found in (got, run(optimized.model, feeds)):
        for a, b in zip(found, expected, strict=True):
            error, largest = float(np.abs(a.astype(np.float64) - b).max()), float(np.abs(b).max())
            assert error <= 3e-6 * largest


@pytest.mark.parametrize(
    "spelling", ["cast, zero points, one scale, turned", "dequantised in blocks of 4 bits with zero points"]
)
def test_a_bundle_is_as_small_as_the_model(spelling: str, tmp_path) -> None:
    text, constants, opset, (dtype, _, _) = SPELLED[spelling]
    m = model(text, constants, opset)
    padded = 56 * N // 2 if dtype == _UINT4 else K * N
    others = sum(v.size * (4 if v.dtype == np.float32 else 1) for n, v in constants.items() if n != "q")
    for rows in (1, 7, 130):
        _both(m, {"x": normal(rows, K, seed=rows)}, tmp_path, padded + others)


@pytest.mark.parametrize(("bits", "size", "extra"), [(4, 16, "float zeros"), (8, 16, "")])
def test_few_bits_stay_few(bits: int, size: int, extra: str, tmp_path) -> None:
    made, feeds = _few_bits(bits, size, extra)
    _both(made, feeds, tmp_path, 64 * N * bits // 8 + 2 * 4 * 4 * N)


@pytest.mark.parametrize("source", ["node", "optimiser"])
def test_results_are_compared_in_float(source: str) -> None:
    """onnxruntime makes whole numbers of activations where a node or its own optimiser says so; the reference does not."""
    if source == "node":
        made, _ = _few_bits(8, 16, "")
        made.graph.node[0].attribute.append(onnx.helper.make_attribute("accuracy_level", 4))
    else:
        text, constants, opset, _ = SPELLED["dequantised in blocks of 4 bits with zero points"]
        made = model(text, constants, opset)
    loaded = load(made)
    session = ort_session(to_model(normalize(loaded)))
    verifier = Verifier.of_model(loaded, input_specs(loaded))
    assert verifier.check(lambda names, feeds: session.run(list(names), dict(feeds)), "normal form") < 1e-5


GATED = """g (float[b, s, 64] x) => (float[b, s, 64] y) {
    n = LayerNormalization <axis = -1, epsilon = 0.00001> (x, gain, shift)
    a = DequantizeLinear <axis = 1> (qa, sa) b = DequantizeLinear <axis = 1> (qb, sb) c = DequantizeLinear <axis = 1> (qc, sc)
    p = MatMul (n, a) q = MatMul (n, b) s1 = Sigmoid (p) g1 = Mul (p, s1) h = Mul (g1, q) z = MatMul (h, c) y = Add (x, z)
}"""


@pytest.mark.parametrize("blocks", [0, 32])
def test_passes_keep_whole_numbers(blocks: int, tmp_path) -> None:
    """A norm's gain and centring are folded into the weights of two projections, which become one with interleaved columns."""
    text, constants = GATED, {"gain": normal(64) + 2, "shift": normal(64, seed=3)}
    for i, (name, (k, n)) in enumerate({"a": (64, 96), "b": (64, 96), "c": (96, 64)}.items()):
        constants[f"q{name}"] = whole(k, n, low=-8 if blocks else -127, high=8 if blocks else 128, seed=i).astype(
            np.int8
        )
        constants[f"s{name}"] = scales(k // blocks, n) if blocks else scales(n)
    if blocks:
        text = text.replace("DequantizeLinear <axis = 1>", f"DequantizeLinear <axis = 0, block_size = {blocks}>")
    m = model(text, constants, 21 if blocks else 17)
    numbers = 3 * 64 * 96 // (2 if blocks else 1)
    factors = sum(v.nbytes for v in constants.values() if v.dtype == np.float32)
    _both(m, {"x": normal(3, 7, 64)}, tmp_path, numbers + factors + 4 * (64 + 64 + 5 * 96))


TABLES: dict[str, tuple[str, dict[str, Array], int]] = {
    "bytes": ("f = Cast <to = 1> (q) t = Mul (f, s)", {"q": whole(41, 36).astype(np.int8), "s": scales(41, 1)}, 17),
    "blocks of 4 bits": (
        "t = DequantizeLinear <axis = 1, block_size = 16> (q, s, z)",
        {
            "q": whole(41, 36, low=0, high=16).astype(_UINT4),
            "s": scales(41, 3),
            "z": whole(41, 3, low=0, high=16, seed=2).astype(_UINT4),
        },
        21,
    ),
}


@pytest.mark.parametrize("table", TABLES)
def test_a_look_up_reads_whole_numbers(table: str, tmp_path) -> None:
    made, constants, opset = TABLES[table]
    text = f"g (int64[b, s] i) => (float[b, s, 36] y) {{ {made} r = Gather (t, i) y = Tanh (r) }}"
    size = 42 * 36 // 2 if opset == 21 else 41 * 36
    others = sum(v.size * (4 if v.dtype == np.float32 else 1) for n, v in constants.items() if n != "q")
    _both(model(text, constants, opset), {"i": whole(3, 7, low=-41, high=41)}, tmp_path, size + others)


def test_a_tied_table_is_looked_up_and_multiplied(tmp_path) -> None:
    text = """g (int64[s] i) => (float[s, 41] y) {
        f = Cast <to = 1> (q) t = Mul (f, s) r = Gather (t, i) u = Transpose <perm = [1, 0]> (t) y = MatMul (r, u)
    }"""
    constants = {"q": whole(41, 36).astype(np.int8), "s": scales(41, 1)}
    _both(model(text, constants, 17), {"i": whole(7, low=0, high=41)}, tmp_path, 2 * (41 * 36 + 4 * 41))


CHANGES: dict[str, Callable[[Array], Array]] = {
    "another rounding": lambda w: np.nextafter(w, np.float32(9)),
    "a factor for each number": lambda w: w * scales(*w.shape, seed=9),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_no_whole_number_times_a_factor_stays_float(change: str) -> None:
    text = HEAD + " { f = Cast <to = 1> (q) w = Mul (f, s) v = Mul (w, r) y = MatMul (x, v) }"
    factor = CHANGES[change](np.ones((K, N), np.float32))
    m = model(text, {"q": BYTES, "s": scales(N), "r": factor}, 17)
    graph = normalize(load(m))
    assert not any(isinstance(t, FactoredConstant) for t in graph.tensors().values())
    (weights,) = [t for t in graph.tensors().values() if isinstance(t, gs.Constant) and t.values.size == K * N]
    expected = np.float32(BYTES) * numpy_helper.to_array(m.graph.initializer[1]) * factor
    assert np.array_equal(weights.values, expected)
