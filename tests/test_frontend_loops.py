"""Loops whose turns are known are written out: limits, conditions, states that grow, what turns leave, both directions of a Scan."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graphs import run, to_model, worst_error
from onnx import parser

from coda_edge.errors import UnsupportedOperator
from coda_edge.frontend import load, normalize


def _parse(body: str) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g {body}')


def _check(body: str, *dims: int, more: dict[str, np.ndarray] | None = None) -> None:
    """Written out, the model gives what onnxruntime gives of it at two batches."""
    model = _parse(body)
    graph = normalize(load(model))
    assert not {n.op for n in graph.nodes} & {"Loop", "Scan", "If"}
    for batch in (1, 3):
        x = np.random.default_rng(batch).standard_normal((batch, *dims)).astype(np.float32)
        feeds = {"x": x, **(more or {})}
        assert worst_error(run(model, feeds), run(to_model(graph), feeds)) <= 1e-6


COUNTED = """(float[B, 6] x) => (float[B, 6] y, float[{turns}, B, 6] all) <int64 m = {{{turns}}}, bool go = {{1}}> {{
    y, all = Loop (m, go, x) <
        body = b (int64 i, bool c, float[B, 6] s) => (bool on, float[B, 6] r, float[B, 6] e) {{
            on = Identity (c) f = Cast <to = 1> (i) e = Add (s, f) r = Tanh (e)
        }}
    >
}}"""


@pytest.mark.parametrize("turns", [1, 4])
def test_a_limit(turns: int) -> None:
    _check(COUNTED.format(turns=turns), 6)


def test_a_condition_that_follows_from_the_turns() -> None:
    """A while loop: it ends when a counter, a state of its own, reaches 5."""
    _check(
        """(float[B, 6] x) => (float[B, 6] y, int64 n) <bool go = {1}, int64 zero = {0}> {
            y, n = Loop (, go, x, zero) <
                body = b (int64 i, bool c, float[B, 6] s, int64 k) => (bool on, float[B, 6] r, int64 k1) {
                    two = Constant <value_int = 2> () five = Constant <value_int = 5> ()
                    r = Sin (s) k1 = Add (k, two) on = Less (k1, five)
                }
            >
        }""",
        6,
    )


def test_a_loop_that_never_runs() -> None:
    _check(
        """(float[B, 6] x) => (float[B, 6] y) <int64 m = {3}, bool go = {0}> {
            z = Loop (m, go, x) < body = b (int64 i, bool c, float[B, 6] s) => (bool on, float[B, 6] r) { on = Identity (c) r = Exp (s) } >
            y = Neg (z)
        }""",
        6,
    )


def test_a_state_that_grows_and_a_slice_by_the_turn() -> None:
    _check(
        """(float[B, 6] x) => (float[B, D] y) <int64 m = {3}, bool go = {1}> {
            y = Loop (m, go, x) <
                body = b (int64 i, bool c, float[B, E] s) => (bool on, float[B, F] r) {
                    on = Identity (c)
                    axis = Constant <value_ints = [1]> () one = Constant <value_ints = [0]> () two = Constant <value_int = 2> ()
                    j = Unsqueeze (i, one) k = Add (j, two) p = Slice (x, j, k, axis) q = Exp (p) r = Concat <axis = 1> (s, q)
                }
            >
        }""",
        6,
    )


def test_a_limit_that_is_a_size_and_a_loop_within() -> None:
    _check(
        """(float[B, 4] x) => (float[B, 4] y) <int64 at = {1}, bool go = {1}, int64 two = {2}> {
            s = Shape (x) m = Gather (s, at)
            y = Loop (m, go, x) <
                body = b (int64 i, bool c, float[B, 4] u) => (bool on, float[B, 4] r) {
                    on = Identity (c)
                    w = Loop (two, c, u) <
                        body = d (int64 j, bool e, float[B, 4] v) => (bool of, float[B, 4] t) {
                            of = Identity (e) n = Add (i, j) f = Cast <to = 1> (n) h = Add (v, f) t = Sin (h)
                        }
                    >
                    r = Mul (w, x)
                }
            >
        }""",
        4,
    )


@pytest.mark.parametrize("backwards", [0, 1])
def test_a_scan(backwards: int) -> None:
    """Along axis 1, its results joined along axis 2."""
    _check(
        f"""(float[B, 5, 3] x) => (float[B, 3] last, float[B, 3, 5] all) <int64[1] a = {{0}}, int64[1] b = {{1}}, float[1] zero = {{0.0}}> {{
            first = Slice (x, a, b, b) h = Squeeze (first, b) s0 = Mul (h, zero)
            last, all = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [-1],
                scan_input_directions = [{backwards}], scan_output_directions = [{backwards}],
                body = g2 (float[B, 3] s, float[B, 3] e) => (float[B, 3] t, float[B, 3] o) {{ u = Add (s, e) t = Tanh (u) o = Exp (t) }}
            > (s0, x)
        }}""",
        5,
        3,
    )


REFUSED = {
    "data decides how often its body runs": "(float[B, 6] x, int64 m, bool go) => (float[B, 6] y) {{ y = Loop (m, , x) <{body}> }}",
    "the dynamic size B decides": """(float[B, 6] x) => (float[B, 6] y) <int64 z = {{0}}> {{
        s = Shape (x) m = Gather (s, z) y = Loop (m, , x) <{body}> }}""",
    "data decides when it ends": "(float[B, 6] x) => (float[B, 6] y) <int64 m = {{4}}> {{ y = Loop (m, , x) <{ends}> }}",
    "too often": "(float[B, 6] x) => (float[B, 6] y) <int64 m = {{5000}}> {{ y = Loop (m, , x) <{body}> }}",
}
BODY = "body = b (int64 i, bool c, float[B, 6] s) => (bool on, float[B, 6] r) { on = Identity (c) r = Exp (s) }"
ENDS = """body = b (int64 i, bool c, float[B, 6] s) => (bool on, float[B, 6] r) {
    r = Exp (s) t = ReduceSum <keepdims = 0> (r) one = Constant <value_float = 1.0> () on = Less (t, one) }"""


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused_says_why_and_the_way_out(why: str) -> None:
    with pytest.raises(UnsupportedOperator, match=rf"operator Loop .*{why}.*--shape"):
        normalize(load(_parse(REFUSED[why].format(body=BODY, ends=ENDS))))


def test_what_is_written_out_reads_what_stands_around_it_alone() -> None:
    """The body that is gone is no reader of the weights any more."""
    graph = normalize(
        load(
            _parse("""(float[B, 2] x) => (float[B, 2] y) <int64 m = {3}> {
                w = Exp (x)
                y = Loop (m, , x) < body = b (int64 i, bool c, float[B, 2] s) => (bool on, float[B, 2] r) { on = Identity (c) r = Mul (s, w) } >
            }""")
        )
    )
    (exp,) = (n for n in graph.nodes if n.op == "Exp")
    assert len(exp.outputs[0].outputs) == 3
