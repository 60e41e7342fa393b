"""Running the server: its socket, its signals, and the end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict

import uvicorn

from zoo.errors import UsageError, ZooError
from zoo_runtime.server.http.app import make_app
from zoo_runtime.server.http.connections import Connection
from zoo_runtime.server.http.observe import log
from zoo_runtime.server.http.service import RequestLimits, Service
from zoo_runtime.server.models import ModelPlace, ModelSettings, ServedModels

__all__ = ["serve"]

_BACKLOG = 2048
_LAST_SECONDS = 2
"""Time to send the errors of requests that have not ended by themselves."""


def serve(
    places: Callable[[], Sequence[ModelPlace]],
    *,
    host: str,
    port: int,
    api_keys: Sequence[str],
    origins: Sequence[str],
    drain_seconds: int,
    limits: RequestLimits,
    logs_texts: bool,
    settings: ModelSettings,
) -> None:
    """Serve models until SIGTERM or SIGINT, then finish the requests that have begun.

    After SIGHUP, models that have changed are exchanged, and others are loaded or unloaded.

    Args:
        places: returns the models to serve; called at the start and after SIGHUP.
        host: address to listen on.
        port: port, or 0 for a free one.
        api_keys: keys of which requests must have one, if there are any.
        origins: origins of pages in browsers that may use the server.
        drain_seconds: time after a signal in which requests may finish.
        limits: limits of a request.
        logs_texts: whether the log has the texts of requests and answers.
        settings: settings of all models.

    Raises:
        UsageError: the address cannot be used.
        ZooError: a model cannot be opened.
    """
    listener = _listen(host, port)
    models = ServedModels(settings)
    try:
        models.replace(places())
    except ZooError:
        listener.close()
        raise
    service = Service(models, limits, logs_texts=logs_texts)
    config = uvicorn.Config(
        make_app(service, api_keys, origins),
        log_config=None,
        access_log=False,
        server_header=False,
        http=Connection,
        ws="none",
        lifespan="off",
        backlog=_BACKLOG,
        timeout_graceful_shutdown=drain_seconds + _LAST_SECONDS,
    )
    address = listener.getsockname()
    name = f"[{address[0]}]" if ":" in address[0] else address[0]
    server = _Server(config, f"http://{name}:{address[1]}", service, places, drain_seconds)
    # uvicorn handles these signals while it runs, and raises them again when it has finished
    before = {number: signal.signal(number, server.end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        asyncio.run(server.serve([listener]))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        models.close()
    log("stopped")


class _Server(uvicorn.Server):
    """A server that logs when it listens and when it stops, and exchanges models after SIGHUP."""

    def __init__(
        self,
        config: uvicorn.Config,
        url: str,
        service: Service,
        places: Callable[[], Sequence[ModelPlace]],
        drain_seconds: int,
    ) -> None:
        super().__init__(config)
        self._url = url
        self._service = service
        self._places = places
        self._drain_seconds = drain_seconds
        self._models = service.models
        self._reloads = set[asyncio.Task[None]]()

    def end(self, *_: object) -> None:
        """Stop soon; before the start, end it."""
        self.should_exit = True

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
        asyncio.get_running_loop().call_later(self._drain_seconds, self._service.stop)
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
