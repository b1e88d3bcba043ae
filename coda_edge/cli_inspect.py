"""What ``coda-edge inspect`` and ``coda-edge targets`` show, as JSON and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .inputs import default_sizes, input_specs
from .report import census, megabytes

if TYPE_CHECKING:
    import onnx

    from .bundle.plan import Bundle, ExprTable, TensorInfo
    from .targets import Target


@dataclass(frozen=True)
class TensorView:
    """An input or output: numpy dtype name, sizes in words."""

    name: str
    dtype: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class StepView:
    """A kernel call of a plan; ``flops`` and ``bytes`` at the sizes of the view."""

    name: str
    kernel: str
    flops: int
    bytes: int
    source: str


@dataclass(frozen=True)
class LevelView:
    """A target that a bundle holds kernels for, and the CPU features that they need."""

    target: str
    features: tuple[str, ...]
    library_bytes: int


@dataclass(frozen=True)
class BundleView:
    """What a bundle holds; ``steps`` are those of its best level. ``sizes`` are the ones at which flops and bytes were worked out."""

    file: str
    inputs: tuple[TensorView, ...]
    outputs: tuple[TensorView, ...]
    steps: tuple[StepView, ...]
    kernels: int
    levels: tuple[LevelView, ...]
    constants_bytes: int
    sizes: dict[str, int]
    metadata: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values, and ``kind: "bundle"``."""
        return {"kind": "bundle", **asdict(self)}

    def render(self, console: Console) -> None:
        """The view as tables on ``console``."""
        summary = _summary(self.file)
        for key, value in self.metadata.items():
            if key == "constants":  # their fingerprints; the row of that name says how large they are
                continue
            summary.add_row(key, Text(value if len(value) < 100 else value[:97] + "…"))
        summary.add_row("constants", megabytes(self.constants_bytes))
        summary.add_row("kernels", f"{self.kernels}, called {len(self.steps)} times")
        for level in self.levels:
            needs = " ".join(level.features) or "no particular CPU features"
            summary.add_row(f"for {level.target}", f"{megabytes(level.library_bytes)}, needs {needs}")
        console.print(summary)
        console.print(_tensor_table(self.inputs, self.outputs))
        at = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        table = _table(f"plan{f', at {at}' if at else ''}", "#", "step", "kernel", "MFLOP", "MB")
        for number, step in enumerate(self.steps):
            work = (f"{step.flops / 1e6:.2f}", f"{step.bytes / 1e6:.2f}")
            table.add_row(str(number), _clip(step.name, 38), _clip(step.kernel, 20), *work)
        console.print(table)


@dataclass(frozen=True)
class FunctionView:
    """A fused operator in an optimized model: an ONNX function of domain ``coda``, how often it is called, its program."""

    name: str
    calls: int
    program: str


@dataclass(frozen=True)
class ModelView:
    """What an ONNX model holds."""

    file: str
    producer: str
    ir_version: int
    opsets: dict[str, int]
    inputs: tuple[TensorView, ...]
    outputs: tuple[TensorView, ...]
    nodes: int
    operators: dict[str, int]
    functions: tuple[FunctionView, ...]
    weights_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values, and ``kind: "onnx"``."""
        return {"kind": "onnx", **asdict(self)}

    def render(self, console: Console) -> None:
        """The view as tables on ``console``."""
        summary = _summary(self.file)
        summary.add_row("producer", Text(self.producer or "unknown"))
        summary.add_row(
            "opsets", ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in self.opsets.items())
        )
        summary.add_row("weights", megabytes(self.weights_bytes))
        names = [op for op, count in self.operators.items() for _ in range(count)]
        summary.add_row("nodes", f"{self.nodes}: {census(names)}")
        console.print(summary)
        console.print(_tensor_table(self.inputs, self.outputs))
        for f in self.functions:
            if f.calls:
                console.print(Text.assemble((f.name, "bold"), f"  ×{f.calls}"))
            if f.program:
                console.print(Text(f.program, style="dim"))


@dataclass(frozen=True)
class TargetView:
    """A target: the core and the features that it is built for, how its kernels are linked, and why this machine cannot run them.

    ``missing`` are the features that this machine's CPU lacks, and the system if that is another; ``linker`` is the command,
    empty if none is installed, and ``form`` what it makes.
    """

    name: str
    description: str
    cpu: str
    triple: str
    features: tuple[str, ...]
    form: str
    linker: str
    missing: tuple[str, ...]


@dataclass(frozen=True)
class TargetList:
    """Every target, the name of the one that ``native`` means here (None where nothing runs here), and the groups for one bundle."""

    targets: tuple[TargetView, ...]
    native: str | None
    groups: dict[str, tuple[str, ...]]

    def to_json(self) -> dict[str, Any]:
        """``native``, ``groups``, and ``targets`` with their fields and ``runs_here``."""
        views = [{**asdict(t), "runs_here": not t.missing} for t in self.targets]
        return {"native": self.native, "groups": {n: list(m) for n, m in self.groups.items()}, "targets": views}

    def render(self, console: Console) -> None:
        """The list as a table on ``console``."""
        table = _table("targets", "name", "what it is", "needs", "kernels", "runs here")
        table.columns[0].no_wrap = True
        for t in self.targets:
            here = f"no: lacks {' '.join(t.missing)}" if t.missing else "native" if t.name == self.native else "yes"
            form = t.form if t.linker else f"{t.form}: pip install ziglang"
            table.add_row(t.name, t.description, " ".join(filter(None, (t.cpu, *t.features))), form, here)
        for name, members in self.groups.items():
            table.add_row(name, f"one bundle for {', '.join(members)}", "", "", "")
        console.print(table)


def target_list() -> TargetList:
    """The registered targets."""
    from . import targets
    from .errors import TargetError

    try:
        native = targets.get().name
    except TargetError:
        native = None
    return TargetList(tuple(map(_target_view, targets.targets().values())), native, targets.groups())


def _target_view(target: Target) -> TargetView:
    from .errors import TargetError
    from .targets.link import linker

    try:
        command = " ".join(Path(word).name for word in linker(target.triple))
    except TargetError:
        command = ""
    form = "library" if target.loadable else "object"
    return TargetView(
        target.name,
        target.description,
        target.cpu,
        target.triple,
        target.features,
        form,
        command,
        target.missing(),
    )


def inspect_file(path: Path) -> BundleView | ModelView:
    """What ``path`` holds: by its suffix a model (``.onnx``), or else a bundle."""
    return inspect_model(path) if path.suffix == ".onnx" else inspect_bundle(path)


def inspect_bundle(path: Path) -> BundleView:
    """Reads and verifies a bundle; raises BundleError if it is not a whole one."""
    from .bundle.reader import read
    from .inputs import InputSpec
    from .symbolic import parse_dim

    bundle: Bundle = read(path)
    plan = bundle.best.plan
    inputs, outputs = (tuple(_tensor_view(t, plan.exprs) for t in side) for side in (plan.inputs, plan.outputs))
    specs = [InputSpec(i.name, i.dtype, tuple(parse_dim(_number(d)) for d in i.shape)) for i in inputs]
    # Where data decides sizes, those of the run that was verified are kept with the bundle.
    kept = [size.split("=") for size in bundle.metadata.get("sizes", "").split()]
    sizes = {name: int(size) for name, size in kept} or default_sizes(specs)
    values = plan.exprs.evaluate(sizes)
    return BundleView(
        file=str(path),
        inputs=inputs,
        outputs=outputs,
        steps=tuple(
            StepView(s.name, plan.kernels[s.kernel], values[s.flops], values[s.bytes], s.source) for s in plan.steps
        ),
        kernels=len(plan.kernels),
        levels=tuple(LevelView(level.target, level.features, len(level.library)) for level in bundle.levels),
        constants_bytes=int(bundle.constants.nbytes),
        sizes=sizes,
        metadata=dict(bundle.metadata),
    )


def inspect_model(path: Path) -> ModelView:
    """Shows an ONNX model as it was written; raises InvalidModel if it is not one."""
    import onnx

    from .frontend import load

    load(path)  # for its checks: what it returns is converted, with functions inlined
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    operators = Counter(n.op_type for n in graph.node)
    return ModelView(
        file=str(path),
        producer=f"{model.producer_name} {model.producer_version}".strip(),
        ir_version=model.ir_version,
        opsets={o.domain: o.version for o in model.opset_import},
        inputs=tuple(TensorView(s.name, s.dtype, tuple(map(str, s.shape))) for s in input_specs(model)),
        outputs=tuple(_value_view(o) for o in graph.output),
        nodes=len(graph.node),
        operators=dict(operators.most_common()),
        functions=tuple(
            FunctionView(f.name, operators[f.name], _program(model, f.name))
            for f in model.functions
            if f.domain == "coda"
        ),
        weights_bytes=sum(_bytes(i) for i in graph.initializer),
    )


def _program(model: onnx.ModelProto, function: str) -> str:
    """The text attributes of the first call of ``function``: its epilogue or score program."""
    node = next((n for n in model.graph.node if n.op_type == function and n.domain == "coda"), None)
    return "\n".join(a.s.decode() for a in node.attribute if a.s) if node else ""


def _bytes(tensor: onnx.TensorProto) -> int:
    from math import prod

    from onnx import helper

    return int(prod(tensor.dims)) * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _value_view(value: onnx.ValueInfoProto) -> TensorView:
    from onnx import helper

    tensor = value.type.tensor_type
    dims = tuple(str(d.dim_value) if d.HasField("dim_value") else d.dim_param or "?" for d in tensor.shape.dim)
    return TensorView(value.name, helper.tensor_dtype_to_np_dtype(tensor.elem_type).name, dims)


def _tensor_view(tensor: TensorInfo, exprs: ExprTable) -> TensorView:
    return TensorView(tensor.name, tensor.dtype, tuple(exprs.text(d) for d in tensor.dims))


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _clip(text: str, width: int) -> Text:
    """The end of ``text``, which is where names of nodes differ."""
    return Text(text if len(text) <= width else f"…{text[1 - width :]}")


def _summary(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None)
    for heading in headings:
        numeric = heading in ("#", "MFLOP", "MB", "calls")
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    return table


def _tensor_table(inputs: Sequence[TensorView], outputs: Sequence[TensorView]) -> Table:
    table = _table("inputs and outputs", "", "name", "type", "shape")
    for side, tensors in (("in", inputs), ("out", outputs)):
        for t in tensors:
            table.add_row(side, Text(t.name), t.dtype, Text(f"[{', '.join(t.shape)}]"))
    return table
