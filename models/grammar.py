"""Quire's tagger: the correction that each word needs, by a DistilBERT of 6 layers, statically quantised."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .recipe import Feeds, Run

SENTENCES = (
    "Its a nice day.",
    "Their going to be late because there car broke down.",
    "She have went to the the store yesterday, its to bad.",
)


def read(run: Run, folder: Path) -> str:
    """What the model would change in ``SENTENCES``; ``folder`` holds ``tokenizer.json`` and ``tag_vocab.json``."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tags: Sequence[str] = json.loads((folder / "tag_vocab.json").read_text())["tags"]
    changes = []
    for sentence in SENTENCES:
        row = tokenizer.encode(sentence)
        feeds: Feeds = {"input_ids": np.array([row.ids]), "attention_mask": np.array([row.attention_mask])}
        (logits,) = run(None, feeds)
        found = zip(row.tokens, logits[0].argmax(-1), strict=True)
        changes.append(" ".join(f"{token}:{tags[i]}" for token, i in found if tags[i] != "$KEEP"))
    return "; ".join(changes)
