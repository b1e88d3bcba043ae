"""Checks by running: what we made against onnxruntime on the untouched model.

A half-precision model is judged by the same model in float32 (``frontend.half``), its outputs rounded to their dtype: what half's
rounding makes of it on the way is no standard. How far onnxruntime on the model as it is comes from that is a note in the report.
What a quantised model, or one that puts scores in order, is judged by says ``rounding``, what a random one ``noise``.

Where data decides the size of an output, a rounding may: a case in which a size is a little other than onnxruntime's is not compared, and a
note says so.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from . import accuracy, export, noise
from .dtypes import is_float, numpy_dtype
from .errors import InvalidModel, VerificationError
from .frontend import half
from .inputs import InputSpec, Padding, default_sizes, generate_inputs
from .rounding import SMALL_CASES, Spread, nudged, orders, quantises, share_unequal
from .symbolic import evaluate

if TYPE_CHECKING:
    import onnx
    import onnxruntime

Arrays = Sequence[npt.NDArray[Any]]
Runner = Callable[[Sequence[str], Mapping[str, npt.NDArray[Any]]], Arrays]

#: Largest |difference| over the output's largest |value| that float32 rewrites may make.
TOLERANCE = 1e-4
#: What rounding the outputs adds to it, where two close numbers may be rounded apart: the spacing of a dtype relative to its numbers.
ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
#: Lengths tried, in order, until onnxruntime runs the model: position tables and reshapes bound them, and a sound has many samples.
LENGTHS = (128, 64, 32, 16, 8, 4, 1, 512, 2048, 8192, 16384, 32768)
#: Numbers that made-up inputs may have at most: a mask of two lengths grows with their product.
MOST_NUMBERS = 1 << 26
#: Where none of them goes for all sizes, each is tried with each of these, if there are no more sizes than that.
UNEQUAL, MOST_UNEQUAL = tuple(range(1, 65)), 3
#: For each length, the batches tried: a model may need more entries than one.
BATCHES = (1, 3)
#: Elements of weights from which on it makes no copies that it can do without, and bytes from which on onnxruntime is handed a file of them, which it maps, instead of a message, which it copies.
MAPPED = 1 << 24
#: The cases of a check: batch, length as a share of the longest that runs, and padding.
CASES: tuple[tuple[int, float, Padding], ...] = (
    (1, 1.0, "none"),
    (3, 0.45, "left"),
    (2, 0.2, "holes"),
    (2, 0.6, "right"),
)

# How far sizes may be apart, of each other, for a rounding to be the reason.
_NEAR = 0.05

_log = logging.getLogger(__name__)


def ort_session(
    model: onnx.ModelProto | bytes | str,
    threads: int = 0,
    plain: bool = False,
    by_default: bool = False,
    lean: bool = False,
) -> onnxruntime.InferenceSession:
    """onnxruntime on ``model``, on the CPU, quiet, with ``threads`` threads (0: as many as it likes); ``plain``: not optimised.

    ``by_default``: products of weights of few bits may be of less than float32, as its optimiser chooses for itself. ``lean``: slower,
    and without copies of weights in the order that its kernels like best.

    Raises InvalidModel with its words if it refuses the model.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    if not by_default:
        options.add_session_config_entry(*accuracy.IN_FLOAT)
    if lean:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if plain:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        if isinstance(model, (bytes, str)):
            return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            path = Path(folder, "model.onnx")
            export.save(model, path, MAPPED)
            return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as e:
        raise InvalidModel(f"onnxruntime does not load the model, so there is nothing to compare with: {e}") from e


def run_session(
    session: onnxruntime.InferenceSession, names: Sequence[str], feeds: Mapping[str, npt.NDArray[Any]]
) -> list[npt.NDArray[Any]]:
    """The outputs ``names`` of ``session``, whose Python interface has no arrays of bfloat16: their memory is handed over instead."""
    import onnxruntime
    from onnx import TensorProto

    wide = numpy_dtype("bfloat16")
    if all(v.dtype != wide for v in feeds.values()) and all("bfloat16" not in o.type for o in session.get_outputs()):
        return [np.asarray(o) for o in session.run(list(names), dict(feeds))]
    values = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(v.view(np.uint16), TensorProto.BFLOAT16)
        if v.dtype == wide
        else onnxruntime.OrtValue.ortvalue_from_numpy(v)
        for name, v in feeds.items()
    }
    results = []
    for value in session.run_with_ort_values(list(names), values):
        if value.data_type() == "tensor(bfloat16)":
            bits = ctypes.string_at(value.data_ptr(), 2 * int(np.prod(value.shape(), dtype=np.int64)))
            results.append(np.frombuffer(bits, wide).reshape(value.shape()))
        else:
            results.append(np.asarray(value.numpy()))
    return results


def relative_error(ours: npt.NDArray[Any], reference: npt.NDArray[Any]) -> float:
    """Largest |difference| over the largest finite |reference|; infinite where shape, NaN or infinity disagree."""
    if ours.shape != reference.shape:
        return float("inf")
    if reference.size == 0:
        return 0.0
    a, b = ours.astype(np.float64), reference.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
        return float("inf")
    if not finite.any():
        return 0.0
    scale = float(np.abs(b[finite]).max())
    return float(np.abs(a[finite] - b[finite]).max()) / (scale or 1.0)


def _difference(ours: npt.NDArray[Any], reference: npt.NDArray[Any], labels: bool) -> float:
    """How arrays are compared: by ``relative_error``; whole numbers, if they are labels, by how many are unequal."""
    unlike = labels and not is_float(reference.dtype.name)
    return (share_unequal if unlike else relative_error)(ours, reference)


class Reference(Protocol):
    """What of an ``onnxruntime.InferenceSession`` a reference must have."""

    def get_outputs(self) -> Sequence[Any]:
        """The outputs, each with a ``name``."""

    def run(self, output_names: Sequence[str], feeds: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """The outputs named."""


class Promoted:
    """onnxruntime on a half-precision model in float32, with the inputs and outputs of the model as it is."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._session = ort_session(half.promote(model), lean=_is_heavy(model))
        self._wide = {i.name for i in self._session.get_inputs() if i.type == "tensor(float)"}
        self._dtypes = {name: numpy_dtype(dtype) for name, dtype in _output_dtypes(model).items()}

    def get_outputs(self) -> Sequence[Any]:
        """The outputs, each with a ``name``."""
        outputs: Sequence[Any] = self._session.get_outputs()
        return outputs

    def run(self, output_names: Sequence[str], feeds: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """The outputs named, computed in float32 and rounded to their dtypes."""
        widened = {name: v.astype(np.float32) if name in self._wide else v for name, v in feeds.items()}
        results = self._session.run(list(output_names), widened)
        with np.errstate(over="ignore"):
            return [np.asarray(r).astype(self._dtypes[n]) for n, r in zip(output_names, results, strict=True)]


@dataclass
class Verifier:
    """Runs the untouched model on made-up inputs once, and compares any number of candidates with it."""

    names: list[str]
    cases: list[tuple[dict[str, npt.NDArray[Any]], list[npt.NDArray[Any]]]]
    sizes: dict[str, int]
    #: The relative error that is allowed for each output.
    tolerances: dict[str, float] = field(default_factory=dict)
    #: How far a quantised model is from itself, and what candidates' outputs, in each case of the last check, differed by.
    spread: Spread | None = None
    found: list[dict[str, float]] = field(default_factory=list)
    #: What the model as it is makes of the cases, if that is not what it is judged by.
    remarks: list[str] = field(default_factory=list)
    #: The outputs whose sizes data decides; whether the model draws random numbers, which only ``noise.seeded`` draws again.
    by_data: frozenset[str] = frozenset()
    random: bool = False
    #: If the model puts scores in order: makes other ways to compute it, which may order equal ones otherwise.
    reorder: Callable[[], Iterator[Reference]] | None = None
    #: Of the last check: the input shapes of the cases compared, and those in which a rounding decided a size, in words.
    compared: list[dict[str, list[int]]] = field(default_factory=list)
    #: Those of the outputs compared by their values in ascending order.
    unordered: frozenset[str] = frozenset()
    resized: list[str] = field(default_factory=list)

    @staticmethod
    def of_model(
        loaded: onnx.ModelProto,
        specs: Sequence[InputSpec],
        path: str | None = None,
        allowed: Callable[[Mapping[str, int]], bool] = lambda sizes: True,
        by_data: frozenset[str] = frozenset(),
    ) -> Verifier:
        """The reference results of ``loaded`` (from ``frontend.load``), with inputs ``specs``; ``path``: the file that it came from.

        ``by_data``: the outputs whose sizes data decides. A model that is ``judged_as_it_is`` needs no weights if there is ``path``. Raises InvalidModel if onnxruntime refuses the model, VerificationError if it runs it on no made-up inputs.
        """
        if noise.draws(loaded):
            verifier = Verifier.of_model(noise.with_noise(loaded), specs, None, allowed, by_data)
            verifier.random = True
            return verifier
        if accuracy.is_reduced(loaded):
            return Verifier.of_model(accuracy.in_float(loaded), specs, None, allowed, by_data)
        if not half.has_half(loaded):
            # Optimised, onnxruntime takes some quantised operators by tables of integers: close, but not what they are defined to be.
            plain, lean = quantises(loaded), _is_heavy(loaded)
            variants = [ort_session(m, plain=True, lean=lean) for m in nudged(loaded)] if plain else []
            variants += [ort_session(path or loaded, lean=lean)] if plain else []
            judge = ort_session(path or loaded, plain=plain, lean=lean)
            verifier = Verifier.of(specs, judge, variants, allowed, _output_dtypes(loaded), by_data)
            if orders(loaded) and not plain:
                verifier.reorder = lambda: (ort_session(m, lean=lean) for m in nudged(loaded))
            return verifier
        promoted = [Promoted(m) for m in nudged(loaded)] if quantises(loaded) else []
        verifier = Verifier.of(specs, Promoted(loaded), promoted, allowed, _output_dtypes(loaded), by_data)
        verifier.remarks = _as_it_is(path or loaded, verifier)
        return verifier

    @staticmethod
    def of(
        specs: Sequence[InputSpec],
        session: Reference,
        variants: Sequence[Reference] = (),
        allowed: Callable[[Mapping[str, int]], bool] = lambda sizes: True,
        dtypes: Mapping[str, str] | None = None,
        by_data: frozenset[str] = frozenset(),
    ) -> Verifier:
        """The reference results of a model with inputs ``specs``; ``session`` runs it, as onnxruntime does.

        ``variants``: other ways to compute a quantised model, equally right. ``allowed``: whether the graph is meant for given sizes.
        ``dtypes``: of the outputs. ``by_data``: those whose sizes data decides.
        """
        names = [o.name for o in session.get_outputs()]
        length, sizes = _longest(session, specs, names, allowed)
        cases: list[tuple[dict[str, npt.NDArray[Any]], list[npt.NDArray[Any]]]] = []
        wanted = [(batch, max(1, int(length * share)), padding) for batch, share, padding in CASES]
        small: list[tuple[int, int, Padding]] = [(batch, min(size, length), "none") for batch, size in SMALL_CASES]
        for batch, size, padding in [*wanted, *(small if variants else ())]:
            at = default_sizes(specs, batch, size)
            if not allowed(at):
                at = sizes | {name: batch for name in _batches(specs)}
                at = at if allowed(at) else sizes
            feeds = generate_inputs(specs, at, seed=len(cases), padding=padding)
            expected = _try(session, names, feeds)
            if expected is not None:
                cases.append((feeds, expected))
        tolerances = {name: TOLERANCE + ROUNDING.get((dtypes or {}).get(name, ""), 0.0) for name in names}
        verifier = Verifier(names, cases, sizes, tolerances, by_data=by_data)
        if variants:
            errors = [verifier.errors(v.run, labels=True) for v in variants]
            verifier.spread = Spread.of(errors, tolerances)
        return verifier

    def notes(self) -> list[str]:
        """What a reader of the report must know of how outputs were compared in the last check."""
        return (
            self.remarks
            + self.resized
            + [
                f"output '{name}' is compared by its values in ascending order: scores that are as good as equal are ordered otherwise, "
                "and so does onnxruntime with weights moved by a rounding"
                for name in sorted(self.unordered)
            ]
            + (self.spread.notes(self.found, self.tolerances) if self.spread is not None else [])
        )

    def errors(
        self, run: Runner, labels: bool = False, unordered: frozenset[str] = frozenset()
    ) -> list[dict[str, float]]:
        """What each output of ``run`` differs by, in each case but those that ``resized`` tells of.

        ``labels``: whole numbers by how many are unequal. ``unordered``: the outputs whose values are compared in ascending order.
        """
        found = []
        self.compared, self.resized = [], []
        for feeds, expected in self.cases:
            shapes = {name: list(value.shape) for name, value in feeds.items()}
            pairs = list(zip(self.names, map(np.asarray, run(self.names, feeds)), expected, strict=True))
            moved = [(n, a.shape, b.shape) for n, a, b in pairs if n in self.by_data and _resized(a.shape, b.shape)]
            if moved:
                name, ours, theirs = moved[0]
                self.resized.append(
                    f"output '{name}', whose size data decides, is {list(ours)} and in onnxruntime {list(theirs)} for inputs of "
                    f"shapes {shapes}: a rounding decides it, so this case is not compared"
                )
                continue
            self.compared.append(shapes)
            found.append(
                {
                    n: relative_error(_ascending(ours), _ascending(reference))
                    if n in unordered and ours.shape == reference.shape
                    else _difference(ours, reference, labels)
                    for n, ours, reference in pairs
                }
            )
        return found

    def check(self, run: Runner, what: str) -> float:
        """The worst relative error of ``run``. Raises VerificationError, naming ``what``, beyond the tolerance."""
        self.found = self.errors(run, labels=self.spread is not None)
        different, self.unordered = self._beyond(self.found), frozenset()
        if self.reorder is not None and different:
            own = (self._beyond(self.errors(other.run)) for other in self.reorder())
            self.unordered = different & frozenset().union(*own)
            self.found = self.errors(run, unordered=self.unordered)
        if self.cases and not self.found:
            raise VerificationError(f"{what} agrees with onnxruntime in no case: {self.resized[0]}")
        allowed = self.tolerances if self.spread is None else self.spread.allowed(self.found, self.tolerances)
        for shapes, errors in zip(self.compared, self.found, strict=True):
            for name, error in errors.items():
                if error > allowed[name]:
                    raise VerificationError(
                        f"{what} changes output '{name}' by {error:.1e} of its scale (at most {allowed[name]:.0e} is allowed) "
                        f"at input shapes {shapes}: please report the model; verify=False takes the result as it is"
                    )
        return max((error for errors in self.found for error in errors.values()), default=0.0)

    def _beyond(self, found: Sequence[Mapping[str, float]]) -> frozenset[str]:
        return frozenset(name for errors in found for name, error in errors.items() if error > self.tolerances[name])


def _is_heavy(model: onnx.ModelProto) -> bool:
    """Whether the weights of ``model``, which may be inputs, are so large that there should be no more copies of them than it takes."""
    shapes = [w.dims for w in model.graph.initializer]
    shapes += [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input]
    return bool(sum(math.prod(dims) for dims in shapes) > MAPPED)


def judged_as_it_is(model: onnx.ModelProto) -> bool:
    """Whether onnxruntime on ``model`` (from ``frontend.load``), and on no variant of it, is what candidates are compared with."""
    others = (noise.draws, accuracy.is_reduced, half.has_half, quantises, orders)
    return not any(other(model) for other in others)


def _ascending(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.sort(values, axis=None)


def _resized(ours: tuple[int, ...], reference: tuple[int, ...]) -> bool:
    """Whether the shapes differ by as little as one rounding may make of a size that data decides."""
    near = len(ours) == len(reference) and all(
        abs(a - b) <= max(2, _NEAR * b) for a, b in zip(ours, reference, strict=True)
    )
    return near and ours != reference


def _output_dtypes(model: onnx.ModelProto) -> dict[str, str]:
    from onnx import helper

    return {o.name: helper.tensor_dtype_to_np_dtype(o.type.tensor_type.elem_type).name for o in model.graph.output}


def _as_it_is(model: onnx.ModelProto | str, verifier: Verifier) -> list[str]:
    """How a half-precision model, run as it is, differs from the float32 that it was judged by."""
    judged = "half-precision model: judged by onnxruntime on the same model in float32"
    try:
        session = ort_session(model, lean=isinstance(model, str) or _is_heavy(model))
    except InvalidModel:
        return [f"{judged}; onnxruntime does not load it as it is"]
    worst: dict[str, float] = {}
    for feeds, expected in verifier.cases:
        found = _try(session, verifier.names, feeds)
        if found is None:
            return [f"{judged}; onnxruntime does not run it as it is"]
        for name, ours, reference in zip(verifier.names, found, expected, strict=True):
            worst[name] = max(worst.get(name, 0.0), relative_error(ours, reference))
    remarks = [
        f"{judged}, from which onnxruntime on the model as it is differs by {max(worst.values(), default=0.0):.0e}"
    ]
    overflown = [name for name, error in worst.items() if error == float("inf")]
    if overflown:
        remarks = [f"{judged}; as it is, onnxruntime makes other infinities or NaN of output '{overflown[0]}'"]
    return remarks


def _longest(
    session: Reference,
    specs: Sequence[InputSpec],
    names: Sequence[str],
    allowed: Callable[[Mapping[str, int]], bool],
) -> tuple[int, dict[str, int]]:
    """The first length of all sizes at which onnxruntime runs the model, or the longest of unequal ones; and the sizes."""
    for length, batch in itertools.product(LENGTHS, BATCHES):
        sizes = default_sizes(specs, batch, length)
        if _numbers(specs, sizes) > MOST_NUMBERS or not allowed(sizes):
            continue
        if _try(session, names, generate_inputs(specs, sizes)) is not None:
            return length, sizes
    for sizes in itertools.islice(_unequal(specs, allowed), len(UNEQUAL)):
        if _try(session, names, generate_inputs(specs, sizes)) is not None:
            return max(sizes.values()), sizes
    raise VerificationError(
        "onnxruntime runs the model on no made-up inputs, so the result can't be checked: give the sizes with shapes, "
        "or skip the check with verify=False"
    )


def _numbers(specs: Sequence[InputSpec], sizes: Mapping[str, int]) -> int:
    """How many numbers the inputs have at ``sizes``."""
    return sum(math.prod(evaluate(dim, sizes) for dim in spec.shape) for spec in specs)


def _unequal(specs: Sequence[InputSpec], allowed: Callable[[Mapping[str, int]], bool]) -> Iterator[dict[str, int]]:
    """Sizes that the graph is meant for, those that differ least first."""
    base = default_sizes(specs, BATCHES[0])
    free = sorted(base.keys() - _batches(specs))
    if not 0 < len(free) <= MOST_UNEQUAL:
        return
    values = UNEQUAL if len(free) < MOST_UNEQUAL else UNEQUAL[:: len(free)]
    for chosen in sorted(itertools.product(values, repeat=len(free)), key=lambda c: (max(c) - min(c), -max(c))):
        sizes = base | dict(zip(free, chosen, strict=True))
        if allowed(sizes):
            yield sizes


def _batches(specs: Sequence[InputSpec]) -> set[str]:
    """The sizes that are numbers of batch entries."""
    one, other = (default_sizes(specs, batch) for batch in BATCHES)
    return {name for name, size in one.items() if size != other[name]}


def _try(
    session: Reference, names: Sequence[str], feeds: Mapping[str, npt.NDArray[Any]]
) -> list[npt.NDArray[Any]] | None:
    try:
        return [np.asarray(o) for o in session.run(list(names), dict(feeds))]
    except Exception as e:  # onnxruntime's errors have no common class of their own
        _log.debug("onnxruntime refuses made-up inputs: %s", e)
        return None
