"""HTTP connections: time limits for clients that send or read nothing, and errors for what is not HTTP."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from zoo_runtime.server.http.responses import failed
from zoo_runtime.server.request_error import RequestError

__all__ = ["Connection"]


class Connection(H11Protocol):
    """A connection to a client, which is closed if it makes no progress."""

    head_seconds = 30.0
    """Time for a client to send the head of a request."""
    read_seconds = 300.0
    """Time in which a client must read a part of what was sent, if the buffers are full: a third of the system's."""
    _heading: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        super().connection_made(transport)
        self._limit_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._limit_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._heading, self._reading):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP with an error in JSON, unless an answer has begun."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        response = failed(RequestError(400, "the message is not valid HTTP", "invalid_http"))
        headers = [*response.raw_headers, (b"connection", b"close")]
        head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _should_upgrade(self) -> bool:
        """Answer a request for another protocol in HTTP/1.1. uvicorn would warn in the log."""
        return False

    def _limit_head(self) -> None:
        """Close the connection in some time, unless a request is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self._heading is not None:
                self._heading.cancel()
                self._heading = None
        elif self._heading is None and not self.transport.is_closing():
            self._heading = self.loop.call_later(self.head_seconds, self.timeout_keep_alive_handler)

    def _limit_reading(self) -> None:
        """Break the connection in some time, unless the client reads."""
        left = self.transport.get_write_buffer_size()

        def check() -> None:
            if self.transport.get_write_buffer_size() < left:
                self._limit_reading()
            else:
                self.transport.abort()

        self._reading = self.loop.call_later(self.read_seconds, check)
