"""The server of the browser: whole files, ranges, posted bodies, and nothing without its secret."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from http.client import HTTPResponse
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from zoo_export.web.server import Server, serving

CONTENT = bytes(range(256)) * 5000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("served") / "weights"
    path.write_bytes(CONTENT)
    with serving() as opened:
        opened.files |= {"bytes": CONTENT, "file": path, "page.html": b"<p>", "module.mjs": b"", "empty": b""}
        yield opened


def fetch(url: str, headers: Mapping[str, str] | None = None, body: bytes | None = None) -> HTTPResponse:
    response: HTTPResponse = urlopen(Request(url, body, dict(headers or {})), timeout=300)
    return response


@pytest.mark.parametrize("name", ["bytes", "file"])
@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-19", 10, 20),
        ("bytes=1279990-", 1279990, 1280000),
        ("bytes=1279990-9999999", 1279990, 1280000),
        ("bytes=1-1279998", 1, 1279999),
    ],
)
def test_range(server: Server, name: str, asked: str, start: int, stop: int) -> None:
    """One range of a resource (RFC 9110, section 14.2)."""
    response = fetch(server.root + name, {"Range": asked})
    assert response.status == 206
    assert response.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{len(CONTENT)}"
    assert response.headers["Content-Length"] == str(stop - start)
    assert response.read() == CONTENT[start:stop]


@pytest.mark.parametrize("name", ["bytes", "file"])
@pytest.mark.parametrize("asked", [None, "bytes=0-", "bytes=0-1,5-6", "bytes=9999999-", "lines=1-2", "bytes=-5"])
def test_whole_content(server: Server, name: str, asked: str | None) -> None:
    """Ranges that are not supported may be ignored."""
    response = fetch(server.root + name, {} if asked is None else {"Range": asked})
    assert (response.status, response.headers["Content-Range"]) == (200, None)
    assert response.headers["Accept-Ranges"] == "bytes"
    assert response.read() == CONTENT


def test_types_and_isolation(server: Server) -> None:
    """Modules and WebAssembly need their types, and shared memory the two headers."""
    for name, kind in (("page.html", "text/html; charset=utf-8"), ("module.mjs", "text/javascript"),
                       ("bytes", "application/octet-stream"), ("empty", "application/octet-stream")):  # fmt: skip
        headers = fetch(server.root + name).headers
        assert headers["Content-Type"] == kind
        assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert headers["Cross-Origin-Embedder-Policy"] == "require-corp"


def test_posted_bodies_are_kept(server: Server) -> None:
    assert fetch(f"{server.root}outputs", body=b"\x00\x01").status == 204
    assert server.posted.pop("outputs") == b"\x00\x01"


@pytest.mark.parametrize("body", [None, b"mine"])
def test_other_users_get_nothing(server: Server, body: bytes | None) -> None:
    """Paths without the random part, or with a wrong one."""
    port = f"http://127.0.0.1:{server.server_port}"
    for url in (f"{port}/bytes", f"{port}/{'0' * 32}/bytes", f"{port}/"):
        with pytest.raises(HTTPError, match="404"):
            fetch(url, body=body)
    assert server.posted == {}
    for name in ("missing", "../bytes", ""):
        with pytest.raises(HTTPError, match="404"):
            fetch(server.root + name)
