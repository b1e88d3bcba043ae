"""Targets: the registry, what `native` is, and what a kernel library contains."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kernel_harness import Library
from tvm import tirx

from coda_edge import targets
from coda_edge.errors import TargetError
from coda_edge.lower.body import Body, external, f32, index, load
from coda_edge.lower.kernel import KernelSource
from coda_edge.targets import link, objects, target


def doubling(symbol: str, lanes: int, factor: float = 2.0) -> KernelSource:
    """y[:n] = factor · x[:n] for n a multiple of ``lanes``."""
    x, y, n = external("x"), external("y"), tirx.Var("n", "int64")
    body = Body()
    with body.loop(0, tirx.floordiv(n, index(lanes))) as i:
        body.store(y, i * lanes, load(x, i * lanes, lanes) * f32(factor))
    return KernelSource(symbol, lambda: body.function(symbol, [x, y, n]))


def exports(elf: bytes) -> list[str]:
    """The defined dynamic symbols of a library."""
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + i * size) for i in range(count)]
    table = next(s for s in sections if s[1] == 11)
    names = sections[table[6]][4]
    found = []
    for at in range(table[4] + table[9], table[4] + table[5], table[9]):
        name, _, _, where = struct.unpack_from("<IBBH", elf, at)
        if where:
            found.append(elf[names + name : elf.index(0, names + name)].decode())
    return sorted(found)


def test_registry() -> None:
    assert {"x86-64-v2", "x86-64-v3", "x86-64-v4"} <= set(targets.targets())
    assert targets.names()[0] == "native"
    for name, found in targets.targets().items():
        assert found.name == name and targets.get(name) is not None and found.vector % 4 == 0


def test_unknown_target_lists_the_known() -> None:
    with pytest.raises(TargetError, match=r"unknown target 'pentium': choose one of native, .*x86-64-v2"):
        targets.get("pentium")


def test_native_is_the_best_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    known = targets.targets()
    for name in ("x86-64-v2", "x86-64-v3", "x86-64-v4"):
        monkeypatch.setattr(target, "cpu_features", lambda name=name: known[name].features)
        assert targets.get().name == name
    monkeypatch.setattr(target, "cpu_features", lambda: ("sse3",))
    with pytest.raises(TargetError, match="no target runs on this CPU"):
        targets.get()


def test_missing_features_are_named() -> None:
    v3 = targets.get("x86-64-v3")
    assert v3.missing([f for f in v3.features if f != "fma"]) == ("fma",)
    assert v3.missing(v3.features) == ()


@pytest.mark.parametrize("found", targets.targets().values(), ids=lambda t: t.name)
def test_library(found: targets.Target) -> None:
    """Equal symbols are built once; only kernels are exported, nothing is imported, and it does what it should."""
    if not found.triple.startswith("x86_64") or found.missing():
        pytest.skip("not for this CPU")
    lanes = found.lanes(4)
    data = found.build([doubling("two", lanes), doubling("three", lanes, 3.0), doubling("two", lanes)])
    assert exports(data) == ["three", "two"] and link.undefined_symbols(data) == ()
    assert len(data) < 16 << 10
    x, y = np.arange(4 * lanes, dtype=np.float32), np.zeros(4 * lanes, np.float32)
    library = Library(data)
    for symbol, factor in (("two", 2), ("three", 3)):
        assert library.call(symbol, [x, y], [x.size]) == 0
        np.testing.assert_array_equal(y, factor * x)


def test_builds_are_reproducible() -> None:
    found = targets.get("x86-64-v3")
    assert found.build([doubling("two", 8)]) == found.build([doubling("two", 8)])


def test_without_a_system_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ziglang")
    monkeypatch.setattr(link.shutil, "which", lambda name: None)
    data = targets.get("x86-64-v3").build([doubling("two", 8)])
    assert exports(data) == ["two"]


def test_a_kernel_that_needs_a_library_is_refused() -> None:
    x, y = external("x"), external("y")
    body = Body()
    body.store(y, 0, tirx.call_extern("float32", "cosf", load(x, 0)))
    with pytest.raises(TargetError, match="cosf"):
        targets.get("x86-64-v3").build([KernelSource("k", lambda: body.function("k", [x, y]))])


@pytest.mark.parametrize("make", [targets.Target.build, targets.Target.objects])
def test_nothing_to_build(make: Callable[[targets.Target, list[KernelSource]], bytes]) -> None:
    with pytest.raises(TargetError, match="no kernel"):
        make(targets.get("x86-64-v3"), [])


OBJECTS = {
    "arm64-apple-ios": "macho",
    "arm64-apple-macos": "macho",
    "x86-64-macos": "macho",
    "x86-64-windows": "coff",
    "x86-64-v3": "elf",
    "arm64-android": "elf",
    "riscv64-linux": "elf",
}
"""Targets, and the formats of their objects."""


@pytest.mark.parametrize("name", OBJECTS)
def test_objects(name: str) -> None:
    """In the system's format; what is undefined is found in each, and refused."""
    found = targets.get(name)
    data = found.objects([doubling("two", 4), doubling("three", 4, 3.0), doubling("two", 4)])
    assert objects.format_of(data) == OBJECTS[name] and objects.undefined(data) == ()
    x, y = external("x"), external("y")
    body = Body()
    body.store(y, 0, tirx.call_extern("float32", "a_function_with_a_long_name", load(x, 0)))
    body.store(y, 1, tirx.call_extern("float32", "cosf", load(x, 0)))
    with pytest.raises(TargetError, match=f"kernels for {name} need symbols .*: a_function_with_a_long_name, cosf"):
        found.objects([KernelSource("k", lambda: body.function("k", [x, y]))])


def test_other_bytes_are_no_object() -> None:
    with pytest.raises(
        TargetError, match=r"no little-endian 64-bit object of ELF, Mach-O, COFF: it begins with 64657821"
    ):
        objects.undefined(b"dex!")


def test_systems_without_libraries_say_what_there_is() -> None:
    windows = targets.get("x86-64-windows")
    assert not windows.loadable and windows.missing()[0] == "windows"
    with pytest.raises(TargetError, match=r"'x86-64-windows' has no libraries of kernels .* --form static.*x86-64-v3"):
        windows.build([doubling("two", 8)])


LINKED = {
    "arm64-apple-macos": (b"\xcf\xfa\xed\xfe", "_start"),
    "x86-64-macos": (b"\xcf\xfa\xed\xfe", "_start"),
    "x86-64-windows": (b"MZ", "start"),
}
"""Systems whose programs link here: how those begin, and the symbol of the function ``start``."""
PROGRAM = """
#include <stdint.h>
int32_t two(const uint64_t *, const int64_t *);
int start(void) { float x, y; return two((uint64_t[]){(uintptr_t)&x, (uintptr_t)&y}, (int64_t[]){0}); }
"""


@pytest.mark.parametrize("name", LINKED)
def test_objects_link_into_programs(name: str, tmp_path: Path) -> None:
    """Of C without a library, so that nothing but the kernels can define what they need."""
    pytest.importorskip("ziglang")
    found, (magic, entry) = targets.get(name), LINKED[name]
    (tmp_path / "kernels.o").write_bytes(found.objects([doubling("two", 8)]))
    (tmp_path / "main.c").write_text(PROGRAM)
    alone = ("-nostdlib", "-ffreestanding", "-fno-stack-protector", "-fno-sanitize=undefined", f"-Wl,-e,{entry}")
    command = [sys.executable, "-m", "ziglang", "cc", "-target", found.triple, *alone]
    done = subprocess.run(
        [*command, "main.c", "kernels.o", "-o", "program"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "program").read_bytes().startswith(magic)


def test_wide_vectors_are_used_where_the_target_has_them() -> None:
    """The code generator prefers 256-bit registers for AVX-512 CPUs unless vectors are explicit, as ours are."""
    import tvm

    from coda_edge.epilogue import library
    from coda_edge.lower.gemm import lower_gemm

    for name, register in (("x86-64-v3", "ymm"), ("x86-64-v4", "zmm")):
        found = targets.get(name)
        call = lower_gemm(found, "g", library.bias.program, "a", np.ones((64, 384), np.float32), ["b"], ["y"], 8)
        module = tvm.IRModule({call.kernel.symbol: call.kernel.func})
        built = tvm.tirx.build(module, target=dict(found.tvm), pipeline="coda_kernel")
        multiplies = [line for line in built.inspect_source("s").splitlines() if "vfmadd" in line]
        assert multiplies and all(f"%{register}" in line for line in multiplies)
