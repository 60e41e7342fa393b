"""Tracing in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from zoo.artifact import EVIDENCE_KEY, ModelDirectory
from zoo_export.graph.metadata import metadata
from zoo_export.trace import cache
from zoo_export.trace.make import make_graphs, tracing_apart

Zoo = Callable[..., Result]
EXPORT = """
import sys
from zoo.cli import main
status = main(["export", "model", "--onnx", "--json"])
print("torch" in sys.modules, "torch._dynamo" in sys.modules)
sys.exit(status)
"""


@pytest.mark.slow
def test_graphs_of_another_process(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command traces apart, so that its own process never imports PyTorch's compiler; the graphs are the same."""
    monkeypatch.setenv("ZOO_CACHE", "off")
    assert zoo("build", "gpt-tiny", "-o", "model").status == 0
    done = subprocess.run([sys.executable, "-c", EXPORT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True False"
    exported = Path("model/model.onnx").read_bytes()
    made = make_graphs(ModelDirectory.open(Path("model")))["model"]
    assert EVIDENCE_KEY in metadata(exported)
    assert _graph(exported) == _graph(made)


def _graph(data: bytes) -> bytes:
    import onnx

    model = onnx.load_model_from_string(data)
    del model.metadata_props[:]
    return model.SerializeToString(deterministic=True)


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
