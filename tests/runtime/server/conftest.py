"""Models and server processes for tests of ``zoo serve``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.exported import CHAT_TEMPLATE, LIVELY
from tests.runtime.server.caller import train_caller
from zoo.checkpoints.exporting import export_checkpoint
from zoo.checkpoints.importing import import_checkpoint
from zoo_export.export import export_graphs_only
from zoo_export.trace.make import Options

Exported = Callable[..., Path]
POSITIONS = 96
ROWS = 4
SECONDS = 400
"""Time limit for what takes a second on an idle machine."""
KEPT = httpx.Limits(keepalive_expiry=1.0)
"""Limits for clients: the server closes a connection that is idle for 5 s, as httpx does by default. A request that is
sent just then fails."""


@pytest.fixture(scope="session")
def writer(exported_build: Exported, once: Exported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with a chat template, exported for serving with few rows and short chunks."""

    def make() -> Path:
        folder = tmp_path_factory.mktemp("writer")
        built = exported_build("llama-tiny", f"max_seq_len={POSITIONS}", **LIVELY["llama-tiny"])
        export_checkpoint(built, folder / "hub")
        (folder / "hub" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        import_checkpoint(folder / "hub", folder / "writer", verify=False)
        export_graphs_only(folder / "writer", options=Options(profile="serving", fix={"batch": ROWS, "sequence": 7}))
        return folder / "writer"

    return once("writer", "served", make)


@pytest.fixture(scope="session")
def caller(once: Exported, one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder that has learned to call functions, exported for serving."""

    def make() -> Path:
        folder = tmp_path_factory.mktemp("caller")
        import_checkpoint(train_caller(folder / "hub"), folder / "caller", verify=False)
        export_graphs_only(folder / "caller", options=Options(profile="serving", fix={"batch": 4, "sequence": 64}))
        return folder / "caller"

    return once("caller", "served", make)


@pytest.fixture(scope="session")
def served(exported_build: Exported, once: Exported) -> Exported:
    """Build a preset, and export it for all platforms, once for all workers."""

    def export(name: str, **weights: Any) -> Path:
        def make() -> Path:
            folder = exported_build(name, **weights)
            export_graphs_only(folder)
            return folder

        return once(name, ("served", weights), make)

    return export


@pytest.fixture(scope="session")
def translator(served: Exported) -> Path:
    """An encoder-decoder in a portable export, which has no rows."""
    return served("t5-tiny", noise=True, gain=3.0)


@pytest.fixture(scope="session")
def encoder(served: Exported) -> Path:
    """An encoder of texts."""
    return served("bert-tiny", noise=True)


@pytest.fixture(scope="session")
def reader(served: Exported) -> Path:
    """A classifier of images."""
    return served("vit-tiny", noise=True)


class Server:
    """A server process, with the lines of its log."""

    def __init__(self, arguments: Sequence[object], variables: dict[str, str]) -> None:
        code = "import sys; from zoo.cli import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, "serve", "--port", "0", "--threads", "1", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1", **variables}, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of the log with an event."""
        found = [json.loads(line) for line in self.lines if line.startswith("{")]
        return [line for line in found if line["event"] == name]

    def wait_for(self, what: Callable[[], Any]) -> Any:
        """Return the first true value of a function."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            if value := what():
                return value
            assert self.process.poll() is None, self.lines
            time.sleep(0.02)
        raise AssertionError(self.lines)

    @property
    def url(self) -> str:
        """The address on which it listens."""
        (line,) = self.wait_for(lambda: self.events("listening"))
        return str(line["url"])

    def stop(self) -> int:
        """Send SIGTERM, and return the exit status."""
        self.process.terminate()
        status = self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        return status


@contextmanager
def serving(*arguments: object, **variables: str) -> Iterator[Server]:
    """Run a server while the block runs."""
    server = Server(arguments, variables)
    try:
        assert server.url
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="session")
def server(writer: Path, translator: Path, encoder: Path, reader: Path, cache: Path) -> Iterator[Server]:
    """A server with all models."""
    with serving(writer, translator, encoder, reader, "--unverified", "--max-body", 20_000, "--queue", 40) as running:
        yield running
