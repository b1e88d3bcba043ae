"""The documents point at things that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
_DOCUMENTS = sorted(p for folder in (".", "docs", "models") for p in (_ROOT / folder).glob("*.md"))


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda p: str(p.relative_to(_ROOT)))
def test_relative_links_resolve(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
    assert not [link for link in links if "://" not in link and not (document.parent / link).exists()]
