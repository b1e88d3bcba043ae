"""ONNX's own test cases of each operator that a Transformer may carry: what it is written in has kernels and the right values.

Every case's normal form runs in onnxruntime; a few operators' cases run as bundles too (``test_kernels``), since building kernels takes
long. What is refused is refused by name.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import run, to_model
from onnx import helper, numpy_helper

import coda_edge
from coda_edge.bundle import to_bytes
from coda_edge.errors import CodaError
from coda_edge.frontend import load, normalize
from coda_edge.lower import KERNELS, POINTWISE

_PACKAGE = "onnx.backend.test.case.node"
_TYPES = frozenset(map(np.dtype, ("float32", "float16", "int64", "int32", "int8", "uint8", "bool")))

#: The modules of ONNX's test cases, one for each operator.
OPERATORS = (
    *[
        "abs",
        "acos",
        "acosh",
        "add",
        "affinegrid",
        "and_",
        "argmax",
        "argmin",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "attention",
        "averagepool",
    ],
    *[
        "batch_normalization",
        "bitwiseand",
        "bitwisenot",
        "bitwiseor",
        "bitwisexor",
        "cast",
        "castlike",
        "ceil",
        "celu",
        "center_crop_pad",
    ],
    *[
        "clip",
        "concat",
        "constant",
        "constantofshape",
        "conv",
        "convinteger",
        "convtranspose",
        "cos",
        "cosh",
        "cumsum",
        "depthtospace",
        "dft",
    ],
    *[
        "dequantizelinear",
        "div",
        "dropout",
        "dynamicquantizelinear",
        "einsum",
        "elu",
        "equal",
        "erf",
        "exp",
        "expand",
        "eyelike",
        "flatten",
    ],
    *[
        "floor",
        "gather",
        "gatherelements",
        "gathernd",
        "gelu",
        "gemm",
        "globalaveragepool",
        "globalmaxpool",
        "greater",
        "greater_or_equal",
    ],
    *[
        "gridsample",
        "groupnormalization",
        "gru",
        "hardmax",
        "hardsigmoid",
        "hardswish",
        "identity",
        "if_",
        "instance_normalization",
    ],
    *[
        "isinf",
        "isnan",
        "layernormalization",
        "leakyrelu",
        "less",
        "loop",
        "less_or_equal",
        "log",
        "logsoftmax",
        "lpnormalization",
        "lppool",
        "lstm",
    ],
    *[
        "matmul",
        "matmulinteger",
        "max",
        "maxpool",
        "mean",
        "meanvariancenormalization",
        "min",
        "mish",
        "mod",
        "mul",
        "neg",
        "nonzero",
        "not_",
    ],
    *[
        "onehot",
        "or_",
        "pad",
        "pow",
        "prelu",
        "qlinearconv",
        "qlinearmatmul",
        "rangeop",
        "reciprocal",
        "reduce_log_sum",
    ],
    *["reduce_log_sum_exp", "reducel1", "reducel2", "reducemax", "reducemean", "reducemin", "reduceprod", "reducesum"],
    *[
        "reducesumsquare",
        "relu",
        "reshape",
        "resize",
        "reversesequence",
        "rmsnormalization",
        "rnn",
        "rotaryembedding",
        "round",
    ],
    *[
        "scan",
        "scatter",
        "scatterelements",
        "scatternd",
        "selu",
        "shape",
        "shrink",
        "sigmoid",
        "sign",
        "sin",
        "sinh",
        "size",
        "slice",
        "softmax",
        "softplus",
    ],
    *[
        "softsign",
        "spacetodepth",
        "split",
        "sqrt",
        "squeeze",
        "stft",
        "sub",
        "sum",
        "swiglu",
        "swish",
        "tan",
        "tanh",
        "tensorscatter",
    ],
    *["thresholdedrelu", "tile", "topk", "transpose", "trilu", "unsqueeze", "upsample", "where", "xor"],
)

#: Cases whose operator is refused by its name, by the beginnings of their names.
REFUSED = (
    "test_batchnorm_epsilon_training_mode",
    "test_batchnorm_example_training_mode",
    "test_loop13_seq",
    "test_loop16_seq_none",
    "test_maxpool_with_argmax",
    "test_scan_sum",
    "test_training_dropout",
)
#: Of these, what ONNX's reference differs from: it rounds the size of the output otherwise than onnxruntime, whom we follow.
AS_ONNXRUNTIME = (
    "test_resize_downsample_scales_linear_align_corners",
    "test_resize_downsample_scales_cubic_align_corners",
)
#: Modules of operators that nothing lowers, with a word of the error.
UNKNOWN = {"det": "Det", "maxunpool": "MaxUnpool", "unique": "Unique"}
#: Cases that run as bundles.
BUILT = (
    *("averagepool.test_averagepool_2d_ceil", "attention.test_attention_4d_gqa_with_past_and_present"),
    *("attention.test_attention_local_window_with_past", "convtranspose.test_convtranspose_group_2"),
    *("resize.test_resize_upsample_scales_linear", "gridsample.test_gridsample_bicubic", "dft.test_dft_inverse"),
    *("tensorscatter.test_tensorscatter_circular", "atan.test_atan", "hardmax.test_hardmax_axis_1"),
    *("gru.test_gru_batchwise", "reversesequence.test_reversesequence_batch", "if_.test_if"),
)

Case = tuple[str, onnx.ModelProto, dict[str, Any], list[Any]]


def _array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def _is_operand(op: str, value: Any) -> bool:
    """Whether an input is what an exporter would write as a constant: axes, sizes, counts, scales of a Resize."""
    return value.ndim <= 1 and (value.dtype.kind in "iub" or op in ("Resize", "Upsample") or not value.size)


@cache
def _cases(module: str) -> tuple[Case, ...]:
    """The cases of one operator: name, model, feeds and expected results."""
    package = importlib.import_module(_PACKAGE)
    before = len(package._NodeTestCases)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(f"{_PACKAGE}.{module}")
    cases = package._NodeTestCases[before:]
    return tuple(_baked(c) for c in cases if "_expanded" not in c.name and _is_known(c.model.graph))


def _is_known(graph: onnx.GraphProto) -> bool:
    """Whether all inputs and outputs are tensors of types that are lowered."""
    values = [*graph.input, *graph.output]
    kinds = [v.type.tensor_type.elem_type for v in values if v.type.HasField("tensor_type")]
    strings = (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING)
    return len(kinds) == len(values) and all(
        k not in strings and np.dtype(helper.tensor_dtype_to_np_dtype(k)) in _TYPES for k in kinds
    )


def _baked(case: Any) -> Case:
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    given, results = case.data_sets[0]
    feeds, inputs = {}, []
    for index, (info, value) in enumerate(zip(case.model.graph.input, map(_array, given), strict=True)):
        op = model.graph.node[0].op_type
        if (index or op == "Loop") and _is_operand(op, value):
            model.graph.initializer.append(numpy_helper.from_array(value, info.name))
        else:
            inputs.append(info)
            feeds[info.name] = value
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    return case.name, model, feeds, [_array(r) for r in results]


def _check(name: str, found: Sequence[Any], expected: Sequence[Any]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), 1e-3, 2e-5, err_msg=name)


@pytest.mark.parametrize("module", OPERATORS)
def test_normal_form(module: str) -> None:
    """It has only operators that are lowered, and gives what the case expects."""
    for name, model, feeds, expected in _cases(module):
        if name.startswith(REFUSED):
            _check_refused(name, model, model.graph.node[0].op_type)
            continue
        made = normalize(load(model))
        assert {n.op for n in made.nodes} <= {*KERNELS, *POINTWISE}, name
        if name not in AS_ONNXRUNTIME:
            _check(name, run(to_model(made), feeds), expected)


def _check_refused(name: str, model: onnx.ModelProto, op: str) -> None:
    with pytest.raises(CodaError, match=rf"\b{op}\b") as caught:
        coda_edge.optimize(model, verify=False)
    assert "(node '" in str(caught.value), name


@pytest.mark.parametrize("module", UNKNOWN)
def test_refused_by_name(module: str) -> None:
    for name, model, _, _ in _cases(module):
        _check_refused(name, model, UNKNOWN[module])


@pytest.mark.parametrize("case", BUILT)
def test_kernels(case: str) -> None:
    module, wanted = case.split(".")
    (found,) = (c for c in _cases(module) if c[0] == wanted)
    name, model, feeds, expected = found
    bundle = coda_edge.optimize(model, verify=False).bundle
    with coda_edge.Session(to_bytes(bundle), threads=1) as session:
        _check(name, session.run(None, feeds), expected)
