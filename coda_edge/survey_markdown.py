"""A survey as Markdown, to be pasted into a document: one row for all exports of a model, and what is left by reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath

from .survey import Share, Survey, Surveyed, reasons


def to_markdown(survey: Survey) -> str:
    """The survey as two tables.

    Files of one folder whose names agree up to the first dot are exports of one model, by other exporters or for other opsets:
    one row, in which a number that differs between them is given as ``least–most``, a share that does as the worst one.
    """
    families: dict[str, list[Surveyed]] = {}
    for m in survey.models:
        path = PurePath(m.file)
        families.setdefault(str(path.parent / path.name.split(".", 1)[0]), []).append(m)
    parts = [_table([c.heading for c in _COLUMNS], ([c.text(f, ms) for c in _COLUMNS] for f, ms in families.items()))]
    left = reasons(survey.models)
    if left:
        rows = ([str(count), op.replace("+", " "), _escaped(reason)] for (op, reason), count in left.items())
        parts.append(_table(["left", "operators", "because"], rows))
    return "\n".join(parts)


class _Column:
    def __init__(self, heading: str, text: Callable[[str, Sequence[Surveyed]], str]) -> None:
        self.heading = heading
        self.text = text


def _exporters(models: Sequence[Surveyed]) -> str:
    return ", ".join(dict.fromkeys(m.exporter for m in models if m.exporter)) or "–"


def _opsets(models: Sequence[Surveyed]) -> str:
    return ", ".join(str(o) for o in sorted({m.opset for m in models if m.opset is not None})) or "–"


def _worst(shares: Iterable[Share]) -> str:
    share = min(shares, key=lambda s: (s.done / s.total if s.total else 1.0, -s.total))
    return str(share) if share.total else "–"


def _span(values: Iterable[float | None]) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return "–"
    low, high = (f"{v:.2f}".rstrip("0").rstrip(".") for v in (min(known), max(known)))
    return low if low == high else f"{low}–{high}"


def _error(models: Sequence[Surveyed]) -> str:
    failed = [m for m in models if m.failure is not None]
    if failed:
        return f"{len(failed)} failed: {_escaped(str(failed[0].failure))}"
    known = [m.error for m in models if m.error is not None]
    return f"{max(known):.0e}" if known else "–"


_COLUMNS = (
    _Column("model", lambda family, _: family),
    _Column("files", lambda _, models: str(len(models))),
    _Column("exporter", lambda _, models: _exporters(models)),
    _Column("opset", lambda _, models: _opsets(models)),
    _Column("attention", lambda _, models: _worst(m.attention for m in models)),
    _Column("norms", lambda _, models: _worst(m.norms for m in models)),
    _Column("GEMM", lambda _, models: _span(m.gemm for m in models)),
    _Column("kernels", lambda _, models: _span(m.kernels for m in models)),
    _Column("a layer", lambda _, models: _span(m.per_layer for m in models)),
    _Column("left", lambda _, models: _span(len(m.unfused) for m in models)),
    _Column("worst error", lambda _, models: _error(models)),
)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
