"""Hibari: text to speech. Phonemes get durations, and so many frames of magnitude, phase and pitch; dynamically quantised."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from .recipe import Run

# What is said, and how fast.
SAID = (("həlˈO ðˈɛɹ.", 1.0), ("həlˈO ðˈɛɹ.", 2.0), ("ðə kwˈɪk bɹˈWn fˈɑks.", 1.0))
_VOICED = 50.0  # Hz
_STEP = 25


def read(run: Run, vocabulary: Path) -> str:
    """How many frames each sentence takes, and its median pitch to 25 Hz; ``vocabulary`` is the JSON file beside the model."""
    numbers = json.loads(vocabulary.read_text(encoding="utf-8"))
    found = []
    for phonemes, speed in SAID:
        ids = np.array([[0, *(numbers[p] for p in phonemes), 0]], np.int64)
        *_, pitch = run(None, {"ids": ids, "speed": np.array([speed], np.float32)})
        voiced = pitch[pitch > _VOICED]
        found.append(f"{pitch.shape[1]} frames near {round(float(np.median(voiced)) / _STEP) * _STEP} Hz")
    return ", ".join(found)
