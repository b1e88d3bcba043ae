"""``coda-edge survey``: the command line of ``coda_edge.survey``. ``cli`` adds the option ``--json``, as to every command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .files import existing

if TYPE_CHECKING:
    from .survey import Depth, Survey


@click.command("survey")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--no-build", is_flag=True, help="Build no kernels: run the rewritten graph in onnxruntime instead.")
@click.option("--no-run", is_flag=True, help="Run nothing: only rewrite and count.")
@click.option("--markdown", is_flag=True, help="Print Markdown: one row for all exports of a model.")
@click.option("--jobs", type=click.IntRange(1), help="Models at a time; one for each core by default.")
@click.pass_context
def command(
    ctx: click.Context,
    paths: tuple[Path, ...],
    no_build: bool,
    no_run: bool,
    markdown: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Shows what becomes of each model in PATHS, which are .onnx files and folders of them.

    The exit code is 1 if any model failed.
    """
    depth: Depth = "none" if no_run else "onnx" if no_build else "build"
    result = _survey([p if p.is_dir() else existing(p) for p in paths], depth, jobs)
    if as_json:
        click.echo(json.dumps(result.to_json(), allow_nan=False))
    elif markdown:
        from .survey_markdown import to_markdown

        click.echo(to_markdown(result), nl=False)
    else:
        result.render(Console())
    if result.failed:
        ctx.exit(1)


def _survey(paths: list[Path], depth: Depth, jobs: int | None) -> Survey:
    """The survey, under a progress bar on stderr if a person sees it."""
    from .survey import find_models, survey

    files = find_models(paths)
    console = Console(stderr=True)
    columns = (TextColumn("surveying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("survey", total=len(files))
        return survey(files, depth, jobs, lambda count: bar.update(task, completed=count))
