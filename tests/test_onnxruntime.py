"""Models packaged for onnxruntime: both ways of running equal the source model, and what cannot run says why."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import graphs
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from coda_edge.passes import run_pipeline
from onnx import helper, numpy_helper

from coda_edge import frontend
from coda_edge.cli import main
from coda_edge.errors import TargetError
from coda_edge.inputs import Feeds, Padding, default_sizes, generate_inputs, input_specs
from coda_edge.onnxruntime import Packaged, operators, package, packaging
from coda_edge.onnxruntime.build import NATIVE, build
from coda_edge.onnxruntime.operators import _bindings, claim
from coda_edge.onnxruntime.packaging import session
from coda_edge.symbolic import parse_dim
from coda_edge.targets import get
from coda_edge.verify import ort_session, relative_error

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Written:
    """A source model, what was made of it, and where."""

    source: onnx.ModelProto
    packaged: Packaged
    onnx: Path
    library: Path

    def feeds(self, batch: int, length: int, padding: Padding = "none") -> Feeds:
        specs = input_specs(self.source)
        return generate_inputs(specs, default_sizes(specs, batch, length), seed=batch + length, padding=padding)

    def expected(self, feeds: Feeds) -> list[np.ndarray]:
        return list(ort_session(self.source).run(None, feeds))

    def ways(self, threads: int = 2) -> list[ort.InferenceSession]:
        """onnxruntime with the library, and without it."""
        return [session(str(self.onnx), self.library, threads), ort_session(str(self.onnx))]


def write(source: onnx.ModelProto, folder: Path) -> Written:
    packaged = package(source, verify=False)
    files = folder / "m.onnx", folder / "m.so"
    packaged.save(*files)
    return Written(frontend.load(source), packaged, *files)


@pytest.fixture(scope="module")
def tiny(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(onnx.load(tiny_model), tmp_path_factory.mktemp("tiny_ort"))


def assert_equal(written: Written, feeds: Feeds) -> None:
    expected = written.expected(feeds)
    for way in written.ways():
        for got, want in zip(way.run(None, feeds), expected, strict=True):
            assert got.shape == want.shape
            assert got.dtype == want.dtype
            assert relative_error(got, want) <= TOLERANCE


@pytest.mark.parametrize(
    ("batch", "length", "padding"),
    [(1, 1, "none"), (1, 64, "none"), (3, 7, "left"), (3, 1, "none"), (2, 33, "holes"), (5, 16, "right")],
)
def test_both_ways_equal_the_source(tiny: Written, batch: int, length: int, padding: Padding) -> None:
    assert_equal(tiny, tiny.feeds(batch, length, padding))


@pytest.mark.parametrize("name", ["bert.sdpa.dyn20", "llama_kv.sdpa.ts17"])
def test_exports(name: str, tmp_path: Path) -> None:
    written = write(graphs.load_fixture(name), tmp_path)
    assert written.packaged.functions == {}
    for batch, length, padding in ((1, 1, "none"), (3, 7, "left"), (2, 16, "right")):
        assert_equal(written, written.feeds(batch, length, padding))


def profile(way: Callable[[ort.SessionOptions], ort.InferenceSession], feeds: Feeds, folder: Path) -> list[str]:
    """The operators that onnxruntime's own profile shows, one for each node that ran."""
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    running = way(options)
    running.run(None, feeds)
    events = json.loads(Path(running.end_profiling()).read_text())
    return [e["args"]["op_name"] for e in events if e["cat"] == "Node" and e["name"].endswith("_kernel_time")]


def test_the_profile_shows_who_runs(tiny: Written, tmp_path: Path) -> None:
    ours = set(tiny.packaged.operators.values())
    assert {n.partition("_")[0] for n in ours} >= {"Gemm", "Attention", "Map"}

    def open_session(options: ort.SessionOptions) -> ort.InferenceSession:
        return ort.InferenceSession(str(tiny.onnx), options, providers=["CPUExecutionProvider"])

    def with_library(options: ort.SessionOptions) -> ort.InferenceSession:
        options.register_custom_ops_library(str(tiny.library))
        return open_session(options)

    feeds = tiny.feeds(2, 9)
    ran = profile(with_library, feeds, tmp_path)
    assert sorted(n for n in ran if n in ours) == sorted(tiny.packaged.operators.values())
    assert not {"MatMul", "Gemm", "Softmax", "LayerNormalization"} & set(ran)
    ran = profile(open_session, feeds, tmp_path)
    assert not ours & set(ran)
    assert "Softmax" in ran


def test_the_model_is_valid_and_its_names_are_per_operator(tiny: Written) -> None:
    onnx.checker.check_model(tiny.packaged.model, full_check=True)
    functions = {f.name for f in tiny.packaged.model.functions}
    assert functions >= set(tiny.packaged.operators.values())
    called = {n.op_type for n in tiny.packaged.model.graph.node if n.domain == "coda"}
    assert called == set(tiny.packaged.operators.values())
    assert len(called) < len(tiny.packaged.operators)


def test_sessions_and_threads_share_a_library(tiny: Written) -> None:
    feeds = tiny.feeds(3, 21, "left")
    expected = tiny.expected(feeds)
    sessions = [session(str(tiny.onnx), tiny.library, threads) for threads in (1, 2, 3)]
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda i: sessions[i % 3].run(None, feeds), range(24)))
    for result in results:
        assert max(relative_error(a, b) for a, b in zip(result, expected, strict=True)) <= TOLERANCE


def linear(between: Sequence[onnx.NodeProto] = (helper.make_node("Neg", ["r"], ["s"]),)) -> onnx.ModelProto:
    """Two linear layers of odd sizes, with ``between`` them what makes s of r, which are [rows, 37]; ``places`` is [2, 3]."""
    rng = np.random.default_rng(1)
    shapes = {"w": (11, 37), "b": (37,), "v": (37, 5), "c": (5,)}
    weights: dict[str, np.ndarray] = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    weights["places"] = np.array([2, 3])
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["q"]),
        helper.make_node("Relu", ["q"], ["r"]),
        *between,
        helper.make_node("MatMul", ["s", "v"], ["t"]),
        helper.make_node("Add", ["t", "c"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["rows", 11])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["rows", 5])],
        [numpy_helper.from_array(a, name) for name, a in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def test_an_operator_that_is_not_lowered_stays(tmp_path: Path) -> None:
    between = [
        helper.make_node("Unsqueeze", ["r", "places"], ["image"]),
        helper.make_node("LRN", ["image"], ["normed"], size=3),
        helper.make_node("Squeeze", ["normed", "places"], ["s"]),
    ]
    written = write(linear(between), tmp_path)
    assert [n.op_type for n in written.packaged.model.graph.node if n.op_type == "LRN" and not n.domain] == ["LRN"]
    assert len(written.packaged.operators) == 2
    for rows in (1, 6, 50):
        feeds = {"x": np.random.default_rng(rows).standard_normal((rows, 11), np.float32)}
        assert_equal(written, feeds)


def test_no_rows(tmp_path: Path) -> None:
    written = write(linear(), tmp_path)
    assert_equal(written, {"x": np.zeros((0, 11), np.float32)})


def test_a_node_that_the_library_has_no_room_for_stays_a_function(
    tiny: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "MAX_OPERANDS", 4)
    written = write(tiny.source, tmp_path)
    left = written.packaged.functions
    assert len(left) >= 2
    assert all(reason.endswith("buffers, more than 4") for reason in left.values())
    assert written.packaged.operators.keys().isdisjoint(left)
    assert {n.name for n in written.packaged.model.graph.node} >= {*left, *written.packaged.operators}
    assert_equal(written, tiny.feeds(3, 7, "left"))


_SANITIZED = """
import sys
import numpy as np, onnxruntime as ort
for model, library, *files in (line.split("|") for line in sys.argv[1:]):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 3
    options.register_custom_ops_library(library)
    try:
        session = ort.InferenceSession(model, options)
    except Exception:
        print("refused")
        continue
    for path in files:
        try:
            session.run(None, dict(np.load(path)))
            print("ran")
        except Exception as e:
            print(type(e).__name__)
"""


def _shared(name: str) -> str:
    """Where the compiler's runtime library is; empty if it is not there."""
    if not shutil.which("cc"):
        return ""
    found = subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip() if "/" in found.stdout else ""


@pytest.mark.skipif(not _shared("libasan.so") or not _shared("libubsan.so"), reason="needs the compiler's sanitizers")
def test_clean_under_sanitizers(tiny: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=undefined",
        "-Wl,--undefined-version",
        "-Wl,-z,undefs",
    )
    monkeypatch.setattr(packaging, "build", partial(build, flags=flags))
    written = write(tiny.source, tmp_path)
    good = [tiny.feeds(1, 1), tiny.feeds(3, 7, "left"), tiny.feeds(2, 64)]
    bad = [tiny.feeds(1, 65), good[1] | {"input_ids": good[1]["input_ids"] + 1000}]
    layers = package(linear(), verify=False, weights="library")
    rows = [{"x": np.ones((n, 11), np.float32)} for n in (0, 6)]
    files = [tmp_path / f"{i}.npz" for i in range(len([*good, *bad, *rows]))]
    for file, feeds in zip(files, [*good, *bad, *rows], strict=True):
        np.savez(file, allow_pickle=False, **feeds)
    runs = [[written.onnx, written.library, *files[:5]]]
    for name, digest in (("layers", None), ("changed", b"0" * 16), ("none", b"")):
        for node in layers.model.graph.node if digest is not None else ():
            next(a for a in node.attribute if a.name == "weights").s = digest
        layers.save(tmp_path / f"{name}.onnx", tmp_path / "layers.so")
        runs.append([tmp_path / f"{name}.onnx", tmp_path / "layers.so", *files[5:]])
    environment = {"LD_PRELOAD": f"{_shared('libasan.so')} {_shared('libubsan.so')}", "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, "-c", _SANITIZED, *("|".join(map(str, run)) for run in runs)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ran"] * 3 + ["InvalidArgument"] * 2 + ["ran"] * 2 + ["refused"] * 2


def failure(run: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:  # onnxruntime's errors have no common class of their own
        run()
    return str(caught.value)


def test_refused_inputs_say_why(tiny: Written) -> None:
    ours = tiny.ways()[0]
    feeds = tiny.feeds(2, 8)
    mask, ids = "attention_mask", "input_ids"
    message = failure(lambda: ours.run(None, feeds | {mask: feeds[mask][:, :5]}))
    assert re.search(r"axis \d of .* is \d, expected \d by the other inputs", message)
    message = failure(lambda: ours.run(None, feeds | {ids: feeds[ids] + 1000}))
    assert "an index is out of range" in message
    message = failure(lambda: ours.run(None, tiny.feeds(1, 65)))
    assert "asks for 65 <= 64" in message
    assert_equal(tiny, feeds)


def load(model: onnx.ModelProto, library: Path) -> str:
    return failure(lambda: session(model, library))


def test_a_library_of_another_model_is_refused(tmp_path: Path) -> None:
    written = write(linear(), tmp_path)
    model = onnx.ModelProto()
    model.CopyFrom(written.packaged.model)
    w = next(t for t in model.graph.initializer if t.name == "w")
    w.CopyFrom(numpy_helper.from_array(np.zeros((13, 37), np.float32), "w"))
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 13
    assert "axis 0 of constant 'w' is 13, expected 11: use the model and the library of one build" in load(
        model, written.library
    )


def test_weights_may_be_inputs(tmp_path: Path) -> None:
    written = write(linear(), tmp_path)
    model = onnx.ModelProto()
    model.CopyFrom(written.packaged.model)
    moved = next(t for t in model.graph.initializer if t.name == "w")
    model.graph.input.append(helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [11, 37]))
    model.graph.initializer.remove(moved)
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 11), np.float32)}
    given = session(model, written.library).run(None, feeds | {"w": numpy_helper.to_array(moved)})
    assert relative_error(given[0], written.expected(feeds)[0]) <= TOLERANCE


def test_a_cpu_without_a_feature_is_refused(tmp_path: Path) -> None:
    graph = frontend.normalize(frontend.load(linear()))
    run_pipeline(graph)
    target = get()
    claims = claim(graph, target)
    library = tmp_path / "m.so"
    named = {f"op{i}": op for i, op in enumerate(claims.operators.values())}
    library.write_bytes(build(named, claims.kernels, replace(target, features=(*target.features, "sse9"))))
    message = failure(lambda: ort.SessionOptions().register_custom_ops_library(str(library)))
    assert "need the CPU feature sse9, which this CPU lacks" in message


class _ApiBase(ctypes.Structure):
    _fields_ = (
        ("get_api", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)),
        ("version", ctypes.CFUNCTYPE(ctypes.c_void_p)),
    )


def test_an_old_onnxruntime_is_refused(tiny: Written) -> None:
    messages: list[bytes] = []

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    def create_status(code: int, message: bytes) -> int:
        messages.append(message)
        return 1

    old = (ctypes.c_void_p * 26)(ctypes.cast(create_status, ctypes.c_void_p))
    version, fields = ctypes.create_string_buffer(b"1.17.3"), dict(_ApiBase._fields_)
    base = _ApiBase(
        fields["get_api"](lambda wanted: ctypes.addressof(old) if wanted <= 17 else None),
        fields["version"](lambda: ctypes.addressof(version)),
    )
    register = ctypes.CDLL(str(tiny.library)).RegisterCustomOps
    register.restype = ctypes.c_void_p
    assert register(None, ctypes.byref(base)) == 1
    assert messages == [
        b"onnxruntime 1.17.3 is too old for this library: install 1.18 or later, or leave the library out, and the model "
        b"runs by its functions"
    ]


# Positions in the official OrtApi of API versions 18 to 29, and in OrtCustomOp.
_SLOTS = {
    "OrtApi": {
        "CreateStatus": 0,
        "CreateCustomOpDomain": 26,
        "CustomOpDomain_Add": 27,
        "AddCustomOpDomain": 28,
        "GetTensorMutableData": 51,
        "CreateTensorTypeAndShapeInfo": 57,
        "SetTensorElementType": 58,
        "SetDimensions": 59,
        "GetTensorElementType": 60,
        "GetDimensionsCount": 61,
        "GetDimensions": 62,
        "GetSymbolicDimensions": 63,
        "GetTensorTypeAndShape": 65,
        "CreateMemoryInfo": 68,
        "KernelContext_GetInputCount": 88,
        "KernelContext_GetInput": 90,
        "KernelContext_GetOutput": 91,
        "ReleaseStatus": 93,
        "ReleaseMemoryInfo": 94,
        "ReleaseTensorTypeAndShapeInfo": 99,
        "KernelInfoGetAttribute_string": 87,
        "ReleaseCustomOpDomain": 101,
        "ReleaseAllocator": 132,
        "KernelInfo_GetNodeName": 244,
        "KernelInfoGetConstantInput_tensor": 249,
        "KernelContext_GetAllocator": 253,
        "ShapeInferContext_GetInputCount": 267,
        "ShapeInferContext_GetInputTypeShape": 268,
        "ShapeInferContext_SetOutputTypeShape": 270,
        "SetSymbolicDimensions": 271,
        "KernelContext_ParallelFor": 274,
    },
    "OrtCustomOp": {
        "CreateKernel": 1,
        "GetName": 2,
        "KernelDestroy": 9,
        "GetInputCharacteristic": 10,
        "GetInputMemoryType": 12,
        "GetVariadicInputMinArity": 13,
        "CreateKernelV2": 17,
        "KernelComputeV2": 18,
        "InferOutputShapeFn": 19,
        "GetStartVersion": 20,
        "GetEndVersion": 21,
        "GetMayInplace": 22,
        "ReleaseAliasMap": 25,
    },
    "OrtApiBase": {"GetApi": 0, "GetVersionString": 1},
    "OrtAllocator": {"Alloc": 1, "Free": 2},
}


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_slots_of_the_abi(tmp_path: Path) -> None:
    checks = [
        f'_Static_assert(offsetof({struct}, {member}) == {slot} * sizeof(void *), "{member}");'
        for struct, members in _SLOTS.items()
        for member, slot in members.items()
    ]
    source = tmp_path / "check.c"
    source.write_text('#include "ort_api.h"\n' + "\n".join(checks) + "\n")
    subprocess.run(["cc", "-std=c11", f"-I{NATIVE}", "-c", str(source), "-o", str(tmp_path / "check.o")], check=True)
    declared = set(re.findall(r"\(\*(\w+)\)\(", (NATIVE / "ort_api.h").read_text()))
    used = {m for p in NATIVE.glob("*.c") for m in re.findall(r"(?:api|from|base|found|first)->(\w+)\(", p.read_text())}
    assert used - {"inputs"} <= declared
    assert {m for m in declared if m in used} <= {m for members in _SLOTS.values() for m in members}


def test_sizes_that_only_sums_show() -> None:
    bound = _bindings([(parse_dim("b"), parse_dim("past + s")), (parse_dim("s"), 4), (parse_dim("4*k"),)])
    assert {s.name: str(d) for s, d in bound.items()} == {
        "b": "in0_0",
        "s": "in1_0",
        "past": "in0_1 - in1_0",
        "k": "in2_0/4",
    }


def test_cuda_is_no_target() -> None:
    with pytest.raises(TargetError, match="is no CPU"):
        package(linear(), target="cuda-sm80")


def test_command(tmp_path: Path) -> None:
    source = tmp_path / "linear.onnx"
    onnx.save(linear(), source)
    out = tmp_path / "made"
    result = CliRunner().invoke(main, ["package", str(source), "--form", "ort", "-o", str(out), "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["onnx"], said["library"], said["form"]) == (f"{out}.onnx", f"{out}.so", "ort")
    assert said["functions"] == {}
    assert said["max_rel_error"] <= TOLERANCE
    x = np.random.default_rng(0).standard_normal((3, 11), np.float32)
    (got,) = session(said["onnx"], said["library"]).run(None, {"x": x})
    (want,) = ort_session(str(source)).run(None, {"x": x})
    assert relative_error(got, want) <= TOLERANCE
    result = CliRunner().invoke(main, ["package", str(tmp_path / "none.onnx"), "-o", str(out)])
    assert result.exit_code == 1
    assert "no such file" in result.stderr
