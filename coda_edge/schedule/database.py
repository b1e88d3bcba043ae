"""Measured schedules in a file, and the lookup that lowering is handed.

A database is a file of JSON lines, one a measurement, that only grows: each line is appended by one write, so that processes may share
it, a kill costs the measurement under way at most, and files are joined by ``cat``. Of two lines about one schedule of one problem the
later one counts. ``docs/tune.md`` describes the line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from .attention import AttentionSchedule
from .gemm import GemmSchedule
from .norm import NormForm
from .problem import Problem, norm_problem

VERSION = 1
"""Of the lines. A line of another version is ignored."""

AnySchedule: TypeAlias = "GemmSchedule | AttentionSchedule | NormForm"
_KINDS: dict[str, type[AnySchedule]] = {"gemm": GemmSchedule, "attention": AttentionSchedule, "norm": NormForm}
_PACKAGED = "packaged.jsonl"
_Chosen = TypeVar("_Chosen", GemmSchedule, AttentionSchedule, NormForm)


@dataclass(frozen=True)
class Record:
    """A measurement of ``schedule`` for ``problem``.

    ``seconds``: its median times, by the sizes measured at (``rows=128``, say); ``relative``: its time over the heuristic's in the
    same rounds, the median of ``rounds``, averaged (geometric mean) over the sizes. ``chosen``: whether it is the problem's.
    """

    problem: Problem
    schedule: AnySchedule
    relative: float = 1.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    rounds: int = 0
    chosen: bool = False

    def to_line(self) -> str:
        """The record as one line of JSON, without the newline."""
        return json.dumps(
            {
                "version": VERSION,
                **asdict(self.problem),
                "schedule": asdict(self.schedule),
                "relative": round(self.relative, 4),
                "seconds": {at: float(f"{value:.4g}") for at, value in self.seconds.items()},
                "rounds": self.rounds,
                "chosen": self.chosen,
            },
            separators=(",", ":"),
        )


@dataclass
class Database:
    """Records in memory, and the file that they are from and go to, if there is one. ``notes``: what was ignored in it, and why."""

    path: Path | None = None
    notes: tuple[str, ...] = ()
    _records: dict[tuple[Problem, AnySchedule], Record] = field(default_factory=dict)
    _chosen: dict[Problem, Record] = field(default_factory=dict)

    @staticmethod
    def of(records: Iterable[Record]) -> Database:
        """A database in memory."""
        database = Database()
        for record in records:
            database._take(record)
        return database

    @staticmethod
    def read(path: Path) -> Database:
        """The database in a file, which need not exist yet. Raises OSError if it cannot be read."""
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return _parsed(text, path)

    def add(self, record: Record) -> None:
        """Takes ``record`` in and appends it to the file. Raises OSError if it cannot be written."""
        self._take(record)
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
            file.write((b"\n" if torn else b"") + record.to_line().encode() + b"\n")

    def measured(self, problem: Problem) -> dict[AnySchedule, Record]:
        """What is known of ``problem``, by schedule."""
        return {schedule: record for (p, schedule), record in self._records.items() if p == problem}

    def chosen(self, problem: Problem) -> Record | None:
        """The record of the schedule that ``problem`` was found to be best with."""
        return self._chosen.get(problem)

    def records(self) -> list[Record]:
        """All of them, in the order in which they were first measured."""
        return list(self._records.values())

    def _take(self, record: Record) -> None:
        self._records[record.problem, record.schedule] = record
        if record.chosen:
            self._chosen[record.problem] = record
        elif (known := self._chosen.get(record.problem)) and known.schedule == record.schedule:
            del self._chosen[record.problem]


@dataclass(frozen=True)
class Schedules:
    """What lowering looks schedules up in: databases, the first that knows a problem deciding. What none knows is left to heuristics."""

    databases: tuple[Database, ...] = ()

    @staticmethod
    def packaged(*first: Database) -> Schedules:
        """``first``, then the database that the package brings."""
        text = resources.files(__package__).joinpath(_PACKAGED).read_text(encoding="utf-8")
        return Schedules((*first, _parsed(text, None)))

    @property
    def notes(self) -> tuple[str, ...]:
        """What was ignored in the databases."""
        return tuple(note for database in self.databases for note in database.notes)

    def gemm(self, problem: Problem) -> GemmSchedule | None:
        """The schedule of a GEMM, if one is known."""
        return self._find(problem, GemmSchedule)

    def attention(self, problem: Problem) -> AttentionSchedule | None:
        """The schedule of an attention, if one is known."""
        return self._find(problem, AttentionSchedule)

    def norm(self, problem: Problem) -> NormForm | None:
        """The form of a norm, if one is known."""
        return self._find(problem, NormForm)

    def absorbs(self, target: str, k: int, n: int, centred: bool) -> bool:
        """Whether GEMMs with ``n`` columns together do a norm over ``k`` that they read: unless it is known to be slower."""
        form = self.norm(norm_problem(target, k, n, centred))
        return form is None or form.absorbed

    def _find(self, problem: Problem, kind: type[_Chosen]) -> _Chosen | None:
        for wider in problem.widening():
            for database in self.databases:
                record = database.chosen(wider)
                if record is not None and isinstance(record.schedule, kind):
                    return record.schedule
        return None


def fixed(problem: Problem, schedule: AnySchedule) -> Schedules:
    """``schedule`` for ``problem``, and nothing else."""
    return Schedules((Database.of([Record(problem, schedule, chosen=True)]),))


def default_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Where a user's database is: ``coda-edge/schedules.jsonl`` in the folder for caches (XDG Base Directory Specification)."""
    base = environment.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "coda-edge" / "schedules.jsonl"


def _parsed(text: str, path: Path | None) -> Database:
    database = Database(path)
    ignored: dict[str, int] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        try:
            database._take(_record(json.loads(line)))
        except (ValueError, KeyError, TypeError) as e:
            reason = str(e) if isinstance(e, _Ignored) else "they are no records of measurements"
            ignored[reason] = ignored.get(reason, 0) + 1
    where = path or "the package's database"
    database.notes = tuple(f"{count} lines of {where} are ignored: {reason}" for reason, count in ignored.items())
    return database


class _Ignored(ValueError):
    """Why a line is ignored."""


def _record(line: Mapping[str, Any]) -> Record:
    if line["version"] != VERSION:
        raise _Ignored(f"they are of version {line['version']}, this coda-edge reads version {VERSION}: tune again")
    problem = Problem(**{f.name: _frozen(line[f.name]) for f in fields(Problem)})
    return Record(
        problem,
        _schedule(problem.kind, line["schedule"]),
        float(line["relative"]),
        {str(at): float(value) for at, value in line["seconds"].items()},
        int(line["rounds"]),
        bool(line["chosen"]),
    )


def _schedule(kind: str, values: Mapping[str, Any]) -> AnySchedule:
    if kind not in _KINDS:
        raise _Ignored(f"kernels of kind '{kind}' are not known here")
    schedule = _KINDS[kind]
    unknown = values.keys() - {f.name for f in fields(schedule)}
    if unknown:
        raise _Ignored(f"{schedule.__name__} no longer has {', '.join(sorted(unknown))}: tune again")
    if not all(_plain(v) for v in values.values()):
        raise _Ignored("numbers of their schedules are out of range")
    try:
        return schedule(**{name: _frozen(value) for name, value in values.items()})
    except TypeError as e:
        raise _Ignored(f"{schedule.__name__} has more fields now: tune again") from e


def _plain(value: Any) -> bool:
    """Whether a field of a schedule may be ``value``: files are shared, and a tile of thousands of rows would never compile."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(_plain(v) for v in value)
    return isinstance(value, (str, bool)) or (isinstance(value, int) and 0 <= value <= 1 << 20)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
