"""What a run costs besides its kernels: ``python -m benchmarks.overhead [BUNDLE of MiniLM]``.

A session's whole ``run``, Python included, against the sum of its kernels' times in other runs in turn; the best of each, since all that
disturbs a run makes it longer. The smallest model is one addition of one number.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from rich.console import Console
from rich.table import Table

import coda_edge
from models import minilm

from .minilm import with_bundle

ROUNDS = 40
LENGTHS = (32, 128)


def smallest() -> coda_edge.Session:
    """One addition of one number."""
    x, y, z = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xyz")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", ["x", "y"], ["z"])], "smallest", [x, y], [z])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)
    bundle = coda_edge.optimize(model, verify=False).bundle
    return coda_edge.Session(coda_edge.bundle.to_bytes(bundle), threads=1)


def measure(session: coda_edge.Session, feeds: Mapping[str, npt.NDArray[Any]]) -> tuple[float, float]:
    """Microseconds of the best run, and of the best sum of kernels."""
    whole, kernels = np.inf, np.inf
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        session.run(None, feeds)
        whole = min(whole, (time.perf_counter_ns() - start) / 1e3)
        kernels = min(kernels, sum(step.ns for step in session.profile(feeds)) / 1e3)
    return whole, kernels


def main(bundle: str) -> None:
    """Prints one row for each length, and one for the smallest model."""
    table = Table(title="One thread, microseconds", title_justify="left", box=None)
    for heading in ("model", "run", "kernels", "rest", "rest of kernels"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    with coda_edge.Session(bundle, threads=1) as session, smallest() as small:
        cases: list[tuple[str, coda_edge.Session, Mapping[str, npt.NDArray[Any]]]] = [
            (f"MiniLM 1×{n}", session, minilm.feeds([" ".join(minilm.SENTENCES * 8)], pad_to=n)) for n in LENGTHS
        ]
        cases.append(("smallest", small, {name: np.ones(1, np.float32) for name in "xy"}))
        for name, contender, feeds in cases:
            whole, kernels = measure(contender, feeds)
            rest = f"{whole - kernels:.1f}", f"{whole / kernels - 1:.1%}"
            table.add_row(name, f"{whole:.1f}", f"{kernels:.1f}", *rest)
    Console().print(table)


if __name__ == "__main__":
    with_bundle(main)
