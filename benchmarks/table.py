"""What was measured, as tables: one row a model and number of threads, and one a kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from .measure import Engine, Kernel, Measured
from .suite import CASES

Results = Mapping[str, Sequence[Measured]]


@dataclass(frozen=True)
class Group:
    """Calls of kernels that do the same on the same sizes: how many, and all together ``ns``, ``flops`` and ``bytes``.

    ``best_ns``: if each took as long as the quickest of them at its best.
    """

    name: str
    calls: int
    ns: float
    best_ns: float
    flops: int
    bytes: int


def groups(kernels: Sequence[Kernel]) -> list[Group]:
    """The kernels, alike ones together, longest first."""
    found: dict[tuple[str, int, int], list[Kernel]] = {}
    for step in kernels:
        found.setdefault((step.kernel, step.flops, step.bytes), []).append(step)
    merged = [
        Group(
            _label(steps[0]),
            len(steps),
            ns=sum(s.ns for s in steps),
            best_ns=len(steps) * min(s.best_ns for s in steps),
            flops=len(steps) * flops,
            bytes=len(steps) * moved,
        )
        for (_, flops, moved), steps in found.items()
    ]
    return sorted(merged, key=lambda g: -g.ns)


def _label(step: Kernel) -> str:
    """The step's name; where it says no more than the kind of kernel, with the last of the nodes that it computes."""
    last = step.source.rpartition(", ")[2]
    return f"{step.name} {last}" if last and step.kernel.startswith(f"{step.name}_") else step.name


def render(results: Results, console: Console, kernels: bool = False) -> None:
    """Prints all results, and with ``kernels`` where the time of our runs goes."""
    heading, rows = _rows(results)
    table = Table(box=box.SIMPLE_HEAD)
    for i, text in enumerate(heading):
        table.add_column(text, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for reason in _reasons(results):
        console.print(reason, highlight=False, markup=False, soft_wrap=True)
    for measured in (m for several in results.values() for m in several if kernels):
        console.print(_kernels(measured))


def markdown(results: Results) -> str:
    """The first table and the reasons as Markdown."""
    heading, rows = _rows(results)
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    reasons = "\n".join(f"- {reason}" for reason in _reasons(results))
    return f"{table}\n\n{reasons}\n" if reasons else f"{table}\n"


def _rows(results: Results) -> tuple[list[str], list[list[str]]]:
    names = list(dict.fromkeys(e.name for several in results.values() for m in several for e in m.engines[1:]))
    heading = [
        "model",
        "threads",
        "ours, ms",
        *(f"{n}, ×" for n in names),
        "wanted, ×",
        "error",
        "of FMA peak",
        "of memory",
    ]
    rows = []
    for name, several in results.items():
        for m in several:
            by_name = {e.name: e for e in m.engines}
            cells = [_ratio(by_name[n]) if n in by_name else "" for n in names]
            shares = [f"{m.of_peak:.0%} ({m.best_of_peak:.0%})", f"{m.of_memory:.0%}"]
            start = [m.title, str(m.threads), f"{m.ours.ms:.2f}"]
            rows.append([*start, *cells, _wanted(name, m), f"{m.ours.error:.0e}", *shares])
    return heading, rows


def _ratio(engine: Engine) -> str:
    if engine.reason:
        return "–"
    return f"{engine.ratio:.2f}" if engine.right else f"({engine.ratio:.2f})"


def _wanted(name: str, measured: Measured) -> str:
    bar = CASES[name].bar if name in CASES else None
    if bar is None or measured.threads not in bar.ratios:
        return ""
    wanted = bar.ratios[measured.threads]
    best = measured.best(bar.against)
    return f"{wanted:.2f} {'✓' if best is not None and best.ratio >= wanted else '✗'}"


def _reasons(results: Results) -> list[str]:
    """Engines without numbers and those whose numbers are in brackets, each said once."""
    found: dict[str, None] = {}
    for several in results.values():
        for m in several:
            for e in m.engines:
                if e.reason:
                    found[f"{m.title}, {e.name}: {e.reason}"] = None
                elif not e.right:
                    found[f"{m.title}, {e.name}: its answer is wrong by {e.error:.1g} of the largest value"] = None
    return list(found)


def _kernels(measured: Measured) -> Table:
    title = f"{measured.title}, {measured.threads} thread{'s' * (measured.threads > 1)}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for i, heading in enumerate(("kernel", "calls", "µs", "of time", "GFLOP/s", "of peak", "GB/s", "of memory")):
        table.add_column(heading, justify="right" if i else "left", overflow="fold")
    total = sum(k.ns for k in measured.kernels)
    for g in groups(measured.kernels):
        rate, traffic = g.flops / g.ns, g.bytes / g.ns
        table.add_row(
            g.name,
            str(g.calls),
            f"{g.ns / 1e3:.0f}",
            f"{g.ns / total:.1%}",
            f"{rate:.1f}",
            f"{rate * 1e9 / measured.roofs.flops:.0%} ({g.flops / g.best_ns * 1e9 / measured.roofs.flops:.0%})",
            f"{traffic:.1f}",
            f"{traffic * 1e9 / measured.roofs.memory:.0%}",
        )
    inside, whole = measured.inside_ms * 1e3, measured.ours.ms * 1e3
    table.caption = f"a run spends {inside:.0f} µs in kernels, and takes {whole:.0f} µs ({whole / inside - 1:+.1%})"
    return table
