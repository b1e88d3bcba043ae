"""The tuner: which schedules a model's kernels are fastest with, by measuring them on the device.

``tune`` rewrites a model as ``optimize`` does, finds its distinct kernels (``case``), compiles each with every schedule of its space
(``space``, ``build``), measures them through TVM's RPC (``device``, ``trial``), and writes what it finds to a database (``search``),
which lowering is handed as ``coda_edge.schedule.Schedules``. ``docs/tune.md`` is the user's page.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from .. import frontend
from ..driver import Model, Progress
from ..inputs import bound_specs, default_sizes
from ..passes import run_pipeline
from ..schedule import AnySchedule, Database, Problem, default_path
from ..targets import get
from ..targets.target import Target
from .build import Built, builders
from .case import Case, NodeSpec, cases_of
from .device import Device, DeviceError, local_device, tracked_device
from .norm import NormSpec, PlanBench, norm_cases
from .result import Tuned
from .search import STAGES, Outcome, ranked, search
from .space import space
from .trial import Bench, NodeBench, labels, peak

__all__ = ["DeviceError", "Tuned", "local_device", "tracked_device", "tune"]

LENGTHS = (32, 128)
"""Lengths that sizes which stay open are measured at."""
_BUILDING = 0.6
"""The share of limited time that compiling may take."""


def tune(
    model: Model,
    target: str = "native",
    shapes: Mapping[str, tuple[int | str, ...]] | None = None,
    database: Path | None = None,
    seconds: float | None = None,
    lengths: Sequence[int] = LENGTHS,
    threads: int = 2,
    device: AbstractContextManager[Device] | None = None,
    progress: Progress | None = None,
) -> Tuned:
    """Measures the schedules of ``model``'s kernels for ``target`` and adds what it finds to ``database``, the user's by default.

    ``shapes`` pins input dimensions, as in ``optimize``; other sizes are measured at each of ``lengths``, with a batch of 1. ``seconds``: after
    which no more is begun; what is measured stays. ``threads``: how many a schedule's work should divide among. ``device``: where, such
    as ``tracked_device``; this machine by default. Problems that the database knows are left alone, candidates that it has are not measured
    again to be ranked.

    Raises what ``optimize`` does, and DeviceError: a device that is not there, or on which not even the heuristic's schedule works.
    """
    start = time.monotonic()
    tell = progress or (lambda stage, fraction: None)
    chosen, records = get(target), Database.read(database or default_path())
    if device is None and chosen.missing():
        raise DeviceError(
            f"{chosen.name} does not run on this machine (it lacks {', '.join(chosen.missing())}): tune on a device that it runs on, "
            "which a tracker knows"
        )
    tell("rewrite", 0.0)
    cases = _cases(model, chosen, shapes, lengths)
    known = [c for c in cases if _is_known(c, records)]
    left = [c for c in cases if c not in known]
    run = _Run(chosen, records, threads, None if seconds is None else start + seconds, tell)
    if left:
        libraries = run.build(left, None if seconds is None else start + _BUILDING * seconds)
        with device or local_device() as connected:
            run.measure(left, libraries, connected)
    tell("done", 1.0)
    problems = tuple(c.problem for c in known)
    took = time.monotonic() - start
    return Tuned(chosen.name, str(records.path), tuple(run.outcomes), problems, run.peak, took, records.notes)


def _cases(
    model: Model, target: Target, shapes: Mapping[str, tuple[int | str, ...]] | None, lengths: Sequence[int]
) -> list[Case]:
    """The distinct problems of ``model``, those with most arithmetic first, so that limited time is for them."""
    loaded = frontend.load(model)
    graph = frontend.to_normal_form(loaded, dict(shapes) if shapes else None).graph
    specs = bound_specs(loaded, graph)
    norms: Counter[NormSpec] = Counter()

    def noted(k: int, n: int, centred: bool) -> bool:
        norms[NormSpec(k, n, centred)] += 1
        return True

    run_pipeline(graph, absorbs=noted)
    sizes = labels([default_sizes(specs, length=length) for length in lengths])
    found: list[Case] = [*cases_of(graph, target, sizes, space), *norm_cases(norms, target, lengths)]
    return sorted(found, key=lambda c: -c.count * math.prod(c.problem.shape))


def _bench(case: Case, target: Target, device: Device, sizes: Mapping[str, int]) -> Bench:
    """How ``case`` is measured."""
    if isinstance(case.spec, NormSpec):
        return PlanBench(case.spec, target, device, sizes)
    if isinstance(case.spec, NodeSpec):
        return NodeBench(case.spec, case.problem, case.resident, target, device, sizes)
    raise TypeError(f"nothing measures a {type(case.spec).__name__}")


def _is_known(case: Case, records: Database) -> bool:
    """Whether the database has the case's best schedule, found among all that there are today and at the same sizes."""
    return records.chosen(case.problem) is not None and len(ranked(case, records)) == len(case.space) - 1


@dataclass
class _Run:
    """A tuning run under way."""

    target: Target
    records: Database
    threads: int
    deadline: float | None
    tell: Progress
    outcomes: list[Outcome] = field(default_factory=list)
    peak: float = 0.0

    def build(self, cases: Sequence[Case], until: float | None) -> dict[Problem, dict[AnySchedule, Built]]:
        """The libraries of all candidates that may be measured, or of as many as are compiled by the time ``until``.

        All are compiled before the first is measured: a compiler beside it would disturb a measurement.
        """
        candidates = [(case, schedule) for case in cases for schedule in self._wanted(case)]
        libraries: dict[Problem, dict[AnySchedule, Built]] = {case.problem: {} for case in cases}
        with builders() as submit:
            for done, ((case, schedule), future) in enumerate(
                zip(candidates, submit(candidates, self.target), strict=True)
            ):
                self.tell("compile", done / len(candidates))
                try:
                    left = None if until is None else max(until - time.monotonic(), 0.0)
                    libraries[case.problem][schedule] = future.result(timeout=left)
                except TimeoutError:
                    break
        return libraries

    def measure(
        self, cases: Sequence[Case], libraries: Mapping[Problem, Mapping[AnySchedule, Built]], device: Device
    ) -> None:
        """Searches each case whose heuristic's library is there, until time is over."""
        for position, case in enumerate(cases):
            built = libraries[case.problem]
            heuristic = built.get(case.space[0])
            if heuristic is None or self._late():
                return
            if heuristic.error:
                raise DeviceError(f"the heuristic's schedule for {case.problem} does not compile: {heuristic.error}")
            modules = {schedule: device.load(b.library) for schedule, b in built.items() if not b.error}
            self.peak = max(self.peak, peak(device, modules[case.space[0]], self.target))
            benches = {at: _bench(case, self.target, device, sizes) for at, sizes in case.sizes.items()}
            advance = partial(self._advance, position, len(cases))
            outcome = search(case, benches, modules, self.records, self.threads, self._late, advance)
            errors = (f"{schedule} does not compile: {b.error}" for schedule, b in built.items() if b.error)
            self.outcomes.append(replace(outcome, failed=(*outcome.failed, *errors)))

    def _wanted(self, case: Case) -> list[AnySchedule]:
        """The heuristic's schedule, those that were never measured, and of the others the best."""
        measured = list(ranked(case, self.records))
        new = [s for s in case.space[1:] if s not in measured]
        return [case.space[0], *new, *measured[: STAGES[1].field]]

    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def _advance(self, position: int, count: int, fraction: float) -> None:
        self.tell("measure", (position + fraction) / count)
