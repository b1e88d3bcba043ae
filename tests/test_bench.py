"""The benchmark's bookkeeping, on a clock that only the contenders move: turns, warm-up, ratios, errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from coda_edge import bench


@dataclass
class _Clock:
    now: float = 0.0
    slept: list[float] = field(default_factory=list)

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@dataclass
class _Engine:
    """Takes the next of ``seconds`` for each call, and returns ``output``."""

    clock: _Clock
    seconds: Iterator[float]
    output: np.ndarray
    name: str = ""
    target: str = "some-cpu"
    calls: list[str] = field(default_factory=list)

    def get_outputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="y")]

    def get_inputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="x")]

    def run(self, names: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        assert names == ["y"] and list(feeds) == ["x"]
        self.calls.append(self.name)
        self.clock.now += next(self.seconds)
        return [self.output]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(bench, "time", clock)
    return clock


def _forever(*seconds: float) -> Iterator[float]:
    while True:
        yield from seconds


def test_blocks_take_turns_in_alternating_order(clock: _Clock) -> None:
    calls: list[str] = []
    fractions: list[float] = []
    contenders = {name: (lambda name=name: calls.append(name)) for name in ("a", "b")}

    # With a block of no length, every block is a warm-up and four calls.
    times = bench.alternate(contenders, 3, fractions.append, pause=0.25, block=0.0)

    assert "".join(calls) == "aaaaabbbbb" + "bbbbbaaaaa" + "aaaaabbbbb"
    assert {name: t.shape for name, t in times.items()} == {"a": (3,), "b": (3,)}
    assert fractions == pytest.approx([1 / 3, 2 / 3, 1])
    assert clock.slept == [0.25] * 6


def test_a_block_is_the_median_of_all_calls_but_the_first(clock: _Clock) -> None:
    seconds = iter([9.0, 1.0, 2.0, 5.0, 3.0, 4.0])

    def call() -> None:
        clock.now += next(seconds)

    assert bench.alternate({"a": call}, 1, block=14.5)["a"].tolist() == [3.0]


def test_ratio_is_the_median_of_their_time_over_ours_round_by_round(clock: _Clock) -> None:
    reference = np.array([1.0, -4.0, np.inf])
    drifting = iter([1.0] * 6 + [2.0] * 5 + [4.0] * 5)
    ours = _Engine(clock, drifting, reference * 1.001)
    theirs = _Engine(clock, (1.5 * s for s in [1.0] * 6 + [2.0] * 5 + [4.0] * 5), reference)

    result = bench.bench(ours, {"x": np.zeros((2, 3))}, {"other": theirs}, threads=2, rounds=3)

    assert result.to_json() == {
        "ours_ms": 2000.0,
        "against": {"other": {"ms": 3000.0, "ratio": 1.5, "max_rel_error": pytest.approx(1e-3)}},
        "max_rel_error": pytest.approx(1e-3),
        "threads": 2,
        "rounds": 3,
        "shapes": {"x": [2, 3]},
        "target": "some-cpu",
    }


def test_without_peers_there_is_no_error(clock: _Clock) -> None:
    result = bench.bench(_Engine(clock, _forever(0.5), np.zeros(3)), {"x": np.zeros(1)}, rounds=2)
    assert (result.ours_ms, result.against, result.max_rel_error) == (500.0, {}, None)
