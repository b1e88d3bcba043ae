"""``coda-edge package``: the command line of ``coda_edge.onnxruntime``. ``cli`` adds the option ``--json`` and those of shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .files import creatable, existing

if TYPE_CHECKING:
    from .onnxruntime import Packaged


@click.command("package")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--form", type=click.Choice(["ort"]), default="ort", show_default=True, help="For what: ort is onnxruntime."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The files to write, without suffix: OUTPUT.onnx and OUTPUT.so; MODEL.ort by default.",
)
@click.option("--target", default="native", show_default=True, help="What to build for; see coda-edge targets.")
@click.option("--no-verify", is_flag=True, help="Do not compare with the source model.")
def command(
    model: Path,
    form: str,
    output: Path | None,
    target: str,
    no_verify: bool,
    shapes: dict[str, tuple[int | str, ...]],
    as_json: bool,
) -> None:
    """Writes MODEL (.onnx) as a model with coda operators, and the library of these operators, for onnxruntime."""
    from .onnxruntime import package

    stem = output or existing(model).with_suffix(".ort")
    onnx_file, library = (creatable(stem.with_name(stem.name + suffix)) for suffix in (".onnx", ".so"))
    packaged = package(existing(model), target=target, shapes=shapes or None, verify=not no_verify)
    packaged.save(onnx_file, library)
    if as_json:
        click.echo(json.dumps(_described(packaged) | {"form": form, "onnx": str(onnx_file), "library": str(library)}))
        return
    click.echo(f"{model.name} → {onnx_file}, {library}")
    kinds = len(set(packaged.operators.values()))
    click.echo(f"{len(packaged.operators)} of {len(packaged.model.graph.node)} nodes run as {kinds} operators of ours")
    for node, reason in packaged.functions.items():
        click.echo(f"  {node} stays a function: {reason}")
    if packaged.max_rel_error is not None:
        click.echo(f"largest difference, of the output's largest value: {packaged.max_rel_error:.1e}")


def _described(packaged: Packaged) -> dict[str, object]:
    return {
        "operators": packaged.operators,
        "functions": packaged.functions,
        "nodes": len(packaged.model.graph.node),
        "max_rel_error": packaged.max_rel_error,
    }
