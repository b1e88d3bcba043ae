"""``python -m coda_edge.onnxruntime.compile MODEL BUNDLE``: what the execution provider runs for a model without a bundle.

Ends with 0 and the bundle in its place, or with 1 and one line that says why not.
"""

from __future__ import annotations

import argparse
import sys

from ..driver import optimize
from ..errors import CodaError


def main() -> int:
    """Compiles what the command line names."""
    parser = argparse.ArgumentParser(prog="coda_edge.onnxruntime.compile", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("bundle")
    parser.add_argument("--target", default="native")
    given = parser.parse_args()
    try:
        optimize(given.model, given.target).save(given.bundle)
    except CodaError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
