"""What must hold of a real model before a release, and takes too long for a test: ``python tests/release.py MODEL.onnx BUNDLE``.

Sessions on 8 threads give the same bits in 1,000 runs each; of 1,000 bundles with one bit flipped, each is refused, with a key and
without; the bare static form needs memcpy and memset only; sizes, load time and memory are within their bounds (``benchmarks.embed``). ``make release`` runs it, the fuzzer and the emulated machines.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from benchmarks import embed
from coda_edge import Session, _runtime
from coda_edge.bundle.signature import generate_keys, sign
from coda_edge.errors import CodaError
from coda_edge.forms import package

ROOT = Path(__file__).resolve().parent.parent
THREADS, RUNS, FLIPS, LENGTH = 8, 1000, 1000, 16


def shared(bundle: Path) -> bool:
    """Whether sessions of one model agree, by runtime/tests/share.c."""
    library = Path(_runtime.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "share")
        source = [f"-I{library / 'include'}", str(ROOT / "runtime/tests/share.c")]
        link = [f"-L{library}", "-lcoda_runtime", f"-Wl,-rpath,{library}", "-pthread", "-o", str(program)]
        subprocess.run([shutil.which("cc") or "clang", "-std=c11", "-O2", *source, *link], check=True)
        command = [str(program), str(bundle), str(THREADS), str(RUNS), str(LENGTH)]
        return subprocess.run(command).returncode == 0


def accepted_flips(bundle: Path, key: bytes | None, flips: int) -> list[int]:
    """The bits, of ``flips`` random ones, that a bundle can differ in and still be opened and run."""
    accepted = []
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, bundle.name)
        shutil.copy(bundle, copy)
        with copy.open("r+b", buffering=0) as file:
            for bit in rng.integers(0, copy.stat().st_size * 8, flips).tolist():
                _flip(file, bit)
                try:
                    with Session(copy, threads=1, key=key) as session:
                        feeds = {i.name: np.ones((1, 1), np.int64) for i in session.get_inputs()}
                        session.run(None, feeds)
                    accepted.append(bit)
                except CodaError:
                    pass
                _flip(file, bit)
    return accepted


def _flip(file: BinaryIO, bit: int) -> None:
    file.seek(bit // 8)
    byte = file.read(1)[0]
    file.seek(bit // 8)
    file.write(bytes([byte ^ (1 << bit % 8)]))


def bare_needs(model: Path) -> set[str]:
    """What the bare static form of a model leaves to the program that links it."""
    files = package(model, "static", bare=True, verify=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files.save(folder)
        whole = folder / "whole.o"
        subprocess.run(["ld", "-r", "--whole-archive", "-o", whole, *folder.glob("*.a")], check=True)
        listed = subprocess.run(["nm", "-u", whole], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1] for line in listed.splitlines()} - {"_GLOBAL_OFFSET_TABLE_"}


def main(model: Path, bundle: Path) -> int:
    """Prints each with its verdict; the exit status is 1 if one does not hold."""
    holds = shared(bundle)
    needs = bare_needs(model)
    print("the bare static form needs", *sorted(needs))
    holds &= needs == {"memcpy", "memset"}
    secret, public = generate_keys()
    with tempfile.TemporaryDirectory() as folder:
        signed = Path(folder, bundle.name)
        signed.write_bytes(sign(bundle.read_bytes(), secret))
        for name, file, key in (("without a key", bundle, None), ("with a key", signed, public)):
            accepted = accepted_flips(file, key, FLIPS)
            print(f"{FLIPS} flipped bits, {name}: {FLIPS - len(accepted)} refused", *accepted)
            holds &= not accepted
    for bar in embed.bars(model, bundle, "1x128"):
        print(bar.line)
        holds &= bar.holds
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
