"""``python -m models.demo BUNDLE``: similarities of real sentences, computed by MiniLM's bundle and checked against onnxruntime."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

import coda_edge
from coda_edge.errors import VerificationError
from coda_edge.verify import ort_session, relative_error

from . import minilm

TOLERANCE = 1e-4


def main(bundle: str) -> None:
    """Prints the table; raises VerificationError if the bundle's output is not onnxruntime's to 1e-4."""
    feeds = minilm.feeds(minilm.SENTENCES)
    with coda_edge.Session(bundle) as session:
        names = [o.name for o in session.get_outputs()]
        ours = session.run(names, feeds)
    (theirs,) = ort_session(str(minilm.path())).run(names, feeds)
    error = relative_error(ours[0], theirs)
    vectors = minilm.embed(ours[0], feeds["attention_mask"])
    table = Table(
        title="Cosine similarity of sentences, from the bundle", title_justify="left", box=None, padding=(0, 1, 0, 0)
    )
    table.add_column("", no_wrap=True)
    for number, _ in enumerate(minilm.SENTENCES, 1):
        table.add_column(str(number), justify="right")
    for number, (sentence, row) in enumerate(zip(minilm.SENTENCES, vectors @ vectors.T, strict=True), 1):
        table.add_row(f"{number}  {sentence}", *(f"{value:.3f}" for value in row))
    console = Console()
    console.print(table)
    console.print(f"largest difference from onnxruntime: {error:.1e} of the output's largest value\n")
    if not error <= TOLERANCE:
        raise VerificationError(f"{bundle} differs from onnxruntime by {error:.1e}, expected at most {TOLERANCE:.0e}")


if __name__ == "__main__":
    main(sys.argv[1])
