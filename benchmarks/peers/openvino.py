"""OpenVINO, with the sizes of the inputs fixed and arithmetic in float32.

By default it computes in bfloat16 where the CPU has it, and rounds activations to 8 bits where weights have no more: its answer to
MiniLM with int8 weights is then wrong by 1 % of the largest value.
"""

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
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
            "ENABLE_CPU_PINNING": False,
        }
        request: Any = core.compile_model(read, "CPU", settings).create_infer_request()
        fed = dict(feeds)

        def call() -> list[Any]:
            results = request.infer(fed, share_inputs=True, share_outputs=True)
            return [results[i] for i in range(len(read.outputs))]

        return call
