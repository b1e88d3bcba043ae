"""What is known of values by interval arithmetic."""

from __future__ import annotations

import math

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from coda_edge.epilogue.program import EpilogueProgram
from coda_edge.ranges import ANY, Interval, of_array, of_body, of_program


def _of(*steps: str, params: str = "") -> Interval:
    lines = "\n".join(f"  {step}" for step in steps)
    name = steps[-1].split(" ")[0]
    program = EpilogueProgram.parse(f"(acc: tile f32{params}) -> (y: tile = {name}) {{\n{lines}\n}}")
    return of_program(program)[name]


QUANTISED = ("v0 = div acc 0.25", "v1 = round v0", "v2 = add v1 131.0", "v3 = max v2 0.0", "v4 = min v3 255.0")


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (QUANTISED, Interval(0, 255, True)),
        ((*QUANTISED, "v5 = sub v4 131.0"), Interval(-131, 124, True)),
        ((*QUANTISED, "v5 = sub v4 0.5"), Interval(-0.5, 254.5, False)),
        ((*QUANTISED, "v5 = mul v4 -2.0"), Interval(-510, 0, True)),
        ((*QUANTISED, "v5 = neg v4", "v6 = relu v5"), Interval(0, 0, True)),
        ((*QUANTISED, "v5 = cast v4 to=u8", "v6 = cast v5 to=f32"), Interval(0, 255, True)),
        ((*QUANTISED, "v5 = cast v4 to=i8"), Interval(-128, 127, True)),
        (("v0 = min acc 7.5", "v1 = max v0 -3.5", "v2 = floor v1"), Interval(-4, 7, True)),
        (("v0 = min acc 7.5", "v1 = max v0 -3.5", "v2 = ceil v1"), Interval(-3, 8, True)),
        (("v0 = min acc 7.5", "v1 = max v0 -3.5"), Interval(-3.5, 7.5, False)),
        (("v0 = round acc",), Interval(whole=True)),
        (("v0 = sign acc", "v1 = add v0 v0"), Interval(-2, 2, True)),
        (("v0 = exp acc",), ANY),
        (("v0 = round acc", "v1 = mul v0 2.0"), Interval(whole=True)),
    ],
)
def test_programs(steps: tuple[str, ...], expected: Interval) -> None:
    assert _of(*steps) == expected


def test_operands_of_programs_are_as_wide_as_their_dtype() -> None:
    assert _of("v0 = where m acc x", params=", m: tile bool, x: tile f32") == ANY
    assert _of("v0 = cast x to=f32", params=", x: tile u8") == Interval(0, 255, True)
    assert _of("v0 = cast x to=f32", params=", x: tile i64") == ANY  # which float32 rounds


def test_integers_wrap() -> None:
    """uint8 arithmetic beyond its limits gives any uint8; within them, what it gives."""
    x, y, z = (gs.Variable(name, np.dtype(np.uint8), ["n"]) for name in "xyz")
    half, few = (gs.Constant(name, np.array(v, np.uint8)) for name, v in (("half", 128), ("few", 7)))
    body = gs.Graph([gs.Node("Sub", inputs=[x, half], outputs=[y]), gs.Node("Min", inputs=[y, few], outputs=[z])], [x])
    assert [of_body(body)[id(t)] for t in (y, z)] == [Interval(0, 255, True), Interval(0, 7, True)]
    assert _of("v0 = cast x to=u8", "v1 = add v0 v0", params=", x: tile u8") == Interval(0, 255, True)


def test_intervals_hold_what_programs_compute() -> None:
    program = EpilogueProgram.parse(
        "(acc: tile f32) -> (y: tile = v6) {\n  v0 = min acc 3.0\n  v1 = max v0 -5.0\n  v2 = mul v1 v1\n"
        "  v3 = sub v2 v1\n  v4 = round v3\n  v5 = relu v1\n  v6 = sub v4 v5\n}"
    )
    known = of_program(program)["v6"]
    (found,) = program.reference(np.random.default_rng(0).standard_normal((50, 40)) * 9).values()
    assert not known.whole
    assert known.low <= found.min() and found.max() <= known.high


def test_bodies() -> None:
    x = gs.Variable("x", np.dtype(np.float32), ["n", 4])
    q = gs.Variable("q", np.dtype(np.uint8), ["n", 4])
    low, high = (gs.Constant(n, np.array(v, np.float32)) for n, v in (("low", -8.0), ("high", 7.0)))
    tensors = {n: gs.Variable(n, np.dtype(np.float32), ["n", 4]) for n in ("a", "b", "c", "d", "e", "f")}
    nodes = [
        gs.Node("Round", inputs=[x], outputs=[tensors["a"]]),
        gs.Node("Max", inputs=[tensors["a"], low], outputs=[tensors["b"]]),
        gs.Node("Min", inputs=[tensors["b"], high], outputs=[tensors["c"]]),
        gs.Node("Transpose", attrs={"perm": [1, 0]}, inputs=[tensors["c"]], outputs=[tensors["d"]]),
        gs.Node("Cast", attrs={"to": 1}, inputs=[q], outputs=[tensors["e"]]),
        gs.Node("Concat", attrs={"axis": 0}, inputs=[tensors["c"], tensors["e"]], outputs=[tensors["f"]]),
    ]
    body = gs.Graph(nodes=nodes, inputs=[x, q], outputs=[tensors["f"]])
    known = of_body(body)
    expected = {"b": Interval(-8, math.inf, True), "d": Interval(-8, 7, True), "e": Interval(0, 255, True)}
    assert {n: known[id(tensors[n])] for n in expected} == expected
    assert known[id(tensors["f"])] == Interval(-8, 255, True)
    assert known[id(x)] == ANY


def test_arrays() -> None:
    assert of_array(np.array([3.0, -2.0])) == Interval(-2, 3, True)
    assert of_array(np.array([3.0, -2.5])) == Interval(-2.5, 3, False)
    assert of_array(np.array([3.0, np.nan])) == of_array(np.array([])) == of_array(np.array(["a"])) == ANY
