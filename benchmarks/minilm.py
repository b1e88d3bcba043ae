"""MiniLM-L6, one sentence of 128 or 32 tokens, on one and two threads: ``python -m benchmarks.minilm [BUNDLE]``.

Without BUNDLE the model is optimized first. The last column is what the kernels' arithmetic over the whole time of a run
comes to, as a fraction of the machine's fused multiply-add peak on as many threads.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

import coda_edge
from coda_edge.bench import bench
from coda_edge.verify import ort_session
from models import minilm

from .roofs import fma_peak

LENGTHS = (128, 32)
THREADS = (1, 2)


def main(bundle: str) -> None:
    """Prints one row for each length and number of threads."""
    table = Table(title="MiniLM-L6, fp32, batch 1", title_justify="left", box=None)
    for heading in ("tokens", "threads", "coda-edge ms", "onnxruntime ms", "speed-up", "error", "of FMA peak"):
        table.add_column(heading, justify="right")
    for threads in THREADS:
        peak = fma_peak(threads)
        reference = ort_session(str(minilm.path()), threads)
        with coda_edge.Session(bundle, threads=threads) as session:
            for length in LENGTHS:
                feeds = minilm.feeds([" ".join(minilm.SENTENCES * 8)], pad_to=length)
                result = bench(session, feeds, {"onnxruntime": reference}, threads)
                peer = result.against["onnxruntime"]
                flops = sum(step.flops for step in session.profile(feeds))
                fraction = flops / (result.ours_ms * 1e-3) / peak
                times = (f"{result.ours_ms:.2f}", f"{peer.ms:.2f}", f"{peer.ratio:.2f} ×")
                table.add_row(str(length), str(threads), *times, f"{peer.max_rel_error:.0e}", f"{fraction:.0%}")
    Console().print(table)


def with_bundle(run: Callable[[str], None]) -> None:
    """Calls ``run`` with the bundle that the command line names, or with one that is made for it."""
    if len(sys.argv) > 1:
        run(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        built = str(Path(folder) / "minilm.coda")
        coda_edge.optimize(minilm.path()).save(built)
        run(built)


if __name__ == "__main__":
    with_bundle(main)
