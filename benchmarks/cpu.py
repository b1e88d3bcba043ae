"""This CPU, our bundles and other engines: ``python -m benchmarks.cpu MODEL.onnx…`` or ``--suite``.

All engines take turns in one run on the same inputs, beside what the machine could do in that run; docs/benchmarks.md explains the output.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from coda_edge.errors import CodaError

from . import table
from .measure import Measured, made_up
from .peers import Peer, peers
from .prepare import prepare as prepare_case
from .prepare import prepare_apart
from .suite import CASES, Case

_DEFAULT_PEERS = "onnxruntime,openvino,mnn"
_FILE_COLUMNS = 160


@click.command()
@click.argument("models", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--suite", is_flag=True, help="Measure all models of benchmarks/suite.py.")
@click.option("--case", "cases", multiple=True, type=click.Choice(list(CASES)), help="Measure one of them.")
@click.option("--inputs", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Arrays by input, npz.")
@click.option("--threads", default="1,2", show_default=True, help="Numbers of threads, separated by commas.")
@click.option("--peers", "names", default=_DEFAULT_PEERS, show_default=True, help="Also known: iree, tvm.")
@click.option("--rounds", type=click.IntRange(min=1), help="Rounds; by default as many as SECONDS allow, 5 to 15.")
@click.option("--seconds", default=10.0, show_default=True, help="Time for each model and number of threads.")
@click.option("--target", default="native", show_default=True, help="What our bundles are built for.")
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), help="Keeps and reuses what is built there.")
@click.option("--prepare", is_flag=True, help="Only build, into WORK.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Writes results.json and the pictures.")
@click.option("--kernels", is_flag=True, help="Show where the time of a run goes.")
@click.option("--markdown", is_flag=True, help="Print a Markdown table.")
def main(
    models: tuple[Path, ...],
    suite: bool,
    cases: tuple[str, ...],
    inputs: Path | None,
    threads: str,
    names: str,
    rounds: int | None,
    seconds: float,
    target: str,
    work: Path | None,
    prepare: bool,
    out: Path | None,
    kernels: bool,
    markdown: bool,
) -> None:
    """Measures MODELS, or those of the suite, against other engines."""
    wanted = {name: CASES[name] for name in (CASES if suite else cases)}
    given = {_name(path): path for path in models}
    wanted |= {name: _given(path, inputs) for name, path in given.items()}
    if not wanted:
        raise click.UsageError("nothing to measure: name models, --case NAME or --suite")
    if prepare and work is None:
        raise click.UsageError("--prepare needs --work DIR, to keep what is built")
    known = peers()
    chosen = [known[_known(n.strip(), known)] for n in names.split(",") if n.strip()]
    counts = _counts(threads)
    with _folder(work) as folder, _only_ours(), _progress() as progress:
        if prepare:
            for name, case in wanted.items():
                prepare_case(case, folder / name, chosen, target)
            return
        bar = progress.add_task("build", total=len(wanted) * (1 + len(counts)))
        fixed = ["--prepare", f"--work={folder}", f"--target={target}", f"--peers={names}"]
        fixed += [f"--inputs={inputs}"] if inputs else []
        failed: dict[str, str] = {}
        for name, reason in prepare_apart({n: [*fixed, str(given.get(n, f"--case={n}"))] for n in wanted}):
            failed |= {name: reason} if reason else {}
            progress.update(bar, advance=1, description=f"{name} built")
        results: dict[str, list[Measured]] = {}
        for name, case in wanted.items():
            if name in failed:
                continue
            run = prepare_case(case, folder / name, chosen, target)
            for count in counts:
                progress.update(bar, description=f"{name}, {count} thread{'s' * (count > 1)}")
                try:
                    results.setdefault(name, []).append(run.measure(count, seconds, rounds))
                except CodaError as error:
                    failed[name] = f"{type(error).__name__}: {error}"
                progress.advance(bar)
    results = {name: measured for name, measured in results.items() if measured}
    if results:
        _report(results, out, kernels, markdown)
    for name, reason in failed.items():
        click.echo(f"{name}: {reason}", err=True)
    sys.exit(bool(failed))


def _name(path: Path) -> str:
    """Of a model given by its file: two may be called alike."""
    return f"{path.stem}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"


def _given(path: Path, inputs: Path | None) -> Case:
    def feeds() -> dict[str, Any]:
        if inputs is None:
            return made_up(path)
        with np.load(inputs) as stored:
            return {name: stored[name] for name in stored.files}

    return Case(path.stem, lambda: path, feeds)


def _counts(threads: str) -> list[int]:
    parts = [t.strip() for t in threads.split(",")]
    if not all(t.isdecimal() and int(t) for t in parts):
        raise click.BadParameter(f"'{threads}' is no list of numbers of threads, as 1,2 is", param_hint="--threads")
    return [int(t) for t in parts]


def _known(name: str, known: dict[str, Peer]) -> str:
    if name not in known:
        raise click.BadParameter(f"no peer is called '{name}'; known are {', '.join(known)}", param_hint="--peers")
    return name


@contextlib.contextmanager
def _folder(work: Path | None) -> Iterator[Path]:
    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
        yield work
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)


@contextlib.contextmanager
def _only_ours() -> Iterator[None]:
    """What engines print goes to the standard error output, so that a table can go to a file."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _progress() -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), console=Console(stderr=True), transient=True)


def _report(results: dict[str, list[Measured]], out: Path | None, kernels: bool, markdown: bool) -> None:
    if out is not None:
        _write(out, results)
    if markdown:
        click.echo(table.markdown(results))
        return
    terminal = Console()
    table.render(results, terminal if terminal.is_terminal else Console(width=_FILE_COLUMNS), kernels)


def _write(out: Path, results: dict[str, list[Measured]]) -> None:
    from .roofline import draw

    out.mkdir(parents=True, exist_ok=True)
    rows = {name: [m.to_json() for m in measured] for name, measured in results.items()}
    (out / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    for name, measured in results.items():
        for m in measured:
            draw(m, out / f"{name}-{m.threads}")


if __name__ == "__main__":
    try:
        main(prog_name="python -m benchmarks.cpu")
    except CodaError as error:
        sys.exit(f"{type(error).__name__}: {error}")
