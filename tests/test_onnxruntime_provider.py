"""The execution provider: untouched models run by their bundles inside onnxruntime, and what cannot run says why."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from graphs import node_model
from onnx import TensorProto, helper, numpy_helper
from rewriting import normal

from coda_edge import __version__, optimize
from coda_edge.fingerprint import fingerprints, model_digest
from coda_edge.inputs import default_sizes, generate_inputs, input_specs
from coda_edge.onnxruntime import add_provider, library_path
from coda_edge.onnxruntime.compile import compile_model

pytestmark = pytest.mark.skipif(
    not hasattr(ort, "register_execution_provider_library"), reason="this onnxruntime has no plugin providers"
)
NAME = "CodaEP"
TOLERANCE = 1e-5
Feeds = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Compiled:
    """A model's file, and its bundle's."""

    model: Path
    bundle: Path

    def feeds(self, batch: int, length: int) -> Feeds:
        specs = input_specs(onnx.load(self.model))
        return generate_inputs(specs, default_sizes(specs, batch, length), seed=batch + length)


@pytest.fixture(scope="module")
def devices() -> list[ort.OrtEpDevice]:
    if all(d.ep_name != NAME for d in ort.get_ep_devices()):  # another file's tests may have been here
        ort.register_execution_provider_library(NAME, library_path())
    return [d for d in ort.get_ep_devices() if d.ep_name == NAME][:1]


@pytest.fixture(scope="module")
def tiny(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return compiled(onnx.load(tiny_model), tmp_path_factory.mktemp("provider"))


def compiled(model: onnx.ModelProto, folder: Path, name: str = "m") -> Compiled:
    files = Compiled(folder / f"{name}.onnx", folder / f"{name}.coda")
    onnx.save(model, files.model)
    optimize(str(files.model), verify=False).save(files.bundle)
    return files


def session(
    model: Path | bytes,
    devices: Sequence[ort.OrtEpDevice],
    options: Mapping[str, str],
    threads: int = 2,
    entries: Mapping[str, str] | None = None,
) -> ort.InferenceSession:
    """onnxruntime with the provider, and ``entries`` among the session's options."""
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.log_severity_level = 3
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    for key, value in (entries or {}).items():
        settings.add_session_config_entry(key, value)
    settings.add_provider_for_devices(list(devices), dict(options))
    return ort.InferenceSession(model if isinstance(model, bytes) else str(model), settings)


def plain(model: Path | bytes) -> ort.InferenceSession:
    return ort.InferenceSession(model if isinstance(model, bytes) else str(model), providers=["CPUExecutionProvider"])


def nodes_of(made: ort.InferenceSession, provider: str) -> list[str]:
    """The operators that a provider was given."""
    found = made.get_provider_graph_assignment_info()
    return [n.op_type for part in found if part.ep_name == provider for n in part.get_nodes()]


def assert_same(made: ort.InferenceSession, expected: ort.InferenceSession, feeds: Feeds) -> None:
    for got, want in zip(made.run(None, dict(feeds)), expected.run(None, dict(feeds)), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(
            got.astype(np.float64), want, atol=TOLERANCE * max(1.0, float(np.abs(want).max(initial=0)))
        )


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_an_untouched_model_runs_by_its_bundle(tiny: Compiled, devices: list[ort.OrtEpDevice], threads: int) -> None:
    made, expected = session(tiny.model, devices, {"bundle": str(tiny.bundle)}, threads), plain(tiny.model)
    assert nodes_of(made, NAME) and not nodes_of(made, "CPUExecutionProvider")
    for batch, length in ((1, 16), (3, 7), (1, 1), (2, 61)):
        for _ in range(3):
            assert_same(made, expected, tiny.feeds(batch, length))


def test_a_model_in_memory_is_known_by_its_constants(tiny: Compiled, devices: list[ort.OrtEpDevice]) -> None:
    data = tiny.model.read_bytes()
    made = session(data, devices, {"bundle": str(tiny.bundle)})
    assert nodes_of(made, NAME) and not nodes_of(made, "CPUExecutionProvider")
    assert_same(made, plain(data), tiny.feeds(3, 7))


def test_external_constants(devices: list[ort.OrtEpDevice], tmp_path: Path) -> None:
    path, other = tmp_path / "m.onnx", tmp_path / "other.onnx"
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    model = node_model(nodes, [("x", 1, ["n", 8])], [("y", 1, ["n", 300])], {"w": normal(8, 300)})
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=1024)
    optimize(str(path), verify=False).save(tmp_path / "m.coda")
    options = {"bundle": str(tmp_path / "m.coda")}
    assert_same(session(path, devices, options), plain(path), {"x": normal(7, 8, seed=1)})
    shutil.copy(path, other)
    data = bytearray((tmp_path / "w.bin").read_bytes())
    data[5000] ^= 64
    (tmp_path / "w.bin").write_bytes(bytes(data))
    with pytest.raises(Exception, match="was not compiled from this model: the constant 'w' has other values"):
        session(other, devices, options)


def test_another_models_bundle_is_refused(tiny: Compiled, devices: list[ort.OrtEpDevice], tmp_path: Path) -> None:
    other = onnx.load(tiny.model)
    big = max(other.graph.initializer, key=lambda t: len(t.raw_data))
    values = numpy_helper.to_array(big).copy()
    values.flat[7] += 1
    big.CopyFrom(numpy_helper.from_array(values, big.name))
    onnx.save(other, tmp_path / "other.onnx")
    for model in (tmp_path / "other.onnx", other.SerializeToString()):
        with pytest.raises(Exception, match=f"the constant '{big.name}' has other values in the model"):
            session(model, devices, {"bundle": str(tiny.bundle)})
    sigmoid = node_model([helper.make_node("Sigmoid", ["x"], ["y"])], [("x", 1, ["n"])], [("y", 1, ["n"])])
    with pytest.raises(Exception, match=r"the model has no value of that name.*Compile it from the model"):
        session(sigmoid.SerializeToString(), devices, {"bundle": str(tiny.bundle)})


DIFFERENT = [
    ([("x", 1, ["b", 8])], [("y", 1, ["b", 4])], None),
    (
        [("x", 10, ["b", 8])],
        [("y", 10, ["b", 4])],
        "'[xy]' is float16 in the model, the bundle was compiled for float32",
    ),
    ([("x", 1, ["b", 1, 8])], [("y", 1, ["b", 1, 4])], "'[xy]' has 3 dimensions in the model"),
]


@pytest.mark.parametrize(("inputs", "outputs", "message"), DIFFERENT)
def test_types_and_ranks_are_compared(
    devices: list[ort.OrtEpDevice],
    tmp_path: Path,
    inputs: list[tuple[str, int, list[int | str]]],
    outputs: list[tuple[str, int, list[int | str]]],
    message: str | None,
) -> None:
    def model(ins: list[tuple[str, int, list[int | str]]], outs: list[tuple[str, int, list[int | str]]]) -> bytes:
        w = normal(8, 4).astype(np.float16 if ins[0][1] == 10 else np.float32)
        made = node_model([helper.make_node("MatMul", ["x", "w"], ["y"])], ins, outs, {"w": w})
        return bytes(made.SerializeToString())

    files = compiled(onnx.load_from_string(model(*DIFFERENT[0][:2])), tmp_path)
    if message is None:
        assert nodes_of(session(model(inputs, outputs), devices, {"bundle": str(files.bundle)}), NAME)
    else:
        with pytest.raises(Exception, match=message):
            session(model(inputs, outputs), devices, {"bundle": str(files.bundle)})


def test_unusable_bundles_say_why(tiny: Compiled, devices: list[ort.OrtEpDevice], tmp_path: Path) -> None:
    data = tiny.bundle.read_bytes()
    older = bytearray(data)
    older[8] -= 1
    altered = bytearray(data)
    altered[4000] ^= 1
    broken = {"missing": None, "short": data[:-100], "altered": bytes(altered), "older": bytes(older)}
    for name, contents in broken.items():
        path = tmp_path / f"{name}.coda"
        if contents is not None:
            path.write_bytes(contents)
        with pytest.raises(Exception, match=rf"{name}.coda.*Compile the model again"):
            session(tiny.model, devices, {"bundle": str(path)})


def test_altered_weights_are_an_error_of_the_first_run(
    tiny: Compiled, devices: list[ort.OrtEpDevice], tmp_path: Path
) -> None:
    data = bytearray(tiny.bundle.read_bytes())
    data[-5] ^= 1
    (tmp_path / "m.coda").write_bytes(bytes(data))
    made = session(tiny.model, devices, {"bundle": str(tmp_path / "m.coda")})
    for _ in range(2):
        with pytest.raises(Exception, match=r"checksum|altered"):
            made.run(None, dict(tiny.feeds(1, 5)))


def test_wrong_inputs_are_errors_of_the_run(tiny: Compiled, devices: list[ort.OrtEpDevice]) -> None:
    made = session(tiny.model, devices, {"bundle": str(tiny.bundle)})
    feeds = dict(tiny.feeds(2, 7))
    name = next(iter(feeds))
    with pytest.raises(Exception, match=r"exceeds|expected|differ"):
        made.run(None, {k: np.repeat(v, 20, axis=1) for k, v in feeds.items()})
    with pytest.raises(Exception, match=name):
        made.run(None, {**feeds, name: feeds[name][:, :3]})
    with pytest.raises(Exception, match="index is out of range"):
        made.run(None, {**feeds, name: feeds[name] + 10_000})
    assert_same(made, plain(tiny.model), feeds)


def test_many_threads_run_one_session(tiny: Compiled, devices: list[ort.OrtEpDevice]) -> None:
    made, expected = session(tiny.model, devices, {"bundle": str(tiny.bundle)}), plain(tiny.model)
    shapes = [(1, 5), (2, 16), (3, 33), (1, 60)]
    right = {shape: expected.run(None, dict(tiny.feeds(*shape))) for shape in shapes}
    failures: list[str] = []

    def work(seed: int) -> None:
        for i in range(20):
            shape = shapes[(seed + i) % len(shapes)]
            for got, want in zip(made.run(None, dict(tiny.feeds(*shape))), right[shape], strict=True):
                if got.shape != want.shape or np.abs(got - want).max() > 1e-4:
                    failures.append(f"{shape}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_sessions_side_by_side(tiny: Compiled, devices: list[ort.OrtEpDevice]) -> None:
    several = [session(tiny.model, devices, {"bundle": str(tiny.bundle)}) for _ in range(3)]
    expected = plain(tiny.model)
    for made in several:
        assert_same(made, expected, tiny.feeds(2, 9))
    del several[0]
    assert_same(several[0], expected, tiny.feeds(1, 3))


def test_a_part_of_a_model(devices: list[ort.OrtEpDevice], tmp_path: Path) -> None:
    """What the bundle does not compute is onnxruntime's: operators before, beside and behind it."""
    nodes = [
        helper.make_node("NonZero", ["mask"], ["places"]),
        helper.make_node("Asinh", ["x"], ["before"]),
        helper.make_node("MatMul", ["before", "w1"], ["hidden"]),
        helper.make_node("Tanh", ["hidden"], ["active"]),
        helper.make_node("MatMul", ["active", "w2"], ["after"]),
        helper.make_node("Cosh", ["after"], ["y"]),
    ]
    constants = {"w1": normal(8, 24), "w2": normal(24, 4, seed=1)}
    inputs, outputs = [("x", 1, ["n", 8]), ("mask", 9, ["n"])], [("y", 1, ["n", 4]), ("places", 7, [1, "k"])]
    whole = node_model(nodes, inputs, outputs, constants)
    part = node_model(nodes[2:5], [("before", 1, ["n", 8])], [("after", 1, ["n", 4])], constants)
    onnx.save(whole, tmp_path / "whole.onnx")
    files = compiled(part, tmp_path, "part")
    made = session(tmp_path / "whole.onnx", devices, {"bundle": str(files.bundle)})
    assert nodes_of(made, NAME) == ["MatMul", "Tanh", "MatMul"]
    feeds = {"x": normal(7, 8, seed=2), "mask": np.arange(5) % 2 == 0}
    assert_same(made, plain(tmp_path / "whole.onnx"), feeds)
    # A value in the middle that somebody else reads is nothing that the bundle gives.
    whole.graph.output.append(helper.make_tensor_value_info("active", 1, ["n", 24]))
    with pytest.raises(Exception, match="the model needs 'active'"):
        session(whole.SerializeToString(), devices, {"bundle": str(files.bundle)})


def test_two_parts_have_two_bundles(devices: list[ort.OrtEpDevice], tmp_path: Path) -> None:
    w = {"w1": normal(8, 24), "w2": normal(24, 4, seed=1)}
    first = node_model([helper.make_node("MatMul", ["x", "w1"], ["a"])], [("x", 1, ["n", 8])], [("a", 1, ["n", 24])], w)
    second = node_model(
        [helper.make_node("MatMul", ["b", "w2"], ["y"])], [("b", 1, ["n", 24])], [("y", 1, ["n", 4])], w
    )
    between = helper.make_node("Cosh", ["a"], ["b"])
    whole = node_model(
        [first.graph.node[0], between, second.graph.node[0]], [("x", 1, ["n", 8])], [("y", 1, ["n", 4])], w
    ).SerializeToString()
    bundles = [str(compiled(part, tmp_path, name).bundle) for name, part in (("one", first), ("two", second))]
    made = session(whole, devices, {"bundle": ";".join(bundles)})
    assert nodes_of(made, NAME) == ["MatMul", "MatMul"]
    assert_same(made, plain(whole), {"x": normal(3, 8, seed=2) / 4})


def test_sizes_that_data_decides(devices: list[ort.OrtEpDevice], tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["m"], ["places"]), helper.make_node("Neg", ["x"], ["y"])]
    model = node_model(nodes, [("m", 9, ["n"]), ("x", 1, ["k", 3])], [("places", 7, [1, "found"]), ("y", 1, ["k", 3])])
    files = compiled(model, tmp_path)
    made, expected = session(files.model, devices, {"bundle": str(files.bundle)}), plain(files.model)
    for size in (1, 7, 130):
        feeds = {"m": np.arange(size) % 3 == 0, "x": normal(size, 3)}
        assert_same(made, expected, feeds)
    assert made.run(None, {"m": np.zeros(5, bool), "x": normal(0, 3)})[0].shape == (1, 0)


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8])
def test_dtypes(devices: list[ort.OrtEpDevice], tmp_path: Path, dtype: int) -> None:
    nodes = [helper.make_node("Add", ["x", "x"], ["y"]), helper.make_node("Equal", ["x", "y"], ["z"])]
    model = node_model(nodes, [("x", dtype, ["n", 5])], [("y", dtype, ["n", 5]), ("z", TensorProto.BOOL, ["n", 5])])
    files = compiled(model, tmp_path)
    made = session(files.model, devices, {"bundle": str(files.bundle)})
    assert nodes_of(made, NAME)
    x = np.arange(35).reshape(7, 5).astype(helper.tensor_dtype_to_np_dtype(dtype))
    assert_same(made, plain(files.model), {"x": x})


@pytest.mark.parametrize("embedded", ["0", "1"])
def test_context_models(tiny: Compiled, devices: list[ort.OrtEpDevice], tmp_path: Path, embedded: str) -> None:
    context = tmp_path / "made" / "c_ctx.onnx"
    context.parent.mkdir()
    entries = {
        "ep.context_enable": "1",
        "ep.context_embed_mode": embedded,
        "ep.context_file_path": str(context),
    }
    made, expected = session(tiny.model, devices, {"bundle": str(tiny.bundle)}, entries=entries), plain(tiny.model)
    assert_same(made, expected, tiny.feeds(3, 7))
    (node,) = onnx.load(context).graph.node
    assert (node.op_type, node.domain) == ("EPContext", "com.microsoft")
    moved = tmp_path / "moved"
    context.parent.rename(moved)
    assert len(list(moved.glob("*.coda"))) == (embedded == "0")
    again = session(moved / "c_ctx.onnx", devices, {})
    assert nodes_of(again, NAME)
    assert_same(again, expected, tiny.feeds(2, 61))
    if embedded == "1":
        assert_same(session((moved / "c_ctx.onnx").read_bytes(), devices, {}), expected, tiny.feeds(1, 5))
    else:
        with pytest.raises(Exception, match="load it from its file, or set the session option"):
            session((moved / "c_ctx.onnx").read_bytes(), devices, {})
        next(moved.glob("*.coda")).write_bytes(tiny.bundle.read_bytes()[:-64])
        with pytest.raises(Exception, match=r"the context model cannot be used.*Make it again"):
            session(moved / "c_ctx.onnx", devices, {})


def test_altered_context_models_are_refused(devices: list[ort.OrtEpDevice]) -> None:
    def context(**attributes: object) -> bytes:
        node = helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft", source=NAME, **attributes)
        made = node_model([node], [("x", 1, ["n"])], [("y", 1, ["n"])])
        made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
        return bytes(made.SerializeToString())

    for attributes in (
        {"embed_mode": 1, "ep_cache_context": b"\x05CODA"},
        {"embed_mode": 1, "ep_cache_context": b""},
        {"embed_mode": 1},
        {"embed_mode": 0, "ep_cache_context": b"nothing.coda"},
    ):
        with pytest.raises(Exception, match=r"the context model cannot be used|ep_cache_context"):
            session(context(**attributes), devices, {}, entries={"ep.context_file_path": "x_ctx.onnx"})
    with pytest.raises(Exception, match="expected a file beside it"):
        session(
            context(embed_mode=0, ep_cache_context=b"/etc/passwd"),
            devices,
            {},
            entries={"ep.context_file_path": "x_ctx.onnx"},
        )


def test_bundles_are_compiled_just_in_time(devices: list[ort.OrtEpDevice], tmp_path: Path) -> None:
    model = node_model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [("x", 1, ["n", 8])],
        [("y", 1, ["n", 4])],
        {"w": normal(8, 4)},
    )
    onnx.save(model, tmp_path / "m.onnx")
    options, feeds = {"cache": str(tmp_path / "cache")}, {"x": normal(3, 8)}
    made, expected = session(tmp_path / "m.onnx", devices, options), plain(tmp_path / "m.onnx")
    assert nodes_of(made, NAME) == ["MatMul"]
    assert_same(made, expected, feeds)
    (bundle,) = (tmp_path / "cache").glob("*.coda")
    before = bundle.stat().st_mtime_ns
    assert nodes_of(session(tmp_path / "m.onnx", devices, {**options, "python": "/nowhere"}), NAME) == ["MatMul"]
    assert bundle.stat().st_mtime_ns == before
    # Where nothing can be compiled, onnxruntime runs the model.
    for other in (
        session(model.SerializeToString(), devices, options),
        session(tmp_path / "m.onnx", devices, {"cache": str(tmp_path / "other"), "python": "/nowhere"}),
        session(tmp_path / "m.onnx", devices, {"cache": "/proc/nowhere"}),
    ):
        assert nodes_of(other, NAME) == []
        assert_same(other, expected, feeds)


def test_parts_of_what_cannot_be_compiled(devices: list[ort.OrtEpDevice], tmp_path: Path) -> None:
    """Between operators without a lowering lie parts that have one; of these, each bundle computes one."""
    nodes = [
        helper.make_node("Transpose", ["w1t"], ["w1"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "w1"], ["a"]),
        helper.make_node("Tanh", ["a"], ["b"]),
        helper.make_node("MurmurHash3", ["ids"], ["h"], domain="com.microsoft", positive=0),
        helper.make_node("Cast", ["h"], ["f"], to=1),
        helper.make_node("Sigmoid", ["f"], ["s"]),
        helper.make_node("Add", ["b", "s"], ["c"]),
        helper.make_node("MatMul", ["c", "w2"], ["y"]),
        helper.make_node("Det", ["square"], ["d"]),
    ]
    inputs = [("x", 1, ["n", 8]), ("ids", 6, ["n", 1]), ("square", 1, ["n", 3, 3])]
    constants = {"w1t": normal(24, 8), "w2": normal(24, 4, seed=1)}
    model = node_model(nodes, inputs, [("y", 1, ["n", 4]), ("d", 1, ["n"])], constants)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    path, cache = tmp_path / "m.onnx", tmp_path / "cache"
    onnx.save(model, path)
    cache.mkdir()
    bundle = cache / f"{model_digest(path)}-native-{__version__}.coda"
    files = compile_model(path, bundle, "native")
    assert len(files) == 2 and compile_model(path, bundle, "native") == files
    feeds = {"x": normal(7, 8), "ids": np.arange(7, dtype=np.int32)[:, None], "square": normal(7, 3, 3)}
    for options in ({"cache": str(cache), "python": "/nowhere"}, {"bundle": ";".join(map(str, files))}):
        made = session(path, devices, options)
        assert sorted(nodes_of(made, "CPUExecutionProvider")) == ["Det", "MurmurHash3"]
        assert_same(made, plain(path), feeds)


def test_added_in_python(tiny: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = node_model([helper.make_node("Exp", ["x"], ["y"])], [("x", 1, ["n"])], [("y", 1, ["n"])])
    feeds = {"x": normal(7)}
    for options in (ort.SessionOptions(), ort.SessionOptions()):
        add_provider(options, model)
        made = ort.InferenceSession(model.SerializeToString(), options)
        assert NAME in made.get_providers()
        assert_same(made, plain(model.SerializeToString()), feeds)
    assert len(list(tmp_path.glob("coda-edge/bundles/*.coda"))) == 1
    options = ort.SessionOptions()
    add_provider(options, bundle=tiny.bundle)
    assert_same(ort.InferenceSession(str(tiny.model), options), plain(tiny.model), tiny.feeds(1, 5))


def test_fingerprints_do_not_depend_on_order() -> None:
    array = normal(5, 7)
    one, other = (
        node_model([], [], [], {"w": values, "n": np.array(3)}) for values in (array, np.ascontiguousarray(array.T))
    )
    assert fingerprints(one) == fingerprints(other)
    array[2, 3] += 1
    assert fingerprints(node_model([], [], [], {"w": array, "n": np.array(3)})) != fingerprints(one)
