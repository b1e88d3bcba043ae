"""Models in onnxruntime, in two ways.

``package`` makes of a model the optimized graph, and a library of custom operators with its kernels. A session that registers the library
runs our kernels for the ``coda`` nodes; one that does not runs their function bodies; every other node is onnxruntime's either way.

``library_path`` is the generic library: with it onnxruntime runs a model as it is, by its bundle.
"""

from .library import library_path
from .packaging import Packaged, package

__all__ = ["Packaged", "library_path", "package"]
