"""onnxruntime, its own optimisations on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from coda_edge.verify import ort_session

from . import Call, Feeds


class OnnxRuntime:
    """Its CPU provider, as ``verify.ort_session`` makes sessions."""

    name = "onnxruntime"

    def available(self) -> str:
        return ""

    def prepare(self, model: Path, feeds: Feeds, folder: Path) -> None:
        """Nothing: the session reads the model."""

    def load(self, model: Path, feeds: Feeds, folder: Path, threads: int) -> Call:
        session = ort_session(str(model), threads)
        names = [o.name for o in session.get_outputs()]
        return lambda: [np.asarray(o) for o in session.run(names, dict(feeds))]
