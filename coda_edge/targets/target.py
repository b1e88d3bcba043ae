"""What a target is, and the registry of targets.

A target is found in a module beside this one, or through the entry point group ``coda_edge.targets``: each is a module with a tuple
``TARGETS``, best last. The name ``native`` is the last one, of all modules, that this machine's CPU can run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from ..errors import TargetError
from .link import link_shared

if TYPE_CHECKING:
    from ..lower.kernel import KernelSource

GROUP = "coda_edge.targets"
NATIVE = "native"
_PACKAGE = __name__.rpartition(".")[0]


@dataclass(frozen=True)
class Target:
    """A device that kernels are compiled for.

    ``tvm``: TVM's target; ``triple``: the linker's. ``features``: what the CPU must have, by the runtime's names; the bundle
    lists them and the runtime refuses a CPU without one. ``vector``: bytes of a vector register, ``registers``: how many
    there are; the schedules follow from them. ``tiles``: the GEMM's register tiles (rows, vectors) to choose from, where measurements
    say more than the number of registers does. ``l1``, ``l2``: data cache bytes of one core that schedules may count on.
    """

    name: str
    description: str
    tvm: Mapping[str, object] = field(hash=False)
    triple: str
    features: tuple[str, ...]
    vector: int
    registers: int
    l1: int = 32 << 10
    l2: int = 512 << 10
    tiles: tuple[tuple[int, int], ...] = ()

    def lanes(self, itemsize: int) -> int:
        """Elements of ``itemsize`` bytes in a vector register."""
        return self.vector // itemsize

    def missing(self, features: Sequence[str] | None = None) -> tuple[str, ...]:
        """The features that a CPU (this machine's, by default) lacks to run the target's kernels."""
        present = cpu_features() if features is None else features
        return tuple(f for f in self.features if f not in present)

    def build(self, kernels: Sequence[KernelSource]) -> bytes:
        """The kernels as one shared library, each distinct symbol once. Raises TargetError if it cannot be linked."""
        from ..lower.abi import compile_kernels

        unique = {kernel.symbol: kernel.func for kernel in kernels}
        if not unique:
            raise TargetError("there is no kernel to build: a plan needs at least one kernel")
        return link_shared(compile_kernels(list(unique.values()), self.tvm), tuple(unique), self.triple)


def cpu_features() -> tuple[str, ...]:
    """The features of this machine's CPU that bundles may ask for."""
    from .. import _runtime

    return tuple(_runtime.cpu_features())


def targets() -> dict[str, Target]:
    """Every registered target by name, built-in ones first."""
    built_in = [f"{_PACKAGE}.{m.name}" for m in iter_modules(import_module(_PACKAGE).__path__)]
    modules = [*built_in, *(e.value for e in entry_points(group=GROUP) if e.value not in built_in)]
    return {target.name: target for module in modules for target in getattr(import_module(module), "TARGETS", ())}


def names() -> tuple[str, ...]:
    """What ``get`` takes."""
    return (NATIVE, *targets())


def get(name: str = NATIVE) -> Target:
    """The target called ``name``. Raises TargetError for an unknown name, or if no target is native here."""
    known = targets()
    if name != NATIVE:
        if name not in known:
            raise TargetError(f"unknown target '{name}': choose one of {', '.join(names())}")
        return known[name]
    present = cpu_features()
    runnable = [t for t in known.values() if not t.missing(present)]
    if not runnable:
        raise TargetError(
            f"no target runs on this CPU (its features: {', '.join(present) or 'none known'}): name the target of the "
            f"device instead, one of {', '.join(known)}"
        )
    return runnable[-1]
