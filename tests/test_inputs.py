"""Made-up inputs: ids stay within the tables they index, masks have the padding asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from coda_edge.errors import ShapeError
from coda_edge.inputs import InputSpec, bind_sizes, default_sizes, generate_inputs, input_specs
from coda_edge.symbolic import parse_dim


def _model(
    nodes: list[onnx.NodeProto], inputs: dict[str, tuple[int, list]], tables: dict[str, tuple[int, int]]
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in inputs.items()],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.zeros(size, np.float32), name) for name, size in tables.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def test_bound_is_the_smallest_table_behind_an_input() -> None:
    model = _model(
        [
            helper.make_node("Cast", ["ids"], ["narrow"], to=TensorProto.INT32),
            helper.make_node("Gather", ["large", "ids"], ["a"]),
            helper.make_node("Gather", ["small", "narrow"], ["b"]),
            helper.make_node("Gather", ["wide", "narrow"], ["c"], axis=1),
        ],
        {"ids": (TensorProto.INT64, ["batch", "seq"])},
        {"large": (3000, 2), "small": (7, 2), "wide": (2, 9)},
    )
    (spec,) = input_specs(model)
    assert sorted(spec.bounds) == [7, 9, 3000]
    ids = generate_inputs(model, {"batch": 4, "seq": 200})["ids"]
    assert ids.shape == (4, 200) and ids.dtype == np.int64
    assert set(np.unique(ids)) == set(range(7))


def test_an_id_that_no_table_bounds_is_zero_or_one() -> None:
    spec = InputSpec("ids", "int64", (64,))
    assert set(generate_inputs([spec])["ids"]) == {0, 1}


def test_same_seed_same_inputs() -> None:
    specs = [InputSpec("x", "float32", (parse_dim("n"), 3)), InputSpec("attention_mask", "int64", (2, 9))]
    first, again, other = (generate_inputs(specs, {"n": 5}, seed, "holes") for seed in (1, 1, 2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["x"], other["x"])
    assert first["x"].dtype == np.float32


@pytest.mark.parametrize("length", [2, 3, 31])
@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
def test_masks_are_padded_where_asked(padding: str, length: int) -> None:
    spec = InputSpec("attention_mask", "int64", (5, length))
    mask = generate_inputs([spec], seed=length, padding=padding)["attention_mask"]
    assert mask.any(axis=1).all()
    assert mask.all() == (padding == "none")
    steps = np.diff(mask, axis=1)
    if padding == "left":
        assert (steps >= 0).all()
    if padding == "right":
        assert (steps <= 0).all()


def test_a_length_of_one_is_never_padded() -> None:
    assert generate_inputs([InputSpec("mask", "bool", (3, 1))], padding="left")["mask"].all()


def test_masks_of_one_model_agree_and_take_their_own_form() -> None:
    specs = [
        InputSpec("attention_mask", "int64", (2, 8)),
        InputSpec("score_mask", "float32", (2, 1, 4, 8)),
        InputSpec("bool_mask", "bool", (2, 1, 1, 8)),
    ]
    feeds = generate_inputs(specs, seed=3, padding="right")
    real = feeds["attention_mask"] == 1
    assert np.array_equal(feeds["bool_mask"][:, 0, 0], real)
    assert np.array_equal(feeds["score_mask"], np.where(real[:, None, None], 0, -1e4) + np.zeros((2, 1, 4, 8)))


def test_positions_count_up_after_the_past() -> None:
    specs = [InputSpec("position_ids", "int64", (2, 3)), InputSpec("attention_mask", "int64", (2, 10))]
    assert generate_inputs(specs)["position_ids"].tolist() == [[7, 8, 9]] * 2


def test_default_sizes_tell_batch_from_length() -> None:
    specs = [
        InputSpec("input_ids", "int64", (parse_dim("s1"), parse_dim("s2"))),
        InputSpec("attention_mask", "int64", (parse_dim("s1"), parse_dim("s3"))),
        InputSpec("past_key", "float32", (parse_dim("s1"), 2, parse_dim("s4"), 16)),
    ]
    assert default_sizes(specs, batch=3, length=10) == {"s1": 3, "s2": 10, "s3": 20, "s4": 10}


def test_bind_sizes_solves_for_symbols() -> None:
    specs = [
        InputSpec("x", "float32", (parse_dim("b"), parse_dim("n"))),
        InputSpec("y", "float32", (parse_dim("2*n"), 4)),
    ]
    assert bind_sizes(specs, {"x": (2, 5), "y": (10, 4)}) == {"b": 2, "n": 5}
    assert bind_sizes(specs, {"x": ("batch", 5)}) == {"n": 5}
    with pytest.raises(ShapeError, match=r"no input is called 'z'; the inputs are x, y"):
        bind_sizes(specs, {"z": (1,)})
    with pytest.raises(ShapeError, match=r"input 'y' has 2 dimensions, its shape was given with 1"):
        bind_sizes(specs, {"y": (1,)})
    with pytest.raises(ShapeError, match=r"input 'y': dimension 0 was given as 9, but it is 2\*n = 10"):
        bind_sizes(specs, {"x": (2, 5), "y": (9, 4)})


@pytest.mark.parametrize("dtype", ["bool", "float32", "float16", "int64"])
def test_scalars_are_arrays(dtype: str) -> None:
    """onnxruntime takes no numbers of numpy's."""
    value = generate_inputs([InputSpec("flag", dtype, ())])["flag"]
    assert isinstance(value, np.ndarray)
    assert (value.shape, value.dtype) == ((), np.dtype(dtype))


def test_text_inputs_are_refused() -> None:
    with pytest.raises(ShapeError, match="'words' is of type object"):
        generate_inputs([InputSpec("words", "object", (2,))])


def test_a_real_model_gets_ids_within_its_vocabulary(tiny_model: Path) -> None:
    specs = {s.name: s for s in input_specs(onnx.load(tiny_model))}
    assert specs["input_ids"].bounds == (97,)
    assert specs["token_type_ids"].bounds == (2,)
    assert specs["attention_mask"].bounds == ()
