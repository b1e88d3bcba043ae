"""The C sources of a linked model: its header, its tables, its weights; and those of the runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .. import __version__
from ..bundle.plan import ExecutionPlan, TensorInfo
from ..bundle.writer import encode_plan, encode_strings
from ..errors import TargetError
from .compiled import Compiled, identifier

_WORDS_A_LINE = 6
_OF_BUNDLES = frozenset({"bundle", "cuda", "ed25519", "loader", "open", "sha256", "sha512"})
_OF_SYSTEMS = frozenset({"clock", "cores"})
_PACKAGE = Path(__file__).resolve().parent.parent


def runtime() -> Path:
    """The folder of the runtime's sources: in an installed package, or beside it where it is used from its repository."""
    for folder in (_PACKAGE / "runtime", _PACKAGE.parent / "runtime"):
        if (folder / "src" / "session.c").exists():
            return folder
    raise TargetError(
        f"the runtime's C sources are neither in {_PACKAGE} nor beside it: install the package again, or its repository"
    )


def runtime_sources(platform: str) -> list[Path]:
    """The C files of the runtime without what opens bundles; ``platform``: ``posix`` or ``bare``."""
    source = runtime() / "src"
    parts = (*sorted(source.glob("*.c")), *sorted((source / platform).glob("*.c")))
    return [path for path in parts if path.stem not in _OF_BUNDLES]


def runtime_headers() -> list[Path]:
    """The headers that the runtime has inside, as far as a program without an operating system needs them."""
    return [path for path in sorted((runtime() / "src").glob("*.h")) if path.stem not in {*_OF_BUNDLES, *_OF_SYSTEMS}]


def runtime_text(path: Path) -> str:
    """A C file of the runtime, as it is given away: it knows its version."""
    return path.read_text(encoding="utf-8").replace(
        '#define CODA_VERSION_TEXT "unknown"', f'#define CODA_VERSION_TEXT "{__version__}"'
    )


def header(compiled: Compiled) -> str:
    """``NAME.h``: the numbers of inputs and outputs, and how to open the model."""
    name, upper, plan = compiled.name, compiled.name.upper(), compiled.plan
    lines = [
        f"/* {name}: a model that is linked into the program. Built for {compiled.target.name} by coda-edge {__version__}.",
        " *",
        *_described("input", plan, plan.inputs),
        *_described("output", plan, plan.outputs),
        f" * {compiled.constants.nbytes} bytes of weights.",
        " */",
        f"#ifndef CODA_MODEL_{upper}_H",
        f"#define CODA_MODEL_{upper}_H",
        "",
        '#include "coda.h"',
        "",
        "#ifdef __cplusplus",
        'extern "C" {',
        "#endif",
        "",
        "/* Places in the arrays of tensors that coda_session_run takes. */",
        f"enum {{ {', '.join([*_places(upper, 'IN', plan.inputs), f'{upper}_INPUTS'])} }};",
        f"enum {{ {', '.join([*_places(upper, 'OUT', plan.outputs), f'{upper}_OUTPUTS'])} }};",
        "",
        f"CODA_API extern const coda_linked_model {name}_model;",
        "",
        "/* Opens the model; `options` may be NULL where there is a system to ask for memory. */",
        f"static inline coda_code {name}_open(const coda_model_options *options, coda_model **model, coda_error *error) {{",
        f"  return coda_model_open_linked(&{name}_model, options, model, error);",
        "}",
        "",
        "#ifdef __cplusplus",
        "}",
        "#endif",
        "#endif",
    ]
    return "\n".join(lines) + "\n"


def _described(what: str, plan: ExecutionPlan, tensors: Sequence[TensorInfo]) -> Iterator[str]:
    for tensor in tensors:
        sizes = ", ".join(_size(plan, dim) for dim in tensor.dims)
        yield f" * {what} {_comment(tensor.name)}: {tensor.dtype} [{_comment(sizes)}]"


def _comment(text: str) -> str:
    """``text`` as it may stand in a C comment."""
    return text.replace("*/", "* /").replace("/*", "/ *").replace("\n", " ")


def _size(plan: ExecutionPlan, entry: int) -> str:
    return str(plan.exprs.text(entry))


def _places(upper: str, side: str, tensors: Sequence[TensorInfo]) -> list[str]:
    names = [identifier(tensor.name).upper() for tensor in tensors]
    return [f"{upper}_{side}_{n if names.count(n) == 1 else f'{n}_{i}'}" for i, n in enumerate(names)]


def tables(compiled: Compiled, constants: str) -> str:
    """``NAME.c``: the plan as bytes, the table of kernels, and the linked model. ``constants``: C text that declares them."""
    name = compiled.name
    texts = {
        "target": encode_strings((compiled.target.name, *compiled.target.features)),
        "metadata": encode_strings(text for item in compiled.metadata.items() for text in item),
        "plan": encode_plan(compiled.plan),
    }
    kernels = [kernel_name(compiled, symbol) for symbol in compiled.kernels]
    lines = [
        "/* The tables of a linked model, made by coda-edge. */",
        f'#include "{name}.h"',
        "",
        constants,
        *(f"int32_t {kernel}(const uint64_t *buffers, const int64_t *ints);" for kernel in kernels),
        f"static const coda_kernel KERNELS[] = {{{', '.join(kernels or ['0'])}}};",
        *(array(f"static const uint64_t {key.upper()}", np.frombuffer(data, np.uint8)) for key, data in texts.items()),
        f"const coda_linked_model {name}_model = {{",
        "    .abi = CODA_LINKED_VERSION,",
        f"    .kernel_count = {len(kernels)},",
        "    .kernels = KERNELS,",
        "    .plan = (const uint8_t *)PLAN,",
        f"    .plan_bytes = {len(texts['plan'])},",
        f"    .constants = (const uint8_t *){name}_constants,",
        f"    .constant_bytes = {compiled.constants.nbytes},",
        "    .target = (const char *)TARGET,",
        f"    .target_bytes = {len(texts['target'])},",
        "    .metadata = (const char *)METADATA,",
        f"    .metadata_bytes = {len(texts['metadata'])},",
        "};",
    ]
    return "\n".join(lines) + "\n"


def kernel_name(compiled: Compiled, symbol: str) -> str:
    """The name that a kernel has in a program, where other models' may be too."""
    return f"{compiled.name}_{symbol}"


def array(declaration: str, data: npt.NDArray[np.uint8]) -> str:
    """``data`` as a C array of 64-bit words of a little-endian machine, with zeros at its end."""
    words = np.concatenate([data, np.zeros(-data.size % 8 + 8 * (data.size == 0), np.uint8)]).view("<u8").tolist()
    rows = (words[i : i + _WORDS_A_LINE] for i in range(0, len(words), _WORDS_A_LINE))
    body = ",\n".join(
        "  " + ", ".join(f"0x{word:x}u" if word < 1 << 32 else f"0x{word:x}ull" for word in row) for row in rows
    )
    return f"{declaration}[] = {{\n{body}}};"


def assembly(compiled: Compiled, data: Path) -> str:
    """An assembly file whose object holds the bytes of file ``data`` as ``NAME_constants``, aligned to 64, in read-only memory."""
    sections = {"darwin": ".section __TEXT,__const", "windows": '.section .rdata,"dr"'}
    section = sections.get(compiled.target.system, ".section .rodata")
    symbol = f"{'_' if compiled.target.system == 'darwin' else ''}{compiled.name}_constants"
    lines = [section, ".p2align 6", f".globl {symbol}"]
    if compiled.target.system == "linux":
        lines += [f".hidden {symbol}", '.section .note.GNU-stack,"",%progbits', section]
    return "\n".join([*lines, f"{symbol}:", f'.incbin "{data.as_posix()}"', ".byte 0", ""])
