"""What a lowering returns: one plan step, before its buffers and sizes have numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ..symbolic import Dim

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc


def count_name(tensor: str) -> str:
    """The int64 tensor that says how many columns ``tensor`` has, where its own kernels count them."""
    return f"{tensor}.count"


@dataclass(frozen=True)
class Workspace:
    """A buffer that lives for one step only (per-panel partial statistics, say). ``size`` in bytes."""

    name: str
    size: Dim


@dataclass(frozen=True, eq=False)
class Packed:
    """A constant in the layout that the kernel reads. ``name`` says which weight it was packed from.

    ``columns``: where it holds panels ``[rows, columns]`` of a matrix, one behind another, the columns of each.
    """

    name: str
    data: npt.NDArray[Any]
    columns: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class KernelSource:
    """A kernel to build. ``symbol`` is a function of everything that shaped it: equal symbols are equal kernels.

    ``make`` writes the kernel; it is called once, for one of all equal kernels, when the function is wanted.
    """

    symbol: str
    make: Callable[[], PrimFunc]

    @cached_property
    def func(self) -> PrimFunc:
        """The kernel's function."""
        return self.make()

    @property
    def sizes(self) -> tuple[Dim, ...]:
        """Sizes of the run that say how the kernel is started, behind the call's ints; a CPU's needs none."""
        return ()


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel.

    ``buffers`` in the kernel's order: the name of a graph tensor, a packed constant or a workspace; the runtime appends the
    thread's scratch of ``scratch`` bytes. ``ints`` in the kernel's order; the runtime appends begin and end, within
    ``[0, items)``, in chunks of at least ``grain`` items.
    """

    name: str
    kernel: KernelSource
    buffers: tuple[str | Packed | Workspace, ...]
    ints: tuple[Dim, ...]
    items: Dim
    grain: int = 1
    scratch: Dim = 0
    finish: KernelSource | None = None
    outputs: tuple[str, ...] = ()
    flops: Dim = 0
    bytes: Dim = 0
    source: tuple[str, ...] = field(default=())
