"""The survey: what it counts in models of known make, what it says of models that fail, and its command line."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner
from graphs import load_fixture
from onnx import parser
from rewriting import model, normal

from coda_edge import frontend
from coda_edge.cli import main
from coda_edge.errors import InvalidModel
from coda_edge.survey import Share, attention_softmaxes, find_models, norm_roots, survey, survey_model


def _saved(folder: Path, name: str, proto: onnx.ModelProto) -> Path:
    path = folder / f"{name}.onnx"
    onnx.save(proto, path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two exports, one of them in a folder below, and a file that is no model."""
    root = tmp_path_factory.mktemp("models")
    (root / "below").mkdir()
    _saved(root, "bert", load_fixture("bert.sdpa.ts17"))
    _saved(root / "below", "gpt2", load_fixture("gpt2.sdpa.dyn20"))
    (root / "broken.onnx").write_bytes(b"not a model")
    (root / "notes.txt").write_text("nothing")
    return root


def test_counts_of_an_encoder(folder: Path) -> None:
    """Two post-norm layers: the embedding's norm, two a layer; the last one is the model's output, so a kernel of its own."""
    found = survey_model(folder / "bert.onnx", "onnx")
    assert found.failure is None
    assert (found.opset, found.gemm, found.per_layer) == (17, 8, 5.0)
    assert found.exporter.startswith("pytorch")
    assert (found.attention, found.norms) == (Share(2, 2), Share(4, 5))
    assert found.error is not None and found.error < 1e-5
    assert found.kernels == found.gemm + 2 + len(found.unfused)
    assert all(u.op and u.reason for u in found.unfused)


def test_nothing_is_run_at_depth_none(folder: Path) -> None:
    found = survey_model(folder / "below" / "gpt2.onnx", "none")
    assert found.failure is None and found.error is None
    assert (found.attention, found.norms) == (Share(2, 2), Share(5, 5))


def test_building_gives_the_same_counts_and_the_error_of_the_bundle(tiny_model: Path) -> None:
    built, rewritten = survey_model(tiny_model, "build"), survey_model(tiny_model, "none")
    assert built.error is not None and built.error < 1e-4
    assert (built.attention, built.norms, built.gemm) == (rewritten.attention, rewritten.norms, rewritten.gemm)


def test_what_counts_as_norm_and_attention() -> None:
    """Whatever feeds them: here it is the inputs."""
    graph = frontend.normalize(
        model(
            """
            g (float[n, 5] x, float[n, 5, 3] v) => (float[n, 5] y, float[n, 1, 3] z) <int64[1] one = {1}> {
                y = LayerNormalization <axis = -1> (x, gain)
                p = Softmax <axis = -1> (x)
                rows = Unsqueeze (p, one)
                z = MatMul (rows, v)
            }
            """,
            {"gain": normal(5)},
        )
    )
    assert len(norm_roots(graph)) == 1
    assert len(attention_softmaxes(graph)) == 1


def test_find_models(folder: Path, tmp_path: Path) -> None:
    names = [str(p.relative_to(folder)) for p in find_models([folder])]
    assert names == ["below/gpt2.onnx", "bert.onnx", "broken.onnx"]
    assert find_models([folder / "bert.onnx", folder]) == [folder / "bert.onnx", *find_models([folder])[::2]]
    with pytest.raises(InvalidModel, match=r"no \.onnx file in"):
        find_models([tmp_path])


def test_models_in_parallel_are_in_order(folder: Path) -> None:
    heard: list[int] = []
    result = survey(find_models([folder]), "none", jobs=2, done=heard.append)
    assert [m.file for m in result.models] == ["below/gpt2.onnx", "bert.onnx", "broken.onnx"]
    assert heard == [1, 2, 3]
    assert [m.file for m in result.failed] == ["broken.onnx"]


def test_command_lists_failures_and_exits_with_1(folder: Path) -> None:
    done = CliRunner().invoke(main, ["survey", str(folder), "--no-run", "--jobs", "1", "--json"])
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["failed"] == 1
    by_file = {m["file"]: m for m in found["models"]}
    assert by_file["bert.onnx"]["attention"] == [2, 2]
    assert "\n" not in by_file["broken.onnx"]["failure"]

    table = CliRunner().invoke(main, ["survey", str(folder), "--no-run", "--jobs", "1"])
    assert table.exit_code == 1
    assert "1 of 3 failed" in table.stdout and "broken.onnx: " in table.stdout


def test_command_succeeds_when_every_model_does(folder: Path) -> None:
    done = CliRunner().invoke(main, ["survey", str(folder / "bert.onnx"), "--no-build"])
    assert done.exit_code == 0, done.output
    assert "2/2" in done.stdout


def test_markdown_has_a_row_for_all_exports_of_a_model(folder: Path, tmp_path: Path) -> None:
    for name in ("bert.sdpa.ts17", "bert.eager.dyn20", "gpt2.sdpa.dyn20"):
        _saved(tmp_path, name, load_fixture(name))
    done = CliRunner().invoke(main, ["survey", str(tmp_path), "--no-run", "--jobs", "1", "--markdown"])
    assert done.exit_code == 0, done.output
    models, left = (table.splitlines() for table in done.stdout.split("\n\n"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in models]
    assert rows[0][0] == "model" and [r[0] for r in rows[2:]] == ["bert", "gpt2"]
    assert rows[2][1] == "2" and rows[2][3:6] == ["17, 20", "2/2", "4/5"]
    assert rows[3][1:2] + rows[3][4:6] == ["1", "2/2", "5/5"]
    assert left[0].split("|")[1:4] == [" left ", " operators ", " because "]
    assert sum(int(line.split("|")[1]) for line in left[2:]) >= 3

    broken = CliRunner().invoke(main, ["survey", str(folder / "broken.onnx"), "--no-run", "--markdown"])
    assert broken.exit_code == 1 and "1 failed: InvalidModel" in broken.stdout


def test_command_names_what_is_missing(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["survey", str(tmp_path / "none.onnx")])
    assert done.exit_code == 1
    assert done.stderr.strip() == f"FileError: {tmp_path / 'none.onnx'}: no such file"


def test_sizes_that_the_exporter_wrote_into_the_graph(tmp_path: Path) -> None:
    """Inputs are made up in the sizes that the graph needs, whatever the file declares."""
    table = ", ".join(map(str, range(30)))
    baked = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (float[B, S, 6] x) => (float[S, B, 6] y) '
        f"<float[5, 6] w = {{{table}}}> {{ a = Add(x, w) y = Transpose <perm = [1, 0, 2]> (a) }}"
    )
    surveyed = survey_model(_saved(tmp_path, "baked", baked), "onnx")
    assert (surveyed.failure, surveyed.error) == (None, 0.0)
