"""``zoo serve``."""

from __future__ import annotations

import ipaddress
import os
import sys
import warnings
from pathlib import Path
from typing import Any, get_args

import click

from zoo.cli.completion import complete_directories, complete_variants
from zoo.cli.options import PATH, THREADS, DocumentedCommand
from zoo.errors import MissingPackageError, UsageError, ZooWarning
from zoo_runtime.server.config import OPTIONS, ServeConfig, ToolFormatName, read_config

_KEY = "ZOO_API_KEY"
_PACKAGES = ("jiter", "prometheus_client", "pydantic", "starlette", "uvicorn")
"""Packages of the extra ``serve`` without which no model is served."""


@click.command(
    "serve",
    cls=DocumentedCommand,
    examples=(
        "zoo serve gpt-tiny --port 8765",
        "zoo serve gpt-tiny judge --api-key-file keys.txt",
    ),
    page="howto/serve.md",
)
@click.argument("directories", shell_complete=complete_directories, metavar="[DIRECTORY]...", nargs=-1, type=PATH)
@click.option("--config", type=PATH, help="TOML file with models and settings; flags win.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 for a free one.")
@click.option("--api-key-file", type=click.Path(readable=False),
              help=f"File with keys, one a line; requests must have one.  [default: the variable {_KEY}]")  # fmt: skip
@click.option("--cors-origin", "cors_origins", metavar="ORIGIN", multiple=True,
              help="Pages in browsers that may use the server, such as https://example.org; * for all.")  # fmt: skip
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
@click.option("--prefix-cache-bytes", type=click.IntRange(min=0), default=0, show_default=True,
              help="Memory of each model for beginnings of prompts, or encoders' inputs, that come again.")  # fmt: skip
@click.option("--verify-recorded", is_flag=True,
              help="Do not start unless the recorded comparison of each export holds on this machine.")  # fmt: skip
@click.option("--signed-by", type=click.Path(readable=False), metavar="FILE",
              help="Require the signature of this public key, or of one that these certificates certify.")  # fmt: skip
@click.option("--log-texts", is_flag=True, help="Log the texts of requests and answers, too.")
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16", "int8", "int4"]), help="Precision.")
@click.option(
    "--variant",
    shell_complete=complete_variants,
    metavar="NAME",
    help="Export to run.  [default: serving if it exists, else the best]",
)
@click.option("--provider", type=click.Choice(["cpu", "cuda", "openvino", "auto"]), default="cpu", show_default=True,
              help="Execution provider of ONNX Runtime, or OpenVINO.")  # fmt: skip
@click.option("--threads", type=THREADS, help="Threads per operator.  [default: the number of cores]")
@click.option("--memory", type=click.Choice(["fast", "mapped"]), default="fast", show_default=True,
              help="Repack weights for speed, or use the memory-mapped file.")  # fmt: skip
@click.option("--unverified", is_flag=True, help="Allow exports that are not verified.")
@click.option("--tool-format", type=click.Choice(get_args(ToolFormatName)),
              help="How the models call functions.  [default: as their chat templates do]")  # fmt: skip
@click.pass_context
def command(context: click.Context, /, directories: tuple[Path, ...], config: Path | None, **flags: Any) -> None:
    """Answer requests over HTTP with the exported models in each DIRECTORY.

    The protocols are that of OpenAI and the Open Inference Protocol. A model is named after its directory. Decoders
    exported with --profile serving answer many requests at a time. After SIGHUP, models that have changed are loaded
    again.
    """
    try:
        from zoo_runtime.server.http.observe import log_to
        from zoo_runtime.server.http.service import RequestLimits
        from zoo_runtime.server.models import ModelPlace, ModelSettings
        from zoo_runtime.server.process import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _PACKAGES:
            raise
        raise MissingPackageError(
            f"{error.name} is not installed", None, 'pip install "attention-zoo[serve]"'
        ) from error
    if not directories and config is None:
        raise UsageError("no models are given", None, "name their directories, or a file with --config")
    stated_flags = {name: value for name, value in flags.items() if _is_given(context, name)}

    def read() -> tuple[ServeConfig, list[ModelPlace]]:
        """Read the configuration anew."""
        stated, models = ({}, {}) if config is None else read_config(config)
        settings = ServeConfig.from_dict(stated | stated_flags, config)
        if directories:
            options, form = settings.options(), settings.tool_format
            return settings, [ModelPlace(folder.resolve().name, folder, options, form) for folder in directories]
        if not models:
            raise UsageError("no models are given", config, "write [models.NAME] tables")
        overrides = {name: value for name, value in stated_flags.items() if name in OPTIONS}
        return settings, [
            ModelPlace(
                name,
                Path(model.path),
                settings.options(model) | overrides,
                stated_flags.get("tool_format") or model.tool_format or settings.tool_format,
            )
            for name, model in models.items()
        ]

    settings, _ = read()
    keys = _read_keys(None if settings.api_key_file is None else Path(settings.api_key_file))
    if not keys and not _is_loopback(settings.host):
        problem = f"everyone who reaches {settings.host} can use the models: set --api-key-file or {_KEY}"
        warnings.warn(problem, ZooWarning, stacklevel=2)
    log_to(sys.stderr)
    serve(
        lambda: read()[1],
        host=settings.host,
        port=settings.port,
        api_keys=keys,
        origins=settings.cors_origins,
        drain_seconds=settings.drain_seconds,
        limits=RequestLimits(body=settings.max_body, tokens=settings.max_tokens, seconds=settings.timeout),
        logs_texts=settings.log_texts,
        settings=ModelSettings(
            queue=settings.queue,
            prefix_bytes=settings.prefix_cache_bytes,
            verify_recorded=settings.verify_recorded,
            signed_by=None if settings.signed_by is None else Path(settings.signed_by),
        ),
    )


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _read_keys(path: Path | None) -> list[str]:
    """Return the keys in a file, or the key in the environment."""
    where = _KEY if path is None else f"--api-key-file {path}"
    try:
        text = os.environ.get(_KEY) if path is None else path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read ({getattr(error, 'strerror', None) or 'not ASCII'})", where) from error
    if text is None:
        return []
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys or not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise UsageError("a key must be one word of ASCII", where)
    return keys


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
