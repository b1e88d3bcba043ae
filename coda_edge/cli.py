"""The command ``coda-edge``: optimize, run, bench, inspect, survey, package, sign, keygen, targets.

Every command takes ``--json``: stdout then carries exactly one JSON object. Progress goes to stderr. An error is one line
on stderr, ``ErrorType: message``, with exit code 1 (with ``--json`` also ``{"error": …}`` on stdout); a usage error has
exit code 2, as click gives it.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from . import __version__, cli_package, cli_sign, cli_survey, cli_tune
from .errors import CodaError
from .files import apart, creatable, existing, load_arrays, save_arrays

if TYPE_CHECKING:
    from .bench import BenchResult
    from .driver import Verify
    from .inputs import Feeds, InputSpec
    from .report import Report
    from .session import Session

Shapes = dict[str, tuple[int | str, ...]]

_TIMING_ROUNDS = 5
# Lengths that `bench` tries, in order, where sizes are left open: tables of positions bound them.
_LENGTHS = (128, 64, 32, 16, 8, 4, 1)
# Where each stage of optimize lies on the progress bar, by the first word of its name.
_STAGES = {
    "load": (0.0, 0.02),
    "normalize": (0.02, 0.12),
    "reference": (0.12, 0.16),
    "pass": (0.16, 0.30),
    "export": (0.30, 0.33),
    "lower": (0.33, 0.40),
    "build": (0.40, 0.80),
    "verify": (0.80, 0.88),
    "timing": (0.88, 1.0),
    "bench": (0.0, 1.0),
    "rewrite": (0.0, 0.05),
    "compile": (0.05, 0.5),
    "measure": (0.5, 1.0),
}


class _Commands(click.Group):
    """A group that turns errors of the package into one line and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _ended_tidily():
                return super().invoke(ctx)
        except (CodaError, OSError) as e:
            message = " ".join(str(e).split())
            click.echo(f"{type(e).__name__}: {message}", err=True)
            if ctx.meta.get("json"):
                _print_json({"error": {"type": type(e).__name__, "message": message}})
            ctx.exit(1)


@contextmanager
def _ended_tidily() -> Iterator[None]:
    """A request to end (SIGTERM) unwinds what runs, so that no temporary file stays; the exit code is a shell's, 143."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not ours:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _parse_shapes(_: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> Shapes:
    """``NAME=1x128`` or ``NAME=batch,128``: sizes are numbers, or names for sizes that stay open."""
    shapes: Shapes = {}
    for value in values:
        name, equals, text = value.rpartition("=")
        sizes = [s.strip() for s in text.split("," if "," in text else "x")] if text.strip() else []
        if not (name and equals) or not all(s.isdecimal() or s.isidentifier() for s in sizes):
            raise click.BadParameter(f"{value!r} is not of the form NAME=1x128", param=parameter)
        shapes[name] = tuple(int(s) if s.isdecimal() else s for s in sizes)
    return shapes


def _remember_json(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    ctx.meta["json"] = value
    return value


_PATH = click.Path(path_type=Path)
_json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    is_eager=True,
    callback=_remember_json,
    help="Print one JSON object instead of tables.",
)
_shape_option = click.option(
    "--shape",
    "shapes",
    metavar="NAME=SHAPE",
    callback=_parse_shapes,
    multiple=True,
    help="Shape of an input, as NAME=1x128. May be repeated.",
)
_threads_option = click.option(
    "--threads", type=click.IntRange(1), help="Threads to use; all available cores by default."
)
_level_option = click.option(
    "--target",
    "level",
    metavar="NAME",
    help="Of the targets that BUNDLE holds kernels for, the one to use; the best for this CPU by default.",
)


@click.group(cls=_Commands)
@click.version_option(__version__, prog_name="coda-edge")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Rewrites exported ONNX Transformers into GEMM-plus-epilogue kernels, and runs them."""
    ctx.meta["progress"] = _progress


@main.command()
@click.argument("model", type=_PATH)
@click.option("-o", "--output", type=_PATH, help="The bundle to write; MODEL with the suffix .coda by default.")
@click.option("--onnx", "onnx_output", type=_PATH, help="Also write the optimized graph as ONNX.")
@click.option(
    "--target",
    default="native",
    show_default=True,
    help="What to build for: a target, several as NAME,NAME for one bundle, or a group; see coda-edge targets.",
)
@_shape_option
@click.option(
    "--verify",
    type=click.Choice(["once", "each"]),
    default="once",
    show_default=True,
    help="Compare with onnxruntime at the end, or after every pass too, so that a wrong one is named.",
)
@click.option("--no-verify", is_flag=True, help="Neither compare with onnxruntime nor time against it.")
@click.option(
    "--tune",
    "tune_seconds",
    type=cli_tune.Seconds(),
    help="First measure schedules here, for so many seconds at most.",
)
@cli_tune.database_option
@_json_option
def optimize(
    model: Path,
    output: Path | None,
    onnx_output: Path | None,
    target: str,
    shapes: Shapes,
    verify: Literal["once", "each"],
    no_verify: bool,
    tune_seconds: float | None,
    database: Path | None,
    as_json: bool,
) -> None:
    """Optimizes MODEL (.onnx) into one bundle that the runtime executes."""
    from .driver import optimize as run_optimize

    bundle = creatable(output or existing(model).with_suffix(".coda"))
    if onnx_output:
        creatable(onnx_output)
    cli_package.apart_from_model([bundle, *cli_package.onnx_files(onnx_output)], existing(model))
    with _progress() as advance:
        if tune_seconds is not None:
            cli_tune.tune_for(tune_seconds, model, target, shapes, database, advance)
        checked: Verify = not no_verify and (verify == "once" or "each")
        optimized = run_optimize(
            existing(model),
            target=target,
            shapes=shapes or None,
            verify=checked,
            progress=advance,
            schedules=cli_tune.schedules(database),
        )
        optimized.save(bundle)
        if onnx_output:
            optimized.save_onnx(onnx_output)
        report = optimized.report
        if not no_verify and _runs_here(report.target):
            advance("timing", 0.0)
            report = _timed(report, bundle, model, shapes, lambda fraction: advance("timing", fraction))
    if as_json:
        written = {"model": str(model), "bundle": str(bundle), "onnx": str(onnx_output) if onnx_output else None}
        _print_json(report.to_json() | written)
    else:
        report.render(Console(), f"{model.name} → {bundle}")


@main.command()
@click.argument("bundle", type=_PATH)
@click.option("--inputs", type=_PATH, required=True, help="An .npz file with one array for each input.")
@click.option("--outputs", type=_PATH, required=True, help="The .npz file to write, one array for each output.")
@_threads_option
@_level_option
@_json_option
def run(bundle: Path, inputs: Path, outputs: Path, threads: int | None, level: str | None, as_json: bool) -> None:
    """Runs BUNDLE once on arrays from a file."""
    apart([creatable(outputs)], [inputs, bundle])
    feeds = load_arrays(inputs)
    with _open(bundle, threads, level) as session:
        names = [o.name for o in session.get_outputs()]
        start = time.perf_counter()
        results = dict(zip(names, session.run(names, feeds), strict=True))
        seconds = time.perf_counter() - start
        save_arrays(outputs, results)
        ran = session.target
    described = {name: {"dtype": str(a.dtype), "shape": list(a.shape)} for name, a in results.items()}
    if as_json:
        _print_json({"outputs": described, "file": str(outputs), "target": ran, "ms": seconds * 1e3})
    else:
        for name, d in described.items():
            click.echo(f"{name}: {d['dtype']} {d['shape']}")
        click.echo(f"{seconds * 1e3:.2f} ms (first run), written to {outputs}")


@main.command()
@click.argument("bundle", type=_PATH)
@click.option("--against", type=_PATH, help="The ONNX model to time in onnxruntime and to compare outputs with.")
@click.option("--inputs", type=_PATH, help="An .npz file with the inputs; made up if not given.")
@_shape_option
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True, help="Blocks for each engine.")
@_threads_option
@_level_option
@_json_option
def bench(
    bundle: Path,
    against: Path | None,
    inputs: Path | None,
    shapes: Shapes,
    rounds: int,
    threads: int | None,
    level: str | None,
    as_json: bool,
) -> None:
    """Times BUNDLE, in turn with onnxruntime on the original model if --against names it."""
    if against:
        existing(against)
    with _open(bundle, threads, level) as session, _progress() as advance:
        feeds = load_arrays(inputs) if inputs else _made_up(session, against, shapes)
        result = _bench(session, against, feeds, rounds, lambda fraction: advance("bench", fraction))
    if as_json:
        _print_json(result.to_json())
    else:
        result.render(Console(), bundle.name)


@main.command()
@click.argument("file", type=_PATH)
@click.option("--why", is_flag=True, help="Show what optimizing the model would leave outside GEMMs, and why.")
@_json_option
def inspect(file: Path, why: bool, as_json: bool) -> None:
    """Shows what is in FILE: a bundle (.coda) or an ONNX model."""
    from .cli_inspect import inspect_file
    from .cli_why import inspect_why

    found = inspect_why(existing(file)) if why else inspect_file(existing(file))
    if as_json:
        _print_json(found.to_json())
    else:
        found.render(Console())


@main.command()
@_json_option
def targets(as_json: bool) -> None:
    """Lists what bundles can be built for."""
    from .cli_inspect import target_list

    found = target_list()
    if as_json:
        _print_json(found.to_json())
    else:
        found.render(Console())


main.add_command(cli_sign.keygen)
main.add_command(cli_sign.sign)
main.add_command(_json_option(cli_survey.command))
main.add_command(_json_option(_shape_option(cli_package.command)))
main.add_command(_json_option(_shape_option(cli_tune.command)))


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A progress bar on stderr if a person sees it; yields what moves it: ``advance(stage, fraction of that stage)``."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage, fraction: None
        return
    columns = (TextColumn("{task.description:<24}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("start", total=1.0)

        def advance(stage: str, fraction: float) -> None:
            start, end = _STAGES.get(stage.split(" ", 1)[0], (None, 0.0))
            done = None if start is None else start + fraction * (end - start)
            bar.update(task, description=stage, completed=done)

        yield advance


def _open(bundle: Path, threads: int | None, level: str | None = None) -> Session:
    from .session import Session

    return Session(str(existing(bundle)), threads=threads, target=level)


def _runs_here(target: str) -> bool:
    from .targets import get_all

    return any(not one.missing() for one in get_all(target))


def _timed(report: Report, bundle: Path, model: Path, shapes: Shapes, advance: Callable[[float], None]) -> Report:
    """``report`` with the times of a run here, at its sizes."""
    from .inputs import bind_sizes, generate_inputs

    with _open(bundle, None) as session:
        specs = _specs(session, model)
        feeds = generate_inputs(specs, {**report.sizes, **bind_sizes(specs, shapes)})
        result = _bench(session, model, feeds, _TIMING_ROUNDS, advance)
    peer = result.against["onnxruntime"]
    return replace(report, ours_ms=result.ours_ms, ort_ms=peer.ms, ratio=peer.ratio, threads=result.threads)


def _specs(session: Session, model: Path | None) -> list[InputSpec]:
    """The inputs to make up: of the model where it is known, with the bounds of its tables, or else of the bundle."""
    from .inputs import InputSpec, input_specs
    from .symbolic import parse_dim

    if model:
        from .frontend import load

        return input_specs(load(model))
    return [InputSpec(i.name, _numpy_name(i.type), tuple(parse_dim(d) for d in i.shape)) for i in session.get_inputs()]


def _numpy_name(ort_type: str) -> str:
    """onnxruntime's name of a tensor type, ``tensor(float)``, as numpy's, ``float32``."""
    element = ort_type.removeprefix("tensor(").removesuffix(")")
    return {"float": "float32", "double": "float64"}.get(element, element)


def _made_up(session: Session, model: Path | None, shapes: Shapes) -> Feeds:
    """Inputs of the shapes given; sizes left open have the first of a few lengths that the bundle takes."""
    from .errors import ShapeError
    from .inputs import bind_sizes, default_sizes, generate_inputs

    specs = _specs(session, model)
    bound = bind_sizes(specs, shapes)
    refused: ShapeError | None = None
    for length in _LENGTHS:
        feeds = generate_inputs(specs, {**default_sizes(specs, length=length), **bound})
        try:
            session.run(None, feeds)
        except ShapeError as error:
            refused = refused or error
        else:
            return feeds
    assert refused is not None
    raise ShapeError(f"{refused}; give sizes with --shape") from refused


def _bench(
    session: Session, model: Path | None, feeds: Feeds, rounds: int, advance: Callable[[float], None]
) -> BenchResult:
    from .bench import bench as time_in_turn
    from .verify import ort_session

    peers = {"onnxruntime": ort_session(str(model), session.threads, by_default=True)} if model else {}
    return time_in_turn(session, feeds, peers, session.threads, rounds, advance)


def _print_json(value: Mapping[str, Any]) -> None:
    click.echo(json.dumps(value, allow_nan=False, default=str))
