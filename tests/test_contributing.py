"""The examples in CONTRIBUTING.md work, and their tests pass."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import rewriting
from coda_edge.passes import PIPELINE

_BLOCKS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(), flags=re.DOTALL
)
_PASS, _EXAMPLES = "\n".join(_BLOCKS[:2]), _BLOCKS[2:]


def _names() -> dict[str, object]:
    """What the tests in the examples are written with."""
    return {"np": np, "PIPELINE": PIPELINE, **{n: getattr(rewriting, n) for n in ("model", "rewrite", "normal")}}


def _run(namespace: dict[str, object], name: str) -> None:
    test = namespace[name]
    assert callable(test)
    test()


def _namespace() -> dict[str, object]:
    example = ModuleType("coda_edge.passes.join_scales")
    example.__package__ = "coda_edge.passes"
    exec(_BLOCKS[0], example.__dict__)
    constants = {"two": np.float32(2), "half": np.float32(0.5), "huge": np.float32(1e30)}
    names = {**_names(), "join_scales": example, "CONSTANTS": constants}
    exec(_BLOCKS[1], names)
    return names


@pytest.mark.parametrize("name", re.findall(r"def (test_\w+)", _PASS))
def test_example_of_a_pass(name: str) -> None:
    _run(_namespace(), name)


@pytest.mark.parametrize("block", _EXAMPLES, ids=lambda b: re.findall(r"def (test_\w+)", b)[0])
def test_example(block: str) -> None:
    namespace = _names()
    exec(block, namespace)
    for name in re.findall(r"def (test_\w+)", block):
        _run(namespace, name)


def test_a_scale_that_others_read_stays() -> None:
    text = "g (float[N, 7] x) => (float[N, 7] y, float[N, 7] a) { a = Mul(two, x) y = Mul(a, half) }"
    namespace = _namespace()
    done = rewriting.rewrite(rewriting.model(text, namespace["CONSTANTS"]), [namespace["join_scales"].PASS])
    assert done.ops() == {"Mul": 2}
    assert done.error({"x": rewriting.normal(3, 7)}) == 0.0
