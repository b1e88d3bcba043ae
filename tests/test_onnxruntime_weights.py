"""Constants of packaged models: in the kernels' layout, undone without a library, or in the library, and never twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
from halves import to_half
from kernel_harness import VECTOR_TARGETS
from onnx import TensorProto, helper, numpy_helper
from rewriting import model, normal
from test_onnxruntime import failure
from test_weights import WEIGHTS
from test_whole_numbers import SPELLED, TABLES

from coda_edge.epilogue import library
from coda_edge.ir import Array
from coda_edge.lower.gemm import lower_gemm
from coda_edge.lower.kernel import Packed
from coda_edge.onnxruntime import Packaged, package
from coda_edge.onnxruntime.constants import Layout, part_of
from coda_edge.onnxruntime.packaging import session
from coda_edge.symbolic import symbol
from coda_edge.verify import ort_session, relative_error
from coda_edge.weights import FactoredConstant, Weight


def _undone(layout: Layout) -> Array:
    """What onnxruntime makes of a layout by its standard operators."""
    names = [f"part{i}" for i in range(len(layout.parts))]
    tensors = [numpy_helper.from_array(data, name) for name, data in zip(names, layout.parts.values(), strict=True)]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, list(layout.tensor.shape))
    graph = helper.make_graph(layout.undo(names, "y"), "g", [], [result], tensors)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    (value,) = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {})
    return np.asarray(value)


def _layout(tensor: gs.Constant, op: str, packed: list[Packed]) -> Layout:
    """The layout of the second input of a node ``g`` whose kernels read ``packed``."""
    node = gs.Node(op, "g", inputs=[gs.Variable("x"), tensor])
    found = [part_of(p, node) for p in packed]
    assert {place[0] for place in found if place is not None} == {1} and None not in found
    parts = {place[1]: p.data for place, p in zip(found, packed, strict=True) if place is not None}
    return Layout(tensor, parts, packed[0].columns)


@pytest.mark.parametrize("target", VECTOR_TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("form", ["float32", *WEIGHTS])
def test_panels_are_undone_to_the_last_bit(form: str, target) -> None:
    for name, n, k in (("swiglu", 100, 40), ("bias_residual_moments", 131, 37), ("bias_gelu", 8, 5)):
        if "centred" not in form and n % 2 and name == "swiglu":
            continue
        weight = Weight(normal(k, n)) if form == "float32" else WEIGHTS[form](n, k)
        program = getattr(library, name).program
        names = [p.name for p in program.params[1:]]
        call = lower_gemm(target, "g", program, "x", weight, names, [o.name for o in program.outputs], symbol("M"))
        tensor = FactoredConstant("w", weight.value(), weight)
        layout = _layout(tensor, "Gemm", [b for b in call.buffers if isinstance(b, Packed)])
        assert np.array_equal(_undone(layout), weight.value())


def _half_checkpoint() -> onnx.ModelProto:
    table, w = (normal(*dims).astype(np.float16).astype(np.float32) for dims in ((50, 32), (32, 40)))
    return model("g (int64[n] i) => (float[n, 40] y) { x = Gather (t, i) y = MatMul (x, w) }", {"t": table, "w": w})


def _spelled(name: str) -> onnx.ModelProto:
    text, constants, opset, _ = SPELLED[name]
    return model(text, constants, opset)


def _looked_up(name: str) -> onnx.ModelProto:
    made, constants, opset = TABLES[name]
    text = f"g (int64[b, s] i) => (float[b, s, 36] y) {{ {made} r = Gather (t, i) y = Tanh (r) }}"
    return model(text, constants, opset)


#: Models, and inputs of them.
NARROW: dict[str, tuple[onnx.ModelProto, dict[str, Array]]] = {
    "half": (_half_checkpoint(), {"i": np.array([3, 0, 49])}),
    "bytes in columns": (_spelled("cast, scale of columns"), {"x": normal(6, 50)}),
    "4 bits in blocks": (_spelled("dequantised in blocks of 4 bits with zero points"), {"x": normal(6, 50)}),
    "table of bytes": (_looked_up("bytes"), {"i": np.array([[0, 40, -41]])}),
    "table of 4 bits": (_looked_up("blocks of 4 bits"), {"i": np.array([[0, 40, 7]])}),
}


def _bytes(m: onnx.ModelProto) -> int:
    return sum(len(t.raw_data) for t in m.graph.initializer)


@pytest.mark.parametrize("name", NARROW)
def test_narrow_weights_stay_narrow_wherever_they_are(name: str, tmp_path: Path) -> None:
    source, feeds = NARROW[name]
    (expected,) = ort_session(source).run(None, feeds)
    with_weights = package(source, verify=False)
    assert with_weights.operators and not with_weights.functions
    assert _bytes(with_weights.model) <= 1.1 * _bytes(source) + 512
    assert not any(node.op_type == "Cast" for node in with_weights.model.graph.node)
    library = tmp_path / "m.so"
    library.write_bytes(with_weights.library)
    for way in (session(with_weights.model, library), ort_session(with_weights.model)):
        assert relative_error(way.run(None, feeds)[0], expected) < 1e-5
    without = package(source, verify=False, weights="library")
    assert _bytes(without.model) == 0
    library.write_bytes(without.library)
    assert relative_error(session(without.model, library).run(None, feeds)[0], expected) < 1e-5


@pytest.fixture(scope="module")
def in_library(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Packaged, Path]:
    packaged = package(onnx.load(tiny_model), weights="library")
    library = tmp_path_factory.mktemp("in_library") / "m.so"
    library.write_bytes(packaged.library)
    return packaged, library


def test_a_library_with_the_weights_is_verified_and_valid(in_library: tuple[Packaged, Path]) -> None:
    packaged, _ = in_library
    assert packaged.max_rel_error is not None and packaged.max_rel_error < 1e-5
    onnx.checker.check_model(packaged.model)
    assert not any(f.name.startswith("Gemm") for f in packaged.model.functions)
    assert _bytes(packaged.model) == 0


def test_a_model_without_weights_needs_its_library(in_library: tuple[Packaged, Path]) -> None:
    packaged, _ = in_library
    name = next(iter(packaged.operators.values()))
    assert name in failure(lambda: ort_session(packaged.model))


def test_weights_that_a_library_does_not_hold_are_named(in_library: tuple[Packaged, Path]) -> None:
    packaged, library = in_library
    other = onnx.ModelProto()
    other.CopyFrom(packaged.model)
    node = next(n for n in other.graph.node if n.op_type.startswith("Gemm"))
    attribute = next(a for a in node.attribute if a.name == "weights")
    digest = attribute.s.decode().split()[0]
    for changed in ("0123456789abcdef", digest[:15], ""):
        attribute.s = attribute.s.replace(digest.encode(), changed.encode())
        message = failure(lambda: session(other, library))
        assert f"does not hold its weights '{changed.split(' ')[0]}'" in message
        assert "use the model and the library of one build" in message
        attribute.s = " ".join([digest, *attribute.s.decode().split()[1 if changed else 0 :]]).encode()


def test_half_models_of_both_ways(tmp_path: Path, tiny_model: Path) -> None:
    half = to_half(onnx.load(tiny_model))
    packaged = package(half)
    assert packaged.max_rel_error is not None and packaged.max_rel_error < 1e-3
    assert _bytes(packaged.model) < 1.25 * _bytes(half)
    wide = [
        t.name for t in packaged.model.graph.initializer if t.data_type == TensorProto.FLOAT and len(t.raw_data) > 4096
    ]
    assert wide == []


_MEMORY = """
import sys
import numpy as np, onnxruntime as ort

def resident():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Rss:")) * 1024

options = ort.SessionOptions()
options.intra_op_num_threads = 1
if len(sys.argv) > 2:
    options.register_custom_ops_library(sys.argv[2])
before = resident()
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
session.run(None, {"x": np.ones((2, 2048), np.float32)})
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux to tell what memory is resident")
def test_weights_are_in_memory_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model's file, in one beside it, or in the library: what a session takes is the weights and little more."""
    constants = {f"w{i}": normal(2048, 2048, seed=i) for i in range(3)}
    text = "g (float[n, 2048] x) => (float[n, 2048] y) { a = MatMul (x, w0) b = MatMul (a, w1) y = MatMul (b, w2) }"
    weights = sum(w.nbytes for w in constants.values())
    source = model(text, constants)
    for where, limit in (("model", 1 << 31), ("model", 0), ("library", 0)):
        packaged = package(source, verify=False, weights="library" if where == "library" else "model")
        monkeypatch.setattr("coda_edge.onnxruntime.packaging.INLINE_LIMIT", limit)
        files = tmp_path / "m.onnx", tmp_path / "m.so"
        packaged.save(*files)
        assert (tmp_path / "m.onnx.data").exists() == (where == "model" and limit == 0)
        done = subprocess.run(
            [sys.executable, "-c", _MEMORY, *map(str, files)], capture_output=True, text=True, check=True
        )
        assert weights <= int(done.stdout) < 1.4 * weights
        for file in tmp_path.iterdir():
            file.unlink()
