"""Exports of both torch exporters, normalised: same results, valid, every shape known, no exporter's shape arithmetic."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from graphs import fixture_names, load_fixture, random_inputs, run, sizes_for, to_model, worst_error

from coda_edge import ir
from coda_edge.errors import ShapeError
from coda_edge.frontend import infer, load, normalize

COMPOSITE = {
    *(
        "Constant",
        "Identity",
        "Dropout",
        "Gemm",
        "Split",
        "LayerNormalization",
        "Gelu",
        "RMSNormalization",
        "Attention",
    ),
    *("RotaryEmbedding", "ConstantOfShape", "Trilu", "GatherND", "Tile", "Pow"),
}
# onnxruntime refuses these: cos and sin of batch 1, a mask that does not have the full shape.
REFUSED = {"unit.enclayer_mask.dyn23"}
BERT = fixture_names("bert.")


@cache
def _normal(name: str) -> tuple[onnx.ModelProto, gs.Graph]:
    model = load_fixture(name)
    return model, normalize(load(model))


@pytest.mark.parametrize("name", [n for n in fixture_names() if n not in REFUSED])
def test_same_results(name: str) -> None:
    model, graph = _normal(name)
    normal = to_model(graph)
    onnx.checker.check_model(normal)
    for seed, (batch, length, padding) in enumerate([(2, 7, "none"), (3, 11, "left"), (1, 5, "holes")]):
        sizes = sizes_for(normal, batch, length, past=seed + 2)
        feeds = random_inputs(normal, sizes, seed, padding)  # type: ignore[arg-type]
        assert worst_error(run(model, feeds), run(normal, feeds)) <= 1e-5


@pytest.mark.parametrize("name", fixture_names())
def test_normal_form(name: str) -> None:
    _, graph = _normal(name)
    names = {i.name for i in graph.inputs}
    symbols = {s.name for i in graph.inputs for d in ir.shape(i) if not isinstance(d, int) for s in d.free_symbols}
    for node in graph.nodes:
        assert node.op not in COMPOSITE
        assert not all(isinstance(t, gs.Constant) for t in node.inputs)
        for tensor in node.outputs:
            assert tensor.dtype is not None
            assert tensor.shape is not None
            used = {s.name for d in ir.shape(tensor) if not isinstance(d, int) for s in d.free_symbols}
            assert used <= symbols
        if node.op == "Softmax":
            assert node.attrs["axis"] >= 0
        if node.op.startswith("Reduce"):
            assert (ir.constant_value(node.inputs[1]) >= 0).all()
    assert names == {i.name for i in load_fixture(name).graph.input}
    assert [o.name for o in graph.outputs] == [o.name for o in load_fixture(name).graph.output]


@pytest.mark.parametrize("name", BERT)
def test_bert_needs_one_size_at_run_time(name: str) -> None:
    """Of all shape arithmetic, the sequence length for the position table is left."""
    _, graph = _normal(name)
    census = Counter(n.op for n in graph.nodes)
    assert census["Shape"] == 1
    assert census["Slice"] == 1
    assert census["Gather"] == 2
    assert not census.keys() & {"Concat", "Range", "Expand", "Squeeze", "Unsqueeze", "Equal", "And"}


def test_exporters_give_one_graph() -> None:
    """Both exporters' BERT with one kind of attention normalises to the same operators."""
    counts = {}
    for name in BERT:
        kind = name.split(".")[1]
        _, graph = _normal(name)
        census = Counter(n.op for n in graph.nodes)
        # Where the scale stands and how GELU divides by √2 is the exporter's choice.
        for op in ("Mul", "Div"):
            del census[op]
        counts.setdefault(kind, []).append(tuple(sorted(census.items())))
    assert len(set(counts["sdpa"])) == 1
    assert len(set(counts["eager"])) == 1


@pytest.mark.parametrize("name", BERT)
def test_bert_mask_is_one_row(name: str) -> None:
    """What is added to the scores is ``[B, 1, 1, S]``: never expanded to S×S."""
    _, graph = _normal(name)
    softmaxes = [n for n in graph.nodes if n.op == "Softmax"]
    assert len(softmaxes) == 2
    for softmax in softmaxes:
        added = ir.made_by(softmax.inputs[0], "Add")
        shapes = [ir.shape(t) for t in added.inputs]
        batch, length = ir.shape(graph.inputs[0])
        assert (batch, 1, 1, length) in shapes


@pytest.mark.parametrize("name", [n for n in BERT if "sdpa" in n])
def test_bert_heads_are_one_reshape_and_transpose(name: str) -> None:
    _, graph = _normal(name)
    perms = Counter(tuple(n.attrs["perm"]) for n in graph.nodes if n.op == "Transpose")
    assert perms == {(0, 2, 1, 3): 6, (0, 2, 3, 1): 2}
    assert sum(n.op == "Reshape" for n in graph.nodes) == 2 * 4 + 2


def test_sizes_that_are_one_share_a_name() -> None:
    """dynamo names the mask's batch apart; it is the ids' batch. The past's length is one, and the mask's is their sum."""
    _, bert = _normal("bert.sdpa.dyn20")
    assert [i.shape for i in bert.inputs] == [["s10", "s11"]] * 3
    _, llama = _normal("llama_kv.sdpa.dyn23")
    shapes = {i.name: i.shape for i in llama.inputs}
    assert shapes["past.1.v"] == shapes["past.0.k"] == ["s11", 2, "s2", 16]
    assert shapes["attention_mask"] == ["s11", "s2 + s27"]


def test_the_position_table_bounds_the_length() -> None:
    _, graph = _normal("bert.sdpa.ts17")
    (bound,) = [c for c in infer(graph).constraints if c.relation == "<="]
    assert (str(bound.left), bound.right) == ("seq", 64)


def test_bound_shapes() -> None:
    model = load_fixture("bert.sdpa.ts17")
    graph = normalize(load(model), {"input_ids": (2, 9)})
    assert [i.shape for i in graph.inputs] == [[2, 9]] * 3
    assert all(isinstance(d, int) for n in graph.nodes for t in n.outputs for d in t.shape)
    assert not [n for n in graph.nodes if n.op in ("Shape", "Slice")]
    feeds = random_inputs(to_model(graph), {}, 3, "right")
    assert worst_error(run(model, feeds), run(to_model(graph), feeds)) <= 1e-5


def test_bound_shapes_that_do_not_fit() -> None:
    model = load(load_fixture("bert.sdpa.ts17"))
    with pytest.raises(ShapeError, match=r"no input 'ids'.*input_ids\[batch, seq\]"):
        normalize(model, {"ids": (1, 8)})
    with pytest.raises(ShapeError, match="has 2 dimensions, not 1"):
        normalize(model, {"input_ids": (8,)})
    with pytest.raises(ShapeError, match="'batch' is bound to both 1 and 2"):
        normalize(model, {"input_ids": (1, 8), "attention_mask": (2, 8)})


def test_infer_again_after_an_edit() -> None:
    """Passes edit and infer again: a stale annotation is replaced."""
    graph = normalize(load(load_fixture("unit.linear3d.ts17")))
    out = graph.outputs[0]
    expected = list(out.shape)
    out.shape, out.dtype = ["wrong"], np.int8
    infer(graph)
    assert out.shape == expected
    assert out.dtype == np.float32


@pytest.mark.parametrize("name", fixture_names("unit.enclayer"))
def test_rows_keep_their_order(name: str) -> None:
    """nn.TransformerEncoderLayer works on [S, B, K] and flattens around projections: only the heads are rearranged."""
    _, graph = _normal(name)
    perms = Counter(tuple(n.attrs["perm"]) for n in graph.nodes if n.op == "Transpose")
    assert perms == {(0, 2, 1, 3): 3, (0, 2, 3, 1): 1}
    census = Counter(n.op for n in graph.nodes)
    assert census["Slice"] == 3
    assert not census.keys() & {"Shape", "Gather", "Concat", "Expand", "Squeeze"}
