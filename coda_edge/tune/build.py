"""Candidates compiled by processes that stay: each loads TVM once, which takes longer than to compile a kernel."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import CodaError
from ..schedule import AnySchedule, Problem
from ..targets.link import link_shared
from ..targets.target import Target
from .case import Case, Spec
from .packed import callers, exported


@dataclass(frozen=True)
class Built:
    """A candidate's library; or why there is none."""

    library: bytes = b""
    error: str = ""


def build(spec: Spec, problem: Problem, schedule: AnySchedule, target: Target) -> Built:
    """The library of a candidate: its kernels, and the functions by which TVM's runtime calls them."""
    from ..lower.abi import compile_kernels

    try:
        calls = spec.kernels(target, problem, schedule)
        functions = {source.symbol: source.func for call in calls for source in call}
        symbols = [[source.symbol for source in call] for call in calls]
        compiled = compile_kernels(list(functions.values()), target.tvm, callers(symbols, target.lanes(4)))
        return Built(link_shared([compiled], exported(symbols), target.triple))
    except (CodaError, RuntimeError, ValueError, TypeError) as e:  # TVM's errors are these
        return Built(error=" ".join(str(e).split())[-300:] or type(e).__name__)


@contextmanager
def builders(
    workers: int | None = None,
) -> Iterator[Callable[[Sequence[tuple[Case, AnySchedule]], Target], list[Future[Built]]]]:
    """A pool of ``workers`` processes, one for each core by default; yields what submits candidates to it."""
    with ProcessPoolExecutor(workers or _cores(), multiprocessing.get_context("spawn")) as pool:

        def submit(candidates: Sequence[tuple[Case, AnySchedule]], target: Target) -> list[Future[Built]]:
            return [pool.submit(build, case.spec, case.problem, schedule, target) for case, schedule in candidates]

        try:
            yield submit
        finally:
            pool.shutdown(cancel_futures=True)


def _cores() -> int:
    """The cores that this process may use, where the system says it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
