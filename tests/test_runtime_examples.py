"""The example programs of runtime/examples, in each language whose compiler is here: all print the same embedding."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import handmade
import numpy as np
import pytest

from coda_edge import _runtime
from coda_edge.bundle import write

RUNTIME = Path(__file__).resolve().parent.parent / "runtime"
EXAMPLES, INCLUDE = RUNTIME / "examples", RUNTIME / "include"
LIBRARY = Path(_runtime.__file__).parent
LINK = (f"-L{LIBRARY}", "-lcoda_runtime", f"-Wl,-rpath,{LIBRARY}")
WARNINGS = ("-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder that looks tokens up in a table."""
    p = handmade.HandPlan()
    ids = p.input("input_ids", "int64", "batch", "seq")
    p.input("attention_mask", "int64", "batch", "seq")
    p.input("token_type_ids", "int64", "batch", "seq")
    table, hidden = p.constant(handmade.encoder_table()), p.output("last_hidden_state", "float32", "batch", "seq", 6)
    p.step("gather", [table, ids, hidden], [11, 6], "batch*seq")
    path = tmp_path_factory.mktemp("bundle") / "m.coda"
    write(p.bundle(), path)
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of more outputs than the examples have room for."""
    p = handmade.HandPlan()
    ids, table = p.input("input_ids", "int64", "batch", "seq"), p.constant(handmade.encoder_table())
    for i in range(9):
        p.step("gather", [table, ids, p.output(f"y{i}", "float32", "batch", "seq", 6)], [11, 6], "batch*seq")
    path = tmp_path_factory.mktemp("bundle") / "other.coda"
    write(p.bundle(), path)
    return path


def _tool(name: str) -> str:
    tool = shutil.which(name)
    if not tool:
        pytest.skip(f"{name} is not installed")
    return tool


def _build(*command: str | Path) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _check(bundle: Path, *program: str | Path) -> None:
    done = subprocess.run([*map(str, program), str(bundle), "1", "5", "9"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = handmade.encoder_table()[[1, 5, 9]].mean(0)
    np.testing.assert_allclose([float(line) for line in done.stdout.split()], expected, atol=1e-6)
    failed = subprocess.run([*map(str, program), str(bundle), "11"], capture_output=True, text=True)
    assert failed.returncode == 1 and "index is out of range" in failed.stderr


def _check_refused(bundle: Path, *program: str | Path) -> None:
    done = subprocess.run([*map(str, program), str(bundle), "1", "5"], capture_output=True, text=True)
    assert done.returncode == 1 and "is no encoder of sentences" in done.stderr


def test_c(bundle: Path, other: Path, tmp_path: Path) -> None:
    _build(_tool("cc"), "-std=c11", *WARNINGS, EXAMPLES / "embed.c", *LINK, "-o", tmp_path / "embed")
    _check(bundle, tmp_path / "embed")
    _check_refused(other, tmp_path / "embed")


def test_cpp(bundle: Path, tmp_path: Path) -> None:
    _build(_tool("c++"), "-std=c++17", *WARNINGS, EXAMPLES / "embed.cpp", *LINK, "-o", tmp_path / "embed")
    _check(bundle, tmp_path / "embed")


def test_rust(bundle: Path, tmp_path: Path) -> None:
    flags = ("-O", "--edition", "2021", "-D", "warnings", "-L", f"native={LIBRARY}", "-l", "dylib=coda_runtime")
    _build(_tool("rustc"), *flags, f"-Clink-arg={LINK[-1]}", EXAMPLES / "embed.rs", "-o", tmp_path / "embed")
    _check(bundle, tmp_path / "embed")


def test_java(bundle: Path, other: Path, tmp_path: Path) -> None:
    headers = Path(_tool("javac")).resolve().parent.parent / "include"
    if not (headers / "jni.h").exists():
        pytest.skip(f"there is no jni.h in {headers}")
    java, source = (f"-I{headers}", f"-I{headers / 'linux'}"), EXAMPLES / "jni/embed_jni.c"
    output = tmp_path / "libcoda_embed.so"
    _build(_tool("cc"), "-std=c11", "-shared", "-fPIC", *WARNINGS, *java, source, *LINK, "-o", output)
    _build(_tool("javac"), "-d", tmp_path, EXAMPLES / "jni/Embed.java")
    program = (_tool("java"), f"-Djava.library.path={tmp_path}", "-cp", tmp_path, "Embed")
    _check(bundle, *program)
    _check_refused(other, *program)


def test_swift_imports_the_header(tmp_path: Path) -> None:
    """Clang reads the module map as Swift's importer does."""
    clang = _tool("clang")
    for file in (EXAMPLES / "swift/module.modulemap", INCLUDE / "coda.h"):
        shutil.copy(file, tmp_path)
    (tmp_path / "use.m").write_text("@import Coda;\nunsigned version(void) { return coda_abi_version(); }\n")
    flags = ("-fmodules", f"-fmodules-cache-path={tmp_path / 'cache'}", f"-I{tmp_path}", "-fsyntax-only")
    _build(clang, *flags, tmp_path / "use.m")
