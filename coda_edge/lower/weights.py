"""How a GEMM's weights lie in panels, and how a kernel makes float32 of what is stored.

W is packed into panels of ``width`` columns, each ``[K, width]``, the column classes apart in each; the last panel is as narrow as what
is left. A format that is not float32 is converted as it is read: a block of rows that is one tile converts in registers, any other one
has the panel converted to scratch once, ahead of its tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..weights import Weight
from .body import Buffer, Expr, Index, external, lanes, load, widen
from .emit import HALF, STORAGE
from .kernel import Packed


@dataclass(frozen=True)
class WeightFormat:
    """What of a ``Weight`` there is: the dtype of its panels, a scale of each row of W, an offset of each column."""

    dtype: str = "float32"
    scaled: bool = False
    shifted: bool = False

    @staticmethod
    def of(weight: Weight) -> WeightFormat:
        """The format that ``weight`` is stored in."""
        return WeightFormat(weight.stored.dtype.name, weight.scale is not None, weight.offset is not None)

    @property
    def converts(self) -> bool:
        """Whether the panels are not what the multiplication reads."""
        return self != PLAIN

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a panel."""
        return 2 if self.dtype in HALF else 4

    def packed(self, name: str, weight: Weight, orders: Sequence[Sequence[int]]) -> list[Packed]:
        """What the kernel reads: panels, one for each of ``orders``, which are its columns; then scale and offset, if there are any."""
        panels = np.concatenate([np.ascontiguousarray(weight.stored[:, order]).reshape(-1) for order in orders])
        found = [Packed(name, panels)]
        if weight.scale is not None:
            found.append(Packed(f"{name}.scale", weight.scale))
        if weight.offset is not None:
            found.append(Packed(f"{name}.offset", np.concatenate([weight.offset[order] for order in orders])))
        return found


PLAIN = WeightFormat()
"""Float32, read as it is."""


@dataclass(frozen=True)
class PackedWeight:
    """The buffers of a packed weight in a kernel."""

    format: WeightFormat
    panels: Buffer
    scale: Buffer
    offset: Buffer

    @staticmethod
    def declare(format: WeightFormat) -> PackedWeight:
        """New parameters."""
        stored = STORAGE.get(format.dtype, format.dtype)
        return PackedWeight(format, external("w", stored), external("w_scale"), external("w_offset"))

    @property
    def params(self) -> Iterator[Buffer]:
        """Those that the kernel has, in the order of ``WeightFormat.packed``."""
        yield self.panels
        if self.format.scaled:
            yield self.scale
        if self.format.shifted:
            yield self.offset

    def load(self, at: Index, step: Index, column: Index, count: int) -> Expr:
        """``count`` weights as float32: elements ``at`` of the panels, which are of row ``step`` and ``column`` as packed."""
        value = load(self.panels, at, count)
        if self.format.dtype in HALF:
            value = HALF[self.format.dtype].widen(value)
        if self.format.scaled:
            value = value * widen(load(self.scale, step), lanes(value))
        return value - load(self.offset, column, count) if self.format.shifted else value
