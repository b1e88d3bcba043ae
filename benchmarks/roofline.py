"""A roofline (Williams, Waterman and Patterson, 2009): what arithmetic each kernel reaches, below what memory and the core allow.

A kernel is a point: FLOPs for each byte that it must move, against FLOP/s; its area is its share of the time, and below a thousandth it is
left out. The whole model is a point for each engine, at the intensity that its kernels here have together. The dashed roof is of the
second-level caches.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .measure import OURS, Measured
from .table import groups

_KINDS = {"attention": "#d1495b", "gemm": "#00798c"}
_OTHER = "#edae49"
_ENGINES = {OURS: "*", "onnxruntime": "s", "openvino": "D", "mnn": "^", "iree": "v", "tvm": "P"}
_LARGEST, _SMALLEST = 900.0, 8.0
_LEAST_SHARE = 1e-3


def draw(measured: Measured, stem: Path) -> None:
    """Writes ``stem`` with ``.png`` and ``.svg``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "coda-edge"
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    total = sum(k.ns for k in measured.kernels)
    points = [g for g in groups(measured.kernels) if g.flops and g.bytes and g.ns > _LEAST_SHARE * total]
    peak = measured.roofs.flops / 1e9
    intensities = [g.flops / g.bytes for g in points] or [1.0]
    span = np.geomspace(min(*intensities, 0.25) / 2, max(*intensities, 256) * 2, 200)
    for bandwidth, style, label in (
        (measured.roofs.memory, "-", "memory"),
        (measured.roofs.cache, "--", "L2 caches"),
    ):
        roof = np.minimum(span * bandwidth / 1e9, peak)
        axes.plot(span, roof, style, color="#555555", linewidth=1.2, label=f"{label}: {bandwidth / 1e9:.0f} GB/s")
    for kind in (*_KINDS, "other"):
        of_kind = [g for g in points if _kind(g.name) == kind]
        if not of_kind:
            continue
        axes.scatter(
            [g.flops / g.bytes for g in of_kind],
            [g.flops / g.ns for g in of_kind],
            [max(_LARGEST * g.ns / total, _SMALLEST) for g in of_kind],
            color=_KINDS.get(kind, _OTHER),
            alpha=0.6,
            linewidths=0,
            label=kind,
        )
    whole = measured.flops / max(measured.bytes, 1)
    for engine in measured.engines:
        if engine.right:
            rate = measured.flops / (engine.ms * 1e6)
            label = f"{engine.name}: {engine.ms:.1f} ms"
            axes.plot(
                [whole], [rate], _ENGINES.get(engine.name, "o"), color="black", label=label, markersize=8, mfc="none"
            )
    axes.set(xscale="log", yscale="log", xlabel="FLOP for each byte moved", ylabel="GFLOP/s")
    axes.set_title(f"{measured.title}, {measured.threads} thread{'s' * (measured.threads > 1)}", loc="left")
    axes.axhline(peak, color="#555555", linewidth=0.5)
    axes.annotate(
        f"FMA peak {peak:.0f} GFLOP/s", (span[0], peak), xytext=(2, 3), textcoords="offset points", fontsize=8
    )
    legend = axes.legend(loc="lower right", fontsize=8)
    for handle in legend.legend_handles:
        if handle is not None and hasattr(handle, "set_sizes"):
            handle.set_sizes([40.0])
    figure.savefig(f"{stem}.png", dpi=130)
    figure.savefig(f"{stem}.svg", metadata={"Date": None})
    pyplot.close(figure)


def _kind(name: str) -> str:
    """By the last of the words in it: names begin with the ONNX node's, which may hold any."""
    lowered = name.lower()
    found = max(_KINDS, key=lowered.rfind)
    return found if found in lowered else "other"
