"""The configuration of the server: a TOML file, and the flags of ``zoo serve``."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from zoo.config import Settings
from zoo.errors import UsageError
from zoo.reading import parse_toml, read_text

__all__ = ["OPTIONS", "ModelConfig", "ServeConfig", "ToolFormatName", "read_config"]

ToolFormatName = Literal["hermes", "llama", "mistral", "mistral-named", "functiongemma", "gemma4", "json"]
"""How models call functions: see :mod:`zoo_runtime.server.tools.formats`."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    """How a model is opened. Unset options are those of the server."""

    path: str = ""
    """The model directory, relative to the configuration file."""
    dtype: Literal["float32", "float16", "bfloat16", "int8", "int4"] | None = None
    """Precision."""
    variant: str | None = None
    """Export to run; by default that for serving if it exists, else the best."""
    provider: Literal["cpu", "cuda", "openvino", "auto"] | None = None
    """Execution provider."""
    threads: int | None = None
    """Threads per operator."""
    memory: Literal["fast", "mapped"] | None = None
    """Repack weights for speed, or use the memory-mapped file."""
    unverified: bool | None = None
    """Allow exports that are not verified."""
    tool_format: ToolFormatName | None = None
    """How the model calls functions; by default as its chat template does."""

    def __post_init__(self) -> None:
        self.require_positive("threads")


OPTIONS = tuple(field.name for field in fields(ModelConfig) if field.name not in ("path", "tool_format"))
"""Options of :func:`zoo_runtime.load_session`."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Settings):
    """Settings of the server. Those that :class:`ModelConfig` also has are for all models."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port; 0 for a free one."""
    api_key_file: str | None = None
    """File with keys, one a line, of which requests must have one."""
    cors_origins: tuple[str, ...] = ()
    """Origins of pages in browsers that may use the server; ``*`` for all."""
    queue: int = 256
    """Inputs that wait for a model."""
    max_tokens: int = 4096
    """New tokens of a text that a request may ask for."""
    max_body: int = 4 * 2**20
    """Bytes of a request's body."""
    timeout: float = 600.0
    """Seconds for an answer."""
    log_texts: bool = False
    """Log the texts of requests and answers, too."""
    drain_seconds: int = 30
    """Seconds after SIGTERM in which requests may finish."""
    prefix_cache_bytes: int = 0
    """Memory of each model for the pasts of common beginnings of prompts, or for encoded inputs; 0 for none."""
    verify_recorded: bool = False
    """Refuse to serve a model unless the recorded comparison of its export holds on this machine."""
    signed_by: str | None = None
    """File with a public key, or certificates, of whoever must have signed the directory of each model."""
    dtype: Literal["float32", "float16", "bfloat16", "int8", "int4"] | None = None
    variant: str | None = None
    provider: Literal["cpu", "cuda", "openvino", "auto"] = "cpu"
    threads: int | None = None
    memory: Literal["fast", "mapped"] = "fast"
    unverified: bool = False
    tool_format: ToolFormatName | None = None

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host is empty: give an address, 0.0.0.0 for all")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, got {self.port}")
        for origin in self.cors_origins:
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#A-Z\s]+", origin):
                raise ValueError(f"{origin!r:.200} is not an origin, such as https://example.org")
        self.require_positive("queue", "max_tokens", "max_body", "timeout", "threads")
        for name in ("drain_seconds", "prefix_cache_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    def options(self, model: ModelConfig | None = None) -> dict[str, Any]:
        """Return the options of :func:`zoo_runtime.load_session` for a model."""
        overrides = {name: getattr(model, name) for name in OPTIONS if getattr(model, name, None) is not None}
        return {name: getattr(self, name) for name in OPTIONS} | overrides


def read_config(path: Path) -> tuple[dict[str, Any], dict[str, ModelConfig]]:
    """Return the settings in a configuration file, and its models by name.

    Raises :class:`UsageError` for a file that cannot be read, an unknown key or a wrong value.
    """
    try:
        values = parse_toml(read_text(path))
    except OSError as error:
        raise UsageError(f"cannot be read ({error.strerror})", path) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not TOML ({error})", path) from error
    tables = values.pop("models", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise UsageError("models must be tables, such as [models.NAME]", path)
    settings = ServeConfig.from_dict(values, path)
    for name in ("api_key_file", "signed_by"):
        if (file := getattr(settings, name)) is not None:
            values[name] = str(path.parent / file)
    models = {}
    for name, table in tables.items():
        where = f"{path} [models.{name}]"
        if "path" not in table:
            raise UsageError("path is missing", where, 'write path = "DIRECTORY"')
        if not name or "/" in name:
            raise UsageError(f"{name!r} is not a name for requests", where, "leave out slashes")
        model = ModelConfig.from_dict(table, where)
        models[name] = ModelConfig.from_dict({**table, "path": str(path.parent / model.path)}, where)
    return values, models
