"""From an ONNX model to what every form is made of: the plan, the constants, and the kernels as functions to compile."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .. import __version__, frontend
from ..bundle import writer
from ..bundle.plan import Bundle, ExecutionPlan, Level
from ..calibrate import measure_on
from ..inputs import bound_specs
from ..noise import seeded
from ..passes import run_pipeline
from ..session import Session
from ..verify import Verifier

if TYPE_CHECKING:
    from ..driver import Model, Progress
    from ..lower.kernel import KernelSource
    from ..targets import Target


@dataclass(frozen=True)
class Compiled:
    """A model for one target. ``name``: a C identifier, which all that is linked into a program begins with.

    ``kernels``: by symbol, in the plan's order. ``constants``: the section of a bundle.
    """

    name: str
    target: Target
    plan: ExecutionPlan
    constants: npt.NDArray[np.uint8]
    kernels: Mapping[str, KernelSource]
    metadata: Mapping[str, str]
    verifier: Verifier | None

    def verify(self, library: bytes) -> float:
        """Compares the kernels in a shared object, as a bundle, with onnxruntime on made-up inputs: the worst error.

        Raises VerificationError if that is too large.
        """
        if self.verifier is None:
            raise ValueError("the model was compiled without verify: there is nothing to compare with")
        level = Level(self.target.name, self.target.features, self.plan, library)
        with Session(writer.to_bytes(Bundle((level,), self.constants, dict(self.metadata))), threads=1) as session:
            return self.verifier.check(seeded(session), f"the kernels for {self.target.name}")


def compile_model(
    model: Model,
    target: Target,
    name: str | None = None,
    shapes: Mapping[str, tuple[int | str, ...]] | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> Compiled:
    """Rewrites ``model`` and lowers it for ``target``. ``shapes`` pins input dimensions; ``name``: by default the file's or the graph's.
    ``verify``: made-up inputs and onnxruntime's outputs come with it.

    Raises InvalidModel, ShapeError, UnsupportedOperator or TargetError.
    """
    from ..lower import lower, suited
    from ..schedule import Schedules

    tell = progress or (lambda stage, fraction: None)
    tell("load", 0.0)
    loaded = frontend.load(model)
    tell("normalize", 0.0)
    normal = frontend.to_normal_form(loaded, dict(shapes) if shapes else None)
    verifier = None
    if verify:
        tell("reference", 0.0)
        by_data = frontend.decided_by_data(normal.graph)
        path = os.fspath(model) if isinstance(model, (str, os.PathLike)) else None
        verifier = Verifier.of_model(loaded, bound_specs(loaded, normal.graph), path, normal.allows, by_data)
    measure = None if verifier is None else measure_on([feeds for feeds, _ in verifier.cases])
    known = Schedules.packaged()
    run_pipeline(
        normal.graph,
        lambda done: tell(f"pass {done.name}", 0.5),
        measure,
        partial(known.absorbs, target.measured_as),
    )
    tell("lower", 0.0)
    (target,) = suited((target,), normal.graph)
    lowered = lower(normal.graph, target, normal.constraints, known)
    unique = {kernel.symbol: kernel for kernel in lowered.kernels}
    metadata = {"producer": f"coda-edge {__version__}", "target": target.name, "model": loaded.graph.name}
    return Compiled(
        name=identifier(name or default_name(model, loaded.graph.name)),
        target=target,
        plan=lowered.plan,
        constants=np.ascontiguousarray(lowered.constants),
        kernels={symbol: unique[symbol] for symbol in lowered.plan.kernels},
        metadata=metadata,
        verifier=verifier,
    )


def identifier(text: str) -> str:
    """``text`` as a C identifier: other characters become underscores, and a digit in front gets one before it."""
    name = re.sub(r"\W", "_", text, flags=re.ASCII).strip("_") or "model"
    return f"m{name}" if name[0].isdigit() else name.lower()


def default_name(model: Model, graph: str) -> str:
    """What a model is called: as its file, or else as its ``graph``, of which folders are no part."""
    return Path(model).stem if isinstance(model, (str, os.PathLike)) else identifier(graph)
