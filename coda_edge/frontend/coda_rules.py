"""Shape rules of the operators in domain ``coda`` (docs/architecture.md lists them)."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from ..epilogue.program import EpilogueProgram, Kind, Output
from ..symbolic import Dim, divide, simplify
from ..window import rows_shape
from .shape_rules import broadcast
from .shapes import Call, Type, shape_rule

_DTYPES: dict[str, Any] = {
    "f16": np.dtype(np.float16),
    "bf16": onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16),
    "f32": np.dtype(np.float32),
    "i8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "bool": np.dtype(np.bool_),
}


@shape_rule("Gemm", domain="coda")
def _gemm(call: Call) -> list[Type]:
    a, w = rows_shape(call.shape(0), call.attr("window")), call.shape(1)
    call.equate(a[-1], w[0])
    if not isinstance(w[1], int):
        raise call.error("the weight's width must be fixed")
    program = EpilogueProgram.parse(call.attr("epilogue"))
    dtypes = program.dtypes()
    return [(_DTYPES[dtypes[o.value]], _stored(call, program, o, a[:-1], w[1])) for o in program.outputs]


def _stored(call: Call, program: EpilogueProgram, output: Output, rows: tuple[Dim, ...], n: int) -> tuple[Dim, ...]:
    """The shape of an output of an epilogue on ``[…, n]``."""
    if output.kind is Kind.ROW:
        return (*rows, 1)
    width = program.output_width(output, n)
    if output.heads is None:
        return (*rows, width)
    heads = divide(width, output.heads)
    if heads is None or len(rows) != 2:
        raise call.error(f"output '{output.name}' cannot be stored as heads of {output.heads}")
    return (rows[0], heads, rows[1], output.heads)


@shape_rule("GroupedConv", domain="coda")
def _grouped_conv(call: Call) -> list[Type]:
    x, w, group = call.shape(0), call.shape(1), int(call.attr("group"))
    windows = rows_shape(x, call.attr("window"))
    call.equate(windows[-1], simplify(w[0] * group))
    if not isinstance(w[1], int):
        raise call.error("the weight's width must be fixed")
    program = EpilogueProgram.parse(call.attr("epilogue"))
    dtypes = program.dtypes()
    return [(_DTYPES[dtypes[o.value]], _stored(call, program, o, windows[:-1], w[1])) for o in program.outputs]


@shape_rule("Window", domain="coda")
def _window(call: Call) -> list[Type]:
    return [(call.dtype(), rows_shape(call.shape(), call.attr("window")))]


@shape_rule("Attention", domain="coda")
def _attention(call: Call) -> list[Type]:
    batch, heads, rows, depth = call.shape(0)
    k, v = call.shape(1), call.shape(2)
    call.equate(depth, k[3])
    call.equate(k[2], v[2])
    batch = broadcast(call, (batch,), (k[0],), (v[0],))[0]
    result = (call.dtype(), (batch, rows, simplify(heads * v[3])))
    if not call.attr("present", 0):
        return [result]
    keys = simplify(k[2] + (call.shape(3)[2] if call.attr("past", 0) else 0))
    return [result, *((call.dtype(i), (*t[:2], keys, t[3])) for i, t in ((1, k), (2, v)))]


@shape_rule("RowMoments", domain="coda")
def _row_moments(call: Call) -> list[Type]:
    row = (call.dtype(), (*call.shape()[:-1], 1))
    return [row, row]


@shape_rule("Map", domain="coda")
def _map(call: Call) -> list[Type]:
    return call.infer_body(call.attr("body"))
