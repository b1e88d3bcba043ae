"""Windows in ONNX's own operators, for the functions of an optimized model: see ``export``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import onnx_graphsurgeon as gs
from onnx import NodeProto

from .epilogue.onnx import Emitter
from .window import Window

_END = 2**63 - 1


def convolution(emitter: Emitter, inputs: Sequence[str], node: gs.Node, text: str) -> str:
    """The windows ``text`` of A ``[B, *sizes, C]``, times W ``[taps·C, N]``, as a Conv: ``[B, *out, N]``."""
    a, w = inputs
    window = Window.parse(text)
    k, n = (int(d) for d in node.inputs[1].shape)
    count = len(window.kernel)
    first = emitter.node("Transpose", a, perm=[0, count + 1, *range(1, count + 1)])
    split = emitter.node("Reshape", w, emitter.ints([*window.kernel, k // window.taps, n]))
    filters = emitter.node("Transpose", split, perm=[count + 1, count, *range(count)])
    y = emitter.node(
        "Conv",
        first,
        filters,
        kernel_shape=list(window.kernel),
        strides=list(window.strides),
        dilations=list(window.dilations),
        pads=[*window.before, *window.after],
        group=int(node.attrs.get("group", 1)),
    )
    return emitter.node("Transpose", y, perm=[0, *range(2, count + 2), 1])


def window_rows(node: gs.Node, source: str, result: str) -> list[NodeProto]:
    """The rows themselves: the input, padded, under each tap, joined along the channels."""
    emitter, window = Emitter("tap_"), Window.parse(node.attrs["window"])
    axes = emitter.ints(list(range(1, len(window.kernel) + 1)))
    if window.padded:
        source = emitter.node("Pad", source, emitter.ints([0, *window.before, 0, 0, *window.after, 0]))
    parts = []
    for tap in itertools.product(*map(range, window.kernel)):
        starts = [t * d for t, d in zip(tap, window.dilations, strict=True)]
        left = [(k - 1 - t) * d for t, k, d in zip(tap, window.kernel, window.dilations, strict=True)]
        ends = [-e if e else _END for e in left]
        operands = [emitter.ints(starts), emitter.ints(ends), axes, emitter.ints(list(window.strides))]
        parts.append(emitter.node("Slice", source, *operands))
    emitter.name_results([emitter.node("Concat", *parts, axis=-1)], [result])
    return emitter.nodes
