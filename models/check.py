"""Models on real input, from their bundles and in onnxruntime side by side."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import coda_edge
from coda_edge.bench import bench
from coda_edge.verify import ort_session, relative_error

from .catalogue import Model
from .recipe import Feeds, Run

_ROUNDS = 7


@dataclass
class SideBySide:
    """A ``Run`` that answers as ``ours`` does and compares each output with what ``theirs`` makes of the same inputs."""

    ours: Run
    theirs: Run
    #: Worst |difference| over the largest |output|, and the first inputs.
    error: float = 0.0
    feeds: Feeds = field(default_factory=dict)

    def __call__(self, names: Sequence[str] | None, feeds: Mapping[str, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        self.feeds = self.feeds or dict(feeds)
        found = [np.array(a) for a in self.ours(names, feeds)]
        for ours, theirs in zip(found, self.theirs(names, feeds), strict=True):
            self.error = max(self.error, relative_error(ours, np.asarray(theirs)))
        return found


@dataclass(frozen=True)
class Checked:
    """``says``: what the bundle answered; ``error``: its outputs against onnxruntime's, on real input; ``made_up``: on made-up input.

    ``ours_ms``, ``ort_ms`` and ``ratio`` (above 1: we are faster) are of one run on the first real input, on one thread.
    """

    nodes: int
    kernels: int
    says: str
    right: bool
    error: float
    made_up: float | None
    ours_ms: float
    ort_ms: float
    ratio: float
    notes: Sequence[str]


def check(model: Model) -> Checked | None:
    """Optimises ``model`` for this machine and uses it; None where nothing says what it ought to answer.

    Raises what ``coda_edge.optimize`` raises.
    """
    if model.read is None:
        return None
    path = model.path()
    optimized = coda_edge.optimize(path)
    peer = ort_session(str(path), threads=1)
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "model.coda"
        optimized.save(bundle)
        with coda_edge.Session(bundle, threads=1) as session:
            both = SideBySide(session.run, peer.run)
            says = model.read(both)
            times = bench(session, both.feeds, {"onnxruntime": peer}, threads=1, rounds=_ROUNDS)
    report, against = optimized.report, times.against["onnxruntime"]
    return Checked(
        nodes=report.nodes_before,
        kernels=report.kernels,
        says=says,
        right=says == model.says,
        error=both.error,
        made_up=report.max_rel_error,
        ours_ms=times.ours_ms,
        ort_ms=against.ms,
        ratio=against.ratio,
        notes=report.notes,
    )
