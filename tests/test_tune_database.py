"""The database of schedules: lines in and out, what is ignored, which record counts, and that lowering asks for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from coda_edge.passes import run_pipeline
from lowering import model
from onnx import helper

import coda_edge
from coda_edge import frontend, targets
from coda_edge.epilogue.program import EpilogueProgram
from coda_edge.lower import lower
from coda_edge.lower.weights import WeightFormat
from coda_edge.schedule import (
    Database,
    GemmSchedule,
    NormForm,
    Problem,
    Record,
    Schedules,
    default_path,
    epilogue_class,
    fixed,
    format_class,
    rows_bucket,
)

PROBLEM = Problem("x86-64-v3", "gemm", (1152, 384), "heads+cut")
SCHEDULE = GemmSchedule(4, 3, 8)
OTHER = GemmSchedule(6, 2, 8, block=64)


def record(schedule: GemmSchedule = SCHEDULE, relative: float = 0.9, chosen: bool = True) -> Record:
    return Record(PROBLEM, schedule, relative, {"sequence=128": 1.25e-3}, 9, chosen)


def test_lines_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "schedules.jsonl"
    database = Database.read(path)
    records = [record(), record(OTHER, 1.1, False), Record(replace(PROBLEM, kind="norm"), NormForm(False), chosen=True)]
    for r in records:
        database.add(r)
    again = Database.read(path)
    assert again.records() == records == database.records()
    assert again.chosen(PROBLEM) == records[0]
    assert set(again.measured(PROBLEM)) == {SCHEDULE, OTHER}
    assert again.notes == ()


def test_the_later_line_counts(tmp_path: Path) -> None:
    path = tmp_path / "db"
    for r in (record(), record(OTHER), record(relative=0.8), record(OTHER, chosen=False)):
        Database.read(path).add(r)
    known = Database.read(path)
    assert known.chosen(PROBLEM) == record(relative=0.8)
    assert known.measured(PROBLEM)[OTHER] == record(OTHER, chosen=False)
    Database.read(path).add(record(chosen=False))
    assert Database.read(path).chosen(PROBLEM) is None


def test_a_line_torn_by_a_kill_is_left_out_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "db"
    Database.read(path).add(record())
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    Database.read(path).add(record(OTHER))
    again = Database.read(path)
    assert set(again.measured(PROBLEM)) == {SCHEDULE, OTHER}
    assert len(again.notes) == 1 and "1 lines" in again.notes[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 99}, "version 99"),
        ({"kind": "sorting"}, "'sorting' are not known"),
        ({"schedule": {"rows": 4, "vectors": 3, "lanes": 8, "colour": 1}}, "no longer has colour"),
        ({"schedule": {"rows": 4}}, "more fields"),
        ({"schedule": {"rows": 1 << 30, "vectors": 3, "lanes": 8}}, "out of range"),
        ({"relative": None}, "no records"),
    ],
)
def test_what_does_not_fit_is_ignored_with_a_note(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    path = tmp_path / "db"
    path.write_text(json.dumps(json.loads(record().to_line()) | change) + "\n" + record(OTHER).to_line() + "\n")
    known = Database.read(path)
    assert known.records() == [record(OTHER)]
    assert len(known.notes) == 1 and reason in known.notes[0] and str(path) in known.notes[0]


def test_a_record_without_a_field_that_is_new_has_its_default(tmp_path: Path) -> None:
    path = tmp_path / "db"
    path.write_text(json.dumps(json.loads(record().to_line()) | {"schedule": {"rows": 4, "vectors": 3, "lanes": 8}}))
    assert list(Database.read(path).measured(PROBLEM)) == [SCHEDULE]


def test_the_first_database_that_knows_decides_and_many_rows_are_a_case_of_any() -> None:
    wide = replace(PROBLEM, rows=128)
    mine, theirs = Database.of([record(OTHER)]), Database.of([record(), replace(record(), problem=wide)])
    assert Schedules((mine, theirs)).gemm(PROBLEM) == OTHER
    assert Schedules((theirs, mine)).gemm(PROBLEM) == SCHEDULE
    assert Schedules((mine, theirs)).gemm(wide) == SCHEDULE
    assert Schedules((mine,)).gemm(wide) == OTHER
    assert Schedules((mine,)).gemm(replace(PROBLEM, shape=(384, 384))) is None
    assert Schedules((mine,)).attention(PROBLEM) is None


def test_rows_are_told_apart_by_powers_of_two() -> None:
    assert [rows_bucket(n) for n in (1, 2, 3, 128, 129)] == [1, 2, 4, 128, 256]


def test_what_the_package_brings_is_for_targets_and_schedules_of_today() -> None:
    (database,) = Schedules.packaged().databases
    assert database.notes == ()
    known = targets.targets()
    for r in database.records():
        assert r.chosen and r.problem.target in known
        if isinstance(r.schedule, GemmSchedule):
            assert r.schedule.lanes == known[r.problem.target].lanes(4)


def test_where_the_users_database_is() -> None:
    assert default_path({"XDG_CACHE_HOME": "/x"}) == Path("/x/coda-edge/schedules.jsonl")
    relative = default_path({"XDG_CACHE_HOME": "x"})
    assert relative == default_path({}) == Path.home() / ".cache/coda-edge/schedules.jsonl"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(acc: tile f32, b: col f32) -> (y: tile = v0) {\n  v0 = add acc b\n}", ""),
        (
            "(acc: tile f32, r: tile f32) -> (y: tile = v0, m: row = v1) {\n  v0 = add acc r\n  v1 = sum v0\n}",
            "reduce+tile",
        ),
        ("(acc: tile f32) -> (y: tile = v1) {\n  v0 = even acc\n  v1 = tanh v0\n}", "halves2+costly"),
        ("(acc: tile f32, s: row f32) -> (y: tile = v1) {\n  v0 = exp s\n  v1 = mul acc v0\n}", ""),
    ],
)
def test_epilogue_classes(text: str, words: str) -> None:
    assert epilogue_class(EpilogueProgram.parse(text)) == words


def test_weight_formats_are_told_apart() -> None:
    assert format_class(WeightFormat()) == "float32"
    assert format_class(WeightFormat("float16", scaled=True)) == "float16+scaled"


def test_lowering_takes_the_known_schedule_and_computes_the_same() -> None:
    target = targets.get()
    w = np.random.default_rng(0).standard_normal((24, 40)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    product = model(nodes, {"x": (np.float32, ["rows", 24])}, ["y"], {"w": w})
    other = GemmSchedule(2, 1, target.lanes(4), block=2)
    known = fixed(Problem(target.measured_as, "gemm", (40, 24)), other)

    def kernels(schedules: Schedules | None) -> list[str]:
        graph = frontend.to_normal_form(product).graph
        run_pipeline(graph)
        return [k.symbol for k in lower(graph, target, (), schedules).kernels]

    assert kernels(known) != kernels(Schedules()) == kernels(None)
    error = coda_edge.optimize(product, schedules=known).report.max_rel_error
    assert error is not None and error < 1e-6
