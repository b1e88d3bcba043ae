"""The example in CONTRIBUTING.md is a pass that works, and its tests pass."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import rewriting

_BLOCKS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(), flags=re.DOTALL
)


def _namespace() -> dict[str, object]:
    example = ModuleType("coda_edge.passes.join_scales")
    example.__package__ = "coda_edge.passes"
    exec(_BLOCKS[0], example.__dict__)
    constants = {"two": np.float32(2), "half": np.float32(0.5), "huge": np.float32(1e30)}
    names = {"join_scales": example, "CONSTANTS": constants}
    names |= {name: getattr(rewriting, name) for name in ("model", "rewrite", "normal")}
    exec(_BLOCKS[1], names)
    return names


@pytest.mark.parametrize("name", [name for name in re.findall(r"def (test_\w+)", _BLOCKS[1])])
def test_example(name: str) -> None:
    test = _namespace()[name]
    assert callable(test)
    test()


def test_a_scale_that_others_read_stays() -> None:
    text = "g (float[N, 7] x) => (float[N, 7] y, float[N, 7] a) { a = Mul(two, x) y = Mul(a, half) }"
    namespace = _namespace()
    done = rewriting.rewrite(rewriting.model(text, namespace["CONSTANTS"]), [namespace["join_scales"].PASS])
    assert done.ops() == {"Mul": 2}
    assert done.error({"x": rewriting.normal(3, 7)}) == 0.0
