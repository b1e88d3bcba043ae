"""The execution provider, for programs in Python: registered, added to session options, and given a bundle."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from .. import __version__
from ..driver import Model
from ..errors import TargetError
from ..fingerprint import model_digest
from .compile import compile_model
from .library import library_path

if TYPE_CHECKING:
    import onnxruntime

PROVIDER = "CodaEP"


def add_provider(
    options: onnxruntime.SessionOptions,
    model: Model | None = None,
    bundle: str | os.PathLike[str] | None = None,
    target: str = "native",
) -> None:
    """Has sessions with ``options`` run ``bundle``, or else one of ``model`` that is compiled for ``target`` now, if the cache has none.

    With neither, a session compiles what it loads, if that is a file. Registers the provider in this process, once.

    Raises TargetError if onnxruntime is too old for it, and what ``optimize`` raises.
    """
    import onnxruntime

    if not hasattr(options, "add_provider_for_devices"):
        raise TargetError(
            f"onnxruntime {onnxruntime.__version__} has no execution providers from libraries: update it to 1.24 or "
            "later, or use a custom operator library (coda-edge package --form ort)"
        )
    devices = [d for d in onnxruntime.get_ep_devices() if d.ep_name == PROVIDER]
    if not devices:
        onnxruntime.register_execution_provider_library(PROVIDER, library_path())
        devices = [d for d in onnxruntime.get_ep_devices() if d.ep_name == PROVIDER]
    settings = {"target": target}
    bundles = [Path(bundle)] if bundle is not None else [] if model is None else cached_bundles(model, target)
    if bundles:
        settings["bundle"] = ";".join(map(str, bundles))
    options.add_provider_for_devices(devices[:1], settings)


def cached_bundles(model: Model, target: str = "native") -> list[Path]:
    """The bundle of ``model``, or those of its parts, from the cache that the provider uses as well; compiled into it if not there.

    Raises what ``optimize`` raises.
    """
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    path = cache_folder() / f"{model_digest(source)}-{target}-{__version__}.coda"
    path.parent.mkdir(parents=True, exist_ok=True)
    return compile_model(model, path, target)


def cache_folder() -> Path:
    """Where bundles are kept that were compiled just in time (XDG Base Directory Specification)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "coda-edge" / "bundles"
