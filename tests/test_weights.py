"""Narrow weights: what is stored, what a GEMM makes of it, and how large a bundle is."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from graphs import load_fixture
from halves import to_half
from kernel_harness import VECTOR_TARGETS, Library, run
from onnx import TensorProto, numpy_helper
from rewriting import model, normal

from coda_edge import targets
from coda_edge.driver import optimize
from coda_edge.epilogue import library
from coda_edge.epilogue.program import EpilogueProgram
from coda_edge.frontend import load
from coda_edge.inputs import input_specs
from coda_edge.ir import GraphEditor
from coda_edge.lower.gemm import lower_gemm
from coda_edge.lower.kernel import KernelCall
from coda_edge.session import Session
from coda_edge.symbolic import symbol
from coda_edge.verify import Verifier, ort_session
from coda_edge.weights import (
    Blocks,
    FactoredConstant,
    Weight,
    choose_columns,
    factored,
    narrowest,
    quantised,
    weight_of,
)

_BF16, _INT4, _UINT4 = (np.dtype(t) for t in (ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.uint4))


def _half(*shape: int, dtype: type[np.float16] | np.dtype = np.float16, seed: int = 0) -> np.ndarray:
    return normal(*shape, seed=seed).astype(dtype).astype(np.float32)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (normal(40, 30), np.float32),
        (_half(40, 30), np.float16),
        (_half(40, 30, dtype=_BF16), _BF16),
        (_half(40, 30) * np.float32(2.0**-24), np.float32),
        (_half(40, 30, dtype=_BF16) * np.float32(2.0**-90), _BF16),
        (np.float32(6e-8) * np.ones((40, 30), np.float32).cumsum(1), np.float32),
        (np.full((40, 30), 65504, np.float32), np.float16),
        (np.full((40, 30), 65536, np.float32), _BF16),
        (np.where(np.arange(1200) < 1190, 1, 0.1).astype(np.float32).reshape(40, 30), np.float32),
        (np.where(np.arange(1200) < 1190, 1.5, -np.inf).astype(np.float32).reshape(40, 30), _BF16),
        (_half(4, 3), np.float32),
        (_half(40, 30).astype(np.float64), np.float64),
    ],
)
def test_the_narrowest_exact_dtype(values: np.ndarray, dtype: np.dtype) -> None:
    stored = narrowest(values)
    assert stored.dtype == dtype
    assert np.array_equal(stored.astype(values.dtype), values)


def _value(weight: Weight) -> np.ndarray:
    value = weight.stored.astype(np.float64)
    value = value if weight.zero is None else value - weight.zero.spread(value.shape)
    value = value if weight.quantum is None else value * weight.quantum.spread(value.shape)
    value = value if weight.scale is None else value * weight.scale[:, None].astype(np.float64)
    return value if weight.offset is None else value - weight.offset.astype(np.float64)


def test_scaled_and_centred_weights_keep_their_factors_when_columns_move() -> None:
    editor = GraphEditor(gs.Graph())
    gain, parts = normal(64, seed=9), []
    for i in range(3):
        w = editor.constant("w", _half(64, 20, seed=i))
        scaled = gain[:, None] * w.values.astype(np.float64)
        mean = scaled.mean(axis=0)
        parts.append(factored(editor, "f", (scaled - mean).astype(np.float32), w, gain, mean))
    order = np.random.default_rng(0).permutation(60)[:50]
    joined = choose_columns(editor, "j", parts, order)
    assert isinstance(joined, FactoredConstant) and joined.weight.stored.dtype == np.float16
    expected = np.concatenate([p.values for p in parts], axis=1)[:, order]
    assert np.array_equal(joined.values, expected)
    assert np.abs(_value(weight_of(joined)) - expected).max() < 1e-6


def test_weights_of_other_factors_are_joined_in_float32() -> None:
    editor = GraphEditor(gs.Graph())
    w = editor.constant("w", _half(64, 20))
    one, two = (factored(editor, "f", w.values * np.float32(s), w, np.full(64, s), None) for s in (3.0, 5.0))
    for sources in ([one, two], [one, w]):
        joined = choose_columns(editor, "j", sources)
        assert not isinstance(joined, FactoredConstant)
        assert np.array_equal(joined.values, np.concatenate([s.values for s in sources], axis=1))


def test_full_precision_weights_have_no_factors() -> None:
    editor = GraphEditor(gs.Graph())
    w = editor.constant("w", normal(64, 20))
    assert not isinstance(factored(editor, "f", w.values * np.float32(2), w, np.full(64, 2.0), None), FactoredConstant)


WEIGHTS = {
    "float16": lambda n, k: Weight(normal(k, n).astype(np.float16)),
    "bfloat16": lambda n, k: Weight(normal(k, n).astype(_BF16)),
    "scaled float16": lambda n, k: Weight(normal(k, n).astype(np.float16), normal(k, seed=1)),
    "centred bfloat16": lambda n, k: Weight(normal(k, n).astype(_BF16), normal(k, seed=1), normal(n, seed=2)),
    "centred int8": lambda n, k: Weight(_whole(k, n, -127, 128).astype(np.int8), normal(k, seed=1), normal(n, seed=2)),
    "uint8 of columns": lambda n, k: Weight(_whole(k, n, 0, 256).astype(np.uint8), None, None, *_blocks(k, n, k)),
    "uint4 in blocks": lambda n, k: Weight(_whole(k, n, 0, 16).astype(_UINT4), None, None, *_blocks(k, n, 32)),
    "int4 with odd blocks and zero points between": lambda n, k: Weight(
        _whole(k, n, -8, 8).astype(_INT4), None, None, *(Blocks(b.numbers / 2, b.sizes) for b in _blocks(k, n, 5))
    ),
}


@pytest.mark.parametrize("dtype", [ml_dtypes.uint4, np.uint8, np.int8])
def test_numbers_that_a_narrower_type_holds_are_stored_in_it(dtype: type) -> None:
    """Zero points that are no whole numbers, so that the numbers stay as they are."""
    stored = np.random.default_rng(0).integers(0, 8, (64, 32)).astype(dtype)
    zero, quantum = np.full((1, 32), 2.5, np.float32), np.full((1, 32), 0.125, np.float32)
    values = (stored.astype(np.float32) - zero) * quantum
    weight = quantised(values, stored, zero, quantum)
    assert weight is not None and weight.stored.dtype == ml_dtypes.int4
    assert np.array_equal(weight.value(), values)


def _whole(k: int, n: int, low: int, high: int) -> np.ndarray:
    return np.random.default_rng(0).integers(low, high, (k, n))


def _blocks(k: int, n: int, size: int) -> tuple[Blocks, Blocks]:
    """Factors and zero points of blocks of rows."""
    rows = -(-k // size)
    zeros = np.random.default_rng(1).integers(0, 16, (rows, n)).astype(np.float32)
    return Blocks(normal(rows, n, seed=2) / 8, (size, 1)), Blocks(zeros, (size, 1))


@pytest.mark.parametrize("form", WEIGHTS)
def test_gemm_of_narrow_weights(form: str) -> None:
    target = VECTOR_TARGETS[-1]
    name, n, k = ("swiglu", 100, 64) if "centred" in form else ("bias_residual_moments", 100, 37)
    program = getattr(library, name).program
    weight = WEIGHTS[form](n, k)
    names = [p.name for p in program.params[1:]]
    lowered = partial(lower_gemm, target, "g", program, "input", weight, names, [o.name for o in program.outputs])
    call = lowered(symbol("M"))
    kernels = Library(target.build([s for s in (call.kernel, call.finish) if s is not None]))
    for m in (1, 4, 5, 131):
        check_gemm(target, call, program, weight, m, n, k, kernels)


def check_gemm(
    target: targets.Target,
    call: KernelCall,
    program: EpilogueProgram,
    weight: Weight,
    m: int,
    n: int,
    k: int,
    kernels: Library,
) -> None:
    """The call's outputs against float64."""
    rng = np.random.default_rng(m)
    a = rng.standard_normal((m, k)).astype(np.float32)
    operands = {}
    for param in program.params[1:]:
        width = program.operand_width(param, n) if param.kind.value in ("tile", "col") else 1
        shape = {"tile": (m, width), "col": (width,), "row": (m,), "scalar": ()}[param.kind.value]
        operands[param.name] = np.asarray(np.abs(rng.standard_normal(shape)) + 0.1).astype(np.float32)
    expected = program.reference(a.astype(np.float64) @ _value(weight), operands)
    outputs = {o.name: np.zeros(expected[o.name].shape, np.float32) for o in program.outputs}
    got = run(target, call, {"input": a, **operands, **outputs}, {"M": m}, chunk=3, library=kernels)
    for output, value in got.items():
        scale = max(1.0, float(np.abs(expected[output]).max()))
        error = np.abs(value - expected[output]).max()
        assert error <= 4e-6 * scale, (output, m, n, k, error / scale)


@pytest.mark.parametrize(
    ("name", "element"), [("llama.sdpa.ts17", TensorProto.BFLOAT16), ("bert.sdpa.dyn20", TensorProto.FLOAT16)]
)
def test_a_bundle_is_as_small_as_the_half_model(name: str, element: int) -> None:
    """Gains and means that passes fold into weights, merged projections and the tables of a Gather stay half."""
    half = to_half(load_fixture(name), element)
    optimized = optimize(half, verify=False)
    assert len(optimized.bundle.constants) < 1.15 * _weights_bytes(half)
    assert _weights_bytes(optimized.model) < 1.25 * _weights_bytes(half)
    session = ort_session(optimized.model)
    if element == TensorProto.FLOAT16:  # onnxruntime gives Python no bfloat16
        verifier = Verifier.of_model(load(half), input_specs(load(half)))
        verifier.check(lambda names, feeds: session.run(list(names), dict(feeds)), "the graph with half weights")


def _weights_bytes(m: onnx.ModelProto) -> int:
    return sum(numpy_helper.to_array(i).nbytes for i in m.graph.initializer)


def test_a_half_checkpoint_that_was_exported_in_float32_is_stored_in_half(tmp_path) -> None:
    table, w = _half(50, 32), _half(32, 40, seed=1)
    m = model("g (int64[n] i) => (float[n, 40] y) { x = Gather (t, i) y = MatMul (x, w) }", {"t": table, "w": w})
    optimized = optimize(m)
    assert len(optimized.bundle.constants) <= 2 * (table.size + w.size) + 128
    optimized.save(tmp_path / "m.coda")
    ids = np.array([3, 0, 49])
    with Session(str(tmp_path / "m.coda")) as session:
        (y,) = session.run(None, {"i": ids})
    assert np.abs(y - table[ids].astype(np.float64) @ w).max() < 1e-5
