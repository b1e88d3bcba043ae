"""The user's files: found or refused in one line, arrays in and out as ``.npz``, written whole or not at all."""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
    """``path``; raises FileError if no file can be put there: its folder is missing or cannot be written, or it is a folder or device itself."""
    if path.is_dir():
        raise FileError(f"{path}: is a folder; name a file to write")
    if not path.parent.is_dir():
        raise FileError(f"{path}: the folder {path.parent} does not exist")
    if path.exists() and not path.is_file():
        raise FileError(
            f"{path}: is a device or a pipe, which a whole file cannot take the place of; name a file to write"
        )
    if not os.access(path.parent, os.W_OK):
        raise FileError(f"{path}: the folder {path.parent} cannot be written")
    return path


def made_folder(path: Path) -> Path:
    """``path``, made with those above it unless it is there; raises FileError if it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise FileError(f"{path}: the folder cannot be made: {e.strerror or e}") from e
    return path


def apart(written: Iterable[Path], read: Iterable[Path]) -> None:
    """Raises FileError if a file is to be written that is read too, or that another one is to be written to."""
    sources = {path.resolve() for path in read}
    seen: set[Path] = set()
    for path in written:
        real = path.resolve()
        if real in sources:
            raise FileError(f"{path}: is what is read here and would be lost; name another file to write")
        if real in seen:
            raise FileError(f"{path}: is to be written twice; name different files")
        seen.add(real)


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` that becomes ``path`` if the block ends well and vanishes if it does not.

    Raises FileError if the folder does not exist or cannot be written.
    """
    part = creatable(path).with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        yield part
        part.replace(path)
    except OSError as e:
        raise FileError(f"{path}: cannot be written: {e.strerror or e}") from e
    finally:
        with suppress(OSError):
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
