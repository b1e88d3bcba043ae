"""Text to speech, whose length data decides: in normal form, run as ONNX, it says what the model says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coda_edge import export, frontend
from coda_edge.symbolic import symbol
from coda_edge.verify import ort_session
from models import hibari, piper
from models.catalogue import MODELS
from models.check import SideBySide
from models.recipe import FetchError


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return MODELS["hibari"].path()
    except FetchError as why:
        pytest.skip(f"hibari could not be fetched: {why}")


@pytest.fixture(scope="module")
def normal(path: Path) -> frontend.NormalForm:
    """Hibari in normal form."""
    return frontend.to_normal_form(frontend.load(path))


def test_hibari_says_the_same(path: Path, normal: frontend.NormalForm) -> None:
    both = SideBySide(ort_session(export.to_model(normal.graph)).run, ort_session(str(path)).run)
    read = MODELS["hibari"].read
    assert read is not None
    assert read(both) == MODELS["hibari"].says
    assert both.error < 0.05  # quantised: a rounding moves quanta


def test_hibari_has_one_size_that_data_decides(normal: frontend.NormalForm) -> None:
    assert frontend.decided_by_data(normal.graph) == {"lh", "theta", "ln", "lr", "phi", "f0"}
    info = frontend.infer(normal.graph)
    ((name, source),) = info.data.items()
    assert source.element == 0 and info.shapes[source.tensor] == ()
    assert info.shapes["lh"] == (1, 601, 2 * symbol(name)) and info.shapes["f0"] == (1, 2 * symbol(name))


def test_piper_is_fed_as_its_makers_do(tmp_path: Path) -> None:
    config = tmp_path / "voice.json"
    config.write_text('{"phoneme_id_map": {"^": [1], "$": [2], "a": [14], "\u02d0": [122]}}', encoding="utf-8")
    fed = piper.feeds(config, "a\u02d0", 1.5, 0.3)
    assert fed["input"].tolist() == [[1, 0, 14, 0, 122, 0, 2]] and fed["input_lengths"].tolist() == [7]
    assert fed["scales"].tolist() == pytest.approx([0.3, 1.5, 0.3])


@pytest.mark.parametrize("hertz", [75.0, 105.0, 140.0])
def test_pitch(hertz: float) -> None:
    time = np.arange(piper.RATE) / piper.RATE
    wave: Any = sum(np.sin(2 * np.pi * k * hertz * time) / k for k in range(1, 6))
    assert abs(piper.pitch(wave.astype(np.float32)) - hertz) < 0.01 * hertz


def test_what_hibari_is_asked_fits_its_answer() -> None:
    assert MODELS["hibari"].says.count("frames") == len(hibari.SAID)
