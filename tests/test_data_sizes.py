"""Sizes that data decides: the runtime lays out and runs a plan phase by phase, and refuses what cannot be."""

from __future__ import annotations

import struct
from collections.abc import Callable
from hashlib import sha256

import handmade
import numpy as np
import pytest

from coda_edge import Session
from coda_edge.bundle import Buffer, BufferKind, Read, Relation, from_bytes, to_bytes
from coda_edge.bundle import format as fmt
from coda_edge.errors import BundleError, ShapeError


def chain(depth: int) -> handmade.HandPlan:
    """``depth`` times: the places of what is not zero in the tensor before; each is an output too."""
    p = handmade.HandPlan()
    x, size = p.input("x", "int64", "n"), "n"
    number = p.output("number", "int64", 1)
    for i in range(depth):
        found = p.arena("int64", 1)
        p.step("count", [x, found], [size], 1)
        p.read(f"d{i}", found)
        y = p.output(f"y{i}", "int64", f"d{i}")
        p.step("nonzero", [x, y, number], [size, 0], 1)
        x, size = y, f"d{i}"
    return p


@pytest.mark.parametrize("threads", [1, 2])
def test_an_output_is_as_long_as_data_says(threads: int) -> None:
    session = Session(to_bytes(handmade.places().bundle()), threads=threads)
    assert [o.shape for o in session.get_outputs()] == [[1], ["found"]]
    rng = np.random.default_rng(0)
    assert session.data_sizes == {}
    for n in [5, 5, 1000, 5, 0, 3, 20_000, 5]:
        x = rng.integers(0, 3, n)
        _, y = session.run(None, {"x": x})
        np.testing.assert_array_equal(y, 3 * np.flatnonzero(x))
        assert session.data_sizes == {"found": np.count_nonzero(x)}
        y[...] = 0  # the caller's own


def test_phases_follow_each_other() -> None:
    session = Session(to_bytes(chain(5).bundle()), threads=2)
    rng = np.random.default_rng(1)
    for n in [100, 100, 1, 0, 4000, 100]:
        x = rng.integers(0, 2, n)
        _, *found = session.run(None, {"x": x})
        for y in found:
            x = np.flatnonzero(x)
            np.testing.assert_array_equal(y, x)
    last, first, same = session.run(["y4", "y0", "y4"], {"x": np.ones(9, np.int64)})
    assert first.tolist() == list(range(9)) and last.tolist() == same.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_arenas_are_those_of_the_last_run() -> None:
    session = Session(to_bytes(handmade.places().bundle()), threads=1)
    session.run(None, {"x": np.ones(800, np.int64)})
    assert session.arena_bytes == 64 + 2 * 6400
    session.run(None, {"x": np.zeros(800, np.int64)})
    assert session.arena_bytes == 64


def test_a_size_can_be_an_element_of_an_input() -> None:
    p = handmade.HandPlan()
    count, x = p.input("count", "int32", 2), p.input("x", "int64", "n")
    p.read("m", count, "int32", 1)
    y = p.output("y", "int64", "m")
    p.step("mix", [x, x, y], [0, "n", "n"], "m")
    p.require("m", Relation.AT_MOST, "n", "at most x")
    session = Session(to_bytes(p.bundle()))
    x = np.arange(7)
    for m in (3, 7, 0):
        (y,) = session.run(None, {"count": np.array([9, m], np.int32), "x": x})
        np.testing.assert_array_equal(y, x[:m])
    with pytest.raises(ShapeError, match="size 'm' is -4, expected 0 or more"):
        session.run(None, {"count": np.array([9, -4], np.int32), "x": x})
    with pytest.raises(ShapeError, match="m = 8 exceeds n = 7: at most x"):
        session.run(None, {"count": np.array([9, 8], np.int32), "x": x})
    (y,) = session.run(None, {"count": np.array([9, 2], np.int32), "x": x})
    np.testing.assert_array_equal(y, x[:2])


IMPOSSIBLE = [
    ("m", -1, "size 'm' is -1, expected 0 or more"),
    ("2*m - m*m", 3, "dimension 0 = -3"),
    ("m", 2**62, "larger than memory can be|bytes for these inputs|beyond 64 bits"),
    ("m*m*m", 2**40, "beyond 64 bits"),
    ("m", 2**55, "no memory"),
    ("100//m", 0, "divides by 0"),
]


@pytest.mark.parametrize(("size", "value", "match"), IMPOSSIBLE)
def test_impossible_sizes_are_errors(size: str, value: int, match: str) -> None:
    p = handmade.HandPlan()
    m = p.input("m", "int64", 1)
    p.read("m", m)
    y = p.output("y", "int64", size)
    p.step("mix", [m, m, y], [1, 1, 1], size)
    session = Session(to_bytes(p.bundle()), threads=1)
    (y,) = session.run(None, {"m": np.array([1])})
    assert y.size in (1, 100)
    for _ in range(2):
        with pytest.raises((ShapeError, MemoryError), match=match):
            session.run(None, {"m": np.array([value])})
    (y,) = session.run(None, {"m": np.array([1])})
    assert y.size in (1, 100)


def test_outputs_that_do_not_fit_together() -> None:
    """Four of 2⁶² bytes are 2⁶⁴, which an address cannot count."""
    p = handmade.HandPlan()
    m = p.input("m", "int64", 1)
    p.read("m", m)
    for i in range(4):
        y = p.output(f"y{i}", "int64", "m")
        p.step("mix", [m, m, y], [1, 1, 1], "m")
    session = Session(to_bytes(p.bundle()), threads=1)
    with pytest.raises((ShapeError, MemoryError), match="no memory"):
        session.run(None, {"m": np.array([2**59 - 8])})
    assert [y.shape for y in session.run(None, {"m": np.array([2])})] == [(2,)] * 4


def test_an_element_beyond_its_tensor() -> None:
    p = handmade.HandPlan()
    x = p.input("x", "int64", "n")
    p.read("m", x, element=3)
    y = p.output("y", "int64", "m")
    p.step("mix", [x, x, y], [1, "n", "n"], "m")
    session = Session(to_bytes(p.bundle()), threads=1)
    assert session.run(None, {"x": np.array([9, 9, 9, 2])})[0].tolist() == [18, 18]
    with pytest.raises(ShapeError, match="size 'm' is element 3 of a tensor of 24 bytes"):
        session.run(None, {"x": np.array([9, 9, 9])})


def test_the_number_of_a_run_follows_from_the_seed() -> None:
    data = to_bytes(handmade.places().bundle())
    x = {"x": np.ones(3, np.int64)}

    def numbers(session: Session) -> list[int]:
        return [int(session.run(["number"], x)[0][0]) for _ in range(3)]

    first = Session(data, seed=7)
    drawn = numbers(first)
    assert len(set(drawn)) == 3
    assert numbers(Session(data, seed=7)) == drawn
    assert numbers(Session(data, seed=8)) != drawn
    assert numbers(Session(data)) != numbers(Session(data))
    first.seed(7)
    assert numbers(first) == drawn


def test_round_trip() -> None:
    bundle = handmade.places().bundle()
    back = from_bytes(to_bytes(bundle))
    assert back.best.plan.reads == bundle.best.plan.reads == [Read("found", 1, 2)]
    assert back.best.plan.exprs.entries == bundle.best.plan.exprs.entries and back.best.plan.exprs.data == ["found"]
    values = back.best.plan.exprs.evaluate({"n": 10, "found": 4})
    assert values[back.best.plan.outputs[1].dims[0]] == 4


def _broken(change: Callable[[handmade.HandPlan], None]) -> bytes:
    p = handmade.places()
    change(p)
    return to_bytes(p.bundle())


def _set_read(**fields: int | str) -> Callable[[handmade.HandPlan], None]:
    def change(p: handmade.HandPlan) -> None:
        p.plan.reads[0] = Read(**{**vars(p.plan.reads[0]), **fields})

    return change


def _unknown_size(p: handmade.HandPlan) -> None:
    step = p.plan.steps[0]
    p.plan.steps[0] = type(step)(**{**vars(step), "items": p.size("found")})


def _early_buffer(p: handmade.HandPlan) -> None:
    p.plan.buffers[2] = Buffer(BufferKind.ARENA, p.size("8*found"), 0, 0, 0)


def _random_size(p: handmade.HandPlan) -> None:
    p.require("run number", Relation.AT_MOST, 3, "")


def _random_output(p: handmade.HandPlan) -> None:
    p.output("z", "int64", "run number")


def _input_by_data(p: handmade.HandPlan) -> None:
    p.input("z", "int64", "found")


def _early_output(p: handmade.HandPlan) -> None:
    step = p.plan.steps[0]
    p.plan.steps[0] = type(step)(**{**vars(step), "buffers": (0, 3)})


BROKEN = [
    (_set_read(step=9), "read before step 9 of 4"),
    (_set_read(step=0), "does not hold it"),
    (_set_read(step=3), "does not hold it|size that is not known"),
    (_set_read(buffer=99), "buffer 99"),
    (_set_read(buffer=3), "does not hold it"),
    (_set_read(dtype="float32"), "type 1"),
    (_unknown_size, "a size that is not known when it is run"),
    (_early_buffer, "size that is not known when it is needed"),
    (_random_size, "never known"),
    (_random_output, "not known"),
    (_input_by_data, "not known"),
    (_early_output, "outside its life"),
]


@pytest.mark.parametrize(("change", "match"), BROKEN)
def test_contradictions_are_refused(change: Callable[[handmade.HandPlan], None], match: str) -> None:
    with pytest.raises(BundleError, match=match):
        Session(_broken(change))


def test_reads_are_in_order() -> None:
    p = chain(3)
    p.plan.reads[0], p.plan.reads[2] = p.plan.reads[2], p.plan.reads[0]
    with pytest.raises(BundleError, match="out of order"):
        Session(to_bytes(p.bundle()))


def test_readers_survive_nonsense() -> None:
    data = to_bytes(chain(3).bundle())
    _, _, offset, length, _ = fmt.ENTRY.unpack_from(data, 32)
    rng = np.random.default_rng(3)
    refused = 0
    for _ in range(600):
        changed = bytearray(data)
        for _ in range(int(rng.integers(1, 3))):
            struct.pack_into("<B", changed, offset + int(rng.integers(length)), int(rng.integers(256)))
        changed[56:88] = sha256(changed[offset : offset + length]).digest()
        changed[312:344] = sha256(changed[:312]).digest()
        for reader in (from_bytes, Session):
            try:
                reader(bytes(changed))
            except BundleError:
                refused += 1
    assert refused > 100
