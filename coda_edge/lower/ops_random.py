"""Random tensors: each element is a function of its position, of the operator, and of a number, so threads and fusion change nothing.

The number is the operator's ``seed``; without one it is the run's, which the runtime draws (``docs/bundle-format.md``).
The function is Philox-4x32-10 (Salmon et al. 2011, *Parallel random numbers: as easy as 1, 2, 3*): the counter is position and operator,
the key is the number. ``reference`` computes the same with NumPy.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import tirx

from ..bundle.plan import RUN
from . import intrinsics
from .emit import Expr
from .ops_math import convert
from .registry import Application, View, constant, pointwise

_ROUNDS = 10
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_UNIT = 2.0**-24


def philox(counter: Sequence[Any], key: Sequence[Any], number: Callable[[int], Any], keep: Callable[[Any], Any]) -> Any:
    """The first two of the four words that ``counter`` (four words) and ``key`` (two) give.

    A word is 32 bits in a ``uint64`` of any kind that has operators: ``number`` makes one, ``keep`` stores one for its uses.
    No result is beyond 64 bits, which compilers may rely on.
    """
    low, half = number(_LOW), number(32)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        a, b = keep(c0 * number(_FACTORS[0])), keep(c2 * number(_FACTORS[1]))
        c0, c1, c2, c3 = keep((b >> half) ^ c1 ^ k0), keep(b & low), keep((a >> half) ^ c3 ^ k1), keep(a & low)
        k0, k1 = keep((k0 + number(_KEY_STEPS[0])) & low), keep((k1 + number(_KEY_STEPS[1])) & low)
    return c0, c1


def _seed_bits(seed: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", seed))[0])


def _stream(name: str) -> int:
    """What tells one operator from another."""
    return zlib.crc32(name.encode())


def _bits(value: int) -> Expr:
    return tirx.const(value, "uint64")


def _units(op: Application, indices: Sequence[Expr]) -> list[Expr]:
    """Two float32 in [0, 1) for the element at ``indices``."""
    keep, low, half = op.emit.bind, _bits(_LOW), _bits(32)
    seed = op.attribute("seed", None)
    run = _bits(_seed_bits(seed)) if seed is not None else keep(tirx.Cast("uint64", op.emit.size(RUN)))
    position = keep(tirx.Cast("uint64", op.emit.ravel(indices, op.shape)))
    counter = [position & low, position >> half, _bits(_stream(op.node.outputs[0].name)), _bits(int(seed is not None))]
    words = philox([*map(keep, counter)], [keep(run & low), keep(run >> half)], _bits, keep)
    return [tirx.Cast("float32", tirx.Cast("int32", word >> _bits(8))) * constant(_UNIT, "float32") for word in words]


@pointwise("RandomUniform", "RandomUniformLike")
def random_uniform(op: Application) -> View:
    """Uniform in [low, high), in steps of 2⁻²⁴ of that range."""
    low, high = float(op.attribute("low", 0.0)), float(op.attribute("high", 1.0))

    def at(indices: Sequence[Expr]) -> Expr:
        unit, _ = _units(op, indices)
        return convert(unit * constant(high - low, "float32") + constant(low, "float32"), op.dtype)

    return op.result(at)


@pointwise("RandomNormal", "RandomNormalLike")
def random_normal(op: Application) -> View:
    """Normal with the given mean and scale, of two uniform numbers (Box and Muller 1958); at most 5.8 scales away."""
    mean, scale = float(op.attribute("mean", 0.0)), float(op.attribute("scale", 1.0))

    def at(indices: Sequence[Expr]) -> Expr:
        first, second = _units(op, indices)
        radius = intrinsics.sqrt(constant(-2, "float32") * intrinsics.log(first + constant(_UNIT, "float32")))
        turn = intrinsics.cos(second * constant(2 * np.pi, "float32"))
        return convert(radius * turn * constant(scale, "float32") + constant(mean, "float32"), op.dtype)

    return op.result(at)


def reference(op: str, name: str, attrs: dict[str, Any], run: int, count: int) -> npt.NDArray[np.float64]:
    """The first ``count`` elements that operator ``op`` writes to tensor ``name`` in the run of this number, in double precision."""
    seed = attrs.get("seed")
    number = run % 2**64 if seed is None else _seed_bits(seed)
    position = np.arange(count, dtype=np.uint64)
    rest = [np.full(count, value, np.uint64) for value in (_stream(name), seed is not None)]
    counter = [position & np.uint64(_LOW), position >> np.uint64(32), *rest]
    words = philox(counter, [np.uint64(number & _LOW), np.uint64(number >> 32)], np.uint64, lambda x: x)
    first, second = (np.asarray(word >> np.uint64(8), np.float64) * _UNIT for word in words)
    if op.startswith("RandomUniform"):
        low, high = attrs.get("low", 0.0), attrs.get("high", 1.0)
        return np.asarray(first * (high - low) + low)
    normal = np.sqrt(-2 * np.log(first + _UNIT)) * np.cos(2 * np.pi * second)
    return np.asarray(normal * attrs.get("scale", 1.0) + attrs.get("mean", 0.0))
