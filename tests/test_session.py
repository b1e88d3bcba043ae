"""Session: onnxruntime's manners, and errors that say what to do."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path

import handmade
import ml_dtypes
import numpy as np
import pytest

import coda_edge
from coda_edge import Session, _runtime
from coda_edge.bundle import to_bytes, write
from coda_edge.errors import CodaError, DataError, ShapeError


@pytest.fixture
def session() -> Session:
    return Session(to_bytes(handmade.encoder().bundle()), threads=2)


def feeds(batch: int, seq: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"ids": rng.integers(0, 11, (batch, seq)), "bias": rng.integers(-9, 9, 6).astype(np.float32)}


def test_inputs_and_outputs(session: Session) -> None:
    assert [(i.name, i.type, i.shape) for i in session.get_inputs()] == [
        ("ids", "tensor(int64)", ["batch", "seq"]),
        ("bias", "tensor(float)", [6]),
    ]
    assert [(o.name, o.type, o.shape) for o in session.get_outputs()] == [
        ("hidden", "tensor(float)", ["batch", "seq", 6]),
        ("total", "tensor(float)", ["batch", "seq"]),
    ]
    assert session.metadata == {"producer": "handmade", "target": "test"}
    assert session.threads == 2


def test_from_a_file(tmp_path: Path) -> None:
    write(handmade.encoder().bundle(), tmp_path / "m.coda")
    for path in (tmp_path / "m.coda", str(tmp_path / "m.coda")):
        with Session(path) as session:
            f = feeds(2, 5)
            np.testing.assert_array_equal(session.run(["total"], f)[0], handmade.encoder_reference(**f)[1])


def test_output_selection_and_order(session: Session) -> None:
    f = feeds(3, 4)
    hidden, total = handmade.encoder_reference(**f)
    first, second = session.run(["total", "hidden"], f)
    np.testing.assert_array_equal(first, total)
    np.testing.assert_array_equal(second, hidden)
    assert session.run([], f) == []
    with pytest.raises(ShapeError, match="no output is called 'nothing'; the outputs are 'hidden', 'total'"):
        session.run(["nothing"], f)


def test_arrays_that_are_not_contiguous_or_aligned(session: Session) -> None:
    f = feeds(4, 6)
    expected = handmade.encoder_reference(**f)
    odd = np.frombuffer(b"x" + f["bias"].tobytes(), np.uint8)[1:].view(np.float32)
    assert not odd.flags.aligned
    for given in (
        {"ids": np.asfortranarray(f["ids"]), "bias": odd},
        {"ids": np.repeat(f["ids"], 2, axis=1)[:, ::2], "bias": f["bias"][::-1][::-1]},
    ):
        for found, right in zip(session.run(None, given), expected, strict=True):
            np.testing.assert_array_equal(found, right)


def test_read_only_inputs_are_read_in_place(session: Session) -> None:
    f = feeds(1, 3)
    for array in f.values():
        array.flags.writeable = False
    np.testing.assert_array_equal(session.run(None, f)[0], handmade.encoder_reference(**f)[0])


def test_results_are_the_callers(session: Session) -> None:
    f = feeds(2, 3)
    first = session.run(None, f)[0]
    kept = first.copy()
    session.run(None, feeds(2, 3, seed=1))
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": None}, "input 'bias' is missing: give a float32 tensor of shape [6]"),
        ({"ids": None}, "input 'ids' is missing: give a int64 tensor of shape [batch, seq]"),
        ({"bias": np.zeros(6)}, "input 'bias': element type is float64, expected float32"),
        ({"bias": np.zeros(6, ">f4")}, "input 'bias': element type is >f4, expected float32"),
        ({"bias": np.zeros(5, np.float32)}, "input 'bias': dimension 0 is 5, expected 6"),
        ({"ids": np.zeros(5, np.int64)}, "input 'ids' has 1 dimensions, expected 2: [batch, seq]"),
        ({"ids": np.zeros((1,) * 12, np.int64)}, "input 'ids' has 12 dimensions, expected 2: [batch, seq]"),
        ({"idz": np.zeros(5)}, "no input is called 'idz'; the inputs are 'ids', 'bias'"),
    ],
)
def test_wrong_feeds(session: Session, change: dict[str, np.ndarray | None], message: str) -> None:
    given = {name: array for name, array in {**feeds(2, 5), **change}.items() if array is not None}
    with pytest.raises(ShapeError) as caught:
        session.run(None, given)
    assert str(caught.value) == message
    f = feeds(2, 5)
    np.testing.assert_array_equal(session.run(None, f)[0], handmade.encoder_reference(**f)[0])


def test_inconsistent_symbols() -> None:
    p = handmade.HandPlan()
    p.input("input_ids", "int64", "batch", "seq")
    p.input("attention_mask", "int64", "batch", "seq")
    p.input("past", "float32", "batch", "past + seq")
    p.input("both", "float32", "past", "max(past, 2*seq) % 5")
    session = Session(to_bytes(p.bundle()))
    assert session.get_inputs()[2].shape == ["batch", "past + seq"]

    def run(*shapes: tuple[int, ...]) -> None:
        dtypes = (np.int64, np.int64, np.float32, np.float32)
        names = ("input_ids", "attention_mask", "past", "both")
        session.run(None, {n: np.zeros(s, d) for n, s, d in zip(names, shapes, dtypes, strict=True)})

    run((2, 8), (2, 8), (2, 11), (3, 1))
    with pytest.raises(ShapeError) as caught:
        run((2, 8), (2, 7), (2, 11), (3, 1))
    assert str(caught.value) == "input 'attention_mask': dimension 1 is 7, expected seq = 8 (from input 'input_ids')"
    with pytest.raises(ShapeError, match=r"'past': dimension 1 is 12, expected past \+ seq = 11"):
        run((2, 8), (2, 8), (2, 12), (3, 1))
    with pytest.raises(ShapeError, match=r"'both': dimension 1 is 4, expected \(?max\(.*\) % 5 = 1"):
        run((2, 8), (2, 8), (2, 11), (3, 4))


def test_index_out_of_range(session: Session) -> None:
    f = feeds(2, 5)
    f["ids"][1, 2] = 11
    with pytest.raises(DataError, match="an index is out of range in step '0:gather', from /embed/Gather"):
        session.run(None, f)
    f["ids"][1, 2] = 10
    np.testing.assert_array_equal(session.run(None, f)[0], handmade.encoder_reference(**f)[0])


def test_profile(session: Session) -> None:
    assert session.arena_bytes == 0
    steps = session.profile(feeds(3, 7), rounds=3)
    assert [s.name for s in steps] == ["0:gather", "1:scale_add", "2:row_sum"]
    assert [s.flops for s in steps] == [handmade.FLOPS, 21 * handmade.FLOPS, handmade.FLOPS]
    assert [s.bytes for s in steps] == [42, 252, 4]
    assert [s.kernel for s in steps] == ["gather", "scale_add", "row_sum"]
    assert steps[0].source == "/embed/Gather"
    assert all(0 <= s.ns < 1e9 for s in steps)
    with pytest.raises(ValueError, match="rounds is 0, expected at least 1"):
        session.profile(feeds(3, 7), rounds=0)
    with pytest.raises(ShapeError, match="'ids' is missing"):
        session.profile({})
    assert session.arena_bytes == 512, "rows (504 bytes) and partial (168 bytes) never live together"


def test_outputs_are_written_in_place(session: Session) -> None:
    f = feeds(3, 7)
    hidden, total = np.empty((3, 7, 6), np.float32), np.empty((3, 7), np.float32)
    right = handmade.encoder_reference(**f)
    found = session.run(None, f, {"hidden": hidden, "total": total})
    assert found[0] is hidden and found[1] is total
    np.testing.assert_array_equal(hidden, right[0])
    np.testing.assert_array_equal(total, right[1])
    hidden.fill(0)
    (other,) = session.run(["total"], f, {"hidden": hidden})
    np.testing.assert_array_equal(other, right[1])
    np.testing.assert_array_equal(hidden, right[0])


@pytest.mark.parametrize(
    ("name", "array", "match"),
    [
        ("hidden", np.empty((3, 8, 6), np.float32), r"float32 \[3, 8, 6\], expected float32 \[3, 7, 6\]"),
        ("hidden", np.empty((3, 7, 6), np.float64), r"float64 \[3, 7, 6\], expected float32"),
        ("hidden", np.empty((6, 7, 3), np.float32).T, "contiguous, aligned and writeable"),
        ("hidden", np.frombuffer(bytes(504), np.float32).reshape(3, 7, 6), "contiguous, aligned and writeable"),
        ("other", np.empty(1), "no output is called 'other'"),
    ],
)
def test_outputs_that_cannot_be_written(session: Session, name: str, array: np.ndarray, match: str) -> None:
    with pytest.raises(ShapeError, match=match):
        session.run(None, feeds(3, 7), {name: array})


def test_outputs_of_unknown_size_cannot_be_given() -> None:
    with Session(to_bytes(handmade.places().bundle())) as session, pytest.raises(ShapeError, match="data decides"):
        session.run(None, {"x": np.ones(4, np.int64)}, {"y": np.empty(4, np.int64)})


def test_memory_of_outputs_is_used_again() -> None:
    """An array keeps its memory, also beyond the session; when it is gone, another output gets it, one that is a little longer too."""
    p = handmade.HandPlan()
    x, y, z = p.input("x", "int64", "n"), p.output("y", "int64", "n"), p.output("z", "int64", "n")
    for factor, out in ((1, y), (2, z)):
        p.step("mix", [x, x, out], [factor, "n", "n"], "n")
    session = Session(to_bytes(p.bundle()), threads=1)
    places: set[int] = set()
    kept = session.run(None, {"x": np.arange(30000)})
    for n in range(20000, 20040):
        found = session.run(None, {"x": np.arange(n)})
        places |= {array.ctypes.data for array in found}
        np.testing.assert_array_equal(found[0], 2 * np.arange(n))
        np.testing.assert_array_equal(found[1], 3 * np.arange(n))
        found[0][:] = -1
        del found
    assert len(places) == 2
    session.close()
    del session
    np.testing.assert_array_equal(kept[1], 3 * np.arange(30000))


HOOK = r"""
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>
enum { LARGE = 1024 };
static _Atomic long balance, large;
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), __libc_free(void *);
long held(void) { return balance; }
long large_ones(void) { return large; }
void *malloc(size_t n) { balance++, large += n >= LARGE; return __libc_malloc(n); }
void *calloc(size_t k, size_t n) { balance++, large += k * n >= LARGE; return __libc_calloc(k, n); }
void *realloc(void *p, size_t n) { balance += !p, large += n >= LARGE; return __libc_realloc(p, n); }
void free(void *p) { balance -= p != NULL; __libc_free(p); }
void *mmap(void *a, size_t n, int p, int f, int d, long o) { large++; return (void *)syscall(SYS_mmap, a, n, p, f, d, o); }
"""


def test_a_run_into_given_arrays_keeps_no_memory(tmp_path: Path) -> None:
    """What Python and the binding allocate in a run is small, and given back: no output, no arena, no mapping."""
    if platform.libc_ver()[0] != "glibc" or not shutil.which("cc") or sys.maxsize < 2**32:
        pytest.skip("counting allocations needs glibc and a C compiler")
    (tmp_path / "hook.c").write_text(HOOK)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", tmp_path / "hook.so", tmp_path / "hook.c"], check=True)
    write(handmade.encoder().bundle(), tmp_path / "m.coda")
    code = (
        "import ctypes, gc, sys, numpy as np, coda_edge\n"
        "hook = ctypes.CDLL(sys.argv[1])\n"
        "s = coda_edge.Session(sys.argv[2], threads=2)\n"
        "f = {'ids': np.ones((40, 50), np.int64), 'bias': np.zeros(6, np.float32)}\n"
        "out = {'hidden': np.empty((40, 50, 6), np.float32), 'total': np.empty((40, 50), np.float32)}\n"
        "gc.disable()\n"
        "def change(count):\n"
        "    before = hook.held(), hook.large_ones()\n"
        "    for _ in range(count): s.run(None, f, out)\n"
        "    return hook.held() - before[0], hook.large_ones() - before[1]\n"
        "change(10)\n"
        "print(*change(100))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "hook.so"), str(tmp_path / "m.coda")]
    preload = {**os.environ, "LD_PRELOAD": str(tmp_path / "hook.so")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=preload)
    held, large = map(int, done.stdout.split())
    assert large == 0 and abs(held) < 10


def test_threads_share_a_session(session: Session) -> None:
    cases = [feeds(1 + i % 3, 1 + i % 7, seed=i) for i in range(40)]
    wrong: list[int] = []

    def work(start: int) -> None:
        for i in range(start, len(cases), 4):
            for found, right in zip(session.run(None, cases[i]), handmade.encoder_reference(**cases[i]), strict=True):
                if not np.array_equal(found, right):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_close(session: Session) -> None:
    session.close()
    session.close()
    with pytest.raises(CodaError, match="closed"):
        session.run(None, feeds(1, 1))
    with pytest.raises(CodaError, match="closed"):
        _ = session.threads


@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "uint64", "float16", "float64", "bfloat16"],
)
def test_element_types(dtype: str) -> None:
    expected = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    p = handmade.HandPlan()
    x, y = p.input("x", dtype, "n"), p.output("y", dtype, "n")
    p.step("copy_bytes", [x, y], [], f"{expected.itemsize}*n")
    session = Session(to_bytes(p.bundle()))
    x_value = np.arange(5).astype(expected)
    (y_value,) = session.run(None, {"x": x_value})
    assert y_value.dtype == expected
    np.testing.assert_array_equal(y_value, x_value)


def test_scalars_and_rank_8() -> None:
    p = handmade.HandPlan()
    x, deep = p.input("x", "int32"), p.input("deep", "int32", 1, 1, 1, 1, 1, 1, "n", 2)
    y, out = p.output("y", "int32"), p.output("out", "int32", "n", 1, 1, 1, 1, 1, 1, 2)
    p.step("copy_bytes", [x, y], [], 4)
    p.step("copy_bytes", [deep, out], [], "8*n")
    session = Session(to_bytes(p.bundle()))
    a = np.arange(6, dtype=np.int32).reshape(1, 1, 1, 1, 1, 1, 3, 2)
    scalar, b = session.run(None, {"x": np.int32(-7), "deep": a})
    assert scalar.shape == () and scalar == -7
    np.testing.assert_array_equal(b, a.reshape(3, 1, 1, 1, 1, 1, 1, 2))


def test_needs_no_compiler(tmp_path: Path) -> None:
    """Running a bundle imports neither TVM nor onnx nor sympy."""
    write(handmade.encoder().bundle(), tmp_path / "m.coda")
    code = (
        "import sys, numpy as np, coda_edge\n"
        f"s = coda_edge.Session({str(tmp_path / 'm.coda')!r})\n"
        "print(s.run(None, {'ids': np.zeros((1, 2), np.int64), 'bias': np.zeros(6, np.float32)})[1])\n"
        "print([m for m in ('tvm', 'onnx', 'sympy', 'onnxruntime', 'click') if m in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_one_version() -> None:
    assert _runtime.version == coda_edge.__version__ == version("coda-edge")
