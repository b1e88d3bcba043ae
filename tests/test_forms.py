"""Models as libraries, archives and C sources: each is run, here or emulated, and compared with the bundle or onnxruntime."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from emulation import MACHINES, ROOT, Machine, RemoteSession
from graphs import load_fixture, random_inputs, run, sizes_for, worst_error

from coda_edge.bundle import TensorInfo
from coda_edge.cli import main
from coda_edge.errors import TargetError
from coda_edge.forms import Files, package
from coda_edge.forms.compiled import default_name, identifier
from coda_edge.forms.linked import LinkedModel

NAME = "bert.sdpa.ts17"
ZIG = (sys.executable, "-m", "ziglang", "cc")
WARNINGS = ("-std=c11", "-Wall", "-Wextra", "-Werror")
INFOS = [TensorInfo(name, "int64", ()) for name in ("input_ids", "attention_mask", "token_type_ids")]


@pytest.fixture(scope="module")
def c_form(model: Path) -> Files:
    """The encoder as C sources."""
    return package(model, "c", verify=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small encoder as a file."""
    path = tmp_path_factory.mktemp("model") / "small-bert.onnx"
    onnx.save(load_fixture(NAME), path)
    return path


def _cases() -> list[tuple[dict[str, np.ndarray], list[np.ndarray]]]:
    m = load_fixture(NAME)
    feeds = [
        random_inputs(m, sizes_for(m, batch, length), padding="left") for batch, length in ((1, 1), (3, 7), (1, 61))
    ]
    return [(f, run(m, f)) for f in feeds]


def _saved(files: Files, folder: Path) -> Path:
    files.save(folder)
    return folder


def _undefined(paths: Sequence[Path], folder: Path) -> set[str]:
    """What all objects and archives together leave to others."""
    whole = folder / "whole.o"
    command = ["ld", "-r", "--whole-archive", "-o", str(whole), *map(str, paths)]
    subprocess.run(command, check=True, capture_output=True)
    listed = subprocess.run(["nm", "-u", str(whole)], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1] for line in listed.splitlines()} - {"_GLOBAL_OFFSET_TABLE_"}


def test_c_sources_build_with_warnings_as_errors_and_need_memcpy_and_memset_only(c_form: Files, tmp_path: Path) -> None:
    files, folder = c_form, _saved(c_form, tmp_path)
    sources = sorted(folder.rglob("*.c"))
    assert files.name == "small_bert" and {p.name for p in sources} >= {
        "small_bert.c",
        "small_bert_kernels.c",
        "session.c",
    }
    compilers = [[tool] for tool in ("cc", "clang") if shutil.which(tool)] + [list(ZIG)]
    objects = []
    for number, compiler in enumerate(compilers):
        for source in sources:
            objects.append(tmp_path / f"{source.stem}{number}.o")
            command = [*compiler, *WARNINGS, "-O1", "-ffreestanding", "-fPIC", f"-I{folder}", "-fno-sanitize=undefined"]
            done = subprocess.run([*command, "-c", source, "-o", objects[-1]], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    if shutil.which("ld") and shutil.which("nm"):
        assert _undefined([o for o in objects if o.stem.endswith("0")], tmp_path) == {"memcpy", "memset"}
    library = tmp_path / "all.so"
    last = [str(o) for o in objects[-len(sources) :]]
    subprocess.run([*ZIG, "-shared", *last, "-o", str(library)], check=True)
    with LinkedModel(library, "small_bert", memory=64 << 20) as linked:
        for feeds, expected in _cases():
            assert worst_error(expected, linked.run(None, feeds)) < 1e-5
        assert 0 < linked.used < 8 << 20
    assert "coda_linked_model small_bert_model" in (folder / "small_bert.h").read_text()


def test_a_static_archive_is_linked_and_run(model: Path, tmp_path: Path) -> None:
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    files = package(model, "static", name="two words", bare=True)
    assert files.name == "two_words" and files.max_rel_error is not None and files.max_rel_error < 1e-5
    folder = _saved(files, tmp_path)
    if shutil.which("ld"):
        assert _undefined([folder / "libtwo_words.a"], tmp_path) == {"memcpy", "memset"}
    program = _program(folder, "two_words", ["cc"], tmp_path)
    _check([str(program)])


def test_a_shared_library_has_all_inside(model: Path, tmp_path: Path) -> None:
    folder = _saved(package(model, "shared", verify=False), tmp_path)
    library = folder / "libsmall_bert.so"
    if shutil.which("nm"):
        listed = subprocess.run(
            ["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True
        ).stdout
        names = {line.split()[-1] for line in listed.splitlines()}
        assert "small_bert_model" in names and all(n.startswith("coda_") for n in names - {"small_bert_model"})
    with LinkedModel(library, "small_bert") as linked:
        for feeds, expected in _cases():
            assert worst_error(expected, linked.run(None, feeds)) < 1e-5


def _program(folder: Path, name: str, compiler: Sequence[str], output: Path) -> Path:
    """runtime/tests/linked.c over the form in ``folder``: an archive, a library, or else sources."""
    built = [p for p in (folder / f"lib{name}.a", folder / f"lib{name}.so") if p.exists()]
    parts = [*built, f"-Wl,-rpath,{folder}"] if built else sorted(folder.rglob("*.c"))
    program = output / "linked"
    command = [*compiler, *WARNINGS, "-O2", f"-DMODEL={name}", f'-DMODEL_HEADER="{name}.h"', f"-I{folder}"]
    sources = [str(ROOT / "runtime/tests/linked.c"), *map(str, parts)]
    done = subprocess.run([*command, *sources, "-pthread", "-o", str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def _check(command: Sequence[str]) -> None:
    session = RemoteSession.of_program(command, INFOS, [TensorInfo("out", "float32", ())])
    for feeds, expected in _cases():
        assert worst_error(expected, session.run(feeds)) < 1e-5
    with pytest.raises(RuntimeError, match="expected"):
        session.run({**_cases()[1][0], "attention_mask": np.zeros((2, 7), np.int64)})
    session.close()


FORMS = ("bare", "c", "static", "shared")
_MUSL = Machine("qemu-aarch64", "cortex-a72", "aarch64-linux-musl", "/")
FOREIGN = {name: MACHINES[name] for name in ("cortex-a72", "armv7", "riscv64")} | {"musl": ("arm64-linux-musl", _MUSL)}
"""A target, and the machine that runs what is built for it. With musl there are programs without a dynamic loader only."""
CASES = [
    pytest.param(name, form, marks=() if name == "cortex-a72" and form in FORMS[:2] else pytest.mark.emulated)
    for name in FOREIGN
    for form in FORMS
    if (name, form) != ("musl", "shared")
]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_forms_on_an_emulated_machine(
    name: str, form: str, model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    target, machine = FOREIGN[name]
    if machine.lacks:
        pytest.skip(machine.lacks)
    if form == "c":
        files = request.getfixturevalue("c_form")
    else:
        kind = "shared" if form == "shared" else "static"
        files = package(model, kind, target=target, bare=form == "bare", verify=False)
    folder = _saved(files, tmp_path)
    compiler = [*ZIG, "-target", machine.triple, "-fno-sanitize=undefined"]
    _check(machine.command(_program(folder, "small_bert", compiler, tmp_path)))


def test_archives_for_systems_that_load_no_code(model: Path) -> None:
    files = package(model, "static", target="arm64-apple-ios", verify=False)
    assert files.contents["libsmall_bert.a"][:8] == b"!<arch>\n"
    with pytest.raises(TargetError, match="take the form static"):
        package(model, "shared", target="arm64-apple-ios")


def test_command(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(
        main, ["package", str(model), "--form", "bundle", "-o", str(out), "--name", "m", "--json"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["form"] == "bundle" and found["files"] == {str(out / "m.coda"): (out / "m.coda").stat().st_size}
    assert found["max_rel_error"] < 1e-5
    refused = CliRunner().invoke(main, ["package", str(out / "m.coda"), "--form", "static"])
    assert refused.exit_code == 1 and "give the ONNX model" in refused.stderr
    with pytest.raises(TargetError, match="'wasm' is no form: choose one of bundle, shared, static, c"):
        package(model, "wasm")


@pytest.mark.parametrize(
    ("form", "option"), [("ort", ("--name", "m")), ("bundle", ("--bare",)), ("c", ("--weights", "library"))]
)
def test_options_of_other_forms_are_refused(form: str, option: tuple[str, ...], model: Path) -> None:
    refused = CliRunner().invoke(main, ["package", str(model), "--form", form, *option])
    assert refused.exit_code == 2 and f"{option[0]} says nothing of the form {form}: it is of" in refused.stderr


def test_identifiers() -> None:
    assert [identifier(t) for t in ("a b.c", "7b", "…", "MiniLM-L6")] == ["a_b_c", "m7b", "model", "minilm_l6"]


def test_names_of_graphs_are_no_paths() -> None:
    assert [default_name(b"", name) for name in ("../a/b", "", "main_graph")] == ["a_b", "model", "main_graph"]
    assert default_name("folder/Some-1.onnx", "main_graph") == "Some-1"
