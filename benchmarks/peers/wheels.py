"""Whether packages are installed, without importing them."""

from __future__ import annotations

from importlib.util import find_spec


def lacks(*modules: str) -> str:
    """The first of ``modules`` that is not installed, in words; empty if all are."""
    missing = [m for m in modules if find_spec(m.partition(".")[0]) is None or find_spec(m) is None]
    return f"the package {missing[0]} is not installed" if missing else ""
