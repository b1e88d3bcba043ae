"""Bundles with kernels for several targets: which one is taken, and that each reads the weights as its kernels want them."""

from __future__ import annotations

import platform
import struct
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256

import handmade
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import coda_edge
from coda_edge import Session, targets
from coda_edge.bundle import BufferKind, Bundle, Level, from_bytes, to_bytes
from coda_edge.bundle import format as fmt
from coda_edge.bundle.levels import LevelParts, StoredConstant, combine
from coda_edge.errors import BundleError, TargetError
from coda_edge.verify import ort_session

READERS: list[Callable[[bytes], object]] = [from_bytes, handmade.run_encoder]
MISSING = ("warp_drive",)


def feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"ids": rng.integers(0, 11, (3, 7)), "bias": rng.integers(-9, 9, 6).astype(np.float32)}


def test_every_level_reads_the_same_weights() -> None:
    bundle = handmade.levels()
    assert bundle.constants.nbytes == 11 * 6 * 4, "stored once"
    data = to_bytes(bundle)
    for target in ("least", "middle", "most", None):
        with Session(data, target=target) as session:
            assert session.target == target or (target is None and session.target == "most")
            assert session.held_targets == ["least", "middle", "most"]
            for found, right in zip(session.run(None, feeds()), handmade.encoder_reference(**feeds()), strict=True):
                np.testing.assert_array_equal(found, right)


def test_round_trip() -> None:
    bundle = handmade.levels()
    back = from_bytes(to_bytes(bundle))
    assert [level.target for level in back.levels] == ["least", "middle", "most"]
    assert back.best.plan.moves == bundle.best.plan.moves != []
    assert [b.kind for b in back.best.plan.buffers].count(BufferKind.REPACKED) == 1
    assert back.levels[1].plan.moves == []


CHOICES = [
    ([("a", ()), ("b", ()), ("c", ())], None, "c"),
    ([("a", ()), ("b", ()), ("c", MISSING)], None, "b"),
    ([("a", ()), ("b", MISSING), ("c", MISSING)], None, "a"),
    ([("a", ()), ("b", ()), ("c", ())], "a", "a"),
    ([("a", MISSING), ("b", MISSING)], None, "needs the CPU feature 'warp_drive', which this CPU lacks"),
    ([("a", ()), ("b", MISSING)], "b", "needs the CPU feature 'warp_drive', which this CPU lacks"),
    ([("a", ()), ("b", ())], "z", "bundle holds no kernels for 'z', but for 'b', 'a'"),
]


@pytest.mark.parametrize(("held", "target", "expected"), CHOICES)
def test_choice(held: list[tuple[str, tuple[str, ...]]], target: str | None, expected: str) -> None:
    parts = [handmade.level(name, features, 2 + i) for i, (name, features) in enumerate(held)]
    data = to_bytes(combine(parts, [name for name, _ in held], {}))
    if len(expected) > 1:
        with pytest.raises(TargetError, match=expected):
            Session(data, target=target)
    else:
        with Session(data, target=target) as session:
            assert session.target == expected
            np.testing.assert_array_equal(session.run(None, feeds())[0], handmade.encoder_reference(**feeds())[0])


def test_a_level_for_another_machine_is_passed_over() -> None:
    library = bytearray(handmade.compile_library())
    library[18:20] = struct.pack("<H", 243)
    parts = [handmade.level("here", (), 3), handmade.level("there", (), 2, bytes(library))]
    with Session(to_bytes(combine(parts, ["here", "there"], {}))) as session:
        assert session.target == "here"
    with pytest.raises(TargetError, match="kernels are for riscv"):
        Session(to_bytes(combine(parts, ["here", "there"], {})), target="there")


def _panels(matrix: np.ndarray, columns: list[list[int]]) -> np.ndarray:
    return np.concatenate([matrix[:, c].reshape(-1) for c in columns])


def _copies(arrays: list[np.ndarray], columns: list[list[list[int]]], target: str) -> LevelParts:
    """A plan whose outputs are its constants, which hold ``arrays`` in panels of those columns; none: as they are."""
    p = handmade.HandPlan()
    stored = []
    for i, (array, own) in enumerate(zip(arrays, columns, strict=True)):
        data = _panels(array, own) if own else array
        buffer = p.constant(data)
        stored.append(StoredConstant(p.plan.buffers[buffer].index, data, own))
        p.step("copy_bytes", [buffer, p.output(f"y{i}", "uint8", data.nbytes)], [], data.nbytes)
    constants = np.frombuffer(p.constants, np.uint8)
    return LevelParts(Level(target, (), p.plan, handmade.compile_library()), constants, stored)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_columns_is_repacked(seed: int) -> None:
    """Widths, interleaved classes, one row, odd numbers of columns, and constants that have no panels."""
    rng = np.random.default_rng(seed)
    arrays, kinds = [], ("float32", "uint8", "uint16", "uint32")
    columns: list[list[list[list[int]]]] = [[], []]
    for _ in range(5):
        rows, width = int(rng.choice([1, 3, 64])), int(rng.integers(1, 140))
        arrays.append(rng.integers(0, 200, (rows, width)).astype(rng.choice(kinds)))
        for own in columns:
            size, classes = int(rng.choice([1, 8, 24, 32, 48])), int(rng.choice([1, 2, 3]))
            panels = handmade.columns(size, width)
            own.append([[c for k in range(classes) for c in panel[k::classes]] for panel in panels])
    arrays.append(rng.standard_normal(17))
    for own in columns:
        own.append([])
    parts = [_copies(arrays, columns[0], "first"), _copies(arrays, columns[1], "second")]
    bundle = combine(parts, ["first", "second"], {})
    assert bundle.constants.nbytes == parts[0].constants.nbytes
    data = to_bytes(bundle)
    for target, own in (("first", columns[0]), ("second", columns[1])):
        with Session(data, target=target) as session:
            for array, mine, found in zip(arrays, own, session.run(None, {}), strict=True):
                np.testing.assert_array_equal(
                    found, (_panels(array, mine) if mine else array).view(np.uint8).reshape(-1)
                )


def test_matrices_of_equal_bytes_are_not_mixed_up() -> None:
    """Zeros of other rows, or of another type, are another matrix: moves of one would not fill the other."""
    arrays = [np.zeros((4, 16), np.float32), np.zeros((16, 4), np.float32), np.zeros((4, 32), np.float16)]
    parts = [
        _copies(arrays, [handmade.columns(size, a.shape[1]) for a in arrays], target)
        for size, target in ((8, "first"), (3, "second"))
    ]
    for order in (parts, parts[::-1]):
        bundle = combine([order[0], order[1]], ["first", "second"], {})
        with Session(to_bytes(bundle), target=order[1].level.target) as session:
            for array, found in zip(arrays, session.run(None, {}), strict=True):
                np.testing.assert_array_equal(found, np.zeros(array.nbytes, np.uint8))


def test_constants_of_one_level_alone_are_added() -> None:
    rng = np.random.default_rng(0)
    shared, first, second = (rng.standard_normal(n).astype(np.float32) for n in (5, 9, 7))
    parts = [_copies([shared, first], [[], []], "a"), _copies([shared, second], [[], []], "b")]
    parts[1].level.plan.outputs[1] = parts[0].level.plan.outputs[1]  # the writer asks for equal outputs
    bundle = combine(parts, ["a", "b"], {})
    assert bundle.constants.nbytes == 64 + 64 + 28
    buffers = [b for b in bundle.best.plan.buffers if b.kind == BufferKind.CONSTANT]
    for buffer, array in zip(buffers, (shared, second), strict=True):
        np.testing.assert_array_equal(bundle.constants[buffer.index :][: array.nbytes].view(np.float32), array)


def test_levels_of_one_bundle_are_of_one_model() -> None:
    one = handmade.levels()
    with pytest.raises(BundleError, match="levels of different targets, not none"):
        to_bytes(Bundle((), one.constants, {}))
    with pytest.raises(BundleError, match="not same, same"):
        to_bytes(replace(one, levels=tuple(replace(level, target="same") for level in one.levels[:2])))
    other = handmade.places().bundle().best
    with pytest.raises(BundleError, match="differ in inputs or outputs"):
        to_bytes(replace(one, levels=(one.levels[0], other)))


@pytest.mark.parametrize("reader", READERS)
def test_damage_is_noticed(reader: Callable[[bytes], object]) -> None:
    data = to_bytes(handmade.levels())
    header = fmt.PREFIX.size + 11 * fmt.ENTRY.size + 32
    rng = np.random.default_rng(1)
    for bit in [*range(0, header * 8, 37), *rng.integers(0, len(data) * 8, 200).tolist()]:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BundleError):
            reader(bytes(damaged))
    for length in (31, 32, 343, header - 1, header, len(data) - 1):
        with pytest.raises(BundleError, match="truncated"):
            reader(data[:length])


def _repaired(data: bytearray) -> bytes:
    (sections,) = struct.unpack_from("<I", data, 12)
    end = fmt.PREFIX.size + sections * fmt.ENTRY.size
    for entry in range(fmt.PREFIX.size, end, fmt.ENTRY.size):
        _, _, offset, size, _ = fmt.ENTRY.unpack_from(data, entry)
        data[entry + 24 : entry + 56] = sha256(data[offset : offset + size]).digest()
    data[end : end + 32] = sha256(data[:end]).digest()
    return bytes(data)


@pytest.mark.parametrize(
    ("offset", "value", "match"),
    [(12, 10, "10 sections"), (12, 53, "53 sections"), (32, 1, "kind 1 and level 0"), (36, 1, "kind 0 and level 1")],
)
@pytest.mark.parametrize("reader", READERS)
def test_sections_are_checked(reader: Callable[[bytes], object], offset: int, value: int, match: str) -> None:
    data = bytearray(to_bytes(handmade.levels()))
    end = fmt.PREFIX.size + 11 * fmt.ENTRY.size
    struct.pack_into("<I", data, offset, value)
    data[end : end + 32] = sha256(data[:end]).digest()
    with pytest.raises(BundleError, match=match):
        reader(bytes(data))


MOVES = [
    ("<Q", 0, 10**6, "reads beyond"),
    ("<Q", 0, 2**64 - 1, "reads beyond"),
    ("<Q", 8, 10**6, "writes beyond"),
    ("<I", 16, 99, "rows that overlap"),
    ("<I", 16, 0, "rows that overlap, or none"),
    ("<I", 20, 0, "rows that overlap, or none"),
    ("<I", 20, 2**32 - 1, "reads beyond"),
    ("<I", 24, 1, "rows that overlap"),
    ("<I", 24, 2**32 - 1, "reads beyond"),
    ("<I", 28, 1, "rows that overlap"),
    ("<I", 28, 2**32 - 1, "writes beyond"),
]


@pytest.mark.parametrize(("form", "offset", "value", "match"), MOVES)
def test_moves_are_checked(form: str, offset: int, value: int, match: str) -> None:
    bundle = handmade.levels()
    data = bytearray(to_bytes(bundle))
    entry = fmt.PREFIX.size + 6 * fmt.ENTRY.size  # the plan of the third level
    _, _, start, size, _ = fmt.ENTRY.unpack_from(data, entry)
    strings = fmt.PLAN_HEADER.unpack_from(data, start)[8]
    first = start + size - strings - len(bundle.best.plan.moves) * fmt.MOVE.size
    struct.pack_into(form, data, first + offset, value)
    with pytest.raises(BundleError, match=match):
        Session(_repaired(data))


def test_repacked_constants_are_what_moves_write() -> None:
    bundle = handmade.levels()
    plan = replace(bundle.best.plan, moves=[])
    with pytest.raises(BundleError, match="of which moves write 0"):
        Session(to_bytes(replace(bundle, levels=(replace(bundle.best, plan=plan),))))
    plan = replace(bundle.best.plan, moves=[*bundle.best.plan.moves, bundle.best.plan.moves[0]])
    with pytest.raises(BundleError, match=f"move {len(plan.moves) - 1} writes what another one has written"):
        Session(to_bytes(replace(bundle, levels=(replace(bundle.best, plan=plan),))))


def _model() -> onnx.ModelProto:
    """Two linear layers with a gate between, whose columns come in pairs, at sizes that fill no panel."""
    rng = np.random.default_rng(5)
    weights = {
        "w0": rng.standard_normal((37, 130)),
        "b0": rng.standard_normal(130),
        "w1": rng.standard_normal((37, 130)),
        "w2": rng.standard_normal((130, 51)),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"], name="up"),
        helper.make_node("Add", ["a", "b0"], ["b"], name="bias"),
        helper.make_node("MatMul", ["x", "w1"], ["c"], name="gate"),
        helper.make_node("Sigmoid", ["c"], ["d"], name="sigmoid"),
        helper.make_node("Mul", ["b", "d"], ["e"], name="gated"),
        helper.make_node("MatMul", ["e", "w2"], ["y"], name="down"),
    ]
    graph = helper.make_graph(
        nodes,
        "gated",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 37])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 51])],
        [onnx.numpy_helper.from_array(w.astype(np.float32), n) for n, w in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="builds kernels for x86-64")
def test_x86_levels_of_a_model() -> None:
    model = _model()
    alone = coda_edge.optimize(model, target="x86-64-v3", verify=False).bundle
    bundle = coda_edge.optimize(model, target="x86-64", verify=False).bundle
    assert [level.target for level in bundle.levels] == ["x86-64-v2", "x86-64-v3", "x86-64-v4"]
    np.testing.assert_array_equal(bundle.constants, alone.constants)
    assert bundle.levels[1].plan.buffers == alone.best.plan.buffers
    assert any(level.plan.moves for level in bundle.levels), "a level has panels of its own"
    data = to_bytes(bundle)
    runnable = [level.target for level in bundle.levels if not targets.get(level.target).missing()]
    for rows in (1, 7, 130):
        x = np.random.default_rng(rows).standard_normal((rows, 37)).astype(np.float32)
        (right,) = ort_session(model).run(["y"], {"x": x})
        for target in runnable:
            with Session(data, threads=2, target=target) as session:
                (found,) = session.run(None, {"x": x})
                np.testing.assert_allclose(found, right, atol=2e-5 * np.abs(right).max())


def test_lists_of_targets() -> None:
    assert [t.name for t in targets.get_all("x86-64")] == [
        *("x86-64-v3", "x86-64-v2", "x86-64-v3-vnni", "x86-64-v4", "x86-64-v4-vnni")
    ]
    assert [t.name for t in targets.get_all("x86-64-v4, x86-64-v2,x86-64-v4")] == ["x86-64-v4", "x86-64-v2"]
    assert targets.ranked(targets.get_all("x86-64")) == [
        *("x86-64-v2", "x86-64-v3", "x86-64-v3-vnni", "x86-64-v4", "x86-64-v4-vnni")
    ]
    with pytest.raises(TargetError, match="unknown target 'x87'"):
        targets.get_all("x86-64-v3,x87")
    with pytest.raises(TargetError, match="'x86-64-v3,' names no target in one place"):
        targets.get_all("x86-64-v3,")
    with pytest.raises(TargetError, match="one is needed here, not a list"):
        targets.get("x86-64-v3,x86-64-v4")
    with pytest.raises(
        TargetError, match="x86-64 stands for x86-64-v3, x86-64-v2, x86-64-v3-vnni, x86-64-v4, x86-64-v4-vnni"
    ):
        targets.get("x86-64")
