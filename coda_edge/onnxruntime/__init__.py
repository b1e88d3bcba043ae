"""Models in onnxruntime, in two ways.

``package`` makes of a model the optimized graph, and a library of custom operators with its kernels. A session that registers the library
runs our kernels for the ``coda`` nodes; one that does not runs their function bodies; every other node is onnxruntime's either way.

``library_path`` is the generic library: with it onnxruntime runs a model as it is, by its bundle; ``add_provider`` sets a session up for
that.
"""

from .library import library_path
from .packaging import Packaged, package
from .provider import add_provider
from .regions import Bundled, package_regions

__all__ = ["Bundled", "Packaged", "add_provider", "library_path", "package", "package_regions"]
