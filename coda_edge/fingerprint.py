"""What tells that a bundle is that of a model: a digest of its file, and fingerprints of its constants where the file is not at hand.

A fingerprint is the sum, modulo 2⁶⁴, of a hash of each element's bits: what only rearranges a constant leaves it as it is.
``coda_edge/onnxruntime/native/ep/identity.c`` computes the same.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

_BLOCK = 1 << 20
_PIECE_BYTES = 1 << 22
_MOVING = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


def fingerprints(model: onnx.ModelProto) -> str:
    """All constants of ``model``'s graph, by name: ``<name><fingerprint> …``, a hash and a sum of 16 hexadecimal digits each, in order.

    Among them what only moves the elements of one, which onnxruntime does beforehand.
    """
    found = {name: _fingerprint(tensor) for name, tensor in _constants(model.graph)}
    for node in model.graph.node:
        if node.op_type in _MOVING and node.input[0] in found:
            found[node.output[0]] = found[node.input[0]]
    hashed = {_name_hash(name): value for name, value in found.items()}
    return " ".join(f"{name:016x}{hashed[name]:016x}" for name in sorted(hashed))


def model_digest(model: str | os.PathLike[str] | bytes) -> str:
    """SHA-256, in hexadecimal, of the SHA-256s of the pieces of 4 MiB of a model's file, or of the bytes of one; without external data."""
    digests = hashlib.sha256()
    with io.BytesIO(model) if isinstance(model, bytes) else Path(model).open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digests.update(hashlib.sha256(piece).digest())
    return digests.hexdigest()


def _constants(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    for tensor in graph.initializer:
        if tensor.data_type != onnx.TensorProto.STRING:
            yield tensor.name, tensor
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            for attribute in node.attribute:
                if attribute.name == "value" and attribute.t.data_type != onnx.TensorProto.STRING:
                    yield node.output[0], attribute.t


def _name_hash(name: str) -> int:
    """FNV-1a of the name."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def _fingerprint(tensor: onnx.TensorProto) -> int:
    raw = tensor.raw_data or numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
    words = np.frombuffer(raw, f"<u{_word_bytes(tensor.data_type)}")
    total = 0
    for start in range(0, len(words), _BLOCK):
        total += int(_mix(words[start : start + _BLOCK].astype(np.uint64)).sum())
    return total & 0xFFFFFFFFFFFFFFFF


def _word_bytes(dtype: int) -> int:
    """Bytes of an element; 1 for types that no bundle has."""
    element = onnx.helper.tensor_dtype_to_np_dtype(dtype)
    return 1 if element.kind == "c" else element.itemsize


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(29))
