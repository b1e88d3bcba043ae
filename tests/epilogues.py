"""Running an epilogue program's ONNX form, and random operands for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import helper
from onnx.reference import ReferenceEvaluator

from coda_edge.epilogue.onnx import ONNX_DTYPES, emit_onnx
from coda_edge.epilogue.program import EpilogueProgram, Kind, Rows

Array = npt.NDArray[Any]
NUMPY = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "i64": np.int64, "bool": np.bool_}


def as_model(program: EpilogueProgram, shapes: Mapping[str, tuple[int, ...]], opset: int = 18) -> onnx.ModelProto:
    """A model that is the program alone."""
    names = [p.name for p in program.params]
    outputs = [f"out_{o.name}" for o in program.outputs]
    dtypes = program.dtypes()
    rank, columns = len(shapes[names[0]]), shapes[names[0]][-1]
    graph = helper.make_graph(
        emit_onnx(program, names, outputs, "t_", opset, columns),
        "program",
        [helper.make_tensor_value_info(p.name, ONNX_DTYPES[p.dtype], shapes[p.name]) for p in program.params],
        [
            helper.make_tensor_value_info(
                name, ONNX_DTYPES[dtypes[o.value]], [f"{name}_{i}" for i in range(4 if o.heads else rank)]
            )
            for name, o in zip(outputs, program.outputs, strict=True)
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.checker.check_model(model)
    return model


def run_onnx(
    program: EpilogueProgram, feeds: Mapping[str, Array], opset: int = 18, reference: bool = False
) -> dict[str, Array]:
    """The program's outputs as onnxruntime, or the ONNX reference, computes them from its ONNX form."""
    model = as_model(program, {name: a.shape for name, a in feeds.items()}, opset)
    if reference:
        results = ReferenceEvaluator(model).run(None, dict(feeds))
    else:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        results = session.run(None, dict(feeds))
    return dict(zip((o.name for o in program.outputs), results, strict=True))


def random_feeds(program: EpilogueProgram, lead: tuple[int, ...], n: int, seed: int = 0) -> dict[str, Array]:
    """Standard normal operands (floats), small integers, coin flips, for an accumulator of shape ``[*lead, n]``."""
    rng = np.random.default_rng(seed)
    feeds = {}
    for p in program.params:
        rows = lead
        if p.rows is not Rows.ALL:
            rows = (1, lead[1]) if p.rows is Rows.POSITION else (lead[0], 1)
        wide = p.kind in (Kind.TILE, Kind.COL)
        width = program.operand_width(p, n) if wide else 1
        shape = {Kind.TILE: (*rows, width), Kind.ROW: (*rows, 1), Kind.COL: (width,), Kind.SCALAR: ()}[p.kind]
        values = (
            rng.standard_normal(shape) if p.dtype[0] == "f" else rng.integers(0, 2 if p.dtype == "bool" else 9, shape)
        )
        feeds[p.name] = np.asarray(values, NUMPY[p.dtype])
    return feeds


def split_acc(program: EpilogueProgram, feeds: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
    """The accumulator, and the other operands."""
    first = program.params[0].name
    return feeds[first], {name: a for name, a in feeds.items() if name != first}


def assert_close(actual: Mapping[str, Array], expected: Mapping[str, Array], tolerance: float = 2e-6) -> None:
    """Equal names and shapes; errors within ``tolerance`` of each output's largest finite magnitude; infinities and NaN alike."""
    assert list(actual) == list(expected)
    for name, want in expected.items():
        got = np.asarray(actual[name])
        assert got.shape == want.shape, name
        if want.dtype == np.bool_:
            np.testing.assert_array_equal(got, want, err_msg=name)
            continue
        finite = np.isfinite(want)
        scale = max(1.0, float(np.abs(want[finite]).max(initial=0.0)))
        np.testing.assert_allclose(
            got.astype(np.float64), want.astype(np.float64), rtol=0, atol=tolerance * scale, err_msg=name
        )
