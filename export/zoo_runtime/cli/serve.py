"""``zoo serve``."""

from __future__ import annotations

import ipaddress
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import click

from zoo.cli.options import THREADS
from zoo.errors import MissingPackageError, UsageError, ZooWarning

_KEY = "ZOO_API_KEY"


@click.command("serve")
@click.argument("directories", metavar="DIRECTORY...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 for a free one.")
@click.option("--api-key-file", type=click.Path(path_type=Path),
              help=f"File with the key that requests must have.  [default: the variable {_KEY}, if set]")  # fmt: skip
@click.option("--queue", type=click.IntRange(min=1), default=256, show_default=True,
              help="Inputs that wait for a model; further requests get status 429.")  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(min=1), default=4096, show_default=True,
              help="New tokens of a text that a request may ask for.")  # fmt: skip
@click.option("--max-body", type=click.IntRange(min=1), default=4 * 2**20, show_default=True,
              help="Bytes of a request's body.")  # fmt: skip
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=600, show_default=True,
              help="Seconds for an answer.")  # fmt: skip
@click.option("--drain-seconds", type=click.IntRange(min=0), default=30, show_default=True,
              help="Seconds after SIGTERM in which requests may finish.")  # fmt: skip
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16", "int8", "int4"]), help="Precision.")
@click.option("--variant", metavar="NAME", help="Export to run.  [default: serving if it exists, else the best]")
@click.option("--provider", type=click.Choice(["cpu", "cuda", "auto"]), default="cpu", show_default=True,
              help="Execution provider.")  # fmt: skip
@click.option("--threads", type=THREADS, help="Threads per operator.  [default: the number of cores]")
@click.option("--memory", type=click.Choice(["fast", "mapped"]), default="fast", show_default=True,
              help="Repack weights for speed, or use the memory-mapped file.")  # fmt: skip
@click.option("--unverified", is_flag=True, help="Allow exports that are not verified.")
def command(
    directories: tuple[Path, ...],
    host: str,
    port: int,
    api_key_file: Path | None,
    queue: int,
    max_tokens: int,
    max_body: int,
    timeout: float,
    drain_seconds: int,
    **options: Any,
) -> None:
    """Answer requests over HTTP, in the protocol of OpenAI, with the exported models in each DIRECTORY.

    A model is named after its directory. Decoders exported with --profile serving answer many requests at a time.
    """
    try:
        from zoo_runtime.server.app import Limits
        from zoo_runtime.server.observe import log_to
        from zoo_runtime.server.run import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("prometheus_client", "starlette", "uvicorn"):
            raise
        raise MissingPackageError(
            f"{error.name} is not installed", None, 'pip install "attention-zoo[serve]"'
        ) from error
    key = _read_key(api_key_file)
    if key is None and not _is_loopback(host):
        what = f"everyone who reaches {host} can use the models: set --api-key-file or {_KEY}"
        warnings.warn(what, ZooWarning, stacklevel=2)
    log_to(sys.stderr)
    serve(
        directories,
        host=host,
        port=port,
        api_key=key,
        queue=queue,
        drain_seconds=drain_seconds,
        limits=Limits(body=max_body, tokens=max_tokens, seconds=timeout),
        options=options,
    )


def _read_key(path: Path | None) -> str | None:
    """Return the key in a file or in the environment."""
    where = _KEY if path is None else f"--api-key-file {path}"
    try:
        key = os.environ.get(_KEY) if path is None else path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read ({getattr(error, 'strerror', None) or 'not ASCII'})", where) from error
    if key is not None and not (key.isascii() and key.isprintable() and key and " " not in key):
        raise UsageError("the key must be one word of ASCII", where)
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
