"""Functions of zoo that read a hostile file, as its commands do. Each takes the path of the file.

An ``AssertionError`` of theirs is a violation that no exception of zoo shows.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import io
import json
from collections.abc import Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.hostile.attacks.samples import PLAN
from zoo.artifact import ModelDirectory
from zoo.artifact.outputs import check_output_target
from zoo.artifact.weights import read_header
from zoo.audio import AudioReader
from zoo.figures.attention_page import attention_page
from zoo.images import ImageReader
from zoo.memo import Memo
from zoo.registry import registry
from zoo.training.launch import resume
from zoo_runtime import load_session
from zoo_runtime.batch.folders import open_folder
from zoo_runtime.batch.manifest import Manifest
from zoo_runtime.files.rows import column_types, count_rows
from zoo_runtime.files.rows import read_rows as rows_of
from zoo_runtime.files.vector_search import search_vectors
from zoo_runtime.recorded.replay import feeds_of
from zoo_runtime.recorded.sample import parse
from zoo_runtime.server.config import read_config
from zoo_runtime.server.http.app import make_app
from zoo_runtime.server.http.service import RequestLimits, Service
from zoo_runtime.server.models import ModelPlace, ModelSettings, ServedModels

_ANSWER = 400_000
"""Largest response of the server in bytes."""


def header(path: Path) -> None:
    """Read the places of tensors."""
    read_header(path)


def recorded(path: Path) -> None:
    """Read the sample of a comparison, which the file holds uncompressed, and make its inputs."""
    graphs = ModelDirectory.open(path.parents[1] / "model").spec.graphs
    sample = parse(gzip.compress(path.read_bytes()), graphs, path)
    for call in sample.calls:
        feeds_of(sample, call, graphs, np.dtype(np.float32))


def opened(path: Path) -> None:
    """Open a model directory as most commands do."""
    stored = ModelDirectory.open(path.parent)
    _ = stored.spec.graphs, stored.origin, stored.layout


def ran(path: Path) -> None:
    """Run a verified export."""
    _run(path, unverified=False)


def ran_unverified(path: Path) -> None:
    """Run an export that the user has chosen to trust."""
    _run(path, unverified=True)


def _run(path: Path, *, unverified: bool) -> None:
    with load_session(path.parent, threads=1, unverified=unverified) as session:
        session.run([[1, 2, 3]], max_new_tokens=2)


def rows(path: Path) -> None:
    """Read every row of a file of inputs, with and without all its columns, and count them."""
    for keep in (False, True):
        for row in rows_of(str(path), "text", keep=keep):
            assert row.error is None or len(str(row.error)) < 2000, f"a message of {len(str(row.error))} characters"
    column_types(str(path))
    count_rows(str(path))


def image(path: Path) -> None:
    """Read an image as a vision model does."""
    settings: Mapping[str, Any] = {"image_resize": "shortest_edge", "image_crop": 0.9}
    ImageReader.of(settings.get, 3, 8, 8).read(path)


def sound(path: Path) -> None:
    """Read a sound as a speech model does."""
    AudioReader().read(path)


def vectors(path: Path) -> None:
    """Search in a file of vectors."""
    search_vectors(path, np.ones(8), top_k=2)


def presets(path: Path) -> None:
    """Resolve every preset of the working directory's zoo.toml, which is the sample's."""
    found = registry()
    for name in ("mine", "other"):
        _ = found.resolve(name).graphs


def server_settings(path: Path) -> None:
    """Read the settings of zoo serve."""
    read_config(path)


def attention(path: Path) -> None:
    """Make a page with the attention weights of a hostile text, which may not end a script of the page."""
    text = (_texts(path) or [""])[0][:14]
    assert attention_page("seen", text).html.count("</script") == _page().count("</script"), "the text ends a script"


@functools.cache
def _page() -> str:
    return attention_page("seen", "plain").html


def batch_manifest(path: Path) -> None:
    """Continue a batch."""
    folder = open_folder(str(path.parent))
    with folder.locked():
        Manifest(folder, PLAN, str(path.parent), resume=True)


def record(path: Path) -> None:
    """Decide whether a published directory may be replaced."""
    check_output_target(path.parent, "publish --layout standalone", force=True)


def cache(path: Path) -> None:
    """Use a damaged cache, which is ignored."""
    Memo(path.name).get("x")


def training_state(path: Path) -> None:
    """Continue an unfinished run."""
    run = resume(path.parent)
    run.release()


def _texts(path: Path) -> list[str]:
    """Return the texts in a mutated JSON list that could be arguments of a process."""
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        values = path.read_bytes().decode("utf-8", "surrogateescape").split()
    texts = [str(value) for value in (values if isinstance(values, list) else [values])]
    return [text.replace("\0", "").encode("utf-8", "replace").decode()[:100_000] for text in texts[:20]]


def settings(path: Path) -> tuple[str, ...]:
    """Return a command with hostile settings of a configuration."""
    return ("show", "gpt-tiny", *(part for text in _texts(path) for part in ("--set", text)))


def options(path: Path) -> tuple[str, ...]:
    """Return a command with hostile options of a task."""
    given = (part for text in _texts(path) for part in ("--option", text))
    return ("run", "model", "--ids", "1,2,3", "--max-new-tokens", "2", "--threads", "1", *given)


class _Server:
    """The application of ``zoo serve``, called in this process."""

    def __init__(self) -> None:
        models = ServedModels(ModelSettings())
        models.replace([ModelPlace("model", Path("model"), {"threads": 1})])
        self._app = make_app(Service(models, RequestLimits(tokens=8, seconds=20.0)))
        self._runner = asyncio.Runner()

    def post(self, path: str, body: bytes) -> httpx.Response:
        """Send a request."""

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.post(path, content=body, headers={"content-type": "application/json"})

        return self._runner.run(ask())


@functools.cache
def _server() -> _Server:
    return _Server()


def body(path: Path) -> None:
    """Send a body to the route that its name tells. Statuses from 500 on are violations, and other answers are JSON."""
    route = "/" + path.stem.replace("-", "/")
    log = io.StringIO()
    with redirect_stderr(log):
        answer = _server().post(route, path.read_bytes())
    assert answer.status_code < 500, f"status {answer.status_code}: {answer.text[:300]}"
    assert len(answer.content) < _ANSWER, f"an answer of {len(answer.content)} bytes"
    if answer.headers["content-type"].startswith("application/json"):
        answer.json()
    for line in log.getvalue().splitlines():
        assert isinstance(json.loads(line), dict), line[:300]
        assert len(line) < 4000, f"a line of {len(line)} characters in the log"
