"""Weights to ONNX: PyTorch checkpoints are read without running them, and ALBERT and the word head are as they are defined."""

from __future__ import annotations

import io
import math
import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from conftest import TINY

from coda_edge.errors import InvalidModel
from models import bert, cassette, checkpoint, rxnmapper

Array = np.ndarray


class _Storage:
    """Stands for a storage while pickling."""

    def __init__(self, key: str, values: Array) -> None:
        self.key, self.values = key, values


class _Tensor:
    """Pickles as PyTorch's tensors do: a call of ``torch._utils._rebuild_tensor_v2``."""

    def __init__(self, storage: _Storage, offset: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> None:
        self.parts = (storage, offset, shape, steps, False, OrderedDict())

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.modules["torch._utils"]._rebuild_tensor_v2, self.parts


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        return ("storage", sys.modules["torch"].FloatStorage, obj.key, "cpu", obj.values.size, None)


def _module(name: str, **functions: str) -> ModuleType:
    """A module whose named things can be pickled by reference."""
    module = ModuleType(name)
    for function in functions:
        made = type(function, (), {"__module__": name})
        setattr(module, function, made)
    return module


@pytest.fixture
def torch_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", _module("torch", FloatStorage="", Size=""))
    monkeypatch.setitem(sys.modules, "torch._utils", _module("torch._utils", _rebuild_tensor_v2=""))


def _write(path: Path, state: Any, storages: list[_Storage]) -> None:
    stream = io.BytesIO()
    for thing in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, state, [s.key for s in storages]):
        _Pickler(stream, protocol=2).dump(thing)
    for s in storages:
        stream.write(s.values.size.to_bytes(8, "little") + s.values.astype("<f4").tobytes())
    path.write_bytes(stream.getvalue())


@pytest.mark.usefixtures("torch_names")
def test_a_checkpoint_is_read(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32)
    one, two = _Storage("7", values), _Storage("3", np.float32([5]))
    state = OrderedDict(
        whole=_Tensor(one, 0, (4, 6), (6, 1)),
        turned=_Tensor(one, 2, (6, 3), (1, 6)),
        single=_Tensor(two, 0, (), ()),
    )
    _write(tmp_path / "model.bin", state, [two, one])
    found = checkpoint.read(tmp_path / "model.bin")
    np.testing.assert_array_equal(found["whole"], values.reshape(4, 6))
    np.testing.assert_array_equal(found["turned"], [[2 + i, 8 + i, 14 + i] for i in range(6)])
    assert found["single"] == 5 and np.shares_memory(found["whole"], found["turned"])


@pytest.mark.usefixtures("torch_names")
def test_a_checkpoint_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    storage = _Storage("0", np.zeros(4, np.float32))
    _write(file, {"a": _Tensor(storage, 0, (4,), (1,)), "b": print}, [storage])
    with pytest.raises(InvalidModel, match=r"asks for (builtins|__builtin__)\.print, expected nothing but tensors"):
        checkpoint.read(file)
    _write(file, {"a": _Tensor(storage, 0, (4,), (1,))}, [storage])
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InvalidModel, match="cut short: a storage of 4 elements has 15 bytes"):
        checkpoint.read(file)
    for content in (b"", b"PK\x03\x04 a zip", pickle.dumps(3)):
        file.write_bytes(content)
        with pytest.raises(InvalidModel, match=r"model\.bin (is no PyTorch checkpoint|does not begin)"):
            checkpoint.read(file)


CONFIG = {**TINY, "embedding_size": 20, "num_hidden_layers": 3}
_ONE = "albert.encoder.albert_layer_groups.0.albert_layers.0"
_DENSE = {"query": (48, 48), "key": (48, 48), "value": (48, 48), "dense": (48, 48)}


def _albert_weights() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "albert.embeddings.word_embeddings.weight": (97, 20),
        "albert.embeddings.position_embeddings.weight": (64, 20),
        "albert.embeddings.token_type_embeddings.weight": (2, 20),
        "predictions.bias": (97,),
    }
    dense = {"albert.encoder.embedding_hidden_mapping_in": (48, 20), "predictions.dense": (20, 48)}
    dense |= {f"{_ONE}.attention.{n}": s for n, s in _DENSE.items()}
    dense |= {f"{_ONE}.ffn": (100, 48), f"{_ONE}.ffn_output": (48, 100)}
    for name, shape in dense.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    norms = {"albert.embeddings.LayerNorm": 20, "predictions.LayerNorm": 20}
    norms |= {f"{_ONE}.attention.LayerNorm": 48, f"{_ONE}.full_layer_layer_norm": 48}
    for name, width in norms.items():
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    return {n: (rng.standard_normal(s) / np.sqrt(s[-1])).astype(np.float32) for n, s in shapes.items()}


def _albert(weights: dict[str, Array], feeds: dict[str, Array], layers: int = 3) -> Array:
    """ALBERT's masked-language model in float64, from its definition (Lan et al., 2019)."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}

    def dense(x: Array, name: str) -> Array:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def gelu(x: Array) -> Array:
        return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2

    ids = feeds["input_ids"]
    batch, length = ids.shape
    x = w["albert.embeddings.word_embeddings.weight"][ids]
    x = x + w["albert.embeddings.position_embeddings.weight"][:length]
    x = norm(
        x + w["albert.embeddings.token_type_embeddings.weight"][feeds["token_type_ids"]], "albert.embeddings.LayerNorm"
    )
    x = dense(x, "albert.encoder.embedding_hidden_mapping_in")
    for _ in range(layers):
        q, k, v = (
            dense(x, f"{_ONE}.attention.{n}").reshape(batch, length, 3, 16).transpose(0, 2, 1, 3)
            for n in ("query", "key", "value")
        )
        scores = np.where(feeds["attention_mask"][:, None, None] == 1, q @ k.transpose(0, 1, 3, 2) / 4, -np.inf)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        context = (e / e.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(batch, length, -1)
        x = norm(x + dense(context, f"{_ONE}.attention.dense"), f"{_ONE}.attention.LayerNorm")
        hidden = dense(gelu(dense(x, f"{_ONE}.ffn")), f"{_ONE}.ffn_output")
        x = norm(x + hidden, f"{_ONE}.full_layer_layer_norm")
    x = norm(gelu(dense(x, "predictions.dense")), "predictions.LayerNorm")
    logits: Array = x @ w["albert.embeddings.word_embeddings.weight"].T + w["predictions.bias"]
    return logits


def _feeds() -> dict[str, Array]:
    rng = np.random.default_rng(1)
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    return {
        "input_ids": rng.integers(0, 97, (2, 5)),
        "attention_mask": mask,
        "token_type_ids": rng.integers(0, 2, (2, 5)),
    }


def test_built_onnx_is_albert_and_holds_its_layer_once() -> None:
    weights = _albert_weights()
    model = rxnmapper.build(CONFIG, weights)
    (found,) = ort.InferenceSession(model.SerializeToString()).run(None, _feeds())
    expected = _albert(weights, _feeds())
    assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()
    stored = sum(math.prod(i.dims) for i in model.graph.initializer if i.data_type == 1)
    assert stored == sum(v.size for v in weights.values()) + 5  # 1, ½, √2, √depth and what padding adds to scores


def test_splade_is_the_largest_over_real_tokens() -> None:
    rng = np.random.default_rng(2)
    weights = _albert_weights()
    for name, value in weights.items():
        if value.shape[-1] == 20:
            weights[name] = (rng.standard_normal((*value.shape[:-1], 48)) / 7).astype(np.float32)
    weights["predictions.dense.weight"] = (rng.standard_normal((48, 48)) / 7).astype(np.float32)
    # BERT has no projection: its embeddings are as wide as its layers.
    projection = "albert.encoder.embedding_hidden_mapping_in"
    identity = {f"{projection}.weight": np.eye(48, dtype=np.float32), f"{projection}.bias": np.zeros(48, np.float32)}
    weights |= identity
    feeds = _feeds() | {"token_type_ids": np.zeros((2, 5), np.int64)}
    named = bert.renamed({k: v for k, v in weights.items() if k not in identity}, rxnmapper.NAMES)
    model = cassette.build({**CONFIG, "num_hidden_layers": 1}, named)
    (found,) = ort.InferenceSession(model.SerializeToString()).run(
        None, {k: feeds[k] for k in ("input_ids", "attention_mask")}
    )
    logits = _albert(weights, feeds, layers=1)
    expected = (np.log1p(np.maximum(logits, 0)) * feeds["attention_mask"][..., None]).max(1)
    assert found.shape == (2, 97) and np.abs(found - expected).max() <= 3e-6 * expected.max()
