"""The command line: what each command prints and writes, JSON by its keys, errors in one line."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import handmade
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper

from coda_edge.bundle import read, to_bytes, write
from coda_edge.cli import main
from coda_edge.files import FileError, made_folder
from coda_edge.inputs import generate_inputs
from coda_edge.targets import get

PLAIN = get(get().measured_as)
"""The native target without products of bytes, which a float model has no use for."""

Command = Callable[..., Result]


@pytest.fixture
def command() -> Command:
    return lambda *arguments: CliRunner().invoke(main, [str(a) for a in arguments])


def _json(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def _failed(result: Result) -> str:
    """The one line on stderr of a command that failed without a traceback."""
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    assert result.stderr.count("\n") == 1
    return result.stderr.strip()


@pytest.fixture(scope="module")
def optimized(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """A bundle and an optimized ONNX model of the tiny encoder, and what ``optimize --json`` said."""
    folder = tmp_path_factory.mktemp("optimized")
    bundle, graph = folder / "tiny.coda", folder / "tiny.coda.onnx"
    arguments = ["optimize", str(tiny_model), "-o", str(bundle), "--onnx", str(graph), "--json"]
    return bundle, graph, _json(CliRunner().invoke(main, arguments))


def test_optimize_reports_what_scripts_rely_on(optimized: tuple[Path, Path, dict[str, Any]], tiny_model: Path) -> None:
    bundle, graph, report = optimized
    assert (report["model"], report["bundle"], report["onnx"]) == (str(tiny_model), str(bundle), str(graph))
    assert report["gemm"] == 8 and report["attention"] == 2
    assert report["kernels"] >= report["gemm"] + report["attention"]
    assert report["nodes_before"] == len(onnx.load(tiny_model).graph.node)
    assert 0 <= report["max_rel_error"] <= 1e-4
    assert 0 < report["bytes_after"] < report["bytes_before"]
    assert report["weights_bytes"] > 0 and report["arena_bytes"] > 0 and report["seconds"] > 0
    assert report["ours_ms"] > 0 and report["ort_ms"] > 0 and report["ratio"] > 0 and report["threads"] >= 1
    assert all(set(u) == {"op", "node", "reason"} for u in report["unfused"])
    assert all(set(f) == {"kernel", "count", "from"} for f in report["fused"])
    assert report["target"] == PLAIN.name


def test_optimize_prints_a_table(command: Command, tiny_model: Path, tmp_path: Path) -> None:
    result = command("optimize", tiny_model, "-o", tmp_path / "t.coda", "--no-verify", "--shape", "input_ids=2x16")
    assert result.exit_code == 0, result.output
    assert "8 GEMM, 2 attention" in result.stdout
    assert "not verified" in result.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["t.coda"]


def test_optimized_onnx_runs_anywhere(optimized: tuple[Path, Path, dict[str, Any]], tiny_model: Path) -> None:
    feeds = generate_inputs(onnx.load(tiny_model), {"batch": 3, "sequence": 7}, padding="left")
    (found,) = ort.InferenceSession(str(optimized[1])).run(None, feeds)
    (expected,) = ort.InferenceSession(str(tiny_model)).run(None, feeds)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_run_takes_and_writes_arrays(
    command: Command, optimized: tuple[Path, Path, dict[str, Any]], tiny_model: Path, tmp_path: Path
) -> None:
    feeds = generate_inputs(onnx.load(tiny_model), {"batch": 3, "sequence": 7}, padding="right")
    np.savez(tmp_path / "in.npz", **feeds)
    paths = ("--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz")
    said = _json(command("run", optimized[0], *paths, "--threads", 1, "--json"))
    assert said["outputs"] == {"last_hidden_state": {"dtype": "float32", "shape": [3, 7, 48]}}
    (expected,) = ort.InferenceSession(str(tiny_model)).run(None, feeds)
    found = np.load(tmp_path / "out.npz")["last_hidden_state"]
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.npz", "out.npz"]
    assert "last_hidden_state: float32 [3, 7, 48]" in command("run", optimized[0], *paths).stdout


def test_bench_compares_and_times(
    command: Command, optimized: tuple[Path, Path, dict[str, Any]], tiny_model: Path, tmp_path: Path
) -> None:
    options = ("--shape", "input_ids=2x16", "--threads", 1, "--rounds", 1, "--json")
    said = _json(command("bench", optimized[0], "--against", tiny_model, *options))
    assert set(said["against"]) == {"onnxruntime"}
    peer = said["against"]["onnxruntime"]
    assert said["ours_ms"] > 0 and peer["ms"] > 0 and peer["ratio"] > 0
    assert 0 <= said["max_rel_error"] <= 1e-4
    assert said["threads"] == 1 and said["shapes"]["attention_mask"] == [2, 16]

    np.savez(tmp_path / "in.npz", **generate_inputs(onnx.load(tiny_model), {"batch": 1, "sequence": 5}))
    alone = _json(command("bench", optimized[0], "--inputs", tmp_path / "in.npz", "--rounds", 1, "--json"))
    assert alone["against"] == {} and alone["max_rel_error"] is None


def test_bench_takes_a_length_that_the_model_has_positions_for(
    command: Command, optimized: tuple[Path, Path, dict[str, Any]], tiny_model: Path
) -> None:
    options = ("--threads", 1, "--rounds", 1, "--json")
    for against in ((), ("--against", tiny_model)):
        said = _json(command("bench", optimized[0], *against, *options))
        assert said["shapes"]["input_ids"] == [1, 64]
    failed = _failed(command("bench", optimized[0], "--shape", "input_ids=1x65", *options[:-1]))
    assert "sequence = 65 exceeds 64" in failed and "--shape" in failed


def test_the_level_of_a_bundle_can_be_chosen(command: Command, tmp_path: Path) -> None:
    bundle, arrays, out = tmp_path / "levels.coda", tmp_path / "in.npz", tmp_path / "out.npz"
    bundle.write_bytes(to_bytes(handmade.levels()))
    rng = np.random.default_rng(0)
    feeds = {"ids": rng.integers(0, 11, (3, 7)), "bias": rng.integers(-9, 9, 6).astype(np.float32)}
    np.savez(arrays, **feeds)
    for chosen, ran in ((("--target", "least"), "least"), (("--target", "middle"), "middle"), ((), "most")):
        said = _json(command("run", bundle, "--inputs", arrays, "--outputs", out, *chosen, "--json"))
        assert said["target"] == ran
        found = np.load(out)
        for name, right in zip(said["outputs"], handmade.encoder_reference(**feeds), strict=True):
            np.testing.assert_array_equal(found[name], right)
    bench = ("bench", bundle, "--inputs", arrays, "--rounds", 1)
    assert _json(command(*bench, "--target", "least", "--json"))["target"] == "least"
    assert "bundle holds no kernels for 'better'" in _failed(command(*bench, "--target", "better"))


def test_inspect_shows_a_bundle(command: Command, optimized: tuple[Path, Path, dict[str, Any]]) -> None:
    bundle, _, report = optimized
    said = _json(command("inspect", bundle, "--json"))
    assert said["kind"] == "bundle"
    assert len(said["steps"]) == report["kernels"]
    assert said["outputs"] == [{"name": "last_hidden_state", "dtype": "float32", "shape": ["batch", "sequence", "48"]}]
    assert said["levels"][0]["features"] == list(PLAIN.features)
    text = command("inspect", bundle).stdout
    assert "last_hidden_state" in text and report["target"] in text
    assert [line.split()[0] for line in text.splitlines() if line.strip()].count("constants") == 1


def test_inspect_shows_a_model(
    command: Command, optimized: tuple[Path, Path, dict[str, Any]], tiny_model: Path
) -> None:
    said = _json(command("inspect", tiny_model, "--json"))
    assert said["kind"] == "onnx" and said["opsets"] == {"": 17} and said["functions"] == []
    assert said["operators"]["MatMul"] == 16
    assert said["inputs"][0] == {"name": "input_ids", "dtype": "int64", "shape": ["batch", "sequence"]}

    functions = _json(command("inspect", optimized[1], "--json"))["functions"]
    assert sum(f["calls"] for f in functions if f["name"].startswith("Gemm")) == 8
    assert "moments" in command("inspect", optimized[1]).stdout


def test_targets_names_the_native_one(command: Command) -> None:
    said = _json(command("targets", "--json"))
    native = next(t for t in said["targets"] if t["name"] == said["native"])
    assert native["runs_here"] and native["missing"] == []
    lines = command("targets").stdout.splitlines()
    assert any(native["name"] in line for line in lines)
    cuda = next(line for line in lines if line.startswith(" cuda-sm80 "))
    assert lines[1].index("needs") == cuda.index("cuda", len(" cuda-sm80"))


@pytest.fixture
def damaged(optimized: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> Callable[[Callable[[bytes], bytes]], Path]:
    """Makes a copy of the bundle that ``change`` has been applied to."""

    def make(change: Callable[[bytes], bytes]) -> Path:
        path = tmp_path / "damaged.coda"
        path.write_bytes(change(optimized[0].read_bytes()))
        return path

    return make


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
        lambda data: b"not a bundle at all" + data,
    ],
    ids=["empty", "header only", "truncated", "a bit flipped", "other magic"],
)
def test_a_damaged_bundle_is_one_line(
    command: Command, damaged: Callable[..., Path], change: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    bundle = damaged(change)
    np.savez(tmp_path / "in.npz", x=np.zeros(1))
    outputs = tmp_path / "out.npz"
    for arguments in (
        ("run", bundle, "--inputs", tmp_path / "in.npz", "--outputs", outputs),
        ("inspect", bundle),
        ("bench", bundle),
    ):
        assert _failed(command(*arguments)).startswith("BundleError: ")
    assert not outputs.exists()


def test_a_garbage_model_is_one_line(command: Command, tmp_path: Path) -> None:
    model = tmp_path / "garbage.onnx"
    model.write_bytes(b"\x00\xff" * 1000)
    for arguments in (("optimize", model), ("inspect", model)):
        assert _failed(command(*arguments)).startswith("InvalidModel: ")
    assert [p.name for p in tmp_path.iterdir()] == ["garbage.onnx"]


def test_an_unknown_operator_is_named(command: Command, tmp_path: Path) -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Det", ["x"], ["y"], name="the_determinant")],
        "g",
        [value("x", TensorProto.FLOAT, ["batch", 3, 3])],
        [value("y", TensorProto.FLOAT, ["batch"])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "det.onnx")
    line = _failed(command("optimize", tmp_path / "det.onnx"))
    assert line.startswith("UnsupportedOperator: operator Det (node 'the_determinant') is not lowered")
    assert not (tmp_path / "det.coda").exists()


def test_errors_name_what_is_wrong(command: Command, tiny_model: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.onnx"
    assert _failed(command("optimize", missing)) == f"FileError: {missing}: no such file"
    line = _failed(command("optimize", tiny_model, "-o", tmp_path / "no" / "x.coda"))
    assert line == f"FileError: {tmp_path}/no/x.coda: the folder {tmp_path}/no does not exist"
    line = _failed(command("optimize", tiny_model, "-o", tmp_path / "x.coda", "--target", "z80"))
    assert line.startswith("TargetError: ") and "z80" in line and "x86-64" in line
    line = _failed(command("optimize", tiny_model, "-o", tmp_path / "x.coda", "--shape", "ids=1x2"))
    assert line.startswith("ShapeError: ") and "ids" in line and "input_ids" in line
    assert not list(tmp_path.iterdir())


def test_nothing_that_is_read_is_written_over(
    command: Command, optimized: tuple[Path, Path, dict[str, Any]], tiny_model: Path, tmp_path: Path
) -> None:
    model = onnx.load(tiny_model)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="k.onnx.data", size_threshold=0)
    link = tmp_path / "link.onnx"
    link.symlink_to("m.onnx")
    bundle = tmp_path / "b.coda"
    bundle.write_bytes(optimized[0].read_bytes())
    np.savez(tmp_path / "in.npz", x=np.zeros(1))
    before = {f: f.read_bytes() for f in tmp_path.iterdir()}
    lost, twice = "is what is read here", "is to be written twice"
    for reason, arguments in (
        (lost, ("optimize", link, "-o", tmp_path / "m.onnx")),
        (lost, ("optimize", tmp_path / "m.onnx", "--onnx", link)),
        (lost, ("optimize", tmp_path / "m.onnx", "--onnx", tmp_path / "k.onnx")),
        (twice, ("optimize", tmp_path / "m.onnx", "--onnx", tmp_path / "o", "-o", tmp_path / "o")),
        (lost, ("package", tmp_path / "m.onnx", "-o", tmp_path / "m")),
        (lost, ("package", tmp_path / "m.onnx", "-o", tmp_path / "k")),
        (lost, ("package", tmp_path / "m.onnx", "--form", "ort-bundle", "-o", tmp_path / "k")),
        (lost, ("run", bundle, "--inputs", tmp_path / "in.npz", "--outputs", bundle)),
        (lost, ("run", bundle, "--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "in.npz")),
    ):
        line = _failed(command(*arguments))
        assert line.startswith("FileError: ") and reason in line
    assert {f: f.read_bytes() for f in tmp_path.iterdir()} == before


def test_what_is_no_file_is_not_replaced_by_one(command: Command, tiny_model: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    line = _failed(command("optimize", tiny_model, "-o", tmp_path / "pipe"))
    assert line.startswith(f"FileError: {tmp_path}/pipe: is a device or a pipe")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "file").touch()
    line = _failed(command("package", tiny_model, "--form", "bundle", "-o", tmp_path / "file"))
    assert line == f"FileError: {tmp_path}/file: is a file; name a folder to write to"
    with pytest.raises(FileError, match="file/x: the folder cannot be made: Not a directory"):
        made_folder(tmp_path / "file" / "x")


def test_a_disk_that_is_full_is_one_line(optimized: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    bundle = read(optimized[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(FileError, match=r"m\.coda: cannot be written: File too large"):
            write(bundle, tmp_path / "m.coda")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_command_that_is_told_to_end_leaves_no_temporary_files(tiny_model: Path, tmp_path: Path) -> None:
    waiting = (
        "import tempfile, time\n"
        "from coda_edge import cli, driver\n"
        "def wait(*_, **__):\n"
        "    with tempfile.TemporaryDirectory():\n"
        "        print('waits', flush=True)\n"
        "        time.sleep(60)\n"
        "driver.optimize = wait\n"
        f"cli.main(['optimize', {str(tiny_model)!r}])"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", waiting], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == b"waits\n"
        assert list(tmp_path.glob("tmp*"))
        process.terminate()
        assert process.wait(30) == 143
    assert not list(tmp_path.glob("tmp*"))


def test_seconds_are_a_number(command: Command, tiny_model: Path) -> None:
    for arguments in (("optimize", tiny_model, "--tune", "nan"), ("tune", tiny_model, "--seconds", "nan")):
        result = command(*arguments)
        assert result.exit_code == 2 and "nan is not a number of seconds" in result.stderr


def test_an_error_in_json_is_still_one_object(command: Command, tmp_path: Path) -> None:
    result = command("inspect", tmp_path / "missing.coda", "--json")
    assert result.exit_code == 1
    message = f"{tmp_path}/missing.coda: no such file"
    assert json.loads(result.stdout) == {"error": {"type": "FileError", "message": message}}


def test_run_names_a_missing_input(
    command: Command, optimized: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    np.savez(tmp_path / "in.npz", input_ids=np.zeros((1, 4), np.int64))
    line = _failed(command("run", optimized[0], "--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz"))
    assert "attention_mask" in line
    assert not (tmp_path / "out.npz").exists()


def test_run_refuses_what_is_no_npz(
    command: Command, optimized: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    for content in (b"", b"PK\x03\x04 not a zip", b"text"):
        (tmp_path / "in.npz").write_bytes(content)
        line = _failed(command("run", optimized[0], "--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz"))
        assert line.startswith(f"FileError: {tmp_path}/in.npz: is not an .npz file of plain arrays")


@pytest.mark.parametrize("shape", ["input_ids", "=1x2", "input_ids=1x?", "input_ids=axb-1"])
def test_a_malformed_shape_is_a_usage_error(command: Command, tiny_model: Path, shape: str) -> None:
    result = command("optimize", tiny_model, "--shape", shape)
    assert result.exit_code == 2
    assert f"{shape!r} is not of the form NAME=1x128" in result.stderr
