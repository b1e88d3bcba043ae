"""One model on one number of threads: all engines in turn in one run, their outputs compared, and what the machine could do meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from coda_edge import targets
from coda_edge.bench import BLOCK_SECONDS, PAUSE_SECONDS, blocks
from coda_edge.errors import InvalidModel
from coda_edge.inputs import default_sizes, generate_inputs, input_specs
from coda_edge.session import Session, StepProfile
from coda_edge.verify import LENGTHS, ort_session, relative_error

from .peers import Call, Feeds, Peer
from .roofs import Roofs, sampling

OURS = "coda-edge"
_KERNELS, _MACHINE = "kernels", "machine"
#: An engine that is further from the reference than this answers something else, and its time counts for nothing.
WRONG = 0.1
_ROUNDS = (5, 15)
_LEAST_CALLS = 2
# An engine so many times slower than ours is measured in few rounds.
_SLOW, _SLOW_ROUNDS = 8.0, 2


@dataclass(frozen=True)
class Engine:
    """``ms``: the median of rounds; ``ratio`` of its time to ours, the median over rounds; ``error``: against the reference.

    ``reason``: why there are no numbers.
    """

    name: str
    ms: float = float("nan")
    best_ms: float = float("nan")
    ratio: float = float("nan")
    error: float = float("nan")
    reason: str = ""

    @property
    def right(self) -> bool:
        return not self.reason and self.error <= WRONG


@dataclass(frozen=True)
class Kernel:
    """One kernel call of a run, as ``session.StepProfile`` has it; ``ns``: the median of all profiles, ``best_ns``: the least."""

    name: str
    kernel: str
    source: str
    ns: float
    best_ns: float
    flops: int
    bytes: int


@dataclass(frozen=True)
class Measured:
    """``engines``: ours first. ``flops`` and ``bytes`` are those of all ``kernels`` together.

    ``inside_ms``: what a run spends in kernels, the median over profiled runs: in noise it is more than the sum of the kernels' medians.
    """

    title: str
    threads: int
    rounds: int
    roofs: Roofs
    engines: Sequence[Engine]
    kernels: Sequence[Kernel] = field(default=())
    inside_ms: float = float("nan")

    @property
    def ours(self) -> Engine:
        return self.engines[0]

    @property
    def flops(self) -> int:
        return sum(k.flops for k in self.kernels)

    @property
    def bytes(self) -> int:
        return sum(k.bytes for k in self.kernels)

    @property
    def of_peak(self) -> float:
        """The arithmetic of a run over its median time, as a fraction of the FMA peak."""
        return self.flops / (self.ours.ms * 1e-3) / self.roofs.flops

    @property
    def best_of_peak(self) -> float:
        """The same of the fastest run."""
        return self.flops / (self.ours.best_ms * 1e-3) / self.roofs.flops

    @property
    def of_memory(self) -> float:
        """The bytes that a run moves, each tensor once for each kernel, over its median time, as a fraction of what memory delivers."""
        return self.bytes / (self.ours.ms * 1e-3) / self.roofs.memory

    def best(self, against: Sequence[str] = ()) -> Engine | None:
        """The fastest other engine that answers right, of those named or of all."""
        others = [e for e in self.engines[1:] if e.right and (not against or e.name in against)]
        return min(others, key=lambda e: e.ratio, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values: what is measured and what follows from it."""
        shares = {"of_peak": self.of_peak, "best_of_peak": self.best_of_peak, "of_memory": self.of_memory}
        return {**asdict(self), "flops": self.flops, "bytes": self.bytes, **shares}


def made_up(model: Path) -> dict[str, npt.NDArray[Any]]:
    """Inputs of batch 1 and the greatest length up to 128 on which onnxruntime runs the model.

    Raises InvalidModel if it refuses the model or runs it on none.
    """
    session = ort_session(str(model))
    specs = input_specs(onnx.load(model, load_external_data=False))
    for length in LENGTHS:
        feeds = generate_inputs(specs, default_sizes(specs, 1, length))
        try:
            session.run(None, feeds)
        except Exception as error:  # onnxruntime's errors have no common class of their own
            refusal = error
        else:
            return feeds
    raise InvalidModel(f"onnxruntime runs {model.name} on no made-up inputs: give some with --inputs ({refusal})")


def reference(model: Path, feeds: Feeds) -> list[npt.NDArray[Any]]:
    """What onnxruntime makes of it without optimisations: every operator as it is defined. Raises InvalidModel if it doesn't run."""
    session = ort_session(str(model), plain=True)
    try:
        return [np.asarray(o) for o in session.run([o.name for o in session.get_outputs()], dict(feeds))]
    except Exception as error:  # onnxruntime's errors have no common class of their own
        raise InvalidModel(f"onnxruntime does not run {model.name} on these inputs: {error}") from error


def measure(
    title: str,
    bundle: Path,
    model: Path,
    feeds: Feeds,
    expected: Sequence[npt.NDArray[Any]],
    peers: Mapping[str, tuple[Peer, Path]],
    absent: Mapping[str, str],
    threads: int,
    seconds: float,
    rounds: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Measured:
    """Times ``bundle`` against ``peers``, each with the folder that it prepared ``model`` in; ``absent`` says why others are not there.

    ``seconds``: about how long, of which ``rounds`` follow unless they are given.
    """
    with Session(bundle, threads=threads) as session, sampling(threads, level(session.target)) as machine:
        calls: dict[str, Call] = {OURS: lambda: session.run(None, feeds)}
        reasons = dict(absent)
        for name, (peer, folder) in peers.items():
            try:
                calls[name] = peer.load(model, feeds, folder, threads)
            except Exception as error:  # whatever a peer raises is the reason
                reasons[name] = f"{type(error).__name__}: {error}"
        once: dict[str, float] = {}
        errors: dict[str, float] = {}
        for name, call in calls.items():
            found = [np.array(o) for o in call()]
            errors[name] = max(map(relative_error, found, expected), default=0.0)
            start = time.perf_counter()
            call()
            once[name] = time.perf_counter() - start
        slow = [name for name in calls if once[name] > _SLOW * once[OURS]]
        quick = {name: call for name, call in calls.items() if name not in slow}
        count = rounds or _rounds([once[name] for name in (*quick, OURS)], seconds)
        profiles: list[list[StepProfile]] = []
        # Our kernels and the machine itself have their turns too: what they reach drifts with the machine as all else does.
        beside: dict[str, Callable[[], object]] = {
            _KERNELS: lambda: profiles.append(session.profile(feeds)),
            _MACHINE: machine.sample,
        }
        times = blocks({**quick, **beside}, count, progress, least=_LEAST_CALLS)
        engines = [_engine(name, times, errors[name]) for name in quick]
        for name in slow:
            apart = {OURS: calls[OURS], name: calls[name]}
            engines.append(_engine(name, blocks(apart, _SLOW_ROUNDS, block=0.0, least=1), errors[name]))
    engines += [Engine(name, reason=reason) for name, reason in reasons.items()]
    inside_ms = float(np.median([sum(step.ns for step in steps) for steps in profiles])) * 1e-6
    return Measured(title, threads, count, machine.best(), engines, _kernels(profiles), inside_ms)


def level(target: str) -> str:
    """The instruction set of float32 kernels for ``target``, as a compiler names it."""
    return targets.get(target).cpu if target.startswith("x86-64-") else "native"


def _kernels(profiles: Sequence[Sequence[StepProfile]]) -> list[Kernel]:
    """Each step of the plan over all profiles."""
    return [
        Kernel(
            steps[0].name,
            steps[0].kernel,
            steps[0].source,
            ns=float(np.median([step.ns for step in steps])),
            best_ns=min(step.ns for step in steps),
            flops=steps[0].flops,
            bytes=steps[0].bytes,
        )
        for steps in zip(*profiles, strict=True)
    ]


def _rounds(once: Sequence[float], seconds: float) -> int:
    """As many as ``seconds`` allow, of contenders whose calls take ``once``, and the machine's own turn."""
    one = sum(PAUSE_SECONDS + call + max(BLOCK_SECONDS, _LEAST_CALLS * call) for call in (*once, 0.0))
    return int(np.clip(seconds / one, *_ROUNDS))


def _engine(name: str, times: Mapping[str, Sequence[npt.NDArray[np.float64]]], error: float) -> Engine:
    medians = {n: np.array([np.median(taken) for taken in rows]) for n, rows in times.items()}
    return Engine(
        name,
        ms=float(np.median(medians[name])) * 1e3,
        best_ms=float(min(taken.min() for taken in times[name])) * 1e3,
        ratio=float(np.median(medians[name] / medians[OURS])),
        error=error,
    )
