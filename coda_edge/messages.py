"""Protobuf messages in parts: a copy of all but what is large."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def copy_fields(source: Any, target: Any, skip: Collection[str]) -> None:
    """Gives the message ``target`` the fields of ``source``, of the same type, but for those named in ``skip``."""
    for field, value in source.ListFields():
        if field.name in skip:
            continue
        if isinstance(value, (int, float, str, bytes)):
            setattr(target, field.name, value)
        elif hasattr(value, "CopyFrom"):
            getattr(target, field.name).CopyFrom(value)
        else:
            getattr(target, field.name).extend(value)
