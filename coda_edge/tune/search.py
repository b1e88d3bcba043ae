"""The search over a problem's schedules: all are measured a little, the better ones more, the best against the heuristic's most.

A space has tens of schedules, so each can be measured; what costs is to tell those within some percent apart on a machine that does other
things as well. Hence rounds: in each one, every candidate still in the race is timed in turn between two runs of the heuristic's schedule,
and only its times over theirs count. What the two runs differ by is the noise. Each stage halves the field and more (successive
halving; Jamieson and Talwalkar, arXiv 1502.07943).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..schedule import AnySchedule, Database, Record
from .case import Case
from .device import DeviceError
from .trial import Bench


@dataclass(frozen=True)
class Stage:
    """``rounds`` in which the ``field`` best of the candidates are measured."""

    rounds: int
    field: int


STAGES = (Stage(2, 1 << 30), Stage(3, 8), Stage(7, 3))
MARGIN = 0.01
"""By how much a candidate must be faster than the heuristic's, at the least."""
_DEVIATIONS = 2.0
"""How many standard errors of its median the gain must be worth."""


@dataclass(frozen=True)
class Outcome:
    """What the search of a case came to. ``rates``: FLOP/s of the chosen schedule, by sizes; ``failed``: candidates that did not work."""

    case: Case
    chosen: Record
    rates: Mapping[str, float]
    measured: int
    failed: tuple[str, ...] = ()
    complete: bool = True

    @property
    def changed(self) -> bool:
        """Whether it is another schedule than the heuristic's."""
        return self.chosen.schedule != self.case.space[0]


@dataclass
class _Race:
    """Times over the heuristic's by candidate and sizes, and the heuristic's own times."""

    ratios: dict[AnySchedule, dict[str, list[float]]] = field(default_factory=dict)
    seconds: dict[AnySchedule, dict[str, list[float]]] = field(default_factory=dict)
    noise: list[float] = field(default_factory=list)

    def relative(self, schedule: AnySchedule) -> float:
        """The geometric mean over sizes of the median ratios."""
        return statistics.geometric_mean(statistics.median(r) for r in self.ratios[schedule].values())

    def error(self, schedule: AnySchedule) -> float:
        """The standard error of ``relative``, from the spread of its ratios and of the heuristic's against itself."""
        spreads = [r for ratios in self.ratios[schedule].values() for r in _deviations(ratios)]
        count = min(len(r) for r in self.ratios[schedule].values())
        spread = max(statistics.median(spreads), statistics.median(self.noise) if self.noise else 0.0)
        return _NORMAL * spread / math.sqrt(count)


_NORMAL = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""


def _deviations(values: Sequence[float]) -> list[float]:
    middle = statistics.median(values)
    return [abs(v - middle) for v in values]


def search(
    case: Case,
    benches: Mapping[str, Bench],
    modules: Mapping[AnySchedule, Any],
    database: Database,
    threads: int,
    out_of_time: Callable[[], bool],
    advance: Callable[[float], None],
) -> Outcome:
    """Measures the candidates of ``case`` that have a module at the sizes of ``benches``, and puts all that is known into ``database``.

    Candidates that the database has at these sizes are not measured again to be ranked. The first of the space, the heuristic's, must
    have a module. Raises DeviceError if that one does not work.
    """
    heuristic = case.space[0]
    scores = {s: r.relative for s, r in ranked(case, database).items() if s in modules}
    fresh = [s for s in case.space[1:] if s in modules and s not in scores]
    race, failed = _Race(), dict[AnySchedule, str]()
    for bench in benches.values():
        bench.check(modules[heuristic], heuristic)
    complete = True
    for number, stage in enumerate(STAGES):
        best = sorted(scores, key=lambda s: scores[s])
        entrants = best[: stage.field] if number else _working(fresh, benches, modules, failed)
        if not entrants and not number:
            continue
        for done in range(stage.rounds):
            if out_of_time():
                complete = False
                break
            _round(race, heuristic, entrants, benches, modules, threads)
            advance((number + (done + 1) / stage.rounds) / len(STAGES))
        for schedule in (s for s in (*entrants, heuristic) if s in race.ratios):
            scores[schedule] = race.relative(schedule)
            database.add(_record(case, race, schedule))
        scores.pop(heuristic, None)
        if not complete:
            break
    chosen = _choose(case, race, scores) if complete else heuristic
    record = _record(case, race, chosen, chosen=complete)
    if complete:
        database.add(record)
    rates = {at: benches[at].flops(modules[chosen], chosen) / value for at, value in record.seconds.items()}
    return Outcome(case, record, rates, len(race.ratios), tuple(failed.values()), complete)


def ranked(case: Case, database: Database) -> dict[AnySchedule, Record]:
    """The candidates that the database has at all sizes of ``case``, the best first; the heuristic's is none of them."""
    found = database.measured(case.problem)
    there = {s: found[s] for s in case.space[1:] if s in found and case.sizes.keys() <= found[s].seconds.keys()}
    return dict(sorted(there.items(), key=lambda item: item[1].relative))


def _working(
    candidates: Sequence[AnySchedule],
    benches: Mapping[str, Bench],
    modules: Mapping[AnySchedule, Any],
    failed: dict[AnySchedule, str],
) -> list[AnySchedule]:
    """The candidates that compute the right thing."""
    working = []
    for schedule in candidates:
        try:
            for bench in benches.values():
                bench.check(modules[schedule], schedule)
            working.append(schedule)
        except DeviceError as e:
            failed[schedule] = str(e)
    return working


def _round(
    race: _Race,
    heuristic: AnySchedule,
    candidates: Sequence[AnySchedule],
    benches: Mapping[str, Bench],
    modules: Mapping[AnySchedule, Any],
    threads: int,
) -> None:
    """Times every candidate once at each of the sizes, between two runs of the heuristic's schedule."""
    for at, bench in benches.items():
        before = bench.time(modules[heuristic], heuristic)
        found: dict[AnySchedule, float] = {}
        for schedule in candidates:
            found[schedule] = bench.time(modules[schedule], schedule)
        after = bench.time(modules[heuristic], heuristic)
        reference = (before + after) / 2
        race.noise.append(abs(before - after) / (before + after))
        found[heuristic] = reference
        for schedule, seconds in found.items():
            balance = bench.balance(modules[schedule], schedule, threads)
            balance /= bench.balance(modules[heuristic], heuristic, threads)
            race.ratios.setdefault(schedule, {}).setdefault(at, []).append(seconds / reference * balance)
            race.seconds.setdefault(schedule, {}).setdefault(at, []).append(seconds)


def _choose(case: Case, race: _Race, scores: Mapping[AnySchedule, float]) -> AnySchedule:
    """The best of the last stage, if it is better than the heuristic's by more than noise; otherwise that one."""
    for schedule in sorted(scores, key=lambda s: scores[s])[: STAGES[-1].field]:
        gain = 1.0 - race.relative(schedule)
        if gain >= max(MARGIN, _DEVIATIONS * race.error(schedule)):
            return schedule
    return case.space[0]


def _record(case: Case, race: _Race, schedule: AnySchedule, chosen: bool = False) -> Record:
    seconds = {at: statistics.median(values) for at, values in race.seconds.get(schedule, {}).items()}
    relative = race.relative(schedule) if schedule in race.ratios else 1.0
    rounds = min((len(r) for r in race.ratios.get(schedule, {}).values()), default=0)
    return Record(case.problem, schedule, relative, seconds, rounds, chosen)
