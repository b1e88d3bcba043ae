"""Runs bundles, in the manner of ``onnxruntime.InferenceSession``; needs only numpy and the C runtime."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _runtime
from .device_array import DeviceArray, on_device
from .dtypes import numpy_dtype
from .errors import ShapeError, SignatureError

#: Bytes from which on the system would give an output's memory page by page, in each run again.
_LARGE = 1 << 16
#: numpy's flags of an array that is read where it is: C_CONTIGUOUS and ALIGNED.
_IN_PLACE = 0x101
#: How many combinations of input shapes are remembered with the output shapes that follow.
_KNOWN_SHAPES = 64
_KEY_BYTES = 32
_ONNX_NAMES = {"float32": "float", "float64": "double"}


@dataclass(frozen=True)
class IO:
    """An input or output: ``type`` as onnxruntime writes it (``tensor(float)``), ``shape`` of numbers and symbolic sizes."""

    name: str
    type: str
    shape: list[int | str]


@dataclass(frozen=True)
class StepProfile:
    """One kernel call of a run: ``name`` in the plan, the ``kernel`` called, ``source``: the ONNX nodes that it computes.

    ``ns``: the median over the rounds. ``flops`` are those of the algorithm; ``bytes`` counts each tensor read or written once.
    """

    name: str
    kernel: str
    source: str
    ns: float
    flops: int
    bytes: int


class _Tensor:
    """An input or output as the runtime describes it."""

    def __init__(self, name: str, number: int, dims: list[int | str]) -> None:
        element = _runtime.dtype_name(number)
        self.io = IO(name, f"tensor({_ONNX_NAMES.get(element, element)})", dims)
        self.name = name
        self.number = number
        self.dtype = numpy_dtype(element)
        self._foreign = element == "bfloat16"

    def in_place(self, array: npt.NDArray[Any]) -> tuple[int, npt.NDArray[Any]]:
        """Element type and memory of ``array``, in a type that the buffer protocol knows; an array on a GPU is its own."""
        if isinstance(array, DeviceArray):
            return self.number, array
        return self.number, array.view(np.uint16) if self._foreign else array


class Session:
    """A bundle, ready to run.

    ``path_or_bytes``: a file, which is mapped, or its contents, which are copied. ``threads``: how many threads run it; by
    default the cores that this process may use. Threads may share a session: their runs take turns. ``seed``: of random operators that
    have no seed of their own (from 1); by default another one for each session. ``target``: of the targets that the bundle holds kernels
    for, the one to use; by default the best that runs on this CPU.

    ``key``: the public key, 32 bytes, that the bundle must be signed with.

    Raises ``BundleError`` for a file that is no bundle, damaged or of another version (of weights, the first run does),
    ``SignatureError`` if the signature is wrong or ``key`` another one, ``TargetError`` if this CPU lacks what the kernels
    need, or the bundle holds none for ``target``.
    """

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes,
        threads: int | None = None,
        seed: int | None = None,
        target: str | None = None,
        key: bytes | None = None,
    ) -> None:
        if key is not None and len(key) != _KEY_BYTES:
            raise SignatureError(f"a public key has {_KEY_BYTES} bytes, this one {len(key)}: give what keygen wrote")
        source = path_or_bytes if isinstance(path_or_bytes, bytes) else os.fspath(path_or_bytes)
        self._runtime = _runtime.Session(source, threads or 0, seed or 0, target or "", key or b"")
        self._inputs = [_Tensor(*tensor) for tensor in self._runtime.tensors(False)]
        self._outputs = [_Tensor(*tensor) for tensor in self._runtime.tensors(True)]
        self._input_names = frozenset(tensor.name for tensor in self._inputs)
        self._all = list(range(len(self._outputs)))
        self._known_shapes: dict[tuple[tuple[int, ...], ...], list[tuple[int, ...]]] = {}
        self._output_index = {tensor.name: i for i, tensor in enumerate(self._outputs)}

    def get_inputs(self) -> list[IO]:
        """The inputs, in order."""
        return [tensor.io for tensor in self._inputs]

    def get_outputs(self) -> list[IO]:
        """The outputs, in order."""
        return [tensor.io for tensor in self._outputs]

    def cancel(self, on: bool = True) -> None:
        """Ends the run that another thread is in, with ``CancelledError``, and all that follow until ``cancel(False)``."""
        self._runtime.cancel(on)

    @property
    def metadata(self) -> dict[str, str]:
        """What the bundle says of itself: producer, target, hash of the source model."""
        return self._runtime.metadata()

    @property
    def target(self) -> str:
        """The target whose kernels this session runs: ``x86-64-v3``."""
        return self._runtime.target()

    @property
    def held_targets(self) -> list[str]:
        """The targets that the bundle holds kernels for, best last."""
        return self._runtime.held_targets()

    @property
    def threads(self) -> int:
        """How many threads run this session, the caller's among them."""
        return self._runtime.threads()

    @property
    def arena_bytes(self) -> int:
        """Bytes of working memory that the last run needed; 0 before the first."""
        return self._runtime.arena_bytes()

    @property
    def data_sizes(self) -> dict[str, int]:
        """The sizes that data decided in the last run, by the names that they have in ``get_outputs``; empty before the first."""
        return self._runtime.data_sizes()

    def seed(self, seed: int) -> None:
        """Begins the sequence of random numbers anew: the runs that follow draw what depends on ``seed`` alone."""
        self._runtime.seed(seed)

    def run(
        self,
        output_names: Sequence[str] | None,
        feeds: Mapping[str, npt.ArrayLike],
        outputs: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> list[npt.NDArray[Any]]:
        """Runs the model: the named outputs in that order, or all of them for ``None``.

        ``feeds`` maps each input's name to its array; contiguous arrays are read in place. ``outputs`` maps names of outputs to
        arrays that the results are written to and that are returned: contiguous, of the output's type and shape, apart from each
        other and from ``feeds``; the others are new arrays. Where a GPU runs the model, arrays of both may be the GPU's
        (``__cuda_array_interface__``). Raises ``ShapeError`` for a missing or unknown name, a wrong element
        type or dimensions that do not fit (those that data decides too), and ``DataError`` for a value that the model cannot process.
        """
        wanted = self._all if output_names is None else self._wanted(output_names)
        inputs = self._feed(feeds)
        shapes = self._shapes(inputs)
        given = self._bound(outputs, shapes) if outputs else {}
        for i in wanted:
            if i not in given and -1 not in shapes[i]:
                given[i] = self._fresh(self._outputs[i].dtype, shapes[i])
        results = [t.in_place(given[i]) if i in given else None for i, t in enumerate(self._outputs)]
        copied = [i for i in dict.fromkeys(wanted) if i not in given]
        for i, (dims, data) in zip(copied, self._runtime.run(inputs, results, copied), strict=True):
            given[i] = np.frombuffer(data, self._outputs[i].dtype).reshape(dims)
        return [a.owner if isinstance(a, DeviceArray) else a for a in (given[i] for i in wanted)]

    def profile(self, feeds: Mapping[str, npt.ArrayLike], rounds: int = 1) -> list[StepProfile]:
        """Where the time of a run on ``feeds`` goes: its kernel calls in order, timed in each of ``rounds`` runs.

        Raises what ``run`` does, and ``ValueError`` unless ``rounds`` is at least 1.
        """
        if rounds < 1:
            raise ValueError(f"rounds is {rounds}, expected at least 1")
        return [
            StepProfile(name, kernel, source, median(ns), flops, moved)
            for name, kernel, source, ns, flops, moved in self._runtime.profile(self._feed(feeds), rounds)
        ]

    def close(self) -> None:
        """Frees the session's memory, threads and mapping; waits for a run in another thread."""
        self._runtime.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _shapes(self, inputs: list[tuple[int, npt.NDArray[Any]] | None]) -> list[tuple[int, ...]]:
        """The outputs' shapes; -1 where data decides."""
        if None in inputs:
            return self._runtime.shapes(inputs)  # which raises
        key = tuple([given[1].shape for given in inputs if given])
        shapes = self._known_shapes.get(key)
        if shapes is None:
            if len(self._known_shapes) >= _KNOWN_SHAPES:
                self._known_shapes.clear()
            shapes = self._known_shapes[key] = self._runtime.shapes(inputs)
        return shapes

    def _wanted(self, names: Sequence[str]) -> list[int]:
        unknown = [name for name in names if name not in self._output_index]
        if unknown:
            raise ShapeError(f"no output is called '{unknown[0]}'; the outputs are {_quoted(self._outputs)}")
        return [self._output_index[name] for name in names]

    def _fresh(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """A new array; a large one in memory that an array of an earlier run has left behind."""
        size = dtype.itemsize * prod(shape)
        if size < _LARGE:
            return np.empty(shape, dtype)
        return np.frombuffer(memoryview(self._runtime.memory(size)), dtype).reshape(shape)

    def _bound(
        self, outputs: Mapping[str, npt.NDArray[Any]], shapes: Sequence[tuple[int, ...]]
    ) -> dict[int, npt.NDArray[Any]]:
        """The caller's arrays by the numbers of their outputs."""
        arrays: dict[int, npt.NDArray[Any]] = {}
        array: Any
        for i, (name, array) in zip(self._wanted(list(outputs)), outputs.items(), strict=True):
            dtype, shape = self._outputs[i].dtype, shapes[i]
            device = on_device(array)
            if device:
                array = self._on_device(array, f"output '{name}'")
            if -1 in shape:
                raise ShapeError(f"output '{name}' has a size that data decides: no array can be given for it")
            if array.dtype != dtype or array.shape != shape:
                raise ShapeError(
                    f"output '{name}' is to be written to {array.dtype} {list(array.shape)}, expected {dtype} {list(shape)}"
                )
            if not (array.writeable if device else array.flags.carray):
                raise ShapeError(f"output '{name}' needs an array that is contiguous, aligned and writeable")
            arrays[i] = array
        return arrays

    def _feed(self, feeds: Mapping[str, npt.ArrayLike]) -> list[tuple[int, npt.NDArray[Any]] | None]:
        if feeds.keys() != self._input_names:
            unknown = [name for name in feeds if name not in self._input_names]
            if unknown:
                raise ShapeError(f"no input is called '{unknown[0]}'; the inputs are {_quoted(self._inputs)}")
        return [self._array(tensor, feeds[tensor.name]) if tensor.name in feeds else None for tensor in self._inputs]

    def _array(self, tensor: _Tensor, value: npt.ArrayLike) -> tuple[int, npt.NDArray[Any]]:
        array = value if type(value) is np.ndarray else self._taken(tensor, value)
        if array.dtype is not tensor.dtype and array.dtype != tensor.dtype:
            raise ShapeError(f"input '{tensor.name}': element type is {array.dtype}, expected {tensor.dtype}")
        if isinstance(array, DeviceArray):
            return tensor.in_place(array)
        return tensor.in_place(array if array.flags.num & _IN_PLACE == _IN_PLACE else array.copy(order="C"))

    def _taken(self, tensor: _Tensor, value: npt.ArrayLike) -> npt.NDArray[Any]:
        """``value``, which is no array of numpy's, as an array."""
        return self._on_device(value, f"input '{tensor.name}'") if on_device(value) else np.asarray(value)

    def _on_device(self, value: Any, name: str) -> Any:
        """An array on a GPU, if that is where the model runs."""
        if not self.target.startswith("cuda"):
            raise ShapeError(
                f"{name} is on a GPU, and this session runs on the CPU ({self.target}): copy it to the host"
            )
        return DeviceArray(value, name)


def _quoted(tensors: list[_Tensor]) -> str:
    return ", ".join(f"'{tensor.name}'" for tensor in tensors)
