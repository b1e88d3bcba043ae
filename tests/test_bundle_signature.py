"""Signatures: vectors of RFC 8032, forgeries, and bundles that are opened with a key."""

from __future__ import annotations

from pathlib import Path

import handmade
import numpy as np
import pytest
from click.testing import CliRunner

from coda_edge import Session, _runtime
from coda_edge.bundle import from_bytes, to_bytes, write
from coda_edge.bundle.signature import generate_keys, sign, signer
from coda_edge.cli import main
from coda_edge.errors import BundleError, SignatureError

# RFC 8032, section 7.1: public key, message, signature of tests 1, 2, 3.
VECTORS = [
    (
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]
P, ORDER = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493


def _valid(key: bytes, message: bytes, signature: bytes) -> bool:
    return _runtime.signature_valid(key, message, signature)


@pytest.mark.parametrize(("key", "message", "signature"), VECTORS)
def test_vectors_and_what_is_made_of_them(key: str, message: str, signature: str) -> None:
    k, m, s = bytes.fromhex(key), bytes.fromhex(message), bytes.fromhex(signature)
    assert _valid(k, m, s)
    assert not _valid(k, m + b"x", s)
    for byte in range(0, 64, 3):
        changed = bytearray(s)
        changed[byte] ^= 1 << byte % 8
        assert not _valid(k, m, bytes(changed)), byte
    malleable = int.from_bytes(s[32:], "little") + ORDER
    assert not _valid(k, m, s[:32] + malleable.to_bytes(32, "little")), "S is below the order of the base point"
    assert not _valid(bytes([k[0] ^ 2]) + k[1:], m, s)


@pytest.mark.parametrize("y", [0, 1, P - 1, P, P + 1])
@pytest.mark.parametrize("sign_bit", [0, 1])
def test_keys_that_would_sign_anything(y: int, sign_bit: int) -> None:
    """Points of small order, and numbers that are no coordinate."""
    key = (y | sign_bit << 255).to_bytes(32, "little")
    for r in (key, bytes(32), (1).to_bytes(32, "little")):
        assert not any(_valid(key, bytes([i]), r + bytes(32)) for i in range(8))


def test_long_messages_agree_with_another_implementation() -> None:
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    rng = np.random.default_rng(3)
    for length in (1, 47, 48, 63, 64, 111, 112, 127, 128, 1000):
        key = ed25519.Ed25519PrivateKey.from_private_bytes(rng.bytes(32))
        message = rng.bytes(length)
        assert _valid(key.public_key().public_bytes_raw(), message, key.sign(message)), length


def test_a_bundle_is_opened_with_its_key_only() -> None:
    pytest.importorskip("cryptography")
    secret, public = generate_keys()
    _, other = generate_keys()
    data = to_bytes(handmade.encoder().bundle())
    signed = sign(data, secret)
    assert len(signed) == len(data) and signer(data) is None and signer(signed) == public
    assert sign(signed, secret) == signed and from_bytes(signed).metadata == from_bytes(data).metadata
    feeds = {"ids": np.ones((1, 3), np.int64), "bias": np.zeros(6, np.float32)}
    for key in (None, public):
        with Session(signed, key=key) as session:
            np.testing.assert_array_equal(session.run(None, feeds)[0], handmade.encoder_reference(**feeds)[0])
    for refused, key in ((data, public), (signed, other)):
        with pytest.raises(SignatureError):
            Session(refused, key=key)
    with pytest.raises(SignatureError, match="32 bytes"):
        Session(signed, key=b"short")
    rng = np.random.default_rng(0)
    for bit in rng.integers(0, len(signed) * 8, 1000).tolist():
        altered = bytearray(signed)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BundleError):
            Session(bytes(altered), key=public)


def test_commands(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    bundle, key = tmp_path / "m.coda", tmp_path / "release.key"
    write(handmade.encoder().bundle(), bundle)
    assert CliRunner().invoke(main, ["keygen", str(key)]).exit_code == 0
    assert key.stat().st_mode & 0o077 == 0
    again = CliRunner().invoke(main, ["keygen", str(key)])
    assert again.exit_code == 1 and "exists already" in again.stderr
    (tmp_path / "other.pub").write_bytes(b"of another key")
    other = CliRunner().invoke(main, ["keygen", str(tmp_path / "other")])
    assert other.exit_code == 1 and "exists already" in other.stderr and not (tmp_path / "other").exists()
    done = CliRunner().invoke(main, ["sign", str(bundle), "--key", str(key)])
    public = (tmp_path / "release.key.pub").read_bytes()
    assert done.exit_code == 0 and public.hex() in done.stdout
    Session(bundle, key=public).close()
    wrong = CliRunner().invoke(main, ["sign", str(bundle), "--key", str(bundle)])
    assert wrong.exit_code == 1 and "private key has 32 bytes" in wrong.stderr
