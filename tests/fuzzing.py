"""Fuzzes what reads a bundle and the interpreter of plans, under the address and undefined behaviour sanitizers.

``python tests/fuzzing.py [--seconds 600] [--runs N] [--keep]``; ``make fuzz`` does it for ten minutes. The fuzzer is libFuzzer where Clang has it, or
else the driver of runtime/tests/fuzz.c. Both begin with tests/corpus, of plans and bundles that once reached new code, and with those of
handmade; ``--keep`` adds to the corpus what reached more. What makes it crash is left in build/fuzz.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import handmade

from coda_edge.bundle import to_bytes
from coda_edge.bundle.writer import encode_plan

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests/corpus"
FLAGS = (
    "-std=c11",
    "-O1",
    "-g",
    "-D_GNU_SOURCE",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-pthread",
    "-fno-sanitize-recover=all",
)
SANITIZERS = "address,undefined"
LONGEST = 1 << 14
"""Bytes of an input at the most."""


@dataclass(frozen=True)
class Fuzzer:
    """A built fuzzer. ``guided``: libFuzzer, which looks for inputs that reach new code."""

    program: Path
    guided: bool

    def run(self, corpus: list[Path], seconds: int, runs: int, artifacts: Path) -> int:
        """Fuzzes on the files of folders ``corpus``, and puts inputs that reach new code into the first; how many it executed.

        ``runs``: ends it earlier; 0: it does not. Raises AssertionError with what it printed if an input did more than end in an error.
        """
        if self.guided:
            limits = [f"-max_total_time={seconds}", f"-max_len={LONGEST}", "-timeout=60", "-print_final_stats=1"]
            limits += [f"-runs={runs}"] if runs else []
            # The peak that the system tells a process starts at that of the process that started it: what is asked for is limited instead.
            limits += ["-rss_limit_mb=0", "-malloc_limit_mb=1024"]
            command = [str(self.program), *map(str, corpus), *limits, f"-artifact_prefix={artifacts}/"]
        else:
            command = [
                str(self.program),
                str(seconds),
                *(str(p) for folder in corpus for p in sorted(folder.iterdir())),
            ]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.search(r"stat::number_of_executed_units: (\d+)|^(\d+) executions", done.stdout + done.stderr, re.M)
        assert found, done.stdout + done.stderr
        return int(found[1] or found[2])

    def grow(self, corpus: Path, found: Path) -> int:
        """Adds to ``corpus`` the smallest files of ``found`` that reach what it does not; how many."""
        assert self.guided, "the corpus grows with libFuzzer only: install Clang"
        before = len(list(corpus.iterdir()))
        command = [str(self.program), "-merge=1", f"-max_len={LONGEST}", str(corpus), str(found)]
        subprocess.run(command, check=True, capture_output=True)
        return len(list(corpus.iterdir())) - before


def build(folder: Path, guided: bool = True) -> Fuzzer | None:
    """The fuzzer in ``folder``: libFuzzer if Clang has it and ``guided`` asks for it; None if no compiler has the sanitizers."""
    runtime = ROOT / "runtime"
    sources = [*runtime.glob("src/*.c"), *runtime.glob("src/posix/*.c"), runtime / "tests/fuzz.c"]
    inputs = [*(f"-I{runtime / name}" for name in ("include", "src")), *map(str, sources), "-ldl"]
    compilers = [(("clang", "-DCODA_LIBFUZZER", f"-fsanitize=fuzzer,{SANITIZERS}"), True)] if guided else []
    compilers += [((name, f"-fsanitize={SANITIZERS}"), False) for name in ("cc", "clang")]
    for compiler, is_guided in compilers:
        if not shutil.which(compiler[0]) or not _links(compiler, folder):
            continue
        program = folder / ("libfuzzer" if is_guided else "fuzzer")
        built = subprocess.run([*compiler, *FLAGS, *inputs, "-o", str(program)], capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
        return Fuzzer(program, is_guided)
    return None


def _links(compiler: tuple[str, ...], folder: Path) -> bool:
    """Whether the compiler has the libraries of its sanitizers."""
    source = folder / "probe.c"
    source.write_text("int LLVMFuzzerTestOneInput(void); int LLVMFuzzerTestOneInput(void) { return 0; }\n" + _MAIN)
    return subprocess.run([*compiler, source, "-o", folder / "probe"], capture_output=True).returncode == 0


_MAIN = "#ifndef CODA_LIBFUZZER\nint main(void) { return 0; }\n#endif\n"


def write_seeds(folder: Path) -> Path:
    """``folder`` with plans and bundles as they are written today."""
    bundles = [handmade.encoder().bundle(), handmade.places().bundle(), handmade.levels()]
    seeds = [encode_plan(level.plan) for bundle in bundles for level in bundle.levels]
    seeds += [to_bytes(handmade.encoder().bundle(library=b"")), to_bytes(handmade.levels(b""))]
    folder.mkdir(exist_ok=True)
    for number, seed in enumerate(seeds):
        (folder / f"{number}.seed").write_bytes(seed)
    return folder


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit status is 1 if an input crashed the runtime."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--runs", type=int, default=0, help="stop after so many executions")
    parser.add_argument("--keep", action="store_true", help="add to tests/corpus what reached new code")
    given = parser.parse_args(arguments)
    artifacts = ROOT / "build/fuzz"
    artifacts.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fuzzer = build(folder)
        if fuzzer is None:
            print("fuzzing needs a C compiler with the address and undefined behaviour sanitizers", file=sys.stderr)
            return 2
        found = folder / "found"
        found.mkdir()
        try:
            executed = fuzzer.run([found, CORPUS, write_seeds(folder / "seeds")], given.seconds, given.runs, artifacts)
        except AssertionError as error:
            print(f"{error}\nthe input is in {artifacts}", file=sys.stderr)
            return 1
        print(f"{executed} executions by {'libFuzzer' if fuzzer.guided else 'runtime/tests/fuzz.c'}, no crash")
        if given.keep:
            print(f"{fuzzer.grow(CORPUS, found)} inputs added to {CORPUS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
