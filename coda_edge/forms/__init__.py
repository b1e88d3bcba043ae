"""A model as something else than a bundle: a library, an archive, or C sources, with the runtime inside (``docs/embed.md``)."""

from .compiled import Compiled, compile_model
from .package import FORMS, Files, package

__all__ = ["FORMS", "Compiled", "Files", "compile_model", "package"]
