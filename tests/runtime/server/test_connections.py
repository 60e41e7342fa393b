"""Connections whose clients send or read nothing are closed, and what is not HTTP gets an error in JSON."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from tests.runtime.server.conftest import SECONDS, Server
from zoo_runtime.server.http.app import make_app
from zoo_runtime.server.http.connections import Connection
from zoo_runtime.server.http.service import RequestLimits, Service
from zoo_runtime.server.models import ModelPlace, ModelSettings, ServedModels

COMPLETIONS = "/v1/completions"
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n".encode()


class Impatient(Connection):
    """Short limits."""

    head_seconds = 0.5
    read_seconds = 5.0


@pytest.fixture(scope="module")
def models(writer: Path) -> Iterator[ServedModels]:
    opened = ServedModels(ModelSettings())
    opened.replace([ModelPlace("writer", writer, {"unverified": True, "threads": 1})])
    yield opened
    opened.close()


@contextmanager
def listening(models: ServedModels, limits: RequestLimits) -> Iterator[tuple[str, int]]:
    """Run a server in this process, with short limits for connections."""
    app = make_app(Service(models, limits))
    server = uvicorn.Server(uvicorn.Config(app, http=Impatient, ws="none", lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**15)  # so that little is enough to fill it
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            thread.join(SECONDS)


@pytest.fixture(scope="module")
def address(models: ServedModels) -> Iterator[tuple[str, int]]:
    with listening(models, RequestLimits(body_seconds=0.5)) as found:
        yield found


@contextmanager
def connected(address: tuple[str, int], receive_bytes: int | None = None) -> Iterator[socket.socket]:
    with socket.socket() as raw:
        if receive_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        raw.settimeout(SECONDS)
        raw.connect(address)
        yield raw


def everything(raw: socket.socket) -> bytes:
    """Return what comes until the connection is closed."""
    return b"".join(iter(lambda: raw.recv(65536), b""))


@pytest.mark.parametrize("start", [b"", b"GET /heal", HEAD])
def test_head_that_does_not_end(address: tuple[str, int], start: bytes) -> None:
    """Whether nothing of it came, or a part, on a new connection or after a request."""
    with connected(address) as raw:
        raw.sendall(start)
        assert everything(raw) == b""
    with connected(address) as raw:
        raw.sendall(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n" + start)
        assert everything(raw).startswith(b"HTTP/1.1 200")


def test_head_that_comes_byte_by_byte(address: tuple[str, int]) -> None:
    with connected(address) as raw, pytest.raises(ConnectionError):
        while True:
            raw.sendall(b"x")
            time.sleep(0.05)


def test_body_that_does_not_end(address: tuple[str, int]) -> None:
    with connected(address) as raw:
        raw.sendall(HEAD + b"content-length: 50\r\n\r\n{")
        status, _, body = everything(raw).partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["error"]["code"] == "timeout"


def test_answer_longer_than_the_limits(address: tuple[str, int]) -> None:
    """The limits are those of clients, not of answers."""
    body = {"prompt": ["a"] * 200, "max_tokens": 90, "min_new_tokens": 90}
    begun = time.monotonic()
    found = httpx.post(f"http://{address[0]}:{address[1]}{COMPLETIONS}", json=body, timeout=SECONDS)
    assert found.status_code == 200
    assert time.monotonic() - begun > Impatient.head_seconds


def long_stream(raw: socket.socket) -> None:
    """Ask for a stream that does not fit into the buffers of the system."""
    body = {"prompt": ["a"] * 30, "max_tokens": 90, "min_new_tokens": 90, "stream": True, "logprobs": 20}
    data = json.dumps(body).encode()
    raw.sendall(HEAD + f"content-length: {len(data)}\r\n\r\n".encode() + data)


def metrics(address: tuple[str, int]) -> str:
    return httpx.get(f"http://{address[0]}:{address[1]}/metrics", timeout=SECONDS).text


def wait_for(address: tuple[str, int], text: str) -> None:
    end = time.monotonic() + SECONDS
    while text not in metrics(address):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_reader_that_does_not_read_is_disconnected(address: tuple[str, int]) -> None:
    """Its rows are freed, long before its texts end."""
    with connected(address, receive_bytes=2048) as raw:
        long_stream(raw)
        wait_for(address, f'zoo_requests_total{{route="{COMPLETIONS}",status="499"}} 1.0')
        wait_for(address, 'zoo_running{model="writer"} 0.0')
        assert not everything(raw).endswith(b"0\r\n\r\n")  # what the system had taken, without an end


def test_answer_that_is_not_read_within_the_time_limit(models: ServedModels) -> None:
    """Its status tells that the time was over, not that the client left."""
    with listening(models, RequestLimits(seconds=0.5)) as address, connected(address, receive_bytes=2048) as raw:
        long_stream(raw)
        wait_for(address, f'zoo_requests_total{{route="{COMPLETIONS}",status="504"}} 1.0')
        wait_for(address, 'zoo_running{model="writer"} 0.0')


@pytest.mark.slow
def test_reader_that_reads_slowly_gets_all(address: tuple[str, int]) -> None:
    with connected(address, receive_bytes=2048) as raw:
        long_stream(raw)
        found = b""
        end = time.monotonic() + 1.5 * Impatient.read_seconds
        while not found.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            if time.monotonic() < end:
                time.sleep(0.02)
            part = raw.recv(8192)
            assert part
            found += part
    assert found.count(b'"finish_reason":"length"') == 30


@pytest.mark.parametrize(
    "message",
    [b"nonsense\r\n\r\n", b"GET /healthz HTTP/1.1\r\n\r\n", HEAD + b"content-length: -1\r\n\r\n",
     HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", b"GET /healthz HTTP/1.1\r\nhost: a\r\nx: \x00\r\n\r\n"],
)  # fmt: skip
def test_message_that_is_not_http(address: tuple[str, int], message: bytes) -> None:
    with connected(address) as raw:
        raw.sendall(message)
        head, _, body = everything(raw).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert b"application/json" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    ("target", "status", "content"),
    [
        ("http://other:1/v1/models", 200, b'"object":"list"'),
        ("HTTP://a/v1/models/writer?x=http://b/c", 200, b'"id":"writer"'),
        ("http://a/v1/mod%65ls", 200, b'"object":"list"'),
        ("http://a", 404, b"unknown_route"),
        ("ftp://a/v1/models", 404, b"unknown_route"),
        ("/http://a/v1/models", 404, b"unknown_route"),
    ],
)
def test_target_with_a_host(address: tuple[str, int], target: str, status: int, content: bytes) -> None:
    """As proxies send it (RFC 9112, 3.2.2)."""
    with connected(address) as raw:
        raw.sendall(f"GET {target} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
        answer = everything(raw)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert content in answer


def test_other_protocols_are_not_offered(server: Server) -> None:
    """A request for one is answered in HTTP/1.1, and logged like others."""
    for name in ("websocket", "h2c"):
        headers = {"connection": "upgrade", "upgrade": name}
        assert httpx.get(f"{server.url}/healthz", headers=headers, timeout=SECONDS).json() == {"status": "ok"}
    assert not any("upgrade" in line for line in server.lines)
