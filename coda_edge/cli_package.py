"""``coda-edge package``: the command line of ``coda_edge.forms`` and ``coda_edge.onnxruntime``. ``cli`` adds ``--json`` and the options of shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .errors import InvalidModel
from .files import FileError, apart, creatable, existing

if TYPE_CHECKING:
    from .onnxruntime import Packaged
    from .onnxruntime.packaging import Weights

_FORMS = ("ort", "ort-bundle", "bundle", "shared", "static", "c")


@dataclass(frozen=True)
class _Request:
    """What the command line asks for."""

    model: Path
    form: str
    output: Path | None
    target: str
    name: str | None
    bare: bool
    weights: Weights
    verify: bool
    shapes: Mapping[str, tuple[int | str, ...]] | None


@click.command("package")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--form",
    type=click.Choice(_FORMS),
    default="ort",
    show_default=True,
    help="For what: onnxruntime, with a library of the model's own or a bundle for the library of all; the runtime; or a program that has all inside, as a library, an archive or C sources.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Of ort and ort-bundle, the files to write without suffix: OUTPUT.onnx and OUTPUT.so or .coda (MODEL.ort by default); else the folder (MODEL.FORM).",
)
@click.option("--target", default="native", show_default=True, help="What to build for; see coda-edge targets.")
@click.option("--name", help="What symbols and files of a linked model begin with; MODEL by default.")
@click.option("--bare", is_flag=True, help="Of shared and static: without an operating system.")
@click.option(
    "--weights",
    type=click.Choice(("model", "library")),
    default="model",
    show_default=True,
    help="Of ort: which file has the weights. Without the library, only a model that has them runs.",
)
@click.option("--no-verify", is_flag=True, help="Do not compare with the source model.")
def command(
    model: Path,
    form: str,
    output: Path | None,
    target: str,
    name: str | None,
    bare: bool,
    weights: Weights,
    no_verify: bool,
    shapes: dict[str, tuple[int | str, ...]],
    as_json: bool,
) -> None:
    """Writes MODEL (.onnx) in the form that a program wants it: see docs/embed.md, and docs/onnxruntime.md for ort."""
    if existing(model).suffix == ".coda":
        raise InvalidModel(
            f"{model} is a bundle, whose kernels are linked already: give the ONNX model that it was made of"
        )
    for option, given, forms in (
        ("--name", name is not None, ("bundle", "shared", "static", "c")),
        ("--bare", bare, ("shared", "static", "c")),
        ("--weights", weights != "model", ("ort",)),
    ):
        if given and form not in forms:
            raise click.UsageError(f"{option} says nothing of the form {form}: it is of {', '.join(forms)}")
    request = _Request(model, form, output, target, name, bare, weights, not no_verify, shapes or None)
    described, lines = _MAKERS.get(form, _for_program)(request)
    click.echo(json.dumps(described | {"form": form}) if as_json else "\n".join(lines))


def onnx_files(path: Path | None) -> list[Path]:
    """What a model may be written to whose file is to be ``path``."""
    return [] if path is None else [path, path.with_name(f"{path.name}.data")]


def apart_from_model(written: list[Path], model: Path) -> None:
    """Raises FileError if one of ``written`` is ``model``, has its weights, or is another one of them."""
    from .frontend.model import external_files

    weighed = any(path.suffix == ".data" and path.exists() for path in written)
    apart(written, [model, *(external_files(model) if weighed else [])])


_Shown = tuple[dict[str, object], list[str]]
"""The result as JSON has it, and as lines of text."""


def _for_program(request: _Request) -> _Shown:
    from .forms import package

    folder = request.output or request.model.with_suffix(f".{request.form}")
    if folder.exists() and not folder.is_dir():
        raise FileError(f"{folder}: is a file; name a folder to write to")
    files = package(
        request.model, request.form, request.target, request.name, request.shapes, request.bare, request.verify
    )
    files.save(folder)
    sizes = {str(folder / name): len(data) for name, data in files.contents.items()}
    described: dict[str, object] = {"name": files.name, "files": sizes, "max_rel_error": files.max_rel_error}
    shown = [f"  {size:>12,}  {file}" for file, size in sizes.items()]
    return described, [f"{request.model.name} → {folder}", *shown, *_difference(files.max_rel_error)]


def _for_onnxruntime(request: _Request) -> _Shown:
    from .onnxruntime import package

    stem = request.output or request.model.with_suffix(".ort")
    onnx_file, library = (creatable(stem.with_name(stem.name + suffix)) for suffix in (".onnx", ".so"))
    apart_from_model([*onnx_files(onnx_file), library], request.model)
    packaged = package(request.model, request.target, request.shapes, request.verify, weights=request.weights)
    packaged.save(onnx_file, library)
    kinds = len(set(packaged.operators.values()))
    lines = [
        f"{request.model.name} → {onnx_file}, {library}",
        f"{len(packaged.operators)} of {len(packaged.model.graph.node)} nodes run as {kinds} operators of ours",
        *(f"  {node} stays a function: {reason}" for node, reason in packaged.functions.items()),
        *([] if packaged.left is None else [f"  not all of it is rewritten: {packaged.left}"]),
        *([] if packaged.unchecked is None else [f"not compared with the source model: {packaged.unchecked}"]),
        *_difference(packaged.max_rel_error),
    ]
    return _described(packaged) | {"onnx": str(onnx_file), "library": str(library)}, lines


def _for_shared_library(request: _Request) -> _Shown:
    from .onnxruntime import package_regions

    stem = request.output or request.model.with_suffix(".ort")
    path = creatable(stem.with_name(f"{stem.name}.onnx"))
    apart_from_model(onnx_files(path), request.model)
    made = package_regions(existing(request.model), request.target, request.shapes, request.verify)
    files = made.save(path)
    lines = [
        f"{request.model.name} → {', '.join(map(str, files))}",
        f"{sum(map(len, made.regions))} nodes run by {len(made.bundles)} bundle{'s' * (len(made.bundles) != 1)}",
        *([] if made.left is None else [f"the others stay onnxruntime's: {made.left}"]),
        *_difference(made.max_rel_error),
    ]
    described: dict[str, object] = {
        "files": list(map(str, files)),
        "regions": made.regions,
        "left": made.left,
        "max_rel_error": made.max_rel_error,
    }
    return described, lines


_MAKERS = {"ort": _for_onnxruntime, "ort-bundle": _for_shared_library}


def _difference(error: float | None) -> list[str]:
    return [] if error is None else [f"largest difference, of the output's largest value: {error:.1e}"]


def _described(packaged: Packaged) -> dict[str, object]:
    return {
        "operators": packaged.operators,
        "functions": packaged.functions,
        "nodes": len(packaged.model.graph.node),
        "left": packaged.left,
        "unchecked": packaged.unchecked,
        "max_rel_error": packaged.max_rel_error,
    }
