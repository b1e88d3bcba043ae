"""The search over made-up times, and the whole of it on a device that TVM's RPC tracker knows: this machine, over loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from lowering import model
from onnx import helper

import coda_edge
from coda_edge import cli, targets, tune
from coda_edge.lower.abi import compile_kernels
from coda_edge.schedule import Database, GemmSchedule, Problem, Record, Schedules
from coda_edge.targets.link import link_shared
from coda_edge.tune.build import build
from coda_edge.tune.case import Case, NodeSpec
from coda_edge.tune.device import DeviceError
from coda_edge.tune.packed import callers, exported
from coda_edge.tune.search import STAGES, Outcome, search
from coda_edge.tune.space import space
from coda_edge.tune.trial import labels

PROBLEM = Problem("x86-64-v3", "gemm", (48, 32))
HEURISTIC, FASTER, SLOWER, CLOSE, WRONG = (GemmSchedule(rows, 1, 8) for rows in (4, 5, 6, 7, 8))
COSTS = {HEURISTIC: 1.0, FASTER: 0.8, SLOWER: 1.5, CLOSE: 0.995, WRONG: 0.1}


@dataclass
class FakeBench:
    """A case whose candidates take ``COSTS``, times a drift of the machine that only interleaving takes out, and ``noise``."""

    case: Case
    noise: float = 0.0
    timed: list[GemmSchedule] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def check(self, module: Any, schedule: GemmSchedule) -> float:
        if schedule == WRONG:
            raise DeviceError("wrong")
        return 0.0

    def time(self, module: Any, schedule: GemmSchedule) -> float:
        self.timed.append(schedule)
        drift = 1.0 + 0.5 * np.sin(len(self.timed) / 200)
        return COSTS[schedule] * drift * (1.0 + self.noise * self.rng.standard_normal())

    def flops(self, module: Any, schedule: GemmSchedule) -> int:
        return 1000

    def balance(self, module: Any, schedule: GemmSchedule, threads: int) -> float:
        return 1.0


def race(
    database: Database, candidates: tuple[GemmSchedule, ...], noise: float = 0.0, stop_after: int = 1 << 30
) -> tuple[Outcome, FakeBench]:
    spec = NodeSpec("Gemm", "g", "coda", {}, (), (), 20)
    case = Case(PROBLEM, spec, {"n=1": {"n": 1}}, candidates)
    bench = FakeBench(case, noise)
    modules = dict.fromkeys(candidates, object())

    def late() -> bool:
        return len(bench.timed) >= stop_after

    found = search(case, {"n=1": bench}, modules, database, 1, late, lambda fraction: None)  # type: ignore[dict-item]
    return found, bench


def test_the_fastest_right_candidate_is_chosen() -> None:
    database = Database()
    found, _ = race(database, (HEURISTIC, SLOWER, WRONG, FASTER))
    assert found.complete and found.changed and found.chosen.schedule == FASTER
    assert found.chosen.relative == pytest.approx(0.8, rel=0.02)
    assert found.failed == ("wrong",)
    assert database.chosen(PROBLEM) == found.chosen
    assert found.rates["n=1"] == pytest.approx(1000 / found.chosen.seconds["n=1"])


def test_within_noise_the_heuristic_stays() -> None:
    assert race(Database(), (HEURISTIC, CLOSE, SLOWER))[0].chosen.schedule == HEURISTIC
    noisy, _ = race(Database(), (HEURISTIC, FASTER), 0.6)
    assert noisy.chosen.schedule == HEURISTIC


def test_fewer_are_measured_in_each_stage() -> None:
    field_ = tuple(GemmSchedule(1, 1, 8, block=i) for i in range(1, 31))
    COSTS.update({s: 1.0 + 0.1 * s.block for s in field_})
    _, bench = race(Database(), (HEURISTIC, *field_))
    counts = [bench.timed.count(s) for s in field_]
    assert counts[:3] == [12] * 3 and counts[3:8] == [5] * 5 and counts[8:] == [2] * 22


def test_a_search_that_was_stopped_goes_on_without_measuring_again(tmp_path: Path) -> None:
    path = tmp_path / "db"
    first, _ = race(Database.read(path), (HEURISTIC, SLOWER, FASTER), stop_after=8)
    assert not first.complete and Database.read(path).chosen(PROBLEM) is None
    assert {FASTER, SLOWER} <= set(Database.read(path).measured(PROBLEM))
    second, bench = race(Database.read(path), (HEURISTIC, SLOWER, FASTER))
    assert second.chosen.schedule == FASTER
    assert bench.timed.count(FASTER) == STAGES[1].rounds + STAGES[2].rounds


def test_sets_of_sizes_have_names_and_equal_ones_are_one() -> None:
    assert labels([{"b": 1, "a": 2}, {"a": 2, "b": 1}]) == {"a=2,b=1": {"a": 2, "b": 1}}
    assert labels([{}, {}]) == {"fixed": {}}


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def _running(*words: str) -> Iterator[None]:
    """A module of TVM's in a process group of its own, ended with everything that it started."""
    command = [sys.executable, "-m", *words]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def tracker() -> Iterator[str]:
    """A tracker, and a server that is known to it as ``here``."""
    for needed in ("cloudpickle", "psutil", "tornado"):
        pytest.importorskip(needed)
    port = _free_port()
    address = f"127.0.0.1:{port}"
    with _running("tvm.exec.rpc_tracker", "--host", "127.0.0.1", "--port", str(port), "--port-end", str(port + 1)):
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        own = _free_port()
        ports = ("--port", str(own), "--port-end", str(own + 1))
        server = ("--host", "127.0.0.1", *ports, "--tracker", address, "--key", "here")
        with _running("tvm.exec.rpc_server", *server):
            yield address


def _product() -> onnx.ModelProto:
    w = np.random.default_rng(0).standard_normal((32, 48)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Tanh", ["p"], ["y"])]
    return model(nodes, {"x": (np.float32, ["batch", "length", 32])}, ["y"], {"w": w})


def _few(problem: Problem, node: Any, target: targets.Target) -> tuple[GemmSchedule, ...]:
    """The heuristic's schedule and two more."""
    first, *others = space(problem, node, target)
    assert isinstance(first, GemmSchedule)
    return first, *(s for s in others[:2] if isinstance(s, GemmSchedule))


def test_tuning_on_a_tracked_device(tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three schedules are measured there, their results being right; a second run knows them; optimize takes the chosen one."""
    monkeypatch.setattr(tune, "space", _few)
    source, database = tmp_path / "m.onnx", tmp_path / "db.jsonl"
    onnx.save(_product(), source)
    options = ["--tracker", tracker, "--key", "here", "--database", str(database), "--length", "7", "--json"]
    first = CliRunner().invoke(cli.main, ["tune", str(source), *options])
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    (problem,) = found["problems"]
    assert (problem["kind"], problem["shape"], problem["epilogue"]) == ("gemm", [48, 32], "costly")
    assert problem["measured"] == 3 and problem["complete"] and not problem["failed"]
    assert found["peak_gflops"] > 0 and all(share > 0 for share in problem["of_peak"].values())
    known = Database.read(database)
    assert len(known.records()) == 3 and known.notes == ()

    second = json.loads(CliRunner().invoke(cli.main, ["tune", str(source), *options]).stdout)
    assert second["problems"] == [] and len(second["known"]) == 1
    (key,) = {r.problem for r in known.records()}
    chosen = known.chosen(key)
    assert chosen is not None
    slow = GemmSchedule(2, 1, targets.get().lanes(4))
    known.add(Record(key, slow, chosen=True))
    error = coda_edge.optimize(_product(), schedules=Schedules.packaged(Database.read(database))).report.max_rel_error
    assert error is not None and error < 1e-5

    with tune.tracked_device(tracker, "here") as device:
        case = _case(targets.get())
        built = build(case.spec, case.problem, case.space[0], targets.get())
        bench = tune._bench(case, targets.get(), device, case.sizes["batch=1,length=7"])
        module = device.load(built.library)
        assert bench.check(module, case.space[0]) < 1e-5
        assert bench.time(module, case.space[0]) > 0
        wrong = device.load(_zeros(case))
        with pytest.raises(DeviceError, match="off by"):
            bench.check(wrong, case.space[0])


def _case(target: targets.Target) -> Case:
    (case,) = tune._cases(_product(), target, None, (7,))
    return case


def _zeros(case: Case) -> bytes:
    """A candidate's library, but with a kernel that does nothing."""
    target = targets.get()
    symbols = [[k.symbol for k in call] for call in case.spec.kernels(target, case.problem, case.space[0])]
    from tvm import tirx

    from coda_edge.lower.body import Body, external

    body = Body()
    out = external("out")
    ints = [tirx.Var(name, "int64") for name in ("rows", "begin", "end")]
    body.store(out, 0, tirx.const(0.0, "float32"))
    kernel = body.function(symbols[0][0], [out, *ints])
    text = callers(symbols, target.lanes(4))
    return link_shared([compile_kernels([kernel], target.tvm, text)], exported(symbols), target.triple)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--tracker", "nowhere", "--key", "k"], "HOST:PORT"),
        (["--tracker", "127.0.0.1:9", "--key", "k"], "no RPC tracker at"),
        (["--tracker", "127.0.0.1:9"], "go together"),
        (["--target", "arm64-linux"], "does not run on this machine"),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, words: list[str], reason: str) -> None:
    source = tmp_path / "m.onnx"
    onnx.save(_product(), source)
    result = CliRunner().invoke(cli.main, ["tune", str(source), "--database", str(tmp_path / "db"), *words])
    assert result.exit_code in (1, 2) and reason in result.output
    assert not (tmp_path / "db").exists()


@pytest.mark.parametrize("command", [["tune"], ["optimize", "--tune", "9"], ["optimize"]], ids=" ".join)
def test_a_database_that_cannot_be_read(tmp_path: Path, command: list[str]) -> None:
    """It is refused before anything is measured."""
    source = tmp_path / "m.onnx"
    onnx.save(_product(), source)
    result = CliRunner().invoke(cli.main, [*command, str(source), "--database", str(tmp_path)])
    assert result.exit_code == 1
    assert f"FileError: {tmp_path}: the database of schedules cannot be read" in result.output
    assert not (tmp_path / "m.coda").exists()


def test_a_bundle_is_not_tuned(tmp_path: Path) -> None:
    bundle = tmp_path / "m.coda"
    bundle.write_bytes(b"")
    result = CliRunner().invoke(cli.main, ["tune", str(bundle)])
    assert result.exit_code == 1 and "ONNX model that it was made from" in result.output
