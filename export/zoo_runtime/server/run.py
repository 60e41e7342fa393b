"""Running the server: its socket, its signals, and the end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict

import uvicorn

from zoo.errors import UsageError, ZooError
from zoo_runtime.server.app import make_app
from zoo_runtime.server.models import Models, ModelSettings, Place
from zoo_runtime.server.observe import log
from zoo_runtime.server.service import Limits

__all__ = ["serve"]

_BACKLOG = 2048


def serve(
    places: Callable[[], Sequence[Place]],
    *,
    host: str,
    port: int,
    api_key: str | None,
    drain_seconds: int,
    limits: Limits,
    settings: ModelSettings,
) -> None:
    """Serve models until SIGTERM or SIGINT, then finish the requests that have begun.

    After SIGHUP, models that have changed are exchanged, and others are loaded or unloaded.

    Args:
        places: returns the models to serve; called at the start and after SIGHUP.
        host: address to listen on.
        port: port, or 0 for a free one.
        api_key: the key of requests, if any.
        drain_seconds: time after a signal in which requests may finish.
        limits: limits of a request.
        settings: settings of all models.

    Raises:
        UsageError: the address cannot be used.
        ZooError: a model cannot be opened.
    """
    listener, models = _listen(host, port), Models(settings)
    try:
        models.replace(places())
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
        asyncio.run(_Server(config, f"http://{name}:{address[1]}", models, places).serve([listener]))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        models.close()
    log("stopped")


class _Server(uvicorn.Server):
    """A server that logs when it listens and when it stops, and exchanges models after SIGHUP."""

    def __init__(self, config: uvicorn.Config, url: str, models: Models, places: Callable[[], Sequence[Place]]) -> None:
        super().__init__(config)
        self._url, self._models, self._places = url, models, places
        self._reloads = set[asyncio.Task[None]]()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if hasattr(signal, "SIGHUP"):  # Windows has none
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
        log("listening", url=self._url, models=list(self._models))

    def _reload(self) -> None:
        """Exchange models in a thread, while requests are answered."""
        task = asyncio.ensure_future(asyncio.to_thread(self._replace))
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    def _replace(self) -> None:
        try:
            changes = self._models.replace(self._places())
        except Exception as error:  # of a plugin, too: the present models are still served
            reason = error.command_line if isinstance(error, ZooError) else type(error).__name__
            log("reload failed", error=reason)
        else:
            log("reloaded", **asdict(changes))

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
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not the name of a host"
        raise UsageError(f"cannot listen ({reason})", f"{host} port {port}", "choose another") from error
    return listener
