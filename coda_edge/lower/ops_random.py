"""Random tensors: each element is a function of its position, of the operator, and of a number, so threads and fusion change nothing.

The number is the operator's ``seed``; without one it is the run's, which the runtime draws (``docs/bundle-format.md``).
``reference`` computes the same with NumPy.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import tirx

from ..bundle.plan import RUN
from . import intrinsics
from .emit import Expr
from .ops_math import convert
from .registry import Application, View, constant, pointwise

# SplitMix64 (Steele, Lea and Flood 2014): a step, and two rounds of shift and multiply.
_STEP = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_UNIT = 2.0**-24


def stream(name: str, seed: float | None) -> int:
    """What tells one random tensor from another: 64 bits of its name and of its operator's seed."""
    own = 0 if seed is None else struct.unpack("<I", struct.pack("<f", seed))[0]
    return zlib.crc32(name.encode()) << 32 | own


def _bits(value: int) -> Expr:
    return tirx.const(value, "uint64")


def _mix(x: Expr) -> Expr:
    for shift, factor in _ROUNDS:
        x = (x ^ (x >> _bits(shift))) * _bits(factor)
    return x ^ (x >> _bits(_LAST_SHIFT))


def _drawn(op: Application, indices: Sequence[Expr]) -> Expr:
    """64 random bits for the element at ``indices``."""
    seed = op.attribute("seed", None)
    own = _bits(stream(op.node.outputs[0].name, seed))
    key = own if seed is not None else own ^ tirx.Cast("uint64", op.emit.size(RUN))
    key = op.emit.bind(_mix(key + _bits(_STEP)))
    position = tirx.Cast("uint64", op.emit.ravel(indices, op.shape))
    return op.emit.bind(_mix(key + (position + _bits(1)) * _bits(_STEP)))


def _unit(bits: Expr) -> Expr:
    """The upper 24 bits as a float32 in [0, 1)."""
    return tirx.Cast("float32", tirx.Cast("int32", bits >> _bits(40))) * constant(_UNIT, "float32")


@pointwise("RandomUniform", "RandomUniformLike")
def random_uniform(op: Application) -> View:
    """Uniform in [low, high)."""
    low, high = float(op.attribute("low", 0.0)), float(op.attribute("high", 1.0))

    def at(indices: Sequence[Expr]) -> Expr:
        return convert(
            _unit(_drawn(op, indices)) * constant(high - low, "float32") + constant(low, "float32"), op.dtype
        )

    return op.result(at)


@pointwise("RandomNormal", "RandomNormalLike")
def random_normal(op: Application) -> View:
    """Normal with the given mean and scale, of two uniform numbers (Box and Muller 1958); at most 5.8 scales away."""
    mean, scale = float(op.attribute("mean", 0.0)), float(op.attribute("scale", 1.0))

    def at(indices: Sequence[Expr]) -> Expr:
        bits = _drawn(op, indices)
        radius = intrinsics.sqrt(constant(-2, "float32") * intrinsics.log(_unit(bits) + constant(_UNIT, "float32")))
        lower = _unit(bits << _bits(24))
        turn = intrinsics.cos(lower * constant(2 * np.pi, "float32"))
        return convert(radius * turn * constant(scale, "float32") + constant(mean, "float32"), op.dtype)

    return op.result(at)


def reference(node: Any, run: int, count: int) -> npt.NDArray[np.float64]:
    """The first ``count`` elements of the random tensor that ``node`` makes in the run of this number, in double precision.

    ``node`` has ``op``, ``outputs`` and ``attrs``, as a graph's node has.
    """
    attrs = node.attrs
    seed = attrs.get("seed")
    with np.errstate(over="ignore"):
        key = np.uint64(stream(node.outputs[0].name, seed)) ^ np.uint64(0 if seed is not None else run % 2**64)
        key = _mix_numpy(key + np.uint64(_STEP))
        bits = _mix_numpy(key + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP))
    upper = (bits >> np.uint64(40)).astype(np.float64) * _UNIT
    if node.op.startswith("RandomUniform"):
        low, high = attrs.get("low", 0.0), attrs.get("high", 1.0)
        return np.asarray(upper * (high - low) + low)
    lower = (bits >> np.uint64(16) & np.uint64(2**24 - 1)).astype(np.float64) * _UNIT
    normal = np.sqrt(-2 * np.log(upper + _UNIT)) * np.cos(2 * np.pi * lower)
    return np.asarray(normal * attrs.get("scale", 1.0) + attrs.get("mean", 0.0))


def run_number(seed: int) -> int:
    """The number of the first run after a session was given ``seed``."""
    with np.errstate(over="ignore"):
        return int(_mix_numpy(np.uint64(seed) + np.uint64(_STEP)))


def _mix_numpy(x: Any) -> Any:
    for shift, factor in _ROUNDS:
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(_LAST_SHIFT))
