"""``python -m coda_edge.onnxruntime.compile MODEL BUNDLE``: what the execution provider runs for a model without a bundle.

Ends with 0 and the bundle in its place; or, where only parts of the model can be compiled, with bundles of these beside it, and their
names in ``BUNDLE.parts``; or with 1 and one line that says why there is none.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from ..driver import Model, optimize
from ..errors import CodaError, InvalidModel, UnsupportedOperator
from ..files import atomic
from .parts import compile_parts


def compile_model(model: Model, bundle: Path, target: str) -> list[Path]:
    """Compiles ``model`` into ``bundle``, or its parts into files beside it; returns which. What is there already stays.

    Raises what ``optimize`` raises, also if no part is worth a bundle.
    """
    listed = bundle.with_name(f"{bundle.name}.parts")
    if bundle.exists():
        return [bundle]
    if listed.exists():
        return [bundle.with_name(name) for name in listed.read_text(encoding="utf-8").split()]
    try:
        optimize(model, target).save(bundle)
    except UnsupportedOperator as error:
        parts = compile_parts(load_model(model), target)
        if not parts:
            raise error
        files = [bundle.with_name(f"{bundle.stem}-{i}{bundle.suffix}") for i in range(len(parts))]
        for part, file in zip(parts, files, strict=True):
            part.save(file)
        with atomic(listed) as path:
            path.write_text("".join(f"{file.name}\n" for file in files), encoding="utf-8")
        return files
    return [bundle]


def load_model(model: Model) -> onnx.ModelProto:
    """The model with its external data, as it is. Raises InvalidModel if that is none, or its data cannot be read."""
    if isinstance(model, onnx.ModelProto):
        return model
    try:
        loaded = onnx.load_from_string(model) if isinstance(model, bytes) else onnx.load(model)
    except (DecodeError, OSError, ValueError, onnx.checker.ValidationError) as error:
        name = "the data" if isinstance(model, bytes) else f"'{os.fspath(model)}'"
        raise InvalidModel(
            f"{name} is not an ONNX model, or the file of its weights cannot be read: {error}"
        ) from error
    if not loaded.HasField("graph"):
        raise InvalidModel("this is not an ONNX model: it holds no graph")
    return loaded


def main() -> int:
    """Compiles what the command line names."""
    parser = argparse.ArgumentParser(prog="coda_edge.onnxruntime.compile", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("bundle")
    parser.add_argument("--target", default="native")
    given = parser.parse_args()
    bundle = Path(given.bundle)
    for stale in (bundle, bundle.with_name(f"{bundle.name}.parts")):
        stale.unlink(missing_ok=True)
    try:
        compile_model(given.model, bundle, given.target)
    except CodaError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
