"""``coda-edge tune``, and what ``optimize --tune`` does. ``cli`` adds the options ``--json`` and ``--shape``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from .files import FileError, existing

if TYPE_CHECKING:
    from .schedule import Database, Schedules

Shapes = Mapping[str, tuple[int | str, ...]]
Bar = Callable[[], AbstractContextManager[Callable[[str, float], None]]]
"""What makes a progress bar."""

database_option = click.option(
    "--database",
    type=click.Path(path_type=Path),
    help="The file of measured schedules; by default the user's, in the folder for caches.",
)
_INPUT = click.Path(path_type=Path)


class Seconds(click.FloatRange):
    """Seconds, one at least."""

    def __init__(self) -> None:
        super().__init__(1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; a usage error for what is none."""
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail("nan is not a number of seconds.", param, ctx)
        return seconds


@click.command("tune")
@click.argument("model", type=_INPUT)
@click.option("--target", default="native", show_default=True, help="What to tune for; see coda-edge targets.")
@click.option("--seconds", type=Seconds(), help="Begin nothing more after so many seconds.")
@click.option(
    "--length",
    "lengths",
    type=click.IntRange(1),
    multiple=True,
    help="Measure sizes that stay open at this length. May be repeated; 32 and 128 by default.",
)
@click.option(
    "--threads", type=click.IntRange(1), default=2, show_default=True, help="How many threads work should divide among."
)
@click.option("--tracker", metavar="HOST:PORT", help="Measure on a device that TVM's RPC tracker there knows.")
@click.option("--key", help="The key of that device.")
@database_option
@click.pass_context
def command(
    ctx: click.Context,
    model: Path,
    target: str,
    seconds: float | None,
    lengths: tuple[int, ...],
    threads: int,
    tracker: str | None,
    key: str | None,
    database: Path | None,
    shapes: Shapes,
    as_json: bool,
) -> None:
    """Measures which schedules the kernels of MODEL (.onnx) are fastest with, for optimize to use."""
    from .tune import LENGTHS, tracked_device, tune

    if bool(tracker) != bool(key):
        raise click.UsageError("--tracker and --key go together: where the tracker is, and which device of it")
    _read(database)
    device = tracked_device(tracker, key) if tracker and key else None
    bar: Bar = ctx.meta["progress"]
    with bar() as advance:
        found = tune(
            source(model),
            target,
            shapes or None,
            database,
            seconds,
            lengths or LENGTHS,
            threads,
            device,
            advance,
        )
    if as_json:
        click.echo(json.dumps(found.to_json(), allow_nan=False))
    else:
        found.render(Console(), f"{model.name} on {found.target}")


def source(path: Path) -> Path:
    """``path``, if it is there and is a model; raises FileError, for a bundle too: what it was made from is not in it."""
    if existing(path).suffix == ".coda":
        raise FileError(
            f"{path}: is a bundle, whose kernels are compiled already; tune the ONNX model that it was made from, or the one "
            "that `coda-edge optimize --onnx` wrote"
        )
    return path


def schedules(database: Path | None) -> Schedules:
    """Where ``optimize`` looks schedules up: the user's database, then the package's."""
    from .schedule import Schedules

    return Schedules.packaged(_read(database))


def tune_for(
    seconds: float,
    model: Path,
    target: str,
    shapes: Shapes,
    database: Path | None,
    advance: Callable[[str, float], None],
) -> None:
    """Tunes ``model`` ahead of ``optimize``, for ``seconds`` at most: for each of the targets that runs here, or else as ``tune`` does."""
    from .targets import get_all
    from .tune import tune

    _read(database)
    chosen = get_all(target)
    here = [one for one in chosen if not one.missing()] or chosen[:1]
    for one in here:
        tune(source(model), one.name, shapes or None, database, seconds / len(here), progress=advance)


def _read(database: Path | None) -> Database:
    """The file ``database``, or else the user's; raises FileError if it is there and cannot be read."""
    from .schedule import Database, default_path

    path = database or default_path()
    try:
        return Database.read(path)
    except OSError as e:
        raise FileError(f"{path}: the database of schedules cannot be read: {e.strerror or e}") from e
