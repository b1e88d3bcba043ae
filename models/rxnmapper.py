"""RXNMapper's ALBERT: a masked-language model of chemical reactions, 12 layers that share one layer's weights.

``python -m models fetch rxnmapper`` fetches it and builds the ONNX from its PyTorch checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from . import bert, checkpoint
from .recipe import Feeds, Recipe, Run, atomically, cache

_FOLDER = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"

RECIPE = Recipe(
    package="rxnmapper",
    version="0.4.3",
    sha256="27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
    files=tuple(f"{_FOLDER}/{name}" for name in ("pytorch_model.bin", "config.json", "vocab.txt")),
    licence="MIT",
    inputs="input_ids, attention_mask, token_type_ids: int64 [batch, sequence], from reaction SMILES; see feeds()",
    expect="logits [batch, sequence, 591]; where a reaction's token is [MASK], the largest is what stood there",
)

#: Reactions (esterification, amide coupling, Suzuki coupling) with one token masked each.
REACTIONS = (
    "CC(=O)O.OCC>>CC(=O)[MASK]CC",
    "O=C(Cl)c1ccccc1.NCC>>O=C([MASK]CC)c1ccccc1",
    "Brc1ccccc1.OB(O)c1ccncc1>>c1ccc(-c2cc[MASK]cc2)cc1",
)
MASKED = ("O", "N", "n")

_TOKEN = re.compile(
    r"\[[^\]]+\]"  # an atom in brackets, or [MASK]
    r"|Br|Cl|[BNOSPFIC]|[bcnops]"
    r"|>>|%\d\d|[-()=#+.\\/:~@?>*$0-9]"
)
#: ALBERT's names as BERT's: its only layer is layer 0.
NAMES = (
    ("albert.", ""),
    ("encoder.embedding_hidden_mapping_in", "embeddings.project"),
    ("encoder.albert_layer_groups.0.albert_layers.0", "encoder.layer.0"),
    ("attention.query", "attention.self.query"),
    ("attention.key", "attention.self.key"),
    ("attention.value", "attention.self.value"),
    ("attention.dense", "attention.output.dense"),
    ("attention.LayerNorm", "attention.output.LayerNorm"),
    ("full_layer_layer_norm", "output.LayerNorm"),
    ("ffn_output", "output.dense"),
    ("ffn", "intermediate.dense"),
    ("predictions.decoder", "tied"),
    ("predictions", "head"),
)


def path() -> Path:
    """The ONNX file (opset 17), built on the first call."""
    model = cache() / "rxnmapper-albert.onnx"
    if not model.is_file():
        folder = RECIPE.fetch() / _FOLDER
        weights = checkpoint.read(folder / "pytorch_model.bin")
        built = build(json.loads((folder / "config.json").read_text()), weights)
        with atomically(model) as part:
            onnx.save(built, part)
    return model


def build(config: dict[str, Any], weights: dict[str, npt.NDArray[Any]]) -> onnx.ModelProto:
    """The masked-language model as ONNX: tokens, mask and types to ``logits [batch, sequence, vocab_size]``.

    ``weights`` go by the names of ALBERT's PyTorch checkpoints.
    """
    writer = bert.Bert(config, bert.renamed(weights, NAMES))
    logits = writer.vocabulary_logits(writer.encoder(shared=True))
    shape = ["batch", "sequence", config["vocab_size"]]
    return writer.model(
        "rxnmapper", bert.inputs(), {logits: helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape)}
    )


def feeds(reactions: Sequence[str] = REACTIONS) -> Feeds:
    """Token ids, mask and types, int64 ``[len(reactions), longest]``, padded on the right."""
    known = {token: i for i, token in enumerate(_vocabulary())}
    tokens = [["[CLS]", *pieces(r), "[SEP]"] for r in reactions]
    return bert.padded([[known.get(t, known["[UNK]"]) for t in row] for row in tokens])


def pieces(reaction: str) -> list[str]:
    """The atoms, bonds and marks of a reaction SMILES."""
    return _TOKEN.findall(reaction)


def read(run: Run) -> str:
    """What the model takes for the masked tokens of ``REACTIONS``, parted by spaces."""
    fed = feeds()
    words = _vocabulary()
    (logits,) = run(None, fed)
    row, column = np.nonzero(fed["input_ids"] == words.index("[MASK]"))
    return " ".join(words[int(i)] for i in logits[row, column].argmax(-1))


def _vocabulary() -> list[str]:
    return (RECIPE.fetch() / _FOLDER / "vocab.txt").read_text().splitlines()
