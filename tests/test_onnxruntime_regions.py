"""Models for the generic operator library: regions that run by bundles, or by the model's own nodes, and what goes wrong with them."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import onnxruntime_headers
import pytest
from click.testing import CliRunner
from graphs import node_model
from onnx import TensorProto, helper, numpy_helper
from rewriting import normal

from benchmarks import onnxruntime as compared
from coda_edge.bundle import writer
from coda_edge.cli import main
from coda_edge.errors import InvalidModel
from coda_edge.inputs import default_sizes, generate_inputs, input_specs
from coda_edge.onnxruntime import Bundled, library_path, package_regions
from coda_edge.onnxruntime.regions import METADATA, session
from coda_edge.verify import TOLERANCE, ort_session, relative_error

Feeds = Mapping[str, np.ndarray]


@pytest.fixture(scope="module")
def tiny(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny encoder, packaged: the model's file."""
    path = tmp_path_factory.mktemp("regions") / "m.onnx"
    made = package_regions(tiny_model)
    assert made.left is None and made.max_rel_error is not None and made.max_rel_error <= TOLERANCE
    assert [p.name for p in made.save(path)] == ["m.onnx", "m.onnx.data", "m.coda"]
    return path


def feeds_of(model: Path, batch: int, length: int) -> Feeds:
    return generate_inputs(input_specs(onnx.load(model)), default_sizes(input_specs(onnx.load(model)), batch, length))


def ops_run(path: Path, feeds: Feeds, library: bool, folder: Path) -> set[str]:
    """The operators that a session runs, by onnxruntime's own profile."""
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    if library:
        options.register_custom_ops_library(library_path())
    made = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    made.run(None, dict(feeds))
    events = json.loads(Path(made.end_profiling()).read_text())
    return {e["args"]["op_name"] for e in events if e["cat"] == "Node" and e["name"].endswith("_kernel_time")}


def assert_same(made: ort.InferenceSession, expected: ort.InferenceSession, feeds: Feeds) -> None:
    for got, want in zip(made.run(None, dict(feeds)), expected.run(None, dict(feeds)), strict=True):
        assert got.dtype == want.dtype
        assert relative_error(got, want) <= TOLERANCE


def both_ways(made: Bundled, source: onnx.ModelProto, folder: Path, *cases: Feeds) -> None:
    """Compares with the source, with the library and without."""
    made.save(folder / "both.onnx")
    onnx.checker.check_model(str(folder / "both.onnx"))
    expected = ort_session(source)
    for candidate in (session(folder / "both.onnx"), ort_session(str(folder / "both.onnx"))):
        for feeds in cases:
            assert_same(candidate, expected, feeds)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_model_runs_by_its_bundle(tiny: Path, tiny_model: Path, threads: int) -> None:
    made, expected = session(tiny, threads), ort_session(str(tiny_model))
    for batch, length in ((1, 16), (3, 7), (1, 1), (2, 61)):
        assert_same(made, expected, feeds_of(tiny_model, batch, length))


def test_who_runs_it(tiny: Path, tiny_model: Path, tmp_path: Path) -> None:
    feeds = feeds_of(tiny_model, 3, 7)
    assert ops_run(tiny, feeds, True, tmp_path) == {"Region0"}
    assert not any("Region" in op for op in ops_run(tiny, feeds, False, tmp_path))
    assert_same(ort_session(str(tiny)), ort_session(str(tiny_model)), feeds)
    model = onnx.load(tiny, load_external_data=False)
    assert {p.key: p.value for p in model.metadata_props}[METADATA] == "m.coda"


def test_weights_of_functions_are_never_read(tmp_path: Path) -> None:
    """onnxruntime maps them, and a node that runs by its bundle does not look at them."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    model = node_model(nodes, [("x", 1, ["n", 512])], [("y", 1, ["n", 2048])], {"w": normal(512, 2048)})
    package_regions(model, verify=False).save(tmp_path / "m.onnx")
    made = session(tmp_path / "m.onnx")
    made.run(None, {"x": normal(3, 512)})
    resident = {}
    current = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split()[0].count("-") == 1 and not line.split()[0].endswith(":"):
            current = line.split()[-1]
        elif line.startswith("Rss:") and current.startswith(str(tmp_path)):
            resident[Path(current).name] = resident.get(Path(current).name, 0) + int(line.split()[1])
    assert resident["m.onnx.data"] == 0
    assert resident["m.coda"] >= 4096  # KB: all weights, where onnxruntime mapped them


def test_what_cannot_be_compiled_stays(tmp_path: Path) -> None:
    """Between operators without a lowering lie regions, each with its bundle; a constant node that both read stays in both."""
    nodes = [
        helper.make_node("Transpose", ["w1t"], ["w1"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "w1"], ["a"]),
        helper.make_node("Tanh", ["a"], ["b"]),
        helper.make_node("MurmurHash3", ["ids"], ["h"], domain="com.microsoft", positive=0),
        helper.make_node("Cast", ["h"], ["f"], to=1),
        helper.make_node("Sigmoid", ["f"], ["s"]),
        helper.make_node("Sinh", ["b"], ["b2"]),
        helper.make_node("Det", ["square"], ["d"]),
        helper.make_node("Unsqueeze", ["d", "one"], ["d2"]),
        helper.make_node("Add", ["d2", "s"], ["c"]),
        helper.make_node("Add", ["c", "b2"], ["c2"]),
        helper.make_node("MatMul", ["c2", "w2"], ["y"]),
    ]
    inputs = [("x", 1, ["n", 8]), ("ids", 6, ["n", 1]), ("square", 1, ["n", 3, 3])]
    constants = {"w1t": normal(24, 8), "w2": normal(24, 40, seed=1), "one": np.array([1])}
    model = node_model(nodes, inputs, [("y", 1, ["n", 40]), ("d", 1, ["n"])], constants)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    made = package_regions(model, verify=False)
    assert len(made.regions) == 2
    assert made.left is not None and ("Det" in made.left or "MurmurHash3" in made.left)
    outside = {n.op_type for n in made.model.graph.node}
    assert {"Region0", "Region1", "MurmurHash3", "Det"} <= outside and not {"MatMul", "Tanh"} & outside
    for n in (1, 7):
        feeds = {"x": normal(n, 8) / 4, "ids": np.arange(n, dtype=np.int32)[:, None], "square": normal(n, 3, 3)}
        both_ways(made, model, tmp_path, feeds)


def test_nothing_to_compile(tmp_path: Path) -> None:
    model = node_model([helper.make_node("Det", ["x"], ["y"])], [("x", 1, ["n", 3, 3])], [("y", 1, ["n"])])
    made = package_regions(model)
    assert made.regions == () and made.left is not None and "Det" in made.left
    assert [p.name for p in made.save(tmp_path / "m.onnx")] == ["m.onnx"]
    assert onnx.load(tmp_path / "m.onnx") == model
    assert_same(session(tmp_path / "m.onnx"), ort_session(model), {"x": normal(5, 3, 3)})


def test_outputs_that_nothing_computes(tmp_path: Path) -> None:
    """An input, a constant and a known size may be outputs; constants may be inputs, and large ones nodes."""
    nodes = [
        helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(normal(8, 40))),
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["y"]),
        helper.make_node("Identity", ["x"], ["again"]),
        helper.make_node("Shape", ["x"], ["size"]),
    ]
    model = node_model(
        nodes,
        [("x", 1, ["n", 8]), ("b", 1, [40])],
        [("y", 1, ["n", 40]), ("again", 1, ["n", 8]), ("size", 7, [2]), ("b", 1, [40]), ("x", 1, ["n", 8])],
        {"b": normal(40)},
    )
    try:
        ort_session(model)
    except Exception:  # where onnxruntime refuses an output that is an input
        del model.graph.output[3:]
    made = package_regions(model)
    assert [n.op_type for n in made.model.graph.node][-1:] == ["Region0"]
    both_ways(made, model, tmp_path, {"x": normal(3, 8)})


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8])
def test_dtypes(tmp_path: Path, dtype: int) -> None:
    nodes = [helper.make_node("Add", ["x", "x"], ["y"]), helper.make_node("Equal", ["x", "y"], ["z"])]
    model = node_model(nodes, [("x", dtype, ["n", 5])], [("y", dtype, ["n", 5]), ("z", TensorProto.BOOL, ["n", 5])])
    x = np.arange(35).reshape(7, 5).astype(helper.tensor_dtype_to_np_dtype(dtype))
    both_ways(package_regions(model, verify=False), model, tmp_path, {"x": x})


def test_sizes_that_data_decides(tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["m"], ["places"]), helper.make_node("Neg", ["x"], ["y"])]
    model = node_model(nodes, [("m", 9, ["n"]), ("x", 1, ["k", 3])], [("places", 7, [1, "found"]), ("y", 1, ["k", 3])])
    cases = [{"m": np.arange(size) % 3 == 0, "x": normal(size, 3)} for size in (1, 7, 130)]
    both_ways(package_regions(model, verify=False), model, tmp_path, *cases)


def branch(name: str, constant: str) -> onnx.GraphProto:
    made = helper.make_node("MatMul", ["x", constant], [name])
    return helper.make_graph([made], name, [], [helper.make_tensor_value_info(name, 1, None)])


_BODY = helper.make_graph(
    [helper.make_node("Mul", ["s", "s"], ["t"]), helper.make_node("Identity", ["go"], ["on"])],
    "body",
    [helper.make_tensor_value_info(*v) for v in (("i", 7, []), ("go", 9, []), ("s", 1, ["n", 40]))],
    [helper.make_tensor_value_info(*v) for v in (("on", 9, []), ("t", 1, ["n", 40]))],
)
_MATMUL = helper.make_node("MatMul", ["x", "w"], ["a"])
WHOLE = {
    "branches": [helper.make_node("If", ["c"], ["y"], then_branch=branch("p", "w"), else_branch=branch("q", "w2"))],
    "a loop whose turns data decides": [_MATMUL, helper.make_node("Loop", ["k", "", "a"], ["y"], body=_BODY)],
    "sequences": [
        helper.make_node("SequenceConstruct", ["x", "x"], ["l"]),
        helper.make_node("ConcatFromSequence", ["l"], ["m"], axis=1, new_axis=0),
        helper.make_node("Slice", ["m", "zero", "eight", "one"], ["o"]),
        helper.make_node("MatMul", ["o", "w"], ["y"]),
    ],
}


@pytest.mark.parametrize("kind", WHOLE)
def test_no_model_is_refused(tmp_path: Path, kind: str) -> None:
    """Functions may have subgraphs that read what is around them; what has no tensors or no lowering stays outside."""
    inputs = [("x", 1, ["n", 8]), ("c", 9, []), ("k", 7, [])]
    constants = {"w": normal(8, 40) / 8, "w2": normal(8, 40, seed=1)}
    constants |= {name: np.array([value]) for name, value in (("zero", 0), ("eight", 8), ("one", 1))}
    model = node_model(WHOLE[kind], inputs, [("y", 1, ["n", 40])], constants)
    made = package_regions(model, verify=False)
    assert len(made.regions) == 1
    both_ways(made, model, tmp_path, *({"x": normal(3, 8), "c": np.array(c), "k": np.array(2)} for c in (True, False)))


def test_an_old_opset_with_constants_among_its_inputs(tmp_path: Path) -> None:
    nodes = [_MATMUL, helper.make_node("Softmax", ["a"], ["y"])]
    model = node_model(nodes, [("x", 1, ["n", 8]), ("w", 1, [8, 40])], [("y", 1, ["n", 40])], {"w": normal(8, 40)})
    model.opset_import[0].version, model.ir_version = 9, 3
    both_ways(package_regions(model, verify=False), model, tmp_path, {"x": normal(3, 8)})


def test_no_models() -> None:
    with pytest.raises(InvalidModel, match="the data is not an ONNX model"):
        package_regions(b"garbage")
    with pytest.raises(InvalidModel, match=r"'/nowhere\.onnx' is not an ONNX model, or the file"):
        package_regions("/nowhere.onnx")


def test_sizes_that_a_bundle_is_not_meant_for(tmp_path: Path) -> None:
    """Rows that must come in fours: compared where they do, and an error of the run where they do not."""
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["r"]), helper.make_node("MatMul", ["r", "w"], ["y"])]
    constants = {"shape": np.array([-1, 32]), "w": normal(32, 40)}
    model = node_model(nodes, [("x", 1, [2, "n", 8])], [("y", 1, ["m", 40])], constants)
    made = package_regions(model)
    assert made.max_rel_error is not None and made.max_rel_error <= TOLERANCE
    both_ways(made, model, tmp_path, {"x": normal(2, 6, 8)})
    with pytest.raises(Exception, match="Region0"):
        session(tmp_path / "both.onnx").run(None, {"x": normal(2, 3, 8)})


def linear() -> onnx.ModelProto:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    return node_model(nodes, [("x", 1, ["n", 8])], [("y", 1, ["n", 40])], {"w": normal(8, 40)})


def test_pinned_sizes(tmp_path: Path) -> None:
    package_regions(linear(), shapes={"x": (3, 8)}, verify=False).save(tmp_path / "m.onnx")
    pinned = session(tmp_path / "m.onnx")
    assert_same(pinned, ort_session(linear()), {"x": normal(3, 8)})
    with pytest.raises(Exception, match="Got invalid dimensions"):
        pinned.run(None, {"x": normal(4, 8)})


def test_a_model_in_memory(tiny: Path, tiny_model: Path) -> None:
    options = ort.SessionOptions()
    options.register_custom_ops_library(library_path())
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(tiny.parent))
    made = ort.InferenceSession(tiny.read_bytes(), options, providers=["CPUExecutionProvider"])
    assert_same(made, ort_session(str(tiny_model)), feeds_of(tiny_model, 2, 9))


def test_threads_and_sessions_side_by_side(tiny: Path, tiny_model: Path) -> None:
    made, expected = [session(tiny, 2) for _ in range(2)], ort_session(str(tiny_model))
    shapes = [(1, 5), (2, 16), (3, 33), (1, 60)]
    cases = {shape: (feeds_of(tiny_model, *shape),) for shape in shapes}
    right = {shape: expected.run(None, dict(feeds)) for shape, (feeds,) in cases.items()}
    failures: list[str] = []

    def work(seed: int) -> None:
        for i in range(20):
            shape = shapes[(seed + i) % len(shapes)]
            for got, want in zip(made[seed % 2].run(None, dict(cases[shape][0])), right[shape], strict=True):
                if relative_error(got, want) > TOLERANCE:
                    failures.append(f"{shape}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def copied(tiny: Path, folder: Path, change: Callable[[bytearray], object]) -> Path:
    """The packaged model in ``folder``, with its bundle changed."""
    for suffix in (".onnx", ".onnx.data"):
        shutil.copy(tiny.with_suffix(suffix), folder / f"m{suffix}")
    data = bytearray(tiny.with_suffix(".coda").read_bytes())
    change(data)
    (folder / "m.coda").write_bytes(data)
    return folder / "m.onnx"


def flip(place: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[place] ^= 1

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip(8), r"Region0.*format version 4, this runtime reads.*Package the model again"),
        (flip(4000), r"Region0.*checksum.*Package the model again.*or leave the library out"),
        (flip(0), r"Region0.*Package the model again"),
        (lambda data: data.__delitem__(slice(5000, None)), r"coda\.bundle\.0.*out of bounds"),
    ],
    ids=["version", "altered", "no bundle", "short"],
)
def test_unusable_bundles_say_why(
    tiny: Path, tmp_path: Path, change: Callable[[bytearray], object], message: str
) -> None:
    path = copied(tiny, tmp_path, change)
    with pytest.raises(Exception, match=message):
        session(path)


def test_a_bundle_that_is_missing(tiny: Path, tiny_model: Path, tmp_path: Path) -> None:
    path = copied(tiny, tmp_path, flip(0))
    path.with_suffix(".coda").unlink()
    with pytest.raises(Exception, match=r"m\.coda"):
        session(path)
    assert_same(ort_session(str(path)), ort_session(str(tiny_model)), feeds_of(tiny_model, 2, 9))


def test_altered_weights_are_an_error_of_the_first_run(tiny: Path, tiny_model: Path, tmp_path: Path) -> None:
    made = session(copied(tiny, tmp_path, flip(-5)))
    for _ in range(2):
        with pytest.raises(Exception, match=r"checksum.*make it again"):
            made.run(None, dict(feeds_of(tiny_model, 1, 5)))


def test_another_cpus_bundle(tmp_path: Path) -> None:
    package_regions(linear(), "arm64-linux", verify=False).save(tmp_path / "m.onnx")
    with pytest.raises(Exception, match=r"Region0.*kernels are for aarch64, this machine is.*Package the model again"):
        session(tmp_path / "m.onnx")
    assert_same(ort_session(str(tmp_path / "m.onnx")), ort_session(linear()), {"x": normal(3, 8)})


def test_another_models_bundle(tiny: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Of other inputs, types or sizes; onnxruntime knows how long a bundle's file is."""
    other = node_model([helper.make_node("Neg", ["x"], ["y"])], [("x", 1, ["n"])], [("y", 1, ["n"])])
    data = writer.to_bytes(package_regions(other, verify=False).bundles[0].bundle)
    (tmp_path / "m.coda").write_bytes(data)
    shutil.copy(tiny.with_suffix(".onnx.data"), tmp_path / "m.onnx.data")
    model = onnx.load(tiny, load_external_data=False)
    (bundle,) = (t for t in model.graph.initializer if t.name == "coda.bundle.0")
    bundle.dims[:] = [len(data)]
    next(e for e in bundle.external_data if e.key == "length").value = str(len(data))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(Exception, match=r"'x' (has|is).*int64|'x'.*expected"):
        session(tmp_path / "m.onnx").run(None, dict(feeds_of(tiny_model, 1, 5)))


def test_wrong_inputs_are_errors_of_the_run(tiny: Path, tiny_model: Path) -> None:
    made, feeds = session(tiny), dict(feeds_of(tiny_model, 2, 7))
    name = next(iter(feeds))
    with pytest.raises(Exception, match=r"exceeds|expected|differ"):
        made.run(None, {k: np.repeat(v, 20, axis=1) for k, v in feeds.items()})
    with pytest.raises(Exception, match=name):
        made.run(None, {**feeds, name: feeds[name][:, :3]})
    with pytest.raises(Exception, match="index is out of range"):
        made.run(None, {**feeds, name: feeds[name] + 10_000})
    with pytest.raises(Exception, match=r"[Uu]nexpected input data type"):
        made.run(None, {**feeds, name: feeds[name].astype(np.float32)})
    assert_same(made, ort_session(str(tiny_model)), feeds)


def test_an_onnxruntime_that_is_too_old() -> None:
    messages: list[bytes] = []
    create = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)

    @create
    def create_status(code: int, message: bytes) -> int:
        messages.append(message)
        return 1

    table = (ctypes.c_void_p * 300)()
    table[0] = ctypes.cast(create_status, ctypes.c_void_p)
    get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(lambda v: ctypes.addressof(table) if v < 18 else None)
    get_version = ctypes.CFUNCTYPE(ctypes.c_char_p)(lambda: b"1.17.3")
    base = (ctypes.c_void_p * 2)(*(ctypes.cast(f, ctypes.c_void_p) for f in (get_api, get_version)))
    register = ctypes.CDLL(library_path()).RegisterCustomOps
    register.restype = ctypes.c_void_p
    assert register(None, ctypes.byref(base)) == 1
    assert messages == [
        b"onnxruntime 1.17.3 is too old for this library: install 1.18 or later, or leave the library out, and the model "
        b"runs by its functions"
    ]


def onnxruntime_library() -> Path | None:
    """The shared library of onnxruntime that the wheel brings."""
    return next(iter(Path(ort.__file__).parent.glob("capi/libonnxruntime.so.*")), None)


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_from_cpp(tmp_path: Path) -> None:
    """The example runs a model with the library, without, and by the execution provider: all alike."""
    include, library = onnxruntime_headers.find(), onnxruntime_library()
    if isinstance(include, str) or library is None:
        pytest.skip(str(include) if library else "this onnxruntime's wheel has no shared library to link with")
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (tmp_path / name).symlink_to(library)
    example = Path(__file__).resolve().parent.parent / "runtime" / "examples" / "onnxruntime.cpp"
    program = tmp_path / "example"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-O0", f"-I{include}", f"-L{tmp_path}", f"-Wl,-rpath,{tmp_path}"]
    subprocess.run(["c++", *flags, str(example), "-lonnxruntime", "-o", str(program)], check=True)
    onnx.save(linear(), tmp_path / "linear.onnx")
    package_regions(tmp_path / "linear.onnx", verify=False).save(tmp_path / "m.onnx")
    (expected,) = ort_session(linear()).run(None, {"x": np.ones((8, 8), np.float32)})
    for arguments in (["m.onnx"], ["m.onnx", library_path()], ["linear.onnx", library_path(), "m.coda"]):
        done = subprocess.run([program, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        name, value = done.stdout.split(": ")
        assert name == "y 8 40"
        assert float(value) == pytest.approx(float(expected.sum()), rel=1e-4)
    (tmp_path / "m.coda").write_bytes(b"none")
    done = subprocess.run(
        [program, "m.onnx", library_path()], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "coda.bundle.0" in done.stderr


def test_benchmark(tmp_path: Path) -> None:
    """Each way gives what onnxruntime gives; what a process holds is a number of MB."""
    onnx.save(linear(), tmp_path / "linear.onnx")
    compared.build(tmp_path / "linear.onnx", tmp_path / "built")
    found = compared.timed(tmp_path / "built", (3,), (1,), rounds=1)
    assert [t.way for t in found] == list(compared.WAYS)
    assert all(t.error <= TOLERANCE and t.ms > 0 for t in found)
    assert 0 <= compared.resident("generic library", tmp_path / "built", 3) < 1000


def test_command(tmp_path: Path) -> None:
    onnx.save(linear(), tmp_path / "linear.onnx")
    out = tmp_path / "made"
    command = ["package", str(tmp_path / "linear.onnx"), "--form", "ort-bundle", "-o", str(out), "--json"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert sorted(said["files"]) == [f"{out}.coda", f"{out}.onnx", f"{out}.onnx.data"]
    assert said["regions"] == [["y"]] and said["left"] is None and said["max_rel_error"] <= TOLERANCE
    assert_same(session(f"{out}.onnx"), ort_session(linear()), {"x": normal(3, 8)})
    result = CliRunner().invoke(main, ["package", str(tmp_path / "none.onnx"), "--form", "ort-bundle"])
    assert result.exit_code == 1 and "no such file" in result.stderr
