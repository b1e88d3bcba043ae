"""Networks of well-known sizes with random weights, written as ONNX the way exporters write them: BERT-base, Whisper-tiny's encoder, GPT-2.

Weights are normal numbers over the square root of their columns' length, from one seed, so that activations keep their size
through all layers; what a network costs does not depend on them. Each is built once, into the cache of ``models``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from models import bert
from models.recipe import atomically, cache
from models.writer import Writer

Array = npt.NDArray[Any]

_SEED = 2026
_HEAD = 64
MEL_BANDS, MEL_FRAMES = 80, 3000

BERT_BASE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
WHISPER_TINY = {"width": 384, "heads": 6, "layers": 4, "eps": 1e-5}
GPT2_SMALL = {"width": 768, "heads": 12, "layers": 12, "vocabulary": 50257, "positions": 1024, "eps": 1e-5}


class Random(Mapping[str, Array]):
    """Weights of given shapes, made up when they are asked for: gains near 1, the rest normal over √(last dimension)."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._seeds = {name: i for i, name in enumerate(shapes)}

    def __getitem__(self, name: str) -> Array:
        shape = self._shapes[name]
        rng = np.random.default_rng((_SEED, self._seeds[name]))
        normal = rng.standard_normal(shape, np.float32)
        if len(shape) == 1:
            small = normal * np.float32(0.02)
            return 1 + small if name.endswith("weight") else small
        return normal / np.float32(np.sqrt(np.prod(shape[1:])))

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def bert_base() -> Path:
    """BERT-base: int64 ids, mask and types ``[batch, sequence]`` to ``[batch, sequence, 768]``."""
    return _built("bert-base", _bert_base)


def whisper_tiny() -> Path:
    """Whisper-tiny's encoder: mel spectrogram ``[batch, 80, 3000]`` to ``[batch, 1500, 384]``."""
    return _built("whisper-tiny-encoder", _Whisper.build)


def gpt2_small() -> Path:
    """A step of GPT-2 small: int64 ids ``[batch, sequence]`` and the past's keys and values ``[batch, 12, past, 64]`` of 12
    layers to logits ``[batch, sequence, 50257]`` and the present's keys and values."""
    return _built("gpt2-small", _Gpt2.build)


def gpt2_small_int4() -> Path:
    """The same with the matrices of all products in blocks of 32 rows of 4 bits, as com.microsoft's MatMulNBits."""
    return _built("gpt2-small-int4", lambda: _Gpt2.build(quantised=True))


def gpt2_small_int4_level4() -> Path:
    """The same with ``accuracy_level`` 4: onnxruntime may then round activations to 8 bits."""
    return _built("gpt2-small-int4-level4", lambda: _Gpt2.build(quantised=True, accuracy_level=4))


def _built(name: str, build: Callable[[], onnx.ModelProto]) -> Path:
    path = cache() / f"random-{name}.onnx"
    if not path.is_file():
        model = build()
        with atomically(path) as part:
            onnx.save(model, part)
    return path


def _bert_base() -> onnx.ModelProto:
    config: dict[str, Any] = BERT_BASE
    width, inner = config["hidden_size"], config["intermediate_size"]
    tables = {
        "word": config["vocab_size"],
        "position": config["max_position_embeddings"],
        "token_type": config["type_vocab_size"],
    }
    shapes: dict[str, tuple[int, ...]] = {f"embeddings.{t}_embeddings.weight": (n, width) for t, n in tables.items()}
    shapes |= _norm("embeddings.LayerNorm", width)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"encoder.layer.{layer}"
        for which in ("query", "key", "value"):
            shapes |= _dense(f"{prefix}.attention.self.{which}", width, width)
        shapes |= _dense(f"{prefix}.attention.output.dense", width, width)
        shapes |= _norm(f"{prefix}.attention.output.LayerNorm", width)
        shapes |= _dense(f"{prefix}.intermediate.dense", inner, width)
        shapes |= _dense(f"{prefix}.output.dense", width, inner)
        shapes |= _norm(f"{prefix}.output.LayerNorm", width)
    writer = bert.Bert(config, Random(shapes))
    hidden = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "sequence", width])
    return writer.model("bert_base", bert.inputs(), {writer.encoder(): hidden})


def _dense(prefix: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.weight": (outputs, inputs), f"{prefix}.bias": (outputs,)}


def _norm(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.weight": (width,), f"{prefix}.bias": (width,)}


class _Block(Writer):
    """A layer whose norms come first, as Whisper and GPT-2 have it."""

    def norm(self, prefix: str, x: str) -> str:
        scale, shift = self.weight(f"{prefix}.weight"), self.weight(f"{prefix}.bias")
        return self.node("LayerNormalization", [x, scale, shift], f"{prefix}.out", axis=-1, epsilon=self.config["eps"])

    def linear(self, prefix: str, x: str) -> str:
        w = self.constant(f"{prefix}.weight_t", self.weights[f"{prefix}.weight"].T)
        product = self.node("MatMul", [x, w], f"{prefix}.product")
        if f"{prefix}.bias" not in self.weights:
            return product
        return self.node("Add", [product, self.weight(f"{prefix}.bias")], f"{prefix}.out")

    def gelu(self, prefix: str, x: str) -> str:
        scaled = self.node("Div", [x, self.number("sqrt_2", float(np.sqrt(2)))], f"{prefix}.scaled")
        gate = self.node(
            "Add", [self.node("Erf", [scaled], f"{prefix}.erf"), self.number("one", 1.0)], f"{prefix}.gate"
        )
        doubled = self.node("Mul", [x, gate], f"{prefix}.doubled")
        return self.node("Mul", [doubled, self.number("half", 0.5)], f"{prefix}.out")


class _Whisper(_Block):
    @staticmethod
    def build() -> onnx.ModelProto:
        config: dict[str, Any] = WHISPER_TINY
        width, frames = config["width"], MEL_FRAMES // 2
        shapes: dict[str, tuple[int, ...]] = {
            "conv1.weight": (width, MEL_BANDS, 3),
            "conv1.bias": (width,),
            "conv2.weight": (width, width, 3),
            "conv2.bias": (width,),
            "positions": (frames, width),
        }
        for layer in range(config["layers"]):
            prefix = f"layers.{layer}"
            shapes |= _norm(f"{prefix}.attn_norm", width) | _norm(f"{prefix}.final_norm", width)
            shapes |= _dense(f"{prefix}.q", width, width) | _dense(f"{prefix}.v", width, width)
            shapes |= {f"{prefix}.k.weight": (width, width)} | _dense(f"{prefix}.out", width, width)
            shapes |= _dense(f"{prefix}.fc1", 4 * width, width) | _dense(f"{prefix}.fc2", width, 4 * width)
        writer = _Whisper(config, Random(shapes | _norm("norm", width)))
        mel = helper.make_tensor_value_info("input_features", TensorProto.FLOAT, ["batch", MEL_BANDS, MEL_FRAMES])
        hidden = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", frames, width])
        return writer.model("whisper_tiny_encoder", [mel], {writer.encoder(): hidden})

    def encoder(self) -> str:
        x = self.convolution("conv1", "input_features", 1)
        x = self.convolution("conv2", x, 2)
        x = self.node("Transpose", [x], "frames", perm=[0, 2, 1])
        x = self.node("Add", [x, self.weight("positions")], "placed")
        for layer in range(self.config["layers"]):
            x = self.layer(f"layers.{layer}", x)
        return self.norm("norm", x)

    def convolution(self, name: str, x: str, stride: int) -> str:
        inputs = [x, self.weight(f"{name}.weight"), self.weight(f"{name}.bias")]
        y = self.node("Conv", inputs, f"{name}.out", kernel_shape=[3], pads=[1, 1], strides=[stride])
        return self.gelu(f"{name}.gelu", y)

    def layer(self, prefix: str, x: str) -> str:
        heads, width = self.config["heads"], self.config["width"]
        normed = self.norm(f"{prefix}.attn_norm", x)
        q = self.node(
            "Mul", [self.linear(f"{prefix}.q", normed), self.number("scale", _HEAD**-0.5)], f"{prefix}.q.scaled"
        )
        k, v = self.linear(f"{prefix}.k", normed), self.linear(f"{prefix}.v", normed)
        q, k, v = (self.heads(f"{prefix}.{n}", t, heads, _HEAD) for n, t in (("q", q), ("k", k), ("v", v)))
        keys = self.node("Transpose", [k], f"{prefix}.keys", perm=[0, 1, 3, 2])
        scores = self.node("MatMul", [q, keys], f"{prefix}.scores")
        weights = self.node("Softmax", [scores], f"{prefix}.weights", axis=-1)
        context = self.node("MatMul", [weights, v], f"{prefix}.context")
        merged = self.node("Transpose", [context], f"{prefix}.merged", perm=[0, 2, 1, 3])
        flat = self.node("Reshape", [merged, self.ints(0, 0, width)], f"{prefix}.flat")
        x = self.node("Add", [x, self.linear(f"{prefix}.out", flat)], f"{prefix}.attended")
        inner = self.linear(f"{prefix}.fc1", self.norm(f"{prefix}.final_norm", x))
        down = self.linear(f"{prefix}.fc2", self.gelu(f"{prefix}.gelu", inner))
        return self.node("Add", [x, down], f"{prefix}.residual")


class _Gpt2(_Block):
    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Array], bits: Mapping[str, int]) -> None:
        super().__init__(config, weights)
        self.bits = bits

    @staticmethod
    def build(quantised: bool = False, accuracy_level: int = 0) -> onnx.ModelProto:
        config: dict[str, Any] = GPT2_SMALL
        width, vocabulary = config["width"], config["vocabulary"]
        shapes: dict[str, tuple[int, ...]] = {
            "wte.weight": (vocabulary, width),
            "wpe.weight": (config["positions"], width),
        }
        for layer in range(config["layers"]):
            prefix = f"h.{layer}"
            shapes |= _norm(f"{prefix}.ln_1", width) | _norm(f"{prefix}.ln_2", width)
            shapes |= _dense(f"{prefix}.c_attn", 3 * width, width) | _dense(f"{prefix}.c_proj", width, width)
            shapes |= _dense(f"{prefix}.fc", 4 * width, width) | _dense(f"{prefix}.down", width, 4 * width)
        bits = {"bits": 4, "block_size": 32, **({"accuracy_level": accuracy_level} if accuracy_level else {})}
        writer = _Gpt2(config, Random(shapes | _norm("ln_f", width)), bits if quantised else {})
        logits, present = writer.step()
        past = [f"past_key_values.{i}.{kind}" for i in range(config["layers"]) for kind in ("key", "value")]
        cached = ["batch", config["heads"], "past", _HEAD]
        inputs = [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"]),
            *(helper.make_tensor_value_info(name, TensorProto.FLOAT, cached) for name in past),
        ]
        grown = ["batch", config["heads"], "total", _HEAD]
        outputs = {
            logits: helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", vocabulary]),
            **{
                tensor: helper.make_tensor_value_info(
                    name.replace("past_key_values", "present"), TensorProto.FLOAT, grown
                )
                for tensor, name in zip(present, past, strict=True)
            },
        }
        return writer.model("gpt2_small", inputs, outputs)

    def step(self) -> tuple[str, list[str]]:
        """The logits, and each layer's present keys and values."""
        past, new = self.length("past_key_values.0.key", 2, "past.length"), self.length("input_ids", 1, "new.length")
        total = self.node("Add", [past, new], "total.length")
        zero, one = (self.constant(n, np.array(v, np.int64)) for n, v in (("zero", 0), ("unit", 1)))
        ends = [self.node("Squeeze", [t, self.ints(0)], f"{t}.scalar") for t in (past, total)]
        positions = self.node("Range", [*ends, one], "positions")
        keys = self.node("Range", [zero, ends[1], one], "positions.keys")
        queries = self.node("Unsqueeze", [positions, self.ints(1)], "positions.queries")
        seen = self.node("LessOrEqual", [keys, queries], "mask.seen")
        lowest = self.number("lowest", float(np.finfo(np.float32).min))
        mask = self.node("Where", [seen, self.number("nothing", 0.0), lowest], "mask")
        words = self.node("Gather", [self.weight("wte.weight"), "input_ids"], "words")
        x = self.node("Add", [words, self.node("Gather", [self.weight("wpe.weight"), positions], "places")], "embedded")
        present: list[str] = []
        for layer in range(self.config["layers"]):
            x, kept = self.layer(layer, x, mask)
            present += kept
        x = self.norm("ln_f", x)
        if self.bits:
            return self.linear("wte", x), present
        words = self.node("Transpose", [self.weight("wte.weight")], "wte.turned", perm=[1, 0])
        return self.node("MatMul", [x, words], "wte.product"), present

    def layer(self, layer: int, x: str, mask: str) -> tuple[str, list[str]]:
        prefix, heads, width = f"h.{layer}", self.config["heads"], self.config["width"]
        joined = self.linear(f"{prefix}.c_attn", self.norm(f"{prefix}.ln_1", x))
        parts = [f"{prefix}.{n}" for n in "qkv"]
        self.nodes.append(
            helper.make_node("Split", [joined, self.ints(width, width, width)], parts, f"{prefix}.split", axis=2)
        )
        q, k, v = (self.heads(part, part, heads, _HEAD) for part in parts)
        k, v = (
            self.node("Concat", [f"past_key_values.{layer}.{kind}", new], f"{prefix}.all_{kind}", axis=2)
            for kind, new in (("key", k), ("value", v))
        )
        flat = self.attention(prefix, q, k, v, mask, _HEAD, width)
        x = self.node("Add", [self.linear(f"{prefix}.c_proj", flat), x], f"{prefix}.attended")
        inner = self.tanh_gelu(f"{prefix}.gelu", self.linear(f"{prefix}.fc", self.norm(f"{prefix}.ln_2", x)))
        return self.node("Add", [x, self.linear(f"{prefix}.down", inner)], f"{prefix}.residual"), [k, v]

    def tanh_gelu(self, prefix: str, x: str) -> str:
        cube = self.node("Pow", [x, self.number("three", 3.0)], f"{prefix}.cube")
        curved = self.node("Mul", [cube, self.number("bend", 0.044715)], f"{prefix}.curved")
        bent = self.node("Add", [x, curved], f"{prefix}.bent")
        scaled = self.node("Mul", [bent, self.number("sqrt_2_pi", float(np.sqrt(2 / np.pi)))], f"{prefix}.scaled")
        gate = self.node(
            "Add", [self.node("Tanh", [scaled], f"{prefix}.tanh"), self.number("one", 1.0)], f"{prefix}.gate"
        )
        halved = self.node("Mul", [x, self.number("half", 0.5)], f"{prefix}.halved")
        return self.node("Mul", [halved, gate], f"{prefix}.out")

    def linear(self, prefix: str, x: str) -> str:
        if not self.bits:
            return super().linear(prefix, x)
        outputs, columns = self.weights[f"{prefix}.weight"].shape
        packed, scales = blocks_of_4_bits(self.weights[f"{prefix}.weight"], self.bits["block_size"])
        inputs = [x, self.constant(f"{prefix}.packed", packed), self.constant(f"{prefix}.scales", scales)]
        product = self.node(
            "MatMulNBits", inputs, f"{prefix}.product", domain="com.microsoft", K=columns, N=outputs, **self.bits
        )
        if f"{prefix}.bias" not in self.weights:
            return product
        return self.node("Add", [product, self.weight(f"{prefix}.bias")], f"{prefix}.out")


def blocks_of_4_bits(weight: Array, block: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """``weight`` float32 ``[N, K]`` in MatMulNBits' form: uint8 ``[N, K / block, block / 2]``, the even column in the low half, each
    number 8 too large; and scales float32 ``[N · K / block]``. ``block`` divides K."""
    rows, columns = weight.shape
    grouped = weight.reshape(rows, columns // block, block)
    # The value farthest from 0 becomes -8, so that all 16 levels are used.
    farthest = np.take_along_axis(grouped, np.abs(grouped).argmax(-1)[..., None], -1)
    scales = farthest / np.float32(-8)
    levels = np.clip(np.rint(grouped / np.where(scales == 0, 1, scales)) + 8, 0, 15).astype(np.uint8)
    return levels[..., 0::2] | levels[..., 1::2] << 4, scales.reshape(-1).astype(np.float32)


def gpt2_feeds(past: int, tokens: Sequence[int] = (464,)) -> dict[str, Array]:
    """``tokens`` after a made-up past of ``past`` positions."""
    rng = np.random.default_rng(_SEED)
    shape = (1, int(GPT2_SMALL["heads"]), past, _HEAD)
    feeds: dict[str, Array] = {"input_ids": np.array([tokens], np.int64)}
    for layer in range(int(GPT2_SMALL["layers"])):
        for kind in ("key", "value"):
            feeds[f"past_key_values.{layer}.{kind}"] = rng.standard_normal(shape, np.float32)
    return feeds
