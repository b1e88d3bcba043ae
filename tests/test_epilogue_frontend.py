"""Epilogues written as Python functions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest

import coda_edge.epilogue
from coda_edge.epilogue import Col, Epilogue, Kind, Period, Row, Rows, Scalar, Tile, Value, epilogue, library
from coda_edge.epilogue import math as fn
from coda_edge.epilogue.frontend import Moments, Stored
from coda_edge.errors import ShapeError

Angle = Annotated[Value, Kind.TILE, Rows.POSITION, Period(2)]


def written(function) -> str:
    return str(epilogue(function).program)


def test_operators_and_kinds():
    @epilogue
    def f(acc, row: Row, col: Col, tile: Tile, scalar: Scalar):
        return -acc * scalar + (1 - row) / col - abs(tile) ** 2 + 2**scalar

    assert str(f.program) == (
        "(acc: tile f32, row: row f32, col: col f32, tile: tile f32, scalar: scalar f32) -> (y: tile = v9) {\n"
        "  v0 = neg acc\n  v1 = mul v0 scalar\n  v2 = sub 1.0 row\n  v3 = div v2 col\n  v4 = add v1 v3\n"
        "  v5 = abs tile\n  v6 = mul v5 v5\n  v7 = sub v4 v6\n  v8 = pow 2.0 scalar\n  v9 = add v7 v8\n}"
    )


def test_comparisons_and_logic():
    def f(acc: Tile) -> Value:
        return fn.where((acc > 0.0) & ~(acc >= 2.0) | fn.equal(acc, -1.0), acc, 0.0)

    y = epilogue(f).reference(np.array([[-2.0, -1, 0, 1, 2]]))["y"]
    np.testing.assert_array_equal(y, [[0, -1, 0, 1, 0]])


def test_the_module_is_the_decorator():
    @coda_edge.epilogue
    def double(acc: Tile) -> Value:
        """Twice."""
        return acc + acc

    assert isinstance(double, Epilogue)
    assert (double.__name__, double.__doc__, repr(double)) == ("double", "Twice.", "<epilogue double>")
    np.testing.assert_array_equal(double.reference(np.ones((1, 2)))["y"], [[2, 2]])


def test_annotations_may_be_strings_or_types():
    def typed(acc: Tile, b: Annotated[Value, Kind.COL, "f16"]) -> Value:
        return acc + b

    assert written(typed).startswith("(acc: tile f32, b: col f16)")
    typed.__annotations__ = {"b": Annotated[Value, Kind.COL, "f16"]}
    assert written(typed).startswith("(acc: tile f32, b: col f16)")


def test_results_are_named():
    assert [o.name for o in epilogue(lambda acc: (acc, acc + 1.0)).program.outputs] == ["y0", "y1"]
    assert [o.name for o in epilogue(lambda acc: {"left": acc, "right": acc}).program.outputs] == ["left", "right"]
    assert [o.name for o in epilogue(lambda acc: fn.moments(acc)).program.outputs] == ["mean", "var"]


def test_stores():
    def f(acc: Tile) -> dict[str, Stored]:
        return {"q": fn.store(acc, (0, 4), heads=2), "rest": fn.store(acc, columns=(4, 6))}

    assert written(f) == "(acc: tile f32) -> (q: tile = acc[0:4] heads[2], rest: tile = acc[4:6]) {\n}"


def test_shared_operands_and_halves():
    @epilogue
    def rotated(acc: Tile, cos: Angle, sin: Angle, shift: Annotated[Value, Kind.ROW, Rows.BATCH, "f16"]):
        return fn.store(fn.rope(acc, cos, sin) + fn.cast(shift, "f32"), heads=4, halves=True)

    text = "(acc: tile f32, cos: tile[position, period=2] f32, sin: tile[position, period=2] f32, shift: row[batch] f16) -> "
    assert str(rotated.program).startswith(text)
    rng = np.random.default_rng(0)
    acc, angles, shift = rng.standard_normal((3, 5, 8)), rng.standard_normal((5, 2)), np.array([1.0, 2.0, 3.0])
    y = rotated.reference(acc, {"cos": np.cos(angles), "sin": np.sin(angles), "shift": shift})["y"]
    pairs = acc.reshape(3, 5, 2, 2, 2)[..., 0] + 1j * acc.reshape(3, 5, 2, 2, 2)[..., 1]
    turned = (pairs * np.exp(1j * angles)[:, None, :]).transpose(0, 2, 1, 3)
    expected = np.concatenate([turned.real, turned.imag], -1) + shift[:, None, None, None]
    np.testing.assert_allclose(y, expected, atol=1e-12)


def test_composition():
    @epilogue
    def f(acc: Tile, b: Col, residual: Tile) -> Moments:
        return fn.moments(library.bias_gelu(acc, b) + residual)

    acc, b, residual = np.random.default_rng(0).standard_normal((3, 4, 4))
    y = library.bias_gelu.reference(acc, {"bias": b[0]})["y"] + residual
    outputs = f.reference(acc, {"b": b[0], "residual": residual})
    np.testing.assert_allclose(outputs["mean"], y.mean(1, keepdims=True), atol=1e-12)
    np.testing.assert_allclose(outputs["var"], y.var(1, keepdims=True), atol=1e-12)


def test_fixed_parameters():
    assert "1e-05" in str(library.norm_bias.program)
    tight = library.norm_bias.specialize(eps=1e-12)
    assert "1e-12" in str(tight.program)
    assert "1e-05" in str(library.norm_bias.program)

    @epilogue
    def f(acc: Tile, var: Row, bias: Col) -> Value:
        return tight(acc, var, bias) + tight(acc, var, bias)

    assert "1e-12" in str(f.program)
    assert len(f.program.steps) == 5


COMPOSITES = {
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "softplus": lambda x: np.logaddexp(0, x),
    "mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "hard_sigmoid": lambda x: np.clip(x / 6 + 0.5, 0, 1),
    "hard_swish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "leaky_relu": lambda x: np.where(x < 0, 0.01 * x, x),
    "elu": lambda x: np.where(x < 0, np.expm1(np.minimum(x, 0)), x),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "sqrt": lambda x: np.sqrt(np.abs(x)),
    "rsqrt": lambda x: np.abs(x) ** -0.5,
    "log": lambda x: np.log(np.abs(x)),
    "reciprocal": lambda x: 1 / np.abs(x),
    "exp": np.exp,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "floor": np.floor,
    "ceil": np.ceil,
    "round_even": np.rint,
    "sign": np.sign,
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_functions(name):
    function = getattr(fn, name)
    domain = (lambda x: abs(x)) if name in ("sqrt", "rsqrt", "log", "reciprocal") else (lambda x: x)
    x = np.array([[-300.0, -30, -3, -2.5, -0.5, 0.25, 1, 2.5, 30, 300]])
    with np.errstate(over="ignore"):
        expected = COMPOSITES[name](x)
    y = epilogue(lambda acc: function(domain(acc))).reference(x)["y"]
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)


def test_cast_and_nan():
    f = epilogue(lambda acc: fn.where(fn.isnan(acc), 0.0, fn.cast(fn.cast(acc, "i32"), "f32")))
    np.testing.assert_array_equal(f.reference(np.array([[np.nan, 1.7, -1.7]]))["y"], [[0, 1, -1]])


def test_row_reductions():
    f = epilogue(lambda acc: (fn.row_sum(acc), fn.row_sumsq(acc), fn.row_max(acc), fn.row_mean(acc)))
    outputs = f.reference(np.array([[1.0, -2, 4]]))
    assert [float(v[0, 0]) for v in outputs.values()] == [3, 21, 4, 1]


def needs_a_value(acc: Tile, bias) -> Value:
    return acc + bias


def branches(acc: Tile) -> Value:
    return acc if acc > 0.0 else -acc


def compares(acc: Tile) -> Value:
    return acc if acc == 0.0 else -acc


def nothing(acc: Tile) -> None:
    _ = acc + 1.0


def a_number(acc: Tile) -> float:
    return 1.0


def text_operand(acc: Tile) -> Value:
    return acc + "bias"


def numbers_only(acc: Tile) -> Value:
    return fn.exp(1.0)


def uses_a_sum(acc: Tile) -> Value:
    return acc / fn.row_sum(acc)


def starts_with_a_row(row: Row) -> Value:
    return row


def no_parameter() -> None:
    return None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (needs_a_value, "annotate 'bias' as Tile, Row, Col or Scalar"),
        (branches, r"use where\(…\)"),
        (compares, r"use equal\(a, b\)"),
        (nothing, "returns nothing"),
        (a_number, "result 'y' is 1.0, not a value"),
        (text_operand, "add is applied to a str"),
        (numbers_only, "none of them an epilogue value"),
        (uses_a_sum, "reduced over the whole row"),
        (starts_with_a_row, "'row' is the accumulator and must be a Tile"),
        (no_parameter, "the first is the accumulator"),
    ],
)
def test_errors_say_what_to_do(function, message):
    with pytest.raises(ShapeError, match=message):
        epilogue(function).program  # noqa: B018


def test_fixed_parameters_without_a_default():
    with pytest.raises(ShapeError, match=r"'cap' has no default: give it, softcap.specialize\(cap=…\)"):
        library.softcap.program  # noqa: B018
    with pytest.raises(ShapeError, match=r"no fixed parameter 'limit'; it has \['cap'\]"):
        library.softcap.specialize(limit=3.0)


def test_values_of_two_epilogues_do_not_mix():
    kept: list[Value] = []

    @epilogue
    def first(acc: Tile) -> Value:
        kept.append(acc)
        return acc

    _ = first.program
    with pytest.raises(ShapeError, match="different epilogues"):
        epilogue(lambda acc: acc + kept[0]).program  # noqa: B018


def test_the_examples_of_the_documentation_run():
    text = (Path(__file__).parent.parent / "docs" / "epilogues.md").read_text()
    scope: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(block, "docs/epilogues.md", "exec"), scope)
    assert f"```text\n{scope['norm_gelu'].program}\n```" in text
    for name in ("residual_and_statistics", "gated", "query_key", "rotated_heads"):
        scope[name].program.check(128)
