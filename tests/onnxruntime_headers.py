"""onnxruntime's official headers: those that are installed, or of Debian's package, which is fetched once into ``build/``.

Nothing of them is in this repository; tests compare our declarations with them, and compile a C++ program against them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

HEADER = "onnxruntime_c_api.h"
_PACKAGE = "libonnxruntime-dev"
_SUITE = "sid"
_BUILD = Path(__file__).resolve().parent.parent / "build"
_INSTALLED = ("/usr/include/onnxruntime", "/usr/local/include/onnxruntime", "/usr/include", "/usr/local/include")


def find() -> Path | str:
    """The headers' folder, or why there is none. ``ONNXRUNTIME_INCLUDE`` names one that goes before all others."""
    named = os.environ.get("ONNXRUNTIME_INCLUDE")
    for folder in map(Path, [named] if named else _INSTALLED):
        if (folder / HEADER).is_file():
            return folder
    folder = _BUILD / "onnxruntime-headers"
    if not (folder / HEADER).is_file():
        try:
            _fetch(folder)
        except (OSError, subprocess.SubprocessError) as error:
            return f"onnxruntime's headers are not installed, and Debian's package cannot be had: {error}"
    return folder


def _fetch(folder: Path) -> None:
    """Unpacks the package's headers into ``folder``; the system's own lists and packages stay as they are."""
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise OSError("there is no apt-get")
    listed = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian"]
    places = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
    mirror = next((place for place in sorted(places) if "security" not in place), None)
    if mirror is None:
        raise OSError("apt-get knows no archive of Debian's: run apt-get update first")
    with tempfile.TemporaryDirectory() as work:
        for name in ("lists/partial", "cache/archives/partial"):
            Path(work, name).mkdir(parents=True)
        source = Path(work, "debian.list")
        source.write_text(
            f"deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {mirror} {_SUITE} main\n", encoding="utf-8"
        )
        options = {
            "Dir::Etc::sourcelist": source,
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::State::lists": f"{work}/lists",
            "Dir::Cache": f"{work}/cache",
            "APT::Sandbox::User": "root",
        }
        apt = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in options.items())]
        for command in ([*apt, "update"], [*apt, "download", _PACKAGE]):
            subprocess.run(command, cwd=work, capture_output=True, check=True, timeout=120)
        (package,) = Path(work).glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", package, f"{work}/unpacked"], check=True, capture_output=True)
        part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(Path(work, "unpacked/usr/include/onnxruntime"), part)
        try:
            part.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(part)
