"""``coda-edge keygen`` and ``coda-edge sign``: keys, and bundles that are signed with them."""

from __future__ import annotations

import os
from pathlib import Path

import click

from .files import FileError, atomic, creatable, existing

_PATH = click.Path(path_type=Path)


@click.command("keygen")
@click.argument("key", type=_PATH)
def keygen(key: Path) -> None:
    """Writes a new private key to KEY, for you alone, and its public key to KEY.pub, for programs that open what it signs."""
    from .bundle.signature import generate_keys

    public = creatable(key.with_name(f"{key.name}.pub"))
    for path, loss in (
        (creatable(key), "what it signed could not be signed again"),
        (public, "what needs it could not be opened"),
    ):
        if path.exists():
            raise FileError(f"{path}: exists already, and {loss} without it: take another name")
    secret, shown = generate_keys()
    with atomic(key) as part:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret)
        with atomic(public) as public_part:
            public_part.write_bytes(shown)
    click.echo(f"{key} and {public}: public key {shown.hex()}")


@click.command("sign")
@click.argument("bundle", type=_PATH)
@click.option("--key", type=_PATH, required=True, help="The private key, as keygen wrote it.")
def sign(bundle: Path, key: Path) -> None:
    """Signs BUNDLE in place: programs that open it with the public key run nothing else."""
    from .bundle.signature import sign_file, signer

    sign_file(existing(bundle), existing(key).read_bytes())
    signed_with = signer(bundle.read_bytes())
    click.echo(f"{bundle}: signed with {signed_with.hex() if signed_with else 'nothing'}")
