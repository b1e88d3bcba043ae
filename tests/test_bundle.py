"""The bundle format: what is written is what is read, and whatever is wrong with a file is noticed."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import handmade
import numpy as np
import pytest

from coda_edge import Session
from coda_edge.bundle import Bundle, ExecutionPlan, Level, TensorInfo, from_bytes, read, to_bytes, write
from coda_edge.bundle import format as fmt
from coda_edge.errors import BundleError, TargetError

READERS: list[Callable[[bytes], object]] = [from_bytes, Session]


@pytest.fixture(scope="module")
def data() -> bytes:
    """The small encoder as a file's contents."""
    return to_bytes(handmade.encoder().bundle(features=()))


def test_round_trip(tmp_path: Path) -> None:
    bundle = handmade.encoder().bundle(features=("sse4_2",))
    write(bundle, tmp_path / "m.coda")
    back = read(tmp_path / "m.coda")
    assert back.best.plan.inputs == bundle.best.plan.inputs and back.best.plan.outputs == bundle.best.plan.outputs
    assert back.best.plan.buffers == bundle.best.plan.buffers
    assert back.best.plan.steps == bundle.best.plan.steps
    assert back.best.plan.constraints == bundle.best.plan.constraints
    assert len(back.best.plan.constraints) == 1
    assert back.best.plan.kernels == bundle.best.plan.kernels
    assert back.best.plan.exprs.entries == bundle.best.plan.exprs.entries
    assert back.best.plan.exprs.symbols == ["batch", "seq"]
    assert back.best.library == bundle.best.library
    assert back.metadata == {"producer": "handmade", "target": "test"}
    assert back.best.features == ("sse4_2",)
    np.testing.assert_array_equal(back.constants, bundle.constants)
    assert back.best.plan.exprs.add(4) == bundle.best.plan.exprs.add(4), "a table that was read can be extended"
    assert [p.name for p in tmp_path.iterdir()] == ["m.coda"], "no temporary file is left"


def test_empty_plan_round_trip() -> None:
    bundle = Bundle((Level("any", (), ExecutionPlan(), b""),), np.zeros(0, np.uint8), {})
    back = from_bytes(to_bytes(bundle))
    assert back.best.plan == bundle.best.plan or back.best.plan.steps == []
    with Session(to_bytes(bundle)) as session:
        assert session.run(None, {}) == []


def test_write_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "m.coda"
    write(handmade.encoder().bundle(), path)
    before = path.read_bytes()
    broken = handmade.encoder().bundle(library="not bytes")
    with pytest.raises(TypeError):
        write(broken, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.coda"]


def test_layout_of_the_file(data: bytes) -> None:
    magic, version, sections, size, _ = fmt.PREFIX.unpack_from(data)
    assert (magic, version, sections, size) == (b"CODA\r\n\x1a\n", 5, 5, len(data))
    entries = [fmt.ENTRY.unpack_from(data, 32 + 56 * i) for i in range(5)]
    assert [e[0] for e in entries] == [0, 1, 2, 3, 4]
    assert all(e[2] % 64 == 0 for e in entries) and entries[4][2] % 4096 == 0
    for kind, _, offset, length, digest in entries:
        checksum = sha256(data[offset : offset + length]).digest()
        assert digest == (sha256(checksum).digest() if kind == fmt.Section.CONSTANTS else checksum)
    assert sha256(data[:312]).digest() == data[312:344]


@pytest.mark.parametrize("reader", [from_bytes, handmade.run_encoder])
def test_every_flipped_bit_is_noticed(data: bytes, reader: Callable[[bytes], object]) -> None:
    rng = np.random.default_rng(7)
    bits = [*range(0, 440 * 8, 13), *rng.integers(0, len(data) * 8, 300).tolist()]
    for bit in bits:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BundleError):
            reader(bytes(damaged))


@pytest.mark.parametrize("reader", READERS)
def test_truncated_and_extended(data: bytes, reader: Callable[[bytes], object]) -> None:
    for length in (0, 1, 7, 8, 31, 32, 100, 343, 344, 439, 440, 1000, len(data) - 1):
        with pytest.raises(BundleError, match=r"signature|truncated"):
            reader(data[:length])
    with pytest.raises(BundleError, match="extended"):
        reader(data + b"\0")


@pytest.mark.parametrize("reader", READERS)
def test_other_version(data: bytes, reader: Callable[[bytes], object]) -> None:
    other = bytearray(data)
    other[8] = 2
    other[312:344] = sha256(other[:312]).digest()
    with pytest.raises(BundleError, match=r"format version 2, .* reads version 5: build it again"):
        reader(bytes(other))


def test_damaged_constants_are_found_by_the_first_run(data: bytes) -> None:
    damaged = bytearray(data)
    damaged[-1] ^= 1
    with Session(bytes(damaged), threads=2) as session:
        for _ in range(2):
            with pytest.raises(BundleError, match="damaged: the checksum of section 'constants'"):
                session.run(None, {"ids": np.ones((1, 3), np.int64), "bias": np.zeros(6, np.float32)})


def test_checksum_of_constants_in_blocks() -> None:
    constants = np.random.default_rng(0).integers(0, 256, (5 << 19) + 7).astype(np.uint8)
    blocks = [constants[i : i + (1 << 20)].tobytes() for i in range(0, constants.size, 1 << 20)]
    expected = sha256(b"".join(sha256(block).digest() for block in blocks)).digest()
    assert len(blocks) == 3 and fmt.digest(fmt.Section.CONSTANTS, constants.data) == expected
    p = handmade.HandPlan()
    p.input("x", "uint8", "n")
    y, table = p.output("y", "uint8", "n"), p.constant(constants)
    p.step("copy_bytes", [table, y], [], "n")
    for threads in (1, 3):
        with Session(to_bytes(p.bundle()), threads=threads) as session:
            (found,) = session.run(None, {"x": np.zeros(5, np.uint8)})
            np.testing.assert_array_equal(found, constants[:5])


def test_files_that_are_no_bundles(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.coda"
    garbage.write_bytes(b"\x08\x07onnx" * 100)
    for reader in (read, Session):
        with pytest.raises(BundleError, match=r"garbage\.coda: not a coda bundle"):
            reader(garbage)
        with pytest.raises(BundleError, match=r"missing\.coda' cannot be"):
            reader(tmp_path / "missing.coda")
        with pytest.raises(BundleError, match="cannot be"):
            reader(tmp_path)
    (tmp_path / "empty.coda").touch()
    with pytest.raises(BundleError, match="empty"):
        Session(tmp_path / "empty.coda")


def _with_plan(data: bytes, change: Callable[[bytearray], None]) -> bytes:
    """``data`` with its plan section changed and all checksums repaired."""
    _, _, offset, length, _ = fmt.ENTRY.unpack_from(data, 32)
    changed = bytearray(data)
    plan = bytearray(data[offset : offset + length])
    change(plan)
    changed[offset : offset + length] = plan
    changed[32 + 24 : 32 + 56] = sha256(plan).digest()
    changed[312:344] = sha256(changed[:312]).digest()
    return bytes(changed)


def _set(offset: int, form: str, value: int) -> Callable[[bytearray], None]:
    return lambda plan: struct.pack_into(form, plan, offset, value)


def _tables(data: bytes) -> dict[str, int]:
    """Where each table of the plan begins in its section."""
    _, _, offset, _, _ = fmt.ENTRY.unpack_from(data, 32)
    symbols, exprs, inputs, outputs, buffers, kernels, steps, words, _, constraints, _, _ = fmt.PLAN_HEADER.unpack_from(
        data, offset
    )
    sizes = {
        "exprs": exprs * 24,
        "tensors": (inputs + outputs) * 16,
        "buffers": buffers * 24,
        "steps": steps * 56,
        "symbols": symbols * 4,
        "kernels": kernels * 4,
        "words": words * 4,
        "constraints": constraints * 16,
    }
    starts, at = {}, 48
    for name, size in sizes.items():
        starts[name] = at
        at += size
    return starts


NONSENSE = [
    ("exprs", 0, "<I", 10, "operator 10"),
    ("exprs", 8, "<q", 77, "operand"),
    ("tensors", 4, "<I", 8, "element type 8"),
    ("tensors", 8, "<I", 9, "9 dimensions"),
    ("tensors", 12, "<I", 10**6, "dimensions"),
    ("tensors", 0, "<I", 10**6, "string"),
    ("buffers", 0, "<I", 4, "kind 4"),
    ("buffers", 4, "<I", 999, "size"),
    ("buffers", 8, "<Q", 2, "input 2 of 2"),
    ("buffers", 24 * 2 + 8, "<Q", 65, "multiple of 64"),
    ("buffers", 24 * 2 + 8, "<Q", 64 * 1000, "beyond"),
    ("buffers", 24 * 5 + 16, "<I", 2, "lives"),
    ("buffers", 24 * 5 + 20, "<I", 0, "outside its life"),
    ("steps", 4, "<I", 99, "kernel"),
    ("steps", 8, "<i", -2, "finishes"),
    ("steps", 12, "<I", 10**6, "buffers"),
    ("steps", 28, "<I", 10**6, "items"),
    ("steps", 32, "<I", 0, "grain 0"),
    ("constraints", 0, "<I", 2, "constraint 0 has relation 2"),
    ("constraints", 4, "<I", 10**6, "left side"),
    ("constraints", 8, "<I", 10**6, "right side"),
    ("constraints", 12, "<I", 10**6, "string"),
]


@pytest.mark.parametrize(("table", "offset", "form", "value", "match"), NONSENSE)
def test_runtime_checks_every_field(data: bytes, table: str, offset: int, form: str, value: int, match: str) -> None:
    with pytest.raises(BundleError, match=match):
        Session(_with_plan(data, _set(_tables(data)[table] + offset, form, value)))


def test_reader_survives_nonsense(data: bytes) -> None:
    rng = np.random.default_rng(3)
    _, _, _, length, _ = fmt.ENTRY.unpack_from(data, 32)
    refused = 0
    for _ in range(500):
        offset, value = int(rng.integers(length)), int(rng.integers(256))
        try:
            from_bytes(_with_plan(data, _set(offset, "<B", value)))
        except BundleError:
            refused += 1
    assert refused > 50


def test_missing_feature_is_named() -> None:
    with pytest.raises(TargetError, match="CPU feature 'warp_drive', which this CPU lacks"):
        Session(to_bytes(handmade.encoder().bundle(features=("warp_drive",))))


def test_kernels_of_another_machine() -> None:
    library = bytearray(handmade.compile_library())
    library[18:20] = struct.pack("<H", 243)
    with pytest.raises(TargetError, match="kernels are for riscv, this machine is"):
        Session(to_bytes(handmade.encoder().bundle(library=bytes(library))))
    with pytest.raises(BundleError, match="not an ELF file"):
        Session(to_bytes(handmade.encoder().bundle(library=b"nothing")))


def test_missing_kernel_is_named() -> None:
    p = handmade.encoder()
    p.plan.kernels[0] = "absent"
    with pytest.raises(BundleError, match="no kernel 'absent'"):
        Session(to_bytes(p.bundle()))


def test_unbound_symbol_is_named() -> None:
    p = handmade.HandPlan()
    p.input("x", "float32", "2*n")
    with pytest.raises(BundleError, match="no input has a dimension that is 'n'"):
        Session(to_bytes(p.bundle()))


def test_what_a_bundle_cannot_hold() -> None:
    p = handmade.HandPlan()
    p.plan.inputs.append(TensorInfo("x", "complex64", ()))
    with pytest.raises(BundleError, match="element type complex64"):
        to_bytes(p.bundle())
    p.plan.inputs[0] = TensorInfo("x", "float32", (0,) * 9)
    with pytest.raises(BundleError, match="9 dimensions"):
        to_bytes(p.bundle())
    p = handmade.encoder()
    p.size(2**70)
    with pytest.raises(BundleError, match="number"):
        to_bytes(p.bundle())
    with pytest.raises(BundleError, match="zero byte"):
        to_bytes(replace(handmade.encoder().bundle(), metadata={"a": "b\0c"}))
