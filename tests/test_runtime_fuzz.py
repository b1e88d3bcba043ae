"""Seconds of what ``tests/fuzzing.py`` does at length: mutated bundles and plans, under sanitizers."""

from __future__ import annotations

from pathlib import Path

import fuzzing
import pytest


@pytest.mark.parametrize("guided", [False, True], ids=["driver", "libFuzzer"])
def test_no_input_does_more_than_end_in_an_error(guided: bool, tmp_path: Path) -> None:
    fuzzer = fuzzing.build(tmp_path, guided)
    if fuzzer is None or fuzzer.guided != guided:
        pytest.skip("needs a C compiler with sanitizers" if fuzzer is None else "needs Clang with libFuzzer")
    found = tmp_path / "found"
    found.mkdir()
    corpus = [found, fuzzing.CORPUS, fuzzing.write_seeds(tmp_path / "seeds")]
    inputs = sum(len(list(folder.iterdir())) for folder in corpus)
    assert len(list(fuzzing.CORPUS.iterdir())) >= 50
    assert fuzzer.run(corpus, 2, 0, tmp_path) >= inputs, "each was run, and more"
