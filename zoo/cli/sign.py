"""``zoo sign``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from zoo.cli.completion import complete_directories
from zoo.cli.options import PATH, DocumentedCommand, force_option, json_option, quiet_option
from zoo.cli.report import emit_json, say
from zoo.errors import UsageError

_PASSWORD = "ZOO_KEY_PASSWORD"


@click.command(
    "sign",
    cls=DocumentedCommand,
    examples=(
        "zoo sign gpt-tiny --key signing.key",
        "zoo sign gpt-tiny --key leaf.key --certificate fullchain.pem",
    ),
    page="howto/signing.md",
)
@click.argument("directory", shell_complete=complete_directories, type=PATH)
@click.option("--key", type=PATH, required=True, metavar="FILE",
              help=f"Private elliptic-curve key in PEM; its password is asked for, or in {_PASSWORD}.")  # fmt: skip
@click.option("--certificate", type=PATH, metavar="FILE",
              help="Certificate of the key, followed by those between it and the root, in PEM.")  # fmt: skip
@force_option("Replace an existing signature.")
@json_option
@quiet_option
def command(directory: Path, key: Path, certificate: Path | None, force: bool, as_json: bool) -> None:
    """Sign all files in DIRECTORY, and write the signature to model.sig.

    Whoever has the public key can check with zoo verify --signed-by that no file was altered, added or removed.
    """
    from zoo.artifact.signature import sign_directory

    def password() -> str:
        return _password(key)

    count = sign_directory(directory, key, password=password, certificate=certificate, force=force)
    signature = directory / "model.sig"
    if as_json:
        emit_json("sign", {"directory": str(directory), "signature": str(signature), "files": count})
    else:
        say(f"{signature}: signs {count} files")


def _password(key: Path) -> str:
    """Return the password of a key, from the environment or the terminal."""
    text = os.environ.get(_PASSWORD)
    if text is None and sys.stdin.isatty():
        text = click.prompt(f"Password of {key}", hide_input=True, err=True)
    if not text:
        raise UsageError("the key is encrypted, and no password is given", key, f"set {_PASSWORD}")
    return str(text)
