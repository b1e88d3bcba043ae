"""Tries a peer on a model in a process of its own: ``python -m benchmarks.trial PEER MODEL INPUTS.npz FOLDER``.

What it converts or compiles stays in FOLDER for the run that measures. The process writes nothing but an error on its last line.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from .peers import Feeds, Peer, peers

SECONDS = 240
_REASON = "reason: "
_DONE = "tried"


def tried(peer: Peer, model: Path, feeds: Feeds, folder: Path) -> str:
    """Why ``peer`` can't run ``model`` here; empty if it can. What was found is kept in ``folder`` and not tried again."""
    verdict = folder / _DONE
    if verdict.is_file():
        return verdict.read_text()
    folder.mkdir(parents=True, exist_ok=True)
    reason = peer.available() or _in_process(peer, model, feeds, folder)
    verdict.write_text(reason)
    return reason


def _in_process(peer: Peer, model: Path, feeds: Feeds, folder: Path) -> str:
    inputs = folder / "inputs.npz"
    np.savez(inputs, allow_pickle=False, **feeds)
    command = [sys.executable, "-m", "benchmarks.trial", peer.name, str(model), str(inputs), str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"it took more than {SECONDS} s to compile and run"
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"it was ended by signal {-done.returncode}"
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    told = [line for line in lines if line.startswith(_REASON)] or lines[-1:]
    return told[-1].removeprefix(_REASON)


def main(name: str, model: str, inputs: str, folder: str) -> None:
    """Converts, loads and runs once; exits with 1 and the reason if that fails."""
    with np.load(inputs) as stored:
        feeds = {key: stored[key] for key in stored.files}
    peer = peers()[name]
    try:
        peer.prepare(Path(model), feeds, Path(folder))
        peer.load(Path(model), feeds, Path(folder), 1)()
    except Exception as error:  # whatever a peer raises is the reason
        words = " ".join(str(error).split())
        sys.exit(f"{_REASON}{type(error).__name__}: {words[:200]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
