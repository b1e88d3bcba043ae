"""OpenVINO, with the sizes of the inputs fixed and float32 asked for, where its default may be bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import Call, Feeds
from .wheels import lacks


class OpenVino:
    """Its CPU plugin, tuned for latency, one stream."""

    name = "openvino"

    def available(self) -> str:
        return lacks("openvino")

    def prepare(self, model: Path, feeds: Feeds, folder: Path) -> None:
        """Nothing: the plugin compiles the model as it loads it."""

    def load(self, model: Path, feeds: Feeds, folder: Path, threads: int) -> Call:
        import openvino

        core = openvino.Core()
        read = core.read_model(model)
        read.reshape({name: list(value.shape) for name, value in feeds.items()})
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "ENABLE_CPU_PINNING": False,
        }
        request: Any = core.compile_model(read, "CPU", settings).create_infer_request()
        fed = dict(feeds)

        def call() -> list[Any]:
            results = request.infer(fed, share_inputs=True, share_outputs=True)
            return [results[i] for i in range(len(read.outputs))]

        return call
