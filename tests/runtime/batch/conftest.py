"""Folders of inputs, and an engine that runs shards in the test's process."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

HERE = """\
import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_engines():
    return [zoo.Engine(name="here", run="{module}_run:run")]
"""
RUN = """\
from zoo_runtime.batch import run_shard


def run(plan, shards, workers):
    for shard in shards:
        yield run_shard(plan, shard)
"""
STORE = """\
from fsspec.implementations.local import LocalFileSystem


class Store(LocalFileSystem):
    \"\"\"A folder of this machine under another protocol, where files are not replaced but renamed over.\"\"\"

    protocol = "shelf"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("shelf://"))

    def unstrip_protocol(self, name):
        return "shelf://" + self._strip_protocol(name)
"""


@pytest.fixture
def here(install: Callable[..., Path]) -> Callable[..., None]:
    """Install a plugin with the engine ``here``, by default one that runs shards in this process."""

    def make(code: str = RUN) -> None:
        install("zoo-here", HERE, files={"{module}_run.py": code})

    return make


@pytest.fixture
def corpus(tmp_path: Path) -> Callable[..., Path]:
    """Write a folder of files with rows, by name."""

    def make(shards: int = 3, rows: int = 3, *, folder: str = "in") -> Path:
        place = tmp_path / folder
        place.mkdir()
        for shard in range(shards):
            lines = [
                json.dumps({"id": f"{shard}-{row}", "text": "x" * (1 + (5 * shard + row) % 7)}) for row in range(rows)
            ]
            (place / f"s{shard}.jsonl").write_text("".join(line + "\n" for line in lines))
        return place

    return make


@pytest.fixture
def shelf(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a file system ``shelf``, which every process reaches. Return a folder in it."""
    fsspec = pytest.importorskip("fsspec")
    folder = tmp_path_factory.mktemp("shelf")
    info = folder / "zoo_shelf-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo-shelf\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fsspec.specs]\nshelf = zoo_shelf.Store\n")
    (folder / "zoo_shelf.py").write_text(STORE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    fsspec.register_implementation("shelf", "zoo_shelf.Store", clobber=True)
    place = folder / "data"
    place.mkdir()
    return place


def manifest(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a manifest after the first."""
    return [json.loads(line) for line in (folder / "_zoo.manifest").read_text().splitlines()[1:]]


def files(folder: Path) -> dict[str, bytes]:
    """Return the results in a folder, without the manifest."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "_zoo.manifest"}


def start(model: Path, source: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "zoo", "run", str(model), "--input", str(source), "--output", "out", *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def kill_some(
    run: subprocess.Popen[str], workers_of: Callable[..., list[psutil.Process]], count: int, *, seed: int, done: int
) -> int:
    """Kill workers at random until ``count`` are dead; then kill the run, once some files are done."""
    chance = random.Random(seed)
    killed: set[int] = set()
    while run.poll() is None and len(killed) < count:
        workers = [worker for worker in workers_of(run) if worker.pid not in killed]
        if workers:
            worker = chance.choice(workers)
            worker.send_signal(signal.SIGKILL)
            killed.add(worker.pid)
        if len(killed) < count:
            time.sleep(chance.uniform(0.2, 1.2))
    while run.poll() is None and len(list(Path("out").glob("s*"))) < done:
        time.sleep(0.02)
    run.kill()
    run.communicate()
    return len(killed)
