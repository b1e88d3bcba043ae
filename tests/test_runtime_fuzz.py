"""Mutated bundles and plans, under the address and undefined behaviour sanitizers; longer: ``python tests/test_runtime_fuzz.py SECONDS``."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import handmade
import pytest

from coda_edge.bundle import to_bytes
from coda_edge.bundle.writer import encode_plan

RUNTIME = Path(__file__).resolve().parent.parent / "runtime"
FLAGS = ("-std=c11", "-O1", "-g", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pthread")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def fuzz(seconds: int, folder: Path) -> str:
    """Builds the fuzzer in ``folder`` and runs it on seeds made of the bundles of handmade; returns what it prints."""
    sources = [*RUNTIME.glob("src/*.c"), *RUNTIME.glob("src/posix/*.c"), RUNTIME / "tests/fuzz.c"]
    includes = [f"-I{RUNTIME / name}" for name in ("include", "src")]
    command = ["cc", *FLAGS, *SANITIZE, *includes, *map(str, sources), "-ldl", "-o", str(folder / "fuzz")]
    built = subprocess.run(command, capture_output=True, text=True)
    if "cannot find -lasan" in built.stderr or "cannot find -lubsan" in built.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    bundles = [handmade.encoder().bundle(), handmade.places().bundle(), handmade.levels()]
    seeds = [encode_plan(level.plan) for bundle in bundles for level in bundle.levels]
    seeds += [to_bytes(handmade.encoder().bundle(library=b"")), to_bytes(handmade.levels(b""))]
    for number, seed in enumerate(seeds):
        (folder / f"{number}.seed").write_bytes(seed)
    paths = [str(folder / f"{number}.seed") for number in range(len(seeds))]
    done = subprocess.run([str(folder / "fuzz"), str(seconds), *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_input_does_more_than_end_in_an_error(tmp_path: Path) -> None:
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    assert int(fuzz(3, tmp_path).split()[0]) >= 1000


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(fuzz(int(sys.argv[1]), Path(folder)), end="")
