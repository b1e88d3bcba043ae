"""What is built before anything is timed: our bundle of a model, and what each other engine makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import coda_edge

from .measure import Measured, measure, reference
from .peers import Feeds, Peer
from .suite import Case
from .trial import tried


@dataclass(frozen=True)
class Prepared:
    """``peers``: those that run the model, each with its folder; ``absent``: why others do not."""

    case: Case
    model: Path
    feeds: Feeds
    bundle: Path
    peers: Mapping[str, tuple[Peer, Path]]
    absent: Mapping[str, str]

    def measure(self, threads: int, seconds: float, rounds: int | None) -> Measured:
        """As ``measure.measure``."""
        expected = reference((self.case.reference or self.case.path)(), self.feeds)
        return measure(
            self.case.title,
            self.bundle,
            self.model,
            self.feeds,
            expected,
            self.peers,
            self.absent,
            threads,
            seconds,
            rounds,
        )


def prepare(case: Case, folder: Path, chosen: Sequence[Peer], target: str) -> Prepared:
    """Builds what ``folder`` doesn't hold yet. Raises what ``coda_edge.optimize`` raises."""
    model, feeds, bundle = case.path(), case.feeds(), folder / f"{target}.coda"
    if not bundle.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        coda_edge.optimize(model, target=target, verify=False).save(bundle)
    reasons = {peer.name: tried(peer, model, feeds, folder / peer.name) for peer in chosen}
    here = {peer.name: (peer, folder / peer.name) for peer in chosen if not reasons[peer.name]}
    return Prepared(case, model, feeds, bundle, here, {name: reason for name, reason in reasons.items() if reason})


def prepare_apart(commands: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Runs ``benchmarks.cpu`` with each of ``commands``, on all cores; as each ends, its name and what went wrong, if anything."""

    def build(arguments: Sequence[str]) -> str:
        command = [sys.executable, "-m", "benchmarks.cpu", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return lines[-1] if done.returncode else ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = {pool.submit(build, arguments): name for name, arguments in commands.items()}
        for future in as_completed(waiting):
            yield waiting[future], future.result()
