"""A browser, and pages that are served to it."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import browser, onnxruntime_web
from zoo.artifact import ModelDirectory, write_json
from zoo.errors import UsageError
from zoo_export.publish.web import write_web
from zoo_export.web.install import WebRuntime, find_package, find_tokenizers
from zoo_export.web.verify import web_record

__all__ = ["browser", "onnxruntime_web"]

PATIENCE = 300_000
"""Milliseconds to wait for a page, which may be slow but never is in vain."""
CALL = """async ({ url, input, options, load }) => {
  const { loadSession } = await import(url + "zoo.js");
  const session = await loadSession(url, load);
  const results = [], plain = (value) => {
    if (ArrayBuffer.isView(value) || Array.isArray(value)) return Array.from(value, plain);
    if (!(value instanceof Object)) return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, plain(item)]));
  };
  for (const text of input) {
    const pieces = [];
    const result = await session.run(text, { ...options, onText: (piece) => pieces.push(piece) });
    results.push({ ...plain(result), pieces });
  }
  session.close();
  return results;
}"""
"""Load a model and run it on inputs."""


class Handler(http.server.SimpleHTTPRequestHandler):
    """A plain static server, which isolates pages if it is told to."""

    server: Any
    extensions_map = http.server.SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/plain", "": "text/plain"}

    def end_headers(self) -> None:
        if self.server.isolates:
            self.send_header("Cross-Origin-Opener-Policy", "same-origin")
            self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        self.server.asked.append(self.path)


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    """Serve a folder; return the server, with its ``url`` and the paths that were ``asked``."""
    servers: list[Any] = []

    def start(folder: Path, *, isolates: bool = False) -> Any:
        server: Any = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
        )
        server.isolates, server.asked, server.url = isolates, [], f"http://127.0.0.1:{server.server_port}/"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def attest() -> Callable[..., None]:
    """Give a copy of an export the evidence of a browser, as if its native comparison had been made there."""

    def write(folder: Path, variant: str = "", runtime: WebRuntime = "web-wasm", **changes: Any) -> None:
        stored = ModelDirectory.open(folder)
        record = web_record(stored, runtime, variant)
        name = f"parity.{variant}.json" if variant else "parity.json"
        evidence = json.loads((folder / name).read_text())
        files = {file: stored.files[file]["sha256"] for file in evidence["files"]}
        package = find_package(runtime)
        provider = {"provider": package.provider(runtime), "provider_sha256": package.digest()}
        facts = {"files": files, **provider, "browser": "Chromium"}
        with stored.adding(action="verified") as stage:
            write_json(stage / record.evidence_file, evidence | facts | changes)

    return write


@pytest.fixture
def publish(attest: Callable[..., None], onnxruntime_web: Path, tmp_path: Path) -> Callable[..., Path]:
    """Publish a copy of an export, with evidence unless told otherwise."""
    try:
        find_tokenizers()
    except UsageError as error:
        pytest.skip(f"pages need the package ({error})")

    def make(source: Path, *, evidence: bool = True, variant: str = "", **options: Any) -> Path:
        folder = tmp_path / "models" / source.name
        if not folder.exists():
            shutil.copytree(source, folder)
        if evidence:
            attest(folder, variant)
        page = tmp_path / "pages" / f"{source.name}{len(list(tmp_path.glob('pages/*')))}"
        write_web(folder, page, variant=variant, **options)
        return page

    return make


@pytest.fixture
def tab(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a page in a context of its own, and fail if it logs, raises, or asks another server."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def open_(url: str, *, width: int = 1280, theme: str = "light", allow: str = r"(?!)", script: str = "") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda said: None if re.search(allow, said.text) else complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        context.on("request", lambda asked: None if is_own(asked.url, url) else complaints.append(asked.url))
        if script:
            page.add_init_script(script)
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []


def is_own(address: str, url: str) -> bool:
    """Whether an address belongs to the page."""
    return address.startswith((url, "data:", f"blob:{url}"))


@pytest.fixture
def run(serve: Any, tab: Any) -> Callable[..., list[dict[str, Any]]]:
    """Run inputs through the module of a published folder."""

    def call(folder: Path, *inputs: Any, load: Any = None, **options: Any) -> list[dict[str, Any]]:
        url = serve(folder).url
        given = {"url": url, "input": inputs, "options": options, "load": load or {}}
        return list(tab(url).evaluate(CALL, given))

    return call
