"""Microsoft's RelativePositionBias, decomposed, against T5's buckets in numpy: onnxruntime has no CPU kernel for it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from contrib_nodes import contrib_node, normal
from graphs import run, to_model

from coda_edge.frontend import load, normalize

HEADS = 4


def bucket(distance: int, buckets: int, most: int, both: bool) -> int:
    """The bucket of key - query = ``distance``."""
    first = 0
    if both:
        buckets //= 2
        first = buckets if distance > 0 else 0
    away = abs(distance) if both else max(-distance, 0)
    exact = buckets // 2
    if away < exact:
        return first + away
    far = exact + int(math.log(away / exact) / math.log(most / exact) * (buckets - exact))
    return first + min(far, buckets - 1)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(("buckets", "most"), [(8, 20), (32, 128), (6, 9)])
@pytest.mark.parametrize("size", [1, 7, 60])
def test_relative_position_bias(size: int, buckets: int, most: int, both: bool) -> None:
    table, length = normal(buckets, HEADS), np.array([size], np.int64)
    attrs = {"max_distance": most, "is_bidirectional": int(both)}
    model, feeds = contrib_node("RelativePositionBias", [table, length, length], attrs=attrs, constants=(1, 2))
    (found,) = run(to_model(normalize(load(model))), feeds)
    places = range(size)
    expected = np.array([[table[bucket(j - i, buckets, most, both)] for j in places] for i in places])
    assert found.shape == (1, HEADS, size, size)
    assert np.array_equal(found[0], expected.transpose(2, 0, 1))
