"""Hibari's grapheme-to-phoneme transformers: how a word is said that is in no dictionary."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import numpy as np

from .recipe import Run

WORDS = ("kernel", "epilogue", "Zwicky")


def read(run: Run, letters: Path) -> str:
    """The phonemes of ``WORDS``; ``letters`` is the JSON file beside the model that lists what goes in and comes out."""
    known = json.loads(letters.read_text())
    numbers = {letter: i + 1 for i, letter in enumerate(known["in"])}
    said = []
    for word in WORDS:
        (ids,) = run(None, {"chars": np.array([[numbers[c] for c in word]])})
        said.append("".join(known["out"][i - 1] for i, _ in groupby(ids[0].tolist()) if i))
    return " ".join(said)
