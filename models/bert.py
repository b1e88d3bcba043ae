"""BERT's encoder (Devlin et al., 2018) and masked-language head as ONNX, for all recipes whose networks are such.

Weights go by the names of the published BERT checkpoints without the prefix ``bert.``; a recipe whose weights are named
otherwise renames them. ALBERT (Lan et al., 2019) is the same network with a projection after the embeddings and one layer's
weights for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from .recipe import Feeds
from .writer import Writer

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_FLOAT32_LOWEST = -3.4028234663852886e38


def inputs(names: Sequence[str] = INPUTS) -> list[onnx.ValueInfoProto]:
    """The encoder's inputs, int64 ``[batch, sequence]`` each."""
    return [helper.make_tensor_value_info(n, TensorProto.INT64, ["batch", "sequence"]) for n in names]


def padded(rows: Sequence[Sequence[int]], names: Sequence[str] = INPUTS) -> Feeds:
    """Feeds of token ids, padded on the right to the longest row; all of one type."""
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    mask = np.zeros_like(ids)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    feeds = dict(zip(INPUTS, (ids, mask, np.zeros_like(ids)), strict=True))
    return {name: feeds[name] for name in names}


class Bert(Writer):
    """``config``: a BERT checkpoint's ``config.json``."""

    @property
    def size(self) -> int:
        """Columns of a head."""
        return int(self.config["hidden_size"] // self.config["num_attention_heads"])

    def encoder(self, shared: bool = False, typed: bool = True) -> str:
        """The last hidden state, ``[batch, sequence, hidden_size]``.

        ``shared``: every layer has the weights of the first. ``typed``: there is an input ``token_type_ids``; else all tokens are of type 0.
        """
        x = self.embeddings(typed)
        mask = self.additive_mask()
        for layer in range(self.config["num_hidden_layers"]):
            x = self.layer(f"encoder.layer.{layer}", x, mask, f"encoder.layer.{0 if shared else layer}")
        return x

    def embeddings(self, typed: bool) -> str:
        length = self.length("input_ids", 1, "embeddings.length")
        all_positions = np.arange(self.config["max_position_embeddings"], dtype=np.int64)[None]
        known = self.constant("embeddings.position_ids", all_positions)
        positions = self.node("Slice", [known, self.ints(0), length, self.ints(1)], "embeddings.positions")
        tables = {"word": "input_ids", **({"token_type": "token_type_ids"} if typed else {}), "position": positions}
        total = ""
        for table, ids in tables.items():
            rows = self.node(
                "Gather", [self.weight(f"embeddings.{table}_embeddings.weight"), ids], f"embeddings.{table}"
            )
            total = self.node("Add", [total, rows], f"embeddings.plus_{table}") if total else rows
        if not typed:
            first = self.constant("embeddings.type_0", self.weights["embeddings.token_type_embeddings.weight"][0])
            total = self.node("Add", [total, first], "embeddings.plus_token_type")
        x = self.norm("embeddings.LayerNorm", total)
        return self.linear("embeddings.project", x) if "embeddings.project.weight" in self.weights else x

    def additive_mask(self) -> str:
        """0 where a token is real, the lowest float32 where it is padding: ``[batch, 1, 1, sequence]``."""
        wide = self.node("Unsqueeze", ["attention_mask", self.ints(1, 2)], "mask.unsqueezed")
        real = self.node("Cast", [wide], "mask.float", to=TensorProto.FLOAT)
        padding = self.node("Sub", [self.number("one", 1.0), real], "mask.padding")
        return self.node("Mul", [padding, self.number("lowest", _FLOAT32_LOWEST)], "mask.additive")

    def layer(self, prefix: str, x: str, mask: str, weights: str) -> str:
        heads, width = self.config["num_attention_heads"], self.config["hidden_size"]
        q, k, v = (
            self.heads(
                f"{prefix}.attention.self.{n}", self.linear(f"{prefix}.attention.self.{n}", x, w), heads, self.size
            )
            for n, w in ((n, f"{weights}.attention.self.{n}") for n in ("query", "key", "value"))
        )
        attended = self.attention(f"{prefix}.attention", q, k, v, mask, self.size, width)
        dense = "attention.output.dense"
        projected = self.linear(f"{prefix}.{dense}", attended, f"{weights}.{dense}")
        x = self.node("Add", [projected, x], f"{prefix}.attention.residual")
        x = self.norm(f"{prefix}.attention.output.LayerNorm", x, f"{weights}.attention.output.LayerNorm")
        up = self.linear(f"{prefix}.intermediate.dense", x, f"{weights}.intermediate.dense")
        active = self.gelu(f"{prefix}.intermediate.gelu", up)
        down = self.linear(f"{prefix}.output.dense", active, f"{weights}.output.dense")
        x = self.node("Add", [down, x], f"{prefix}.residual")
        return self.norm(f"{prefix}.output.LayerNorm", x, f"{weights}.output.LayerNorm")

    def vocabulary_logits(self, x: str) -> str:
        """The masked-language head: ``[batch, sequence, vocab_size]``, by the matrix of the words' embeddings."""
        x = self.norm("head.LayerNorm", self.gelu("head.gelu", self.linear("head.dense", x)))
        table = self.weight("embeddings.word_embeddings.weight")
        turned = self.node("Transpose", [table], "head.words", perm=[1, 0])
        product = self.node("MatMul", [x, turned], "head.product")
        return self.node("Add", [product, self.weight("head.bias")], "head.logits")

    def linear(self, prefix: str, x: str, weights: str | None = None) -> str:
        weights = weights or prefix
        w = self.constant(f"{weights}.weight_t", self.weights[f"{weights}.weight"].T)
        product = self.node("MatMul", [x, w], f"{prefix}.product")
        return self.node("Add", [self.weight(f"{weights}.bias"), product], f"{prefix}.out")

    def gelu(self, prefix: str, x: str) -> str:
        scaled = self.node("Div", [x, self.number("sqrt_2", float(np.sqrt(2)))], f"{prefix}.scaled")
        erf = self.node("Erf", [scaled], f"{prefix}.erf")
        gate = self.node("Add", [erf, self.number("one", 1.0)], f"{prefix}.gate")
        doubled = self.node("Mul", [x, gate], f"{prefix}.doubled")
        return self.node("Mul", [doubled, self.number("half", 0.5)], f"{prefix}.out")

    def norm(self, prefix: str, x: str, weights: str | None = None) -> str:
        gain, shift = (self.weight(f"{weights or prefix}.{which}") for which in ("weight", "bias"))
        return self.node(
            "LayerNormalization", [x, gain, shift], f"{prefix}.out", axis=-1, epsilon=self.config["layer_norm_eps"]
        )


def renamed(weights: dict[str, npt.NDArray[Any]], names: Sequence[tuple[str, str]]) -> dict[str, npt.NDArray[Any]]:
    """``weights`` with each (old, new) piece of a name replaced, one after the other."""
    found: dict[str, npt.NDArray[Any]] = {}
    for name, value in weights.items():
        for old, new in names:
            name = name.replace(old, new)
        found[name] = value
    return found
