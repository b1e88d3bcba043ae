"""The user's files: found or refused in one line, arrays in and out as ``.npz``, written whole or not at all."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import CodaError


class FileError(CodaError):
    """A file that is missing, cannot be read or written, or does not hold what its use asks for."""


def existing(path: Path) -> Path:
    """``path``; raises FileError if no file is there."""
    if not path.is_file():
        raise FileError(f"{path}: {'is not a file' if path.exists() else 'no such file'}")
    return path


def creatable(path: Path) -> Path:
    """``path``; raises FileError if it cannot be made: its folder is missing, or it is a folder itself."""
    if path.is_dir():
        raise FileError(f"{path}: is a folder; name a file to write")
    if not path.parent.is_dir():
        raise FileError(f"{path}: the folder {path.parent} does not exist")
    return path


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` that becomes ``path`` if the block ends well and vanishes if it does not.

    Raises FileError if the folder does not exist or cannot be written.
    """
    part = creatable(path).with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    except OSError as e:
        raise FileError(f"{path}: cannot be written: {e.strerror or e}") from e
    finally:
        part.unlink(missing_ok=True)


def load_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an ``.npz`` file by name; raises FileError if it is not one (pickled objects are refused)."""
    try:
        with np.load(existing(path), allow_pickle=False) as archive:
            if isinstance(archive, np.ndarray):
                raise FileError(f"{path}: holds one unnamed array; save named ones with numpy.savez")
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as e:
        raise FileError(f"{path}: is not an .npz file of plain arrays ({e})") from e


def save_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Writes ``arrays`` as an ``.npz`` file, uncompressed."""
    with atomic(path) as part, part.open("wb") as stream:
        np.savez(stream, allow_pickle=False, **dict(arrays))
