"""A static server on this machine for one browser, which also exchanges binary messages with it."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO

__all__ = ["Server", "serving"]

_PART = 2**20
_TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".mjs": "text/javascript",
          ".wasm": "application/wasm", ".json": "application/json"}  # fmt: skip


class Server(ThreadingHTTPServer):
    """Serves files and bytes by path, whole or in ranges, and keeps what is posted.

    Pages are isolated from other origins, which shared memory requires of a page. Paths begin with a random part, so
    that other users of the machine cannot read them.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, Path | bytes] = {}
        """The contents to serve, by path without the random part."""
        self.posted: dict[str, bytes] = {}
        """The bodies of POST requests, by path without the random part."""
        self._secret = secrets.token_hex(16)

    @property
    def root(self) -> str:
        """The URL of the empty path, with a slash at its end."""
        return f"http://127.0.0.1:{self.server_port}/{self._secret}/"

    def name_of(self, path: str) -> str | None:
        """Return the part of a requested path after the random part, or None if that is wrong."""
        secret, _, name = path.removeprefix("/").partition("/")
        return name if secrets.compare_digest(secret.encode(), self._secret.encode()) else None

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore connections that the browser closes."""


@contextmanager
def serving() -> Iterator[Server]:
    """Run a server in a thread while the block runs."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        name = self.server.name_of(self.path)
        content = self.server.files.get(name) if name is not None else None
        if name is None or content is None:
            self._head(HTTPStatus.NOT_FOUND, 0)
        elif isinstance(content, bytes):
            start, stop = self._range(len(content))
            self._head_of(name, start, stop, len(content))
            self.wfile.write(memoryview(content)[start:stop])
        else:
            with content.open("rb") as file:
                size = content.stat().st_size
                start, stop = self._range(size)
                self._head_of(name, start, stop, size)
                self._send(file, start, stop)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = self.server.name_of(self.path)
        if name is None:
            self._head(HTTPStatus.NOT_FOUND, 0)
            return
        self.server.posted[name] = data
        self._head(HTTPStatus.NO_CONTENT, 0)

    def log_message(self, format: str, *arguments: object) -> None:
        """Write no log."""

    def _send(self, file: BinaryIO, start: int, stop: int) -> None:
        file.seek(start)
        with suppress(ConnectionError):
            while start < stop and (part := file.read(min(_PART, stop - start))):
                self.wfile.write(part)
                start += len(part)

    def _range(self, size: int) -> tuple[int, int]:
        """Return the requested bytes; all of them for a request of none or of several ranges."""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None or int(match[1]) >= size:
            return 0, size
        return int(match[1]), min(int(match[2]) + 1, size) if match[2] else size

    def _head_of(self, name: str, start: int, stop: int, size: int) -> None:
        if (start, stop) == (0, size):
            self._head(HTTPStatus.OK, size, name)
        else:
            self._head(HTTPStatus.PARTIAL_CONTENT, stop - start, name, f"bytes {start}-{stop - 1}/{size}")

    def _head(self, status: HTTPStatus, length: int, name: str = "", part: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", _TYPES.get(Path(name).suffix, "application/octet-stream"))
        self.send_header("Content-Length", str(length))
        self.send_header("Accept-Ranges", "bytes")
        if part is not None:
            self.send_header("Content-Range", part)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        self.end_headers()
