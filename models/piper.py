"""Piper: text to speech by VITS (Kim et al., 2021): a text encoder, a flow for durations, a flow for sound, and a vocoder.

With both noises 0 it says the same each time. With noise each run differs: ``coda_edge.noise`` tells how that is compared.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .recipe import Feeds, Run

RATE = 22050
# What is said, and how slowly.
SAID = (("həlˈoʊ wˈɜːld.", 1.0), ("həlˈoʊ wˈɜːld.", 1.5), ("ðə bˈɜːtʃ kənˈuː slˈɪd ɔnðə smˈuːð plˈæŋks.", 1.0))
_LOWEST, _HIGHEST, _STEP = 60, 180, 25  # Hz


def feeds(config: Path, phonemes: str, slow: float, noise: float = 0.0) -> Feeds:
    """Phoneme ids with a pause between each two, as Piper feeds them; ``config`` is the JSON file beside the model."""
    numbers = json.loads(config.read_text(encoding="utf-8"))["phoneme_id_map"]
    ids = [i for p in ("^", *phonemes) for i in (*numbers[p], 0)] + numbers["$"]
    scales = np.array([noise, slow, noise], np.float32)
    return {"input": np.array([ids]), "input_lengths": np.array([len(ids)]), "scales": scales}


def read(run: Run, config: Path) -> str:
    """How long each sentence takes, and the pitch of the voice to 25 Hz."""
    found = []
    for phonemes, slow in SAID:
        (wave,) = run(None, feeds(config, phonemes, slow))
        found.append(f"{wave.size / RATE:.2f} s near {round(pitch(wave.reshape(-1)) / _STEP) * _STEP} Hz")
    return ", ".join(found)


def pitch(wave: npt.NDArray[np.float32]) -> float:
    """The frequency in Hz at which ``wave`` repeats best."""
    spectrum = np.abs(np.fft.rfft(wave, 2 * wave.size)) ** 2
    similar = np.fft.irfft(spectrum)[RATE // _HIGHEST : RATE // _LOWEST]
    return RATE / float(RATE // _HIGHEST + int(np.argmax(similar)))
