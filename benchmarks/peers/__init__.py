"""Other engines on the same ONNX file and inputs, one file each; none of them is needed.

A peer is a module-level object of the class ``Peer`` describes, named in ``PEERS``. What it does with a model is first tried in a process
of its own (``trial``), so that a peer that crashes, hangs or answers nothing costs a line in the report and not the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

Feeds = Mapping[str, npt.NDArray[Any]]
Outputs = list[npt.NDArray[Any]]
Call = Callable[[], Outputs]


class Peer(Protocol):
    """An engine. Whatever a method raises is why the engine is left out."""

    name: str

    def available(self) -> str:
        """What it takes to have it here; empty if it is here."""

    def prepare(self, model: Path, feeds: Feeds, folder: Path) -> None:
        """Converts or compiles ``model`` for inputs like ``feeds``, into ``folder``."""

    def load(self, model: Path, feeds: Feeds, folder: Path, threads: int) -> Call:
        """The model on ``threads`` threads, from what ``prepare`` left in ``folder``; a call runs it on ``feeds`` and gives the outputs."""


def peers() -> dict[str, Peer]:
    """All of them, by name."""
    from . import iree, mnn, openvino, ort, tvm

    return {p.name: p for p in (ort.OnnxRuntime(), openvino.OpenVino(), mnn.Mnn(), iree.Iree(), tvm.Tvm())}
