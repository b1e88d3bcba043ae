"""One binary for many releases of onnxruntime: operators of both libraries, their functions, and the execution provider."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime_releases as releases
import pytest
from onnx import helper, numpy_helper

from coda_edge.verify import TOLERANCE


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with an activation between them, of an opset that all the releases know."""
    rng = np.random.default_rng(0)
    constants = {"w": (7, 30), "b": (30,), "v": (30, 41)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["q"]),
        helper.make_node("Gelu", ["q"], ["r"]),
        helper.make_node("MatMul", ["r", "v"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", "n", 7])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", "n", 41])],
        [numpy_helper.from_array(rng.standard_normal(s).astype(np.float32), n) for n, s in constants.items()],
    )
    base = tmp_path_factory.mktemp("releases") / "m"
    releases.write(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), base)
    return base


@pytest.mark.parametrize("release", releases.RELEASES)
def test_one_binary_runs_on(packaged: Path, release: str) -> None:
    try:
        releases.installed(release)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"onnxruntime {release} cannot be had: {error.stderr.strip().splitlines()[-1]}")
    found = releases.errors(packaged, release)
    assert set(releases.WAYS) - found.keys() == ({releases.WAYS[-1]} if release < "1.23" else set())
    assert max(found.values()) <= TOLERANCE
    assert releases.allowed(found) == TOLERANCE
