"""Real models, used on something real: what their bundles answer is right, and is what onnxruntime answers."""

from __future__ import annotations

from pathlib import Path

import pytest

import coda_edge
from coda_edge.bundle import read
from coda_edge.verify import ort_session
from models.catalogue import MODELS
from models.check import SideBySide
from models.recipe import FetchError

# The light ones, and how far the outputs of each are from onnxruntime's: quantised ones are judged by their answers.
LIGHT = {"glassllm": 2e-6, "rxnmapper": 1e-5, "cassette": 1e-5, "ocr_v4": 1e-4}


def _path(name: str) -> Path:
    try:
        return MODELS[name].path()
    except FetchError as why:
        pytest.skip(f"{name} could not be fetched: {why}")


@pytest.fixture(scope="module", params=LIGHT)
def used(request: pytest.FixtureRequest) -> tuple[str, SideBySide, str, Path]:
    """A light model's name, both its runs, what it answered, and its bundle."""
    folder = request.getfixturevalue("tmp_path_factory").mktemp("real")
    path, read = _path(request.param), MODELS[request.param].read
    assert read is not None
    coda_edge.optimize(path, verify=False).save(folder / "model.coda")
    with coda_edge.Session(folder / "model.coda") as session:
        both = SideBySide(session.run, ort_session(str(path)).run)
        return request.param, both, read(both), folder / "model.coda"


def test_answers(used: tuple[str, SideBySide, str, Path]) -> None:
    name, both, says, bundle = used
    assert says == MODELS[name].says
    assert 0 < both.error < LIGHT[name]
    if name == "rxnmapper":
        # Twelve layers, one layer's weights: 2.6 MB of the checkpoint's 3.2 (its pooler is not used), and the words' matrix twice.
        assert read(bundle).constants.nbytes < 4.1e6
