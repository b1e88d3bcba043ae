"""Recognisers of text lines (PP-OCRv4 and v5): convolutions and two attention blocks; columns of an image to characters.

A line is rendered with Pillow's own font; the characters that the model knows come with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from .recipe import Run

LINES = ("Hello, World 2026", "five kernels a layer, and no more")
HEIGHT = 48


def read(run: Run, characters: Sequence[str], name: str = "x") -> str:
    """What the model reads of ``LINES``, each in an image of its own width; ``name``: the model's input."""
    texts = (decode(np.asarray(run(None, {name: image(line)})[0]), characters) for line in LINES)
    return " / ".join(text.strip() for text in texts)


def image(line: str) -> npt.NDArray[np.float32]:
    """Black on white, in [-1, 1]: ``[1, 3, 48, width]``, the width a multiple of 32."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=32)
    width = -(-int(font.getlength(line) + 16) // 32) * 32
    picture = Image.new("L", (width, HEIGHT), 255)
    ImageDraw.Draw(picture).text((8, HEIGHT / 2), line, fill=0, font=font, anchor="lm")
    grey = np.asarray(picture, np.float32) / 127.5 - 1
    return np.ascontiguousarray(np.broadcast_to(grey, (1, 3, *grey.shape)))


def decode(probabilities: npt.NDArray[np.float32], characters: Sequence[str]) -> str:
    """The likeliest text of ``[1, columns, 1 + len(characters)]``: 0 is no character, repetitions are one (CTC)."""
    best = probabilities[0].argmax(-1).tolist()
    return "".join(characters[i - 1] for i, _ in groupby(best) if i)
