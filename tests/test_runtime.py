"""The C runtime: packing, chunks, threads, shapes; and its own check program under sanitizers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import handmade
import numpy as np
import pytest

from coda_edge import Session, _runtime
from coda_edge.bundle import Buffer, BufferKind, Relation, to_bytes, write
from coda_edge.errors import BundleError, DataError, ShapeError

ROOT = Path(__file__).resolve().parent.parent


class RandomPlan:
    """A random chain of ``mix`` steps over int64 vectors of sizes in ``n`` and ``m``, with its reference."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.hand = handmade.HandPlan()
        self.sizes: list[str] = ["n", "m"]
        self.steps: list[tuple[int, int, int, int]] = []  # x, z, result, factor; indices of values
        values = [self.hand.input("x", "int64", "n"), self.hand.input("z", "int64", "m")]
        count = int(rng.integers(5, 40))
        last = [int(rng.integers(0, count)) for _ in range(2)] + [count - 1]
        self.outputs: list[int] = []
        for step in range(count):
            size = str(rng.choice(["n", "m", "n + m", "3*n", "n*m + 1", "n//3 + 2", "max(n, m)", "17"]))
            if step in last:
                result = self.hand.output(f"y{step}", "int64", size)
                self.outputs.append(len(values))
            else:
                result = self.hand.arena("int64", size)
            recent = rng.random() < 0.7
            x, z = (int(rng.integers(max(0, len(values) - 4) if recent else 0, len(values))) for _ in range(2))
            factor = int(rng.integers(1, 100))
            self.hand.step(
                "mix",
                [values[x], values[z], result],
                [factor, self.sizes[x], self.sizes[z]],
                size,
                grain=int(rng.integers(1, 9)),
            )
            self.steps.append((x, z, len(values), factor))
            values.append(result)
            self.sizes.append(size)
        self.values = values

    def reference(self, x: np.ndarray, z: np.ndarray) -> list[np.ndarray]:
        sizes = {"n": len(x), "m": len(z), "max": max}
        values = [x, z]
        for a, b, _, factor in self.steps:
            i = np.arange(eval(self.sizes[len(values)], {}, sizes))
            values.append(values[a][i % len(values[a])] * factor + values[b][i % len(values[b])])
        return [values[i] for i in self.outputs]


@pytest.mark.parametrize("seed", range(40))
def test_packed_arena_never_corrupts(seed: int) -> None:
    plan = RandomPlan(seed)
    rng = np.random.default_rng(seed)
    data = to_bytes(plan.hand.bundle())
    sessions = [Session(data, threads=t) for t in (1, 2, 4)]
    for n, m in [(1, 1), (7, 3), (64, 130), (1000, 20), (7, 3)]:
        x, z = rng.integers(-(2**40), 2**40, n), rng.integers(-(2**40), 2**40, m)
        right = plan.reference(x, z)
        for session in sessions:
            for found, expected in zip(session.run(None, {"x": x, "z": z}), right, strict=True):
                np.testing.assert_array_equal(found, expected)


def test_arena_is_packed_by_liveness() -> None:
    p = handmade.HandPlan()
    x, y = p.input("x", "int64", "n"), p.output("y", "int64", "n")
    chain = [x, *(p.arena("int64", "n") for _ in range(10)), y]
    for a, b in pairwise(chain):
        p.step("mix", [a, a, b], [1, "n", "n"], "n")
    session = Session(to_bytes(p.bundle()), threads=1)
    (result,) = session.run(None, {"x": np.arange(1000)})
    np.testing.assert_array_equal(result, np.arange(1000) * 2**11)
    assert session.arena_bytes == 2 * 8000, "two of ten buffers are alive at a time"


def test_many_shapes_are_remembered_and_forgotten() -> None:
    session = Session(to_bytes(handmade.encoder().bundle()), threads=2)
    rng = np.random.default_rng(0)
    for seq in [*range(1, 40), *range(39, 0, -3), 2, 2, 500, 1]:
        f = {"ids": rng.integers(0, 11, (2, seq)), "bias": np.full(6, seq, np.float32)}
        for found, right in zip(session.run(None, f), handmade.encoder_reference(**f), strict=True):
            np.testing.assert_array_equal(found, right)


def test_empty_tensors() -> None:
    session = Session(to_bytes(handmade.encoder().bundle()), threads=2)
    bias = np.zeros(6, np.float32)
    for batch, seq in [(0, 3), (3, 0), (2, 2), (0, 0)]:
        hidden, total = session.run(None, {"ids": np.zeros((batch, seq), np.int64), "bias": bias})
        assert hidden.shape == (batch, seq, 6) and total.shape == (batch, seq)


REFUSALS = [
    ("n", Relation.AT_MOST, 512, (513, 1), "n = 513 exceeds 512: why"),
    (3, Relation.AT_MOST, "m", (9, 2), "m = 2 is below 3: why"),
    ("2*m", Relation.AT_MOST, "n + 4", (1, 3), r"2\*m = 6 exceeds 4 \+ n = 5: why"),
    ("n % 4", Relation.EQUAL, 0, (6, 1), "n % 4 = 2 differs from 0: why"),
    ("n", Relation.EQUAL, "3*m", (4, 1), "n = 4 differs from .* = 3: why"),
]


@pytest.mark.parametrize(("left", "relation", "right", "sizes", "message"), REFUSALS)
def test_constraints_are_checked(
    left: int | str, relation: Relation, right: int | str, sizes: tuple[int, int], message: str
) -> None:
    """A shape is refused before anything runs, and a right one goes on as if nothing had been."""
    p = handmade.HandPlan()
    x, z, y = p.input("x", "int64", "n"), p.input("z", "int64", "m"), p.output("y", "int64", "n")
    p.step("mix", [x, z, y], [1, "n", "m"], "n")
    p.require(left, relation, right, "why")
    with Session(to_bytes(p.bundle()), threads=1) as session:
        for _ in range(2):
            with pytest.raises(ShapeError, match=message):
                session.run(None, {"x": np.zeros(sizes[0], np.int64), "z": np.zeros(sizes[1], np.int64)})
            (found,) = session.run(None, {"x": np.arange(12), "z": np.full(4, 5)})
            np.testing.assert_array_equal(found, np.arange(12) + 5)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("grain", [1, 5, 64, 10**6])
def test_each_item_once(threads: int, grain: int) -> None:
    p = handmade.HandPlan()
    x, counts = p.input("x", "int8", "n"), p.output("counts", "int32", "n", 2)
    p.step("count_items", [x, counts], [grain, "n"], "n", grain=grain)
    session = Session(to_bytes(p.bundle()), threads=threads)
    for items in (1, 4, 5, 6, 63, 1000, 1001):
        (found,) = session.run(None, {"x": np.zeros(items, np.int8)})
        assert found[:, 0].tolist() == [1] * items
        assert not found[:, 1].any(), "each chunk but the last is a multiple of the grain"


@pytest.mark.parametrize("threads", [1, 4])
def test_scratch_belongs_to_a_thread(threads: int) -> None:
    p = handmade.HandPlan()
    p.input("x", "int8", "n")
    y, small = p.output("y", "int32", "n"), p.output("small", "int32", "n")
    p.step("use_scratch", [y], ["50*n"], "n", scratch="50*n")
    p.step("use_scratch", [small], [3], "n", scratch=3)
    session = Session(to_bytes(p.bundle()), threads=threads)
    for n in (3, 200, 40):
        found = session.run(None, {"x": np.zeros(n, np.int8)})
        for array in found:
            np.testing.assert_array_equal(array, np.arange(n) ** 2)


def test_failing_kernel_names_its_step() -> None:
    p = handmade.HandPlan()
    x = p.input("x", "int8", "n")
    p.step("fail", [x], [], "n", source="/a/Foo, /a/Bar")
    session = Session(to_bytes(p.bundle()), threads=2)
    with pytest.raises(DataError, match="kernel error 42 in step '0:fail', from /a/Foo, /a/Bar"):
        session.run(None, {"x": np.zeros(100, np.int8)})


def test_sizes_that_do_not_work_out() -> None:
    def session(dim: str) -> Session:
        p = handmade.HandPlan()
        p.input("x", "int8", "n")
        p.output("y", "int8", dim)
        return Session(to_bytes(p.bundle()))

    assert session("n//4 + n % 3").run(None, {"x": np.zeros(11, np.int8)})[0].shape == (4,)
    assert session("(n - 20)//3 + 9").run(None, {"x": np.zeros(0, np.int8)})[0].shape == (2,), "rounds down"
    assert session("(n - 20) % 7").run(None, {"x": np.zeros(0, np.int8)})[0].shape == (1,), "never negative"
    with pytest.raises(ShapeError, match="'y' would have dimension 0 = -1"):
        session("n - 2").run(None, {"x": np.zeros(1, np.int8)})
    with pytest.raises(ShapeError, match=r"divides by 0 for these inputs"):
        session("100//n").run(None, {"x": np.zeros(0, np.int8)})
    with pytest.raises(ShapeError, match="64 bits"):
        session(f"n*{2**62}").run(None, {"x": np.zeros(3, np.int8)})


def test_buffer_larger_than_its_tensor() -> None:
    p = handmade.HandPlan()
    x = p.input("x", "int8", "n")
    old = p.plan.buffers[x]
    p.plan.buffers[x] = Buffer(BufferKind.INPUT, p.size("n + 1"), old.index)
    with pytest.raises(BundleError, match="buffer 0 has 4 bytes, its tensor 3"):
        Session(to_bytes(p.bundle())).run(None, {"x": np.zeros(3, np.int8)})


def test_two_bundles_keep_their_own_kernels() -> None:
    """Libraries are loaded from descriptors, whose numbers come again after a close."""
    first = handmade.KERNELS
    second = first.replace("(float)n[0] *", "2 * (float)n[0] *")
    f = {"ids": np.ones((1, 3), np.int64), "bias": np.zeros(6, np.float32)}
    for source, factor in [(first, 3), (second, 6), (first, 3)]:
        bundle = handmade.encoder().bundle(library=handmade.compile_library(source))
        with Session(to_bytes(bundle)) as session:
            np.testing.assert_array_equal(session.run(None, f)[0][0, 0], factor * handmade.encoder_table()[1])


def test_forked_child_runs_and_closes(tmp_path: Path) -> None:
    """A child has no workers; it must neither wait for them nor join them."""
    write(handmade.encoder().bundle(), tmp_path / "m.coda")
    code = (
        "import os, sys, numpy as np\n"
        "from coda_edge import Session\n"
        "s = Session(sys.argv[1], threads=4)\n"
        "f = {'ids': np.ones((9, 9), np.int64), 'bias': np.zeros(6, np.float32)}\n"
        "first = s.run(None, f)[0]\n"
        "child = os.fork()\n"
        "same = np.array_equal(s.run(None, f)[0], first)\n"
        "s.close()\n"
        "if child == 0: os._exit(0 if same else 1)\n"
        "sys.exit(os.waitpid(child, 0)[1] or not same)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "m.coda")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def test_cpu_features() -> None:
    names = _runtime.cpu_features()
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    assert len(names) == len(set(names))
    for name in ("avx2", "fma", "f16c", "bmi2", "avx512f", "avx512vl", "avx512_vnni", "sse4_2", "sha_ni"):
        assert (name in names) == (f" {name} " in flags or f" {name}\n" in flags), name
    assert _runtime.cpu_cores() >= 1
    with Session(to_bytes(handmade.encoder().bundle())) as session:
        assert session.threads == _runtime.cpu_cores()


def _build(folder: Path, sanitize: str) -> Path:
    """The runtime built by itself, as a C project would; returns where its programs are."""
    if not all(shutil.which(tool) for tool in ("cmake", "ninja", "cc")):
        pytest.skip("building the runtime by itself needs cmake, ninja and a C compiler")
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", f"-DCODA_SANITIZE={sanitize}"],
        ["cmake", "--build", str(folder)],
    ):
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    return folder / "runtime"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runtime as it is shipped."""
    return _build(tmp_path_factory.mktemp("build"), "")


def _check(build: Path, folder: Path) -> None:
    write(handmade.encoder().bundle(), folder / "encoder.coda")
    write(handmade.places().bundle(), folder / "places.coda")
    write(handmade.levels(), folder / "levels.coda")
    command = [build / "check", folder / "encoder.coda", folder / "places.coda", folder / "levels.coda"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "0 failures\n"), result.stdout + result.stderr
    command = [build / "share", folder / "encoder.coda", "8", "300", "6"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "") and "8 threads, 300 runs each, 0 differences" in result.stdout


def test_check_program(build: Path, tmp_path: Path) -> None:
    """Values, threads, no allocation in the steady state, misuse, damage, nonsense: runtime/tests/check.c."""
    _check(build, tmp_path)


@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
def test_check_program_under_sanitizers(sanitize: str, tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    probe.with_suffix(".c").write_text("int main(void) { return 0; }")
    compiled = shutil.which("cc") and subprocess.run(["cc", f"-fsanitize={sanitize}", "-o", probe, f"{probe}.c"])
    if not compiled or compiled.returncode != 0 or subprocess.run([probe]).returncode != 0:
        pytest.skip(f"-fsanitize={sanitize} does not work with this compiler and kernel")
    _check(_build(tmp_path / "build", sanitize), tmp_path)


def test_library_is_small_and_alone(build: Path, tmp_path: Path) -> None:
    if not shutil.which("strip") or not shutil.which("ldd"):
        pytest.skip("needs strip and ldd")
    library = build / "libcoda_runtime.so"
    needed = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=True).stdout
    names = {line.split()[0].split("/")[-1].split(".")[0] for line in needed.splitlines()}
    assert names <= {"linux-vdso", "libc", "libm", "libdl", "libpthread", "ld-linux-x86-64", "ld-linux-aarch64"}
    subprocess.run(["strip", "-o", str(tmp_path / "s.so"), str(library)], check=True)
    assert (tmp_path / "s.so").stat().st_size <= 100_000
    symbols = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True).stdout
    assert all(line.split()[-1].startswith("coda_") for line in symbols.splitlines())
