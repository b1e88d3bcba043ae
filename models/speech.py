"""Smart Turn: has the speaker finished? A Whisper-like encoder on 8 seconds of sound, statically quantised.

Its input is Whisper's log-mel spectrogram (Radford et al., 2022): 80 Slaney mel bands of 25 ms windows every 10 ms.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .recipe import Run

RATE = 16000
SECONDS = 8
_WINDOW, _HOP, _BANDS = 400, 160, 80
# The Slaney scale: 3 mels each 200 Hz up to 1 kHz, then 27 for each factor of 6.4.
_KNEE, _STEP = 15.0, 27.0 / np.log(6.4)

Signal = npt.NDArray[np.float64]


def read(run: Run) -> str:
    """What the model decides for a sentence's worth of syllables, and for a drawn-out vowel before a pause."""
    features = np.stack([log_mel(vowels(4.0, 0.0, syllables=3.1)), log_mel(vowels(2.0, 0.3))])
    (probabilities,) = run(None, {"input_features": features})
    return ", ".join("done" if p > 0.5 else "speaking" for p in probabilities[:, 0])


def vowels(seconds: float, pause: float, syllables: float = 0.0) -> Signal:
    """A voice at 16 kHz: pulses at 130 Hz through three resonances, ``syllables`` a second or one long vowel, then a pause."""
    spoken = int(RATE * seconds)
    time = np.arange(spoken) / RATE
    pulses = np.diff(np.floor(130 * time), prepend=0.0)
    sound = np.zeros(spoken)
    for frequency, width in ((650, 80), (1200, 90), (2500, 120)):
        steps = np.arange(1, 801) / RATE
        ringing = np.exp(-np.pi * width * steps) * np.sin(2 * np.pi * frequency * steps)
        sound += np.convolve(pulses, ringing)[:spoken]
    loud = np.clip(1.4 * np.sin(np.pi * (syllables * time % 1)), 0, 1) if syllables else np.ones(spoken)
    heard = 1e-3 * np.random.default_rng(0).standard_normal(spoken + int(RATE * pause))
    heard[:spoken] += 0.1 * sound * loud
    return heard


def log_mel(sound: Signal) -> npt.NDArray[np.float32]:
    """The model's features ``[80, 800]`` of sound at 16 kHz: its last 8 seconds, silence before it if it is shorter."""
    length = SECONDS * RATE
    whole = np.concatenate([np.zeros(max(length - len(sound), 0)), sound[-length:]])
    whole = (whole - whole.mean()) / np.sqrt(whole.var() + 1e-7)
    padded = np.pad(whole, _WINDOW // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[: length - _HOP + 1 : _HOP]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_WINDOW) / _WINDOW)
    power = np.abs(np.fft.rfft(frames * hann, axis=-1)) ** 2
    decades = np.log10(np.maximum(_filters() @ power.T, 1e-10))
    scaled: npt.NDArray[np.float32] = ((np.maximum(decades, decades.max() - 8) + 4) / 4).astype(np.float32)
    return scaled


def _filters() -> Signal:
    """Triangles of equal area over the spectrum's 201 frequencies: ``[80, 201]``."""
    top = _KNEE + _STEP * np.log(RATE / 2 / 1000)
    mels = np.linspace(0, top, _BANDS + 2)
    edges = np.where(mels < _KNEE, mels * 200 / 3, 1000 * np.exp((mels - _KNEE) / _STEP))
    frequencies = np.linspace(0, RATE / 2, _WINDOW // 2 + 1)
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (frequencies - low) / (centre - low), (high - frequencies) / (high - centre)
    triangles: Signal = np.maximum(0, np.minimum(rising, falling)) * 2 / (high - low)
    return triangles
