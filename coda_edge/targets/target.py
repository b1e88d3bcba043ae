"""What a target is, and the registry of targets.

A target is found in a module beside this one, or through the entry point group ``coda_edge.targets``: each is a module with a tuple
``TARGETS``, best last, and optionally ``GROUPS``, names for several targets that one bundle holds kernels for. The name ``native`` is the last
target, of all modules, that this machine's CPU can run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING

from ..errors import TargetError
from .link import link_shared
from .objects import undefined

if TYPE_CHECKING:
    from ..lower.kernel import KernelSource

GROUP = "coda_edge.targets"
NATIVE = "native"
AUTO = "auto"
"""What this machine has: its GPU, if there is one, and its CPU."""
GPU = "cuda"
"""A feature that no CPU has."""
LINUX = "linux"
SUPPORT = {"windows": frozenset({"___chkstk_ms"})}
"""By system: what an object may leave to the compiler's support library, which is linked into every program there."""
_PACKAGE = __name__.rpartition(".")[0]


@dataclass(frozen=True)
class Target:
    """A device that kernels are compiled for.

    ``tvm``: TVM's target; ``triple``: the linker's. ``features``: what the CPU must have, by the runtime's names; the bundle
    lists them and the runtime refuses a CPU without one. ``vector``: bytes of a vector register, ``registers``: how many
    there are; the schedules follow from them. ``tiles``: the GEMM's register tiles (rows, vectors) to choose from, where measurements
    say more than the number of registers does; ``stride``: K steps between requests for weights ahead, 0: the schedule's own.
    ``dot``: the operation of ``lower/dot.py`` for products of bytes; "": they are done in float32.
    ``base``: the target that is the same but for ``dot``, whose kernels are taken for what has no use for it, and whose measured schedules hold
    here too. ``l1``, ``l2``: data cache bytes of one core that schedules may count on.
    ``system``: where kernels run, as ``platform.system`` says it in lower case. Only Linux (and Android, which counts as that) has the
    runtime load libraries of kernels; elsewhere they are objects for the app's own linker.
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
    stride: int = 0
    dot: str = ""
    base: str = ""
    system: str = LINUX

    def lanes(self, itemsize: int) -> int:
        """Elements of ``itemsize`` bytes in a vector register."""
        return self.vector // itemsize

    @property
    def measured_as(self) -> str:
        """The target under whose name schedules are measured."""
        return self.base or self.name

    @property
    def cpu(self) -> str:
        """The core that instructions are chosen and ordered for, by LLVM's name."""
        return str(self.tvm.get("mcpu", ""))

    @property
    def loadable(self) -> bool:
        """Whether the runtime loads the kernels from a bundle; otherwise they are linked into the program."""
        return self.system == LINUX

    def missing(self, features: Sequence[str] | None = None) -> tuple[str, ...]:
        """The features that a CPU (this machine's, by default) lacks to run the target's kernels; first the system, if that is another."""
        present = cpu_features() if features is None else features
        return (*(() if self.loadable else (self.system,)), *(f for f in self.features if f not in present))

    def build(self, kernels: Sequence[KernelSource], progress: Callable[[float], None] | None = None) -> bytes:
        """The kernels as one shared library, each distinct symbol once; ``progress`` hears which share of them is compiled.

        Raises TargetError if there can be none or it cannot be linked.
        """
        from ..lower.abi import compile_each

        if not self.loadable:
            known = ", ".join(t.name for t in targets().values() if t.loadable)
            raise TargetError(
                f"target '{self.name}' has no libraries of kernels that a runtime loads, as {self.system} programs have them linked in: "
                f"take `coda-edge package --form static`, or one of the targets {known}"
            )
        unique = _unique(kernels)
        return link_shared(compile_each(list(unique.values()), self.tvm, progress), tuple(unique), self.triple)

    def objects(self, kernels: Sequence[KernelSource]) -> bytes:
        """The kernels as one relocatable object of the system's format, each distinct symbol once, for a linker.

        Raises TargetError if it needs a symbol that neither it nor the compiler's support library has.
        """
        data = self._compiled(_unique(kernels))
        if foreign := set(undefined(data)) - SUPPORT.get(self.system, frozenset()):
            raise TargetError(f"kernels for {self.name} need symbols that no one defines: {', '.join(sorted(foreign))}")
        return data

    def _compiled(self, unique: Mapping[str, KernelSource]) -> bytes:
        from ..lower.abi import compile_kernels

        return compile_kernels([kernel.func for kernel in unique.values()], self.tvm)


def _unique(kernels: Sequence[KernelSource]) -> dict[str, KernelSource]:
    """The kernels by symbol. Raises TargetError if there is none."""
    if not kernels:
        raise TargetError("there is no kernel to build: a plan needs at least one kernel")
    return {kernel.symbol: kernel for kernel in kernels}


def cpu_features() -> tuple[str, ...]:
    """The features of this machine's CPU that bundles may ask for."""
    from .. import _runtime

    return tuple(_runtime.cpu_features())


def _modules() -> list[ModuleType]:
    built_in = [f"{_PACKAGE}.{m.name}" for m in iter_modules(import_module(_PACKAGE).__path__)]
    return [
        import_module(m) for m in (*built_in, *(e.value for e in entry_points(group=GROUP) if e.value not in built_in))
    ]


def targets() -> dict[str, Target]:
    """Every registered target by name, built-in ones first."""
    return {target.name: target for module in _modules() for target in getattr(module, "TARGETS", ())}


def groups() -> dict[str, tuple[str, ...]]:
    """Names that stand for several targets."""
    return {name: members for module in _modules() for name, members in getattr(module, "GROUPS", {}).items()}


def names() -> tuple[str, ...]:
    """What ``get`` takes."""
    return (NATIVE, *targets())


def get_all(text: str) -> tuple[Target, ...]:
    """The targets of a comma-separated list of names and groups, each once, in that order. Raises TargetError as ``get`` does."""
    known = {**groups(), AUTO: _present()}
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise TargetError(
            f"'{text}' names no target in one place: expected a name, or names with one comma between two"
        )
    wanted = [name for part in parts for name in known.get(part, (part,))]
    return tuple({target.name: target for target in map(get, wanted)}.values())


def _present() -> tuple[str, ...]:
    """The targets of what this machine has."""
    from .cuda import present

    return tuple(filter(None, (NATIVE, present())))


def ranked(several: Sequence[Target]) -> list[str]:
    """Their names, best last, as the runtime prefers them."""
    order = list(targets())
    return [target.name for target in sorted(several, key=lambda t: (GPU in t.features, order.index(t.name)))]


def get(name: str = NATIVE) -> Target:
    """The target called ``name``. Raises TargetError for an unknown name, or if no target is native here."""
    known = targets()
    if name != NATIVE:
        if name not in known:
            held = ""
            if name in groups():
                held = f"; {name} stands for {', '.join(groups()[name])}, of which one is needed here"
            elif "," in name:
                held = "; one is needed here, not a list"
            raise TargetError(f"unknown target '{name}': choose one of {', '.join(names())}{held}")
        return known[name]
    present = cpu_features()
    runnable = [t for t in known.values() if not t.missing(present)]
    if not runnable:
        raise TargetError(
            f"no target runs on this CPU (its features: {', '.join(present) or 'none known'}): name the target of the "
            f"device instead, one of {', '.join(known)}"
        )
    return runnable[-1]
