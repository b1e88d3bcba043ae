"""Every error a user of coda-edge can meet, as one small hierarchy.

Each message names the node or file, what was found, what was expected, and the way out.
"""

from __future__ import annotations


class CodaError(Exception):
    """Base of all coda-edge errors."""


class InvalidModel(CodaError):
    """The file is not a valid ONNX model, or its graph contradicts itself."""


class UnsupportedOperator(CodaError):
    """An operator that no lowering covers; carries the operator, the node and the choices."""

    def __init__(self, op: str, node: str, choices: str) -> None:
        super().__init__(f"operator {op} (node '{node}') is not lowered: {choices}")
        self.op = op
        self.node = node


class ShapeError(CodaError):
    """Shapes or dtypes that do not fit: in the model, in an epilogue, or in what was fed to a session."""


class VerificationError(CodaError):
    """A rewrite changed results beyond its tolerance; names the pass."""


class TargetError(CodaError):
    """An unknown target, or one that cannot be built for or run on here."""


class BundleError(CodaError):
    """A bundle that is truncated, altered, of another version, or for another CPU."""


class SignatureError(BundleError):
    """A bundle that is not signed with the key that was asked for, or was altered after it was signed."""


class CancelledError(CodaError):
    """``Session.cancel`` ended the run."""


class DataError(CodaError):
    """A value that a kernel cannot process, such as an index out of range; names the step and its ONNX nodes."""
