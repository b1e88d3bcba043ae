"""Timing a session against others, so that the ratio means something on a noisy machine.

Contenders run in turn, in blocks, in one process. A pause precedes each block, because onnxruntime's threads spin on for
some 50 ms after a run and would take the cores from whoever comes next; a warm-up call opens each block. The ratio is the
median over rounds of the ratio of the two blocks' medians, so slow drift of the machine cancels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from .verify import relative_error

if TYPE_CHECKING:
    import onnxruntime

    from .session import Session

Feeds = Mapping[str, npt.NDArray[Any]]
Call = Callable[[], Sequence[npt.NDArray[Any]]]

PAUSE_SECONDS = 0.1
BLOCK_SECONDS = 0.12
BLOCK_CALLS = 4


@dataclass(frozen=True)
class Peer:
    """Another engine on the same feeds: its median ``ms``, ``ratio`` of its time to ours, ``max_rel_error`` of ours against it."""

    ms: float
    ratio: float
    max_rel_error: float


@dataclass(frozen=True)
class BenchResult:
    """Medians in milliseconds; a ratio above 1 means that we are faster."""

    ours_ms: float
    against: Mapping[str, Peer]
    threads: int
    rounds: int
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    target: str = ""
    """Of the targets that the bundle holds kernels for, the one that ran."""

    @property
    def max_rel_error(self) -> float | None:
        """Worst error against any peer; None without peers."""
        return max((p.max_rel_error for p in self.against.values()), default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values: ``ours_ms``, ``against`` {name: {ms, ratio, max_rel_error}}, ``max_rel_error`` and the setting."""
        return {
            "ours_ms": self.ours_ms,
            "against": {
                name: {"ms": p.ms, "ratio": p.ratio, "max_rel_error": p.max_rel_error}
                for name, p in self.against.items()
            },
            "max_rel_error": self.max_rel_error,
            "threads": self.threads,
            "rounds": self.rounds,
            "target": self.target,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
        }

    def render(self, console: Console, title: str = "") -> None:
        """The result as a table on ``console``."""
        inputs = ", ".join(f"{name} {'×'.join(map(str, shape)) or 'scalar'}" for name, shape in self.shapes.items())
        caption = f"{inputs}; {self.target}; threads: {self.threads}; {self.rounds} rounds, paired medians"
        table = Table(title=title or None, title_justify="left", title_style="bold", caption=caption, box=None)
        table.caption_justify = "left"
        for heading in ("engine", "median ms", "its time / ours", "error"):
            table.add_column(heading, justify="left" if heading == "engine" else "right")
        table.add_row("coda-edge", f"{self.ours_ms:.2f}", "", "")
        for name, p in self.against.items():
            table.add_row(name, f"{p.ms:.2f}", f"{p.ratio:.2f}", f"{p.max_rel_error:.1e}")
        console.print(table)


def bench(
    session: Session,
    feeds: Feeds,
    peers: Mapping[str, onnxruntime.InferenceSession] | None = None,
    threads: int = 1,
    rounds: int = 15,
    progress: Callable[[float], None] | None = None,
) -> BenchResult:
    """Times ``session`` against ``peers`` on ``feeds``, and compares their outputs first.

    The sessions must have been made with ``threads`` threads each (``verify.ort_session`` makes such a peer); the number
    is only recorded. ``progress`` hears the fraction done.
    """
    names = [o.name for o in session.get_outputs()]
    calls: dict[str, Call] = {"": lambda: session.run(names, feeds)}
    for name, peer in (peers or {}).items():
        calls[name] = _bound(peer, names, feeds)
    ours = [np.array(o) for o in calls[""]()]
    errors = {
        name: max(map(relative_error, ours, map(np.asarray, call())), default=0.0)
        for name, call in calls.items()
        if name
    }
    times = alternate(calls, rounds, progress)
    against = {
        name: Peer(
            ms=float(np.median(times[name])) * 1e3,
            ratio=float(np.median(times[name] / times[""])),
            max_rel_error=errors[name],
        )
        for name in calls
        if name
    }
    shapes = {name: tuple(np.shape(value)) for name, value in feeds.items()}
    return BenchResult(float(np.median(times[""])) * 1e3, against, threads, rounds, shapes, session.target)


def alternate(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    progress: Callable[[float], None] | None = None,
    pause: float = PAUSE_SECONDS,
    block: float = BLOCK_SECONDS,
) -> dict[str, npt.NDArray[np.float64]]:
    """Median seconds per call of each contender in each round, ``[rounds]``; ``blocks`` says how they take turns."""
    times = blocks(calls, rounds, progress, pause, block)
    return {name: np.array([np.median(taken) for taken in rows]) for name, rows in times.items()}


def blocks(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    progress: Callable[[float], None] | None = None,
    pause: float = PAUSE_SECONDS,
    block: float = BLOCK_SECONDS,
    least: int = BLOCK_CALLS,
) -> dict[str, list[npt.NDArray[np.float64]]]:
    """Seconds of every call of each contender, an array for each round.

    Blocks take turns, in reversed order every other round; a block is one warm-up call, then calls for ``block`` seconds
    and at least ``least`` of them.
    """
    times: dict[str, list[npt.NDArray[np.float64]]] = {name: [] for name in calls}
    order = list(calls)
    for done in range(rounds):
        for name in order if done % 2 == 0 else reversed(order):
            time.sleep(pause)
            times[name].append(_block(calls[name], block, least))
        if progress:
            progress((done + 1) / rounds)
    return times


def _block(call: Callable[[], object], seconds: float, least: int) -> npt.NDArray[np.float64]:
    call()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < least or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return np.array(taken)


def _bound(peer: onnxruntime.InferenceSession, names: Sequence[str], feeds: Feeds) -> Call:
    wanted = {i.name for i in peer.get_inputs()}
    fed = {name: value for name, value in feeds.items() if name in wanted}
    return lambda: peer.run(list(names), fed)
