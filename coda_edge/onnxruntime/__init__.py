"""Models for onnxruntime: the optimized graph, and a library of custom operators with its kernels.

``package`` makes both. A session that registers the library runs our kernels for the ``coda`` nodes; one that does not
runs their function bodies; every other node is onnxruntime's either way.
"""

from .packaging import Packaged, package

__all__ = ["Packaged", "package"]
