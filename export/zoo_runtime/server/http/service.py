"""Reading of bodies, choice of models, and waiting for results, for the routes of all protocols."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from zoo.errors import ZooError
from zoo_runtime.running.runner import Runner
from zoo_runtime.server.engines.work import Work
from zoo_runtime.server.http.bodies import Body
from zoo_runtime.server.http.observe import CLIENT, FACTS, HELD
from zoo_runtime.server.http.responses import Events, Mailbox, while_connected
from zoo_runtime.server.models import Served, ServedModels
from zoo_runtime.server.request_error import RequestError, server_error

__all__ = ["RequestLimits", "Service", "content_type"]

B = TypeVar("B", bound=Body)
_LONG = 2**16
"""Bytes of a body that takes long to parse."""


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of a request."""

    body: int = 4 * 2**20
    """Bytes of a body."""
    tokens: int = 4096
    """New tokens of a text."""
    seconds: float = 600.0
    """Time for an answer."""
    body_seconds: float = 30.0
    """Time for a client to send its body."""


def content_type(request: Request) -> str:
    """Return the type of a body without parameters. Raises :class:`RequestError` for JSON in another charset."""
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    for parameter in parameters.lower().split(";"):
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip().strip('"') not in ("utf-8", "utf8", "us-ascii"):
            raise RequestError(415, "the charset must be utf-8", "invalid_content_type")
    return kind.strip().lower()


@dataclass
class Service:
    """The open models, the limits of a request, what is logged of it, and the requests that wait for results."""

    models: ServedModels
    limits: RequestLimits
    mailbox: Mailbox = field(default_factory=Mailbox)
    logs_texts: bool = False
    """Whether the log has the texts of requests and answers."""
    _timeouts: set[asyncio.Timeout] = field(default_factory=set)
    _stopped: bool = False

    @asynccontextmanager
    async def while_running(self, seconds: float | None = None) -> AsyncIterator[None]:
        """Limit the time of a block. Raises TimeoutError, or :class:`RequestError` if the server stops."""
        try:
            async with asyncio.timeout(0 if self._stopped else seconds) as timeout:
                self._timeouts.add(timeout)
                try:
                    yield
                finally:
                    self._timeouts.discard(timeout)
        except TimeoutError:
            if self._stopped:
                wait = {"retry-after": "1"}
                raise RequestError(503, "the server is stopping", "stopping", headers=wait) from None
            raise

    def stop(self) -> None:
        """End all requests that wait for results, also later ones, with status 503."""
        self._stopped = True
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(asyncio.get_running_loop().time())

    def note_texts(self, request: Request, **texts: Any) -> None:
        """Add texts to the line of a request in the log, if it has them."""
        if self.logs_texts:
            request.scope[FACTS] |= texts

    async def read_json(self, request: Request, kind: type[B]) -> B:
        """Read and check a body in JSON, a long one in a thread of its own.

        Raises :class:`RequestError` as :meth:`read` and :meth:`Body.read` do, or if it has another type.
        """
        if content_type(request) != "application/json":
            raise RequestError(415, "the content type must be application/json", "invalid_content_type")
        data = await self.read(request)
        return kind.read(data) if len(data) < _LONG else await run_in_threadpool(kind.read, data)

    async def read(self, request: Request) -> bytes:
        """Read a body.

        Raises :class:`RequestError` if it is compressed, too long or too slow; the rest of it is not read.
        """
        if request.headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
            plain = {"accept-encoding": "identity"}  # RFC 9110, 15.5.16
            raise RequestError(415, "the body must not be compressed", "invalid_content_encoding", headers=plain)
        close = {"connection": "close"}
        refusal = RequestError(413, f"the body has more than {self.limits.body} bytes", "body_too_large", headers=close)
        if request.headers.get("content-length", "0").rjust(20, "0") > str(self.limits.body).rjust(20, "0"):
            raise refusal
        data = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for part in request.stream():
                    data += part
                    if len(data) > self.limits.body:
                        raise refusal
        except TimeoutError:
            raise RequestError(408, "the body did not arrive in time", "timeout", headers=close) from None
        return bytes(data)

    def find(self, request: Request, name: str) -> Served:
        """Return a model, which stays open until the request ends. Raises :class:`RequestError` if there is none."""
        served = self.models.hold(name)
        request.scope[HELD].append(served)
        request.scope[FACTS]["model"] = served.name
        return served

    async def answer(
        self, request: Request, served: Served, runner: Runner[Any], inputs: Sequence[Any], param: str
    ) -> list[dict[str, Any]]:
        """Return the results of a task."""
        self.check_count(served, runner, len(inputs), param)

        def read() -> list[Any]:
            return [served.read(runner, value, number, param) for number, value in enumerate(inputs, 1)]

        return await self.results(request, served, runner, await run_in_threadpool(read))

    async def results(
        self,
        request: Request,
        served: Served,
        runner: Runner[Any],
        items: Sequence[Any],
        failure: Callable[[ZooError], RequestError] = server_error,
    ) -> list[dict[str, Any]]:
        """Return the results of a task for inputs that its runner has read; ``failure`` makes its errors."""
        events = Events(self.mailbox)
        works = [Work(runner, item, events.deliver(place)) for place, item in enumerate(items)]
        served.engine(runner).submit(works, request.scope.get(CLIENT))
        return await self.collect(request, works, events, failure)

    def check_count(self, served: Served, runner: Runner[Any], count: int, param: str) -> None:
        """Raise :class:`RequestError` if inputs can never be answered together."""
        if not count:
            raise RequestError(400, "there is no input", "invalid_value", param)
        if count > (most := served.engine(runner).most):
            raise RequestError(400, f"at most {most} inputs can be answered together", "invalid_value", param)

    async def collect(
        self,
        request: Request,
        works: Sequence[Work],
        events: Events,
        failure: Callable[[ZooError], RequestError] = server_error,
    ) -> list[dict[str, Any]]:
        """Wait for the results of works, and cancel them if the client leaves or the time is over."""
        results: list[dict[str, Any]] = [{} for _ in works]

        async def receive() -> None:
            for _ in works:
                index, event = await events.next()
                if event.error is not None:
                    raise failure(event.error) from event.error
                assert event.result is not None
                results[index] = event.result

        try:
            async with self.while_running():
                await while_connected(request, receive(), self.limits.seconds)
        finally:
            for work in works:
                work.cancel()
        return results
