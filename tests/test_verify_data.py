"""Verification where runs differ: random numbers are put into the reference, and a rounding may decide a size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from rewriting import model

import coda_edge
from coda_edge import frontend, noise
from coda_edge.bundle import to_bytes
from coda_edge.cli_inspect import inspect_bundle
from coda_edge.errors import VerificationError
from coda_edge.inputs import bound_specs
from coda_edge.onnxruntime import package
from coda_edge.verify import Runner, Verifier, ort_session

Arrays = list[npt.NDArray[Any]]

RANDOM = (
    "g (float[a,b] x) => (float[a,b] y, float[k] z, float[a,b] w) { n = RandomNormalLike <scale = 2.0> (x) u = RandomUniformLike(n)"
    " h = Add(u, x) c = Bernoulli(u) y = Mul(h, c) f = RandomNormal <shape = [1, 1], seed = 3.0> () w = Add(n, f) q = Abs(y)"
    " e = Cast <to = 7> (q) m = ReduceMax <keepdims = 0> (e) r = Range(zero, m, one) z = Cast <to = 1> (r) }"
)
NUMBERS = {"zero": np.int64(0), "one": np.int64(1)}


@pytest.fixture(scope="module")
def made() -> coda_edge.Optimized:
    """The random model, optimized and verified."""
    return coda_edge.optimize(model(RANDOM, NUMBERS))


def test_random_models_are_compared_number_by_number(made: coda_edge.Optimized) -> None:
    assert made.report.max_rel_error is not None and 0 < made.report.max_rel_error < 1e-5
    assert made.report.sizes.keys() == {"a", "b", "m"} and made.report.sizes["m"] >= 1
    assert made.report.notes == []


def test_the_reference_is_what_a_session_draws(made: coda_edge.Optimized) -> None:
    proto = frontend.load(model(RANDOM, NUMBERS))
    assert noise.draws(proto) and not noise.draws(noise.with_noise(proto))
    reference = ort_session(noise.with_noise(proto))
    x = np.random.default_rng(0).standard_normal((7, 9)).astype(np.float32)
    with coda_edge.Session(to_bytes(made.bundle)) as session:
        run = noise.seeded(session)
        first, again = run(["y", "z", "w"], {"x": x}), run(["y", "z", "w"], {"x": x})
        other = session.run(["y"], {"x": x})
    for a, b, right in zip(first, again, reference.run(["y", "z", "w"], {"x": x}), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, right, atol=1e-5)
    assert not np.array_equal(first[0], other[0])


DURATIONS = (
    "g (float[1,t] x) => (float[k,1] y) { c = Ceil(x) w = Cast <to = 7> (c) a = Abs(w) s = ReduceSum <keepdims = 0> (a)"
    " r = Range(zero, s, one) f = Cast <to = 1> (r) y = Unsqueeze(f, one) }"
)


def _verifier() -> Verifier:
    loaded = frontend.load(model(DURATIONS, NUMBERS))
    graph = frontend.normalize(loaded)
    assert frontend.decided_by_data(graph) == {"y"}
    return Verifier.of_model(loaded, bound_specs(loaded, graph), by_data=frontend.decided_by_data(graph))


def _cut(verifier: Verifier, rows: int, cases: int) -> Runner:
    """A run that gives the reference, but in the first ``cases`` cases so many rows fewer."""
    left = [cases]

    def run(names: Sequence[str], feeds: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        expected = next(e for f, e in verifier.cases if f is feeds)
        left[0] -= 1
        return [e[: len(e) - rows] if left[0] >= 0 else e for e in expected]

    return run


def test_a_size_that_a_rounding_decides_is_explained() -> None:
    verifier = _verifier()
    assert verifier.check(_cut(verifier, 1, 2), "this") == 0.0
    assert len(verifier.compared) == len(verifier.cases) - 2
    assert len(verifier.notes()) == 2 and "output 'y', whose size data decides, is [" in verifier.notes()[0]
    with pytest.raises(
        VerificationError, match="agrees with onnxruntime in no case: output 'y', whose size data decides"
    ):
        verifier.check(_cut(verifier, 1, 99), "this")


def test_another_size_is_an_error() -> None:
    verifier = _verifier()
    with pytest.raises(VerificationError, match="this changes output 'y' by inf"):
        verifier.check(_cut(verifier, 30, 1), "this")
    verifier.by_data = frozenset()
    with pytest.raises(VerificationError, match="this changes output 'y' by inf"):
        verifier.check(_cut(verifier, 1, 1), "this")


def test_onnxruntime_keeps_what_data_decides() -> None:
    """Nodes whose sizes are not their inputs' stay functions; random operators stay onnxruntime's."""
    text = DURATIONS.replace("(float[k,1] y)", "(float[k,4] y, float[1,t] v)").replace(
        "y = Unsqueeze(f, one)", "u = Unsqueeze(f, one) p = MatMul(u, m) y = Tanh(p) e = Exp(x) v = Sub(e, x)"
    )
    weights = np.random.default_rng(0).standard_normal((1, 4)).astype(np.float32)
    packaged = package(model(text, {**NUMBERS, "m": weights}))
    assert packaged.max_rel_error is not None and packaged.max_rel_error < 1e-5
    assert any("follows neither from its inputs' shapes" in why for why in packaged.functions.values())
    assert packaged.operators
    assert package(model(RANDOM, NUMBERS)).max_rel_error is None


def test_reports_use_the_sizes_of_the_verified_run(made: coda_edge.Optimized, tmp_path: Path) -> None:
    made.save(tmp_path / "m.coda")
    view = inspect_bundle(tmp_path / "m.coda")
    assert view.sizes == made.report.sizes
    assert [o.shape for o in view.outputs] == [("a", "b"), ("m",), ("a", "b")]
    assert sum(s.bytes for s in view.steps) == made.report.bytes_after
