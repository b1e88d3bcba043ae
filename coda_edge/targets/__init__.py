"""Devices that kernels are built for. Adding one: ``docs/targets.md``."""

from .target import Target, get, get_all, groups, names, ranked, targets

__all__ = ["Target", "get", "get_all", "groups", "names", "ranked", "targets"]
