"""Whole models for GPUs: bundles run by the C runtime over a driver that emulates kernels on the CPU, against onnxruntime.

What the runtime does with a real driver is the same calls; ``python -m benchmarks.cuda_models`` is for a machine with a GPU.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cuda_fake_driver as fake
import numpy as np
import numpy.typing as npt
import onnx
import pytest
from graphs import load_fixture, random_inputs, run, sizes_for
from onnx import TensorProto, helper, numpy_helper

import coda_edge
from coda_edge.bundle import reader
from coda_edge.errors import TargetError
from coda_edge.lower.cuda import CudaKernel, cuda_source
from coda_edge.lower.cuda.build import _nvcc
from coda_edge.targets import get, get_all, ranked
from coda_edge.targets.cuda import CudaTarget, present

Array = npt.NDArray[Any]
TOLERANCE = 3e-3


def relative(expected: list[Array], found: dict[str, Array]) -> float:
    """The largest relative L2 error of an output."""
    pairs = zip(expected, found.values(), strict=True)
    return max(float(np.linalg.norm(f.astype(float) - e) / max(np.linalg.norm(e), 1e-30)) for e, f in pairs)


def small(
    nodes: list[onnx.NodeProto], inputs: dict[str, Any], outputs: dict[str, Any], **constants: Array
) -> onnx.ModelProto:
    """A model of ``nodes``; inputs and outputs by name: element type and dimensions."""
    infos = [[helper.make_tensor_value_info(n, t, d) for n, (t, d) in which.items()] for which in (inputs, outputs)]
    given = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "small", *infos, given)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("name", ["bert.sdpa.ts17", "llama_kv.sdpa.ts17"])
def test_export_on_the_emulated_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms absorbed, joined projections, rotary heads, masks, past keys and values; several shapes of one bundle, one graph for each."""
    model = load_fixture(name)
    made = fake.optimized(monkeypatch, model, "cuda", tmp_path, verify=False)
    assert made.bundle.best.target == "cuda" and not made.bundle.best.plan.reads
    calls = []
    for batch, length in ((2, 9), (1, 5)):
        feeds = random_inputs(model, sizes_for(model, batch, length, past=3), seed=length)
        past = 3 if "past" in " ".join(feeds) else 0
        calls.append({**feeds, "attention_mask": np.ones((batch, past + length), np.int64)})
    found, (graphs, graph_launches, launches) = fake.run(tmp_path, [*calls, *calls])
    for feeds, outputs in zip([*calls, *calls], found, strict=True):
        assert relative(run(model, feeds), outputs) <= TOLERANCE
    steps = made.bundle.best.plan.steps
    assert (graphs, graph_launches) == (2, 4)
    assert len(steps) * 2 <= launches <= 2 * sum(1 + (s.finish >= 0) for s in steps)


def test_operators_without_tensor_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution as a window and a product, a convolution in groups, a product of two inputs, softmax, a cumulative sum, all in one bundle."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv", kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Conv", ["r", "g"], ["d"], "grouped", kernel_shape=[3, 3], pads=[1, 1, 1, 1], group=8),
        helper.make_node("Reshape", ["d", "flat"], ["f"]),
        helper.make_node("MatMul", ["f", "y"], ["m"], "product"),
        helper.make_node("Softmax", ["m"], ["s"], axis=-1),
        helper.make_node("CumSum", ["s", "axis"], ["z"]),
        helper.make_node("ReduceMax", ["m"], ["top"], keepdims=0),
    ]
    model = small(
        nodes,
        {"x": (TensorProto.FLOAT, ["n", 3, 8, 10]), "y": (TensorProto.FLOAT, ["n", 20, 7])},
        {"z": (TensorProto.FLOAT, ["n", 8, 7]), "top": (TensorProto.FLOAT, [])},
        w=(rng.standard_normal((8, 3, 3, 3)) / 5).astype(np.float32),
        g=(rng.standard_normal((8, 1, 3, 3)) / 3).astype(np.float32),
        flat=np.array([0, 8, 20], np.int64),
        axis=np.array(1, np.int64),
    )
    fake.optimized(monkeypatch, model, "cuda-sm80", tmp_path, verify=False)
    feeds = {
        "x": rng.standard_normal((2, 3, 8, 10)).astype(np.float32),
        "y": rng.standard_normal((2, 20, 7)).astype(np.float32),
    }
    (found,), _ = fake.run(tmp_path, [feeds])
    assert relative(run(model, feeds), found) <= TOLERANCE


def gathering() -> onnx.ModelProto:
    table = np.arange(12, dtype=np.float32).reshape(6, 2)
    nodes = [helper.make_node("Gather", ["table", "ids"], ["y"], "lookup")]
    return small(nodes, {"ids": (TensorProto.INT64, ["n"])}, {"y": (TensorProto.FLOAT, ["n", 2])}, table=table)


def test_index_out_of_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the step, and the session goes on."""
    fake.optimized(monkeypatch, gathering(), "cuda-sm80", tmp_path, verify=False)
    script = """
import sys, numpy as np, coda_edge
session = coda_edge.Session(sys.argv[1] + "/model.coda")
try:
    session.run(None, {"ids": np.array([1, 9, 2])})
except coda_edge.errors.DataError as error:
    print(error)
print(session.run(None, {"ids": np.array([1, 5, -1])})[0].tolist(), session.target)
"""
    done = fake.process(tmp_path, script)
    assert done.stdout.splitlines() == [
        "an index is out of range in step 'map', from lookup",
        "[[2.0, 3.0], [10.0, 11.0], [10.0, 11.0]] cuda-sm80",
    ]


def test_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a cancelled session end, until it is no longer."""
    fake.optimized(monkeypatch, gathering(), "cuda-sm80", tmp_path, verify=False)
    script = """
import sys, numpy as np, coda_edge
session = coda_edge.Session(sys.argv[1] + "/model.coda")
for on in (True, False):
    session.cancel(on)
    try:
        print(session.run(None, {"ids": np.array([1])})[0].tolist())
    except coda_edge.errors.CancelledError as error:
        print(error)
"""
    assert fake.process(tmp_path, script).stdout.splitlines() == ["the run was cancelled", "[[2.0, 3.0]]"]


EARLY = "unit.enclayer_post.dyn20"
"""An encoder layer: GEMMs, statistics of their rows, attention."""


@pytest.mark.parametrize(("target", "waits"), [("cuda-sm80", False), ("cuda-sm90", True), ("cuda", True)])
def test_kernels_start_early(target: str, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph, on a GPU that can, and only kernels that wait by themselves: code for older GPUs does not, whatever GPU runs it."""
    fake.optimized(monkeypatch, gathering(), target, tmp_path, verify=False)
    script = """
import ctypes, sys, numpy as np, coda_edge
session = coda_edge.Session(sys.argv[1] + "/model.coda")
for _ in range(2):
    session.run(None, {"ids": np.array([1, 5])})
driver = ctypes.CDLL("libcuda.so.1")
print(*(ctypes.c_int.in_dll(driver, "fake_" + name).value for name in ("early", "launches")))
"""
    assert fake.process(tmp_path, script).stdout.split() == ["0", "1"]
    monkeypatch.setenv("FAKE_CUDA_HOPPER", "1")
    assert fake.process(tmp_path, script).stdout.split() == ["1" if waits else "0", "1"]


@pytest.mark.parametrize("name", [EARLY, "llama_kv.sdpa.ts17"])
def test_kernels_wait_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel waits for those before it and then lets the next one start; only a GEMM copies first, its weights."""
    source, count = source_of(name, monkeypatch)
    kernels = [k for k in source.split('extern "C" __global__')[1:] if "{" in k]
    assert len(kernels) == count > 5
    for kernel in kernels:
        assert kernel.count("coda_follow();") == kernel.count("coda_precede();") == 1
        before, after = kernel.split("coda_follow();")
        assert "coda_precede();" in after and "coda_gather" not in before
        copies = re.findall(r"coda_copy\((.*)", before)
        assert bool(copies) == ("coda_mma" in kernel and "gemm_" in kernel[:200]), kernel[:200]
        assert all("&(w_data[" in copy for copy in copies), copies


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc on the PATH")
def test_nothing_is_read_before_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are ``const __restrict__``: the compiler might read them earlier than the source says."""
    source, count = source_of(EARLY, monkeypatch)
    assert "coda_overlaps" not in _nvcc(source, "sm_80", ["-ptx", "-arch=compute_80"])[0].decode()
    ptx = _nvcc(source, "sm_90", ["-ptx", "-arch=compute_90"])[0].decode()
    assert ".global .align 4 .u32 coda_overlaps = 1;" in ptx
    kernels = ptx.split(".entry ")[1:]
    assert len(kernels) == count
    for kernel in kernels:
        before, after = kernel.split("griddepcontrol.wait;")
        assert "griddepcontrol.launch_dependents;" in after
        assert not re.findall(r"\b(?:ld|st|atom|red)\.(?!param|shared|local)", before)
        assert ("cp.async.cg" in before) == ("mma.sync" in kernel and kernel.startswith("gemm_"))


def source_of(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """CUDA C of the model's kernels, for sm_90, and how many they are."""
    kernels: dict[str, CudaKernel] = {}

    def build(self: CudaTarget, given: Sequence[CudaKernel], progress: object = None) -> bytes:
        kernels.update({kernel.symbol: kernel for kernel in given})
        return fake.MODULE

    monkeypatch.setattr(CudaTarget, "build", build)
    coda_edge.optimize(load_fixture(name), "cuda-sm90", verify=False)
    return cuda_source(list(kernels.values()), "sm_90"), len(kernels)


def test_a_batch_beyond_a_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says so, and smaller batches run."""
    nodes = [
        helper.make_node("MatMul", ["q", "k"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"]),
        helper.make_node("MatMul", ["p", "v"], ["y"]),
    ]
    shapes = {"q": ["n", 1, "l", 8], "k": ["n", 1, 8, "l"], "v": ["n", 1, "l", 8]}
    model = small(
        nodes, {n: (TensorProto.FLOAT, s) for n, s in shapes.items()}, {"y": (TensorProto.FLOAT, shapes["q"])}
    )
    fake.optimized(monkeypatch, model, "cuda-sm80", tmp_path, verify=False)
    script = """
import sys, numpy as np, coda_edge
session = coda_edge.Session(sys.argv[1] + "/model.coda")
for n in (65536, 2):
    try:
        print(session.run(None, {"q": np.ones((n, 1, 1, 8), "f"), "k": np.ones((n, 1, 8, 1), "f"), "v": np.ones((n, 1, 1, 8), "f")})[0].sum())
    except coda_edge.errors.ShapeError as error:
        print(error)
"""
    done = fake.process(tmp_path, script)
    refused, ran = done.stdout.splitlines()
    assert refused.endswith(
        "would have more blocks than a GPU starts at once (65535 along an axis): run smaller batches"
    )
    assert ran == "16.0"


def test_arrays_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs and outputs by ``__cuda_array_interface__`` (here the device's memory is the host's); gaps are refused; steps are timed."""
    fake.optimized(monkeypatch, gathering(), "cuda-sm80", tmp_path, verify=False)
    script = """
import sys, numpy as np, coda_edge
class Device:
    def __init__(self, array, strides=None, constant=False):
        self.array = array
        self.__cuda_array_interface__ = {"data": (array.ctypes.data, constant), "shape": array.shape, "typestr": array.dtype.str,
                                         "strides": strides, "version": 3}
session = coda_edge.Session(sys.argv[1] + "/model.coda")
ids, y = Device(np.array([4, 0])), Device(np.zeros((2, 2), np.float32))
assert session.run(None, {"ids": ids}, {"y": y})[0] is y
print(y.array.tolist())
try:
    session.run(None, {"ids": Device(np.array([4, 0, 1]), (16,))})
except coda_edge.errors.ShapeError as error:
    print(error)
try:
    session.run(None, {"ids": ids}, {"y": Device(y.array, constant=True)})
except coda_edge.errors.ShapeError as error:
    print(error)
print([(p.name, p.ns >= 0) for p in session.profile({"ids": np.array([1])}, 3)])
"""
    done = fake.process(tmp_path, script)
    assert done.stdout.splitlines() == [
        "[[8.0, 9.0], [0.0, 1.0]]",
        "input 'ids' is an array on a GPU with gaps or another order: make it contiguous",
        "output 'y' needs an array that is contiguous, aligned and writeable",
        "[('map', True)]",
    ], done.stderr


def test_arrays_of_other_streams_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.optimized(monkeypatch, gathering(), "cuda-sm80", tmp_path, verify=False)
    script = """
import ctypes, sys, numpy as np, coda_edge
class Device:
    def __init__(self, array, stream):
        self.array = array
        self.__cuda_array_interface__ = {"data": (array.ctypes.data, False), "shape": array.shape, "typestr": array.dtype.str,
                                         "stream": stream, "version": 3}
session = coda_edge.Session(sys.argv[1] + "/model.coda")
waits = ctypes.c_int.in_dll(ctypes.CDLL("libcuda.so.1"), "fake_waits")
for stream in (None, 1, 2):
    print(session.run(None, {"ids": Device(np.array([4]), stream)})[0].tolist(), waits.value)
"""
    lines = fake.process(tmp_path, script).stdout.splitlines()
    assert lines == ["[[8.0, 9.0]] 0", "[[8.0, 9.0]] 0", "[[8.0, 9.0]] 1"]


def test_numbers_drawn_in_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs from run to run is not in a graph."""
    node = helper.make_node("RandomUniformLike", ["x"], ["y"], "draw")
    model = small([node], {"x": (TensorProto.FLOAT, ["n"])}, {"y": (TensorProto.FLOAT, ["n"])})
    fake.optimized(monkeypatch, model, "cuda-sm80", tmp_path, verify=False)
    feeds = {"x": np.zeros(50, np.float32)}
    (first, second), (graphs, _, launches) = fake.run(tmp_path, [feeds, feeds])
    assert graphs == 0 and launches >= 2
    assert np.all((first["y"] >= 0) & (first["y"] < 1)) and np.any(first["y"] != second["y"])


_OPEN = """
import sys, numpy as np, coda_edge
try:
    session = coda_edge.Session(sys.argv[1] + "/model.coda")
    print(session.target, session.run(None, {"ids": np.array([1])})[0].tolist())
except coda_edge.errors.TargetError as error:
    print(error)
"""


def test_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver, a driver without a device, kernels for another GPU: each is said; a bundle with a CPU's kernels too runs on these."""
    made = fake.optimized(monkeypatch, gathering(), "cuda-sm80", tmp_path, verify=False)
    assert "the driver finds none" in fake.process(tmp_path, _OPEN, devices=0).stdout
    level = made.bundle.best
    monkeypatch.setattr(fake, "MODULE", b"other")
    fake.optimized(monkeypatch, gathering(), "cuda-sm80", tmp_path, verify=False)
    assert (
        "no kernels for this GPU (Emulator, sm_75) and a driver for CUDA 12.4" in fake.process(tmp_path, _OPEN).stdout
    )
    (tmp_path / "libcuda.so.1").unlink()
    if not get_all("auto")[1:]:
        assert "no driver for one (libcuda.so.1)" in fake.process(tmp_path, _OPEN).stdout
    monkeypatch.setattr(fake, "MODULE", b"kernels")
    both = fake.optimized(monkeypatch, gathering(), "cuda-sm80,native", tmp_path, verify=False).bundle
    cpu = both.levels[0].target
    assert both.best.target == "cuda-sm80" and level.features == ("cuda",)
    assert fake.process(tmp_path, _OPEN).stdout == "cuda-sm80 [[2.0, 3.0]]\n"
    assert fake.process(tmp_path, _OPEN, devices=0).stdout == f"{cpu} [[2.0, 3.0]]\n"


def test_a_device_array_is_refused_by_a_cpu(tmp_path: Path) -> None:
    class Device:
        def __init__(self) -> None:
            self.__cuda_array_interface__ = {"data": (0, False), "shape": (1,), "typestr": "<i8", "version": 3}

    coda_edge.optimize(gathering(), verify=False).save(tmp_path / "model.coda")
    with pytest.raises(coda_edge.errors.ShapeError, match="input 'ids' is on a GPU, and this session runs on the CPU"):
        coda_edge.Session(tmp_path / "model.coda").run(None, {"ids": Device()})  # type: ignore[dict-item]


def test_sizes_that_data_decides_are_refused() -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["places"]),
        helper.make_node("Cast", ["places"], ["y"], to=TensorProto.FLOAT),
    ]
    model = small(nodes, {"x": (TensorProto.FLOAT, ["n"])}, {"y": (TensorProto.FLOAT, [1, "k"])})
    with pytest.raises(TargetError, match="is decided by data, which cuda-sm80 does not run yet"):
        coda_edge.optimize(model, "cuda-sm80", verify=False)


def test_gpus_are_preferred_and_not_native() -> None:
    assert ranked(get_all("cuda-sm90,x86-64-v3,cuda")) == ["x86-64-v3", "cuda", "cuda-sm90"]
    assert get_all("auto")[0] == get("native")


@pytest.mark.gpu
@pytest.mark.skipif(not present() or not shutil.which("nvcc"), reason="no GPU, or no nvcc on the PATH")
def test_exports_on_the_gpu(tmp_path: Path) -> None:
    path = tmp_path / "model.coda"
    for name in ("bert.sdpa.ts17", "gpt2.sdpa.ts17", "unit.enclayer_post.dyn20"):
        model = load_fixture(name)
        coda_edge.optimize(model, present(), verify=False).save(path)
        with coda_edge.Session(path) as session:
            assert session.target == present()
            feeds = random_inputs(model, sizes_for(model, 2, 17))
            found = dict(enumerate(session.run(None, feeds)))
            assert relative(run(model, feeds), {str(i): value for i, value in found.items()}) <= TOLERANCE


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc on the PATH")
def test_fat_binary(tmp_path: Path) -> None:
    """Machine code for three architectures and PTX for newer ones, of a whole model."""
    path = tmp_path / "model.coda"
    coda_edge.optimize(load_fixture("unit.enclayer_post.dyn20"), "cuda", verify=False).save(path)
    library = reader.read(path).best.library
    assert library[:4] == b"\x50\xed\x55\xba"
    assert b"sm_80" in library or len(library) > 50_000
