"""A model in onnxruntime in each way that there is, and in our runtime: ``python -m benchmarks.onnxruntime [MODEL.onnx]``.

Times are taken in one run, in turn, and outputs compared with onnxruntime's own. Memory is what a fresh process has resident after
one run, files that it maps included. ``--folder`` keeps what is built, and takes what is there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import onnx
from rich.console import Console
from rich.table import Table

from coda_edge import Session
from coda_edge.bench import blocks
from coda_edge.inputs import default_sizes, generate_inputs, input_specs
from coda_edge.onnxruntime import add_provider, package, package_regions
from coda_edge.onnxruntime.packaging import session as own_session
from coda_edge.onnxruntime.regions import session as shared_session
from coda_edge.verify import relative_error
from models import minilm

Feeds = Mapping[str, npt.NDArray[Any]]
Run = Callable[[Feeds], Sequence[npt.NDArray[Any]]]
OURS, PLAIN = "our runtime", "onnxruntime"


@dataclass(frozen=True)
class Timed:
    """One way at one length and number of threads. ``ratio``: its time over our runtime's, the median over rounds."""

    way: str
    length: int
    threads: int
    ms: float
    ratio: float
    error: float


def _plain(folder: Path, threads: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    made = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    return lambda feeds: made.run(None, dict(feeds))


def _own(folder: Path, threads: int) -> Run:
    made = own_session(str(folder / "own.onnx"), folder / "own.so", threads)
    return lambda feeds: made.run(None, dict(feeds))


def _shared(folder: Path, threads: int) -> Run:
    made = shared_session(folder / "shared.onnx", threads)
    return lambda feeds: made.run(None, dict(feeds))


def _provider(folder: Path, threads: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    add_provider(options, bundle=folder / "shared.coda")
    made = onnxruntime.InferenceSession(str(folder / "model.onnx"), options)
    return lambda feeds: made.run(None, dict(feeds))


def _ours(folder: Path, threads: int) -> Run:
    made = Session(folder / "shared.coda", threads=threads)
    return lambda feeds: made.run(None, feeds)


#: Ours first, onnxruntime by itself last.
WAYS: dict[str, Callable[[Path, int], Run]] = {
    OURS: _ours,
    "own library": _own,
    "generic library": _shared,
    "execution provider": _provider,
    PLAIN: _plain,
}


def build(model: Path, folder: Path) -> None:
    """Writes what each way needs, unless it is there."""
    if (folder / "model.onnx").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    made = package_regions(model)
    if made.left is not None:
        raise click.UsageError(f"{model} is not compiled as a whole, which this benchmark compares: {made.left}")
    made.save(folder / "shared.onnx")
    package(model).save(folder / "own.onnx", folder / "own.so")
    part = folder / ".model.part"
    shutil.copy(model, part)
    part.replace(folder / "model.onnx")


def feeds_of(folder: Path, batch: int, length: int) -> Feeds:
    """Made-up inputs of the model."""
    specs = input_specs(onnx.load(folder / "model.onnx"))
    return generate_inputs(specs, default_sizes(specs, batch, length))


def timed(folder: Path, lengths: Sequence[int], threads: Sequence[int], rounds: int) -> list[Timed]:
    """Every way at each length and number of threads, in blocks that take turns."""
    found = []
    for count in threads:
        runs = {name: load(folder, count) for name, load in WAYS.items()}
        for length in lengths:
            feeds = feeds_of(folder, 1, length)
            expected = [np.array(o) for o in runs[PLAIN](feeds)]
            calls = {name: lambda run=run, feeds=feeds: run(feeds) for name, run in runs.items()}
            errors = {
                name: max(relative_error(np.asarray(a), b) for a, b in zip(run(feeds), expected, strict=True))
                for name, run in runs.items()
            }
            medians = {n: np.array([np.median(t) for t in rows]) for n, rows in blocks(calls, rounds).items()}
            for name, times in medians.items():
                ratio = float(np.median(times / medians[OURS]))
                found.append(Timed(name, length, count, float(np.median(times)) * 1e3, ratio, errors[name]))
    return found


def memory(folder: Path, length: int) -> dict[str, float]:
    """By way, MB that a fresh process has resident after one run, beyond what it has with all imports done."""
    command = [sys.executable, "-m", "benchmarks.onnxruntime", "--folder", str(folder), "--lengths", str(length)]
    found = {}
    for way in WAYS:
        done = subprocess.run([*command, "--resident", way], capture_output=True, text=True, check=True)
        found[way] = float(done.stdout.split()[-1])
    return found


def resident(way: str, folder: Path, length: int) -> float:
    """What this process gains by loading the model and running it once."""
    import onnxruntime  # so that it is there before

    feeds = feeds_of(folder, 1, length)
    onnxruntime.SessionOptions()
    before = _rss()
    run = WAYS[way](folder, 1)
    run(feeds)
    return _rss() - before


def _rss() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True), required=False)
@click.option("--folder", type=click.Path(path_type=Path), help="Where what is built stays; nowhere by default.")
@click.option("--lengths", default="128,32", show_default=True)
@click.option("--threads", default="1,2", show_default=True)
@click.option("--rounds", default=15, show_default=True)
@click.option("--json", "as_json", is_flag=True)
@click.option("--resident", "way", type=click.Choice(list(WAYS)), hidden=True)
def main(
    model: Path | None, folder: Path | None, lengths: str, threads: str, rounds: int, as_json: bool, way: str | None
) -> None:
    """Compares the ways; MODEL is MiniLM-L6 by default."""
    if way is not None and folder is not None:
        click.echo(resident(way, folder, _numbers(lengths)[0]))
        return
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        build(model or minilm.path(), place)
        times = timed(place, _numbers(lengths), _numbers(threads), rounds)
        used = memory(place, _numbers(lengths)[0])
    if as_json:
        click.echo(json.dumps({"times": [asdict(t) for t in times], "resident_mb": used}))
        return
    table = Table(box=None)  # speed: our runtime's is 1
    for heading in ("length", "threads", "way", "ms", "speed", "× onnxruntime", "error", "MB"):
        table.add_column(heading, justify="left" if heading == "way" else "right", no_wrap=True)
    plain = {(t.length, t.threads): t.ratio for t in times if t.way == PLAIN}
    for t in times:
        shares = (f"{1 / t.ratio:.2f}", f"{plain[t.length, t.threads] / t.ratio:.2f}")
        table.add_row(
            str(t.length), str(t.threads), t.way, f"{t.ms:.2f}", *shares, f"{t.error:.0e}", f"{used[t.way]:.0f}"
        )
    Console(width=88).print(table)


if __name__ == "__main__":
    main()
