"""What a tuning run found, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from ..schedule import AnySchedule, Problem
from .search import Outcome


@dataclass(frozen=True)
class Tuned:
    """A tuning run. ``peak``: FLOP/s of multiply-adds that one thread of the device reached in it; ``database``: where the records are."""

    target: str
    database: str
    outcomes: tuple[Outcome, ...]
    known: tuple[Problem, ...]
    peak: float
    seconds: float
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Everything in the table and more, in JSON's types."""
        return {
            "target": self.target,
            "database": self.database,
            "seconds": self.seconds,
            "peak_gflops": self.peak / 1e9,
            "known": [asdict(p) for p in self.known],
            "notes": list(self.notes),
            "problems": [
                {
                    **asdict(o.case.problem),
                    "count": o.case.count,
                    "heuristic": asdict(o.case.space[0]),
                    "best": asdict(o.chosen.schedule),
                    "gain": 1.0 / o.chosen.relative - 1.0,
                    "of_peak": {at: rate / self.peak for at, rate in o.rates.items()} if self.peak else {},
                    "measured": o.measured,
                    "failed": list(o.failed),
                    "complete": o.complete,
                }
                for o in self.outcomes
            ],
        }

    def render(self, console: Console, title: str) -> None:
        """Prints the table."""
        table = Table(title=title, title_justify="left", box=None)
        for heading in ("kernel", "×", "heuristic", "best", "faster by", "of FMA peak"):
            table.add_column(heading, justify="left" if heading in ("kernel", "heuristic", "best") else "right")
        for o in self.outcomes:
            gain = f"{1.0 / o.chosen.relative - 1.0:.1%}" if o.changed else "" if o.complete else "no time"
            rates = " / ".join(f"{rate / self.peak:.0%}" for rate in o.rates.values()) if self.peak else ""
            best = _difference(o.chosen.schedule, o.case.space[0]) if o.changed else "the same"
            table.add_row(_name(o.case.problem), str(o.case.count), _text(o.case.space[0]), best, gain, rates)
        console.print(table)
        if not self.outcomes and not self.known:
            console.print(
                "no kernel was measured: the model has none with a choice of schedules, or more seconds are needed"
            )
        if self.known:
            console.print(f"{len(self.known)} kernels were known already: {', '.join(map(_name, self.known))}")
        for note in (*self.notes, *(f for o in self.outcomes for f in o.failed)):
            console.print(f"note: {note}")
        console.print(f"{self.seconds:.0f} s; measurements are in {self.database}")


def _name(problem: Problem) -> str:
    sizes = "×".join(map(str, problem.shape))
    words = [w for w in (problem.epilogue, problem.weights if problem.weights != "float32" else "") if w]
    rows = [f"{problem.rows} rows"] if problem.rows else []
    return " ".join([problem.kind, sizes, *words, *rows])


def _text(schedule: AnySchedule) -> str:
    """Its fields, but those that are as by default."""
    return _listed(schedule, [f.name for f in fields(schedule) if getattr(schedule, f.name) != f.default])


def _difference(schedule: AnySchedule, other: AnySchedule) -> str:
    """The fields in which it is not like ``other``."""
    return _listed(schedule, [f.name for f in fields(schedule) if getattr(schedule, f.name) != getattr(other, f.name)])


def _listed(schedule: AnySchedule, names: Sequence[str]) -> str:
    return " ".join(f"{name}={getattr(schedule, name)}" for name in names) or "default"
