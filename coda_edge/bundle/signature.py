"""Signing of bundles by Ed25519 (RFC 8032), with the package ``cryptography``; the runtime verifies by itself.

What is signed is the header with its checksum, and so, through the checksums of its sections, every byte of the file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from .. import _runtime
from ..errors import BundleError, SignatureError, TargetError
from ..files import atomic
from . import format as fmt
from .reader import from_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def generate_keys() -> tuple[bytes, bytes]:
    """A new private key and its public key, 32 bytes each. Raises TargetError without the package ``cryptography``."""
    key = _keys().generate()
    return key.private_bytes_raw(), key.public_key().public_bytes_raw()


def sign(data: bytes, private_key: bytes) -> bytes:
    """The bundle ``data`` signed with a private key of 32 bytes; a signature that it has is replaced.

    Raises BundleError for what is no bundle, SignatureError for what is no key, TargetError without the package ``cryptography``.
    """
    key = _private_key(private_key)
    start = _signed_bytes(data)
    unsigned = (
        data[:start] + bytes(fmt.KEY_BYTES + fmt.SIGNATURE_BYTES) + data[start + fmt.KEY_BYTES + fmt.SIGNATURE_BYTES :]
    )
    from_bytes(unsigned)
    fields = key.public_key().public_bytes_raw() + key.sign(data[:start])
    return data[:start] + fields + data[start + len(fields) :]


def sign_file(path: str | os.PathLike[str], private_key: bytes) -> None:
    """Signs the bundle in a file, which is replaced at once. Raises as ``sign`` does, and BundleError if it cannot be read."""
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise BundleError(f"bundle '{os.fspath(path)}' cannot be read: {e.strerror}") from e
    with atomic(Path(path)) as part:
        part.write_bytes(sign(data, private_key))


def signer(data: bytes) -> bytes | None:
    """The public key that the bundle ``data`` is signed with; None if it is not.

    Raises BundleError for what is no bundle, SignatureError if the signature is wrong.
    """
    start = _signed_bytes(data)
    key = data[start : start + fmt.KEY_BYTES]
    signature = data[start + fmt.KEY_BYTES : start + fmt.KEY_BYTES + fmt.SIGNATURE_BYTES]
    if not any(key + signature):
        return None
    if not _runtime.signature_valid(key, data[:start], signature):
        raise SignatureError("bundle's signature is wrong: it was altered after it was signed")
    return key


def _signed_bytes(data: bytes) -> int:
    """How many bytes the header and its checksum have."""
    if len(data) < fmt.PREFIX.size or data[: len(fmt.MAGIC)] != fmt.MAGIC:
        raise BundleError("not a coda bundle: it does not begin with the bundle signature")
    _, _, sections, _, _ = fmt.PREFIX.unpack_from(data)
    return int(fmt.PREFIX.size + sections * fmt.ENTRY.size + fmt.DIGEST_BYTES)


def _private_key(data: bytes) -> Ed25519PrivateKey:
    if len(data) != fmt.KEY_BYTES:
        raise SignatureError(
            f"a private key has {fmt.KEY_BYTES} bytes, this one {len(data)}: give the file that keygen wrote"
        )
    return _keys().from_private_bytes(data)


def _keys() -> type[Ed25519PrivateKey]:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as e:
        raise TargetError("signing needs the package cryptography: pip install coda-edge[sign]") from e
    return Ed25519PrivateKey
