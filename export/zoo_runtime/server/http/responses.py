"""Responses: in JSON, as server-sent events, and to clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from zoo_runtime.server.engines.work import Event
from zoo_runtime.server.http.encoding import encode_json
from zoo_runtime.server.request_error import RequestError

__all__ = ["Events", "LeftError", "Mailbox", "Stream", "as_json", "as_long_json", "failed", "sent", "while_connected"]

T = TypeVar("T")


class LeftError(Exception):
    """The client closed its connection."""


class Mailbox:
    """Hands events from the threads of engines to the event loop.

    The loop is woken once for all events that come until it runs: a step of an engine has one for each row.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[asyncio.Queue[tuple[int, Event]], int, Event]] = deque()
        self._is_woken = False

    def put(
        self, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[tuple[int, Event]], index: int, event: Event
    ) -> None:
        """Put an event with the index of its work into a queue of the loop. Called in any thread."""
        self._events.append((queue, index, event))
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._is_woken = False  # first, so that an event that comes from now on wakes the loop again
        while self._events:
            queue, index, event = self._events.popleft()
            queue.put_nowait((index, event))


class Events:
    """The events of the works of one request, in the event loop.

    Args:
        mailbox: the mailbox of the loop.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._loop = asyncio.get_running_loop()
        self._queue = asyncio.Queue[tuple[int, Event]]()

    def deliver(self, index: int) -> Callable[[Event], None]:
        """Return the function to which an engine gives the events of one work, in its own thread."""
        return partial(self._mailbox.put, self._loop, self._queue, index)

    async def next(self) -> tuple[int, Event]:
        """Return the next event, with the index of its work.

        It gives way to other tasks even if there is one already: a client that left is noticed between two events.
        """
        if not self._queue.empty():
            await asyncio.sleep(0)
        return await self._queue.get()


class Stream(StreamingResponse):
    """Server-sent events. ``finish`` is called at the end, even if the client leaves before the first of them."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncIterator[bytes], finish: Callable[[], None]) -> None:
        super().__init__(content, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self._finish = finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._finish()


async def while_connected(request: Request, answer: Awaitable[T], seconds: float) -> T:
    """Await an answer while the client is connected. Raises :class:`LeftError` or :class:`RequestError`."""
    result, left = asyncio.ensure_future(answer), asyncio.ensure_future(_until_left(request))
    try:
        await asyncio.wait({result, left}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if result.done():
            return result.result()
        if left.done():
            raise LeftError
        raise RequestError(504, f"no answer within {seconds:g} s", "timeout")
    finally:
        for task in (result, left):
            task.cancel()
        await asyncio.gather(result, left, return_exceptions=True)


async def _until_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def sent(body: Mapping[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + _encoded(body) + b"\n\n"


def _encoded(body: Mapping[str, Any] | Sequence[Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def as_json(
    body: Mapping[str, Any] | Sequence[Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response in JSON."""
    return Response(_encoded(body), status, headers, media_type="application/json")


async def as_long_json(make: Callable[[], Mapping[str, Any]], remedy: str | None = None) -> Response:
    """Return a response whose body is made and encoded in a thread: see :func:`encode_json`."""
    content = await run_in_threadpool(lambda: encode_json(make(), remedy))
    return Response(content, media_type="application/json")


def failed(error: RequestError) -> Response:
    """Return the response of a request that is not answered."""
    return as_json(error.body, error.status, error.headers)
