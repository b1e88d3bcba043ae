"""The generic library is clean under sanitizers where it reads what it is given: bundles, models, inputs; all of its tests are a script."""

from __future__ import annotations

import onnxruntime_sanitized
import pytest

_SOME = "data_decides or pinned or another_cpus or altered_context"


@pytest.mark.skipif(not onnxruntime_sanitized.runtimes(), reason="needs cmake and the compiler's sanitizers")
def test_clean_under_sanitizers() -> None:
    done = onnxruntime_sanitized.run(
        "tests/test_onnxruntime_regions.py", "tests/test_onnxruntime_provider.py", "-k", _SOME
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout
