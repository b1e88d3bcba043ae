"""GlassLM: a causal language model of 4 layers, width 128, built as ONNX with a KV cache from its published weights.

``python -m models fetch glassllm`` fetches and builds it and prints its path. RMSNorm, rotary embedding of adjacent pairs,
grouped-query attention (4 heads on 2), SwiGLU and an output matrix that is the embedding: a large model's parts, in 3 MB.
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

from .recipe import Feeds, Recipe, Run, atomically, cache
from .writer import Writer

RECIPE = Recipe(
    package="glassllm",
    version="0.1.0",
    sha256="1611801c031d0fc300dc89d3c07cd6be56dc1784e38e24422b2242d0761a333b",
    files=("glassllm/weights/en.npz", "glassllm/weights/en.tokenizer.json"),
    licence="MIT",
    inputs="input_ids int64 [batch, sequence]; past_keys_N, past_values_N float32 [batch, 2, past, 32], past 0 at first",
    expect="greedy() continues PROMPT with CONTINUATION, as the package's own NumPy model does",
)

#: The token ids of "Once upon a time", and the 40 that the package's own model finds likeliest, one after the other.
PROMPT = (41, 69, 186, 960, 94, 437)
CONTINUATION = (
    *(4, 75, 78, 70, 57, 67, 124, 13, 4, 4, 185, 434, 160, 94, 274, 135, 100, 110, 372, 97),
    *(92, 561, 11, 120, 97, 92, 561, 11, 120, 97, 4, 58, 117, 943, 511, 160, 97, 112, 242, 75),
)


def path() -> Path:
    """The ONNX file (opset 17), built on the first call."""
    model = cache() / "glassllm-en.onnx"
    if not model.is_file():
        with np.load(RECIPE.fetch() / RECIPE.files[0]) as stored:
            config = json.loads(str(stored["__config__"]))
            weights = {k: stored[k].astype(np.float32) for k in stored if not k.startswith("__")}
        with atomically(model) as part:
            onnx.save(build(config, weights), part)
    return model


def greedy(run: Run, prompt: Sequence[int], count: int, layers: int = 4, heads: int = 2, size: int = 32) -> list[int]:
    """The ``count`` likeliest tokens after ``prompt``; ``run(None, feeds)`` is one step of the model."""
    feeds: Feeds = {"input_ids": np.array([prompt], np.int64)}
    for layer in range(layers):
        for kind in ("keys", "values"):
            feeds[f"past_{kind}_{layer}"] = np.zeros((1, heads, 0, size), np.float32)
    tokens: list[int] = []
    for _ in range(count):
        logits, *present = run(None, feeds)
        tokens.append(int(logits[0, -1].argmax()))
        names = [n for n in feeds if n != "input_ids"]
        feeds = {"input_ids": np.array([tokens[-1:]], np.int64), **dict(zip(names, present, strict=True))}
    return tokens


def read(run: Run) -> str:
    """The numbers of the 40 likeliest tokens after ``PROMPT``."""
    return " ".join(map(str, greedy(run, PROMPT, len(CONTINUATION))))


def build(config: dict[str, Any], weights: dict[str, npt.NDArray[np.float32]]) -> onnx.ModelProto:
    """The decoder as ONNX: ids and the past's keys and values to logits and the present's keys and values.

    ``config`` has ``vocab_size, d_model, n_layers, n_heads, n_kv_heads, max_len, rope_base, eps``.
    """
    writer = _Decoder(config, weights)
    logits, present = writer.logits()
    size, kv = config["d_model"] // config["n_heads"], config["n_kv_heads"]
    layers = range(config["n_layers"])
    names = [f"{kind}_{i}" for i in layers for kind in ("keys", "values")]

    def caches(prefix: str, length: str) -> list[onnx.ValueInfoProto]:
        dims = ["batch", kv, length, size]
        return [helper.make_tensor_value_info(f"{prefix}_{n}", TensorProto.FLOAT, dims) for n in names]

    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])
    scores = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", config["vocab_size"]])
    outputs = {logits: scores, **dict(zip(present, caches("present", "total"), strict=True))}
    return writer.model("glassllm", [ids, *caches("past", "past")], outputs)


class _Decoder(Writer):
    @property
    def size(self) -> int:
        """Columns of a head."""
        return int(self.config["d_model"] // self.config["n_heads"])

    def logits(self) -> tuple[str, list[str]]:
        """The logits, and the keys and values of each layer in turn."""
        table = self.constant("E", self.weights["E"])
        x = self.node("Gather", [table, "input_ids"], "embedded")
        past = self.length("past_keys_0", 2, "past_length")
        new = self.length("input_ids", 1, "new_length")
        total = self.node("Add", [past, new], "total_length")
        cos, sin = (self._angles(which, past, total) for which in (np.cos, np.sin))
        mask = self._future(past, new, total)
        present: list[str] = []
        for i in range(self.config["n_layers"]):
            block = f"blocks.{i}"
            attended, cached = self.attended(f"{block}.attn", i, self.norm(f"{block}.norm1", x), cos, sin, mask)
            present += cached
            x = self.node("Add", [x, attended], f"{block}.residual1")
            x = self.node("Add", [x, self.swiglu(f"{block}.ffn", self.norm(f"{block}.norm2", x))], f"{block}.residual2")
        head = self.constant("E_t", self.weights["E"].T)
        return self.node("MatMul", [self.norm("norm_f", x), head], "logits.product"), present

    def _angles(self, which: np.ufunc, past: str, total: str) -> str:
        """Cosines or sines of the new positions: ``[sequence, size/2]``."""
        theta = self.config["rope_base"] ** (-2.0 * np.arange(self.size // 2) / self.size)
        table = which(np.outer(np.arange(self.config["max_len"]), theta)).astype(np.float32)
        return self.node(
            "Slice", [self.constant(which.__name__, table), past, total, self.ints(0)], f"{which.__name__}.new"
        )

    def _future(self, past: str, new: str, total: str) -> str:
        """−inf where a key is later than the query, else 0: ``[sequence, total]``."""
        zero, one = (self.constant(n, np.array(v, np.int64)) for n, v in (("zero", 0), ("one", 1)))
        bounds = {
            n: self.node("Squeeze", [t, self.ints(0)], f"{n}.scalar") for n, t in (("past", past), ("total", total))
        }
        keys = self.node("Range", [zero, bounds["total"], one], "positions.keys")
        queries = self.node("Range", [bounds["past"], bounds["total"], one], "positions.queries")
        column = self.node("Unsqueeze", [queries, self.ints(1)], "positions.column")
        later = self.node("Greater", [keys, column], "mask.later")
        return self.node("Where", [later, self.number("lowest", -np.inf), self.number("nothing", 0.0)], "mask")

    def norm(self, prefix: str, x: str) -> str:
        squares = self.node("Mul", [x, x], f"{prefix}.squares")
        mean = self.node("ReduceMean", [squares], f"{prefix}.mean", axes=[-1], keepdims=1)
        shifted = self.node("Add", [mean, self.number("eps", self.config["eps"])], f"{prefix}.shifted")
        unit = self.node("Div", [x, self.node("Sqrt", [shifted], f"{prefix}.root")], f"{prefix}.unit")
        return self.node(
            "Mul", [unit, self.constant(f"{prefix}.gamma", self.weights[f"{prefix}.gamma"])], f"{prefix}.out"
        )

    def linear(self, name: str, x: str) -> str:
        return self.node("MatMul", [x, self.constant(name, self.weights[name])], f"{name}.out")

    def attended(self, prefix: str, layer: int, x: str, cos: str, sin: str, mask: str) -> tuple[str, list[str]]:
        heads, kv = self.config["n_heads"], self.config["n_kv_heads"]
        q = self.rotated(f"{prefix}.q", self.projected(f"{prefix}.W_Q", x, heads), cos, sin)
        k = self.rotated(f"{prefix}.k", self.projected(f"{prefix}.W_K", x, kv), cos, sin)
        v = self.projected(f"{prefix}.W_V", x, kv)
        k = self.node("Concat", [f"past_keys_{layer}", k], f"{prefix}.all_keys", axis=2)
        v = self.node("Concat", [f"past_values_{layer}", v], f"{prefix}.all_values", axis=2)
        k_all, v_all = (self.repeated(t, heads // kv) for t in (k, v))
        flat = self.attention(prefix, q, k_all, v_all, mask, self.size, heads * self.size)
        return self.linear(f"{prefix}.W_O", flat), [k, v]

    def projected(self, name: str, x: str, heads: int) -> str:
        return self.heads(name, self.linear(name, x), heads, self.size)

    def rotated(self, prefix: str, x: str, cos: str, sin: str) -> str:
        """Adjacent pairs ``(a, b)`` of each head as ``(a·cos − b·sin, a·sin + b·cos)``."""
        even, odd = (
            self.node("Slice", [x, self.ints(i), self.ints(self.size), self.ints(3), self.ints(2)], f"{prefix}.part{i}")
            for i in (0, 1)
        )
        products = {
            (p, t): self.node("Mul", [part, table], f"{prefix}.{p}_{t}")
            for p, part in (("even", even), ("odd", odd))
            for t, table in (("cos", cos), ("sin", sin))
        }
        first = self.node("Sub", [products["even", "cos"], products["odd", "sin"]], f"{prefix}.first")
        second = self.node("Add", [products["even", "sin"], products["odd", "cos"]], f"{prefix}.second")
        parts = [self.node("Unsqueeze", [t, self.ints(4)], f"{t}.apart") for t in (first, second)]
        pairs = self.node("Concat", parts, f"{prefix}.pairs", axis=4)
        shape = self.node("Shape", [x], f"{prefix}.shape")
        return self.node("Reshape", [pairs, shape], f"{prefix}.rotated")

    def repeated(self, x: str, times: int) -> str:
        """``[batch, kv, total, size]`` with each head ``times`` times in a row."""
        shape = self.node("Shape", [x], f"{x}.shape")
        apart = self.node("Unsqueeze", [x, self.ints(2)], f"{x}.apart")
        wide = self.node("Tile", [apart, self.ints(1, 1, times, 1, 1)], f"{x}.wide")
        factor = self.ints(1, times, 1, 1)
        return self.node("Reshape", [wide, self.node("Mul", [shape, factor], f"{x}.all")], f"{x}.repeated")

    def swiglu(self, prefix: str, x: str) -> str:
        gate, up = self.linear(f"{prefix}.W1", x), self.linear(f"{prefix}.W3", x)
        swish = self.node("Mul", [gate, self.node("Sigmoid", [gate], f"{prefix}.sigmoid")], f"{prefix}.swish")
        return self.linear(f"{prefix}.W2", self.node("Mul", [swish, up], f"{prefix}.gated"))
