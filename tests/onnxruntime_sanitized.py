"""The generic library for onnxruntime under the address and undefined behaviour sanitizers: ``python tests/onnxruntime_sanitized.py [PYTEST ARGUMENTS]``.

Builds it with them into ``build/``, and runs the tests of its operators and of the execution provider, or those that are named. Leaks
are not looked for: Python's and onnxruntime's are too many. As a plugin of pytest (``-p``), has tests take that library.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_BUILD = _ROOT / "build" / "onnxruntime-sanitized"
_LIBRARY = _BUILD / "coda_edge" / "onnxruntime" / "native" / "libcoda_onnxruntime.so"
_TESTS = ("tests/test_onnxruntime_regions.py", "tests/test_onnxruntime_provider.py")


def pytest_configure() -> None:
    """Has ``library_path`` name the sanitized library."""
    from coda_edge import _runtime

    _runtime.__file__ = str(_LIBRARY.with_name("_runtime.so"))


def runtimes() -> list[str]:
    """The compiler's sanitizer libraries, to be loaded before all else; empty if it has none."""
    if not shutil.which("cc") or not shutil.which("cmake"):
        return []
    asked = (["cc", f"-print-file-name={name}"] for name in ("libasan.so", "libubsan.so"))
    found = [subprocess.run(a, capture_output=True, text=True, check=True).stdout.strip() for a in asked]
    return found if all("/" in path for path in found) else []


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Builds the library, and runs pytest with ``arguments``. Raises CalledProcessError if it does not build."""
    configure = ["cmake", "-S", _ROOT, "-B", _BUILD, "-DCODA_SANITIZE=address,undefined"]
    for command in (configure, ["cmake", "--build", _BUILD, "--target", "coda_onnxruntime", "--parallel", "2"]):
        subprocess.run(command, check=True, capture_output=True, text=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes()),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-x", "-p", "onnxruntime_sanitized", *arguments]
    return subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)


def main() -> int:
    """Prints what pytest says; returns its code."""
    if not runtimes():
        print("needs cmake and a C compiler with the sanitizers' libraries", file=sys.stderr)
        return 1
    done = run(*(sys.argv[1:] or _TESTS))
    print(done.stdout + done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
