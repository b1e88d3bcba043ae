"""Devices that kernels are built for. Adding one: ``docs/targets.md``."""

from .target import Target, get, names, targets

__all__ = ["Target", "get", "names", "targets"]
