"""Tracing in a process of its own."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.conftest import Result
from zoo.artifact import EVIDENCE_KEY, ModelDirectory
from zoo_export.graph.metadata import metadata
from zoo_export.trace import cache
from zoo_export.trace.make import make_graphs, tracing_apart

Zoo = Callable[..., Result]
EXPORT = """
import os, sys
from zoo.cli import main
forks = []
os.register_at_fork(before=lambda: forks.append("torch" in sys.modules))
status = main(["export", "model", "--onnx", "--json"])
print(forks, "torch._dynamo" in sys.modules)
sys.exit(status)
"""


@pytest.mark.slow
def test_graphs_of_another_process(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command imports PyTorch once and traces apart, so that it never imports its compiler; the graphs are equal."""
    monkeypatch.setenv("ZOO_CACHE", "off")
    assert zoo("build", "gpt-tiny", "-o", "model").status == 0
    done = subprocess.run([sys.executable, "-c", EXPORT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[True] False"
    exported = Path("model/model.onnx").read_bytes()
    made = make_graphs(ModelDirectory.open(Path("model")))["model"]
    assert EVIDENCE_KEY in metadata(exported)
    assert _graph(exported) == _graph(made)


def _graph(data: bytes) -> bytes:
    import onnx

    model = onnx.load_model_from_string(data)
    del model.metadata_props[:]
    return model.SerializeToString(deterministic=True)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("starts", [True, False])
def test_libraries_with_threads(starts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which the imports of a trace have started a thread is not forked: the other would lack it."""
    ends, forks = threading.Event(), []

    def import_shared() -> None:
        if starts:
            _thread.start_new_thread(ends.wait, ())  # one that threading does not count

    @contextmanager
    def computing_apart(_: Callable[[], bytes]) -> Iterator[Callable[[], None]]:
        forks.append(True)
        yield lambda: None

    monkeypatch.setattr("zoo_export.trace.make._imported", lambda: False)
    monkeypatch.setattr("zoo_export.trace.make._import_shared", import_shared)
    monkeypatch.setattr("zoo_export.trace.make.computing_apart", computing_apart)
    monkeypatch.setattr("zoo_export.trace.make.make_graphs", lambda *_: {"model": b"here"})
    try:
        with tracing_apart(Mock()) as graphs:
            assert graphs() == {"model": b"here"}
    finally:
        ends.set()
    assert forks == [True] * (not starts)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [True, False])
def test_cached_results_of_another_process(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """A comparison that fails with them is repeated without them; without another process, this one traces."""
    from zoo.errors import ParityError

    assert zoo("build", "gpt-tiny", "-o", "model").status == 0
    stored = ModelDirectory.open(Path("model"))
    wanted = make_graphs(stored)  # cached now
    monkeypatch.setattr("zoo_export.trace.make._imported", lambda: False)
    calls = []

    def export() -> None:
        with tracing_apart(stored) as graphs:
            calls.append(graphs() == wanted)
        if fails and len(calls) == 1:
            raise ParityError("fails", stored.path)

    cache.repeat_if_stale(export)
    assert calls == [True] * (2 if fails else 1)
