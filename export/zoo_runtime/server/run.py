"""Running the server: its socket, its signals, and the end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from zoo.errors import UsageError, ZooError
from zoo_runtime.server.app import Limits, make_app
from zoo_runtime.server.models import open_models
from zoo_runtime.server.observe import log

__all__ = ["serve"]

_BACKLOG = 2048


def serve(
    directories: Sequence[Path],
    *,
    host: str,
    port: int,
    api_key: str | None,
    queue: int,
    drain_seconds: int,
    limits: Limits,
    options: Mapping[str, Any],
) -> None:
    """Serve models until SIGTERM or SIGINT, then finish the requests that have begun.

    Args:
        directories: model directories.
        host: address to listen on.
        port: port, or 0 for a free one.
        api_key: the key of requests, if any.
        queue: maximum number of inputs that wait, of each model.
        drain_seconds: time after a signal in which requests may finish.
        limits: limits of a request.
        options: see :func:`zoo_runtime.load_session`.

    Raises:
        UsageError: the address cannot be used.
        ZooError: a model cannot be opened.
    """
    listener = _listen(host, port)
    try:
        models = open_models(directories, queue, **options)
    except ZooError:
        listener.close()
        raise
    config = uvicorn.Config(
        make_app(models, limits, api_key),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        backlog=_BACKLOG,
        timeout_graceful_shutdown=drain_seconds,
    )
    # uvicorn handles these signals, and raises them again when it has finished
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        address = listener.getsockname()
        name = f"[{address[0]}]" if ":" in address[0] else address[0]
        asyncio.run(_Server(config, f"http://{name}:{address[1]}", list(models)).serve([listener]))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for served in models.values():
            served.close()
    log("stopped")


class _Server(uvicorn.Server):
    """A server that logs when it listens, and when it stops."""

    def __init__(self, config: uvicorn.Config, url: str, models: list[str]) -> None:
        super().__init__(config)
        self._url, self._models = url, models

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log("listening", url=self._url, models=self._models)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log("stopping", requests=len(self.server_state.tasks))
        await super().shutdown(sockets)


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address. Raises :class:`UsageError` if that is not possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise UsageError(f"cannot listen ({error.strerror})", f"{host} port {port}", "choose another") from error
    return listener
