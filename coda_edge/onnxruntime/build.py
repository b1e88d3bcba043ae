"""From operators to the shared library that onnxruntime loads: their tables and kernels, linked with the C sources beside this file."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import TargetError
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


def build(
    operators: Mapping[str, Operator], kernels: Sequence[KernelSource], target: Target, flags: Sequence[str] = ("-s",)
) -> bytes:
    """The library of ``operators`` by name, for onnxruntime on ``target``; ``flags`` are more for the compiler.

    Raises TargetError if there is no compiler for the target, or it refuses the sources.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        table, objects, script, library = (work / n for n in ("table.c", "kernels.o", "exports.map", "library.so"))
        table.write_text(tables(operators, target.features), encoding="utf-8")
        objects.write_bytes(compile_kernels([k.func for k in kernels], target.tvm))
        script.write_text(f"{{ global: {_EXPORT}; local: *; }};\n", encoding="utf-8")
        sources = [*sorted(NATIVE.glob("*.c")), table, objects]
        command = [*linker(target.triple), *_FLAGS, f"-I{NATIVE}", *_LINK, f"-Wl,--version-script={script}", *flags]
        done = subprocess.run(
            [*command, *map(str, sources), "-o", str(library)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise TargetError(
                f"the operator library does not build for {target.triple} with `{' '.join(command[:3])}`: "
                f"{done.stderr.strip()}"
            )
        return library.read_bytes()
