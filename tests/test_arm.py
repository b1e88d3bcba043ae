"""Cross-compiled kernels and the cross-compiled runtime on emulated machines, against the references that this machine's are held to."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import handmade
import kernel_harness
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import test_attention
import test_gemm
import test_grouped
import test_half_conversion
import test_intrinsics
from emulation import LONGER, MACHINES, ROOT, Machine, RemoteLibrary, RemoteSession, remote

import coda_edge
from benchmarks import arm_instructions, arm_mca
from coda_edge import targets
from coda_edge.bundle import writer
from coda_edge.inputs import generate_inputs
from coda_edge.lower.dot import dot_for
from coda_edge.lower.gemm import Windows
from coda_edge.lower.weights import WeightFormat
from coda_edge.schedule import choose_gemm
from coda_edge.targets import link
from coda_edge.weights import Weight
from coda_edge.window import Window

Device = tuple[targets.Target, Machine]


@pytest.fixture(params=[*MACHINES, *(pytest.param(name, marks=pytest.mark.emulated) for name in LONGER)])
def device(request: pytest.FixtureRequest) -> Device:
    """A target and a machine that runs its kernels."""
    name, machine = (MACHINES | LONGER)[request.param]
    if machine.lacks:
        pytest.skip(machine.lacks)
    return targets.get(name), machine


@pytest.fixture
def target(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[targets.Target]:
    """The device's target, while the tests of kernels run them there."""
    opened: list[RemoteLibrary] = []

    def library(data: bytes) -> RemoteLibrary:
        opened.append(RemoteLibrary(device[1], data))
        return opened[-1]

    for module in (test_attention, test_gemm, test_grouped, test_half_conversion, test_intrinsics):
        monkeypatch.setattr(module, "Library", library)
    yield device[0]
    for one in opened:
        one.close()
    for module in (test_attention, test_gemm, test_grouped, test_half_conversion):
        module.built.cache_clear()


CROSS = [name for name, found in targets.targets().items() if name.startswith(("arm", "riscv")) and found.loadable]


@pytest.mark.parametrize("name", CROSS)
def test_libraries_need_nothing(name: str) -> None:
    """Every target links here, with 64-bit division and half precision, which not all machines have instructions for."""
    pytest.importorskip("ziglang")
    target = targets.get(name)
    program = test_gemm.EpilogueProgram.parse(test_gemm.PROGRAMS["half storage"])
    weight = np.ones((8, 24), np.float32)
    call = test_gemm.lower_gemm(target, "g", program, "a", weight, ["r"], ["y"], test_gemm.symbol("M"))
    library = target.build([call.kernel])
    assert library[:4] == b"\x7fELF" and link.undefined_symbols(library) == () and len(library) < 64 << 10


def _kernel_compiler(triple: str) -> list[str]:
    """The command that makes a shared library of kernels in C for a machine, but for its sources and its name."""
    command = [sys.executable, "-m", "ziglang", "cc", "-target", triple]
    return [*command, "-O2", "-ffreestanding", "-shared", "-fPIC"]


@pytest.mark.parametrize("triple", ["arm-linux-gnueabihf", "aarch64-linux-gnu"])
def test_undefined_symbols_are_found(triple: str, tmp_path: Path) -> None:
    """In 32-bit and 64-bit libraries."""
    pytest.importorskip("ziglang")
    (tmp_path / "k.c").write_text("float cosf(float); float k(float x) { return cosf(x); }")
    alone = ("-nostdlib", "-fno-sanitize=undefined", "-fno-unwind-tables", "-fno-exceptions")
    subprocess.run([*_kernel_compiler(triple), *alone, "k.c", "-o", "k.so"], cwd=tmp_path, check=True)
    assert link.undefined_symbols((tmp_path / "k.so").read_bytes()) == ("cosf",)


def test_the_loop_of_a_trace() -> None:
    """The block that takes the most instructions; multiply-adds of all kinds are counted."""
    inner = ["fmla\tv0.4s, v1.4s, v2.4s", "subs\tx1, x1, #1", "b.ne\t#4"]
    trace = ["mov\tx1, x0", *3 * inner, "cbnz\tx0, #4", "ret"]
    assert arm_mca.Executed(trace, 3).loop == inner and arm_mca.multiplies(trace) == 3


def test_instructions_of_a_run_are_counted(tmp_path: Path) -> None:
    """A product of [16, 64] and [64, 48] takes 12288 multiply-adds of four lanes, and loads and loops besides."""
    core = next(core for core in arm_instructions.CORES if core.target == "arm64-linux-a76")
    if shutil.which("cc") is None or MACHINES["neoverse-n1"][1].lacks:
        pytest.skip("needs a C compiler and the emulated machine")
    tensor = partial(onnx.helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [tensor("x", shape=["rows", 64])],
        [tensor("y", shape=["rows", 48])],
        [onnx.numpy_helper.from_array(np.ones((64, 48), np.float32), "w")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    found = arm_instructions.count(core, model, {"rows": 16}, tmp_path)
    assert found.multiplies == 16 * 64 * 48 // 4 and 1.2 < found.instructions / found.multiplies < 3


def test_features(device: Device) -> None:
    """The runtime sees what the machine has, and the target needs no more."""
    target, machine = device
    command = machine.command(remote(machine.triple), "features")
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert target.missing(found) == () and len(set(found)) == len(found)


def test_gemm_sizes(target: targets.Target) -> None:
    program = test_gemm.library.bias_residual_moments.program
    for n, k in ((100, 37), (5, 3), (384, 64)):
        for m in (1, 2, 7, 130):
            test_gemm.check(target, program, m, n, k, offset=3.0)


@pytest.mark.parametrize("name", ["rotate", "all statistics", "half storage", "integer", "bool mask"])
def test_gemm_programs(target: targets.Target, name: str) -> None:
    program = test_gemm.EpilogueProgram.parse(test_gemm.PROGRAMS[name])
    loose = {"half storage": 5e-4, "integer": 0.2}.get(name, 3e-6)
    for m in (1, 13, 130):
        test_gemm.check(target, program, m, 132, 20, tolerance=loose)


def test_grouped_convolutions(target: targets.Target) -> None:
    view, shapes = test_grouped.WINDOWS["5x5, strides"]
    test_grouped.check(target, view, (*shapes[0], 37), 37, 37)
    channels, n, group = test_grouped.GROUPS["narrow groups"]
    test_grouped.check(target, test_grouped.window((3, 3), before=1, after=1), (2, 5, 11, channels), n, group)


def test_gemm_activations(target: targets.Target) -> None:
    for name in ("bias_gelu", "norm_bias_gelu", "swiglu"):
        test_gemm.check(target, getattr(test_gemm.library, name).program, 9, 64, 33)


@pytest.mark.parametrize("dtype", test_half_conversion.DTYPES)
def test_half_conversions(target: targets.Target, dtype: str) -> None:
    test_half_conversion.check_widening(target, dtype)
    test_half_conversion.check_narrowing(target, dtype)


def test_gemm_heads(target: targets.Target) -> None:
    for batch, sequence in ((1, 1), (3, 5), (2, 65)):
        program = test_gemm.qkv_program(60, 20)
        test_gemm.check(target, program, batch * sequence, 180, 16, rows_per_batch=sequence)


def test_attention_sizes(target: targets.Target) -> None:
    for depth, columns in ((32, 32), (20, 28)):
        for sizes in ((1, 1, 1, 1), (2, 3, 7, 7), (1, 1, 65, 17), (1, 1, 100, 129)):
            test_attention.check(target, test_attention.PLAIN, sizes, depth, columns)


def test_attention_masks(target: targets.Target) -> None:
    test_attention.test_padding(target)
    test_attention.test_rows_without_keys(target, True)


@pytest.fixture
def kernels(target: targets.Target) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    return test_intrinsics.pointwise(target, *test_intrinsics.FUNCTIONS, "sin", "cos")


def test_functions(
    target: targets.Target, kernels: dict[str, Callable[[np.ndarray], np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors and limits as on x86; NEON of 32-bit Arm takes subnormal numbers for zero, so that their logarithm is -inf."""
    if target.name == "armv7-linux":
        reference, ranges, bound = test_intrinsics.FUNCTIONS["log"]
        monkeypatch.setitem(test_intrinsics.FUNCTIONS, "log", (reference, ranges[1:], bound))
        assert kernels["log"](np.full(8, 1e-40, np.float32)).tolist() == [-np.inf] * 8
    for name in test_intrinsics.FUNCTIONS:
        test_intrinsics.test_relative_error(name, kernels)
    for name in ("sin", "cos"):
        test_intrinsics.test_sine(name, kernels)
    for name in test_intrinsics.LIMITS:
        test_intrinsics.test_limits(name, kernels)


def test_model(device: Device, tiny_model: Path) -> None:
    """A whole encoder against onnxruntime on this machine: batches, odd lengths, padding, threads."""
    target, machine = device
    data = writer.to_bytes(coda_edge.optimize(tiny_model, target.name, verify=False).bundle)
    model, reference = onnx.load(tiny_model), ort.InferenceSession(tiny_model)
    for threads in (1, 2):
        session = RemoteSession(machine, data, threads)
        for batch, sequence, padding in ((1, 1, "none"), (3, 7, "left"), (2, 61, "right"), (1, 64, "none")):
            feeds = generate_inputs(model, {"batch": batch, "sequence": sequence}, padding=padding)
            (expected,), (found,) = reference.run(None, feeds), session.run(feeds)
            assert found.shape == expected.shape
            assert np.abs(found - expected).max() <= 5e-6 * np.abs(expected).max()
        session.close()


def byte_product(k: int, n: int, zero: np.generic) -> onnx.ModelProto:
    """y = float of the product of x, quantised with the zero point ``zero``, and bytes; plus a row."""
    rng = np.random.default_rng(k)
    constants = {
        "scale": np.float32(0.05),
        "zero": zero,
        "w": rng.integers(-128, 128, (k, n)).astype(np.int8),
        "b": rng.integers(-9, 9, n).astype(np.float32),
    }
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        onnx.helper.make_node("MatMulInteger", ["q", "w", "zero"], ["sums"]),
        onnx.helper.make_node("Cast", ["sums"], ["f"], to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node("Add", ["f", "b"], ["y"]),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "bytes",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["rows", k])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["rows", n])],
        [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize(("k", "n", "zero"), [(3, 8, np.int8(3)), (130, 100, np.uint8(131))])
def test_products_of_bytes(device: Device, k: int, n: int, zero: np.generic) -> None:
    """Exactly onnxruntime's, by SMMLA or SDOT where the target has them and in float32 elsewhere."""
    target, machine = device
    model = byte_product(k, n, zero)
    session = RemoteSession(machine, writer.to_bytes(coda_edge.optimize(model, target.name, verify=False).bundle))
    reference = ort.InferenceSession(model.SerializeToString())
    for rows in (1, 2, 7, 30):
        x = 4 * np.random.default_rng(rows).standard_normal((rows, k)).astype(np.float32)
        np.testing.assert_array_equal(session.run({"x": x})[0], reference.run(None, {"x": x})[0])
    session.close()


@pytest.mark.parametrize("channels", [8, 12])
def test_windows_of_bytes(target: targets.Target, channels: int) -> None:
    """Exact sums of windows, whose runs are whole words of all operations or of the narrower ones only; odd numbers of rows and columns."""
    if not target.dot:
        pytest.skip(f"{target.name} has no products of bytes")
    window, sizes, n = Window((3, 3), (1, 1), (2, 1), (1, 1), (1, 1)), (5, 7), 29
    out = window.out(sizes)
    rows = int(out[0]) * int(out[1])
    rng = np.random.default_rng(channels)
    w = rng.integers(-128, 128, (9 * channels, n)).astype(np.int8)
    x = rng.integers(-128, 128, (1, *sizes, channels)).astype(np.int8)
    program = test_gemm.EpilogueProgram.parse("(acc: tile i32) -> (y: tile = v0) {\n  v0 = add acc acc\n}")
    windows = Windows(window, 1, sizes)
    call = test_gemm.lower_gemm(target, "g", program, "x", w, [], ["y"], rows, windows=windows, zero=-7)
    library = test_gemm.Library(target.build([call.kernel]))
    found = kernel_harness.run(target, call, {"x": x, "y": np.zeros((rows, n), np.int32)}, library=library)["y"]
    padded = np.pad(x.astype(np.int64), [(0, 0), (1, 1), (1, 1), (0, 0)], constant_values=-7)
    expected = [
        2
        * sum(
            padded[0, i + 2 * a, j + b] @ w.astype(np.int64).reshape(3, 3, channels, n)[a, b]
            for a in range(3)
            for b in range(3)
        )
        for i in range(int(out[0]))
        for j in range(int(out[1]))
    ]
    np.testing.assert_array_equal(found, expected)


def test_words_of_bytes() -> None:
    """Of 8 rows, a column's lie side by side, zeros behind the last; parts of a row that are no such words take words of four."""
    w = np.arange(-5, 28, dtype=np.int8).reshape(11, 3)
    (panels,) = WeightFormat("int8x8").packed("w", Weight(w), [[0, 1], [2]])
    padded = np.pad(w, [(0, 5), (0, 0)])
    expected = [padded[at : at + 8, c] for columns in ((0, 1), (2,)) for at in (0, 8) for c in columns]
    assert panels.data.dtype == np.uint64 and panels.data.tobytes() == np.concatenate(expected).tobytes()
    assert [dot_for("smmla128", run) for run in (0, 8, 12)] == ["smmla128", "smmla128", "sdot128"]
    assert dot_for("sdot128", 4) == "sdot128"


def test_in_order_cores_ask_for_weights_less_often() -> None:
    chosen = {name: choose_gemm(targets.get(f"arm64-linux-{name}"), 768, 768).stride for name in ("a53", "a55", "a76")}
    assert chosen == {"a53": 64, "a55": 64, "a76": 16}


def test_rounding(device: Device) -> None:
    """Ties, signs of zero, large numbers, infinities and NaN, also where no instruction rounds."""
    target, machine = device
    kinds = {"Round": np.round, "Floor": np.floor, "Ceil": np.ceil}
    value = partial(onnx.helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT, shape=["n"])
    nodes = [onnx.helper.make_node(kind, ["x"], [kind]) for kind in kinds]
    graph = onnx.helper.make_graph(nodes, "rounding", [value("x")], [value(kind) for kind in kinds])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    session = RemoteSession(machine, writer.to_bytes(coda_edge.optimize(model, target.name, verify=False).bundle))
    small = np.arange(-20, 20, dtype=np.float32) / 4
    limits = [0.0, -0.0, np.inf, -np.inf, np.nan, 8388607.5, -8388608.0, 3e38, 0.49999997, -0.3, 1 - 2**-24]
    x = np.array([*small, *limits], np.float32)
    for found, reference in zip(session.run({"x": x}), kinds.values(), strict=True):
        np.testing.assert_array_equal(found, reference(x))
        assert (np.signbit(found) == np.signbit(reference(x)))[~np.isnan(x)].all()
    session.close()


def test_a_bundle_for_another_machine_is_refused(device: Device) -> None:
    session = RemoteSession(device[1], writer.to_bytes(handmade.encoder().bundle()))
    with pytest.raises(AssertionError, match=r"bundle's kernels are for .*, this machine is"):
        session.run({name: np.zeros(6, np.float32) for name in ("ids", "bias")})


@pytest.mark.parametrize("name", ["cortex-a72", "armv7", pytest.param("riscv64", marks=pytest.mark.emulated)])
def test_cross_build(name: str, tmp_path: Path) -> None:
    """The toolchain of docs/embed.md: a small library, and the runtime's own check passes on the machine."""
    machine = MACHINES[name][1]
    if machine.lacks or not all(shutil.which(tool) for tool in ("cmake", "ninja")):
        pytest.skip(machine.lacks or "needs cmake and ninja")
    options = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", f"-DCODA_PYTHON={sys.executable}"]
    options += [f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'runtime/cross.cmake'}", f"-DCODA_TRIPLE={machine.triple}"]
    for command in (["-S", str(ROOT), "-B", str(tmp_path), *options], ["--build", str(tmp_path)]):
        done = subprocess.run(["cmake", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runtime/libcoda_runtime.so").stat().st_size <= 100_000
    (tmp_path / "k.c").write_text(handmade.KERNELS)
    command = [*_kernel_compiler(machine.triple), "-nostdlib", "k.c", "-lcompiler_rt", "-s", "-o", "k.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    library = (tmp_path / "k.so").read_bytes()
    bundles = {
        "encoder.coda": handmade.encoder().bundle(library=library),
        "places.coda": handmade.places().bundle(library=library),
        "levels.coda": handmade.levels(library=library),
    }
    for name, bundle in bundles.items():
        writer.write(bundle, tmp_path / name)
    command = machine.command(tmp_path / "runtime/check", *(tmp_path / name for name in bundles))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0 failures\n"), done.stdout + done.stderr
