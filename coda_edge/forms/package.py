"""``package``: a model in the form that a program wants it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from ..errors import TargetError
from ..files import atomic, made_folder
from ..targets import Target, get
from ..targets.target import LINUX
from . import sources, toolchain
from .compiled import Compiled, compile_model
from .linked import LinkedModel

if TYPE_CHECKING:
    from ..driver import Model, Progress


@dataclass(frozen=True)
class Files:
    """What a program is given: files by name. ``max_rel_error``: of the product, as it ran here; None if it could not or need not."""

    name: str
    contents: Mapping[str, bytes]
    max_rel_error: float | None

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes each file into ``folder``, whole or not at all. Raises FileError where that cannot be."""
        for name, data in self.contents.items():
            made_folder(Path(folder, name).parent)
            with atomic(Path(folder, name)) as part:
                part.write_bytes(data)


def package(
    model: Model,
    form: str,
    target: str = "native",
    name: str | None = None,
    shapes: Mapping[str, tuple[int | str, ...]] | None = None,
    bare: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> Files:
    """``model`` in a form of ``FORMS``, with the runtime inside.

    ``name``: what its symbols begin with; by default that of the file. ``bare``: without an operating system: one thread, memory of
    the caller's; the form ``c`` and targets of systems other than Linux always are. ``shapes`` pins input dimensions. ``verify``: what
    comes out is run here, if it can be, and compared with onnxruntime.

    Raises InvalidModel, ShapeError, UnsupportedOperator, TargetError or VerificationError.
    """
    if form not in FORMS:
        raise TargetError(f"'{form}' is no form: choose one of {', '.join(FORMS)}")
    return FORMS[form](_Request(model, target, name, shapes, bare, verify, progress))


@dataclass(frozen=True)
class _Request:
    """The arguments of ``package``."""

    model: Model
    target: str
    name: str | None
    shapes: Mapping[str, tuple[int | str, ...]] | None
    bare: bool
    verify: bool
    progress: Progress | None

    def compiled(self, target: Target) -> Compiled:
        """The model for ``target``."""
        return compile_model(self.model, target, self.name, self.shapes, self.verify, self.progress)

    def platform(self, target: Target) -> str:
        """What the runtime stands on."""
        return "bare" if self.bare or target.system != LINUX else "posix"


def _bundle(request: _Request) -> Files:
    from ..bundle.writer import to_bytes
    from ..driver import optimize
    from .compiled import default_name

    optimized = optimize(request.model, request.target, request.shapes, request.verify, request.progress)
    name = request.name or default_name(request.model, optimized.graph.name)
    return Files(name, {f"{name}.coda": to_bytes(optimized.bundle)}, optimized.report.max_rel_error)


def _shared(request: _Request) -> Files:
    target = get(request.target)
    if not target.loadable:
        raise TargetError(
            f"a shared library is not built for {target.name}: take the form static, and let the app link it"
        )
    compiled = request.compiled(target)
    with tempfile.TemporaryDirectory() as folder:
        objects = _objects(compiled, request.platform(target), Path(folder))
        library = Path(folder, f"lib{compiled.name}.so")
        _link(compiled, objects, library)
        error = _verified(compiled, library)
        contents = {library.name: library.read_bytes()}
    return Files(compiled.name, contents | _headers(compiled), error)


def _static(request: _Request) -> Files:
    target = get(request.target)
    compiled = request.compiled(target)
    with tempfile.TemporaryDirectory() as folder:
        objects = _objects(compiled, request.platform(target), Path(folder))
        library = Path(folder, f"lib{compiled.name}.a")
        toolchain.archive(objects, library, target)
        error = None
        if compiled.verifier is not None and not target.missing():
            _link(compiled, objects, Path(folder, "check.so"))
            error = _verified(compiled, Path(folder, "check.so"))
        contents = {library.name: library.read_bytes()}
    return Files(compiled.name, contents | _headers(compiled), error)


def _c(request: _Request) -> Files:
    from .c_kernels import C11, c_source

    compiled = request.compiled(C11)
    name = compiled.name
    weights = sources.array(f"static const _Alignas(64) uint64_t {name}_constants", compiled.constants)
    contents = {
        f"{name}.c": sources.tables(compiled, weights).encode(),
        f"{name}_kernels.c": c_source(compiled).encode(),
        **_headers(compiled),
        **{f"coda/{p.name}": sources.runtime_text(p).encode() for p in sources.runtime_sources("bare")},
        **{f"coda/{p.name}": p.read_bytes() for p in sources.runtime_headers()},
    }
    error = None
    if request.verify:
        host = get()
        with tempfile.TemporaryDirectory() as folder:
            Files(name, contents, None).save(folder)
            library = Path(folder, "check.so")
            files = [str(p) for p in sorted(Path(folder).rglob("*.c"))]
            command = [*toolchain.compiler(host), "-O2", f"-I{folder}", "-shared", *files, "-o", str(library)]
            toolchain.run(command, "the model", host.triple)
            error = _verified(compiled, library)
    return Files(name, contents, error)


FORMS: dict[str, Callable[[_Request], Files]] = {"bundle": _bundle, "shared": _shared, "static": _static, "c": _c}
"""A file that the runtime opens; a library; an archive to link; sources to compile."""


def _headers(compiled: Compiled) -> dict[str, bytes]:
    coda = sources.runtime() / "include" / "coda.h"
    return {f"{compiled.name}.h": sources.header(compiled).encode(), "coda.h": coda.read_bytes()}


def _objects(compiled: Compiled, platform: str, folder: Path) -> list[Path]:
    """The objects of a linked model: runtime, tables, weights, kernels."""
    from ..lower.abi import compile_kernels

    name, weights = compiled.name, folder / "weights.bin"
    (folder / f"{name}.h").write_text(sources.header(compiled), encoding="utf-8")
    (folder / f"{name}.c").write_text(
        sources.tables(compiled, f"extern const uint64_t {name}_constants[];"), encoding="utf-8"
    )
    (folder / f"{name}_weights.S").write_text(sources.assembly(compiled, weights), encoding="utf-8")
    compiled.constants.tofile(weights)
    objects = toolchain.compile_runtime(compiled.target, platform, __version__, folder)
    objects += toolchain.compile_tables(compiled.target, folder, [folder / f"{name}.c", folder / f"{name}_weights.S"])
    if compiled.kernels:
        kernels = folder / f"{name}_kernels.o"
        functions = [
            kernel.func.with_attr("global_symbol", sources.kernel_name(compiled, symbol))
            for symbol, kernel in compiled.kernels.items()
        ]
        kernels.write_bytes(compile_kernels(functions, compiled.target.tvm, hosted=True))
        objects.append(kernels)
    return objects


def _link(compiled: Compiled, objects: list[Path], library: Path) -> None:
    """A shared library that exports the model and the runtime's interface, and uses its own runtime."""
    script = library.with_suffix(".map")
    script.write_text(f"{{ global: coda_*; {compiled.name}_model; local: *; }};\n", encoding="utf-8")
    flags = (
        "-shared",
        "-s",
        "-pthread",
        "-Wl,--gc-sections",
        "-Wl,-Bsymbolic",
        "-Wl,-z,noexecstack",
        f"-Wl,--version-script={script}",
    )
    command = [*toolchain.compiler(compiled.target), *flags, *map(str, objects), "-o", str(library)]
    toolchain.run(command, "the library", compiled.target.triple)


def _verified(compiled: Compiled, library: Path) -> float | None:
    """The worst error of a library, as it runs here."""
    verifier = compiled.verifier
    if verifier is None or verifier.random or (compiled.target.triple != "any" and compiled.target.missing()):
        return None
    with LinkedModel(library, compiled.name) as model:
        return verifier.check(model.run, f"the form for {compiled.target.name}")
