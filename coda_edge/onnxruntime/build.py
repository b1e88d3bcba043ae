"""From operators to the shared library that onnxruntime loads: their tables and kernels, linked with the C sources beside this file."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..errors import TargetError
from ..forms.sources import runtime
from ..ir import Array
from ..lower.abi import compile_kernels
from ..lower.kernel import KernelSource
from ..targets import Target
from ..targets.link import linker
from .operators import Operator
from .table import tables

NATIVE = Path(__file__).parent / "native"
_FLAGS = ("-std=c11", "-D_POSIX_C_SOURCE=200809L", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")
_LINK = ("-shared", "-Wl,--gc-sections", "-Wl,--no-undefined", "-Wl,-z,noexecstack")
_EXPORT = "RegisterCustomOps"


# Code reaches what is within 2 GiB of it.
_MAX_WEIGHTS = 3 << 29

_STORE = r"""__asm__(".section .rodata.{name}, \"a\"\n.balign 64\n.globl {name}\n.hidden {name}\n{name}: .incbin \"{file}\"\n.previous");
"""


def build(
    operators: Mapping[str, Operator],
    kernels: Sequence[KernelSource],
    target: Target,
    weights: Mapping[str, Array] | None = None,
    flags: Sequence[str] = ("-s",),
) -> bytes:
    """The library of ``operators`` by name, for onnxruntime on ``target``, with ``weights`` by digest; ``flags`` are more for the compiler.

    Raises TargetError if there is no compiler for the target, it refuses the sources, or the weights are too large for a library.
    """
    weights = weights or {}
    total = sum(w.nbytes for w in weights.values())
    if total > _MAX_WEIGHTS:
        raise TargetError(
            f"{total} bytes of weights are too many for a library, which holds {_MAX_WEIGHTS}: keep them in the model (weights='model')"
        )
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        table, objects, script, library = (work / n for n in ("table.c", "kernels.o", "exports.map", "library.so"))
        sizes = {digest: w.nbytes for digest, w in weights.items()}
        table.write_text(tables(operators, target.features, sizes), encoding="utf-8")
        store = work / "weights.c"
        store.write_text("".join(_store(work, digest, w) for digest, w in weights.items()), encoding="utf-8")
        objects.write_bytes(compile_kernels([k.func for k in kernels], target.tvm))
        script.write_text(f"{{ global: {_EXPORT}; local: *; }};\n", encoding="utf-8")
        shared = runtime()
        sources = [
            *sorted(NATIVE.glob("*.c")),
            shared / "src/posix/cpu.c",
            table,
            *([store] if weights else []),
            objects,
        ]
        includes = [f"-I{folder}" for folder in (NATIVE, shared / "src", shared / "include")]
        command = [*linker(target.triple), *_FLAGS, *includes, *_LINK, f"-Wl,--version-script={script}", *flags]
        done = subprocess.run(
            [*command, *map(str, sources), "-o", str(library)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise TargetError(
                f"the operator library does not build for {target.triple} with `{' '.join(command[:3])}`: "
                f"{done.stderr.strip()}"
            )
        return library.read_bytes()


def _store(work: Path, digest: str, weight: Array) -> str:
    """Writes a weight to a file, and the C source that puts it into the library."""
    file = work / f"{digest}.bin"
    file.write_bytes(np.ascontiguousarray(weight).tobytes())
    return _STORE.format(name=f"coda_weight_{digest}", file=file)
