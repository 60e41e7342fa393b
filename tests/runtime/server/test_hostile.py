"""Clients that mean harm, or are broken: others are answered meanwhile, and the server's memory stays flat."""

from __future__ import annotations

import json
import resource
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.runtime.server.conftest import KEPT, SECONDS, Server, serving
from zoo.checkpoints.exporting import export_checkpoint
from zoo.checkpoints.importing import import_checkpoint
from zoo_export.export import export_graphs_only

COMPLETIONS = "/v1/completions"
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n".encode()
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
BODY = {"model": "writer", "prompt": "hello", "max_tokens": 5}


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, limits=KEPT, timeout=SECONDS) as client:
        yield client


@contextmanager
def connected(server: Server, receive_bytes: int | None = None) -> Iterator[socket.socket]:
    """Open a connection, if wanted with a small buffer for what it receives."""
    address = urlsplit(server.url)
    with socket.socket() as raw:
        if receive_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        raw.settimeout(SECONDS)
        raw.connect((str(address.hostname), int(address.port or 0)))
        yield raw


def everything(raw: socket.socket) -> bytes:
    """Return what comes until the connection is closed."""
    parts = []
    try:
        while part := raw.recv(65536):
            parts.append(part)
    except ConnectionResetError:  # it was closed while we were sending
        pass
    return b"".join(parts)


def memory(server: Server) -> int:
    return int(psutil.Process(server.process.pid).memory_info().rss)


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/tasks/next-token", "/v2/models/writer/infer"])
def test_endless_body_is_refused_at_the_limit(server: Server, http: httpx.Client, path: str) -> None:
    """A body of a gigabyte in chunks, without a length: most of it is never sent."""
    before, sent = memory(server), 0
    part = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with connected(server) as raw:
        raw.sendall(CHUNKED.replace(COMPLETIONS.encode(), path.encode()))
        raw.settimeout(0.5)
        try:
            while sent < 10**9:
                raw.sendall(part)
                sent += len(part)
        except (ConnectionError, TimeoutError):
            pass
    assert sent < 50 * 2**20
    assert memory(server) < before + 64 * 2**20
    assert http.post(COMPLETIONS, json=BODY).status_code == 200


@pytest.mark.parametrize("stated", [10**9, 10**30])
def test_stated_length_beyond_the_limit_is_refused_unread(server: Server, stated: int) -> None:
    with connected(server) as raw:
        raw.sendall(HEAD + f"content-length: {stated}\r\n\r\n".encode())
        status, _, body = everything(raw).partition(b"\r\n\r\n")
    assert status.startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))  # h11 refuses numbers of more than 20 digits
    if stated == 10**9:
        assert json.loads(body)["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(
    "body",
    [b"zz\r\n{}\r\n0\r\n\r\n", b"-1\r\n{}\r\n", b"2\r\n{}xx\r\n0\r\n\r\n", b"ffffffffffffffffffffff\r\n{}\r\n",
     b"\r\n\r\n", b"2;" + b"x" * 70_000 + b"\r\n{}\r\n0\r\n\r\n"],
)  # fmt: skip
def test_malformed_chunks(server: Server, http: httpx.Client, body: bytes) -> None:
    with connected(server) as raw:
        raw.sendall(CHUNKED + body)
        assert everything(raw).startswith(b"HTTP/1.1 400")
    assert http.post(COMPLETIONS, json=BODY).status_code == 200
    assert not server.events("exception")


def test_body_that_ends_early(server: Server, http: httpx.Client) -> None:
    """The connection is closed in the middle of a chunk, and of a body of a stated length."""
    before = len([one for one in server.events("request") if one["status"] == 499])
    for start in (CHUNKED + b"5\r\n{", HEAD + b"content-length: 9\r\n\r\n{"):
        with connected(server) as raw:
            raw.sendall(start)
    server.wait_for(lambda: len([one for one in server.events("request") if one["status"] == 499]) == before + 2)
    assert http.post(COMPLETIONS, json=BODY).status_code == 200


def test_two_lengths_and_smuggled_requests(server: Server) -> None:
    """A length beside chunks, or two lengths, could hide a second request from a proxy."""
    for headers in (b"content-length: 4\r\ncontent-length: 5\r\n\r\n{}{}", b"transfer-encoding: gzip\r\n\r\n{}"):
        with connected(server) as raw:
            raw.sendall(HEAD + headers)
            assert everything(raw).startswith((b"HTTP/1.1 400", b"HTTP/1.1 501"))


def test_slow_reader_frees_its_rows(server: Server, http: httpx.Client) -> None:
    """A client that reads nothing of a long stream: its texts end, and the rows are free for others."""
    body = {"model": "writer", "prompt": ["a"] * 40, "max_tokens": 90, "min_new_tokens": 90, "stream": True}
    data = json.dumps(body).encode()
    before = memory(server)
    with connected(server, receive_bytes=2048) as raw:
        raw.sendall(HEAD + f"content-length: {len(data)}\r\n\r\n".encode() + data)
        server.wait_for(lambda: 'zoo_running{model="writer"} 0.0' not in http.get("/metrics").text)
        assert http.post(COMPLETIONS, json=BODY).status_code == 200
        server.wait_for(lambda: 'zoo_running{model="writer"} 0.0' in http.get("/metrics").text)
        assert memory(server) < before + 64 * 2**20
        text = everything_until(raw, b"data: [DONE]")
        assert text.count(b'"finish_reason":"length"') == 40


def everything_until(raw: socket.socket, end: bytes) -> bytes:
    text = b""
    while end not in text:
        part = raw.recv(4096)
        assert part
        text += part
    return text


def check_idle_connections(server: Server, count: int) -> None:
    """Some send nothing, some half a head, and some half a body."""
    with ExitStack() as stack:
        for number in range(count):
            raw = stack.enter_context(connected(server))
            raw.sendall((b"", b"GET / HT", CHUNKED + b"2\r\n{")[number % 3])
        for _ in range(3):
            found = httpx.post(f"{server.url}{COMPLETIONS}", json=BODY, timeout=SECONDS)
            assert found.status_code == 200
            assert httpx.get(f"{server.url}/readyz", timeout=SECONDS).status_code == 200


@contextmanager
def open_files(count: int) -> Iterator[None]:
    """Allow this process, and those that it starts, a number of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (resource.RLIM_INFINITY,) and hard < count:
        pytest.skip(f"only {hard} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_idle_connections(writer: Path) -> None:
    with open_files(2000), serving(writer, "--unverified") as server:
        check_idle_connections(server, 1000)
        assert server.stop() == 0


@pytest.mark.slow
def test_ten_thousand_idle_connections(writer: Path) -> None:
    with open_files(11_000), serving(writer, "--unverified") as server:
        before = memory(server)
        check_idle_connections(server, 10_000)
        assert memory(server) < before + 400 * 2**20
        assert server.stop() == 0


@pytest.mark.slow
def test_too_few_files_for_a_request(writer: Path, tmp_path: Path) -> None:
    """A request that has to open a file is answered later, and the others go on."""
    export_checkpoint(writer, tmp_path / "hub")
    shutil.copyfile(writer / "chat_template.jinja", tmp_path / "hub" / "chat_template.jinja")
    (tmp_path / "hub" / "generation_config.json").write_text('{"temperature": 1.0}')
    import_checkpoint(tmp_path / "hub", tmp_path / "writer", verify=False)
    export_graphs_only(tmp_path / "writer")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        serving(tmp_path / "writer", "--unverified") as server,
        httpx.Client(base_url=server.url, limits=KEPT, timeout=SECONDS) as client,
    ):
        assert client.post(COMPLETIONS, json=BODY).status_code == 200
        used = psutil.Process(server.process.pid).num_fds()
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (used, hard))
        response = client.post(COMPLETIONS, json=BODY | {"repetition_penalty": 1.5})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "overloaded"
        assert client.post(COMPLETIONS, json=BODY).status_code == 200
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (used + 20, hard))
        assert client.post(COMPLETIONS, json=BODY | {"repetition_penalty": 1.5}).status_code == 200


@pytest.mark.slow
def test_too_few_files_for_connections(writer: Path) -> None:
    """With no file left for a further connection, the present ones are served, and new ones once there is room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        serving(writer, "--unverified") as server,
        httpx.Client(base_url=server.url, limits=KEPT, timeout=SECONDS) as client,
    ):
        assert client.post(COMPLETIONS, json=BODY).status_code == 200
        used = psutil.Process(server.process.pid).num_fds()
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (used + 20, hard))
        with ExitStack() as stack:
            for _ in range(60):
                stack.enter_context(connected(server))
            assert client.post(COMPLETIONS, json=BODY).status_code == 200

        def answers() -> Any:
            try:
                return httpx.get(f"{server.url}/healthz", timeout=SECONDS).status_code == 200
            except httpx.TransportError:
                return False

        server.wait_for(answers)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
